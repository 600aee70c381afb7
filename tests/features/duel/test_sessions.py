"""One case on both sides, with workers that measure nothing: who is measured, what a fault costs, and whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from fp8bench.errors import WorkerFault, WorkerHung, WorkerLost
from fp8bench.features.duel.run import CaseProgress, CaseRunner, begin_case
from fp8bench.features.duel.turns import PartnerWorker, SideWorkers, Start
from fp8bench.measure.limits import USUAL
from fp8bench.measure.quantisers import Quantisers
from fp8bench.model import Case, Status
from fp8bench.model.stopping import StoppingRule
from fp8bench.protocols import SilentObserver
from tests.fakes import CPU, MS, FakeWorker, Fault, Script, broken, gemm_steps, planned

RULE = StoppingRule(fixed=6)


class Noting(SilentObserver):
    """Remembers what was done."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def working(self, case: Case, doing: str, share: float) -> None:
        self.done.append(doing)


def side_workers(name: str, workers: Sequence[FakeWorker], skip: str = "", version: str | None = "1") -> SideWorkers:
    """A side with one case."""
    case = planned("bf16", skip=skip)
    versions = {} if version is None else {case.case.workload: version}
    real = cast("Sequence[PartnerWorker]", workers)
    return SideWorkers(Start(name, "python", ()), real, Quantisers(), (CPU,), {case.case.id: case}, versions)


def sides(before: Script, after: Script, **options: Any) -> tuple[SideWorkers, SideWorkers]:
    """Two workers a side, all with one script each."""
    return (
        side_workers("A", [FakeWorker({"bf16": before}) for _ in range(2)]),
        side_workers("B", [FakeWorker({"bf16": after}) for _ in range(2)], **options),
    )


def measured(
    pair: tuple[SideWorkers, SideWorkers], sessions: int = 1, observer: SilentObserver | None = None
) -> CaseProgress:
    """The case after so many sessions."""
    one = begin_case(next(iter(pair[0].cases)), pair)
    runner = CaseRunner(pair, 0, observer or SilentObserver(), USUAL)
    for number in range(sessions):
        if one.alive:
            runner.measure(one, number, RULE)
        if one.alive and number == 0:
            runner.check_values(one)
    return one


def fakes(pair: tuple[SideWorkers, SideWorkers]) -> list[FakeWorker]:
    """All workers, those of side A first."""
    return [cast(FakeWorker, worker) for one in pair for worker in one.workers]


def test_every_process_is_in_every_round() -> None:
    """As often, with as many calls, behind one or two that are not timed; and the states are given back."""
    pair = sides(Script(gemm_steps(MS), errors={"output_error": 0.5}), Script(gemm_steps(2 * MS), peak=77))
    one = measured(pair, sessions=2)
    assert [len(session.before) + len(session.after) for session in one.sessions] == [4, 4]
    for worker in fakes(pair):
        slots = worker.slots()[2:8]  # after two that find out how long a step is
        assert {slot[:3] for slot in slots} == {("slot", "bf16", 4)} and {slot[3] for slot in slots} <= {1, 2}
        assert worker.held == []
    timings = [timing for session in one.sessions for timing in (*session.before, *session.after)]
    assert {timing.num_rounds for timing in timings} == {6} and {timing.num_calls for timing in timings} == {24}
    result = one.result
    assert result.measured and not result.failed and result.before.is_reference and not result.after.is_reference
    assert result.before.measurement("output_error") is not None and result.after.measurement("peak_memory") is not None


