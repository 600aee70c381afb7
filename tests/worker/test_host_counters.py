"""What is counted of this process and its device, and files of our own in place of /proc."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

import pytest

from fp8bench.devices.cpu import Cpu
from fp8bench.model import Request
from fp8bench.model.readings import Reading, Unavailable, grown
from fp8bench.plan.make import make_plan
from fp8bench.worker import host_counters as host
from fp8bench.worker.bench import Bench
from tests.facts import CPU

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
    """Nanoseconds in the queue; and in truth, asleep is not in it, however long the queue is after it."""
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
    assert [one.value for one in read.values() if isinstance(one, Reading)] == [1000 * 1024, 2000 * 1024]
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
    """Where the kernel takes the request and does nothing, and where it does not take it."""
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
