"""Figures by names that say their unit; drift and lag of scales."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from fp8bench.formats.grids import BF16, E4M3
from fp8bench.formats.quantise import round_to
from fp8bench.model.specs import spec_of
from fp8bench.numerics.tensor_error import figures, scale_course, tensor_error
from fp8bench.units import EXACT_DB

X = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
UNITS = {
    "sqnr_db": "dB", "sqnr_row_median_db": "dB", "sqnr_row_p1_db": "dB", "sqnr_block_median_db": "dB",
    "sqnr_block_p1_db": "dB", "relative_error": "ratio", "max_ulp": "ulp", "cosine_loss": "ratio", "slope": "ratio",
    "underflow_percent": "%", "underflow_nonzero_percent": "%", "saturation_percent": "%", "subnormal_percent": "%",
    "not_finite_percent": "%", "utilisation_percent": "%", "dynamic_range_octaves": "octaves",
    "scale_drift_octaves": "octaves", "scale_lag_octaves": "octaves",
}  # fmt: skip


def test_every_figure_has_its_name_and_unit() -> None:
    """And the value that the tensor's error has."""
    error = tensor_error(X, round_to(X, E4M3), E4M3)
    found = figures(error, scale_course([1.0, 2.0], [448.0, 112.0], E4M3))
    assert {name: spec_of(name).unit for name in found} == UNITS
    assert all(type(value) is float and math.isfinite(value) for value in found.values())
    assert found["sqnr_db"] == error.sqnr_db and found["slope"] == error.slope and found["max_ulp"] == error.max_ulp
    assert error.cosine is not None and found["cosine_loss"] == 1 - error.cosine
    assert error.utilisation is not None and found["utilisation_percent"] == 100 * error.utilisation
    assert (found["scale_drift_octaves"], found["scale_lag_octaves"]) == (1.0, 0.0)


def test_what_is_exact_is_told_by_the_cap() -> None:
    """A number all the same, above those of any error; parts too."""
    x = X.to(torch.bfloat16)
    found = figures(tensor_error(x, x, BF16))
    assert {name: value for name, value in found.items() if name.endswith("_db")} == dict.fromkeys(
        (name for name in UNITS if name.endswith("_db")), EXACT_DB
    )
    assert found["relative_error"] == found["cosine_loss"] == 0
    tiny = X.double() * (1 + 1e-11)
    assert figures(tensor_error(X.double(), tiny))["sqnr_db"] == EXACT_DB == pytest.approx(20 * 10)


def test_what_a_tensor_does_not_have_is_left_out() -> None:
    """Ratios of a zero tensor, what needs a format, a scale's course."""
    zero = figures(tensor_error(torch.zeros(4), torch.zeros(4), E4M3))
    assert set(zero) == {
        "max_ulp", "underflow_percent", "underflow_nonzero_percent", "saturation_percent", "subnormal_percent",
        "not_finite_percent",
    }  # fmt: skip
    assert not any(zero.values())
    assert set(UNITS) - set(figures(tensor_error(X, X / 2))) == {
        "max_ulp", "saturation_percent", "subnormal_percent", "utilisation_percent", "scale_drift_octaves",
        "scale_lag_octaves",
    }  # fmt: skip


def test_the_page_has_every_figure_with_its_unit() -> None:
    """And none that is not there."""
    page = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text().partition("## Of a GEMM")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in page.splitlines() if line.startswith("| `")]
    assert {name: unit for names, unit in rows for name in re.findall("`([^`]+)`", names)} == UNITS


@pytest.mark.parametrize(
    ("scales", "amaxes", "drift", "lag", "most"),
    [
        # A current scale uses the format to its largest value at each step, and drifts as the data do.
        ((448.0, 112.0, 224.0, 224.0), (1.0, 4.0, 2.0, 2.0), (2.0, 1.0, 0.0), (0.0, 0.0, 0.0, 0.0), (2.0, 0.0)),
        # One of the step before: twice too large is an octave of overflow, a quarter two octaves that lie idle.
        ((448.0, 448.0, 224.0), (1.0, 2.0, 0.5), (0.0, 1.0), (0.0, 1.0, -2.0), (1.0, 1.0)),
        # What never overflows has a negative lag: a margin of an octave.
        ((224.0, 224.0), (1.0, 0.5), (0.0,), (-1.0, -2.0), (0.0, -1.0)),
        # What has no logarithm is left out: an amax of 0, and scales that are none.
        ((1.0, 0.0, math.inf, 1.0), (0.0, 1.0, 1.0, 448.0), (), (0.0,), (0.0, 0.0)),
        # One step has no drift, and none no lag.
        ((2.0,), (448.0,), (), (1.0,), (0.0, 1.0)),
        ((), (), (), (), (0.0, 0.0)),
    ],
)
def test_drift_and_lag_of_scales(
    scales: Sequence[float], amaxes: Sequence[float], drift: tuple[float, ...], lag: tuple[float, ...],
    most: tuple[float, float],
) -> None:  # fmt: skip
    """Step by step, and the most of each as figures have it."""
    course = scale_course(scales, amaxes, E4M3)
    assert (course.drift, course.lag) == (drift, lag)
    found = figures(tensor_error(X, X), course)
    assert (found["scale_drift_octaves"], found["scale_lag_octaves"]) == most


def test_steps_must_agree() -> None:
    with pytest.raises(ValueError, match="2 scales cannot be those of 1 steps"):
        scale_course([1.0, 1.0], [1.0], E4M3)
