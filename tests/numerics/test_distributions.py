"""Random tensors of each kind have the property that they are made for."""

from __future__ import annotations

import math

import pytest
import torch

from fp8bench.numerics.distributions import (
    DEGREES_OF_FREEDOM,
    DISTRIBUTIONS,
    GRADIENT_DEVIATION,
    MEDIAN_GRADIENT_MAGNITUDE,
    OUTLIER_FACTOR,
    GradientSource,
    draw_values,
)
from tests.counts import for_each

SHAPE = (512, 512)


def made(name: str, seed: int = 0, shape: tuple[int, int] = SHAPE) -> torch.Tensor:
    return DISTRIBUTIONS[name](shape, torch.Generator().manual_seed(seed))


@for_each("name", DISTRIBUTIONS)
def test_it_comes_from_the_seed_alone(name: str) -> None:
    x = made(name)
    assert torch.equal(x, made(name)) and not torch.equal(x, made(name, 1))
    assert x.dtype == torch.float32 and x.isfinite().all() and x.shape == SHAPE
    assert abs(float((x > 0).double().mean()) - 0.5) < 4 * 0.5 / math.sqrt(x.numel())
    assert made(name, shape=(3, 1)).shape == (3, 1)


def test_student_t_has_the_tails_of_its_degrees() -> None:
    x = made("student-t").abs()
    assert DEGREES_OF_FREEDOM == 3
    for q in (1.0, 3.0, 10.0):
        beyond = 1 - 2 / math.pi * (math.atan(q / math.sqrt(3)) + math.sqrt(3) * q / (q * q + 3))
        share = float((x > q).double().mean())
        assert share == pytest.approx(beyond, abs=4 * math.sqrt(beyond / x.numel()))


def test_outlier_channels_are_columns() -> None:
    deviations = made("outliers").double().std(0)
    assert int((deviations > OUTLIER_FACTOR / 2).sum()) == 4
    assert float(deviations.max()) == pytest.approx(OUTLIER_FACTOR, rel=0.2)
    assert float(deviations.median()) == pytest.approx(1, abs=0.1)
    assert int((made("outliers", shape=(64, 16)).std(0) > OUTLIER_FACTOR / 2).sum()) == 1


def test_log_normal_magnitudes() -> None:
    logs = made("log-normal").abs().double().log()
    assert float(logs.median()) == pytest.approx(math.log(MEDIAN_GRADIENT_MAGNITUDE), abs=0.02)
    assert float(logs.std()) == pytest.approx(GRADIENT_DEVIATION, abs=0.02)
    assert float((logs.max() - logs.min()) / math.log(2)) > 24


MATRICES = [(300, 64)] * 40


def source(seed: int = 0) -> GradientSource:
    return GradientSource(MATRICES, torch.Generator().manual_seed(seed))


def test_rows_and_tensors_have_magnitudes_of_their_own() -> None:
    gradients = source()
    draw_values = gradients.draw()
    rows = torch.stack([tensor.square().mean(1).sqrt() for tensor in draw_values])
    scales = torch.cat(gradients.scales, dim=1).t()
    assert ((rows / scales).log().abs() < 0.6).all()
    spread = rows.log10()
    assert 2.5 < (spread.amax(1) - spread.amin(1)).min() < (spread.amax(1) - spread.amin(1)).max() < 3.5
    assert 3 < spread.median(1).values.max() - spread.median(1).values.min() < 5
    standard = torch.cat([gradient / scale for gradient, scale in zip(draw_values, gradients.scales, strict=True)])
    assert abs(standard.mean()) < 0.01 and abs(standard.std() - 1) < 0.01


@for_each(
    ("kind", "deviation", "most"),
    [
        ("normal", 1.0, 8.0),
        ("uniform", 1 / math.sqrt(3), 1.0),
        ("integers", math.sqrt(20 / 3), 4.0),
        ("ones", 0.0, 1.0),
    ],
)
def test_operands_are_of_the_kind_that_was_asked_for(kind: str, deviation: float, most: float) -> None:
    x = draw_values({"values": kind}, SHAPE, torch.Generator().manual_seed(0))
    assert float(x.std()) == pytest.approx(deviation, rel=0.01) and float(x.abs().max()) <= most
    assert (kind == "integers") == (len(x.unique()) == 9)
