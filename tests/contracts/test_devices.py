"""Contract of every device class; new devices are included automatically."""

from __future__ import annotations

import pytest
import torch

from fp8bench.model import DeviceFacts
from fp8bench.model.codec import decode, encode
from fp8bench.registry import devices
from fp8bench.worker.clock import PhaseStampClock, measure_overheads
from tests.counts import for_each

NAMES = devices.names()
HERE = []
for name in NAMES:
    HERE += [(name, facts) for facts in devices.get(name).available()]
here = pytest.mark.parametrize(("kind", "facts"), HERE, ids=lambda value: getattr(value, "key", None))


def test_there_is_always_a_processor() -> None:
    assert "cpu" in {kind for kind, _ in HERE}


@for_each("kind", NAMES)
def test_available_devices_state_their_facts(kind: str) -> None:
    device = devices.get(kind)
    found = device.available()
    assert device.kind == kind and isinstance(found, tuple)
    assert len({facts.key for facts in found}) == len(found)
    for index, facts in enumerate(found):
        assert (facts.kind, facts.index) == (kind, index)
        assert facts.name and facts.memory_bytes > 1 << 20 and facts.torch
        assert decode(DeviceFacts, encode(facts)) == facts


@here
def test_its_clock_goes_forward(kind: str, facts: DeviceFacts) -> None:
    stamper = devices.get(kind).stamper(facts.index)
    now = stamper.source()
    for _ in range(3):
        intervals = stamper.intervals_ns([now() for _ in range(10)])
        assert len(intervals) == 9 and all(type(one) is int and one >= 0 for one in intervals)
        stamper.recycle()
    assert stamper.intervals_ns([]) == [] and stamper.intervals_ns([now()]) == []


@here
def test_two_clocks_do_not_share_their_stamps(kind: str, facts: DeviceFacts) -> None:
    device = devices.get(kind)
    one, other = device.stamper(facts.index), device.stamper(facts.index)
    stamps = [one.source()(), one.source()()]
    other.source()()
    other.recycle()
    assert one.intervals_ns(stamps)[0] >= 0


@here
def test_it_can_be_waited_for_and_cleaned(kind: str, facts: DeviceFacts) -> None:
    device = devices.get(kind)
    device.synchronise(facts.index)
    device.empty_cache()
    device.synchronise(facts.index)
    assert facts in device.available(), "the device is gone after being cleaned"


@for_each("kind", NAMES)
def test_only_a_lack_of_memory_is_recognised_as_one(kind: str) -> None:
    device = devices.get(kind)
    for error in (ValueError("out of paper"), RuntimeError("size mismatch"), KeyError("x")):
        assert not device.is_out_of_memory(error)


@here
def test_marks_and_stamps_take_less_than_a_millisecond(kind: str, facts: DeviceFacts) -> None:
    cost = measure_overheads(devices.get(kind), facts.index)
    assert 0 <= cost.marker_off < cost.marker_on < 1e-3 and 0 <= cost.stamp < 1e-3
    assert (cost.event_pair is None) == (kind == "cpu")


@here
def test_a_phase_clock_runs_on_it(kind: str, facts: DeviceFacts) -> None:
    stamper = devices.get(kind).stamper(facts.index)
    clock = PhaseStampClock(stamper)
    clock.begin()
    with clock.gemm, clock.cast:
        pass
    codes, stamps = clock.end()
    assert len(stamper.intervals_ns(stamps)) == len(codes)


@here
def test_it_counts_its_memory_or_says_that_it_cannot(kind: str, facts: DeviceFacts) -> None:
    meter = devices.get(kind).memory_meter(facts.index)
    if isinstance(meter, str):
        assert meter
        pytest.skip(f"{facts.key} does not count memory: {meter}")
    before = torch.empty(1 << 22, dtype=torch.uint8, device=facts.key)
    meter.start()
    kept = torch.empty(1 << 21, dtype=torch.uint8, device=facts.key)
    meter.mark()
    torch.empty(1 << 20, dtype=torch.uint8, device=facts.key)
    course = meter.stop()
    assert 0 <= course.peak - (3 << 20) <= (2 << 20 if facts.accelerated else 0)
    assert sorted(one.size for one in course.held if not one.phase) == [kept.nbytes]
    assert before.nbytes == 2 * kept.nbytes
