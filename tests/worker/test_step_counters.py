"""What steps ask of allocators, and what the system counts, against independent counts."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from fp8bench.devices.cpu import Cpu
from fp8bench.errors import UsageError
from fp8bench.measure.handle import CountingWorker, built, counting_worker
from fp8bench.model import UNATTRIBUTED, Case, Measurement, Request, specs
from fp8bench.model.raw import Settings
from fp8bench.model.readings import Reading, Unavailable, grown
from fp8bench.plan.make import make_plan
from fp8bench.protocols import Phases
from fp8bench.registry import workloads
from fp8bench.worker import host_counters as host
from fp8bench.worker import step_counters
from fp8bench.worker.bench import Bench
from tests.counts import for_each
from tests.workloads.steps import CPU, SMALL, small

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the probe is Linux's")
# In a process of its own: what it does is known call by call, through ctypes, which allocates nothing meanwhile.
BY_HAND = """
import ctypes
own = ctypes.CDLL(None)
own.malloc.restype = own.calloc.restype = own.realloc.restype = own.aligned_alloc.restype = ctypes.c_void_p
numbers, held = (ctypes.c_uint64 * 4)(), ctypes.c_void_p()
calls = [
    lambda: own.free(ctypes.c_void_p(own.malloc(1000))),
    lambda: own.free(ctypes.c_void_p(own.calloc(30, 40))),
    lambda: own.free(ctypes.c_void_p(own.realloc(None, 77))),
    lambda: own.free(ctypes.c_void_p(own.aligned_alloc(64, 128))),
    lambda: (own.posix_memalign(ctypes.byref(held), 64, 3 << 20), own.free(held)),
    lambda: own.free(None),
]
for call in calls:
    call()
for call in calls:
    before = [*numbers]
    own.fp8bench_probe_switch(1)
    call()
    own.fp8bench_probe_switch(0)
    own.fp8bench_probe_read(numbers)
    print(*(after - then for after, then in zip(numbers, before)))
