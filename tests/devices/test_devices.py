"""Devices and their clocks; the CUDA one with events that only pretend."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from fp8bench.devices import cpu as cpu_module
from fp8bench.devices.cpu import Cpu, HostStamper, processor_name
from fp8bench.devices.cuda import Cuda, EventStamper
from fp8bench.measure.clock import PhaseClock
from fp8bench.model import CELL_PHASES, DeviceFacts
from fp8bench.registry import devices


class FakeEvent:
    """An event whose time is the number of records so far, in steps of a quarter of a millisecond."""

    made: ClassVar[int] = 0
    records: ClassVar[int] = 0
    synchronised: ClassVar[list[float]] = []

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        FakeEvent.made += 1
        self.at_ms = -1.0

    def record(self) -> None:
        FakeEvent.records += 1
        self.at_ms = 0.25 * FakeEvent.records

    def synchronize(self) -> None:
        FakeEvent.synchronised.append(self.at_ms)

    def elapsed_time(self, later: FakeEvent) -> float:
        assert FakeEvent.synchronised, "read before waiting for the device"
        return later.at_ms - self.at_ms


@pytest.fixture
def stamper(monkeypatch: pytest.MonkeyPatch) -> EventStamper:
    """A stamper of fake events, counted from nothing."""
    FakeEvent.made = FakeEvent.records = 0
    FakeEvent.synchronised = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    return EventStamper()


def test_the_processor_is_one_device_with_plain_facts() -> None:
    """Its memory is the machine's; torch's version is text, not a class of torch's own."""
    (facts,) = Cpu().available()
    assert (facts.kind, facts.index, facts.key, facts.accelerated) == ("cpu", 0, "cpu", False)
    assert facts.name and facts.arch
    assert facts.memory_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert type(facts.torch) is str and facts.torch == torch.__version__
    assert (facts.capability, facts.cuda, facts.hip) == (None, None, None)


def test_memory_that_the_system_does_not_tell_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that sysconf does not know is a ValueError."""

    def unknown(name: str) -> int:
        raise ValueError(name)

    monkeypatch.setattr(cpu_module.os, "sysconf", unknown)
    assert Cpu().available()[0].memory_bytes == 0


@pytest.mark.parametrize(
    ("text", "name"),
    [("processor\t: 0\nmodel name\t: Xeon: the best\nmodel name\t: other\n", "Xeon: the best"), ("flags: a b\n", None)],
)
def test_the_processor_s_name_is_the_system_s(monkeypatch: pytest.MonkeyPatch, text: str, name: str | None) -> None:
    """Where the system does not tell it, something else does."""
    monkeypatch.setattr(cpu_module, "Path", lambda path: SimpleNamespace(read_text=lambda: text))
    assert processor_name() == name or (name is None and processor_name())


def test_a_machine_without_proc_still_has_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is called."""

    def missing(path: str) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(cpu_module, "Path", missing)
    monkeypatch.setattr(cpu_module.platform, "processor", lambda: "")
    monkeypatch.setattr(cpu_module.platform, "machine", lambda: "")
    assert processor_name() == "unknown processor"


def test_host_stamps_are_whole_nanoseconds_that_never_go_back() -> None:
    """Intervals lie between neighbours; one stamp has none."""
    now = HostStamper().source()
    stamps = [now() for _ in range(100)]
    intervals = HostStamper().intervals_ns(stamps)
    assert all(type(one) is int and one >= 0 for one in intervals)
    assert sum(intervals) == stamps[-1] - stamps[0]
    assert HostStamper().intervals_ns([5]) == HostStamper().intervals_ns([]) == []


def test_event_intervals_are_nanoseconds_between_neighbours(stamper: EventStamper) -> None:
    """CUDA says milliseconds."""
    now = stamper.source()
    assert stamper.intervals_ns([now(), now(), now()]) == [250_000, 250_000]
    assert stamper.intervals_ns([]) == []


def test_reading_waits_for_the_last_event_only(stamper: EventStamper) -> None:
    """Once: the others are done by then."""
    now = stamper.source()
    stamps = [now() for _ in range(4)]
    stamper.intervals_ns(stamps)
    assert FakeEvent.synchronised == [stamps[-1].at_ms]


