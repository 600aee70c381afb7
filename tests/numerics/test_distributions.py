"""Made tensors have the property they are made for."""

from __future__ import annotations

import math

import pytest
import torch

from fp8bench.numerics.distributions import DEGREES, DISTRIBUTIONS, GRADIENT_DEVIATION, GRADIENT_MEDIAN, OUTLIER_FACTOR

SHAPE = (512, 512)


def made(name: str, seed: int = 0, shape: tuple[int, int] = SHAPE) -> torch.Tensor:
    return DISTRIBUTIONS[name](shape, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_it_comes_from_the_seed_alone(name: str) -> None:
    """float32, finite, signed, symmetric."""
    x = made(name)
    assert torch.equal(x, made(name)) and not torch.equal(x, made(name, 1))
    assert x.dtype == torch.float32 and x.isfinite().all() and x.shape == SHAPE
    assert abs(float((x > 0).double().mean()) - 0.5) < 4 * 0.5 / math.sqrt(x.numel())
    assert made(name, shape=(3, 1)).shape == (3, 1)


def test_gaussian() -> None:
    x = made("gaussian").double()
    assert float(x.std()) == pytest.approx(1, abs=0.01) and float((x**4).mean()) == pytest.approx(3, abs=0.05)


def test_student_t_has_the_tails_of_its_degrees() -> None:
    """P(|t| > q) by the formula for three degrees of freedom; a Gaussian has none beyond 6."""
    x = made("student-t").abs()
    assert DEGREES == 3
    for q in (1.0, 3.0, 10.0):
        beyond = 1 - 2 / math.pi * (math.atan(q / math.sqrt(3)) + math.sqrt(3) * q / (q * q + 3))
        share = float((x > q).double().mean())
        assert share == pytest.approx(beyond, abs=4 * math.sqrt(beyond / x.numel()))


def test_outlier_channels_are_columns() -> None:
    """Four of 512, the same in every row; one where there are few columns."""
    deviations = made("outliers").double().std(0)
    assert int((deviations > OUTLIER_FACTOR / 2).sum()) == 4
    assert float(deviations.max()) == pytest.approx(OUTLIER_FACTOR, rel=0.2)
    assert float(deviations.median()) == pytest.approx(1, abs=0.1)
    assert int((made("outliers", shape=(64, 16)).std(0) > OUTLIER_FACTOR / 2).sum()) == 1


def test_log_normal_magnitudes() -> None:
    """Their logarithm is normal, over more octaves than any 8-bit format has."""
    logs = made("log-normal").abs().double().log()
    assert float(logs.median()) == pytest.approx(math.log(GRADIENT_MEDIAN), abs=0.02)
    assert float(logs.std()) == pytest.approx(GRADIENT_DEVIATION, abs=0.02)
    assert float((logs.max() - logs.min()) / math.log(2)) > 24
