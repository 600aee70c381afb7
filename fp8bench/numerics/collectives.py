"""Collectives that send values of a torch dtype, or FP8 codes. `compute_exact_result` returns what a rank should get.

Reductions compute means, because a step may overwrite its input: a sum would grow whenever the step is repeated. Each
rank contributes a whole vector. For `all_gather` a rank contributes one part, and for `broadcast` only rank 0
contributes.

FP8 means are composed in three ways. In `fp8_gather`, all ranks get all codes and sum them in float32. This loses no
accuracy beyond the casts to FP8, but each of n ranks sends all its codes n - 1 times. In `fp8_twoshot`, each part of
the vector has a rank that owns it. This rank receives the codes of its part, sums them in float32 and sends codes of
the mean. In `fp8_ring`, a sum travels around the ranks and is rounded to the format at every hop, as in a ring of NCCL.

An `ExchangeProgram` is what one rank runs. It is a generator: it yields each exchange with other ranks, is sent what
this rank receives, and returns its result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8bench.numerics.rank_programs import (
    AllGather,
    AllToAll,
    AllToAllRows,
    BroadcastFromFirst,
    ExchangeProgram,
    MaximumOverRanks,
    PendingRankProgram,
    SentBytes,
    ShiftToNextRank,
    run_on_this_rank,
    simulate,
    start_program,
)

E4M3_LARGEST = 448.0
# The code of 448. The next code, 0x7F, is NaN.
_LARGEST_CODE = 0x7E
FP8_MEAN_METHODS = (GATHER, TWOSHOT, RING) = ("fp8_gather", "fp8_twoshot", "fp8_ring")
# The values of option `scaling`: how the scale keeps a sum over ranks within the format. With 'pre', ranks divide their
# values by the number of ranks before the cast. With 'post', they divide the sum. With 'ms_amp' and 'fp8lm_auto', they
# multiply the values by the factor of MS-AMP or FP8-LM before the cast.
PRE_SUM_SCALING = "pre"
POST_SCALING = "post"
MS_AMP_SCALING = "ms_amp"
FP8LM_SCALING = "fp8lm_auto"
# mu in equations 2 and 3 of FP8-LM: it is halved after a step in which more than 0.001% of the values have the
# largest code. Otherwise it grows, by a factor of 2 in 1,000 steps, up to 2.
MAX_SATURATED_SHARE = 1e-5
_MU_DOUBLING_STEPS = 1000


def encode_e4m3(values: Tensor) -> Tensor:
    """Returns E4M3 codes as bytes. Values beyond the largest one are clamped, because the casts of older torch versions
    do not saturate.
    """
    return values.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e4m3(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).float()


@dataclass
class AutoScale:
    """FP8-LM's scaling factor mu, which persists between steps.

    mu is equal on all ranks, because it depends on the values that all ranks received. It is a tensor, so that a step
    need not wait for its value.
    """

    mu: Tensor = field(default_factory=lambda: torch.ones(1))

    def update(self, saturated_share: Tensor) -> None:
        grown_mu = (self.mu.to(saturated_share.device) * 2 ** (1 / _MU_DOUBLING_STEPS)).clamp(max=2.0)
        self.mu = torch.where(saturated_share > MAX_SATURATED_SHARE, self.mu.to(saturated_share.device) / 2, grown_mu)


class ReducedVector(NamedTuple):
    """A vector that a rank gets from an exchange, such as a mean over ranks, and the codes from which it was
    computed.
    """

    values: Tensor
    codes: Tensor


def compute_largest_scale(amax: Tensor) -> Tensor:
    """Returns the largest power of two that keeps `amax` within E4M3, as in MS-AMP. Returns 1 if `amax` is zero.

    Returns NaN if `amax` is not finite: E4M3 has no infinity, and replacing it by 448 would hide an overflow.
    """
    scale = torch.exp2(torch.floor(torch.log2(E4M3_LARGEST / amax)))
    finite_scale_or_one = torch.where((amax > 0) & torch.isfinite(scale), scale, torch.ones_like(scale))
    return torch.where(torch.isfinite(amax), finite_scale_or_one, torch.full_like(scale, math.nan))


def _compute_shared_scale(amax: Tensor) -> ExchangeProgram[Tensor]:
    """Returns the scale for the largest magnitude on any rank. A NaN on a rank counts as infinity, because maxima over
    ranks may lose it.
    """
    amax_without_nan = torch.nan_to_num(amax, nan=math.inf, posinf=math.inf)
    amax_over_ranks = yield MaximumOverRanks(amax_without_nan)
    return compute_largest_scale(amax_over_ranks)


def get_overflow_factor(scaling: str, size: int, auto_scale: AutoScale) -> float | Tensor:
    """Returns a factor for the scale that makes an overflow of the sum over ranks less likely."""
    if scaling == FP8LM_SCALING:
        return auto_scale.mu
    return {PRE_SUM_SCALING: 1 / size, POST_SCALING: 1.0, MS_AMP_SCALING: 1 / math.sqrt(size)}[scaling]


def scale_for_cast(
    values: Tensor, scaling: str, size: int, auto_scale: AutoScale
) -> ExchangeProgram[tuple[Tensor, Tensor]]:
    """Returns the scaled values, and the scale that all ranks use.

    The scale comes from the largest magnitude on any rank. In FP8-LM, however, each rank first rounds its values to FP8
    with its own scale. Then all ranks use the smallest of these scales, multiplied by mu (`AutoScale`).
    """
    amax = values.abs().amax().reshape(1)
    if scaling == FP8LM_SCALING:
        scale_of_rank = compute_largest_scale(amax)
        # The smallest scale of all ranks. Exchanges compute only maxima, so negate it twice.
        scale = -(yield MaximumOverRanks(-scale_of_rank))
        values = decode_e4m3(encode_e4m3(values * scale_of_rank)) / scale_of_rank
    else:
        scale = yield from _compute_shared_scale(amax)
    scale = scale * get_overflow_factor(scaling, size, auto_scale)
    return values * scale, scale


def compute_fp8_mean(
    method: str, values: Tensor, scaling: str, rank: int, size: int, auto_scale: AutoScale, whole_vector: bool = True
) -> ExchangeProgram[ReducedVector]:
    """Returns the mean of a vector over all ranks. Without `whole_vector`, returns only this rank's part of the mean.

    The length of the vector must be a multiple of the number of ranks.
    """
    scaled_values, scale = yield from scale_for_cast(values, scaling, size, auto_scale)
    if method == RING:
        codes = yield from sum_in_ring(scaled_values, rank, size, whole_vector)
        mean_vector = ReducedVector(decode_e4m3(codes) / (scale * size), codes)
    elif method == GATHER:
        codes_of_ranks = yield AllGather(encode_e4m3(scaled_values))
        mean_values = _sum_in_rank_order([decode_e4m3(codes_of_rank) for codes_of_rank in codes_of_ranks]) / (
            scale * size
        )
        mean_vector = ReducedVector(
            mean_values if whole_vector else mean_values.chunk(size)[rank], torch.cat(codes_of_ranks)
        )
    elif method == TWOSHOT:
        rows = yield AllToAll(encode_e4m3(scaled_values).reshape(size, -1))
        mean_vector = ReducedVector(_sum_in_rank_order([decode_e4m3(row) for row in rows]) / (scale * size), rows)
        if whole_vector:
            # `gather_parts` casts the part of each rank with a separate scale. So saturation is counted in `rows`, the
            # codes that were summed: they share one scale.
            gathered_mean = yield from gather_parts(mean_vector.values)
            mean_vector = ReducedVector(gathered_mean.values, rows)
    else:
        raise ValueError(f"expected one of {', '.join(FP8_MEAN_METHODS)}, got {method!r}")
    if scaling == FP8LM_SCALING:
        saturated_share = compute_saturated_share(mean_vector.codes).reshape(1)
        if method == TWOSHOT or not whole_vector:
            # Ranks may have different codes. The maximum of their shares keeps mu equal on all ranks.
            saturated_share = yield MaximumOverRanks(saturated_share)
        auto_scale.update(saturated_share)
    return mean_vector


def gather_parts(part: Tensor) -> ExchangeProgram[ReducedVector]:
    scale_of_rank = compute_largest_scale(part.abs().amax().reshape(1))
    codes = yield AllGather(encode_e4m3(part * scale_of_rank))
    scales = yield AllGather(scale_of_rank)
    values = [decode_e4m3(code) / scale for code, scale in zip(codes, scales, strict=True)]
    return ReducedVector(torch.cat(values), torch.cat(codes))


class RankTensors(NamedTuple):
    """How the tensors that one rank owns are concatenated to a vector. `lengths` has the number of elements of each
    tensor. Each tensor has its own scale. `max_tensors_per_rank` is the largest number of tensors that any rank owns.
    Ranks pad their scales to this number, because all ranks must send equally many scales.
    """

    lengths: Sequence[int]
    max_tensors_per_rank: int

    @property
    def num_elements(self) -> int:
        return sum(self.lengths)

    def amax(self, values: Tensor) -> Tensor:
        """Returns the largest magnitude of each tensor in a vector, padded with zeros up to `max_tensors_per_rank`."""
        amaxes = torch.stack([owned_tensor.abs().amax() for owned_tensor in torch.split(values, list(self.lengths))])
        return torch.nn.functional.pad(amaxes, (0, self.max_tensors_per_rank - len(self.lengths)))

    def iterate_tensors(self, values: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields each tensor with its scale. Callers scale one tensor at a time, without a vector that repeats the
        scale for each element.
        """
        return zip(torch.split(values, list(self.lengths)), scales[: len(self.lengths)], strict=True)

    def encode_tensors(self, values: Tensor, scales: Tensor) -> Tensor:
        return torch.cat(
            [encode_e4m3(owned_tensor * scale) for owned_tensor, scale in self.iterate_tensors(values, scales)]
        )

    def decode_tensors(self, codes: Tensor, scales: Tensor) -> Tensor:
        return torch.cat(
            [decode_e4m3(owned_tensor) / scale for owned_tensor, scale in self.iterate_tensors(codes, scales)]
        )


