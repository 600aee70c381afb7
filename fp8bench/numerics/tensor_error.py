"""The errors of a rounded tensor: all figures of a tensor x and its rounded y, from one pass over both.

e = y - x; sums are in fp64. Values of x that are not finite, and those that y has lost (finite in x and not in y), are
counted separately and excluded from other figures. `factors_of` gives a scaling's factors, block by block; `figures`
are finite numbers by names that include the unit. A delayed scale has additional figures: how it follows the tensor's
largest magnitude.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8bench.formats.grids import Format
from fp8bench.formats.recipes import Scaling
from fp8bench.formats.scaled import blocks_of, matrix_of
from fp8bench.numerics.norms import as_rows, tiles
from fp8bench.units import EXACT_DB

Place = tuple[slice, slice]


@dataclass(frozen=True)
class Factors:
    """Values are elements times the factor of their block.

    `steps` has one factor for each block, (blocks down, blocks across), on the tensor's device; a block has `rows` x
    `columns` elements, 0 standing for all. A factor that is 0, infinite or NaN has lost its block.
    """

    steps: Tensor
    rows: int = 0
    columns: int = 0

    def over(self, place: Place) -> Tensor:
        down, across = (self._blocks(part, size) for part, size in zip(place, (self.rows, self.columns), strict=True))
        return self.steps.index_select(0, down).index_select(1, across).to(torch.float64)

    def raise_to_peaks(self, peaks: Tensor, magnitudes: Tensor, place: Place) -> None:
        highest = in_blocks(magnitudes, self.columns).amax(-1)
        rows = self._blocks(place[0], self.rows).unsqueeze(1).expand(highest.shape)
        first = place[1].start // self.columns if self.columns else 0
        peaks[:, first : first + highest.shape[1]].scatter_reduce_(0, rows, highest, "amax")

    def _blocks(self, place: slice, size: int) -> Tensor:
        """Returns the block of each row (or column) of a piece; a single 0 if there is one block."""
        if not size:
            return torch.zeros(1, dtype=torch.int64, device=self.steps.device)
        return torch.arange(place.start, place.stop, device=self.steps.device).div_(size, rounding_mode="floor")


def factors_of(x: Tensor, fmt: Format, scaling: Scaling | None, scale: Tensor | None = None) -> Factors:
    """Returns the factors of a tensor's own scales, or of a `scale` from earlier steps; 1 without a scaling."""
    if scaling is None:
        return Factors(torch.ones(1, 1, device=x.device))
    steps = blocks_of(x.detach().to(torch.float32).abs(), fmt, scaling, scale).steps
    down = -(-matrix_of(x.shape)[0] // scaling.rows) if scaling.rows else 1
    return Factors(steps.reshape(down, -1), scaling.rows, scaling.columns)


def in_blocks(x: Tensor, columns: int) -> Tensor:
    """(rows, blocks, columns), the last block padded with zeros; 0 columns means all."""
    size = columns or x.shape[1]
    missing = -x.shape[1] % size
    filled = pad(x, (0, missing)) if missing else x
    return filled.reshape(x.shape[0], filled.shape[1] // size, size)


# Spreads use MX's block for all scalings, so that they compare.
BLOCK = 32
# A magnitude only exceeds the largest if it does by more than the error of a float32 scale and its inverse.
_SLACK = 1 + 2.0**-21
_FLOAT64_BIAS = 1023
_FLOAT64_MANTISSA_BITS = 52


@dataclass(frozen=True)
class Spread:
    """SQNR of a tensor's parts in dB: the median, and the 1% quantile. Nearest ranks from below; infinite if a part is
    exact. Parts that are zero in x do not count."""

    median_db: float
    p1_db: float


@dataclass(frozen=True)
class TensorError:
    """Figures of a tensor and its rounded self. Shares are percentages of all `count` values.

    For a tensor that is empty or zero, SQNR, error, cosine, slope and spreads are None, and shares 0. Figures that need
    the grid (ulp, saturation, subnormals, utilisation) are None without a format.
    """

    count: int
    nonzero: int
    lost: int
    vanished: int
    signal: float
    noise: float
    cross: float
    output: float
    amax: float
    smallest: float
    rows: Spread | None
    blocks: Spread | None
    saturated: int | None = None
    subnormal: int | None = None
    max_ulp: float | None = None
    utilisation: float | None = None

    @property
    def sqnr_db(self) -> float | None:
        """10 log10(sum x^2 / sum e^2): infinite where nothing was lost."""
        return decibels(self.signal, self.noise) if self.signal else None

    @property
    def relative(self) -> float | None:
        return math.sqrt(self.noise / self.signal) if self.signal else None

    @property
    def cosine(self) -> float | None:
        """<x, y> / (||x|| ||y||); 0 where all of y is zero."""
        if not self.signal:
            return None
        return self.cross / math.sqrt(self.signal * self.output) if self.output else 0.0

    @property
    def slope(self) -> float | None:
        """<x, y> / <x, x>: 1 where rounding does not shrink or stretch (stochastic rounding: 1 +- k / sqrt(n))."""
        return self.cross / self.signal if self.signal else None

    @property
    def underflow_percent(self) -> float:
        return self._percent(self.vanished)

    @property
    def underflow_nonzero_percent(self) -> float:
        """Like underflow, as a percentage of the values that are not zero in x."""
        return 100 * self.vanished / self.nonzero if self.nonzero else 0.0

    @property
    def saturation_percent(self) -> float | None:
        """Magnitudes above the largest of the format, times the scale: before any clamp."""
        return None if self.saturated is None else self._percent(self.saturated)

    @property
    def subnormal_percent(self) -> float | None:
        """Magnitudes below the smallest normal of the format, times the scale, and not zero."""
        return None if self.subnormal is None else self._percent(self.subnormal)

    @property
    def not_finite_percent(self) -> float:
        """Values that are finite in x and not in y: an infinity of fp16, the NaN of a whole MX block."""
        return self._percent(self.lost)

    @property
    def dynamic_range_octaves(self) -> float | None:
        """log2(amax / smallest magnitude that is not zero) of x."""
        return math.log2(self.amax / self.smallest) if self.nonzero else None

    def _percent(self, number: int) -> float:
        return 100 * number / self.count if self.count else 0.0


def tensor_error(x: Tensor, y: Tensor, fmt: Format | None = None, factors: Factors | None = None) -> TensorError:
    """The figures of x and y, tensors of one shape and any dtypes.

    `fmt` is the elements' format, and `factors` what scales them, if anything. max_ulp is the largest |e| in units of
    the format's spacing at x, without saturated values (at most 0.5 for nearest rounding, below 1 for stochastic).
    `utilisation` is the largest magnitude over the format's largest times the factor, for several factors that of the
    median non-zero block.
    """
    if x.shape != y.shape:
        raise ValueError(f"shapes differ: {tuple(x.shape)} and {tuple(y.shape)}")
    exact_rows = as_rows(x)
    rounded_rows = as_rows(y)
    values = _Values(exact_rows)
    grid = None if fmt is None else _GridFigures(fmt, factors or Factors(torch.ones(1, 1, device=x.device)))
    for place in tiles(*exact_rows.shape):
        exact = exact_rows[place].to(torch.float64)
        rounded = rounded_rows[place].to(torch.float64)
        finite = exact.isfinite()
        both_finite = finite & rounded.isfinite()
        exact = torch.where(finite, exact, 0.0)
        if grid is not None:
            grid.add(exact, rounded, both_finite, place)
        values.add(exact, rounded, finite, both_finite, place)
    return values.error(x.numel(), grid)


def decibels(signal: float, noise: float) -> float:
    return 10 * math.log10(signal / noise) if noise else math.inf


class _Values:
    """Sums and counts that need no format, as tensors on the device, which are only read at the end."""

    def __init__(self, like: Tensor) -> None:
        height, width = like.shape
        device = like.device
        parts = (height, -(-width // BLOCK))
        self._signal, self._noise = (torch.zeros(parts, dtype=torch.float64, device=device) for _ in range(2))
        self._cross, self._output, self._amax = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(3))
        self._smallest = torch.full((), math.inf, dtype=torch.float64, device=device)
        # Counts of values that are not zero, lost, vanished.
        self._counts = torch.zeros(3, dtype=torch.int64, device=device)

    def add(self, exact: Tensor, rounded: Tensor, finite: Tensor, both_finite: Tensor, place: Place) -> None:
        """Adds a piece of x, with 0 for values that are not `finite`, and of y; `both_finite` marks values
        that are finite in both."""
        nonzero = exact != 0
        self._counts[0] += nonzero.sum()
        self._counts[1] += (finite & ~both_finite).sum()
        self._counts[2] += (nonzero & (rounded == 0)).sum()
        magnitudes = exact.abs()
        self._amax = torch.maximum(self._amax, magnitudes.amax())
        self._smallest = torch.minimum(self._smallest, torch.where(nonzero, magnitudes, math.inf).amin())
        exact = torch.where(both_finite, exact, 0.0)
        rounded = torch.where(both_finite, rounded, 0.0)
        self._cross += (exact * rounded).sum()
        self._output += rounded.square().sum()
        first = place[1].start // BLOCK
        for sums, squares in ((self._signal, exact.square()), (self._noise, (rounded - exact).square())):
            summed = in_blocks(squares, BLOCK).sum(-1)
            sums[place[0], first : first + summed.shape[1]] += summed

    def error(self, count: int, grid: _GridFigures | None) -> TensorError:
        nonzero, lost, vanished = self._counts.tolist()
        saturated, subnormal, max_ulp, utilisation = grid.figures() if grid is not None else (None,) * 4
        return TensorError(
            count,
            nonzero,
            lost,
            vanished,
            float(self._signal.sum()),
            float(self._noise.sum()),
            float(self._cross),
            float(self._output),
            float(self._amax),
            float(self._smallest) if nonzero else 0.0,
            _spread(self._signal.sum(1), self._noise.sum(1)),
            _spread(self._signal, self._noise),
            saturated,
            subnormal,
            max_ulp,
            utilisation,
        )


class _GridFigures:
    """Figures that need the elements' format: x in units of its block's factor."""

    def __init__(self, fmt: Format, factors: Factors) -> None:
        self._fmt = fmt
        self._factors = factors
        self._peaks = torch.zeros(factors.steps.shape, dtype=torch.float64, device=factors.steps.device)
        self._max_ulp = torch.zeros((), dtype=torch.float64, device=self._peaks.device)
        self._counts = torch.zeros(2, dtype=torch.int64, device=self._peaks.device)

    def add(self, exact: Tensor, rounded: Tensor, both_finite: Tensor, place: Place) -> None:
        factor = self._factors.over(place)
        sound = factor.isfinite() & (factor > 0)
        divisor = torch.where(sound, factor, 1.0)
        elements = torch.where(sound, exact, 0.0) / divisor
        magnitudes = elements.abs()
        beyond = magnitudes > self._fmt.largest * _SLACK
        self._counts[0] += beyond.sum()
        self._counts[1] += ((magnitudes > 0) & (magnitudes < self._fmt.smallest_normal)).sum()
        self._factors.raise_to_peaks(self._peaks, magnitudes, place)
        # The format's spacing at each magnitude, computed from its bits, because a logarithm would round.
        exponent = magnitudes.view(torch.int64).bitwise_right_shift(_FLOAT64_MANTISSA_BITS) - _FLOAT64_BIAS
        spacing = exponent.clamp_(min=self._fmt.min_exponent) - self._fmt.mantissa_bits + _FLOAT64_BIAS
        steps = spacing.bitwise_left_shift_(_FLOAT64_MANTISSA_BITS).view(torch.float64)
        errors = (rounded / divisor - elements).abs() / steps
        counted = both_finite & sound & ~beyond
        self._max_ulp = torch.maximum(self._max_ulp, torch.where(counted, errors, 0.0).amax())

    def figures(self) -> tuple[int, int, float, float | None]:
        """Returns saturated, subnormal, the largest error in ulp, and the utilisation (None for zeros)."""
        peaks = self._peaks[self._peaks > 0]
        used = float(peaks.median()) / self._fmt.largest if peaks.numel() else None
        saturated, subnormal = self._counts.tolist()
        return saturated, subnormal, float(self._max_ulp), used


def _spread(signal: Tensor, noise: Tensor) -> Spread | None:
    nonzero = signal > 0
    ratios = (signal[nonzero] / noise[nonzero]).log10().mul(10).sort().values
    if not ratios.numel():
        return None
    last = ratios.numel() - 1
    return Spread(float(ratios[last // 2]), float(ratios[last // 100]))


@dataclass(frozen=True)
class ScaleCourse:
    """How a delayed scale follows its tensor, in octaves by step, without values that involve a scale or an amax of 0.

    drift_t = |log2(s_t / s_(t-1))| is how far the scale moved. lag_t = log2(amax_t s_t / largest): above 0 the step's
    largest values saturate, below 0 part of the format's range is unused.
    """

    drift: tuple[float, ...]
    lag: tuple[float, ...]


def scale_course(scales: Sequence[float], amaxes: Sequence[float], fmt: Format) -> ScaleCourse:
    if len(scales) != len(amaxes):
        raise ValueError(f"{len(scales)} scales cannot be those of {len(amaxes)} steps")
    drift = [_octaves(now, earlier) for earlier, now in itertools.pairwise(scales)]
    lag = [_octaves(amax * scale, fmt.largest) for scale, amax in zip(scales, amaxes, strict=True)]
    return ScaleCourse(
        tuple(abs(octaves) for octaves in drift if octaves is not None),
        tuple(octaves for octaves in lag if octaves is not None),
    )


def _octaves(above: float, below: float) -> float | None:
    ratio = above / below if below else math.inf
    return math.log2(ratio) if 0 < ratio < math.inf else None


def figures(error: TensorError, course: ScaleCourse | None = None) -> dict[str, float]:
    """Returns figures by name, without those that a tensor does not have; docs/formats.md defines them. An SQNR without
    any error is given as EXACT_DB. `course` is that of a scale from earlier steps."""
    decibels_by_part = {"": error.sqnr_db}
    for part, spread in (("_row", error.rows), ("_block", error.blocks)):
        decibels_by_part[f"{part}_median"] = spread.median_db if spread else None
        decibels_by_part[f"{part}_p1"] = spread.p1_db if spread else None
    values = {f"sqnr{part}_db": db if db is None else min(db, EXACT_DB) for part, db in decibels_by_part.items()}
    values |= {
        "relative_error": error.relative,
        "max_ulp": error.max_ulp,
        # The loss keeps digits that a cosine near 1 would not show; rounding may put the cosine above 1.
        "cosine_loss": None if error.cosine is None else max(0.0, 1 - error.cosine),
        "slope": error.slope,
        "underflow_percent": error.underflow_percent,
        "underflow_nonzero_percent": error.underflow_nonzero_percent,
        "saturation_percent": error.saturation_percent,
        "subnormal_percent": error.subnormal_percent,
        "not_finite_percent": error.not_finite_percent,
        "utilisation_percent": None if error.utilisation is None else 100 * error.utilisation,
        "dynamic_range_octaves": error.dynamic_range_octaves,
    }
    if course is not None:
        values["scale_drift_octaves"] = max(course.drift, default=0.0)
        # The step nearest to overflow, or the worst.
        values["scale_lag_octaves"] = max(course.lag, default=0.0)
    return {name: value for name, value in values.items() if value is not None}