def test_no_side_is_always_the_first() -> None:
    """The order in which they are prepared is drawn, another in each session."""
    observer = Noting()
    measured(sides(Script(), Script()), sessions=12, observer=observer)
    prepared = [doing for doing in observer.done if doing.startswith("preparing")]
    firsts = {prepared[place] for place in range(0, len(prepared), 4)}
    assert firsts == {"preparing side A of", "preparing side B of"} and len(prepared) == 48


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (WorkerFault("ValueError", "no such thing", "the trace"), "ValueError: no such thing"),
        (WorkerLost("the worker crashed"), "the worker crashed"),
        (WorkerHung("no answer"), "no answer"),
    ],
)
@pytest.mark.parametrize("request_name", ["prepare", "slot"])
def test_a_fault_fails_the_case_on_its_side(error: Exception, why: str, request_name: str) -> None:
    """Its worker starts afresh, the others keep theirs, and no state stays behind."""
    pair = sides(Script(), Script(faults=[Fault(request_name, error)]))
    one = measured(pair, sessions=3)
    assert not one.alive and one.sessions == [] and one.result.failed
    assert (one.result.before.status, one.result.after.status) == (Status.OK, Status.FAILED)
    assert one.result.after.reason == why
    assert sum(worker.restarts for worker in fakes(pair)[2:]) == 1
    assert not any(worker.restarts or worker.held for worker in fakes(pair)[:2])


def test_what_was_measured_before_a_fault_is_kept() -> None:
    """It strikes in the second session, after eight slots of the first."""
    one = measured(sides(broken("slot", at=10), Script()), sessions=3)
    assert len(one.sessions) == 1 and one.result.before.status is Status.FAILED and not one.result.measured
    assert one.result.after.status is Status.OK


def test_memory_for_one_process_a_side() -> None:
    """A second one does not fit in on side B: later sessions do not try again."""
    pair = sides(Script(), Script())
    fakes(pair)[3].capacity = 0
    one = measured(pair, sessions=3)
    assert [(len(session.before), len(session.after)) for session in one.sessions] == [(1, 1)] * 3
    assert one.processes == 1 and sum(entry[0] == "prepare" for entry in fakes(pair)[3].log) <= 1
    assert one.alive and not any(worker.held or worker.restarts for worker in fakes(pair))


def test_memory_for_none() -> None:
    """The case fails where it found no room, and its worker lives on."""
    pair = sides(Script(memory=2000), Script())
    one = measured(pair)
    assert one.result.before.reason == "out of memory beside the other side" and one.result.after.status is Status.OK
    assert not any(worker.restarts for worker in fakes(pair))


def test_a_compiler_that_ends_a_worker_costs_no_case() -> None:
    """That side goes on without compiling, the other one does not."""
    bad = Script(quantisers=[2], faults=[Fault("compile", WorkerLost("the compiler crashed"))])
    pair = sides(Script(quantisers=[2]), bad)
    one = measured(pair)
    assert one.alive and len(one.sessions) == 1
    assert "compiling failed: the compiler crashed" in pair[1].quantisers.why_eager
    assert not pair[0].quantisers.why_eager
    assert [timing.eager != "" for timing in (*one.sessions[0].before, *one.sessions[0].after)] == [False] * 2 + [
        True
    ] * 2


def test_threads_left_behind_fail_a_case() -> None:
    """They would run beside everything that comes after."""
    one = measured(sides(Script(), Script(threads_left=("loader",))))
    assert "1 started while preparing still run" in one.result.after.reason and "loader" in one.result.after.reason


def test_a_state_that_its_steps_have_spoilt_fails() -> None:
    """Numbers that are not finite may take another time."""
    one = measured(sides(Script(wrong="weights are nan"), Script()))
    assert "weights are nan" in one.result.before.reason


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"skip": "too large"}, "side B: too large"),
        ({"version": "2"}, "suite gemm has version 1 on side A and 2 on side B: what a step does has changed"),
        ({"version": None}, "side B has no suite 'gemm'"),
    ],
)
def test_what_does_not_compare_is_left_out_with_the_reason(options: dict[str, Any], why: str) -> None:
    """Nobody is asked for anything."""
    pair = sides(Script(), Script(), **options)
    one = measured(pair)
    assert one.left_out.startswith(why) and not one.alive
    assert (one.result.before.status, one.result.after.status) == (Status.SKIPPED, Status.SKIPPED)
    assert not any(worker.log for worker in fakes(pair))
