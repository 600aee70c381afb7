"""Collectives in a dtype of torch or composed in FP8, what each rank must receive, and means in few bits.

Reductions are means, so that a step can be repeated. Each rank contributes a whole vector; for `all_gather` one part of
it, and for `broadcast` only rank 0's vector counts. FP8 means are composed in three ways. `fp8_gather`: all ranks get
all codes and add them up in float32; that costs no more accuracy than the format, and n - 1 times the bytes.
`fp8_twoshot`: codes of each part go to its owner, which adds them up in float32 and sends codes of the mean.
`fp8_ring`: a sum travels around and is rounded to the format at every hop, as in a ring of NCCL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fp8bench.numerics.rank_programs import (
    AllGather,
    AllToAll,
    BegunExchange,
    Counted,
    FromFirst,
    Largest,
    Program,
    RowsToRanks,
    Shift,
    on_this_rank,
    simulate,
    start,
)

E4M3_LARGEST = 448.0
_LARGEST_CODE = 0x7E
WAYS = (GATHER, TWOSHOT, RING) = ("fp8_gather", "fp8_twoshot", "fp8_ring")
PRE = "pre"
POST = "post"
MS_AMP = "ms_amp"
FP8LM_AUTO = "fp8lm_auto"
# FP8-LM, equations 2 and 3: mu is halved after a step in which more than 0.001% of the values are the largest code,
# else it grows by a factor of 2 in 1,000 steps, up to 2.
MOST_SATURATED = 1e-5
_GROWTH_STEPS = 1000


class Wire(Protocol):
    """How values of a format are packed into a tensor to be sent."""

    def encode(self, values: Tensor) -> Tensor: ...
    def decode(self, payload: Tensor) -> Tensor: ...


class E4M3:
    """E4M3 codes as bytes. Larger values are clamped here, because torch's casts have not always saturated."""

    def encode(self, values: Tensor) -> Tensor:
        return values.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)

    def decode(self, payload: Tensor) -> Tensor:
        return payload.view(torch.float8_e4m3fn).float()


@dataclass
class AutoScale:
    """FP8-LM's mu, which lasts from step to step. It depends on what all ranks received, so it is equal on all. It is a
    tensor, so that a step need not wait."""

    mu: Tensor = field(default_factory=lambda: torch.ones(1))

    def after(self, saturated_share: Tensor) -> None:
        grown = (self.mu.to(saturated_share.device) * 2 ** (1 / _GROWTH_STEPS)).clamp(max=2.0)
        self.mu = torch.where(saturated_share > MOST_SATURATED, self.mu.to(saturated_share.device) / 2, grown)


class Reduced(NamedTuple):
    """A mean over ranks, or one part of it, and the codes with a common scale from which it was computed."""

    values: Tensor
    codes: Tensor


def largest_scale(amax: Tensor) -> Tensor:
    """Returns the largest power of two that keeps the largest magnitude within E4M3, as in MS-AMP; 1 for zeros.

    NaN for a magnitude that is not finite: E4M3 has no infinity, and 448 in its place would hide an overflow.
    """
    scale = torch.exp2(torch.floor(torch.log2(E4M3_LARGEST / amax)))
    sound = torch.where((amax > 0) & torch.isfinite(scale), scale, torch.ones_like(scale))
    return torch.where(torch.isfinite(amax), sound, torch.full_like(scale, math.nan))


def factor_of(scaling: str, size: int, auto: AutoScale) -> float | Tensor:
    """Returns a further factor of the scale that makes an overflow of the sum over ranks less likely."""
    if scaling == FP8LM_AUTO:
        return auto.mu
    return {PRE: 1 / size, POST: 1.0, MS_AMP: 1 / math.sqrt(size)}[scaling]


def cast_scale(values: Tensor, scaling: str, size: int, auto: AutoScale) -> Program[tuple[Tensor, Tensor]]:
    """Returns values as all ranks cast them, and their scale.

    MS-AMP scales by the largest magnitude of all ranks. FP8-LM stores gradients in FP8 with each rank's own scale,
    takes the smallest of these scales, and casts again; the scale is that of gradients before mu, which it would
    otherwise cancel.
    """
    amax = values.abs().amax().reshape(1)
    if scaling == FP8LM_AUTO:
        scale_of_rank = largest_scale(amax)
        scale = -(yield Largest(-scale_of_rank))
        values = E4M3().decode(E4M3().encode(values * scale_of_rank)) / scale_of_rank
    else:
        scale = largest_scale((yield Largest(torch.nan_to_num(amax, nan=math.inf, posinf=math.inf))))
    scale = scale * factor_of(scaling, size, auto)
    return values * scale, scale


