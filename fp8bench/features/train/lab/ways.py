"""Chooses how ranks train together; and the two ways that send FP8: whole weights with owners (zero), and activations
divided by tokens (sp).

Some numbers of each exchange are compared with what arrived, rounded by the format's definition independently of the
sending code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.features.train.lab.low_precision import Gradients, Parameters, Tensors, gradient_of
from fp8bench.features.train.lab.together import Alone, DataParallel, FullySharded, T, TensorParallel
from fp8bench.features.train.request import TrainerSettings
from fp8bench.model import DeviceFacts
from fp8bench.nn.gpt import GPT, LanguageModel
from fp8bench.nn.parallel.exchanges import FP8Group, OwnedTensors, RankGroup, exchange, gather, scatter
from fp8bench.nn.parallel.tensor_parallel import share_blocks
from fp8bench.nn.parallel.ways import cut_of
from fp8bench.nn.sizes import GPTConfig
from fp8bench.numerics.collectives import E4M3, largest_scale
from fp8bench.protocols import Phases, SilentPhases


def together_of(settings: TrainerSettings, config: GPTConfig, facts: DeviceFacts) -> Alone:
    if facts.ranks == 1:
        return Alone()
    assert dist.group.WORLD is not None
    group = RankGroup(dist.group.WORLD)
    match settings.parallel:
        case "tp":
            return TensorParallel(group, config)
        case "sp":
            return SequenceParallel(group, config, settings.wire)
        case "zero":
            return ZeroTensors(group, settings.wire)
        case "fsdp":
            return FullySharded(group)
    return DataParallel(group)


# The number of values of each tensor that are compared.
_SAMPLED = 64
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Per rank, the share of the sum of magnitudes by which sums in different orders may differ.
_ROUNDING = {"fp32": 2.0**-20, "bf16": 2.0**-7}


def sample(tensor: Tensor, turn: int) -> Tensor:
    """Returns the largest magnitude, then 64 of the numbers: different ones each turn."""
    flat = tensor.detach().flatten().to(torch.float32)
    stride = max(1, len(flat) // _SAMPLED)
    places = (torch.arange(_SAMPLED, device=flat.device) * stride + turn) % len(flat)
    return torch.cat((flat.abs().amax().view(1), flat[places]))


def alike(tensor: Tensor, expected: Tensor) -> Tensor:
    return (tensor == expected) | (tensor.isnan() & expected.isnan())


def as_sent(numbers: Tensor, amax: Tensor, wire: str) -> Tensor:
    """Returns what arrives if numbers of tensors with these largest magnitudes are sent."""
    if wire != "fp8":
        return numbers.to(_DTYPES[wire]).to(torch.float32)
    scale = largest_scale(amax)
    return E4M3().decode(E4M3().encode(numbers * scale)) / scale


def mean_as_sent(numbers: Tensor, amax: Tensor, wire: str) -> Tensor:
    """Returns what the mean of (ranks, ...) under one scale becomes, added up in the order of ranks."""
    total = torch.zeros_like(numbers[0])
    for number in numbers:
        total += as_sent(number, amax, wire)
    return total / len(numbers)


def wrong_means(got: Tensor, numbers: Tensor, amax: Tensor, wire: str) -> Tensor:
    """Marks numbers that are not the mean of what ranks sent: in FP8 to the bit, otherwise up to rounding."""
    mean = mean_as_sent(numbers, amax, wire)
    if wire == "fp8":
        return ~alike(got, mean)
    difference = (got - mean).abs()
    return difference.isfinite() & (difference > _ROUNDING[wire] * numbers.abs().sum(0))


# Samples of at most this many steps are kept, because memory measurements never consume them.
_MOST_STEPS = 64


class ZeroTensors(FullySharded):
    """Every rank reads an equal part of every micro-batch, and keeps and updates some whole weights, divided as in
    FP8-LM. Gradients go to owners and weights come from them in the format `wire`: all ranks, including the owner,
    compute with the weights as sent. After a slice some numbers of each are compared with what ranks sent, in FP8 to
    the bit."""

    def __init__(self, group: RankGroup, wire: str) -> None:
        super().__init__(group)
        self._wire = wire
        # For each step, samples of all tensors that this rank sent, and of the means that it received.
        self._seen, self._turn = deque[tuple[Tensor, Tensor]](maxlen=_MOST_STEPS), 0

    def own(self, parameters: Parameters) -> Parameters:
        self._wholes, self._names = list(parameters.values()), list(parameters)
        if len(self._wholes) < self.shares:
            raise UsageError(
                f"--parallel zero: {len(self._wholes)} weights are too few for {self.shares} ranks. Give fewer --ranks."
            )
        self._bytes = [weight.untyped_storage().nbytes() for weight in self._wholes]
        self._owned = OwnedTensors(self._group, [weight.numel() for weight in self._wholes], self._wire)
        self._own = [nn.Parameter(weight.detach().clone()) for weight in self.mine(self._wholes)]
        self._release()
        return dict(zip(self.mine(list(parameters)), self._own, strict=True))

    def mine(self, values: Sequence[T]) -> list[T]:
        return self._owned.own(values)

    def refresh(self, phase: Phases) -> None:
        self._owned.put(
            [parameter.detach() for parameter in self._own], [weight.detach() for weight in self._wholes], phase
        )

    def average(self, gradients: Gradients, phase: Phases) -> None:
        gradients_sent, turn = [gradient_of(weight) for weight in self._wholes], self._turn
        # Before the exchange, which may reuse the memory of gradients.
        sent = _samples(gradients_sent, turn)
        means = self._owned.means(gradients_sent, phase)
        for weight in self._wholes:
            weight.grad = None
        for parameter, mean in zip(self._own, means, strict=True):
            parameter.grad = mean
        gradients.accept()
        self._seen.append((sent, _samples(means, turn)[:, 1:]))
        self._turn += 1

    def norms(self, norms: Tensors) -> list[Tensor]:
        """Returns each norm from its owner; `norms` may be several figures of all parameters, one after the other."""
        squares = torch.stack(list(norms)).to(torch.float64).square().view(-1, len(self._own))
        placed = squares.new_zeros(len(squares), len(self._wholes))
        placed[:, self.mine(range(len(self._wholes)))] = squares
        return list(self._group.add_over_ranks(placed).sqrt().to(torch.float32).flatten())

    def faults(self) -> tuple[str, ...]:
        """Like the base class; parameters must be present."""
        samples = list(self._seen)
        self._seen.clear()
        place = torch.tensor(self.mine(range(len(self._wholes))))
        faults = []
        if samples:
            sent, received = map(torch.stack, zip(*samples, strict=True))
            all_sent = torch.stack(self._group.all_of(sent))[:, :, place]  # ranks, steps, tensors, numbers
            wrong = wrong_means(received, all_sent[..., 1:], all_sent[..., :1].amax(0), self._wire)
            faults.append(self._fault("received a gradient that is not the mean of what all ranks sent", wrong, place))
        owned = _samples([parameter.detach() for parameter in self._own], 0)
        # Each rank fills in its tensors; all rows together show what owners have.
        rows = owned.new_zeros(len(self._wholes), owned.shape[1])
        rows[place.to(owned.device)] = owned
        all_rows = torch.stack(self._group.all_of(rows))
        owners_rows = all_rows[torch.tensor(self._owned.owners), torch.arange(len(self._wholes))]
        numbers = _samples([weight.detach() for weight in self._wholes], 0)[:, 1:]
        wrong = ~alike(numbers, as_sent(owners_rows[:, 1:], owners_rows[:, :1], self._wire))
        faults.append(self._fault("has a weight that is not what its owner sent", wrong, torch.arange(len(wrong))))
        return tuple(filter(None, faults))

    def _fault(self, words: str, wrong: Tensor, place: Tensor) -> str:
        """Returns the name of the first wrong tensor, or ''."""
        tensors = wrong.any(-1).view(-1, len(place)).any(0).nonzero().flatten().tolist()
        return f"{words}: {self._names[int(place[tensors[0]])]}" if tensors else ""


def _samples(tensors: Tensors, turn: int) -> Tensor:
    return torch.stack([sample(tensor, turn) for tensor in tensors])


# Notes of at most this many exchanges are kept.
_MOST_NOTED = 1024


class _Note(NamedTuple):
    """Samples of an exchange: of what this rank sent, after its largest magnitude, and of what it received. Shapes are
    (numbers) and (ranks, numbers) if tokens were gathered, and the reverse if they were scattered."""

    sent: Tensor
    received: Tensor
    dtype: torch.dtype


class NotedGroup(RankGroup):
    """Records samples of every exchange of tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.noted, self._turn = deque[_Note](maxlen=_MOST_NOTED), 0

    def all_parts(self, x: Tensor) -> Tensor:
        parts = super().all_parts(x)
        self._note(sample(x, self._turn), _samples([*parts], self._turn)[:, 1:], x.dtype)
        return parts

    def own_part(self, parts: Tensor) -> Tensor:
        sent = _samples([*parts], self._turn)
        part = super().own_part(parts)
        self._note(sent, sample(part, self._turn)[1:], parts.dtype)
        return part

    def _note(self, sent: Tensor, received: Tensor, dtype: torch.dtype) -> None:
        self.noted.append(_Note(sent, received, dtype))
        self._turn += 1


