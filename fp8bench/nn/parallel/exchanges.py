"""Exchanges between the ranks of a group inside a model, forward and backward, under the phase communication. In FP8
they exchange codes, which are added up in float32.

Each exchange is reversed in backward: where a tensor is copied to all ranks their gradients are added up, and where
tensors are added up each rank gets the gradient whole. The same holds for tokens that are gathered or scattered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fp8bench.numerics.collectives import (
    POST,
    TWOSHOT,
    AutoScale,
    Pieces,
    mean_in_fp8,
    mean_of_tensors,
    newest,
    transport,
    transport_tensors,
)
from fp8bench.numerics.rank_programs import Program, on_this_rank, simulate
from fp8bench.protocols import Phases, SilentPhases

_TOKENS = 1
Exchange = Callable[[Tensor], Tensor]


def is_silent(group: dist.ProcessGroup) -> bool:
    """Whether the group sends nothing: all ranks are then taken to be alike."""
    return str(dist.get_backend(group)) == "fake"


@dataclass
class RankGroup:
    """The ranks that share a model's blocks. `phase` has the markers of the running step."""

    handle: dist.ProcessGroup
    phase: Phases = field(default_factory=SilentPhases)

    def __post_init__(self) -> None:
        self.rank, self.size = self.handle.rank(), self.handle.size()

    @property
    def silent(self) -> bool:
        return is_silent(self.handle)

    def add_over_ranks(self, x: Tensor) -> Tensor:
        with self.phase.communication:
            total = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, group=self.handle)
            return total

    def largest(self, x: Tensor) -> Tensor:
        with self.phase.communication:
            maximum = x.clone()
            dist.all_reduce(maximum, dist.ReduceOp.MAX, group=self.handle)
            return maximum

    def all_of(self, x: Tensor) -> list[Tensor]:
        if self.silent:
            return [x] * self.size
        with self.phase.communication:
            parts = [torch.empty_like(x) for _ in range(self.size)]
            dist.all_gather(parts, x, group=self.handle)
            return parts

    def gather(self, x: Tensor) -> Tensor:
        return self.all_parts(x).movedim(0, _TOKENS).flatten(_TOKENS, _TOKENS + 1)

    def scatter(self, x: Tensor) -> Tensor:
        return self.own_part(torch.stack(x.chunk(self.size, _TOKENS)))

    def all_parts(self, x: Tensor) -> Tensor:
        with self.phase.communication:
            parts = x.new_empty(self.size, *x.shape)
            newest("all_gather_single", "all_gather_into_tensor")(parts, x.contiguous()[None], group=self.handle)
            return parts

    def own_part(self, parts: Tensor) -> Tensor:
        with self.phase.communication:
            part = parts.new_empty(1, *parts.shape[1:])
            newest("reduce_scatter_single", "reduce_scatter_tensor")(part, parts, group=self.handle)
            return part[0]

    def exchanged_rows(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Sends rows of x to each rank, as many as `sent` has for it; returns the rows that each has sent here."""
        with self.phase.communication:
            got = x.new_zeros(sum(received), *x.shape[1:])
            if not self.silent:
                dist.all_to_all_single(got, x.contiguous(), list(received), list(sent), group=self.handle)
            return got

    def to_owners(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Reduces each tensor to its owner in place; other ranks' copies are undefined afterwards."""
        with self.phase.communication:
            pairs = zip(tensors, owners, strict=True)
            _wait(dist.reduce(tensor, group=self.handle, group_dst=owner, async_op=True) for tensor, owner in pairs)

    def from_owners(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        with self.phase.communication:
            pairs = zip(tensors, owners, strict=True)
            _wait(dist.broadcast(tensor, group=self.handle, group_src=owner, async_op=True) for tensor, owner in pairs)

    def added_together(self, gradients: Sequence[Tensor]) -> None:
        flat = [gradient.view(-1) for gradient in gradients]
        total = self.add_over_ranks(torch.cat(flat))
        torch._foreach_copy_(flat, list(torch.split(total, [tensor.numel() for tensor in flat])))

    def own(self, x: Tensor) -> Tensor:
        return x.chunk(self.size, _TOKENS)[self.rank]


def _wait(works: Iterable[dist.Work | None]) -> None:
    """Begins all of them before it waits for the first."""
    for work in list(works):
        if work is not None:
            work.wait()


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_exchange: Exchange, back: Exchange) -> Tensor:
        ctx.back = back
        return forward_exchange(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(gradients[0]), None, None


def exchange(x: Tensor, forward: Exchange, backward: Exchange) -> Tensor:
    return _Exchanged.apply(x, forward, backward)  # type: ignore[no-untyped-call]


def copy_to_ranks(x: Tensor, group: RankGroup) -> Tensor:
    return exchange(x, lambda y: y.view_as(y), group.add_over_ranks)


def add_over_ranks(x: Tensor, group: RankGroup) -> Tensor:
    return exchange(x, group.add_over_ranks, lambda gradient: gradient)


def gather(x: Tensor, group: RankGroup) -> Tensor:
    return exchange(x, group.gather, group.scatter)


def scatter(x: Tensor, group: RankGroup) -> Tensor:
    return exchange(x, group.scatter, group.gather)


def all_answers(answer: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns the answers of all ranks of a group, in their order; tuples become lists. They travel as JSON, because
    torch would unpickle any other object."""
    text = json.dumps(answer).encode()
    size = dist.get_world_size(group)
    lengths = list(torch.zeros(size, 1, dtype=torch.int64))
    dist.all_gather(lengths, torch.tensor([len(text)]), group)
    longest = max(map(int, lengths))
    texts = list(torch.zeros(size, longest, dtype=torch.uint8))
    dist.all_gather(texts, torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8), group)
    return [json.loads(bytes(codes.tolist())) for codes in texts]


def first_mistake(mistake: str, group: dist.ProcessGroup) -> str:
    for rank, answer in enumerate(all_answers(mistake, group)):
        if answer:
            return f"rank {rank} {answer}"
    return ""


# The program of one rank, from its values and its number.
OfRank = Callable[[Tensor, int], Program[Tensor]]


class FP8Wire:
    """Exchanges float32 vectors over a group by the programs of numerics/collectives.py."""

    def __init__(self, group: dist.ProcessGroup, algorithm: str = TWOSHOT) -> None:
        self.group = group
        self.way = algorithm
        self._rank = group.rank()
        self._size = group.size()
        self._witness: WireWitness | None = None

    def watch(self) -> WireWitness:
        self._witness = WireWitness(self.group)
        return self._witness

    def mean_of(self, values: Tensor, rank: int) -> Program[Tensor]:
        padded = torch.nn.functional.pad(values, (0, -values.numel() % self._size))
        mean = yield from mean_in_fp8(self.way, padded, POST, rank, self._size, AutoScale())
        return mean.values[: values.numel()]

    def part_of(self, values: Tensor, rank: int) -> Program[Tensor]:
        mean = yield from mean_in_fp8(TWOSHOT, values, POST, rank, self._size, AutoScale(), whole=False)
        return mean.values

    def join(self, part: Tensor, rank: int) -> Program[Tensor]:
        joined = yield from transport(part)
        return joined.values

    def send(self, program: OfRank, values: Tensor, phase: Phases) -> Tensor:
        """Returns this rank's result of a program that all ranks run together."""
        with phase.cast:
            got = self._result(program(values, self._rank), phase)
        if self._witness is not None:
            self._witness.look(values, got, program)
        return got

    def _result(self, program: Program[Tensor], phase: Phases) -> Tensor:
        return on_this_rank(program, None, phase.communication, self.group)


class FP8Group(RankGroup):
    """A group that sums, gathers and scatters in FP8; results have the dtype of their inputs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.wire = FP8Wire(self.handle)

    def add_over_ranks(self, x: Tensor) -> Tensor:
        return (self._send(self.wire.mean_of, x) * self.size).view(x.shape).to(x.dtype)

    def all_parts(self, x: Tensor) -> Tensor:
        return self._send(self.wire.join, x).view(self.size, *x.shape).to(x.dtype)

    def own_part(self, parts: Tensor) -> Tensor:
        return (self._send(self.wire.part_of, parts) * self.size).view(parts.shape[1:]).to(parts.dtype)

    def _send(self, program: OfRank, x: Tensor) -> Tensor:
        return self.wire.send(program, x.to(torch.float32).flatten(), self.phase)


class WireWitness:
    """Compares what a rank received with what one process computes from all ranks' values by the same program, bit for
    bit."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._wrong = ""

    def look(self, values: Tensor, got: Tensor, program: OfRank) -> None:
        """All ranks have to call this for every exchange, because they ask each other for their values."""
        lengths = all_answers(len(values), self._group)  # vectors may differ in length
        padded = torch.nn.functional.pad(values, (0, max(lengths) - len(values)))
        all_padded = RankGroup(self._group).all_of(padded)
        everybody = [tensor[:length] for tensor, length in zip(all_padded, lengths, strict=True)]
        expected = simulate([program(tensor, rank) for rank, tensor in enumerate(everybody)])[self._group.rank()]
        wrong = int((got != expected).sum())
        if wrong and not self._wrong:
            self._wrong = f"has got {wrong:,} of {got.numel():,} numbers in FP8 that are not those of all ranks' values"

    def mistake(self) -> str:
        return first_mistake(self._wrong, self._group)


T = TypeVar("T")


class OwnedTensors:
    """Tensors with one owner each, given by their numbers of elements; `wire` is the format that they travel in."""

    def __init__(self, group: RankGroup, sizes: Sequence[int], wire: str) -> None:
        self._group = group
        self.owners = owners(sizes, group.size)
        self.fp8 = FP8Wire(group.handle) if wire == "fp8" else None
        self.sent_as = torch.bfloat16 if wire == "bf16" else torch.float32
        owned = [self.of(owner, sizes) for owner in range(group.size)]
        self._pieces = [Pieces(some, max(map(len, owned))) for some in owned]

    def of(self, owner: int, some: Sequence[T]) -> list[T]:
        return [value for value, place in zip(some, self.owners, strict=True) if place == owner]

    def own(self, some: Sequence[T]) -> list[T]:
        return self.of(self._group.rank, some)

    def means(self, gradients: Sequence[Tensor], phase: Phases) -> list[Tensor]:
        """The means over all ranks of the tensors that this one owns; `gradients` may be overwritten."""
        if self.fp8 is not None:
            by_owner = [_row(self.of(owner, gradients)) for owner in range(self._group.size)]
            mean = partial(mean_of_tensors, pieces=self._pieces)
            return _apart(self.fp8.send(mean, torch.cat(by_owner), phase), self.own(gradients))
        self._group.phase = phase
        with phase.cast:
            sent = [gradient.to(self.sent_as) for gradient in gradients]  # no copies in float32
        self._group.to_owners(sent, self.owners)
        means = [tensor.to(torch.float32) for tensor in self.own(sent)]
        torch._foreach_div_(means, self._group.size)
        return means

    def put(self, owned: Sequence[Tensor], wholes: Sequence[Tensor], phase: Phases) -> None:
        """Copies each owner's tensors into `wholes` on every rank, the owner included, in the precision of the wire."""
        if self.fp8 is not None:
            every = self.fp8.send(partial(transport_tensors, pieces=self._pieces), _row(owned), phase)
            for owner, row in enumerate(torch.split(every, [some.size for some in self._pieces])):
                theirs = self.of(owner, wholes)
                torch._foreach_copy_(theirs, _apart(row, theirs))
            return
        self._group.phase = phase
        with phase.cast:
            sent = [tensor.to(self.sent_as) for tensor in self.newest(owned, wholes)]
        self._group.from_owners(sent, self.owners)
        # A tensor that was sent without a conversion is in place already.
        pairs = [(weight, tensor) for weight, tensor in zip(wholes, sent, strict=True) if weight is not tensor]
        if pairs:
            torch._foreach_copy_([weight for weight, _ in pairs], [tensor for _, tensor in pairs])

    def newest(self, owned: Sequence[Tensor], wholes: Sequence[Tensor]) -> list[Tensor]:
        mine = iter(owned)
        return [
            next(mine) if owner == self._group.rank else weight
            for owner, weight in zip(self.owners, wholes, strict=True)
        ]


def owners(elements: Sequence[int], ranks: int) -> list[int]:
    """Chooses the owner of each tensor: the largest first, each to the rank with the fewest elements at that time."""
    owned = [0] * ranks
    owner = [0] * len(elements)
    for place in sorted(range(len(elements)), key=lambda number: (-elements[number], number)):
        owner[place] = owned.index(min(owned))
        owned[owner[place]] += elements[place]
    return owner


def _row(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _apart(row: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    sizes = [tensor.numel() for tensor in like]
    return [piece.view_as(tensor) for piece, tensor in zip(torch.split(row, sizes), like, strict=True)]
