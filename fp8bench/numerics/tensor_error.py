"""The rounding errors of a tensor x and its rounded copy y: all figures from one pass over both tensors.

The error is e = y - x, and sums are in fp64. Values that are not finite in x, or only in y, are counted separately
and excluded from other figures. `compute_factors` returns the scaling factors of blocks. `name_error_figures` returns
finite numbers by names that include the unit. A delayed scale has additional figures that show how it follows the
tensor's largest magnitude.
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
from fp8bench.formats.recipes import Scaling, count_blocks
from fp8bench.formats.scaled import matrix_shape, split_into_blocks
from fp8bench.numerics.norms import iterate_tiles, view_as_rows
from fp8bench.units import EXACT_SQNR_DB

Tile = tuple[slice, slice]


@dataclass(frozen=True)
class BlockFactors:
    """The scaling factors of a tensor's blocks. A value is an element of the format times the factor of its block.

    `factor_by_block` has the factors with shape (blocks down, blocks across), on the tensor's device. A block has
    `rows` x `columns` elements, where 0 means the whole side. A block whose factor is 0, infinite or NaN has lost its
    values.
    """

    factor_by_block: Tensor
    rows: int = 0
    columns: int = 0

    def expand_to_tile(self, tile: Tile) -> Tensor:
        """Returns the scaling factor of each element of a tile, in fp64. If one block covers a whole side of the
        tensor, the result has length 1 along this side.
        """
        row_blocks, column_blocks = (
            self._find_block_indices(part, size) for part, size in zip(tile, (self.rows, self.columns), strict=True)
        )
        return self.factor_by_block.index_select(0, row_blocks).index_select(1, column_blocks).to(torch.float64)

    def update_block_peaks(self, peaks: Tensor, magnitudes: Tensor, tile: Tile) -> None:
        """Updates `peaks`, the largest magnitude of each block, with the `magnitudes` of a tile."""
        # 1. For each row of the tile, find the largest magnitude in each block that the row crosses.
        row_peaks = reshape_to_blocks(magnitudes, self.columns).amax(-1)
        first_block_index = tile[1].start // self.columns if self.columns else 0
        tile_column_peaks = peaks[:, first_block_index : first_block_index + row_peaks.shape[1]]
        # 2. Combine the rows of each block by their largest magnitude.
        row_block_indices = self._find_block_indices(tile[0], self.rows).unsqueeze(1).expand(row_peaks.shape)
        tile_column_peaks.scatter_reduce_(0, row_block_indices, row_peaks, "amax")

    def _find_block_indices(self, indices: slice, size: int) -> Tensor:
        """Returns for each row (or column) of a tile the index of its block. If one block covers the whole side,
        returns only the index 0.
        """
        if not size:
            return torch.zeros(1, dtype=torch.int64, device=self.factor_by_block.device)
        return torch.arange(indices.start, indices.stop, device=self.factor_by_block.device).div_(
            size, rounding_mode="floor"
        )


def compute_factors(x: Tensor, fmt: Format, scaling: Scaling | None, scale: Tensor | None = None) -> BlockFactors:
    """Returns the scaling factors of a tensor. They come from the tensor itself, or from a `scale` of earlier steps.
    Without a scaling the factor is 1.
    """
    if scaling is None:
        return BlockFactors(torch.ones(1, 1, device=x.device))
    factors = split_into_blocks(x.detach().to(torch.float32).abs(), fmt, scaling, scale).decoding_scales
    row_block_count = count_blocks(matrix_shape(x.shape)[0], scaling.rows) if scaling.rows else 1
    return BlockFactors(factors.reshape(row_block_count, -1), scaling.rows, scaling.columns)


def reshape_to_blocks(x: Tensor, columns: int) -> Tensor:
    """Returns the tensor with shape (rows, blocks, columns). The last block is padded by zeros. With `columns` 0, a
    row is one block.
    """
    size = columns or x.shape[1]
    padding_columns = -x.shape[1] % size
    padded_matrix = pad(x, (0, padding_columns)) if padding_columns else x
    return padded_matrix.reshape(x.shape[0], padded_matrix.shape[1] // size, size)


# The block size for reporting how SQNR varies. It is MX's block size for all scalings, so that reports are comparable.
SQNR_BLOCK_SIZE = 32
# The factor by which a magnitude may exceed the format's largest value without counting as saturated. It allows for
# the error of a float32 scale and its inverse.
_SATURATION_TOLERANCE = 1 + 2.0**-21
_FLOAT64_EXPONENT_BIAS = 1023
_FLOAT64_MANTISSA_BITS = 52


@dataclass(frozen=True)
class SqnrSpread:
    """How the SQNR in dB differs between the parts of a tensor (rows or blocks): the median and the 1% quantile.

    A quantile that falls between two parts has the lower of their values. The SQNR of a part without an error is
    infinite. Parts that are zero in x do not count.
    """

    median_db: float
    p1_db: float


@dataclass(frozen=True)
class TensorError:
    """Figures of a tensor x and its rounded copy y. Shares are percentages of all `count` values.

    `lost_count` values are finite in x, but not in y. `vanished_count` values are not zero in x, but zero in y.
    `signal`, `noise` and `output` are the sums of x^2, (y - x)^2 and y^2, and `cross_sum` is the sum of x y. `amax` and
    `smallest` are the largest and the smallest non-zero magnitude of x.

    For an empty or zero tensor, SQNR, error, cosine, slope and spreads are None, and shares are 0. Figures that need
    the format's grid (ulp, saturation, subnormals, utilisation) are None without a format.
    """

    count: int
    nonzero_count: int
    lost_count: int
    vanished_count: int
    signal: float
    noise: float
    cross_sum: float
    output: float
    amax: float
    smallest: float
    rows: SqnrSpread | None
    blocks: SqnrSpread | None
    saturated_count: int | None = None
    subnormal_count: int | None = None
    max_ulp: float | None = None
    utilisation: float | None = None

    @property
    def sqnr_db(self) -> float | None:
        """10 log10(sum x^2 / sum (y - x)^2). It is infinite without errors."""
        return to_decibels(self.signal, self.noise) if self.signal else None

    @property
    def relative(self) -> float | None:
        return math.sqrt(self.noise / self.signal) if self.signal else None

    @property
    def cosine(self) -> float | None:
        """The cosine of the angle between x and y, <x, y> / (||x|| ||y||). It is 0 if y is zero."""
        if not self.signal:
            return None
        return self.cross_sum / math.sqrt(self.signal * self.output) if self.output else 0.0

    @property
    def slope(self) -> float | None:
        """The factor by which rounding stretches x, <x, y> / <x, x>. It is 1 without stretching. With stochastic
        rounding of n values, it differs from 1 by an amount in the order of 1 / sqrt(n).
        """
        return self.cross_sum / self.signal if self.signal else None

    @property
    def underflow_percent(self) -> float:
        return self._to_percent(self.vanished_count)

    @property
    def underflow_nonzero_percent(self) -> float:
        """The percentage of a tensor's non-zero values that rounding turned into zero."""
        return 100 * self.vanished_count / self.nonzero_count if self.nonzero_count else 0.0

    @property
    def saturation_percent(self) -> float | None:
        """The percentage of values whose magnitude is above the format's largest value times the scale, before any
        clamp.
        """
        return None if self.saturated_count is None else self._to_percent(self.saturated_count)

    @property
    def subnormal_percent(self) -> float | None:
        """The percentage of values whose magnitude is above zero and below the format's smallest normal value times the
        scale.
        """
        return None if self.subnormal_count is None else self._to_percent(self.subnormal_count)

    @property
    def not_finite_percent(self) -> float:
        """The percentage of values that are finite in x, but not in y. Examples are an fp16 infinity and the NaN of a
        whole MX block.
        """
        return self._to_percent(self.lost_count)

    @property
    def dynamic_range_octaves(self) -> float | None:
        """log2(amax / smallest non-zero magnitude) of x."""
        return math.log2(self.amax / self.smallest) if self.nonzero_count else None

    def _to_percent(self, number: int) -> float:
        return 100 * number / self.count if self.count else 0.0