def gather_tensors(part: Tensor, rank: int, tensors_by_rank: Sequence[RankTensors]) -> ExchangeProgram[Tensor]:
    """Sends `part`, the vector of this rank's tensors, to all ranks, as codes with one scale for each tensor. Returns
    the tensors of all ranks as one vector, in rank order. `tensors_by_rank` has one entry for each rank.
    """
    scales_of_rank = compute_largest_scale(tensors_by_rank[rank].amax(part))
    codes_of_rank = tensors_by_rank[rank].encode_tensors(part, scales_of_rank)
    # AllGather needs payloads of equal length, but ranks own different numbers of elements. So send the codes of this
    # rank to each rank, by the exchange whose rows may differ in length.
    codes = yield AllToAllRows(
        codes_of_rank.repeat(len(tensors_by_rank)),
        rank,
        sent_lengths=[len(codes_of_rank)] * len(tensors_by_rank),
        received_lengths=[rank_tensors.num_elements for rank_tensors in tensors_by_rank],
    )
    scales = yield AllGather(scales_of_rank)
    return torch.cat(
        [
            rank_tensors.decode_tensors(received_codes, received_scales)
            for rank_tensors, received_codes, received_scales in zip(tensors_by_rank, codes, scales, strict=True)
        ]
    )


def average_tensors(values: Tensor, rank: int, tensors_by_rank: Sequence[RankTensors]) -> ExchangeProgram[Tensor]:
    """Returns the mean over all ranks of each tensor that this rank owns. Ranks send codes, and all ranks use the
    same scale for a tensor.

    `values` has this rank's values of all tensors: first those of the tensors that rank 0 owns, and so on.
    """
    row_lengths = [rank_tensors.num_elements for rank_tensors in tensors_by_rank]
    rows = torch.split(values, row_lengths)
    amax = torch.stack([rank_tensors.amax(row) for rank_tensors, row in zip(tensors_by_rank, rows, strict=True)])
    scales = yield from _compute_shared_scale(amax)
    codes = torch.cat(
        [
            rank_tensors.encode_tensors(row, row_scales)
            for rank_tensors, row, row_scales in zip(tensors_by_rank, rows, scales, strict=True)
        ]
    )
    received_codes = yield AllToAllRows(
        codes, rank, sent_lengths=row_lengths, received_lengths=[row_lengths[rank]] * len(tensors_by_rank)
    )
    summed_values = _sum_in_rank_order([decode_e4m3(row) for row in received_codes])
    return torch.cat(
        [
            owned_tensor / (scale * len(tensors_by_rank))
            for owned_tensor, scale in tensors_by_rank[rank].iterate_tensors(summed_values, scales[rank])
        ]
    )


