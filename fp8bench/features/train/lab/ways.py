"""Chooses how ranks train together, and defines the two kinds of parallelism that can send FP8. In `zero`, each
weight is stored by one rank. In `sp`, ranks divide activations by tokens. After each exchange, samples of the numbers
that arrived are compared with expected numbers. The expected numbers are rounded by the format's definition,
independently of the code that sends.
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
from fp8bench.features.train.lab.low_precision import Gradients, Parameters, Tensors, gradient_or_zeros
from fp8bench.features.train.lab.parallelism import DataParallel, FullySharded, SingleRank, T, TensorParallel
from fp8bench.features.train.request import TrainerSettings
from fp8bench.model import DeviceFacts
from fp8bench.nn.gpt import GPT, LanguageModel
from fp8bench.nn.parallel.exchanges import FP8Group, OwnedTensors, RankGroup, exchange, gather, scatter
from fp8bench.nn.parallel.tensor_parallel import share_blocks
from fp8bench.nn.parallel.ways import find_cut
from fp8bench.nn.sizes import GPTConfig
from fp8bench.numerics.collectives import compute_largest_scale, decode_e4m3, encode_e4m3
from fp8bench.protocols import Phases, SilentPhases


def make_parallelism(settings: TrainerSettings, config: GPTConfig, facts: DeviceFacts) -> SingleRank:
    if facts.ranks == 1:
        return SingleRank()
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


# This many values of each tensor are compared.
_SAMPLE_SIZE = 64
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Sums in different orders may differ by this share of the sum of magnitudes, per rank.
_ROUNDING = {"fp32": 2.0**-20, "bf16": 2.0**-7}


def sample_tensor(tensor: Tensor, turn: int) -> Tensor:
    """Returns a tensor's largest magnitude, followed by 64 of its numbers. Each `turn` selects other numbers."""
    all_numbers = tensor.detach().flatten().to(torch.float32)
    stride = max(1, len(all_numbers) // _SAMPLE_SIZE)
    positions = (torch.arange(_SAMPLE_SIZE, device=all_numbers.device) * stride + turn) % len(all_numbers)
    return torch.cat((all_numbers.abs().amax().view(1), all_numbers[positions]))


def is_equal_or_nan(tensor: Tensor, expected: Tensor) -> Tensor:
    return (tensor == expected) | (tensor.isnan() & expected.isnan())


def simulate_sending(numbers: Tensor, amax: Tensor, wire: str) -> Tensor:
    """Returns the numbers as they would arrive after sending. `amax` has the largest magnitudes of the tensors from
    which the numbers come.
    """
    if wire != "fp8":
        return numbers.to(_DTYPES[wire]).to(torch.float32)
    scale = compute_largest_scale(amax)
    return decode_e4m3(encode_e4m3(numbers * scale)) / scale


def simulate_mean(numbers: Tensor, amax: Tensor, wire: str) -> Tensor:
    """Returns the mean of numbers as it would arrive. Every rank sends its numbers under the same scale, and they are
    added up in the order of ranks. The first dimension of `numbers` is the rank.
    """
    total = torch.zeros_like(numbers[0])
    for number in numbers:
        total += simulate_sending(number, amax, wire)
    return total / len(numbers)


def find_wrong_means(got: Tensor, numbers: Tensor, amax: Tensor, wire: str) -> Tensor:
    """Marks the numbers in `got` that are not the mean of what ranks sent. In FP8 all bits must agree, in other
    formats numbers may differ by rounding.
    """
    mean = simulate_mean(numbers, amax, wire)
    if wire == "fp8":
        return ~is_equal_or_nan(got, mean)
    difference = (got - mean).abs()
    return difference.isfinite() & (difference > _ROUNDING[wire] * numbers.abs().sum(0))


# Samples of at most this many steps are stored, because memory measurements never read them.
_MAX_STORED_STEPS = 64


class ZeroTensors(FullySharded):
    """Every rank reads an equal part of every micro-batch, but stores and updates only some of the weights, each of
    them complete, as in FP8-LM. Ranks send gradients to the owner of a weight, and the owner sends the weight back,
    both in the format `wire`. All ranks, including the owner, compute with the weight as it arrives. After a call,
    some numbers of each tensor are compared with the numbers that ranks sent.
    """

    def __init__(self, group: RankGroup, wire: str) -> None:
        super().__init__(group)
        self._wire = wire
        # One entry per step: samples of all gradients that this rank sent, and of the means that it received.
        self._step_samples, self._turn = deque[tuple[Tensor, Tensor]](maxlen=_MAX_STORED_STEPS), 0

    def divide_parameters(self, parameters: Parameters) -> Parameters:
        self._full_weights, self._names = list(parameters.values()), list(parameters)
        if len(self._full_weights) < self.part_count:
            raise UsageError(
                f"--parallel zero: {len(self._full_weights)} weights are too few for {self.part_count} ranks. Give "
                "fewer --ranks."
            )
        self._weight_bytes = [weight.untyped_storage().nbytes() for weight in self._full_weights]
        self._owned_tensors = OwnedTensors(self._group, [weight.numel() for weight in self._full_weights], self._wire)
        self._stored = [
            nn.Parameter(weight.detach().clone()) for weight in self.select_stored_values(self._full_weights)
        ]
        self._free_weights()
        return dict(zip(self.select_stored_values(list(parameters)), self._stored, strict=True))

    def select_stored_values(self, values: Sequence[T]) -> list[T]:
        return self._owned_tensors.select_own_items(values)

    def load_weights(self, phase: Phases) -> None:
        self._owned_tensors.distribute(
            [parameter.detach() for parameter in self._stored],
            [weight.detach() for weight in self._full_weights],
            phase,
        )

    def average_gradients(self, gradients: Gradients, phase: Phases) -> None:
        gradients_sent, turn = [gradient_or_zeros(weight) for weight in self._full_weights], self._turn
        # The samples are taken first, because the exchange may reuse the memory of gradients.
        sent = _sample_tensors(gradients_sent, turn)
        means = self._owned_tensors.average(gradients_sent, phase)
        for weight in self._full_weights:
            weight.grad = None
        for parameter, mean in zip(self._stored, means, strict=True):
            parameter.grad = mean
        gradients.store_gradients()
        self._step_samples.append((sent, _sample_tensors(means, turn)[:, 1:]))
        self._turn += 1

    def join_norms(self, norms: Tensors) -> list[Tensor]:
        """Returns each norm from the rank that owns the weight. `norms` may have several figures per parameter: all
        parameters' first figure, then all parameters' second one.
        """
        squares = torch.stack(list(norms)).to(torch.float64).square().view(-1, len(self._stored))
        all_squares = squares.new_zeros(len(squares), len(self._full_weights))
        all_squares[:, self.select_stored_values(range(len(self._full_weights)))] = squares
        return list(self._group.add_over_ranks(all_squares).sqrt().to(torch.float32).flatten())

    def find_faults(self) -> tuple[str, ...]:
        """Returns errors in received gradients and weights. Parameters must have their values."""
        samples = list(self._step_samples)
        self._step_samples.clear()
        own_numbers = torch.tensor(self.select_stored_values(range(len(self._full_weights))))
        faults = []
        if samples:
            sent, received = map(torch.stack, zip(*samples, strict=True))
            all_sent = torch.stack(self._group.all_of(sent))[:, :, own_numbers]  # ranks, steps, tensors, numbers
            wrong = find_wrong_means(received, all_sent[..., 1:], all_sent[..., :1].amax(0), self._wire)
            faults.append(
                self._describe_fault(
                    "received a gradient that is not the mean of what all ranks sent", wrong, own_numbers
                )
            )
        own_samples = _sample_tensors([parameter.detach() for parameter in self._stored], 0)
        # Each rank fills in the rows of the tensors that it owns. Together the ranks' rows show the weights of all
        # owners.
        rows = own_samples.new_zeros(len(self._full_weights), own_samples.shape[1])
        rows[own_numbers.to(own_samples.device)] = own_samples
        all_rows = torch.stack(self._group.all_of(rows))
        owners_rows = all_rows[torch.tensor(self._owned_tensors.owners), torch.arange(len(self._full_weights))]
        numbers = _sample_tensors([weight.detach() for weight in self._full_weights], 0)[:, 1:]
        wrong = ~is_equal_or_nan(numbers, simulate_sending(owners_rows[:, 1:], owners_rows[:, :1], self._wire))
        faults.append(
            self._describe_fault("has a weight that is not what its owner sent", wrong, torch.arange(len(wrong)))
        )
        return tuple(filter(None, faults))

    def _describe_fault(self, words: str, wrong: Tensor, numbers: Tensor) -> str:
        """Returns `words` followed by the name of the first wrong tensor; '' if no tensor is wrong."""
        tensors = wrong.any(-1).view(-1, len(numbers)).any(0).nonzero().flatten().tolist()
        return f"{words}: {self._names[int(numbers[tensors[0]])]}" if tensors else ""


def _sample_tensors(tensors: Tensors, turn: int) -> Tensor:
    return torch.stack([sample_tensor(tensor, turn) for tensor in tensors])


# Samples of at most this many exchanges are stored.
_MAX_STORED_SAMPLES = 1024


class _ExchangeSample(NamedTuple):
    """Samples of one exchange: the largest magnitude and some numbers of the tensor that this rank sent, and some
    numbers of the tensor that it received. If tokens were gathered, the sent numbers have the shape (numbers) and the
    received ones (ranks, numbers). If tokens were scattered, the two shapes are the other way round.
    """

    sent: Tensor
    received: Tensor
    dtype: torch.dtype


class SampledGroup(RankGroup):
    """Stores samples of every exchange of tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.exchange_samples, self._turn = deque[_ExchangeSample](maxlen=_MAX_STORED_SAMPLES), 0

    def all_parts(self, x: Tensor) -> Tensor:
        parts = super().all_parts(x)
        self._store_sample(sample_tensor(x, self._turn), _sample_tensors([*parts], self._turn)[:, 1:], x.dtype)
        return parts

    def own_part(self, parts: Tensor) -> Tensor:
        sent = _sample_tensors([*parts], self._turn)
        part = super().own_part(parts)
        self._store_sample(sent, sample_tensor(part, self._turn)[1:], parts.dtype)
        return part

    def _store_sample(self, sent: Tensor, received: Tensor, dtype: torch.dtype) -> None:
        self.exchange_samples.append(_ExchangeSample(sent, received, dtype))
        self._turn += 1


class BF16Group(RankGroup):
    """Sends each number in at most 16 bits. Returns the received numbers in the dtype of the given ones."""

    def all_parts(self, x: Tensor) -> Tensor:
        return super().all_parts(_to_16_bits(x)).to(x.dtype)

    def own_part(self, parts: Tensor) -> Tensor:
        return super().own_part(_to_16_bits(parts)).to(parts.dtype)


def _to_16_bits(x: Tensor) -> Tensor:
    return x if _has_16_bits(x.dtype) else x.to(torch.bfloat16)


def _has_16_bits(dtype: torch.dtype) -> bool:
    return dtype.itemsize == torch.bfloat16.itemsize


class _SampledBF16(SampledGroup, BF16Group): ...


class _SampledFP8(SampledGroup, FP8Group): ...


GROUPS_BY_WIRE: dict[str, type[SampledGroup]] = {"fp32": SampledGroup, "bf16": _SampledBF16, "fp8": _SampledFP8}


class SequenceParallel(TensorParallel):
    """Tensor parallelism in which each rank has only its own tokens between the parts of blocks. Activations are
    divided before the first block and gathered after the last. After a call, samples of every exchange are compared
    with the numbers that ranks sent. Comparing weights would not show a wrong sum, because all ranks gather the same
    activations.
    """

    def __init__(self, group: RankGroup, config: GPTConfig, wire: str) -> None:
        super().__init__(group, config)
        self._wire, self.token_group = wire, GROUPS_BY_WIRE[wire](group.handle)

    def cut_model(self, model: LanguageModel) -> None:
        assert isinstance(model, GPT)
        token_group = self.token_group

        def divide_tokens(x: Tensor) -> Tensor:
            return token_group.take_share(x).contiguous()

        share_blocks(model, self._config, token_group, gather, scatter)
        model.blocks[0].register_forward_pre_hook(
            lambda _, inputs: (exchange(inputs[0], divide_tokens, token_group.gather), *inputs[1:])
        )
        model.norm.register_forward_pre_hook(
            lambda _, inputs: (exchange(inputs[0], token_group.gather, divide_tokens),)
        )

    def divide_parameters(self, parameters: Parameters) -> Parameters:
        """Returns this rank's part of the parameters. Norms inside blocks see only this rank's tokens, so their
        gradients are summed over ranks.
        """
        block_parameters = {name: parameter for name, parameter in parameters.items() if name.startswith("blocks.")}
        self._summed_parameters = [
            parameter for name, parameter in block_parameters.items() if find_cut(name, self._config) is None
        ]
        return super().divide_parameters(parameters)

    @contextmanager
    def materialise(self, phase: Phases) -> Iterator[None]:
        self.token_group.phase = phase
        try:
            with super().materialise(phase):
                yield
        finally:
            self.token_group.phase = SilentPhases()

    def average_gradients(self, gradients: Gradients, phase: Phases) -> None:
        gradients.fill_missing()
        self._group.sum_gradients(
            [parameter.grad for parameter in self._summed_parameters if parameter.grad is not None]
        )

    def find_faults(self) -> tuple[str, ...]:
        notes = list(self.token_group.exchange_samples)
        self.token_group.exchange_samples.clear()
        wrong = bool(notes) and self._has_wrong_exchange(notes)
        return ("received tokens of the stream that are not what all ranks sent",) if wrong else ()

    def _has_wrong_exchange(self, samples: Sequence[_ExchangeSample]) -> bool:
        # The samples of all exchanges are sent together, because each message takes a round trip.
        sizes = [sample.sent.numel() for sample in samples]
        flat = self._group.all_of(torch.cat([sample.sent.flatten() for sample in samples]))
        by_note = zip(samples, *(torch.split(tensor, sizes) for tensor in flat), strict=True)
        return any(self._is_wrong(sample, torch.stack(all_sent)) for sample, *all_sent in by_note)

    def _is_wrong(self, sample: _ExchangeSample, all_sent: Tensor) -> bool:
        has_16_bits, is_fp8 = _has_16_bits(sample.dtype), self._wire == "fp8"
        # Compute the numbers that should have arrived from the numbers that all ranks report to have sent.
        all_sent = all_sent.view(len(all_sent), *sample.sent.shape)
        if sample.received.ndim > 1:
            expected = simulate_sending(
                all_sent[:, 1:], all_sent[:, :1], "fp32" if has_16_bits and not is_fp8 else self._wire
            )
        else:
            numbers, amax = all_sent[:, self.rank, 1:], all_sent[..., 0].amax()
            if not is_fp8:  # other formats are added up in any order
                wire = "bf16" if has_16_bits else self._wire
                return bool(find_wrong_means(sample.received / len(all_sent), numbers, amax, wire).any())
            expected = simulate_mean(numbers, amax, self._wire) * len(all_sent)
        return not bool(is_equal_or_nan(sample.received, expected.to(sample.dtype).to(torch.float32)).all())