def tensor_error(x: Tensor, y: Tensor, fmt: Format | None = None, factors: BlockFactors | None = None) -> TensorError:
    """Returns the figures of x and its rounded copy y, tensors of equal shape and any dtypes.

    `fmt` is the format of the elements, and `factors` their scaling factors, if any. `max_ulp` is the largest |y - x|
    in units of the format's spacing at x. Saturated values are left out, so it is at most 0.5 for rounding to nearest,
    and below 1 for stochastic rounding. `utilisation` is the largest magnitude divided by the largest value that the
    format can represent with the factor. With several factors, it is that of the median non-zero block.
    """
    exact_rows = view_as_rows(x)
    rounded_rows = view_as_rows(y)
    value_sums = _ValueSums(exact_rows)
    grid = None if fmt is None else _FormatGridFigures(fmt, factors or BlockFactors(torch.ones(1, 1, device=x.device)))
    for tile in iterate_tiles(*exact_rows.shape):
        exact = exact_rows[tile].to(torch.float64)
        rounded = rounded_rows[tile].to(torch.float64)
        is_finite = exact.isfinite()
        both_finite = is_finite & rounded.isfinite()
        exact = torch.where(is_finite, exact, 0.0)
        if grid is not None:
            grid.add(exact, rounded, both_finite, tile)
        value_sums.add(exact, rounded, is_finite, both_finite, tile)
    return value_sums.make_tensor_error(x.numel(), grid)