def exchange_parts(values: Tensor, size: int) -> ExchangeProgram[ReducedVector]:
    scale = compute_largest_scale(values.abs().amax().reshape(1))
    codes = yield AllToAll(encode_e4m3(values * scale).reshape(size, -1))
    scales = yield AllToAll(scale.repeat(size, 1))
    return ReducedVector((decode_e4m3(codes) / scales).reshape(-1), codes)


def broadcast_from_first(values: Tensor) -> ExchangeProgram[ReducedVector]:
    scale = compute_largest_scale(values.abs().amax().reshape(1))
    codes = yield BroadcastFromFirst(encode_e4m3(values * scale))
    scale = yield BroadcastFromFirst(scale)
    return ReducedVector(decode_e4m3(codes) / scale, codes)


def sum_in_ring(values: Tensor, rank: int, size: int, all_parts: bool) -> ExchangeProgram[Tensor]:
    """Returns the sum of a vector over ranks as codes: of all parts of the vector, or of this rank's part.

    Part k starts at the rank after rank k, is rounded to E4M3 at every hop, and ends at rank k.
    """
    codes_of_vector_parts = encode_e4m3(values).reshape(size, -1)
    partial_sum_codes = codes_of_vector_parts[rank - 1]
    for hop in range(1, size):
        received_sum_codes = yield ShiftToNextRank(partial_sum_codes)
        index_of_received_part = rank - 1 - hop  # a negative index counts from the last part
        partial_sum_codes = encode_e4m3(
            decode_e4m3(received_sum_codes) + decode_e4m3(codes_of_vector_parts[index_of_received_part])
        )
    if not all_parts:
        return partial_sum_codes
    summed_part_codes = yield AllGather(partial_sum_codes)
    return torch.cat(summed_part_codes)


