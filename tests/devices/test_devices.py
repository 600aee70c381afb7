"""Devices and their clocks; the CUDA one with events that only pretend."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from fp8bench.devices import cpu as cpu_module
from fp8bench.devices.cpu import Cpu, ProfilerMeter, read_last_level_cache, read_processor_name
from fp8bench.devices.cuda import Cuda, QueueFiller, explain_missing_kernels, format_pci_address
from fp8bench.model import DeviceFacts, MemoryRole
from fp8bench.profiler.allocations import AllocationStream, Event, LiveAllocationAddresses, MemoryChange, PhaseStart
from fp8bench.profiler.gpu import AllocatorMeter, AutogradFlush, DeviceEventStamper, find_record_method
from fp8bench.protocols import CannotCapture, CannotLimit, MemoryMeter
from fp8bench.registry import devices
from tests.counts import for_each


class FakeEvent:
    """An event whose time is its number of records, in steps of 0.25 ms."""

    made: ClassVar[int] = 0
    records: ClassVar[int] = 0
    synchronised: ClassVar[list[float]] = []

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        FakeEvent.made += 1
        self.at_ms = -1.0

    def record(self, stream: str) -> None:
        assert stream == "of the main thread"
        FakeEvent.records += 1
        self.at_ms = 0.25 * FakeEvent.records

    def synchronize(self) -> None:
        FakeEvent.synchronised.append(self.at_ms)

    def elapsed_time(self, later: FakeEvent) -> float:
        assert FakeEvent.synchronised, "read before waiting for the device"
        return later.at_ms - self.at_ms


@pytest.fixture
def stamper(monkeypatch: pytest.MonkeyPatch) -> DeviceEventStamper:
    FakeEvent.made = FakeEvent.records = 0
    FakeEvent.synchronised = []
    main = threading.get_ident()
    stream = lambda: "of the main thread" if threading.get_ident() == main else "of another"  # noqa: E731
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    return DeviceEventStamper(torch.cuda)


def test_events_are_recorded_without_the_python_method_around_it() -> None:
    """torch's event class has a Python wrapper method; a class without one is recorded by its plain method."""

    class Wrapped(FakeEvent):
        def record(self, stream: str) -> None:
            raise AssertionError

    assert "record" in vars(torch.cuda.Event)
    assert find_record_method(Wrapped) is vars(FakeEvent)["record"] is find_record_method(FakeEvent)


def test_a_machine_without_proc_still_has_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(cpu_module, "Path", missing)
    monkeypatch.setattr(cpu_module.platform, "processor", lambda: "")
    monkeypatch.setattr(cpu_module.platform, "machine", lambda: "")
    assert read_processor_name() == "unknown processor"


def test_a_step_that_is_not_captured_has_torchs_message() -> None:
    with pytest.raises(CannotCapture, match=r"torch captured no graph of its step: [A-Za-z]+: .+"):
        Cuda().captured(0, lambda: None)
    with pytest.raises(CannotCapture, match="cannot be replayed"):
        Cpu().captured(0, lambda: None)


def test_a_queue_is_filled_with_products_and_not_with_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[float | str] = []
    monkeypatch.setattr(torch.cuda, "_sleep", done.append)
    fillers = [QueueFiller(lambda: done.append("products"), 0.5e-3), "no graphs"]
    monkeypatch.setattr(Cuda, "_filler_by_index", {})
    monkeypatch.setattr(Cuda, "_make_filler", lambda self, index: fillers.pop(0))
    for index in (0, 1):
        for seconds in (1.2e-3, 0.1e-3):
            Cuda().occupy(index, seconds)
    assert done == ["products", "products", "products", 300_000, 3_600_000, 300_000]
    assert [Cuda().why_idle(index) for index in range(3)] == ["", "no graphs", ""]


def test_a_device_without_graphs_fills_its_queue_by_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    reason = Cuda()._make_filler(0)
    assert isinstance(reason, str) and reason.strip()