def to_decibels(signal: float, noise: float) -> float:
    return 10 * math.log10(signal / noise) if noise else math.inf


class _ValueSums:
    """Sums and counts of the values of x and y that do not depend on a number format. They stay on the device until
    all tiles are added.
    """

    def __init__(self, tensor: Tensor) -> None:
        height, width = tensor.shape
        device = tensor.device
        parts = (height, count_blocks(width, SQNR_BLOCK_SIZE))
        self._signal, self._noise = (torch.zeros(parts, dtype=torch.float64, device=device) for _ in range(2))
        self._cross, self._output, self._amax = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(3))
        self._smallest = torch.full((), math.inf, dtype=torch.float64, device=device)
        # The numbers of values that are nonzero in x, finite in x but not in y, and nonzero in x but zero in y.
        self._counts = torch.zeros(3, dtype=torch.int64, device=device)

    def add(
        self, exact_values: Tensor, rounded_values: Tensor, finite: Tensor, both_finite: Tensor, tile: Tile
    ) -> None:
        """Adds one tile of x (`exact_values`) and y (`rounded_values`). `finite` is True where x is finite; elsewhere
        `exact_values` has 0. `both_finite` is True where x and y are finite.
        """
        is_nonzero = exact_values != 0
        self._counts[0] += is_nonzero.sum()
        self._counts[1] += (finite & ~both_finite).sum()
        self._counts[2] += (is_nonzero & (rounded_values == 0)).sum()
        magnitudes = exact_values.abs()
        self._amax = torch.maximum(self._amax, magnitudes.amax())
        self._smallest = torch.minimum(self._smallest, torch.where(is_nonzero, magnitudes, math.inf).amin())
        exact_values = torch.where(both_finite, exact_values, 0.0)
        rounded_values = torch.where(both_finite, rounded_values, 0.0)
        self._cross += (exact_values * rounded_values).sum()
        self._output += rounded_values.square().sum()
        first_block_index = tile[1].start // SQNR_BLOCK_SIZE
        for sums, squares in (
            (self._signal, exact_values.square()),
            (self._noise, (rounded_values - exact_values).square()),
        ):
            block_square_sums = reshape_to_blocks(squares, SQNR_BLOCK_SIZE).sum(-1)
            sums[tile[0], first_block_index : first_block_index + block_square_sums.shape[1]] += block_square_sums

    def make_tensor_error(self, count: int, grid: _FormatGridFigures | None) -> TensorError:
        # Only here does the host wait for the device.
        nonzero_count, lost_count, vanished_count = self._counts.tolist()
        saturated_count, subnormal_count, max_ulp, utilisation = (
            grid.collect_figures() if grid is not None else (None,) * 4
        )
        return TensorError(
            count,
            nonzero_count,
            lost_count,
            vanished_count,
            float(self._signal.sum()),
            float(self._noise.sum()),
            float(self._cross),
            float(self._output),
            float(self._amax),
            float(self._smallest) if nonzero_count else 0.0,
            _compute_sqnr_spread(self._signal.sum(1), self._noise.sum(1)),
            _compute_sqnr_spread(self._signal, self._noise),
            saturated_count,
            subnormal_count,
            max_ulp,
            utilisation,
        )