def _sum_in_rank_order(values: list[Tensor]) -> Tensor:
    """Sums the ranks' values in float32, in rank order, so that all ranks get identical bits."""
    running_sum = values[0].clone()
    for value in values[1:]:
        running_sum += value
    return running_sum


def compute_saturated_share(codes: Tensor) -> Tensor:
    # Ignore the sign bit.
    return ((codes & 0x7F) == _LARGEST_CODE).float().mean()


def compute_flushed_share(values: Tensor, scaling: str, size: int, auto_scale: AutoScale) -> ExchangeProgram[Tensor]:
    scaled_values, _ = yield from scale_for_cast(values, scaling, size, auto_scale)
    is_flushed_to_zero = (decode_e4m3(encode_e4m3(scaled_values)) == 0) & (values != 0)
    return is_flushed_to_zero.float().mean()


ALL_REDUCE = "all_reduce"
ALL_GATHER = "all_gather"
BROADCAST = "broadcast"
# A context manager around communication, which attributes its time to a phase.
PhaseMarker = AbstractContextManager[object]


class SelfCheckFailed(RuntimeError):
    """Raised if a collective returns wrong values when every rank sends ones: a wrong mean over ranks, or, for
    all_gather, all_to_all and broadcast, wrong copies of what ranks send.
    """


def bus_factor(collective: str, size: int) -> float:
    """Returns nccl-tests' factor for a collective. Multiplied by this factor, the bytes per second of a collective can
    be compared with the rate of a link.

    The bytes are those of the whole vector, even if each rank sends or receives only a part of it.
    """
    if collective == BROADCAST:
        return 1.0
    return (2.0 if collective == ALL_REDUCE else 1.0) * (size - 1) / size


def draw_rank_values(seed: int, rank: int, count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed * 4099 + rank + 1))


def compute_exact_result(collective: str, sources: Sequence[Tensor], rank: int) -> Tensor:
    float64_sources = [source.double() for source in sources]
    size = len(float64_sources)
    match collective:
        case "all_reduce":
            return torch.stack(float64_sources).mean(0)
        case "reduce_scatter":
            return torch.stack(float64_sources).mean(0).chunk(size)[rank]
        case "all_gather":
            return torch.cat([tensor.chunk(size)[0] for tensor in float64_sources])
        case "all_to_all":
            return torch.cat([tensor.chunk(size)[rank] for tensor in float64_sources])
    return float64_sources[0]


