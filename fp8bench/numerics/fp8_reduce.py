"""Means over ranks in few bits: three ways of composing them, and what gradients are scaled by before.

`fp8_gather`: everybody gets everybody's codes and adds them up in float32: what the format costs, and no more; n - 1
times the bytes. `fp8_twoshot`: codes of each part go to its owner, who adds them up in float32 and sends codes of the
mean: honest bytes. `fp8_ring`: a sum travels round and is rounded to the format at every hop, as in a ring of NCCL.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fp8bench.numerics.rank_programs import AllGather, AllToAll, FromFirst, Handed, Largest, Program, Shift

E4M3_LARGEST = 448.0
_LARGEST_CODE = 0x7E
WAYS = (GATHER, TWOSHOT, RING) = ("fp8_gather", "fp8_twoshot", "fp8_ring")
SCALINGS = (PRE, POST, MS_AMP, FP8LM_AUTO) = ("pre", "post", "ms_amp", "fp8lm_auto")
# FP8-LM, equations 2 and 3: mu is halved after a step in which more than 0.001% of the values are the largest, and else
# grows to 2 within 1,000 steps.
MOST_SATURATED = 1e-5
_GROWTH_STEPS = 1000


class Wire(Protocol):
    """What numbers are while they travel: values of a format in some tensor."""

    def encode(self, values: Tensor) -> Tensor: ...
    def decode(self, payload: Tensor) -> Tensor: ...


class E4M3:
    """Codes of E4M3 as bytes. Values beyond the largest are that: torch's own casts have not always saturated."""

    def encode(self, values: Tensor) -> Tensor:
        return values.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)

    def decode(self, payload: Tensor) -> Tensor:
        return payload.view(torch.float8_e4m3fn).float()


@dataclass
class AutoScale:
    """FP8-LM's mu, which goes on from step to step and is the same on all ranks: it goes by what all of them have got.

    A tensor, so that a step waits for nothing.
    """

    mu: Tensor = field(default_factory=lambda: torch.ones(1))

    def after(self, saturated: Tensor) -> None:
        grown = (self.mu.to(saturated.device) * 2 ** (1 / _GROWTH_STEPS)).clamp(max=2.0)
        self.mu = torch.where(saturated > MOST_SATURATED, self.mu.to(saturated.device) / 2, grown)


class Reduced(NamedTuple):
    """A mean over ranks, or one part of it, and the codes that it was read from."""

    values: Tensor
    codes: Tensor


def largest_scale(amax: Tensor) -> Tensor:
    """The largest power of two that leaves the largest magnitude within E4M3, as MS-AMP takes it; 1 for none.

    NaN for one that is not finite: E4M3 has no infinity, and 448 in its place would hide an overflow.
    """
    scale = torch.exp2(torch.floor(torch.log2(E4M3_LARGEST / amax)))
    known = torch.where((amax > 0) & torch.isfinite(scale), scale, torch.ones_like(scale))
    return torch.where(torch.isfinite(amax), known, torch.full_like(scale, math.nan))


def factor_of(scaling: str, size: int, auto: AutoScale) -> float | Tensor:
    """What values are multiplied by on top of the scale, so that their sum over ranks is less likely too large."""
    factors: dict[str, float | Tensor] = {
        PRE: 1 / size, POST: 1.0, MS_AMP: 1 / math.sqrt(size), FP8LM_AUTO: auto.mu,
    }  # fmt: skip
    return factors[scaling]


def scaled(values: Tensor, scaling: str, size: int, auto: AutoScale) -> Program[tuple[Tensor, Tensor]]:
    """Values as all ranks cast them alike, and the scale that is in them.

    MS-AMP's code looks for the largest magnitude of all ranks. FP8-LM has gradients in FP8 with a scale of each rank's
    own, takes the smallest of these, and casts again. Its scale is that of gradients before mu: after it, it would take
    mu out again.
    """
    amax = values.abs().amax().reshape(1)
    if scaling == FP8LM_AUTO:
        own = largest_scale(amax)
        scale = -(yield Largest(-own))
        values = E4M3().decode(E4M3().encode(values * own)) / own
    else:
        scale = largest_scale((yield Largest(torch.nan_to_num(amax, nan=math.inf, posinf=math.inf))))
    scale = scale * factor_of(scaling, size, auto)
    return values * scale, scale


def mean_in_fp8(
    way: str, values: Tensor, scaling: str, rank: int, size: int, auto: AutoScale, whole: bool = True
) -> Program[Reduced]:
    """The mean of a vector whose length all ranks can share, or (not `whole`) this rank's part of it."""
    shifted, scale = yield from scaled(values, scaling, size, auto)
    wire = E4M3()
    if way == RING:
        codes = yield from ring(shifted, wire, rank, size, whole)
        reduced = Reduced(wire.decode(codes) / (scale * size), codes)
    elif way == GATHER:
        everybody = yield AllGather(wire.encode(shifted))
        mean = _added([wire.decode(codes_of_rank) for codes_of_rank in everybody]) / (scale * size)
        reduced = Reduced(mean if whole else mean.chunk(size)[rank], torch.cat(everybody))
    elif way == TWOSHOT:
        rows = yield AllToAll(wire.encode(shifted).reshape(size, -1))
        reduced = Reduced(_added([wire.decode(row) for row in rows]) / (scale * size), rows)
        if whole:
            reduced = yield from transported(reduced.values)
    else:
        raise ValueError(f"expected one of {', '.join(WAYS)}, got {way!r}")
    if scaling == FP8LM_AUTO:
        # Of a part each rank has codes of its own, and all have to go on with one mu.
        share = saturated(reduced.codes).reshape(1)
        auto.after(share if whole else (yield Largest(share)))
    return reduced