"""


def under_probe(folder: Path, code: str) -> list[list[int]]:
    probe = built(folder)
    assert isinstance(probe, Path), probe
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "LD_PRELOAD": str(probe)}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return [[int(word) for word in line.split()] for line in done.stdout.splitlines()]


@LINUX
def test_the_probe_counts_every_call_and_its_bytes_while_it_is_on(tmp_path: Path) -> None:
    found = under_probe(tmp_path, BY_HAND)
    wanted = [1000, 1200, 77, 128, 3 << 20]
    assert [one[:3] for one in found] == [*([1, 1, size] for size in wanted), [0, 0, 0]]
    assert found[4][3] > 0  # the system is asked for 3 MiB; a few bytes may take less than a clock's tick
    code = "import ctypes; n = (ctypes.c_uint64 * 4)(); x = [bytes(10**6) for _ in range(99)]; "
    assert under_probe(tmp_path, code + "ctypes.CDLL(None).fp8bench_probe_read(n); print(*n)") == [[0, 0, 0, 0]]


def test_why_there_is_no_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Linux" in str(built(tmp_path, "darwin"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert "install gcc" in str(built(tmp_path, "linux"))
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'x.c:1: error: no such header' >&2\nexit 1\n")
    broken.chmod(0o755)
    assert "error: no such header" in str(built(tmp_path, "linux"))


def figures(found: tuple[Measurement, ...], phase: str | None = None) -> Mapping[str, tuple[float, ...]]:
    return {one.metric: one.samples for one in found if one.phase == phase}


@pytest.mark.slow
@LINUX
def test_a_real_worker_counts_a_casts_bytes() -> None:
    """A step allocates its result: as many bytes as torch's profiler reports, and a few more for the objects around
    it."""
    case = Case("cast", tuple({**SMALL["cast"], "rows": 512, "columns": 1024}.items()), "bf16", "cpu")
    with counting_worker(Settings()) as worker:
        assert isinstance(worker, CountingWorker) and worker.pid is None and not worker.why  # until it is asked
        found, whys = worker.within(120).counters(case, CPU, worker.why)
    whole, cast = figures(found), figures(found, "cast")
    image = 512 * 1024 * 2
    assert all(image <= size < image + 4096 for size in cast[specs.ALLOCATED_BYTES])
    assert len(set(whole[specs.ALLOCATOR_CALLS][1:])) == 1 and 0 < min(whole[specs.ALLOCATOR_TIME]) < 0.1
    for name in map(str, (specs.ALLOCATED_BYTES, specs.ALLOCATOR_CALLS, specs.PAGE_FAULTS)):
        parts = zip(cast[name], figures(found, UNATTRIBUTED)[name], strict=True)
        assert whole[name] == tuple(map(sum, parts))
    assert not whys


@LINUX
def test_without_a_probe_faults_are_counted_and_there_is_a_reason() -> None:
    found, whys = step_counters.counters_of_step(workloads.get("cast"), small("cast", "bf16"), Cpu(), 0, "no compiler")
    assert specs.PAGE_FAULTS in figures(found) and specs.ALLOCATOR_TIME not in figures(found)
    assert "no calls of the allocator: no compiler" in whys


def test_readings_go_to_the_phase_that_a_step_was_in() -> None:
    count = 0

    def read() -> tuple[float]:
        nonlocal count
        count += 1000  # a dear reading
        return (float(count),)

    def step(phases: Phases) -> None:
        nonlocal count
        count += 1
        with phases.gemm:
            count += 10
            with phases.cast:
                count += 100
            count += 20

    readings = step_counters.PhaseReadings(read)
    readings.run(step)
    readings.run(step)
    found = readings.measurements([specs.ALLOCATOR_CALLS])
    taken = {one.phase: one.samples[0] % 1000 for one in found}
    assert taken == {None: 131 % 1000, UNATTRIBUTED: 1, "gemm": 30, "cast": 100} and len(found[0].samples) == 2


def test_time_of_a_drivers_allocations_in_a_trace() -> None:
    events = [
        {"cat": "cuda_runtime", "name": "cudaMalloc", "dur": 300},
        {"cat": "cuda_driver", "name": "cuMemMap", "dur": 5e1},
        {"cat": "cuda_runtime", "name": "cudaFree", "dur": 150.5}, {"cat": "kernel", "name": "cudaMalloc", "dur": 9},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": 7}, {"cat": "cuda_runtime", "name": "hipFree"},
    ]  # fmt: skip
    assert step_counters.device_call_seconds(events) == pytest.approx(500.5e-6)


class CountingDevice(Cpu):
    """A GPU's allocator, as torch reports it, that goes to its driver in each third step."""

    def __init__(self) -> None:
        self.steps = 0

    def synchronise(self, index: int) -> None:
        self.steps += 1

    def allocations(self, index: int) -> Mapping[str, int]:
        return {"num_device_alloc": self.steps // 3, "num_alloc_retries": self.steps // 6, "other": 7}


def test_a_devices_allocations_are_those_of_steps() -> None:
    found, _ = step_counters.counters_of_step(workloads.get("cast"), small("cast", "bf16"), CountingDevice(), 0)
    whole = figures(found)
    assert sum(whole[specs.DEVICE_ALLOCATIONS]) in (2, 3) and set(whole[specs.DEVICE_ALLOCATIONS]) == {0.0, 1.0}
    assert sum(whole[specs.ALLOCATION_RETRIES]) in (1, 2) and whole[specs.DEVICE_ALLOCATOR_TIME] == (0.0,)


@for_each("given", [{"isolation": False}, {"ranks": 2}])
def test_counters_that_have_no_worker_of_their_own_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"--counters.*(--no-isolation|--ranks)"):
        Request("gemm", counters=True, **given)  # type: ignore[arg-type]


MEBIBYTE = 2**20
STATUS = "Name:\tpython\nVmHWM:\t    2000 kB\nVmRSS:\t    1000 kB\n"


def fake(folder: Path, status: str = STATUS, stat: str = "cpu  1 2 3 4 5 6 7 250 9 10\ncpu0 1\n") -> Path:
    (folder / "self").mkdir(parents=True)
    (folder / "self" / "status").write_text(status)
    (folder / "stat").write_text(stat)
    return folder


