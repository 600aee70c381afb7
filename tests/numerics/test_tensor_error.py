"""Norms and every figure of a rounded tensor against definitions in numpy and by hand; courses of scales."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fp8bench.formats.grids import BF16, E2M1, E2M3, E3M2, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, FP16, TF32, Format
from fp8bench.formats.quantise import round_to
from fp8bench.formats.recipes import (
    MX,
    NVFP4,
    NVFP4_ROUNDED_UP,
    NVFP4_SQUARE,
    ROW,
    SQUARE,
    TENSOR,
    ScaleRounding,
    Scaling,
)
from fp8bench.formats.scaled import values
from fp8bench.model.specs import find_metric_spec
from fp8bench.numerics import norms
from fp8bench.numerics.norms import compute_vanished_share, relative_error, relative_frobenius
from fp8bench.numerics.tensor_error import (
    SQNR_BLOCK_SIZE,
    BlockFactors,
    SqnrSpread,
    TensorError,
    compute_factors,
    measure_scale_course,
    name_error_figures,
    tensor_error,
)
from tests.counts import for_each
from tests.formats.scaling_definitions import gaussian

FLOOR = Scaling(1, 32, E8M0, ScaleRounding.FLOOR)
SCALINGS = [
    (E4M3, None),
    (E4M3, TENSOR),
    (E5M2, ROW),
    (E4M3, Scaling(1, 128)),
    (E4M3, SQUARE),
    (E4M3, MX),
    (E2M1, FLOOR),
    (E2M1, NVFP4),
    (E2M1, NVFP4_ROUNDED_UP),
    (E2M1, NVFP4_SQUARE),
]


@for_each("shape", [(20, 200), (129, 33), (1, 7)])
@for_each(("fmt", "scaling"), SCALINGS)
def test_values_are_elements_times_their_factors(fmt: Format, scaling: Scaling | None, shape: tuple[int, int]) -> None:
    x = gaussian(*shape, seed=3)
    factors = compute_factors(x, fmt, scaling)
    left = values(x, fmt, scaling)
    steps = factors.expand_to_tile((slice(0, shape[0]), slice(0, shape[1]))).expand(shape)
    elements = (left.double() / steps).to(torch.float32)
    torch.testing.assert_close(elements, round_to(elements, fmt), rtol=2**-22, atol=0)
    result = tensor_error(x, left, fmt, factors)
    assert result.max_ulp is not None and 0.3 < result.max_ulp < 0.5 + 2**-18
    saturates = scaling in (FLOOR, NVFP4, NVFP4_SQUARE) and shape != (1, 7)
    assert bool(result.saturated_count) == saturates


def test_a_given_scale_takes_the_place_of_the_current_one() -> None:
    x = gaussian(8, 64, seed=3)
    scale = 2 * E4M3.largest / x.abs().max()
    result = tensor_error(x, values(x, E4M3, TENSOR, scale=scale), E4M3, compute_factors(x, E4M3, TENSOR, scale))
    assert result.utilisation == pytest.approx(2) and result.saturated_count
    assert result.saturated_count == int((x.abs() > x.abs().max() / 2).sum())


GRIDS = (E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E3M2, E2M3, E2M1, FP16, BF16, TF32)
EVERY_GRID = for_each("fmt", GRIDS)
Array = NDArray[np.float64]


def scaled(x: torch.Tensor, fmt: Format, steps: torch.Tensor) -> torch.Tensor:
    return round_to(x / steps, fmt) * steps


def decibels(x: Array, y: Array) -> float:
    return float(10 * np.log10((x**2).sum() / ((y - x) ** 2).sum()))


def ranked(parts: list[tuple[Array, Array]]) -> tuple[float, float]:
    result = sorted(decibels(x, y) for x, y in parts if np.any(x))
    return result[(len(result) - 1) // 2], result[(len(result) - 1) // 100]


def by_definition(x: Array, y: Array, fmt: Format, steps: Array) -> dict[str, Any]:
    """All figures of finite x and y, element by element."""
    e = y - x
    size = np.broadcast_to(steps, x.shape)
    ulps = [
        abs(b - a) / (2.0 ** (max(math.floor(math.log2(abs(a / s))), fmt.min_exponent) - fmt.mantissa_bits) * s)
        for a, b, s in zip(x.flat, y.flat, size.flat, strict=True)
        if a != 0 and abs(a / s) <= fmt.largest
    ]
    rows = list(zip(x, y, strict=True))
    cuts = range(SQNR_BLOCK_SIZE, x.shape[1], SQNR_BLOCK_SIZE)
    blocks = list(chain.from_iterable(zip(np.split(a, cuts), np.split(b, cuts), strict=True) for a, b in rows))
    nonzero = np.abs(x[x != 0])
    return {
        "sqnr_db": decibels(x, y),
        "relative": np.linalg.norm(e) / np.linalg.norm(x),
        "cosine": (x * y).sum() / np.sqrt((x**2).sum() * (y**2).sum()),
        "slope": (x * y).sum() / (x**2).sum(),
        "underflow_percent": 100 * np.count_nonzero((x != 0) & (y == 0)) / x.size,
        "underflow_nonzero_percent": 100 * np.count_nonzero((x != 0) & (y == 0)) / np.count_nonzero(x),
        "saturation_percent": 100 * np.count_nonzero(np.abs(x) > fmt.largest * size) / x.size,
        "subnormal_percent": 100 * np.count_nonzero((x != 0) & (np.abs(x) < fmt.smallest_normal * size)) / x.size,
        "max_ulp": max(ulps),
        "amax": np.abs(x).max(),
        "dynamic_range_octaves": np.log2(nonzero.max() / nonzero.min()),
        "rows": ranked(rows),
        "blocks": ranked(blocks),
    }


def check(found: TensorError, wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        given = getattr(found, name)
        given = (given.median_db, given.p1_db) if isinstance(given, SqnrSpread) else given
        assert given == pytest.approx(value, rel=1e-9, abs=1e-12), name


@for_each("tile", [1 << 20, 64, 128])
@EVERY_GRID
def test_each_figure_is_its_definition(fmt: Format, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "TILE_ELEMENTS", tile)
    x = gaussian(9, 100) * torch.logspace(-2, 2, 9).unsqueeze(1)
    x[:, ::7] = 0
    x[4] = 0
    steps = torch.logspace(-3, 3, 9, base=2).unsqueeze(1) * (1 if fmt in (BF16, TF32) else 12 / fmt.largest)
    y = scaled(x, fmt, steps)
    result = tensor_error(x, y, fmt, BlockFactors(steps, rows=1))
    check(result, by_definition(x.double().numpy(), y.double().numpy(), fmt, steps.double().numpy()))
    assert result.count == 900 and result.lost_count == 0
    if fmt not in (BF16, TF32):
        assert result.saturated_count and result.saturated_count < 450


def test_blocks_of_any_shape_have_their_own_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "TILE_ELEMENTS", 96)
    x = gaussian(40, 72)
    for rows, columns in ((1, 0), (1, 16), (16, 16), (128, 128), (0, 0)):
        shape = (-(-40 // rows) if rows else 1, -(-72 // columns) if columns else 1)
        steps = torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.1
        wide = steps.repeat_interleave(rows or 40, 0).repeat_interleave(columns or 72, 1)[:40, :72]
        y = scaled(x, E2M1, wide)
        result = tensor_error(x, y, E2M1, BlockFactors(steps, rows, columns))
        check(result, by_definition(x.double().numpy(), y.double().numpy(), E2M1, wide.double().numpy()))
        peaks = []
        for i, j in np.ndindex(*shape):
            block = slice(i * rows, (i + 1) * rows or None), slice(j * columns, (j + 1) * columns or None)
            peaks.append(float((x / wide)[block].abs().max()))
        assert result.utilisation == pytest.approx(sorted(peaks)[(len(peaks) - 1) // 2] / 6, rel=1e-6)


def test_sums_are_in_double_precision() -> None:
    """In fp32 ones after a large number would be lost, and small squared errors underflow."""
    x = torch.ones(1 << 20)
    x[0] = 2.0**13
    y = x.clone()
    y[1::2] += 2.0**-23
    signal, noise = 2.0**26 + (1 << 20) - 1, (1 << 19) * 2.0**-46
    result = tensor_error(x, y)
    assert (result.signal, result.noise) == (signal, noise)
    tiny = torch.full((64,), 1e-30)
    assert tensor_error(tiny, tiny * 2).slope == pytest.approx(2)


def test_nothing_has_no_figures() -> None:
    for shape in ((0,), (0, 5), (5, 0), (2, 0, 3)):
        result = tensor_error(torch.empty(shape), torch.empty(shape), E4M3)
        assert result.count == 0 and result.sqnr_db is None and result.rows is None and result.not_finite_percent == 0
        assert result.saturation_percent == 0 == result.underflow_percent


def test_a_zero_tensor_has_no_ratios() -> None:
    for y in (torch.zeros(2, 3), torch.full((2, 3), -0.0)):
        result = tensor_error(torch.zeros(2, 3), y, E4M3)
        assert result.sqnr_db is result.relative is result.cosine is result.slope is None
        assert result.rows is result.blocks is result.dynamic_range_octaves is result.utilisation is None
        assert (result.amax, result.smallest, result.max_ulp, result.underflow_percent) == (0, 0, 0, 0)
        assert result.underflow_nonzero_percent == result.saturation_percent == result.subnormal_percent == 0


def test_what_is_exact_has_an_infinite_sqnr() -> None:
    x = gaussian(200, 64).to(torch.bfloat16)
    result = tensor_error(x, x.float(), BF16)
    assert result.sqnr_db == math.inf and result.rows == result.blocks == SqnrSpread(math.inf, math.inf)
    assert result.relative == 0 and result.slope == 1 and result.max_ulp == 0
    y = x.float()
    y[7, 3] = 0
    result = tensor_error(x, y, BF16)
    assert result.rows is not None and result.blocks is not None
    assert result.sqnr_db is not None and result.sqnr_db < math.inf
    assert (result.rows.median_db, result.blocks.p1_db) == (math.inf, math.inf)


def test_what_saturates_is_counted_before_the_clamp_and_has_no_ulp() -> None:
    x = torch.full((4, 4), 1e4)
    result = tensor_error(x, round_to(x, E4M3), E4M3)
    assert result.saturation_percent == 100 and result.max_ulp == 0
    assert result.utilisation == pytest.approx(1e4 / 448) and result.slope == pytest.approx(448 / 1e4)
    largest = torch.tensor([448.0, -448.0])
    assert tensor_error(largest, largest, E4M3).saturated_count == 0


def test_numbers_that_are_none_are_counted_apart() -> None:
    x = torch.tensor([1.0, math.nan, math.inf, -math.inf, 2.0, 1e6, -3.0])
    y = torch.tensor([1.0, math.nan, 448.0, -math.inf, 2.5, math.inf, math.nan])
    result = tensor_error(x, y, FP16)
    assert (result.count, result.nonzero_count, result.lost_count) == (7, 4, 2)
    assert result.not_finite_percent == pytest.approx(200 / 7)
    assert (result.signal, result.noise, result.cross_sum, result.output) == (5.0, 0.25, 6.0, 7.25)
    assert result.amax == 1e6 and result.saturated_count == 1 and result.vanished_count == 0


def test_a_factor_of_nothing_leaves_nothing() -> None:
    """NVFP4 blocks whose scale rounds to zero vanish, those with a NaN are lost; neither saturates."""
    x = torch.ones(1, 48)
    y = torch.cat([torch.zeros(16), torch.full((16,), math.nan), torch.ones(16)]).unsqueeze(0)
    result = tensor_error(x, y, E2M1, BlockFactors(torch.tensor([[0.0, math.nan, 0.5]]), 1, 16))
    assert (result.vanished_count, result.lost_count, result.saturated_count, result.subnormal_count) == (16, 16, 0, 0)
    assert result.max_ulp == 0 and result.utilisation == pytest.approx(2 / 6)


X = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
UNITS = {
    "sqnr_db": "dB", "sqnr_row_median_db": "dB", "sqnr_row_p1_db": "dB", "sqnr_block_median_db": "dB",
    "sqnr_block_p1_db": "dB", "relative_error": "ratio", "max_ulp": "ulp", "cosine_loss": "ratio", "slope": "ratio",
    "underflow_percent": "%", "underflow_nonzero_percent": "%", "saturation_percent": "%", "subnormal_percent": "%",
    "not_finite_percent": "%", "utilisation_percent": "%", "dynamic_range_octaves": "octaves",
    "scale_drift_octaves": "octaves", "scale_lag_octaves": "octaves",
}  # fmt: skip


def test_every_figure_has_its_name_and_unit() -> None:
    error = tensor_error(X, round_to(X, E4M3), E4M3)
    result = name_error_figures(error, measure_scale_course([1.0, 2.0], [448.0, 112.0], E4M3))
    assert {name: find_metric_spec(name).unit for name in result} == UNITS
    assert all(type(value) is float and math.isfinite(value) for value in result.values())
    assert result["sqnr_db"] == error.sqnr_db and result["slope"] == error.slope and result["max_ulp"] == error.max_ulp
    assert error.cosine is not None and result["cosine_loss"] == 1 - error.cosine
    assert error.utilisation is not None and result["utilisation_percent"] == 100 * error.utilisation
    assert (result["scale_drift_octaves"], result["scale_lag_octaves"]) == (1.0, 0.0)


def test_the_page_has_every_figure_with_its_unit() -> None:
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    page = page.partition("## Figures of numerical error")[2].partition("## Of a GEMM")[0]
    units = {}
    for names, unit in re.findall(r"^\| (`[^|]*) \| ([^|]*) \|", page, re.MULTILINE):
        units.update(dict.fromkeys(re.findall("`([^`]+)`", names), unit.strip()))
    assert units == UNITS


@pytest.mark.parametrize(
    ("scales", "amaxes", "drift", "lag", "most"),
    [
        # A current scale uses the whole format at each step, and changes with the data.
        ((448.0, 112.0, 224.0, 224.0), (1.0, 4.0, 2.0, 2.0), (2.0, 1.0, 0.0), (0.0, 0.0, 0.0, 0.0), (2.0, 0.0)),
        # A scale of the previous step: data twice as large overflow by an octave, a quarter leaves two octaves unused.
        ((448.0, 448.0, 224.0), (1.0, 2.0, 0.5), (0.0, 1.0), (0.0, 1.0, -2.0), (1.0, 1.0)),
        # If it never overflows the lag is negative: a margin of an octave.
        ((224.0, 224.0), (1.0, 0.5), (0.0,), (-1.0, -2.0), (0.0, -1.0)),
        # Values without a logarithm are left out: an amax of 0, and invalid scales.
        ((1.0, 0.0, math.inf, 1.0), (0.0, 1.0, 1.0, 448.0), (), (0.0,), (0.0, 0.0)),
        # One step has no drift, and none has no lag.
        ((2.0,), (448.0,), (), (1.0,), (0.0, 1.0)),
        ((), (), (), (), (0.0, 0.0)),
    ],
)
def test_drift_and_lag_of_scales(
    scales: Sequence[float],
    amaxes: Sequence[float],
    drift: tuple[float, ...],
    lag: tuple[float, ...],
    most: tuple[float, float],
) -> None:
    course = measure_scale_course(scales, amaxes, E4M3)
    assert (course.drift, course.lag) == (drift, lag)
    result = name_error_figures(tensor_error(X, X), course)
    assert (result["scale_drift_octaves"], result["scale_lag_octaves"]) == most


@for_each(
    ("value", "reference", "error"),
    [
        ([3.0, 5.0], [3.0, 4.0], 0.2),
        ([math.nan], [1.0], math.nan),
        ([0.0], [0.0], 0.0),
        ([1.0], [0.0], math.inf),
        ([math.nan], [0.0], math.nan),
        ([], [], 0.0),
    ],
)
def test_relative_errors_equal_a_count_by_hand(value: list[float], reference: list[float], error: float) -> None:
    result = relative_frobenius(torch.tensor(value), torch.tensor(reference))
    assert result == pytest.approx(error, rel=1e-6, abs=0, nan_ok=True)
    if len(value) == 1:
        assert relative_error(value[0], reference[0]) == pytest.approx(error, rel=1e-12, abs=0, nan_ok=True)


def test_what_vanished_is_counted_over_all_tensors() -> None:
    values = [torch.tensor([[0.0, -0.0], [0.0, 9.0]]), torch.tensor([0.0, math.nan, 1e-38, 0.0])]
    references = [torch.tensor([[1e-30, -2.0], [0.0, 1.0]]), torch.tensor([math.inf, 1.0, 1.0, 0.0])]
    assert compute_vanished_share(values, references) == 3 / 8
    assert compute_vanished_share(references, references) == 0.0 == compute_vanished_share([], [])
    assert compute_vanished_share([torch.ones(0)], [torch.ones(0)]) == 0.0