def test_the_size_of_the_last_cache_comes_from_the_system(tmp_path: Path) -> None:
    cache = tmp_path / f"cpu{min(os.sched_getaffinity(0))}" / "cache"
    levels = (("1", "48K", "0"), ("3", "32768K", "0-3,8-11"), ("2", "1024K", "0"), ("4", "no", "0"))
    for index, said in enumerate(levels):
        (cache / f"index{index}").mkdir(parents=True)
        for name, text in zip(("level", "size", "shared_cpu_list"), said, strict=True):
            (cache / f"index{index}" / name).write_text(f"{text}\n")
    (cache / "index9").mkdir()
    assert read_last_level_cache(tmp_path) == (32 << 20, 8)
    assert read_last_level_cache(tmp_path / "none") == (0, 0)


def test_event_intervals_are_nanoseconds_between_neighbours(stamper: DeviceEventStamper) -> None:
    now = stamper.source()
    assert stamper.intervals_ns([now(), now(), now()]) == [250_000, 250_000]
    assert stamper.intervals_ns([]) == []


def test_every_thread_records_on_the_stream_of_the_source(stamper: DeviceEventStamper) -> None:
    now = stamper.source()
    stamps = [now()]
    thread = threading.Thread(target=lambda: stamps.append(now()))
    thread.start()
    thread.join()
    assert stamper.intervals_ns(stamps) == [250_000]


def test_reading_waits_for_the_last_event_only(stamper: DeviceEventStamper) -> None:
    now = stamper.source()
    stamps = [now() for _ in range(4)]
    stamper.intervals_ns(stamps)
    assert FakeEvent.synchronised == [stamps[-1].at_ms]


def test_events_are_used_again_once_recycled(stamper: DeviceEventStamper) -> None:
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


@pytest.mark.parametrize(("hip", "arch"), [(None, None), ("7.0.1", "gfx942:sramecc+:xnack-")], ids=["nvidia", "amd"])
def test_every_gpu_has_its_facts(monkeypatch: pytest.MonkeyPatch, hip: str | None, arch: str | None) -> None:
    properties = {
        "name": "a GPU",
        "total_memory": 80 << 30,
        "major": 9,
        "minor": 4,
        "gcnArchName": arch or "a GPU",
        "L2_cache_size": 4 << 20,
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_arch_list", list)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**properties))
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", None if hip else "13.0")
    found = Cuda().available()
    assert [facts.key for facts in found] == ["cuda:0", "cuda:1"]
    assert found[1] == DeviceFacts(
        "cuda",
        1,
        "a GPU",
        80 << 30,
        str(torch.__version__),
        (9, 4),
        None if hip else "13.0",
        hip,
        arch or "sm_94",
        cache_bytes=(256 if hip else 4) << 20,
        cache_shared=1,
    )


def test_a_gpu_has_torchs_uuid_and_pci_address(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = {"name": "a GPU", "total_memory": 80 << 30, "major": 9, "minor": 4, "uuid": "aaaa2222-0000"}
    properties |= {"pci_domain_id": 0, "pci_bus_id": 0x4C, "pci_device_id": 0}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**properties))
    assert [(one.uuid, one.pci) for one in Cuda().available()] == [("aaaa2222-0000", "00000000:4C:00")]
    assert format_pci_address(SimpleNamespace(pci_bus_id=3)) == ""