def transported(part: Tensor) -> Program[Reduced]:
    """Everybody's part, one after the other, as codes with a scale of its own."""
    own = largest_scale(part.abs().amax().reshape(1))
    codes = yield AllGather(E4M3().encode(part * own))
    scales = yield AllGather(own)
    values = [E4M3().decode(code) / scale for code, scale in zip(codes, scales, strict=True)]
    return Reduced(torch.cat(values), torch.cat(codes))


class Pieces(NamedTuple):
    """Whole tensors behind each other in a vector, each with a scale of its own; `most` are as many as a rank has."""

    lengths: Sequence[int]
    most: int

    @property
    def size(self) -> int:
        return sum(self.lengths)

    def amax(self, values: Tensor) -> Tensor:
        amaxes = torch.stack([piece.abs().amax() for piece in torch.split(values, list(self.lengths))])
        return torch.nn.functional.pad(amaxes, (0, self.most - len(self.lengths)))

    def each(self, values: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """A tensor with its scale, one at a time: no other vector is as long as all of them."""
        return zip(torch.split(values, list(self.lengths)), scales[: len(self.lengths)], strict=True)

    def encoded(self, values: Tensor, scales: Tensor) -> Tensor:
        return torch.cat([E4M3().encode(piece * scale) for piece, scale in self.each(values, scales)])

    def decoded(self, codes: Tensor, scales: Tensor) -> Tensor:
        return torch.cat([E4M3().decode(piece) / scale for piece, scale in self.each(codes, scales)])


def tensors_transported(part: Tensor, rank: int, pieces: Sequence[Pieces]) -> Program[Tensor]:
    """Everybody's tensors, one after the other, as codes with a scale for each; `pieces` are all ranks'."""
    own = largest_scale(pieces[rank].amax(part))
    mine = pieces[rank].encoded(part, own)
    codes = yield Handed(mine.repeat(len(pieces)), rank, [len(mine)] * len(pieces), [some.size for some in pieces])
    scales = yield AllGather(own)
    return torch.cat([some.decoded(*theirs) for some, *theirs in zip(pieces, codes, scales, strict=True)])


def mean_of_tensors(values: Tensor, rank: int, pieces: Sequence[Pieces]) -> Program[Tensor]:
    """Of everybody's tensors, one rank's after the other, the mean of this rank's, as codes that all ranks cast alike,
    with a scale a tensor."""
    sizes = [some.size for some in pieces]
    rows = torch.split(values, sizes)
    amax = torch.stack([some.amax(row) for some, row in zip(pieces, rows, strict=True)])
    scales = largest_scale((yield Largest(torch.nan_to_num(amax, nan=math.inf, posinf=math.inf))))
    codes = torch.cat([some.encoded(*own) for some, *own in zip(pieces, rows, scales, strict=True)])
    arrived = yield Handed(codes, rank, sizes, [sizes[rank]] * len(pieces))
    total = _added([E4M3().decode(row) for row in arrived])
    return torch.cat([piece / (scale * len(pieces)) for piece, scale in pieces[rank].each(total, scales[rank])])


def exchanged(values: Tensor, size: int) -> Program[Reduced]:
    """A part for everybody, and one from everybody, as codes with the sender's scale."""
    own = largest_scale(values.abs().amax().reshape(1))
    codes = yield AllToAll(E4M3().encode(values * own).reshape(size, -1))
    scales = yield AllToAll(own.repeat(size, 1))
    return Reduced((E4M3().decode(codes) / scales).reshape(-1), codes)


def sent_round(values: Tensor) -> Program[Reduced]:
    """Rank 0's values, as codes with its scale."""
    own = largest_scale(values.abs().amax().reshape(1))
    codes = yield FromFirst(E4M3().encode(values * own))
    scale = yield FromFirst(own)
    return Reduced(E4M3().decode(codes) / scale, codes)


def ring(values: Tensor, wire: Wire, rank: int, size: int, whole: bool = True) -> Program[Tensor]:
    """The sum of a vector as it travels: part k begins at the rank after its owner, is rounded to the wire's format at
    every hop, and ends at rank k, its owner. That part alone, or all of them.
    """
    parts = [wire.encode(part) for part in values.reshape(size, -1)]
    travelling = parts[rank - 1]
    for hop in range(1, size):
        arrived = yield Shift(travelling)
        travelling = wire.encode(wire.decode(arrived) + wire.decode(parts[rank - 1 - hop]))
    if not whole:
        return travelling
    everybody = yield AllGather(travelling)
    return torch.cat(everybody)


def _added(values: list[Tensor]) -> Tensor:
    """In the order of ranks, in float32, so that everybody gets the same bits."""
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total


def saturated(codes: Tensor) -> Tensor:
    """The share of codes that are the largest, of either sign: 0x7e and 0xfe."""
    return ((codes & 0x7F) == _LARGEST_CODE).float().mean()


def flushed(values: Tensor, scaling: str, size: int, auto: AutoScale) -> Program[Tensor]:
    """The share of a rank's values that are not zero, and are sent as zero."""
    shifted, _ = yield from scaled(values, scaling, size, auto)
    gone = (E4M3().decode(E4M3().encode(shifted)) == 0) & (values != 0)
    return gone.float().mean()
