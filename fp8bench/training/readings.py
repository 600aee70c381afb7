"""What one tensor says of itself and of its rounding: figures found on its device, read by the host once a step.

Values that are not finite are counted, and stand in no other figure. docs/watching.md has the definitions.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8bench.formats.blocks import float_factor
from fp8bench.formats.grids import BF16, FP16, Format
from fp8bench.formats.scaled import blocks_of
from fp8bench.formats.scalings import Scaling
from fp8bench.model.training import LayerReading
from fp8bench.nn.recipe_arithmetic import RecipeArithmetic
from fp8bench.numerics.norms import as_rows
from fp8bench.numerics.tensor_error import decibels
from fp8bench.protocols import Arithmetic, Operand, Role
from fp8bench.units import EXACT_DB

# Figures by name: numbers of the host, or tensors without dimensions on the device.
Number = float | Tensor
Figures = dict[str, Number]

_INFINITY, _MAGNITUDE, _SMALLEST_NORMAL = 0x7F800000, 0x7FFFFFFF, 0x00800000
# A magnitude is beyond the largest when it is by more than a float32 scale and its inverse can be wrong.
_SLACK = 1 + 2.0**-21
# Squares of magnitudes between these are float32 numbers, and so are the sums of as many as a row has.
_PLAIN = (2.0**-45, 2.0**45)
_CARRIERS = {torch.bfloat16: BF16, torch.float16: FP16}


@dataclass(frozen=True)
class Cast:
    """What became of a tensor: its elements' format and what scales them, as far as they are known.

    `scale` multiplied it where that does not come from the tensor alone. `left` are the values that a product takes;
    None where nothing was rounded.
    """

    fmt: Format | None = None
    scaling: Scaling | None = None
    scale: Tensor | None = None
    left: Tensor | None = None


def waits_for(x: Tensor) -> bool:
    """Whether a look at a number is as good as free: on a processor it is there as soon as it was asked for."""
    return x.device.type == "cpu"


def cast_of(arithmetic: Arithmetic, operand: Operand, source: Tensor, role: Role) -> Cast:
    """The cast that an arithmetic has just done."""
    if operand.data.dtype == source.dtype and operand.data.data_ptr() == source.data_ptr():
        return Cast(_CARRIERS.get(source.dtype))
    left = arithmetic.restore(operand, torch.float32)
    if isinstance(arithmetic, RecipeArithmetic):
        treatment = arithmetic.treatments[role]
        return Cast(treatment.fmt, treatment.scaling, arithmetic.last_scale(role), left)
    return Cast(_CARRIERS.get(operand.data.dtype), left=left)


def figures_of(x: Tensor, cast: Cast | None = None) -> Figures:
    """All figures of a tensor, and of its cast if there was one. On a GPU nothing waits for it."""
    if not x.numel():
        return {}
    found = _Values(as_rows(x))
    figures = found.figures()
    if cast is not None and cast.left is not None:
        figures |= found.losses(as_rows(cast.left))
    if cast is not None and cast.fmt is not None:
        figures |= found.range(cast.fmt, cast)
    return figures


class _Values:
    """Values as float32 rows. On a processor a look at the least and the largest spares most of the work."""

    def __init__(self, x: Tensor) -> None:
        self.waits = waits_for(x)
        self.given = self.values = x.to(torch.float32)
        # Magnitudes as the integers that order them: of bfloat16 those have half as many bits.
        self.shift = 16 if x.dtype == torch.bfloat16 else 0
        words = x.view(torch.int16) if self.shift else self.values.view(torch.int32)
        infinity, magnitude = _INFINITY >> self.shift, _MAGNITUDE >> self.shift
        self.bits = words.bitwise_and(magnitude)
        low, self.peak = self.bits.aminmax()
        high = self.peak
        self.lost: Number = 0
        self.finite: Tensor | None = None
        if not self.waits or int(high) >= infinity:
            self.finite = self.bits < infinity
            self.lost = x.numel() - self.finite.sum()
            self.values, self.bits = (torch.where(self.finite, one, 0) for one in (self.values, self.bits))
            low, high = self.bits.aminmax()
        self.zeros: Number = 0
        if not self.waits or not int(low):
            self.zeros = x.numel() - _ones(self.bits).sum(dtype=torch.int32) - self.lost
            low = self.bits.sub(1).bitwise_and_(magnitude).amin().clamp_(max=magnitude - 1) + 1  # NaN of zeros alone
        self.low, self.high = low, high
        self.amax: Number = _number(int(high), self.shift) if self.waits else self._as_float(high)
        self.unit = self._unit()
        self.squares = _squares(self._in_units(self.values))

    def figures(self) -> Figures:
        """Those of the tensor itself, sums in units of `unit`."""
        values = self._in_units(self.values)
        total, finite = values.sum(), self.values.numel() - self.lost
        found: Figures = {
            "count": values.numel(), "low": self.low, "high": self.high, "shift": self.shift, "zeros": self.zeros,
            "lost": self.lost, "unit": 1.0 if self.unit is None else self.unit, "total": total, "squares": self.squares,
        }  # fmt: skip
        if not self.waits or float(self.squares) * float(finite) < 2 * float(total) ** 2:
            # The variance would be a difference of nearly the same numbers.
            centred = values - total / finite
            found["centred"] = _squares(centred if self.finite is None else torch.where(self.finite, centred, 0.0))
        return found

    def losses(self, left: Tensor) -> Figures:
        """What is left of the values: how many vanished or are no longer finite, and how wrong the others are."""
        left_bits = left.abs().view(torch.int32)
        low, high = left_bits.aminmax()
        error, lost, signal = left - self.values, self.lost, self.squares
        if not self.waits or self.finite is not None or int(high) >= _INFINITY:
            kept = left_bits < _INFINITY if self.finite is None else self.finite & (left_bits < _INFINITY)
            lost = left.numel() - kept.sum()
            error, exact = torch.where(kept, error, 0.0), torch.where(kept, self.values, 0.0)
            signal = _squares(self._in_units(exact))
        vanished: Number = 0
        if not self.waits or not int(low):
            # Never what is zero in both: a difference of two counts can be negative.
            vanished = (_ones(self.bits) - _ones(left_bits)).clamp_(min=0).sum(dtype=torch.int32)
        return {"noise": _squares(self._in_units(error)), "signal": signal, "vanished": vanished, "not_finite": lost}

    def range(self, fmt: Format, cast: Cast) -> Figures:
        """How much of a format's range the values take up, and what they are multiplied by for it."""
        found: Figures = {"largest": fmt.largest}
        if cast.scaling is None:
            return found | {"saturated": self._beyond(self.values, fmt.largest)}
        if not cast.scaling.rows:
            scale = cast.scale
            if scale is None:
                scale = float_factor(self._as_float(self.peak), fmt, cast.scaling.rounding)
            return found | {"scale": scale, "saturated": self._beyond(self.values, fmt.largest / scale)}
        blocks = blocks_of(self.given.abs(), fmt, cast.scaling, cast.scale)
        steps = blocks.steps.to(torch.float64)
        sound = steps.isfinite() & (steps > 0)
        fullest = torch.where(sound & blocks.peaks.isfinite(), blocks.peaks / steps, 0.0).amax() / fmt.largest
        limits = torch.where(sound, steps * fmt.largest, math.inf).to(torch.float32)
        found |= {"fullest": fullest, **_scales_of(steps, sound & (blocks.peaks > 0))}
        return found | {"saturated": self._beyond(blocks.magnitudes, limits, fullest)}

    def _beyond(self, values: Tensor, limits: Number, fullest: Tensor | None = None) -> Number:
        """How many finite magnitudes are above their limit; `fullest` is the largest share of it, if it is known."""
        if self.waits and self.finite is None:
            share = float(self.amax) / float(limits) if fullest is None else float(fullest)
            if share <= _SLACK:
                return 0
        return ((values.abs() > limits * _SLACK) & values.isfinite()).sum()

    def _unit(self) -> Number | None:
        """A power of two to divide by before values are squared, where that is needed."""
        if not self.waits:
            exponent = self._as_float(self.high).view(torch.int32).bitwise_and(_INFINITY)
            return exponent.clamp_(min=_SMALLEST_NORMAL).view(torch.float32)
        amax = float(self.amax)
        return None if not amax or _PLAIN[0] < amax < _PLAIN[1] else math.ldexp(1.0, max(math.frexp(amax)[1], -125) - 1)

    def _as_float(self, bits: Tensor) -> Tensor:
        return (bits.to(torch.int32) << self.shift).view(torch.float32)

    def _in_units(self, values: Tensor) -> Tensor:
        return values if self.unit is None else values / self.unit


