"""What the ranks of a group exchange inside a model, forward and backward, each under the phase communication; in FP8,
too: as codes, which are added up in float32.

Each exchange is the other way round in backward: where a tensor is copied to all ranks their gradients are added up,
and where tensors are added up the gradient is everybody's. The same for tokens that are gathered or scattered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fp8bench.numerics.collectives import newest
from fp8bench.numerics.fp8_reduce import (
    POST,
    TWOSHOT,
    AutoScale,
    Pieces,
    mean_in_fp8,
    mean_of_tensors,
    tensors_transported,
    transported,
)
from fp8bench.numerics.rank_programs import Program, on_this_rank, simulated
from fp8bench.protocols import Phases, SilentPhases

_TOKENS = 1
Exchange = Callable[[Tensor], Tensor]


def is_silent(group: dist.ProcessGroup) -> bool:
    """Whether nothing is sent in it: all ranks are then taken to be alike."""
    return str(dist.get_backend(group)) == "fake"


@dataclass
class RankGroup:
    """The ranks that share a model's blocks, this one among them. `phase` has the markers of the step that runs."""

    handle: dist.ProcessGroup
    phase: Phases = field(default_factory=SilentPhases)

    def __post_init__(self) -> None:
        self.rank, self.size = self.handle.rank(), self.handle.size()

    @property
    def silent(self) -> bool:
        return is_silent(self.handle)

    def added(self, x: Tensor) -> Tensor:
        with self.phase.communication:
            whole = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(whole, group=self.handle)
            return whole

    def largest(self, x: Tensor) -> Tensor:
        with self.phase.communication:
            whole = x.clone()
            dist.all_reduce(whole, dist.ReduceOp.MAX, group=self.handle)
            return whole

    def everybodys(self, x: Tensor) -> list[Tensor]:
        if self.silent:
            return [x] * self.size
        with self.phase.communication:
            parts = [torch.empty_like(x) for _ in range(self.size)]
            dist.all_gather(parts, x, group=self.handle)
            return parts

    def gathered(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) of everybody's tokens, by rank."""
        return self.all_parts(x).movedim(0, _TOKENS).flatten(_TOKENS, _TOKENS + 1)

    def scattered(self, x: Tensor) -> Tensor:
        """Of the sum of everybody's (batch, tokens, width) this rank's tokens."""
        return self.own_part(torch.stack(x.chunk(self.size, _TOKENS)))

    def all_parts(self, x: Tensor) -> Tensor:
        """(ranks, ...) of everybody's."""
        with self.phase.communication:
            parts = x.new_empty(self.size, *x.shape)
            newest("all_gather_single", "all_gather_into_tensor")(parts, x.contiguous()[None], group=self.handle)
            return parts

    def own_part(self, parts: Tensor) -> Tensor:
        """Of the sum of everybody's (ranks, ...) this rank's."""
        with self.phase.communication:
            own = parts.new_empty(1, *parts.shape[1:])
            newest("reduce_scatter_single", "reduce_scatter_tensor")(own, parts, group=self.handle)
            return own[0]

    def handed(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """So many of its rows to each rank, by rank; and those that each has sent here."""
        with self.phase.communication:
            got = x.new_zeros(sum(received), *x.shape[1:])
            if not self.silent:
                dist.all_to_all_single(got, x.contiguous(), list(received), list(sent), group=self.handle)
            return got

    def to_owners(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """The sum of everybody's, each in its owner's place alone; what others have of it is anything."""
        with self.phase.communication:
            pairs = zip(tensors, owners, strict=True)
            _wait(dist.reduce(tensor, group=self.handle, group_dst=owner, async_op=True) for tensor, owner in pairs)

    def from_owners(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Each as its owner has it, in everybody's place."""
        with self.phase.communication:
            pairs = zip(tensors, owners, strict=True)
            _wait(dist.broadcast(tensor, group=self.handle, group_src=owner, async_op=True) for tensor, owner in pairs)

    def added_together(self, gradients: Sequence[Tensor]) -> None:
        """In place, in one message."""
        own = [gradient.view(-1) for gradient in gradients]
        whole = self.added(torch.cat(own))
        torch._foreach_copy_(own, list(torch.split(whole, [tensor.numel() for tensor in own])))

    def own(self, x: Tensor) -> Tensor:
        """This rank's tokens of (batch, tokens, ...)."""
        return x.chunk(self.size, _TOKENS)[self.rank]


def _wait(begun: Iterable[dist.Work | None]) -> None:
    """For all of them, of which none waits for another to begin."""
    for work in list(begun):
        if work is not None:
            work.wait()


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Exchange, back: Exchange) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(gradients[0]), None, None


def _exchanged(x: Tensor, there: Exchange, back: Exchange) -> Tensor:
    y: Tensor = _Exchanged.apply(x, there, back)  # type: ignore[no-untyped-call]
    return y


def copied(x: Tensor, group: RankGroup) -> Tensor:
    """To all ranks, which have it already; their gradients are added up."""
    return _exchanged(x, lambda whole: whole.view_as(whole), group.added)


def added(x: Tensor, group: RankGroup) -> Tensor:
    """Of all ranks; the gradient is everybody's."""
    return _exchanged(x, group.added, lambda gradient: gradient)


def gathered(x: Tensor, group: RankGroup) -> Tensor:
    """The tokens of all ranks; of the gradients' sum each gets its own."""
    return _exchanged(x, group.gathered, group.scattered)


def scattered(x: Tensor, group: RankGroup) -> Tensor:
    """Of the sum of all ranks this one's tokens; gradients are gathered."""
    return _exchanged(x, group.scattered, group.gathered)


def said_by_all(own: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank of a group says, in the order of ranks: as JSON, because torch unpickles what it is sent of
    anything else. Tuples come as lists."""
    text = json.dumps(own).encode()
    size = dist.get_world_size(group)
    lengths = list(torch.zeros(size, 1, dtype=torch.int64))
    dist.all_gather(lengths, torch.tensor([len(text)]), group)
    longest = max(map(int, lengths))
    texts = list(torch.zeros(size, longest, dtype=torch.uint8))
    dist.all_gather(texts, torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8), group)
    return [json.loads(bytes(codes.tolist())) for codes in texts]


def first_of_all(mistake: str, group: dist.ProcessGroup) -> str:
    """Of what each rank says, that of the first that says anything, with its number."""
    everybody = enumerate(said_by_all(mistake, group))
    return next((f"rank {rank} {said}" for rank, said in everybody if said), "")


def handed(x: Tensor, there: Exchange, back: Exchange) -> Tensor:
    """Rows to other ranks; gradients come back as the rows went."""
    return _exchanged(x, there, back)


# What a rank does with its values, by its number.
OfRank = Callable[[Tensor, int], Program[Tensor]]


class FP8Wire:
    """Exchanges of float32 vectors by programs of numerics/fp8_reduce.py, over a group."""

    def __init__(self, group: dist.ProcessGroup, way: str = TWOSHOT) -> None:
        self.group, self.way = group, way
        self._rank, self._size = group.rank(), group.size()
        self._witness: WireWitness | None = None

    def mean(self, values: Tensor, phase: Phases) -> Tensor:
        return self._sent(self.mean_of, values, phase)

    def part_of_mean(self, values: Tensor, phase: Phases) -> Tensor:
        """This rank's part of it, of as many as there are ranks."""
        return self._sent(self._part_of, values, phase)

    def joined(self, part: Tensor, phase: Phases) -> Tensor:
        """Everybody's parts, by rank, with a scale each."""
        return self._sent(self._joined_of, part, phase)

    def own_tensors_of_mean(self, values: Tensor, pieces: Sequence[Pieces], phase: Phases) -> Tensor:
        """Of tensors that lie behind each other by their ranks the mean of this rank's, with a scale for each."""
        return self._sent(lambda own, rank: mean_of_tensors(own, rank, pieces), values, phase)

    def joined_tensors(self, part: Tensor, pieces: Sequence[Pieces], phase: Phases) -> Tensor:
        """Everybody's parts, by rank, with a scale for each tensor in them."""
        return self._sent(lambda values, rank: tensors_transported(values, rank, pieces), part, phase)

    def watched(self) -> WireWitness:
        """What looks from now on at all that this rank gets."""
        self._witness = WireWitness(self.group)
        return self._witness

    def mean_of(self, values: Tensor, rank: int) -> Program[Tensor]:
        padded = torch.nn.functional.pad(values, (0, -values.numel() % self._size))
        mean = yield from mean_in_fp8(self.way, padded, POST, rank, self._size, AutoScale())
        return mean.values[: values.numel()]

    def _part_of(self, values: Tensor, rank: int) -> Program[Tensor]:
        mean = yield from mean_in_fp8(TWOSHOT, values, POST, rank, self._size, AutoScale(), whole=False)
        return mean.values

    def _joined_of(self, part: Tensor, rank: int) -> Program[Tensor]:
        joined = yield from transported(part)
        return joined.values

    def _sent(self, program: OfRank, own: Tensor, phase: Phases) -> Tensor:
        with phase.cast:
            got = self._result(program(own, self._rank), phase)
        if self._witness is not None:
            self._witness.look(own, got, program)
        return got

    def _result(self, program: Program[Tensor], phase: Phases) -> Tensor:
        return on_this_rank(program, None, phase.communication, self.group)


class FP8Group(RankGroup):
    """A group that adds up, gathers and scatters in FP8, and hands back what it was given in."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.wire = FP8Wire(self.handle)

    def added(self, x: Tensor) -> Tensor:
        return (self.wire.mean(_flat(x), self.phase) * self.size).view(x.shape).to(x.dtype)

    def all_parts(self, x: Tensor) -> Tensor:
        return self.wire.joined(_flat(x), self.phase).view(self.size, *x.shape).to(x.dtype)

    def own_part(self, parts: Tensor) -> Tensor:
        return (self.wire.part_of_mean(_flat(parts), self.phase) * self.size).view(parts.shape[1:]).to(parts.dtype)


class WireWitness:
    """Holds what a rank got against what one process comes to of all ranks' values, by the same program, bit for
    bit."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._wrong = group, ""

    def look(self, own: Tensor, got: Tensor, program: OfRank) -> None:
        """All ranks look at every exchange: they ask each other."""
        everybody = _of_any_length(own, self._group)
        wanted = simulated([program(tensor, rank) for rank, tensor in enumerate(everybody)])[self._group.rank()]
        wrong = int((got != wanted).sum())
        if wrong and not self._wrong:
            self._wrong = f"has got {wrong:,} of {got.numel():,} numbers in FP8 that are not those of all ranks' values"

    def mistake(self) -> str:
        return first_of_all(self._wrong, self._group)


def _of_any_length(own: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Everybody's vector, which may have another length."""
    lengths = said_by_all(len(own), group)
    padded = torch.nn.functional.pad(own, (0, max(lengths) - len(own)))
    return [tensor[:length] for tensor, length in zip(RankGroup(group).everybodys(padded), lengths, strict=True)]


def _flat(x: Tensor) -> Tensor:
    return x.to(torch.float32).flatten()


T = TypeVar("T")


class OwnedTensors:
    """Tensors by their places in a model, of so many numbers each; `wire` is what they travel in."""

    def __init__(self, group: RankGroup, sizes: Sequence[int], wire: str) -> None:
        self._group, self.owners = group, owners(sizes, group.size)
        self.fp8 = FP8Wire(group.handle) if wire == "fp8" else None
        self.sent_as = torch.bfloat16 if wire == "bf16" else torch.float32
        owned = [self.of(owner, sizes) for owner in range(group.size)]
        self._pieces = [Pieces(some, max(map(len, owned))) for some in owned]

    def of(self, owner: int, some: Sequence[T]) -> list[T]:
        """Of what there is for each tensor that of an owner's."""
        return [value for value, place in zip(some, self.owners, strict=True) if place == owner]

    def own(self, some: Sequence[T]) -> list[T]:
        return self.of(self._group.rank, some)

    def means(self, gradients: Sequence[Tensor], phase: Phases) -> list[Tensor]:
        """Over all ranks, of the tensors that this one owns; what was given may be overwritten."""
        if self.fp8 is not None:
            by_owner = [_row(self.of(owner, gradients)) for owner in range(self._group.size)]
            own_means = self.fp8.own_tensors_of_mean(torch.cat(by_owner), self._pieces, phase)
            return _apart(own_means, self.own(gradients))
        self._group.phase = phase
        with phase.cast:
            sent = [gradient.to(self.sent_as) for gradient in gradients]  # themselves in float32
        self._group.to_owners(sent, self.owners)
        means = [tensor.to(torch.float32) for tensor in self.own(sent)]
        torch._foreach_div_(means, self._group.size)
        return means

    def put(self, own: Sequence[Tensor], wholes: Sequence[Tensor], phase: Phases) -> None:
        """What each owner has of its tensors into those of all, on every rank as it was sent."""
        if self.fp8 is not None:
            every = self.fp8.joined_tensors(_row(own), self._pieces, phase)
            for owner, row in enumerate(torch.split(every, [some.size for some in self._pieces])):
                theirs = self.of(owner, wholes)
                torch._foreach_copy_(theirs, _apart(row, theirs))
            return
        self._group.phase = phase
        with phase.cast:
            sent = [tensor.to(self.sent_as) for tensor in self.newest(own, wholes)]
        self._group.from_owners(sent, self.owners)
        pairs = [(whole, tensor) for whole, tensor in zip(wholes, sent, strict=True) if whole is not tensor]
        if pairs:
            torch._foreach_copy_([whole for whole, _ in pairs], [tensor for _, tensor in pairs])

    def newest(self, own: Sequence[Tensor], wholes: Sequence[Tensor]) -> list[Tensor]:
        """All tensors, those of this rank as it has them."""
        mine = iter(own)
        return [
            next(mine) if owner == self._group.rank else whole for owner, whole in zip(self.owners, wholes, strict=True)
        ]


def owners(elements: Sequence[int], ranks: int) -> list[int]:
    """For each tensor the rank that owns it: the largest first, each to whoever has least so far."""
    owned, owner = [0] * ranks, [0] * len(elements)
    for place in sorted(range(len(elements)), key=lambda number: (-elements[number], number)):
        owner[place] = owned.index(min(owned))
        owned[owner[place]] += elements[place]
    return owner


def _row(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _apart(row: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    sizes = [tensor.numel() for tensor in like]
    return [piece.view_as(tensor) for piece, tensor in zip(torch.split(row, sizes), like, strict=True)]
