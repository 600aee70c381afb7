"""When a group has been measured enough, and when a device has settled, on made curves of clock and temperature."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise

import pynvml
import pytest

from fp8bench.model.consumed import THROTTLE_REASONS, list_throttle_reasons
from fp8bench.model.readings import (
    NoReading,
    Reading,
    UnavailableReading,
    read_first_available,
    require_positive,
    subtract_counters,
    try_reading,
)
from fp8bench.model.step import Coverage, HeldProduct, Holder, OtherProduct
from fp8bench.model.stopping import (
    BUDGET_SECONDS,
    CEILING_SECONDS,
    LEAST_ROUNDS,
    QUICK_ROUNDS,
    SLOPE_FIT_SECONDS,
    ClockSample,
    DeviceSettling,
    StoppingRule,
    fit_device_slopes,
    make_stopping_rule,
)
from tests.counts import for_each


def test_looks_come_every_eight_rounds_and_then_more_rarely() -> None:
    # Each look risks an error, so their number grows with the logarithm.
    looks = [rounds for rounds in range(1, 300) if StoppingRule().looks(rounds)]
    assert looks[:8] == [24, 32, 40, 48, 56, 64, 72, 80]
    longest = [rounds for rounds in range(1, 4097) if StoppingRule().looks(rounds)]
    assert len(longest) == 6 + 6 * 8 and all(later / earlier <= 1.5 for earlier, later in pairwise(longest))
    assert [look for look in looks if look >= 112] == [112, 120, 128, 144, 160, 176, 192, 208, 224, 240, 256, 288]
    # The number of fixed rounds must not depend on their values.
    assert not any(StoppingRule(fixed=64).looks(rounds) for rounds in range(100))
    assert not any(StoppingRule().looks(rounds) for rounds in range(LEAST_ROUNDS))
    assert StoppingRule(least=8).looks(8)
    assert StoppingRule().after(100.0) == StoppingRule()
    whole = StoppingRule(budget=10.0, ceiling=12.0, whole=True)
    assert whole.after(4.0) == StoppingRule(budget=6.0, ceiling=8.0, whole=True)
    assert whole.after(11.0) == StoppingRule(budget=0.0, ceiling=1.0, whole=True)
    assert whole.after(99.0) == StoppingRule(budget=0.0, ceiling=0.0, whole=True)


FIXED = StoppingRule(fixed=10, budget=1.0)


@for_each(
    ("rule", "rounds", "seconds", "why"),
    [
        (StoppingRule(), 15, 11.0, ""),
        (StoppingRule(), 24, 5.99, ""),
        (StoppingRule(), 24, 6.0, "time was up after 24 rounds"),
        (StoppingRule(), 100, 10.0, "time was up after 100 rounds"),
        (StoppingRule(), 3, 119.9, ""),
        (StoppingRule(), 3, 120.0, "time was up after 3 rounds"),
        (StoppingRule(), 0, 500.0, ""),
        (StoppingRule(), 4095, 0.0, ""),
        (StoppingRule(), 4096, 0.0, "4096 rounds, the most a group gets"),
        (FIXED, 9, 60.0, ""),
        (FIXED, 10, 0.0, "10 rounds, a fixed number"),
        (FIXED, 9, 120.0, "time was up after 9 rounds"),
        (FIXED, 0, 120.0, ""),
    ],
)
def test_budgets_set_the_caps_of_rounds(rule: StoppingRule, rounds: int, seconds: float, why: str) -> None:
    assert rule.reason_to_end(rounds, seconds) == why


@for_each(
    ("quick", "rounds", "budget", "expected"),
    [
        (False, None, None, StoppingRule(budget=BUDGET_SECONDS, ceiling=CEILING_SECONDS)),
        (False, None, 3.0, StoppingRule(budget=3.0, ceiling=3.0, whole=True)),
        (True, None, None, StoppingRule(fixed=QUICK_ROUNDS)),
        (True, None, 3.0, StoppingRule(fixed=QUICK_ROUNDS, ceiling=3.0, whole=True)),
        (False, 7, None, StoppingRule(fixed=7, ceiling=math.inf)),
        (False, 7, 3.0, StoppingRule(fixed=7, ceiling=3.0, whole=True)),
        (True, 7, None, StoppingRule(fixed=7, ceiling=math.inf)),
    ],
)
def test_options_choose_the_stopping_rule(
    quick: bool, rounds: int | None, budget: float | None, expected: StoppingRule
) -> None:
    assert make_stopping_rule(quick, rounds, budget) == expected
    nothing = make_stopping_rule(False, None, 0.0)  # which still gives one round
    assert (nothing.reason_to_end(0, 0.0), nothing.reason_to_end(1, 0.0)) == ("", "time was up after 1 round")


Curve = Callable[[float], float | None]
EVERY = 0.15


def settled_after(clock: Curve, temperature: Curve, limit: float = 60.0) -> float | None:
    """The seconds until looks at these curves are flat; None if never."""
    looks: list[ClockSample] = []
    for number in range(round(limit / EVERY)):
        at = number * EVERY
        looks.append(ClockSample(at, clock(at), temperature(at)))
        if fit_device_slopes(looks).is_flat:
            return at
    return None


def unknown(at: float) -> None:
    return None


def constant(value: float) -> Curve:
    return lambda at: value


def heating(seconds: float) -> Curve:
    """From 35 to 65 degrees, in whole ones."""
    return lambda at: round(65 - 30 * math.exp(-at / seconds))


@for_each(
    ("clock", "temperature", "least", "most"),
    [
        (constant(1.98e9), constant(60.0), SLOPE_FIT_SECONDS, SLOPE_FIT_SECONDS + 2 * EVERY),
        (constant(1.98e9), unknown, SLOPE_FIT_SECONDS, SLOPE_FIT_SECONDS + 2 * EVERY),
        (unknown, constant(60.0), SLOPE_FIT_SECONDS, SLOPE_FIT_SECONDS + 2 * EVERY),
        (constant(1.98e9), heating(4.0), 10.0, 25.0),
        (constant(1.98e9), heating(15.0), 22.0, 50.0),
        # It boosts for eight seconds, then keeps another clock.
        (lambda at: 1.98e9 if at < 8 else 1.71e9, constant(60.0), SLOPE_FIT_SECONDS, SLOPE_FIT_SECONDS + 2 * EVERY),
        # It falls slowly for twenty seconds.
        (lambda at: 1.98e9 - 2e7 * min(at, 20.0), constant(60.0), 20.0, 25.0),
    ],
)
def test_a_device_has_settled_if_clock_and_temperature_are_constant(
    clock: Curve, temperature: Curve, least: float, most: float
) -> None:
    after = settled_after(clock, temperature)
    assert after is not None and least <= after <= most


@for_each(
    ("clock", "temperature"),
    [
        (unknown, unknown),
        (lambda at: 1.98e9 * (1 - 0.004 * at), constant(60.0)),
        (constant(1.98e9), lambda at: 30 + 0.5 * at),
        (lambda at: math.nan, lambda at: math.nan),
        (constant(-1.0), unknown),
    ],
)
def test_a_device_that_changes_or_is_unknown_never_settles(clock: Curve, temperature: Curve) -> None:
    assert settled_after(clock, temperature) is None


def test_noise_delays_and_does_not_prevent() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        after = settled_after(lambda at, draw=draw: 15e6 * round(draw.gauss(1.755e9, 7e6) / 15e6), constant(60.0))  # type: ignore[misc]
        assert after is not None and after < 10


def test_a_course_says_how_long_it_was() -> None:
    looks = (ClockSample(0.5, None, 30.0), ClockSample(4.0, None, 31.0))
    assert DeviceSettling(looks).seconds == 3.5 and DeviceSettling().seconds == 0.0
    assert (
        fit_device_slopes([]).is_flat is False and fit_device_slopes([ClockSample(1.0, 1e9, 1.0)] * 20).is_flat is False
    )


FOUND = Coverage(
    (
        Holder("a", "linear", (8, 4), flops=60, converted=True),
        Holder("b", "linear", (8, 4), flops=20, reason="skipped by b", rule="skipped"),
        Holder("c", "conv2d", (8, 4, 3, 3), flops=100, converted=True),
    ),
    (OtherProduct("bmm", "attn", 20), OtherProduct("own::op", "attn", None, 3)),
    200,
)


def test_shares_of_converted_flops_are_counted() -> None:
    assert FOUND.converted_flops == 160
    assert FOUND.share == 0.8
    assert FOUND.unknown == 3
    assert Coverage().share == 0.0 and HeldProduct(2, 3, 4, times=5).flops == 240
    assert list(FOUND.by_kind().items()) == [("conv2d", (100, 100)), ("linear", (80, 60))]  # largest first


def test_every_bit_that_pynvml_knows_has_a_name() -> None:
    prefixes = ("nvmlClocksEventReason", "nvmlClocksThrottleReason")
    values = {
        value
        for name, value in vars(pynvml).items()
        if name.startswith(prefixes) and not name.endswith(("All", "None"))
    }
    assert values == set(THROTTLE_REASONS)


@for_each(
    ("mask", "names"),
    [
        (0, ()),
        (0x1, ()),
        (0x4, ("power-cap",)),
        (0x24, ("power-cap", "sw-thermal")),
        (0x48, ("hw-slowdown", "hw-thermal")),
        (0x81, ("hw-power-brake",)),
        (0x802, ("application-clocks", "bit 0x800")),
    ],
)
def test_throttle_masks_are_decoded(mask: int, names: tuple[str, ...]) -> None:
    assert list_throttle_reasons(mask) == names


def failing(reason: str) -> Reading:
    raise NoReading(reason)


def test_the_first_way_that_works_counts_and_a_failure_becomes_its_reason() -> None:
    assert read_first_available(lambda: failing("no"), lambda: Reading(1, "B", "second")).source == "second"
    with pytest.raises(NoReading, match=r"^no; never$"):
        read_first_available(lambda: failing("no"), lambda: failing("never"), lambda: failing("no"))
    assert try_reading(lambda: Reading(3.0, "W", "sensor")) == Reading(3.0, "W", "sensor")
    assert try_reading(lambda: failing("it is broken")) == UnavailableReading("it is broken")


@for_each("value", [0, 0.0, -1.0, math.nan, math.inf])
def test_an_impossible_value_is_no_reading(value: float) -> None:
    with pytest.raises(NoReading, match=r"the sensor reported .* W, which is impossible"):
        require_positive(value, "W", "the sensor")


def test_the_growth_of_counters_or_a_reason() -> None:
    before = {
        "same": Reading(5, "s", "a"),
        "more": Reading(5, "s", "b"),
        "back": Reading(5, "s", "c"),
        "gone": Reading(5, "s", "d"),
        "came": UnavailableReading("not yet"),
    }
    after = {
        "same": Reading(5, "s", "a"),
        "more": Reading(7, "s", "b"),
        "back": Reading(4, "s", "c"),
        "gone": UnavailableReading("lost"),
        "came": Reading(1, "s", "e"),
        "new": Reading(1, "s", "f"),
    }
    assert subtract_counters(before, after) == {
        "same": Reading(0, "s", "a"),
        "more": Reading(2, "s", "b"),
        "back": UnavailableReading("c went back from 5 to 4 s"),
        "gone": UnavailableReading("lost"),
        "came": UnavailableReading("not yet"),
        "new": UnavailableReading("it was not read before"),
    }