def test_events_are_used_again_once_recycled(stamper: EventStamper) -> None:
    """And not before: an event recorded anew forgets what it said."""
    now = stamper.source()
    first = [now() for _ in range(3)]
    second = [now() for _ in range(2)]
    assert FakeEvent.made == 5 and len({id(event) for event in first + second}) == 5
    stamper.recycle()
    third = [now() for _ in range(5)]
    assert FakeEvent.made == 5
    assert {id(event) for event in third} == {id(event) for event in first + second}
    now()
    assert FakeEvent.made == 6
    assert stamper.intervals_ns(third) == [250_000] * 4


def test_recycling_twice_hands_no_event_out_twice(stamper: EventStamper) -> None:
    """Two stamps of one step on one event would be one stamp."""
    now = stamper.source()
    _ = [now() for _ in range(3)]
    stamper.recycle()
    stamper.recycle()
    again = [now() for _ in range(4)]
    assert len({id(event) for event in again}) == 4


def test_a_source_fetched_before_recycling_sees_the_pool(stamper: EventStamper) -> None:
    """The clock fetches it once and for all."""
    clock = PhaseClock(stamper)
    for _ in range(3):
        clock.begin()
        with clock.gemm:
            pass
        codes, stamps = clock.end()
        assert [CELL_PHASES[code] for code in codes] == ["unattributed", "gemm", "unattributed"]
        assert stamper.intervals_ns(stamps) == [250_000] * 3
        stamper.recycle()
    assert FakeEvent.made == 4


def test_without_cuda_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is no error."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Cuda().available() == ()


@pytest.mark.parametrize(
    ("hip", "arch"), [(None, None), ("7.0.1", "gfx942:sramecc+:xnack-")], ids=["nvidia", "amd"]
)  # fmt: skip
def test_every_gpu_has_its_facts(monkeypatch: pytest.MonkeyPatch, hip: str | None, arch: str | None) -> None:
    """NVIDIA's by compute capability, AMD's by the name of their instruction set."""
    properties = {"name": "a GPU", "total_memory": 80 << 30, "major": 9, "minor": 4}
    if arch is not None:
        properties["gcnArchName"] = arch
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**properties))
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", None if hip else "13.0")
    found = Cuda().available()
    assert [facts.key for facts in found] == ["cuda:0", "cuda:1"]
    assert found[1] == DeviceFacts(
        "cuda", 1, "a GPU", 80 << 30, str(torch.__version__), (9, 4), None if hip else "13.0", hip, arch or "sm_94"
    )


def test_a_gpu_is_selected_and_waited_for_by_its_own_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events go to the current device's stream, so the second GPU must be the current one."""
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: asked.append(("select", index)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: asked.append(("wait", index)))
    Cuda().select(1)
    Cuda().synchronise(1)
    Cpu().select(0)
    Cpu().synchronise(0)
    assert asked == [("select", 1), ("wait", 1)]


@pytest.mark.parametrize(
    ("device", "error", "exhausted"),
    [
        (Cuda(), torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 TiB."), True),
        (Cuda(), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (Cuda(), RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (Cuda(), MemoryError(), False),
        (Cpu(), MemoryError(), True),
        (Cpu(), RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory"), True),
        (Cpu(), torch.cuda.OutOfMemoryError("CUDA out of memory."), False),
        (Cpu(), ValueError("no"), False),
    ],
)
def test_each_device_knows_its_own_exhausted_memory(device: Cpu | Cuda, error: Exception, exhausted: bool) -> None:
    """By type where there is one, else by torch's words."""
    assert device.is_out_of_memory(error) is exhausted


def test_a_real_allocation_that_fails_is_recognised() -> None:
    """A quarter of an exabyte: torch's words have not changed."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 56, dtype=torch.float32)
    assert Cpu().is_out_of_memory(raised.value)


def test_devices_are_registered_under_their_kind() -> None:
    """The plan and the bench find them by it."""
    assert sorted(devices.names()) == ["cpu", "cuda"]
    for kind in devices.names():
        assert devices.get(kind).kind == kind