class _FormatGridFigures:
    """The figures that depend on the number format of y, such as errors in ulp. The values of x and y are first divided
    by the scaling factor of their block.
    """

    def __init__(self, fmt: Format, factors: BlockFactors) -> None:
        self._fmt = fmt
        self._factors = factors
        self._peaks = torch.zeros(
            factors.factor_by_block.shape, dtype=torch.float64, device=factors.factor_by_block.device
        )
        self._max_ulp = torch.zeros((), dtype=torch.float64, device=self._peaks.device)
        self._counts = torch.zeros(2, dtype=torch.int64, device=self._peaks.device)

    def add(self, exact: Tensor, rounded: Tensor, both_finite: Tensor, tile: Tile) -> None:
        tile_factors = self._factors.expand_to_tile(tile)
        is_valid_factor = tile_factors.isfinite() & (tile_factors > 0)
        divisor = torch.where(is_valid_factor, tile_factors, 1.0)
        elements = torch.where(is_valid_factor, exact, 0.0) / divisor
        magnitudes = elements.abs()
        is_saturated = magnitudes > self._fmt.largest * _SATURATION_TOLERANCE
        self._counts[0] += is_saturated.sum()
        self._counts[1] += ((magnitudes > 0) & (magnitudes < self._fmt.smallest_normal)).sum()
        self._factors.update_block_peaks(self._peaks, magnitudes, tile)
        # Compute the format's spacing at each magnitude from its bits, because a logarithm would round.
        exponent = magnitudes.view(torch.int64).bitwise_right_shift(_FLOAT64_MANTISSA_BITS) - _FLOAT64_EXPONENT_BIAS
        spacing_exponent = exponent.clamp_(min=self._fmt.min_exponent) - self._fmt.mantissa_bits
        spacing_float64_bits = (spacing_exponent + _FLOAT64_EXPONENT_BIAS).bitwise_left_shift_(_FLOAT64_MANTISSA_BITS)
        format_spacings = spacing_float64_bits.view(torch.float64)
        errors = (rounded / divisor - elements).abs() / format_spacings
        is_counted = both_finite & is_valid_factor & ~is_saturated
        self._max_ulp = torch.maximum(self._max_ulp, torch.where(is_counted, errors, 0.0).amax())

    def collect_figures(self) -> tuple[int, int, float, float | None]:
        """Returns the number of saturated and of subnormal values, the largest error in ulp, and the utilisation,
        which is None for zeros.
        """
        peaks = self._peaks[self._peaks > 0]
        utilisation = float(peaks.median()) / self._fmt.largest if peaks.numel() else None
        saturated_count, subnormal_count = self._counts.tolist()
        return saturated_count, subnormal_count, float(self._max_ulp), utilisation


def _compute_sqnr_spread(signal: Tensor, noise: Tensor) -> SqnrSpread | None:
    is_nonzero = signal > 0
    ratios = (signal[is_nonzero] / noise[is_nonzero]).log10().mul(10).sort().values
    if not ratios.numel():
        return None
    last_index = ratios.numel() - 1
    return SqnrSpread(float(ratios[last_index // 2]), float(ratios[last_index // 100]))


@dataclass(frozen=True)
class DelayedScaleFigures:
    """How a delayed scale follows its tensor: figures in octaves, step by step. Steps with a scale of 0 or with only
    zeros are left out.

    drift_t = |log2(s_t / s_(t-1))| is how far the scale moved. lag_t = log2(amax_t s_t / largest) is above 0 if the
    step's largest values saturate, and below 0 if part of the format's range is unused.
    """

    drift: tuple[float, ...]
    lag: tuple[float, ...]


def measure_scale_course(scales: Sequence[float], amaxes: Sequence[float], fmt: Format) -> DelayedScaleFigures:
    log2_scale_changes = [
        _log2_ratio(later_scale, earlier_scale) for earlier_scale, later_scale in itertools.pairwise(scales)
    ]
    log2_scale_lags = [_log2_ratio(amax * scale, fmt.largest) for scale, amax in zip(scales, amaxes, strict=True)]
    return DelayedScaleFigures(
        tuple(abs(octaves) for octaves in log2_scale_changes if octaves is not None),
        tuple(octaves for octaves in log2_scale_lags if octaves is not None),
    )


def _log2_ratio(numerator: float, denominator: float) -> float | None:
    ratio = numerator / denominator if denominator else math.inf
    return math.log2(ratio) if 0 < ratio < math.inf else None


def name_error_figures(error: TensorError, course: DelayedScaleFigures | None = None) -> dict[str, float]:
    """Returns the figures of a tensor by name. Figures that it does not have are left out. docs/formats.md defines
    them.

    The SQNR of a tensor without errors is EXACT_SQNR_DB. `course` has the figures of a scale that comes from earlier
    steps.
    """
    sqnr_by_name = {"sqnr_db": error.sqnr_db}
    for part, spread in (("row", error.rows), ("block", error.blocks)):
        sqnr_by_name[f"sqnr_{part}_median_db"] = spread.median_db if spread else None
        sqnr_by_name[f"sqnr_{part}_p1_db"] = spread.p1_db if spread else None
    values = {name: sqnr if sqnr is None else min(sqnr, EXACT_SQNR_DB) for name, sqnr in sqnr_by_name.items()}
    values |= {
        "relative_error": error.relative,
        "max_ulp": error.max_ulp,
        # 1 - cosine keeps digits that a cosine near 1 would not show. Rounding may make the cosine larger than 1.
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
        # The largest lag of any step shows how near the scale came to an overflow.
        values["scale_lag_octaves"] = max(course.lag, default=0.0)
    return {name: value for name, value in values.items() if value is not None}
