"""One attempt in a memory that ends, for real: counted by hand, a second way, and until the kernel gives no more."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8bench.devices.cpu import Cpu, read_data_bytes
from fp8bench.errors import WorkerFault
from fp8bench.measure.capacity import CapacityPass, CapacitySearchRule
from fp8bench.measure.handle import LocalWorker, ProcessWorker, Worker
from fp8bench.measure.limits import DEFAULT_TIME_LIMITS
from fp8bench.measure.passes import CaseOutcome
from fp8bench.model import Capacity, Case, PlannedCase, Request
from fp8bench.model.raw import Settings
from fp8bench.plan.make import make_plan, replace_batch_size
from fp8bench.protocols import Phases, Setup, SilentObserver
from fp8bench.worker.memory_pass import make_memory_pass_preparer, try_batch
from tests.own_suites import suite_file
from tests.worker.scripted import CPU, Scripted, setup_of

linux = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is kept by Linux alone")
MIB = 1 << 20
# A user's suite whose batch takes as many MiB; `how` selects what happens from 64 on.
SUITE = """
import os, signal, torch
from fp8bench.suites import Axis, Work, Workload, one_of, whole_number, workloads

@workloads.register("heap")
class Heap(Workload):
    name = "heap"
    summary = "takes memory"
    batch_axis = "mib"
    def axes(self, facts):
        kinds = ("takes", "killed")
        return (Axis("mib", "how much", ("4",), whole_number()), Axis("how", "it ends", ("takes",), one_of(*kinds)))
    def work(self, params):
        return Work()
    def prepare(self, setup):
        return dict(setup.case.params)
    def step(self, state, phase):
        if state["mib"] >= 64 and state["how"] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        torch.ones(state["mib"] << 18)
"""


@pytest.fixture(scope="module")
def heap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with suite_file(tmp_path_factory.mktemp("suites"), SUITE) as path:
        yield path


@pytest.fixture(scope="module")
def worker(heap: str) -> Iterator[ProcessWorker]:
    with ProcessWorker(Settings(imports=(heap,))) as process:
        yield process


@pytest.fixture
def local() -> Iterator[LocalWorker]:
    with LocalWorker(Settings()) as process:
        yield process


def planned(suite: str, dtype: str = "fp32", **axes: str) -> PlannedCase:
    request = Request(suite, (dtype,), ("cpu",), axes=tuple((name, (value,)) for name, value in axes.items()))
    return make_plan(request, (CPU,)).groups[0].cases[0]


def searched(worker: Worker, one: PlannedCase, limit: int) -> Capacity:
    outcome = CaseOutcome(one)
    CapacityPass(
        worker, {"cpu": CPU}, DEFAULT_TIME_LIMITS, SilentObserver(), CapacitySearchRule(limit, replace_batch_size)
    ).find_largest_batches([outcome])
    assert outcome.draft.capacity is not None
    return outcome.draft.capacity


@pytest.mark.slow
@linux
def test_memory_that_ends_is_survived_and_given_back(worker: ProcessWorker, heap: str) -> None:
    small, large = (planned("heap", mib=str(size)).case for size in (4, 3000))
    assert worker.with_time_limit(60).try_batch(small, CPU, 100 * MIB) == 4 * MIB
    process = worker.pid
    resident = resident_bytes(worker)
    for _ in range(5):
        with pytest.raises(WorkerFault, match="DefaultCPUAllocator: can't allocate memory") as caught:
            worker.with_time_limit(60).try_batch(large, CPU, 100 * MIB)
        assert caught.value.out_of_memory
        assert worker.with_time_limit(60).try_batch(small, CPU, 100 * MIB) == 4 * MIB
    assert worker.pid == process and resident_bytes(worker) < resident + 64 * MIB
    # Without a limit, none remains from an earlier case.
    assert worker.with_time_limit(60).try_batch(planned("heap", mib="600").case, CPU, None) == 600 * MIB


def resident_bytes(worker: ProcessWorker) -> int:
    lines = Path(f"/proc/{worker.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))


@linux
def test_a_worker_that_is_killed_is_no_end_of_the_search(worker: ProcessWorker, heap: str) -> None:
    found = searched(worker, planned("heap", how="killed"), 64 * MIB)
    assert (found.axis, found.batch, found.beyond, found.peak) == ("mib", 63, 64, 63 * MIB)
    assert "was ended by SIGKILL (the system does this when memory runs out)" in found.why


@linux
def test_the_kernel_s_limit_is_put_back(local: LocalWorker) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with Cpu().memory_limited(0, MIB):
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] < read_data_bytes() + 300 * MIB
        with pytest.raises(RuntimeError) as caught:
            torch.ones(1 << 28)
    assert Cpu().is_out_of_memory(caught.value)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    with pytest.raises(RuntimeError, match="can't allocate"), Cpu().memory_limited(0, MIB):
        torch.ones(1 << 28)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    torch.ones(1 << 26)


def setup() -> Setup:
    return setup_of(Case("scripted", (), "fp32", "cpu"))


@linux
def test_preparing_counts_and_both_steps_do() -> None:

    def rough(setup: Setup) -> dict[str, Any]:
        torch.empty(5000)
        return {"weights": torch.empty(10)}

    def first(state: dict[str, Any], phase: Phases) -> None:
        if "moments" not in state:
            state["moments"] = torch.empty(100)
            torch.empty(7000)
        torch.empty(6950)

    def peak(prepare: Callable[[Setup], Any], step: Callable[[Any, Phases], None]) -> int | None:
        return try_batch(make_memory_pass_preparer(Scripted(prepare, step), setup), Cpu(), 0, 1 << 30)

    assert peak(rough, lambda state, phase: None) == 4 * 5000
    assert peak(rough, first) == 4 * (10 + 100 + 7000)
    assert peak(lambda _: {"weights": torch.empty(10), "moments": torch.empty(50)}, first) == 4 * (60 + 6950)


def test_the_meter_is_stopped_and_garbage_collected_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[int] = []
    device = Cpu()
    meter = device.memory_meter(0)
    assert not isinstance(meter, str)
    inner = meter.stop
    monkeypatch.setattr(meter, "stop", lambda: stopped.append(1) or inner())
    monkeypatch.setattr(device, "memory_meter", lambda index: meter)

    def step(state: Any, phase: Phases) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        try_batch(make_memory_pass_preparer(Scripted(lambda _: {}, step), setup), device, 0, None)
    assert stopped == [1] and gc.isenabled()
    assert (
        try_batch(make_memory_pass_preparer(Scripted(lambda _: {}, lambda state, phase: None), setup), Cpu(), 0, None)
        == 0
    )


def test_scales_from_data_are_found_before_anything_counts(local: LocalWorker) -> None:
    request = Request("mlp", ("fp32", "fp8"), ("cpu",), axes=(("tokens", ("32",)), ("gated", ("no",))), static_scales=2)
    case = make_plan(request, (CPU,)).groups[0].cases[1].case
    assert case.static is not None
    plain = local.with_time_limit(60).try_batch(replace(case, static=None), CPU, None)
    taken = local.with_time_limit(60).try_batch(case, CPU, None)
    assert plain is not None and taken is not None and abs(taken - plain) < 0.2 * plain
