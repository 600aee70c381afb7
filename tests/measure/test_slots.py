"""How many calls a slot has, and how long the device waits ahead of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fp8bench.measure.slots import COLD_CALLS, MOST_FILLING_SECONDS, SlotShape, filling_of, shape_of
from tests.counts import for_each

seconds = st.floats(1e-7, 1e3)


@for_each(
    ("step", "cache", "queues", "shape"),
    [
        (1e-3, "hot", False, SlotShape(8, 1)),
        (1e-3, "rotating", False, SlotShape(8, 1)),
        (1e-3, "cold", False, SlotShape(COLD_CALLS, 1)),
        (30e-3, "cold", False, SlotShape(1, 0)),
        (30e-3, "hot", True, SlotShape(3, 0, filling_of(1e-5, 3))),
        (1e-3, "cold", True, SlotShape(COLD_CALLS, 1, filling_of(1e-5, COLD_CALLS))),  # each has a flush before it
    ],
)
def test_the_shape_of_a_slot(step: float, cache: str, queues: bool, shape: SlotShape) -> None:
    assert shape_of(step, 1e-5, cache, queues) == shape


@given(seconds, st.integers(1, 100_000))
def test_the_device_waits_as_long_as_the_host_needs(host: float, calls: int) -> None:
    filling = filling_of(host, calls)
    assert filling_of(0.0, calls) is None, "there is nothing to run ahead of"
    assert filling is not None and 1 <= filling.calls <= calls and filling.seconds <= MOST_FILLING_SECONDS
    assert filling.seconds >= min(MOST_FILLING_SECONDS, 1.2 * host * filling.calls)