def mean_in_fp8(
    way: str, values: Tensor, scaling: str, rank: int, size: int, auto: AutoScale, whole: bool = True
) -> Program[Reduced]:
    """Returns the mean of a vector whose length is a multiple of the ranks, or (not `whole`) this rank's part of it."""
    shifted, scale = yield from cast_scale(values, scaling, size, auto)
    wire = E4M3()
    if way == RING:
        codes = yield from ring(shifted, wire, rank, size, whole)
        reduced = Reduced(wire.decode(codes) / (scale * size), codes)
    elif way == GATHER:
        everybody = yield AllGather(wire.encode(shifted))
        mean = _add_up([wire.decode(codes_of_rank) for codes_of_rank in everybody]) / (scale * size)
        reduced = Reduced(mean if whole else mean.chunk(size)[rank], torch.cat(everybody))
    elif way == TWOSHOT:
        rows = yield AllToAll(wire.encode(shifted).reshape(size, -1))
        reduced = Reduced(_add_up([wire.decode(row) for row in rows]) / (scale * size), rows)
        if whole:
            # Codes of the mean have separate scales: saturation by the common scale is visible in the sent codes.
            reduced = (yield from transport(reduced.values))._replace(codes=rows)
    else:
        raise ValueError(f"expected one of {', '.join(WAYS)}, got {way!r}")
    if scaling == FP8LM_AUTO:
        # With a part, or in two shots, each rank has different codes, but all ranks need the same mu.
        share = saturated_share(reduced.codes).reshape(1)
        auto.after(share if whole and way != TWOSHOT else (yield Largest(share)))
    return reduced


def transport(part: Tensor) -> Program[Reduced]:
    own_scale = largest_scale(part.abs().amax().reshape(1))
    codes = yield AllGather(E4M3().encode(part * own_scale))
    scales = yield AllGather(own_scale)
    values = [E4M3().decode(code) / scale for code, scale in zip(codes, scales, strict=True)]
    return Reduced(torch.cat(values), torch.cat(codes))


