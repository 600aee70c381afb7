"""Steps' allocator requests and system counters, compared with independent counts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from fp8bench.devices.cpu import Cpu
from fp8bench.measure.handle import CountingWorker, compile_allocator_probe, open_counting_worker
from fp8bench.model import UNATTRIBUTED, Case, Measurement, Request, specs
from fp8bench.model.raw import Settings
from fp8bench.model.readings import Reading, UnavailableReading, subtract_counters
from fp8bench.plan.make import make_plan
from fp8bench.protocols import Phases
from fp8bench.registry import workloads
from fp8bench.worker import host_counters as host
from fp8bench.worker import step_counters
from fp8bench.worker.bench import Bench
from tests.workloads.steps import CPU, SMALL, small

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the probe is Linux's")
# In a separate process: its calls are known exactly, through ctypes, which allocates nothing in between.
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
    probe = compile_allocator_probe(folder)
    assert isinstance(probe, Path), probe
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "LD_PRELOAD": str(probe)},
        capture_output=True,
        text=True,
        check=True,
    )
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
    assert "Linux" in str(compile_allocator_probe(tmp_path, "darwin"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert "install gcc" in str(compile_allocator_probe(tmp_path, "linux"))
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'x.c:1: error: no such header' >&2\nexit 1\n")
    broken.chmod(0o755)
    assert "error: no such header" in str(compile_allocator_probe(tmp_path, "linux"))


def figures(found: tuple[Measurement, ...], phase: str | None = None) -> Mapping[str, tuple[float, ...]]:
    return {one.metric: one.samples for one in found if one.phase == phase}


@pytest.mark.slow
@LINUX
def test_a_real_worker_counts_a_casts_bytes() -> None:
    """A step allocates its result: as many bytes as torch's profiler reports, and a few more for wrapper objects."""
    case = Case("cast", tuple({**SMALL["cast"], "rows": 512, "columns": 1024}.items()), "bf16", "cpu")
    with open_counting_worker(Settings()) as worker:
        assert isinstance(worker, CountingWorker) and worker.pid is None and not worker.why  # until it is read
        found, whys = worker.with_time_limit(120).counters(case, CPU, worker.why)
    whole = figures(found)
    cast = figures(found, "cast")
    image = 512 * 1024 * 2
    assert all(image <= size < image + 4096 for size in cast[specs.ALLOCATED_BYTES])
    assert len(set(whole[specs.ALLOCATOR_CALLS][1:])) == 1 and 0 < min(whole[specs.ALLOCATOR_TIME]) < 0.1
    for name in map(str, (specs.ALLOCATED_BYTES, specs.ALLOCATOR_CALLS, specs.PAGE_FAULTS)):
        parts = zip(cast[name], figures(found, UNATTRIBUTED)[name], strict=True)
        assert whole[name] == tuple(map(sum, parts))
    assert not whys


def test_readings_go_to_the_phase_that_a_step_was_in() -> None:
    count = 0

    def read() -> tuple[float]:
        nonlocal count
        count += 1000  # an expensive reading
        return (float(count),)

    def step(phases: Phases) -> None:
        nonlocal count
        count += 1
        with phases.gemm:
            count += 10
            with phases.cast:
                count += 100
            count += 20

    readings = step_counters.PhaseCounterReadings(read)
    readings.run(step)
    readings.run(step)
    found = readings.measurements([specs.ALLOCATOR_CALLS])
    taken = {one.phase: one.samples[0] % 1000 for one in found}
    assert taken == {None: 131 % 1000, UNATTRIBUTED: 1, "gemm": 30, "cast": 100} and len(found[0].samples) == 2


class CountingDevice(Cpu):
    """A GPU's allocator, as torch reports it, that goes to its driver in each third step."""

    def __init__(self) -> None:
        self.steps = 0

    def synchronise(self, index: int) -> None:
        self.steps += 1

    def allocations(self, index: int) -> Mapping[str, int]:
        return {"num_device_alloc": self.steps // 3, "num_alloc_retries": self.steps // 6, "other": 7}


def test_a_devices_allocations_are_those_of_steps() -> None:
    found, _ = step_counters.count_step_allocations(workloads.get("cast"), small("cast", "bf16"), CountingDevice(), 0)
    whole = figures(found)
    assert sum(whole[specs.DEVICE_ALLOCATIONS]) in (2, 3) and set(whole[specs.DEVICE_ALLOCATIONS]) == {0.0, 1.0}
    assert sum(whole[specs.ALLOCATION_RETRIES]) in (1, 2) and whole[specs.DEVICE_ALLOCATOR_TIME] == (0.0,)


STATUS = "Name:\tpython\nVmHWM:\t    2000 kB\nVmRSS:\t    1000 kB\n"


def fake(folder: Path, status: str = STATUS, stat: str = "cpu  1 2 3 4 5 6 7 250 9 10\ncpu0 1\n") -> Path:
    (folder / "self").mkdir(parents=True)
    (folder / "self" / "status").write_text(status)
    (folder / "stat").write_text(stat)
    return folder


def test_steal(tmp_path: Path) -> None:
    assert host.read_counters(fake(tmp_path / "a"))["steal"] == Reading(2.5, "s", f"{tmp_path}/a/stat")
    steal = host.read_counters(fake(tmp_path / "b", stat="cpu  1 2 3 4 5 6 7 0 9 10\n"))["steal"]
    assert isinstance(steal, Reading) and steal.value == 0
    assert host.read_counters(fake(tmp_path / "c", stat="cpu 1 2\n"))["steal"] == UnavailableReading(
        f"{tmp_path}/c/stat does not report stolen time"
    )


def test_waiting_for_a_core_is_no_sleep(tmp_path: Path) -> None:
    proc = fake(tmp_path)
    (proc / "thread-self").mkdir()
    (proc / "thread-self" / "schedstat").write_text("900 2500000000 3\n")
    assert host.read_counters(proc)["waited"] == Reading(2.5, "s", f"{proc}/thread-self/schedstat")
    (proc / "thread-self" / "schedstat").write_text("0 0\n")
    assert isinstance(host.read_counters(proc)["waited"], UnavailableReading)
    begun = time.monotonic()
    before = host.read_counters()
    time.sleep(0.2)
    spent = subtract_counters(before, host.read_counters())
    awake = time.monotonic() - begun - 0.19
    waited = spent["waited"]
    preemptions = spent["preemptions"]
    assert isinstance(waited, UnavailableReading) or waited.number < awake
    assert isinstance(preemptions, Reading) and preemptions.number >= 0


def test_a_mark_that_stays_where_it_was_says_so(tmp_path: Path) -> None:
    """Whether the kernel accepts the request without effect, or rejects it."""
    proc = fake(tmp_path / "a")
    stayed = host.reset_peak_resident_memory(proc)
    assert isinstance(stayed, UnavailableReading) and "the peak stayed at 2048000 B" in stayed.reason
    assert (proc / "self" / "clear_refs").read_text() == "5"
    proc = fake(tmp_path / "b")
    (proc / "self" / "clear_refs").mkdir()
    refused = host.reset_peak_resident_memory(proc)
    assert isinstance(refused, UnavailableReading) and "cannot be written" in refused.reason


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


def test_calls_of_the_allocator_are_allocations_and_releases() -> None:
    def read(numbers: Any) -> None:
        numbers[:] = [7, 3, 4096, 2000]

    library = Mock(fp8bench_probe_cost=Mock(return_value=0), fp8bench_probe_read=read)
    assert step_counters.AllocatorProbe(library).read() == (10.0, 4096.0, pytest.approx(2e-6))