class BF16Group(RankGroup):
    """Sends at most 16 bits per number, and returns the dtype it was given."""

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
    """Tensor parallelism in which each rank only has its tokens between the parts of blocks: activations are divided
    before the first block and gathered after the last. After a slice samples of every exchange are compared with what
    ranks sent: all gather the same activations, so weights would not reveal a wrong sum."""

    def __init__(self, group: RankGroup, config: GPTConfig, wire: str) -> None:
        super().__init__(group, config)
        self._wire, self.stream = wire, STREAMS[wire](group.handle)

    def take(self, model: LanguageModel) -> None:
        assert isinstance(model, GPT)
        stream = self.stream

        def own(x: Tensor) -> Tensor:
            return stream.own(x).contiguous()

        share_blocks(model, self._config, stream, gather, scatter)
        model.blocks[0].register_forward_pre_hook(
            lambda _, inputs: (exchange(inputs[0], own, stream.gather), *inputs[1:])
        )
        model.norm.register_forward_pre_hook(lambda _, inputs: (exchange(inputs[0], stream.gather, own),))

    def own(self, parameters: Parameters) -> Parameters:
        """Returns this rank's part. Norms inside blocks only get this rank's tokens: their gradients are summed over
        ranks."""
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
        gradients.fill()
        self._group.added_together([parameter.grad for parameter in self._summed if parameter.grad is not None])

    def faults(self) -> tuple[str, ...]:
        notes = list(self.stream.noted)
        self.stream.noted.clear()
        wrong = bool(notes) and self._arrived_wrong(notes)
        return ("received tokens of the stream that are not what all ranks sent",) if wrong else ()

    def _arrived_wrong(self, notes: Sequence[_Note]) -> bool:
        # One exchange for all notes, since each would cost a round trip.
        sizes = [note.sent.numel() for note in notes]
        flat = self._group.all_of(torch.cat([note.sent.flatten() for note in notes]))
        by_note = zip(notes, *(torch.split(tensor, sizes) for tensor in flat), strict=True)
        return any(self._is_wrong(note, torch.stack(all_sent)) for note, *all_sent in by_note)

    def _is_wrong(self, note: _Note, all_sent: Tensor) -> bool:
        narrow, in_fp8 = _is_narrow(note.dtype), self._wire == "fp8"
        # Recompute what arrived from what all ranks report to have sent.
        all_sent = all_sent.view(len(all_sent), *note.sent.shape)
        if note.received.ndim > 1:
            expected = as_sent(all_sent[:, 1:], all_sent[:, :1], "fp32" if narrow and not in_fp8 else self._wire)
        else:
            numbers, amax = all_sent[:, self.rank, 1:], all_sent[..., 0].amax()
            if not in_fp8:  # a sum in any order
                wire = "bf16" if narrow else self._wire
                return bool(wrong_means(note.received / len(all_sent), numbers, amax, wire).any())
            expected = mean_as_sent(numbers, amax, self._wire) * len(all_sent)
        return not bool(alike(note.received, expected.to(note.dtype).to(torch.float32)).all())