def _ones(bits: Tensor) -> Tensor:
    """1 where a magnitude is not 0. Not compared with it: on a processor that takes ten times as long."""
    return bits.to(torch.int32).clamp(max=1)


def _number(bits: int, shift: int) -> float:
    """The float32 number with such bits."""
    found: float = struct.unpack("=f", struct.pack("=i", bits << shift))[0]
    return found


def _squares(rows: Tensor) -> Tensor:
    """The sum of squares: of a row in float32, of all rows in float64."""
    norms = torch.linalg.vector_norm(rows, dim=-1).to(torch.float64)
    return torch.dot(norms, norms)


def _scales_of(steps: Tensor, used: Tensor) -> Figures:
    """The scales of many blocks, those of zeros left out: in the middle (in octaves), the least and the largest."""
    octaves = torch.where(used, -steps.log2(), 0.0)
    return {
        "octaves": octaves.sum() / used.sum(),
        "largest_step": torch.where(used, steps, 0.0).amax(),
        "least_step": torch.where(used, steps, math.inf).amin(),
    }


def read(figures: Sequence[Figures]) -> list[dict[str, float]]:
    """Figures as numbers: the one time that a device is waited for."""
    waiting = [value for one in figures for value in one.values() if isinstance(value, Tensor)]
    if waiting and waiting[0].device.type == "cpu":
        numbers: Iterable[float] = [value.item() for value in waiting]
    else:
        numbers = torch.stack([value.to(torch.float64) for value in waiting]).tolist() if waiting else []
    known = iter(numbers)
    return [
        {name: next(known) if isinstance(value, Tensor) else value for name, value in one.items()} for one in figures
    ]


