"""The mean of a power sensor's readings."""

from __future__ import annotations

import pytest

from fp8bench.samplers.mean_power import PowerSample, mean_power, sufficient
from fp8bench.samplers.readings import NoReading


def readings(watts: list[float], pause: float = 0.1, start: float = 0.0) -> list[PowerSample]:
    return [PowerSample(start + pause * number, value) for number, value in enumerate(watts)]


def test_the_mean_is_by_time() -> None:
    """A power that rises evenly has the mean of its ends, however unevenly one looks."""
    uneven = [0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.1, 0.3, 0.6, 0.9, 1.0]
    found = mean_power([PowerSample(at, 100 + 100 * at) for at in uneven], 0.0, 0.0)
    assert (found.watts, found.seconds, found.samples) == (pytest.approx(150), pytest.approx(1.0), 11)


def test_what_is_about_the_time_before_does_not_count() -> None:
    """A sensor that averages over a second still shows the time before the window."""
    seen = readings([50.0] * 10 + [300.0] * 11)
    assert mean_power(seen, 0.0, 1.0).watts == pytest.approx(300)
    assert mean_power(seen, 0.0, 0.0).watts < 200


@pytest.mark.parametrize(
    ("seen", "settle", "why"),
    [
        ([], 0.0, "0 reading"),
        (readings([300.0] * 10), 0.0, "10 reading"),
        (readings([300.0] * 50, pause=0.01), 0.0, "50 reading.* over 0.49 s"),
        (readings([300.0] * 20), 1.0, "10 reading.* after 1 s of settling"),
    ],
)
def test_too_little_is_no_number(seen: list[PowerSample], settle: float, why: str) -> None:
    assert not sufficient(seen, 0.0, settle)
    with pytest.raises(NoReading, match=f"^not measurable: {why}"):
        mean_power(seen, 0.0, settle)
