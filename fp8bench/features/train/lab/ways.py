"""Which way ranks train together; and the two by a wire, whole weights with owners and a stream divided by tokens.

Some numbers of what ranks send each other are held against what arrived: rounded by the definition, and not by the
programs that send them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.features.train.lab.optimizer import Gradients, gradient_of
from fp8bench.features.train.lab.together import Alone, DataParallel, FullySharded, T, TensorParallel
from fp8bench.features.train.request import TrainerSettings
from fp8bench.model import DeviceFacts
from fp8bench.nn.gpt import GPT, LanguageModel
from fp8bench.nn.parallel.exchanges import FP8Group, OwnedTensors, RankGroup, exchanged, gathered, scattered
from fp8bench.nn.parallel.tensor_parallel import share_blocks
from fp8bench.nn.parallel.ways import cut_of
from fp8bench.nn.sizes import GPTConfig
from fp8bench.numerics.collectives import E4M3, largest_scale
from fp8bench.protocols import Phases, SilentPhases


def together_of(settings: TrainerSettings, config: GPTConfig, facts: DeviceFacts) -> Alone:
    if facts.ranks == 1:
        return Alone()
    assert dist.group.WORLD is not None
    group, own_amax = RankGroup(dist.group.WORLD), settings.amax_group == "own"
    match settings.parallel:
        case "tp":
            return TensorParallel(group, config, own_amax)
        case "sp":
            return SequenceParallel(group, config, own_amax, settings.wire)
        case "zero":
            return ZeroTensors(group, own_amax, settings.wire)
        case "fsdp":
            return FullySharded(group, own_amax)
    return DataParallel(group, own_amax)


# So many numbers of each tensor are looked at.
_SAMPLED = 64
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Of the sum of magnitudes, what additions in other orders may come to, for each rank.
_ROUNDING = {"fp32": 2.0**-20, "bf16": 2.0**-7}


def sampled(tensor: Tensor, turn: int) -> Tensor:
    """Its largest magnitude, and some of its numbers, others every turn."""
    own = tensor.detach().flatten().to(torch.float32)
    stride = max(1, len(own) // _SAMPLED)
    places = (torch.arange(_SAMPLED, device=own.device) * stride + turn) % len(own)
    return torch.cat((own.abs().amax().view(1), own[places]))


def alike(tensor: Tensor, other: Tensor) -> Tensor:
    return (tensor == other) | (tensor.isnan() & other.isnan())


def as_sent(numbers: Tensor, amax: Tensor, wire: str) -> Tensor:
    """Of tensors with these largest magnitudes."""
    if wire != "fp8":
        return numbers.to(_DTYPES[wire]).to(torch.float32)
    scale = largest_scale(amax)
    return E4M3().decode(E4M3().encode(numbers * scale)) / scale


def mean_as_sent(numbers: Tensor, amax: Tensor, wire: str) -> Tensor:
    """Of (ranks, ...) under one scale, added up in the order of ranks."""
    total = torch.zeros_like(numbers[0])
    for number in numbers:
        total += as_sent(number, amax, wire)
    return total / len(numbers)


def wrong_means(got: Tensor, numbers: Tensor, amax: Tensor, wire: str) -> Tensor:
    """Which are not that mean: in FP8 to the bit, else but for rounding."""
    mean = mean_as_sent(numbers, amax, wire)
    if wire == "fp8":
        return ~alike(got, mean)
    apart = (got - mean).abs()
    return apart.isfinite() & (apart > _ROUNDING[wire] * numbers.abs().sum(0))


# Of steps that nobody asks about, as where memory is measured, the last ones.
_MOST_STEPS = 64


class ZeroTensors(FullySharded):
    """Every rank reads an equal part of every micro-batch, and keeps and updates whole weights, as FP8-LM divides them.

    What `wire` says goes to owners and comes from them: all ranks, the owner too, compute a step with the weights as
    they were sent. After a slice some numbers of every gradient in each of its steps, and of every weight, are held
    against what all ranks have brought, rounded by the definition: in FP8 to the bit.
    """

    def __init__(self, group: RankGroup, own_amax: bool, wire: str) -> None:
        super().__init__(group, own_amax)
        self._wire = wire
        # Of each step some numbers of all tensors that this rank has brought, and of the means that it was given.
        self._seen, self._turn = deque[tuple[Tensor, Tensor]](maxlen=_MOST_STEPS), 0

    def own(self, parameters: Mapping[str, nn.Parameter]) -> Mapping[str, nn.Parameter]:
        self._wholes, self._names = list(parameters.values()), list(parameters)
        if len(self._wholes) < self.shares:
            raise UsageError(
                f"--parallel zero: {self.shares} ranks have no weight each, there are {len(self._wholes)}. Give fewer "
                "--ranks."
            )
        self._bytes = [whole.untyped_storage().nbytes() for whole in self._wholes]
        self._owned = OwnedTensors(self._group, [whole.numel() for whole in self._wholes], self._wire)
        self._own = [nn.Parameter(whole.detach().clone()) for whole in self.mine(self._wholes)]
        self._release()
        return dict(zip(self.mine(list(parameters)), self._own, strict=True))

    def mine(self, some: Sequence[T]) -> list[T]:
        return self._owned.own(some)

    def updated(self, phase: Phases) -> None:
        self._owned.put(
            [parameter.detach() for parameter in self._own], [whole.detach() for whole in self._wholes], phase
        )

    def average(self, gradients: Gradients, phase: Phases) -> None:
        found, turn = [gradient_of(whole) for whole in self._wholes], self._turn
        brought = _rows(found, turn)
        means = self._owned.means(found, phase)
        for whole in self._wholes:
            whole.grad = None
        for parameter, mean in zip(self._own, means, strict=True):
            parameter.grad = mean
        gradients.given()
        self._seen.append((brought, _rows(means, turn)[:, 1:]))
        self._turn += 1

    def norms(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Each is its owner's; several figures of all parameters come one behind the other."""
        squares = torch.stack(list(own)).to(torch.float64).square().view(-1, len(self._own))
        every = squares.new_zeros(len(squares), len(self._wholes))
        every[:, self.mine(range(len(self._wholes)))] = squares
        return list(self._group.added(every).sqrt().to(torch.float32).flatten())

    def faults(self) -> tuple[str, ...]:
        """Asked while parameters are present."""
        seen = list(self._seen)
        self._seen.clear()
        place = torch.tensor(self.mine(range(len(self._wholes))))
        words = []
        if seen:
            brought, got = map(torch.stack, zip(*seen, strict=True))
            all_of = torch.stack(self._group.all_of(brought))[:, :, place]  # ranks, steps, tensors, numbers
            wrong = wrong_means(got, all_of[..., 1:], all_of[..., :1].amax(0), self._wire)
            words.append(self._said("was given a gradient that is not the mean of what all have brought", wrong, place))
        own = _rows([parameter.detach() for parameter in self._own], 0)
        every = own.new_zeros(len(self._wholes), own.shape[1])
        every[place.to(own.device)] = own
        theirs = torch.stack(self._group.all_of(every))
        kept = theirs[torch.tensor(self._owned.owners), torch.arange(len(self._wholes))]
        numbers = _rows([whole.detach() for whole in self._wholes], 0)[:, 1:]
        wrong = ~alike(numbers, as_sent(kept[:, 1:], kept[:, :1], self._wire))
        words.append(self._said("has a weight that is not what its owner has sent", wrong, torch.arange(len(wrong))))
        return tuple(filter(None, words))

    def _said(self, words: str, wrong: Tensor, place: Tensor) -> str:
        """Names the first tensor that is."""
        tensors = wrong.any(-1).view(-1, len(place)).any(0).nonzero().flatten().tolist()
        return f"{words}: {self._names[int(place[tensors[0]])]}" if tensors else ""


