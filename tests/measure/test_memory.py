"""The pass that measures memory, on real workloads: against a count by hand and a second way of counting."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from fp8bench.devices.cpu import Cpu
from fp8bench.errors import WorkerFault
from fp8bench.measure.handle import LocalWorker
from fp8bench.model import Case, MemoryUse, PlannedCase, Request
from fp8bench.model.raw import Settings
from fp8bench.plan.make import make_plan
from fp8bench.protocols import Phases, Setup, SilentPhases
from fp8bench.registry import precisions, workloads
from fp8bench.worker.bench import Bench
from tests.counts import for_each
from tests.worker.told import CPU, Storages, Tell, setup_of
from tests.worker.told import tell as tell

SMALL: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "gemm": (("shape", ("64x48x32",)),),
    "mlp": (("tokens", ("32",)), ("width", ("64",)), ("hidden", ("128",)), ("gated", ("yes",))),
    "norm_act": (("tokens", ("32",)), ("width", ("64",)), ("operation", ("residual",))),
    "accumulate": (("width", ("64",)), ("tensors", ("3",))),
    "optimizer": (("width", ("64",)), ("tensors", ("3",)), ("fused", ("no",))),
}


def peak(bench: Bench, case: Case) -> int:
    """The highest point, whose roles sum to it."""
    use = bench.memory(case, CPU)
    assert isinstance(use, MemoryUse) and sum(size for _, size in use.roles) == use.peak
    return use.peak


def planned(name: str, precision: str) -> PlannedCase:
    """The first case of a small setting, as the plan makes it."""
    return make_plan(Request(name, (precision,), ("cpu",), axes=SMALL[name]), (CPU,)).groups[0].cases[0]


def second_witness(case: Case) -> int:
    """The most bytes that storages hold at once within the second step of a fresh state."""
    workload = workloads.get(case.workload)
    with precisions.get(case.precision).scope(), Storages() as storages:
        state = workload.prepare(setup_of(case))
        workload.step(state, SilentPhases())
        gc.collect()
        storages.highest = sum(storages.held.values())
        workload.step(state, SilentPhases())
    return storages.highest


@for_each("name", ["gemm", "mlp", "norm_act", "accumulate"])
def test_it_agrees_with_a_second_way_of_counting_and_a_product_with_a_count_by_hand(name: str, bench: Bench) -> None:
    case = planned(name, "fp32").case
    assert peak(bench, case) == second_witness(case)
    assert name != "gemm" or peak(bench, case) == 4 * (64 * 32 + 48 * 32 + 64 * 48)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("name", SMALL)
def test_it_is_the_same_whenever_it_is_asked(name: str, precision: str, bench: Bench) -> None:
    one = planned(name, precision)
    if one.skip:
        pytest.skip(one.skip)
    peaks = [peak(bench, one.case) for _ in range(2)]
    bench.prepare("key", one.case, CPU)
    bench.slot("key", 2, 1)
    bench.release("key")
    peaks.append(peak(bench, one.case))
    assert len(set(peaks)) == 1
    assert peaks[0] >= one.work.least_memory > 0


def test_what_the_first_step_makes_and_keeps_counts_and_what_it_frees_does_not(bench: Bench, tell: Tell) -> None:

    def step(state: dict[str, Any], phase: Phases) -> None:
        if "made" not in state:
            torch.empty(1 << 20)
            state["made"] = torch.empty(100)
        torch.empty(7)

    assert peak(bench, tell(lambda _: {"weights": torch.empty(10)}, step)) == 4 * (10 + 100 + 7)


def test_garbage_does_not_count_and_a_state_that_refers_to_itself_is_given_back(bench: Bench, tell: Tell) -> None:
    """A cycle goes when it is collected, which is done by hand: chance has no say."""
    seen: list[weakref.ref[torch.Tensor]] = []

    def prepare(setup: Setup) -> list[Any]:
        state: list[Any] = [torch.empty(100)]
        state.append(state)
        seen.append(weakref.ref(state[0]))
        return state

    def step(state: list[Any], phase: Phases) -> None:
        cycle: list[Any] = [torch.empty(500)]
        cycle.append(cycle)

    case = tell(prepare, step)
    assert [peak(bench, case) for _ in range(3)] == [2400] * 3 and gc.isenabled()
    assert [state() for state in seen] == [None] * 3


def test_a_step_that_raises_leaves_no_profiler_running(tell: Tell) -> None:

    def step(state: list[int], phase: Phases) -> None:
        state.append(1)
        if len(state) == 2:
            raise MemoryError("planted")

    with LocalWorker(Settings()) as worker:
        case = tell(lambda _: [], step)
        for _ in range(2):
            with pytest.raises(WorkerFault, match="planted") as caught:
                worker.within(60.0).memory(case, CPU)
            assert caught.value.out_of_memory
            assert not torch.autograd._profiler_enabled() and gc.isenabled()
        use = worker.within(60.0).memory(tell(lambda _: torch.empty(5), lambda state, phase: None), CPU)
        assert isinstance(use, MemoryUse) and use.peak == 20


def test_a_device_that_cannot_say_says_nothing(bench: Bench, tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cpu, "memory_meter", lambda self, index: "it was never taught to count")
    assert bench.memory(tell(lambda _: 1 / 0, lambda state, phase: None), CPU) == "it was never taught to count"