def reading_of(
    arm: str, seed: int, step: int, layer: str, role: str, found: Mapping[str, float], before: float | None
) -> LayerReading:
    """A line of the stream from figures that were read; `before` is the tensor's scale in the reading before it."""
    count = found.get("count", 0)
    if not count:
        return LayerReading(arm, seed, step, layer, role, 0.0, 0.0, 0.0, 0.0, 0.0)
    amax, smallest = (_number(int(found[name]), int(found["shift"])) for name in ("high", "low"))
    mean, deviation = _moments(found)
    middle = 2.0 ** found["octaves"] if math.isfinite(found.get("octaves", math.nan)) else 1.0
    scale = found.get("scale", middle)
    in_blocks = bool(found.get("largest_step"))
    return LayerReading(
        arm, seed, step, layer, role, amax, smallest if math.isfinite(smallest) else 0.0, mean, deviation,
        found["zeros"] / count, scale,
        1 / found["largest_step"] if in_blocks else scale, 1 / found["least_step"] if in_blocks else scale,
        _lag(found.get("fullest", amax * scale / found.get("largest", math.inf))),
        None if before is None else _octaves_between(scale, before), found.get("vanished", 0) / count,
        found.get("saturated", 0) / count, _signal_to_noise(found), found.get("not_finite", found["lost"]) / count,
    )  # fmt: skip


def _moments(found: Mapping[str, float]) -> tuple[float, float]:
    """Mean and standard deviation of the finite values; NaN of none."""
    finite = found["count"] - found["lost"]
    if not finite:
        return math.nan, math.nan
    mean = found["total"] / finite
    variance = found["centred"] / finite if "centred" in found else found["squares"] / finite - mean**2
    return mean * found["unit"], math.sqrt(variance) * found["unit"]


def _lag(fullest: float) -> float | None:
    if not 0 < fullest < math.inf:
        return None
    return 0.0 if 1 < fullest <= _SLACK else math.log2(fullest)


def _octaves_between(scale: float, before: float) -> float | None:
    ratio = scale / before if before else math.inf
    return abs(math.log2(ratio)) if 0 < ratio < math.inf else None


def _signal_to_noise(found: Mapping[str, float]) -> float | None:
    if not found.get("signal"):
        return None
    return min(decibels(found["signal"], found["noise"]), EXACT_DB)
