"""Intel's GPUs, with a torch.xpu that only pretends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8bench.devices.xpu import Xpu
from fp8bench.errors import UsageError
from fp8bench.model import DeviceFacts, Level, Request
from fp8bench.model.codec import decode, encode
from fp8bench.plan.make import make_plan
from fp8bench.protocols import CannotLimit, MemoryMeter
from tests.counts import for_each
from tests.facts import CPU, XPU


class FakeXpu:
    """Two devices, an allocator that counts, events on one stream. Everything that is asked is noted."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.allocated = self.highest = 0
        self.fraction = 1.0

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(name="Max 1550", total_memory=1000, architecture=0x30F0000, uuid=f"uuid {index}")

    def memory_allocated(self, index: int) -> int:
        return self.allocated

    def max_memory_allocated(self, index: int) -> int:
        return self.highest

    def memory_reserved(self, index: int) -> int:
        return 100

    max_memory_reserved = memory_reserved

    def reset_peak_memory_stats(self, index: int) -> None:
        self.highest = self.allocated

    def get_per_process_memory_fraction(self, index: int) -> float:
        return self.fraction

    def set_per_process_memory_fraction(self, fraction: float, index: int) -> None:
        self.fraction = fraction

    def current_stream(self) -> str:
        return "the stream"

    class Event:
        count = 0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            assert stream == "the stream"
            FakeXpu.Event.count += 1
            self.at = 0.5 * FakeXpu.Event.count

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, later: Any) -> float:
            return float(later.at - self.at)

    def __getattr__(self, name: str) -> Any:
        if name not in ("synchronize", "set_device", "empty_cache"):
            raise AttributeError(name)
        return lambda *given: self.calls.append((name, given))


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> FakeXpu:
    fake = FakeXpu()
    monkeypatch.setattr(torch, "xpu", fake)
    return fake


def test_an_xpu_states_its_facts(xpu: FakeXpu) -> None:
    found = Xpu().available()
    assert [one.key for one in found] == ["xpu:0", "xpu:1"]
    first = found[0]
    assert (first.name, first.memory_bytes, first.arch, first.uuid) == ("Max 1550", 1000, "0x30f0000", "uuid 0")
    assert first.scaled_products is False and first.capability is None and first.accelerated
    assert decode(DeviceFacts, encode(first)) == first


def test_a_torch_without_such_devices_has_none() -> None:
    assert Xpu().available() == ()
    Xpu().empty_cache()


def test_its_clock_is_of_its_own_events(xpu: FakeXpu) -> None:
    stamper = Xpu().stamper(0)
    now = stamper.source()
    assert stamper.intervals_ns([now(), now(), now()]) == [500_000, 500_000]


def test_calls_go_to_the_device(xpu: FakeXpu) -> None:
    device = Xpu()
    device.select(1)
    device.synchronise(1)
    device.empty_cache()
    assert xpu.calls == [("set_device", (1,)), ("synchronize", (1,)), ("empty_cache", ())]


def test_its_memory_is_counted_by_its_allocator(xpu: FakeXpu) -> None:
    meter = Xpu().memory_meter(0)
    assert isinstance(meter, MemoryMeter)
    xpu.allocated = 1000
    meter.start(blocks=False)
    meter.mark()
    xpu.highest = 1700
    course = meter.stop()
    assert course is not None and (course.peak, course.reserved) == (700, 100)


def test_memory_ends_at_its_limit(xpu: FakeXpu, monkeypatch: pytest.MonkeyPatch) -> None:
    with Xpu().memory_limited(0, 400):
        assert xpu.fraction == 0.5
    assert xpu.fraction == 1.0
    monkeypatch.delattr(FakeXpu, "get_per_process_memory_fraction")
    with pytest.raises(CannotLimit, match="cannot limit memory"):
        Xpu().memory_limited(0, 400)


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("XPU out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"), True),
        (RuntimeError("level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)"), False),
    ],
)
def test_exhausted_memory_is_recognised(error: Exception, is_memory: bool, xpu: FakeXpu) -> None:
    assert Xpu().is_out_of_memory(error) is is_memory


@for_each("suite", ["gemm", "mlp", "optimizer", "cast"])
def test_suites_are_planned_for_it(suite: str) -> None:
    (group, *_) = make_plan(Request(suite, ("fp32", "bf16", "fp8"), devices=("xpu",)), (CPU, XPU))
    levels = {one.case.precision: one.support.level for one in group.cases}
    assert levels == dict.fromkeys(("fp32", "bf16", "fp8"), Level.NATIVE)
    assert {one.case.device for one in group.cases} == {"xpu:0"}


@for_each("word", ["tpu", "xla:0"])
def test_a_tpu_is_refused_with_the_reason(word: str) -> None:
    from fp8bench.plan.make import check_request

    with pytest.raises(UsageError, match="torch_xla collects a whole step and runs it later as one graph"):
        check_request(Request("gemm", devices=(word,)))


@for_each("word", ["rocm", "hip:1"])
def test_torch_s_name_for_an_amd_gpu_is_explained(word: str) -> None:
    from fp8bench.plan.make import check_request

    with pytest.raises(UsageError, match=f"'{word}' is not measured: torch calls AMD's GPUs cuda: use that name"):
        check_request(Request("gemm", devices=(word,)))