@dataclass
class PlainCollective:
    """A collective of torch.distributed that sends values in one dtype."""

    collective: str
    dtype: torch.dtype

    def make_payload(self, values: Tensor, size: int) -> Tensor:
        """Returns the tensor that a rank sends. A collective that computes a mean overwrites this tensor."""
        sent_values = values if self.collective != ALL_GATHER else values.chunk(size)[0]
        return sent_values.to(self.dtype, copy=True)

    def __call__(self, payload: Tensor, size: int, communicating: PhaseMarker) -> Tensor:
        with communicating:
            return self._start_collective(payload, size, asynchronous=False)[1]

    def start_async_exchange(self, payload: Tensor, size: int) -> Any:
        return self._start_collective(payload, size, asynchronous=True)[0]

    def _start_collective(self, payload: Tensor, size: int, asynchronous: bool) -> tuple[Any, Tensor]:
        import torch.distributed as dist

        match self.collective:
            case "all_reduce":
                return dist.all_reduce(payload, dist.ReduceOp.AVG, async_op=asynchronous), payload
            case "broadcast":
                return dist.broadcast(payload, 0, async_op=asynchronous), payload
            case "all_gather":
                received_values = payload.new_empty(payload.numel() * size)
                gather_function = find_newest_function("all_gather_single", "all_gather_into_tensor")
                return gather_function(received_values, payload, async_op=asynchronous), received_values
            case "reduce_scatter":
                received_values = payload.new_empty(payload.numel() // size)
                scatter_function = find_newest_function("reduce_scatter_single", "reduce_scatter_tensor")
                return scatter_function(
                    received_values, payload, op=dist.ReduceOp.AVG, async_op=asynchronous
                ), received_values
        received_values = torch.empty_like(payload)
        return dist.all_to_all_single(received_values, payload, async_op=asynchronous), received_values

    def count_sent_bytes(self, payload: Tensor, size: int) -> float:
        total_bytes = payload.numel() * payload.element_size() * (size if self.collective == ALL_GATHER else 1)
        if self.collective == BROADCAST:
            # Return the average per rank: size - 1 ranks receive the bytes of a broadcast.
            return total_bytes * ((size - 1) / size)
        return total_bytes * bus_factor(self.collective, size)


@dataclass
class FP8Collective:
    """A collective composed of exchanges of FP8 codes. `auto_scale` has the factor of FP8-LM, which persists between
    steps.
    """

    collective: str
    method: str = ""
    scaling: str = ""
    auto_scale: AutoScale = field(default_factory=AutoScale)

    def program(self, values: Tensor, rank: int, size: int) -> ExchangeProgram[ReducedVector]:
        match self.collective:
            case "all_gather":
                return gather_parts(values.chunk(size)[0])
            case "all_to_all":
                return exchange_parts(values, size)
            case "broadcast":
                return broadcast_from_first(values)
        needs_whole_vector = self.collective == ALL_REDUCE
        return compute_fp8_mean(
            self.method, values, self.scaling, rank, size, self.auto_scale, whole_vector=needs_whole_vector
        )

    def __call__(
        self, values: Tensor, rank: int, size: int, around: PhaseMarker, counted: SentBytes | None = None
    ) -> ReducedVector:
        """Runs the collective on this process's rank. Each exchange runs inside the context `around`. The bytes that
        the rank sends are added to `counted`.
        """
        return run_on_this_rank(self.program(values, rank, size), counted, around)

    def start_async_exchange(self, values: Tensor, rank: int, size: int) -> PendingRankProgram[ReducedVector]:
        return start_program(self.program(values, rank, size))

    def simulate_ranks(self, sources: Sequence[Tensor]) -> list[ReducedVector]:
        """Runs the programs of all ranks in this process. `sources` has the values of each rank. Returns what each rank
        receives. `auto_scale.mu` does not change.
        """
        collectives_by_rank = [
            FP8Collective(self.collective, self.method, self.scaling, AutoScale(self.auto_scale.mu)) for _ in sources
        ]
        collective_programs = [
            collective.program(values, rank, len(sources))
            for rank, (collective, values) in enumerate(zip(collectives_by_rank, sources, strict=True))
        ]
        return simulate(collective_programs)


def check_collective_mean(kind: PlainCollective | FP8Collective, count: int, rank: int, size: int, device: str) -> None:
    """Checks that the collective `kind` computes the right mean of ones. It is called before anything is timed, because
    some backends treat a dtype that they do not know as integers, and add those.

    In FP8 the mean need not be 1, because the sum in a ring may saturate. It must equal the simulation bit for bit.
    """
    ones = torch.ones(count, device=device)
    if isinstance(kind, PlainCollective):
        measured_values = kind(kind.make_payload(ones, size), size, nullcontext()).float()
        expected_values = torch.ones_like(measured_values)
    else:
        simulated_results = kind.simulate_ranks([torch.ones(count) for _ in range(size)])
        # Run a copy with the same factor mu, because the check must not change that of `kind`.
        auto_scale = AutoScale(kind.auto_scale.mu)
        measured_collective = FP8Collective(kind.collective, kind.method, kind.scaling, auto_scale)
        measured_values = measured_collective(ones, rank, size, nullcontext()).values.cpu()
        expected_values = simulated_results[rank].values
    if not torch.equal(measured_values, expected_values):
        first_wrong_index = int((measured_values != expected_values).nonzero()[0])
        raise SelfCheckFailed(
            f"the self-check of {kind.collective} over {size} ranks failed, so it was not timed: the mean of ones is "
            f"{float(measured_values[first_wrong_index])!r} instead of {float(expected_values[first_wrong_index])!r}"
        )


def find_newest_function(*names: str) -> Callable[..., object]:
    """Returns the first function in `names` that torch.distributed has in this version of torch. torch 2.13 renamed
    some functions, and warns about the old names.
    """
    import torch.distributed as dist

    return next(getattr(dist, name) for name in names if hasattr(dist, name))