@for_each(
    ("device", "error", "exhausted"),
    [
        (Cuda(), torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 TiB."), True),
        (Cuda(), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (Cuda(), RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (Cuda(), RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (Cuda(), torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'", 2), True),
        (
            Cuda(),
            RuntimeError(
                "NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at "
                '"/pytorch/c10/cuda/CUDACachingAllocator.cpp":1377, please report a bug to PyTorch.'
            ),
            True,
        ),
        (Cuda(), RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmul(...)`"), False),
        (Cuda(), RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (Cuda(), RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (Cuda(), MemoryError(), False),
        (Cpu(), MemoryError(), True),
        (Cpu(), RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory"), True),
        (Cpu(), torch.cuda.OutOfMemoryError("CUDA out of memory."), False),
        (Cpu(), RuntimeError("std::bad_alloc"), True),
        (Cpu(), RuntimeError("shapes do not match"), False),
    ],
)
def test_each_device_knows_its_own_exhausted_memory(device: Cpu | Cuda, error: Exception, exhausted: bool) -> None:
    assert device.is_out_of_memory(error) is exhausted


@for_each("words", ["CUBLAS_STATUS_NOT_INITIALIZED when calling", "CUDNN_STATUS_NOT_INITIALIZED"])
def test_a_library_that_cannot_begin_lacks_memory_where_there_is_little(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [0]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (left[0], 80 << 30))
    assert Cuda().is_out_of_memory(RuntimeError(f"CUDA error: {words}"))
    left[0] = 2 << 30
    assert not Cuda().is_out_of_memory(RuntimeError(f"CUDA error: {words}"))
    left.clear()  # even querying raises
    assert not Cuda().is_out_of_memory(RuntimeError(f"CUDA error: {words}"))


HOPPER = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@for_each(
    ("arch", "built", "runs"),
    [
        ("sm_90", HOPPER, True),
        ("sm_89", HOPPER, True),
        ("sm_103", HOPPER, True),
        ("sm_121", HOPPER, True),
        ("sm_70", HOPPER, False),
        ("sm_110", HOPPER, False),
        ("sm_80", ["sm_86"], False),
        ("sm_90", ["sm_90a"], True),
        ("sm_103", ["sm_100a"], False),
        ("sm_103", ["sm_100f"], True),
        ("sm_120", ["sm_100f"], False),
        ("sm_130", [*HOPPER, "compute_120"], True),
        ("sm_75", ["compute_80"], False),
        ("sm_130", ["compute_120a"], False),
        ("gfx942:sramecc+:xnack-", ["gfx90a", "gfx942"], True),
        ("gfx906", ["gfx90a", "gfx942"], False),
        ("gfx950", ["gfx9-4-generic"], True),
        ("sm_90", [], True),
    ],
)
def test_a_build_of_torch_has_kernels_for_some_gpus(arch: str, built: list[str], runs: bool) -> None:
    why = explain_missing_kernels(arch, built)
    assert bool(why) is not runs
    assert runs or (arch in why and built[0] in why)


def test_a_real_allocation_that_fails_is_recognised() -> None:
    """Allocates a quarter of an exabyte to check that torch's message has not changed."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 56, dtype=torch.float32)
    assert Cpu().is_out_of_memory(raised.value)


def test_devices_are_registered_under_their_kind() -> None:
    assert sorted(devices.names()) == ["cpu", "cuda", "xpu"]
    for kind in devices.names():
        assert devices.get(kind).kind == kind


def peak_of(meter: MemoryMeter) -> int | None:
    course = meter.stop()
    return None if course is None else course.peak


def test_a_meter_without_a_mark_has_no_answer() -> None:
    meter = ProfilerMeter("cpu")
    assert meter.stop() is None
    meter.start()
    kept = torch.empty(10)
    assert peak_of(meter) is None and meter.stop() is None
    meter.start()
    meter.mark()
    assert peak_of(meter) == 0 and kept.nbytes == 40
    assert not torch.autograd._profiler_enabled()


@pytest.mark.slow
def test_measuring_memory_says_nothing_and_leaves_the_environment_alone() -> None:
    program = (
        "import os, torch\n"
        "from fp8bench.devices.cpu import ProfilerMeter\n"
        "before = dict(os.environ)\n"
        "meter = ProfilerMeter('cpu')\n"
        "for _ in range(2):\n"
        "    meter.start(); meter.mark(); x = torch.empty(9); assert meter.stop().peak == 36; del x\n"
        "assert dict(os.environ) == before\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "profiler" not in done.stdout + done.stderr


class FakeAllocator:
    """torch's allocator on one GPU: allocated, reserved, the peak since the reset, cuBLAS's workspace. It counts on the
    host, whatever the device still has to do; a workspace in use must not be freed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, index: int) -> None:
        self.index, self.held, self.peak, self.workspace, self.waiting = index, 0, 0, 0, 0
        self.reserved = self.peak_reserved = 0
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronise)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: self.read(index, self.held))
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda index: self.read(index, self.peak))
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda index: self.read(index, self.peak_reserved))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", self.clear, raising=False)
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: self.segments)
        self.segments: list[dict[str, object]] = []
        self.ran: list[str] = []
        monkeypatch.setattr(AutogradFlush, "run", lambda backward: self.ran.append("backward"))

    def allocate(self, size: int) -> None:
        self.waiting += 1
        self.held += size
        self.reserved = max(self.reserved, -(-self.held // BLOCK) * BLOCK)
        self.peak = max(self.peak, self.held)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def product(self) -> None:
        if not self.workspace:
            self.workspace = 32 << 20
            self.allocate(self.workspace)

    def clear(self) -> None:
        assert not self.waiting, "a workspace in use was freed"
        self.held -= self.workspace
        self.workspace = 0

    def synchronise(self, index: int) -> None:
        assert index == self.index
        self.waiting = 0

    def read(self, index: int, value: int) -> int:
        assert index == self.index
        return value

    def reset(self, index: int) -> None:
        assert index == self.index
        self.peak = self.held
        self.peak_reserved = self.reserved


# Bytes per request of the fake allocator to its driver.
BLOCK = 2 << 20


def test_memory_on_a_gpu_is_what_its_allocator_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = FakeAllocator(monkeypatch, 1)
    allocator.allocate(1000)
    meter = Cuda().memory_meter(1)
    assert isinstance(meter, AllocatorMeter) and meter.stop() is None
    meter.start()
    for size in (512, 1 << 30, -(1 << 30)):
        allocator.allocate(size)
    assert meter.stop() is None
    meter.start()
    allocator.allocate(2048)
    meter.mark()
    for size in (4096, -4096, 512):
        allocator.allocate(size)
    assert peak_of(meter) == 2048 + 4096
    meter.start()
    meter.mark()
    allocator.allocate(-1000)
    assert peak_of(meter) == 0
    assert not torch.autograd._profiler_enabled()


def gpu_meter() -> AllocatorMeter:
    meter = Cuda().memory_meter(0)
    assert isinstance(meter, AllocatorMeter)
    return meter


def test_phases_on_a_gpu_have_highest_points_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = FakeAllocator(monkeypatch, 0)
    allocator.allocate(BLOCK)
    meter = gpu_meter()
    meter.start()
    meter.mark()
    for phase, sizes in (
        ("cast", (100,)),
        ("gemm", (3 * BLOCK, -3 * BLOCK, 40)),
        ("cast", (10, -10)),
        ("unattributed", (-140,)),
    ):
        meter.enter(phase)
        for size in sizes:
            allocator.allocate(size)
    assert allocator.waiting  # no synchronization since the measurement began
    course = meter.stop()
    assert course is not None and course.peak == 100 + 3 * BLOCK
    assert [(one.phase, one.allocated, one.reserved) for one in course.phases] == [
        ("unattributed", 140, 5 * BLOCK),
        ("cast", 150, 5 * BLOCK),
        ("gemm", 100 + 3 * BLOCK, 5 * BLOCK),
    ]
    assert course.reserved == 5 * BLOCK and course.held == ()


def test_a_gpus_allocations_come_from_the_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeAllocator(monkeypatch, 0)
    cleared: list[int] = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: cleared.append(1), raising=False)
    meter = gpu_meter()
    meter.start()
    meter.enter("gemm")
    notes: list[Event] = []
    monkeypatch.setattr(meter._stream, "note", notes.append)

    def told() -> list[Event]:
        AllocationStream.stop(meter._stream)
        changes = [MemoryChange(1, 512), MemoryChange(2, 32 << 20), PhaseStart("gemm"), MemoryChange(3, 1024)]
        return [*changes, *notes, MemoryChange(2, -(32 << 20))]

    monkeypatch.setattr(meter._stream, "stop", told)
    course = meter.stop()
    assert course is not None and len(cleared) == 2
    assert {one.address: (one.phase, one.lasting, one.said) for one in course.held} == {
        1: ("", True, ()),
        2: ("", True, (MemoryRole.WORKSPACE,)),
        3: ("gemm", True, ()),
    }


def test_memory_that_autograds_thread_freed_unseen_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = FakeAllocator(monkeypatch, 0)
    blocks = [{"address": 7, "state": "active_allocated"}, {"address": 8, "state": "inactive"}]
    allocator.segments = [{"device": 0, "blocks": blocks}, {"device": 1, "blocks": [{"address": 9, "state": "x"}]}]
    meter = gpu_meter()
    meter.start()
    notes: list[Event] = []
    monkeypatch.setattr(meter._stream, "note", notes.append)
    meter.mark()
    assert not torch._C._is_multithreading_enabled() and len(allocator.ran) == 2
    meter.enter("gemm")
    assert meter.stop() is not None and torch._C._is_multithreading_enabled()
    assert notes[:3] == [LiveAllocationAddresses(frozenset({7})), PhaseStart("unattributed"), PhaseStart("gemm")]


def test_counting_only_the_peak_starts_no_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = FakeAllocator(monkeypatch, 0)
    meter = gpu_meter()
    meter.start(blocks=False)
    meter.mark()
    allocator.allocate(100)
    assert not torch.autograd._profiler_enabled() and torch._C._is_multithreading_enabled()
    course = meter.stop()
    assert course is not None and course.peak == 100 and not course.held and "reported no allocation" in course.why


def test_a_workspace_counts_in_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS allocates it at the first product of a process and keeps it."""
    allocator = FakeAllocator(monkeypatch, 0)
    meter = gpu_meter()
    peaks = []
    for _ in range(3):
        meter.start()
        allocator.product()
        meter.mark()
        allocator.product()
        peaks.append(peak_of(meter))
    assert peaks == [32 << 20] * 3


class FakeFraction:
    """The share of a GPU of 10 GB that torch's allocator may take; 1 GB is reserved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.share = 0.9
        self.set: list[float] = []
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda index: self.share, raising=False)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self.change)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 10**9)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=10 * 10**9))

    def change(self, share: float, index: int) -> None:
        assert index == 1
        self.set.append(share)
        self.share = share


def test_retries_of_a_gpus_allocator_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[str, object] = {}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda index: said)
    assert Cuda().retried(0) is None
    said["num_alloc_retries"] = 3
    assert Cuda().retried(0) == 3 and Cpu().retried(0) is None


def test_a_gpu_s_memory_ends_at_its_allocators_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeFraction(monkeypatch)
    with Cuda().memory_limited(1, 2 * 10**9):
        assert fake.share == pytest.approx(0.3)
    assert fake.share == 0.9
    with pytest.raises(ZeroDivisionError), Cuda().memory_limited(1, 50 * 10**9):
        _ = 1 / (fake.share - 0.9)
    assert fake.set == [pytest.approx(0.3), 0.9, 0.9, 0.9]


@for_each("status", ["", "VmData:\n", "VmData: many kB\n", "VmPeak: 5 kB\n"])
def test_a_system_that_hides_memory_use_keeps_no_limit(
    status: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    (tmp_path / "status").write_text(status)
    monkeypatch.setattr(cpu_module, "Path", lambda path: tmp_path / "status")
    with pytest.raises(CannotLimit, match="has no line for this process"), Cpu().memory_limited(0, 10**9):
        pass
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
