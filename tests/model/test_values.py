"""What values say of themselves: coverage by kind, reasons of a throttled clock, what a sampler reads or why not."""

from __future__ import annotations

import math

import pynvml
import pytest

from fp8bench.model.consumed import BITS, reasons_in
from fp8bench.model.readings import NoReading, Reading, Unavailable, attempt, first_of, grown, positive
from fp8bench.model.step import Coverage, HeldProduct, Holder, OtherProduct
from tests.counts import for_each

FOUND = Coverage(
    (
        Holder("a", "linear", (8, 4), flops=60, converted=True),
        Holder("b", "linear", (8, 4), flops=20, reason="skipped by b", rule="skipped"),
        Holder("c", "conv2d", (8, 4, 3, 3), flops=100, converted=True),
    ),
    (OtherProduct("bmm", "attn", 20), OtherProduct("own::op", "attn", None, 3)),
    200,
)


def test_shares() -> None:
    assert FOUND.converted_flops == 160
    assert FOUND.share == 0.8
    assert FOUND.unknown == 3
    assert Coverage().share == 0.0


def test_kinds_begin_with_the_most() -> None:
    assert list(FOUND.by_kind().items()) == [("conv2d", (100, 100)), ("linear", (80, 60))]


def test_a_product_counts_its_sums_too() -> None:
    assert HeldProduct(2, 3, 4, times=5).flops == 240


def test_every_bit_that_pynvml_knows_has_a_name() -> None:
    """Under both names that NVML has had for them."""
    prefixes = ("nvmlClocksEventReason", "nvmlClocksThrottleReason")
    values = {
        value
        for name, value in vars(pynvml).items()
        if name.startswith(prefixes) and not name.endswith(("All", "None"))
    }
    assert values == set(BITS)


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
def test_masks(mask: int, names: tuple[str, ...]) -> None:
    """Idling holds nothing back; a bit without a name yet is shown as it is."""
    assert reasons_in(mask) == names


def failing(reason: str) -> Reading:
    raise NoReading(reason)


def test_a_failure_becomes_its_reason() -> None:
    assert attempt(lambda: Reading(3.0, "W", "sensor")) == Reading(3.0, "W", "sensor")
    assert attempt(lambda: failing("it is broken")) == Unavailable("it is broken")


def test_the_first_way_that_works_counts() -> None:
    """If none does, all their reasons stand, each of them once."""
    assert first_of(lambda: failing("no"), lambda: Reading(1, "B", "second")).source == "second"
    with pytest.raises(NoReading, match=r"^no; never$"):
        first_of(lambda: failing("no"), lambda: failing("never"), lambda: failing("no"))


@for_each("value", [0, 0.0, -1.0, math.nan, math.inf])
def test_what_cannot_be_is_no_reading(value: float) -> None:
    """A device that says 0 W does not know."""
    with pytest.raises(NoReading, match=r"the sensor said .* W, which cannot be"):
        positive(value, "W", "the sensor")


def test_counters_grow_or_say_why_not() -> None:
    """A count of 0 is a count; one that went back is none."""
    before = {
        "same": Reading(5, "s", "a"), "more": Reading(5, "s", "b"), "back": Reading(5, "s", "c"),
        "gone": Reading(5, "s", "d"), "came": Unavailable("not yet"),
    }  # fmt: skip
    after = {
        "same": Reading(5, "s", "a"), "more": Reading(7, "s", "b"), "back": Reading(4, "s", "c"),
        "gone": Unavailable("lost"), "came": Reading(1, "s", "e"), "new": Reading(1, "s", "f"),
    }  # fmt: skip
    assert grown(before, after) == {
        "same": Reading(0, "s", "a"),
        "more": Reading(2, "s", "b"),
        "back": Unavailable("c went back from 5 to 4 s"),
        "gone": Unavailable("lost"),
        "came": Unavailable("not yet"),
        "new": Unavailable("it was not read before"),
    }