def test_steal(tmp_path: Path) -> None:
    assert host.counters(fake(tmp_path / "a"))["steal"] == Reading(2.5, "s", f"{tmp_path}/a/stat")
    steal = host.counters(fake(tmp_path / "b", stat="cpu  1 2 3 4 5 6 7 0 9 10\n"))["steal"]
    assert isinstance(steal, Reading) and steal.value == 0
    assert host.counters(fake(tmp_path / "c", stat="cpu 1 2\n"))["steal"] == Unavailable(
        f"{tmp_path}/c/stat does not report stolen time"
    )


def test_waiting_for_a_core_is_no_sleep(tmp_path: Path) -> None:
    proc = fake(tmp_path)
    (proc / "thread-self").mkdir()
    (proc / "thread-self" / "schedstat").write_text("900 2500000000 3\n")
    assert host.counters(proc)["waited"] == Reading(2.5, "s", f"{proc}/thread-self/schedstat")
    (proc / "thread-self" / "schedstat").write_text("0 0\n")
    assert isinstance(host.counters(proc)["waited"], Unavailable)
    begun, before = time.monotonic(), host.counters()
    time.sleep(0.2)
    spent = grown(before, host.counters())
    awake = time.monotonic() - begun - 0.19
    waited, preemptions = spent["waited"], spent["preemptions"]
    assert isinstance(waited, Unavailable) or waited.number < awake
    assert isinstance(preemptions, Reading) and preemptions.number >= 0


def test_without_proc_there_are_reasons(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    for read in (*host.memory(absent).values(), host.reset_high_water(absent), host.counters(absent)["steal"]):
        assert isinstance(read, Unavailable) and "cannot be read: No such file" in read.reason
    assert isinstance(host.counters(absent)["preemptions"], Reading)


def test_memory_in_bytes(tmp_path: Path) -> None:
    read = host.memory(fake(tmp_path / "a"))
    assert [reading.value for reading in read.values() if isinstance(reading, Reading)] == [1000 * 1024, 2000 * 1024]
    odd = host.memory(fake(tmp_path / "b", status="VmRSS:\t many kB\n"))
    assert odd["rss"] == Unavailable(f"{tmp_path}/b/self/status has no VmRSS")


def test_the_high_water_mark_is_reset_and_rises_again() -> None:
    if isinstance(why := host.reset_high_water(), Unavailable):
        pytest.skip(why.reason)
    with mmap.mmap(-1, 64 * MEBIBYTE) as block:
        block[:] = b"x" * len(block)
        high = host.memory()["rss_high_water"]
        assert isinstance(high, Reading)
    low = host.reset_high_water()
    assert isinstance(low, Reading)
    assert high.number - low.number > 48 * MEBIBYTE


def test_a_mark_that_stays_where_it_was_says_so(tmp_path: Path) -> None:
    """If the kernel takes the request and does nothing, or does not take it."""
    proc = fake(tmp_path / "a")
    stayed = host.reset_high_water(proc)
    assert isinstance(stayed, Unavailable) and "the mark stayed at 2048000 B" in stayed.reason
    assert (proc / "self" / "clear_refs").read_text() == "5"
    proc = fake(tmp_path / "b")
    (proc / "self" / "clear_refs").mkdir()
    refused = host.reset_high_water(proc)
    assert isinstance(refused, Unavailable) and "cannot be written" in refused.reason


def test_a_slot_counts_what_its_device_had_to_try_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    (first, *_) = make_plan(Request("gemm", ("fp32",), ("cpu",), axes=(("shape", ("8",)),)), (CPU,)).groups
    bench.prepare("one", first.cases[0].case, CPU)
    try:
        assert bench.slot("one", 1, 1).memory_retries is None
        counts = iter((5, 7, 7, 7))
        monkeypatch.setattr(Cpu, "retried", lambda device, index: next(counts))
        assert [bench.slot("one", 1, 1).memory_retries for _ in range(2)] == [2, 0]
    finally:
        bench.release("one")