class Pieces(NamedTuple):
    """Whole tensors in a vector, each with a scale; `most` is the largest number on any rank."""

    lengths: Sequence[int]
    most: int

    @property
    def size(self) -> int:
        return sum(self.lengths)

    def amax(self, values: Tensor) -> Tensor:
        amaxes = torch.stack([piece.abs().amax() for piece in torch.split(values, list(self.lengths))])
        return torch.nn.functional.pad(amaxes, (0, self.most - len(self.lengths)))

    def each(self, values: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields tensors with their scales, one at a time, so that no second vector of that length is needed."""
        return zip(torch.split(values, list(self.lengths)), scales[: len(self.lengths)], strict=True)

    def encoded(self, values: Tensor, scales: Tensor) -> Tensor:
        return torch.cat([E4M3().encode(piece * scale) for piece, scale in self.each(values, scales)])

    def decoded(self, codes: Tensor, scales: Tensor) -> Tensor:
        return torch.cat([E4M3().decode(piece) / scale for piece, scale in self.each(codes, scales)])


def transport_tensors(part: Tensor, rank: int, pieces: Sequence[Pieces]) -> Program[Tensor]:
    """All ranks' tensors in their order, as codes with a scale for each; `pieces` has one entry a rank."""
    scales_of_rank = largest_scale(pieces[rank].amax(part))
    mine = pieces[rank].encoded(part, scales_of_rank)
    codes = yield RowsToRanks(mine.repeat(len(pieces)), rank, [len(mine)] * len(pieces), [some.size for some in pieces])
    scales = yield AllGather(scales_of_rank)
    return torch.cat([some.decoded(*theirs) for some, *theirs in zip(pieces, codes, scales, strict=True)])


def mean_of_tensors(values: Tensor, rank: int, pieces: Sequence[Pieces]) -> Program[Tensor]:
    """Returns the mean of this rank's tensors, from all ranks' codes with a common scale per tensor; `values` has the
    tensors of all ranks in order."""
    sizes = [some.size for some in pieces]
    rows = torch.split(values, sizes)
    amax = torch.stack([some.amax(row) for some, row in zip(pieces, rows, strict=True)])
    scales = largest_scale((yield Largest(torch.nan_to_num(amax, nan=math.inf, posinf=math.inf))))
    codes = torch.cat(
        [some.encoded(*row_and_scales) for some, *row_and_scales in zip(pieces, rows, scales, strict=True)]
    )
    arrived = yield RowsToRanks(codes, rank, sizes, [sizes[rank]] * len(pieces))
    total = _add_up([E4M3().decode(row) for row in arrived])
    return torch.cat([piece / (scale * len(pieces)) for piece, scale in pieces[rank].each(total, scales[rank])])


def exchange(values: Tensor, size: int) -> Program[Reduced]:
    operands = largest_scale(values.abs().amax().reshape(1))
    codes = yield AllToAll(E4M3().encode(values * operands).reshape(size, -1))
    scales = yield AllToAll(operands.repeat(size, 1))
    return Reduced((E4M3().decode(codes) / scales).reshape(-1), codes)


def sent_round(values: Tensor) -> Program[Reduced]:
    scale = largest_scale(values.abs().amax().reshape(1))
    codes = yield FromFirst(E4M3().encode(values * scale))
    scale = yield FromFirst(scale)
    return Reduced(E4M3().decode(codes) / scale, codes)


def ring(values: Tensor, wire: Wire, rank: int, size: int, all_parts: bool = True) -> Program[Tensor]:
    """The sum of a vector that travels: part k begins at the rank after its owner, which is rank k, is rounded to the
    wire's format at every hop, and ends at its owner. Returns that part alone, or all parts."""
    parts = [wire.encode(part) for part in values.reshape(size, -1)]
    travelling = parts[rank - 1]
    for hop in range(1, size):
        arrived = yield Shift(travelling)
        travelling = wire.encode(wire.decode(arrived) + wire.decode(parts[rank - 1 - hop]))
    if not all_parts:
        return travelling
    everybody = yield AllGather(travelling)
    return torch.cat(everybody)


def _add_up(values: list[Tensor]) -> Tensor:
    """Adds in the order of ranks, in float32, so that all ranks get the same bits."""
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total


def saturated_share(codes: Tensor) -> Tensor:
    return ((codes & 0x7F) == _LARGEST_CODE).float().mean()


def flushed_share(values: Tensor, scaling: str, size: int, auto: AutoScale) -> Program[Tensor]:
    shifted, _ = yield from cast_scale(values, scaling, size, auto)
    flushed = (E4M3().decode(E4M3().encode(shifted)) == 0) & (values != 0)
    return flushed.float().mean()


ALL_REDUCE = "all_reduce"
ALL_GATHER = "all_gather"
BROADCAST = "broadcast"
Marker = AbstractContextManager[object]


class SelfCheckFailed(RuntimeError):
    """The result of adding up, or sending, ones was wrong."""


def bus_factor(collective: str, size: int) -> float:
    """Returns the factor by which nccl-tests multiplies bytes over time, to compare with a link's rate. The bytes are
    those of the whole vector, of all ranks."""
    if collective == BROADCAST:
        return 1.0
    return (2.0 if collective == ALL_REDUCE else 1.0) * (size - 1) / size


def rank_values(seed: int, rank: int, count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed * 4099 + rank + 1))


def expected(collective: str, sources: Sequence[Tensor], rank: int) -> Tensor:
    exact = [source.double() for source in sources]
    size = len(exact)
    match collective:
        case "all_reduce":
            return torch.stack(exact).mean(0)
        case "reduce_scatter":
            return torch.stack(exact).mean(0).chunk(size)[rank]
        case "all_gather":
            return torch.cat([tensor.chunk(size)[0] for tensor in exact])
        case "all_to_all":
            return torch.cat([tensor.chunk(size)[rank] for tensor in exact])
    return exact[0]


