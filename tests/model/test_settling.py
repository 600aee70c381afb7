"""When a device has settled, on made curves of clock and temperature."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from fp8bench.model.settling import STRETCH, ClockLook, Settling, slopes

Curve = Callable[[float], float | None]
EVERY = 0.15


def settled_after(clock: Curve, temperature: Curve, limit: float = 60.0) -> float | None:
    """The seconds after which looks at these curves are flat; None where they never are."""
    looks: list[ClockLook] = []
    for number in range(round(limit / EVERY)):
        at = number * EVERY
        looks.append(ClockLook(at, clock(at), temperature(at)))
        if slopes(looks).flat:
            return at
    return None


def unknown(at: float) -> None:
    return None


def constant(value: float) -> Curve:
    return lambda at: value


def heating(seconds: float) -> Curve:
    """From 35 to 65 degrees, in whole ones."""
    return lambda at: round(65 - 30 * math.exp(-at / seconds))


@pytest.mark.parametrize(
    ("clock", "temperature", "least", "most"),
    [
        (constant(1.98e9), constant(60.0), STRETCH, STRETCH + 2 * EVERY),
        (constant(1.98e9), unknown, STRETCH, STRETCH + 2 * EVERY),
        (unknown, constant(60.0), STRETCH, STRETCH + 2 * EVERY),
        (constant(1.98e9), heating(4.0), 10.0, 25.0),
        (constant(1.98e9), heating(15.0), 22.0, 50.0),
        # It boosts for eight seconds, and keeps another clock from then on.
        (lambda at: 1.98e9 if at < 8 else 1.71e9, constant(60.0), STRETCH, STRETCH + 2 * EVERY),
        # It falls slowly for twenty seconds.
        (lambda at: 1.98e9 - 2e7 * min(at, 20.0), constant(60.0), 20.0, 25.0),
    ],
)
def test_a_device_has_settled_when_both_stand_still(
    clock: Curve, temperature: Curve, least: float, most: float
) -> None:
    """What cannot be read is not waited for."""
    after = settled_after(clock, temperature)
    assert after is not None and least <= after <= most


@pytest.mark.parametrize(
    ("clock", "temperature"),
    [
        (unknown, unknown), (lambda at: 1.98e9 * (1 - 0.004 * at), constant(60.0)),
        (constant(1.98e9), lambda at: 30 + 0.5 * at), (lambda at: math.nan, lambda at: math.nan),
        (constant(-1.0), unknown),
    ],
)  # fmt: skip
def test_what_moves_or_is_unknown_never_settles(clock: Curve, temperature: Curve) -> None:
    assert settled_after(clock, temperature) is None


def test_noise_delays_and_does_not_prevent() -> None:
    """Clocks in steps of 15 MHz that flicker by 0.4%."""
    for seed in range(20):
        draw = random.Random(seed)
        after = settled_after(lambda at, draw=draw: 15e6 * round(draw.gauss(1.755e9, 7e6) / 15e6), constant(60.0))  # type: ignore[misc]
        assert after is not None and after < 10


def test_a_course_says_how_long_it_was() -> None:
    looks = (ClockLook(0.5, None, 30.0), ClockLook(4.0, None, 31.0))
    assert Settling(looks).seconds == 3.5 and Settling().seconds == 0.0
    assert slopes([]).flat is False and slopes([ClockLook(1.0, 1e9, 1.0)] * 20).flat is False