def _rows(tensors: Sequence[Tensor], turn: int) -> Tensor:
    """Of each tensor its largest magnitude and some of its numbers."""
    return torch.stack([sampled(tensor, turn) for tensor in tensors])


# Exchanges that nobody has asked about, the last ones.
_MOST_NOTED = 1024


class _Note(NamedTuple):
    """Of an exchange some numbers of what this rank has brought, behind the largest magnitude, and of what it was
    given: (numbers) and (ranks, numbers) where tokens were gathered, the other way round where they were scattered."""

    brought: Tensor
    got: Tensor
    dtype: torch.dtype


class NotedGroup(RankGroup):
    """Notes some numbers of every exchange of tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.noted, self._turn = deque[_Note](maxlen=_MOST_NOTED), 0

    def all_parts(self, x: Tensor) -> Tensor:
        found = super().all_parts(x)
        self._note(sampled(x, self._turn), self._rows(found)[:, 1:], x.dtype)
        return found

    def own_part(self, parts: Tensor) -> Tensor:
        brought = self._rows(parts)
        found = super().own_part(parts)
        self._note(brought, sampled(found, self._turn)[1:], parts.dtype)
        return found

    def _rows(self, parts: Tensor) -> Tensor:
        return torch.stack([sampled(part, self._turn) for part in parts])

    def _note(self, brought: Tensor, got: Tensor, dtype: torch.dtype) -> None:
        self.noted.append(_Note(brought, got, dtype))
        self._turn += 1


class BF16Group(RankGroup):
    """Sends at most 16 bits, and hands back what it was given in."""

    def all_parts(self, x: Tensor) -> Tensor:
        return super().all_parts(_narrow(x)).to(x.dtype)

    def own_part(self, parts: Tensor) -> Tensor:
        return super().own_part(_narrow(parts)).to(parts.dtype)


def _narrow(x: Tensor) -> Tensor:
    return x if _is_narrow(x.dtype) else x.to(torch.bfloat16)


def _is_narrow(dtype: torch.dtype) -> bool:
    return dtype.itemsize == torch.bfloat16.itemsize


class _NotedBF16(NotedGroup, BF16Group): ...


class _NotedFP8(NotedGroup, FP8Group): ...


STREAMS: dict[str, type[NotedGroup]] = {"fp32": NotedGroup, "bf16": _NotedBF16, "fp8": _NotedFP8}


class SequenceParallel(TensorParallel):
    """And of what lies between the parts of blocks a rank has its tokens only. Embedding, last norm, head and loss are
    of all tokens, on all ranks alike: the stream is cut before the first block and gathered behind the last one.

    After a slice some numbers of every exchange are held against what all ranks have brought: what all of them gather
    alike does not show that one has got another sum.
    """

    def __init__(self, group: RankGroup, config: GPTConfig, own_amax: bool, wire: str) -> None:
        super().__init__(group, config, own_amax)
        self._wire, self.stream = wire, STREAMS[wire](group.handle)

    def take(self, model: LanguageModel) -> None:
        assert isinstance(model, GPT)
        stream = self.stream

        def own(x: Tensor) -> Tensor:
            return stream.own(x).contiguous()

        share_blocks(model, self._config, stream, gathered, scattered)
        model.blocks[0].register_forward_pre_hook(
            lambda _, given: (exchanged(given[0], own, stream.gathered), *given[1:])
        )
        model.norm.register_forward_pre_hook(lambda _, given: (exchanged(given[0], stream.gathered, own),))

    def own(self, parameters: Mapping[str, nn.Parameter]) -> Mapping[str, nn.Parameter]:
        """Norms of blocks have gradients of this rank's tokens."""
        within = {name: parameter for name, parameter in parameters.items() if name.startswith("blocks.")}
        self._summed = [parameter for name, parameter in within.items() if cut_of(name, self._config) is None]
        return super().own(parameters)

    @contextmanager
    def present(self, phase: Phases) -> Iterator[None]:
        self.stream.phase = phase
        try:
            with super().present(phase):
                yield
        finally:
            self.stream.phase = SilentPhases()

    def average(self, gradients: Gradients, phase: Phases) -> None:
        gradients.filled()
        self._group.added_together([parameter.grad for parameter in self._summed if parameter.grad is not None])

    def faults(self) -> tuple[str, ...]:
        notes = list(self.stream.noted)
        self.stream.noted.clear()
        wrong = bool(notes) and self._arrived_otherwise(notes)
        return ("was given tokens of the stream that are not what all ranks have brought",) if wrong else ()

    def _arrived_otherwise(self, notes: Sequence[_Note]) -> bool:
        sizes = [note.brought.numel() for note in notes]
        flat = self._group.all_of(torch.cat([note.brought.flatten() for note in notes]))
        by_note = zip(notes, *(torch.split(tensor, sizes) for tensor in flat), strict=True)
        return any(self._is_wrong(note, torch.stack(brought)) for note, *brought in by_note)

    def _is_wrong(self, note: _Note, brought: Tensor) -> bool:
        """`brought` is everybody's, by rank."""
        narrow, in_fp8 = _is_narrow(note.dtype), self._wire == "fp8"
        every = brought.view(len(brought), *note.brought.shape)
        if note.got.ndim > 1:
            sent = as_sent(every[:, 1:], every[:, :1], "fp32" if narrow and not in_fp8 else self._wire)
        else:
            numbers, amax = every[:, self.rank, 1:], every[..., 0].amax()
            if not in_fp8:  # a sum of any order
                wire = "bf16" if narrow else self._wire
                return bool(wrong_means(note.got / len(every), numbers, amax, wire).any())
            sent = mean_as_sent(numbers, amax, self._wire) * len(every)
        return not bool(alike(note.got, sent.to(note.dtype).to(torch.float32)).all())