@dataclass
class Plain:
    """A collective of torch in one dtype."""

    collective: str
    dtype: torch.dtype

    def given(self, values: Tensor, size: int) -> Tensor:
        """Returns the tensor that a rank sends; a mean overwrites it."""
        whole = values if self.collective != ALL_GATHER else values.chunk(size)[0]
        return whole.to(self.dtype, copy=True)

    def __call__(self, given: Tensor, size: int, communicating: Marker) -> Tensor:
        with communicating:
            return self._asked(given, size, False)[1]

    def begun(self, given: Tensor, size: int) -> Any:
        return self._asked(given, size, True)[0]

    def _asked(self, given: Tensor, size: int, alone: bool) -> tuple[Any, Tensor]:
        import torch.distributed as dist

        match self.collective:
            case "all_reduce":
                return dist.all_reduce(given, dist.ReduceOp.AVG, async_op=alone), given
            case "broadcast":
                return dist.broadcast(given, 0, async_op=alone), given
            case "all_gather":
                received = given.new_empty(given.numel() * size)
                gather = newest("all_gather_single", "all_gather_into_tensor")
                return gather(received, given, async_op=alone), received
            case "reduce_scatter":
                received = given.new_empty(given.numel() // size)
                scatter = newest("reduce_scatter_single", "reduce_scatter_tensor")
                return scatter(received, given, op=dist.ReduceOp.AVG, async_op=alone), received
        received = torch.empty_like(given)
        return dist.all_to_all_single(received, given, async_op=alone), received

    def sent(self, given: Tensor, size: int) -> float:
        whole = given.numel() * given.element_size() * (size if self.collective == ALL_GATHER else 1)
        factor = bus_factor(self.collective, size) if self.collective != BROADCAST else (size - 1) / size
        return whole * factor


@dataclass
class InFP8:
    """A collective composed of exchanges of codes; `auto` carries its state from step to step."""

    collective: str
    way: str = ""
    scaling: str = ""
    auto: AutoScale = field(default_factory=AutoScale)

    def program(self, values: Tensor, rank: int, size: int) -> Program[Reduced]:
        match self.collective:
            case "all_gather":
                return transport(values.chunk(size)[0])
            case "all_to_all":
                return exchange(values, size)
            case "broadcast":
                return sent_round(values)
        return mean_in_fp8(self.way, values, self.scaling, rank, size, self.auto, self.collective == ALL_REDUCE)

    def __call__(self, values: Tensor, rank: int, size: int, around: Marker, counted: Counted | None = None) -> Reduced:
        return on_this_rank(self.program(values, rank, size), counted, around)

    def begun(self, values: Tensor, rank: int, size: int) -> BegunExchange[Reduced]:
        return start(self.program(values, rank, size))

    def alone(self, sources: Sequence[Tensor]) -> list[Reduced]:
        """Returns what each rank receives, by the same programs in this process; this rank's mu does not change."""
        collectives = [InFP8(self.collective, self.way, self.scaling, AutoScale(self.auto.mu)) for _ in sources]
        pairs = enumerate(zip(collectives, sources, strict=True))
        return simulate([in_fp8.program(values, rank, len(sources)) for rank, (in_fp8, values) in pairs])


def check_ones(kind: Plain | InFP8, count: int, rank: int, size: int, device: str) -> None:
    """Adds up ones before anything is timed: some backends added up unknown dtypes as integers.

    In FP8 the mean need not be 1, because a ring's sum may saturate, but it is bit for bit what one process computes.
    """
    ones = torch.ones(count, device=device)
    if isinstance(kind, Plain):
        sums = kind(kind.given(ones, size), size, nullcontext()).float()
        correct = torch.ones_like(sums)
    else:
        alone = kind.alone([torch.ones(count) for _ in range(size)])
        fresh = InFP8(kind.collective, kind.way, kind.scaling)
        sums = fresh(ones, rank, size, nullcontext()).values.cpu()
        correct = alone[rank].values
    if not torch.equal(sums, correct):
        at = int((sums != correct).nonzero()[0])
        raise SelfCheckFailed(
            f"the self-check of {kind.collective} over {size} ranks: ones came to {float(sums[at])!r}, and must be "
            f"{float(correct[at])!r} (1 + ... + 1 over {size}); so it was not timed"
        )


def newest(*names: str) -> Callable[..., object]:
    """Returns the newest of these functions that torch has: 2.13 renamed some, and warns of the old names."""
    import torch.distributed as dist

    return next(getattr(dist, name) for name in names if hasattr(dist, name))
