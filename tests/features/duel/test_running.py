"""Duels with workers that measure nothing: who is measured, what a fault costs; what is kept, and what damage costs."""

from __future__ import annotations

import functools
import json
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import pytest

from fp8bench.cli.main import main
from fp8bench.cli.outputs import tell
from fp8bench.cli.progress import TERMINAL_JOB_OBSERVER
from fp8bench.errors import Fp8benchError, StoreError, UsageError, WorkerFault, WorkerHung, WorkerLost
from fp8bench.features.duel import run as duel_commands
from fp8bench.features.duel.command import choose_exit_code
from fp8bench.features.duel.kind import DuelKind, DuelWriter, start_duel
from fp8bench.features.duel.partners import DuelSideWorkers, HandshakeWorker, WorkerStart
from fp8bench.features.duel.run import DuelCaseProgress, DuelCaseRunner, make_case_progress
from fp8bench.features.duel.sides import DuelQuestion
from fp8bench.features.duel.values import Duel, DuelCutOff
from fp8bench.measure.arm import QuantiserCompilation
from fp8bench.measure.limits import DEFAULT_TIME_LIMITS
from fp8bench.model import PlannedCase, Request, Status
from fp8bench.model.stopping import StoppingRule
from fp8bench.protocols import SilentObserver
from tests.counts import for_each
from tests.duels import SESSION, header, result
from tests.fakes import CPU, MS, FakeWorker, Fault, Listener, Script, broken, gemm_steps, planned
from tests.older import as_older

RULE = StoppingRule(fixed=6)


def side_workers(
    name: str, workers: Sequence[FakeWorker], skip: str = "", version: str | None = "1"
) -> DuelSideWorkers:
    case = planned("bf16", skip=skip)
    versions = {} if version is None else {case.case.workload: version}
    real = cast("Sequence[HandshakeWorker]", workers)
    return DuelSideWorkers(
        WorkerStart(name, "python", ()), real, QuantiserCompilation(), (CPU,), {case.case.id: case}, versions
    )


def sides(before: Script, after: Script, **options: Any) -> duel_commands.SideWorkersPair:
    return (
        side_workers("A", [FakeWorker({"bf16": before}) for _ in range(2)]),
        side_workers("B", [FakeWorker({"bf16": after}) for _ in range(2)], **options),
    )


def measured(
    pair: duel_commands.SideWorkersPair, sessions: int = 1, observer: SilentObserver | None = None
) -> DuelCaseProgress:
    progress = make_case_progress(next(iter(pair[0].cases)), pair)
    runner = DuelCaseRunner(pair, 0, observer or SilentObserver(), DEFAULT_TIME_LIMITS)
    for number in range(sessions):
        if progress.is_active:
            runner.measure(progress, number, RULE)
        if progress.is_active and number == 0:
            runner.measure_errors_and_memory(progress)
    return progress


def fakes(pair: duel_commands.SideWorkersPair) -> list[Any]:
    return list(chain.from_iterable(side.workers for side in pair))


def test_every_process_is_in_every_round() -> None:
    pair = sides(Script(gemm_steps(MS), errors={"output_error": 0.5}), Script(gemm_steps(2 * MS), peak=77))
    progress = measured(pair, sessions=2)
    assert [len(session.before) + len(session.after) for session in progress.sessions] == [4, 4]
    for worker in fakes(pair):
        slots = worker.slots()[2:8]  # after two slots that measure how long a step is
        assert {slot[:3] for slot in slots} == {("slot", "bf16", 4)} and {slot[3] for slot in slots} <= {1, 2}
        assert worker.held == []
    timings = list(chain.from_iterable((*session.before, *session.after) for session in progress.sessions))
    assert {timing.num_rounds for timing in timings} == {6} and {timing.num_calls for timing in timings} == {24}
    result = progress.result
    assert result.is_measured and not result.has_failed and result.before.is_reference and not result.after.is_reference
    assert result.before.measurement("output_error") is not None and result.after.measurement("peak_memory") is not None


def test_no_side_is_always_the_first() -> None:
    observer = Listener()
    measured(sides(Script(), Script()), sessions=12, observer=observer)
    prepared = [doing for _, doing, _ in observer.told if doing.startswith("preparing")]
    firsts = {prepared[place] for place in range(0, len(prepared), 4)}
    assert firsts == {"preparing side A of", "preparing side B of"} and len(prepared) == 48


@for_each(
    ("error", "why"),
    [
        (WorkerFault("ValueError", "no such thing", "the trace"), "ValueError: no such thing"),
        (WorkerLost("the worker crashed"), "the worker crashed"),
        (WorkerHung("no answer"), "no answer"),
    ],
)
@for_each("request_name", ["prepare", "slot"])
def test_a_fault_fails_the_case_on_its_side(error: Exception, why: str, request_name: str) -> None:
    pair = sides(Script(), Script(faults=[Fault(request_name, error)]))
    progress = measured(pair, sessions=3)
    assert not progress.is_active and progress.sessions == [] and progress.result.has_failed
    assert (progress.result.before.status, progress.result.after.status) == (Status.OK, Status.FAILED)
    assert progress.result.after.reason == why
    assert sum(worker.restarts for worker in fakes(pair)[2:]) == 1
    assert not any(worker.restarts or worker.held for worker in fakes(pair)[:2])


@for_each(
    ("bad", "why", "restarts"),
    [
        (Script(memory=2000), "out of memory next to the other side", 0),
        (Script(threads_left=("loader",)), "1 threads or processes that its preparation started still run", 1),
        (Script(wrong="weights are nan"), "weights are nan", 1),
        (broken("slot", at=10), "", 1),  # in the second session, after eight slots of the stored first session
    ],
)
def test_a_fault_of_one_side_fails_that_side(bad: Script, why: str, restarts: int) -> None:
    pair = sides(bad, Script())
    progress = measured(pair, sessions=3)
    result = progress.result
    assert (result.before.status, result.after.status) == (Status.FAILED, Status.OK) and not result.is_measured
    assert why in result.before.reason and len(progress.sessions) == (not why)
    assert sum(worker.restarts for worker in fakes(pair)) == restarts


def test_a_side_without_memory_for_two_processes_keeps_one() -> None:
    """A second process does not fit on side B, so later sessions do not try again."""
    pair = sides(Script(), Script())
    fakes(pair)[3].capacity = 0
    progress = measured(pair, sessions=3)
    assert [(len(session.before), len(session.after)) for session in progress.sessions] == [(1, 1)] * 3
    assert progress.processes == 1 and sum(entry[0] == "prepare" for entry in fakes(pair)[3].log) <= 1
    assert progress.is_active and not any(worker.held or worker.restarts for worker in fakes(pair))


def test_a_compiler_that_ends_a_worker_costs_no_case() -> None:
    bad = Script(quantisers=[2], faults=[Fault("compile", WorkerLost("the compiler crashed"))])
    pair = sides(Script(quantisers=[2]), bad)
    progress = measured(pair)
    (session,) = progress.sessions
    assert progress.is_active and "the compiler crashed" in pair[1].quantisers.why_eager
    assert not pair[0].quantisers.why_eager
    assert [timing.eager != "" for timing in session.before] == [False, False]
    assert [timing.eager != "" for timing in session.after] == [True, True]


@for_each(
    ("options", "why"),
    [
        ({"skip": "too large"}, "side B: too large"),
        ({"version": "2"}, "suite gemm has version 1 on side A and 2"),
        ({"version": None}, "side B has no suite"),
    ],
)
def test_cases_that_do_not_compare_are_left_out(options: dict[str, Any], why: str) -> None:
    pair = sides(Script(), Script(), **options)
    progress = measured(pair)
    assert progress.left_out.startswith(why) and not progress.is_active
    assert (progress.result.before.status, progress.result.after.status) == (Status.SKIPPED, Status.SKIPPED)
    assert not any(worker.log for worker in fakes(pair)), "nobody is asked for anything"


class Startable(FakeWorker):
    """Can be started, and may fail to from some time on."""

    starts = 0
    last_start = 100
    modules: Mapping[str, tuple[str, ...]] = {}

    def start(self) -> None:
        self.starts += 1
        if self.starts > self.last_start:
            raise WorkerLost("side B (python): the worker crashed")
        self.alive = True

    def _modules_under(self, folder: str) -> tuple[str, ...]:
        return self.modules.get(folder, ())


def started(scripts: dict[str, Script]) -> duel_commands.SideWorkersPair:
    def side(name: str, step_ns: int) -> DuelSideWorkers:
        own = {mode: Script(gemm_steps(step_ns), faults=script.faults) for mode, script in scripts.items()}
        workers = cast("Sequence[HandshakeWorker]", [Startable(own), Startable(own)])
        cases: dict[str, PlannedCase] = {case.case.id: case for case in map(planned, scripts)}
        start = WorkerStart(name, "python", (), f"side {name}")
        return DuelSideWorkers(start, workers, QuantiserCompilation(), (CPU,), cases, {"gemm": "1"})

    return side("A", 10 * MS), side("B", 12 * MS)


def run_in(store: Path, pair: duel_commands.SideWorkersPair, sessions: int = 3) -> Duel:
    begun = header(request=Request("gemm", rounds=6), cases=tuple(pair[0].cases), sessions=sessions)
    return duel_commands._measure_sessions(pair, begun, ("a note",), store, TERMINAL_JOB_OBSERVER, 0.0)


@pytest.fixture
def run_duel(tmp_path: Path) -> Callable[..., Duel]:
    return functools.partial(run_in, tmp_path)


def test_a_side_cannot_have_several_ranks(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a side of a duel is one process, but --ranks asks for 2"):
        duel_commands.run_duel(DuelQuestion(), Request("collective", ranks=2), tmp_path, TERMINAL_JOB_OBSERVER)


def test_every_session_has_fresh_processes(run_duel: Callable[..., Duel]) -> None:
    pair = started({"fp32": Script(), "bf16": Script()})
    duel = run_duel(pair)
    assert duel.finished and duel.ok and duel.notes == ("a note",)
    assert [len(result.sessions) for result in duel.results] == [3, 3]
    assert all((worker.starts, worker.restarts) == (3, 2) for worker in fakes(pair))
    assert duel == DuelKind().load(Path(duel.path)) and choose_exit_code(duel) == 1


def test_a_case_that_fails_late_keeps_its_sessions_and_the_others_go_on(run_duel: Callable[..., Duel]) -> None:
    late = Script(faults=[Fault("slot", WorkerLost("gone"), at=9)])
    duel = run_duel(started({"fp32": Script(), "bf16": late}))
    assert [len(result.sessions) for result in duel.results] == [3, 1] and duel.results[1].has_failed
    assert duel.finished and choose_exit_code(duel) == 3


@for_each("line", range(2, 8))
def test_a_store_that_fails_costs_nobody_the_table(line: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write = DuelWriter._append_numbered_lines
    written = [0]

    def full(self: DuelWriter, values: Sequence[dict[str, object]]) -> None:
        written[0] += 1
        if written[0] == line:
            raise StoreError("the disk is full")
        write(self, values)

    monkeypatch.setattr(DuelWriter, "_append_numbered_lines", full)
    with pytest.raises(Fp8benchError, match="the disk is full") as raised:
        run_in(tmp_path, started({"fp32": Script(), "bf16": Script()}), 2)
    files = list((tmp_path / "duels").iterdir())
    if line == 2:  # the note, before anything was measured
        assert (type(raised.value), files) == (StoreError, [])
        return
    assert isinstance(raised.value, DuelCutOff) and raised.value.exit_code == 2
    cut_off = raised.value.duel
    assert cut_off.troubles == ("the disk is full",) and all(result.sessions for result in cut_off.results)
    (file,) = files
    assert len(DuelKind().load(file).results) == min(line - 3, 2) and not DuelKind().load(file).finished


def test_a_side_that_does_not_start_again_ends_it(
    monkeypatch: pytest.MonkeyPatch, run_duel: Callable[..., Duel], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pair = started({"fp32": Script()})
    fakes(pair)[3].last_start = 1
    monkeypatch.setattr(duel_commands, "run_duel", lambda *_: run_duel(pair))
    assert main(["duel", "suite", "gemm"]) == 3
    told = capsys.readouterr()
    assert "trouble: side B (python): the worker crashed" in told.out and "change" in told.out
    assert "side B (python): the worker crashed" in told.err
    (file,) = (tmp_path / "duels").iterdir()
    assert [len(result.sessions) for result in DuelKind().load(file).results] == [1]


def test_an_interrupt_keeps_what_was_finished(
    run_duel: Callable[..., Duel], capsys: pytest.CaptureFixture[str]
) -> None:
    struck = [Script(), Script(faults=[Fault("slot", KeyboardInterrupt(), at=9)])]  # type: ignore[arg-type]
    duel = run_duel(started(dict(zip(("fp32", "bf16"), struck, strict=True))))
    assert not duel.finished and choose_exit_code(duel) == 130
    assert [len(result.sessions) for result in duel.results] == [2, 1]
    assert "interrupted; finished sessions are stored in" in capsys.readouterr().err
    tell(Namespace(), *DuelKind().view(duel))
    assert "2 of 2 cases have fewer sessions than planned" in capsys.readouterr().out


def of_two_trees(
    before: Mapping[str, tuple[str, ...]], after: Mapping[str, tuple[str, ...]]
) -> duel_commands.SideWorkersPair:
    pair = started({"fp32": Script()})
    for place, worker in enumerate(fakes(pair)):
        worker.modules = before if place < 2 else after
    pair[0].start = replace(pair[0].start, working_tree=Path("/old"))
    pair[1].start = replace(pair[1].start, working_tree=Path("/new"), commit="abc")
    return pair


def test_a_side_with_code_of_the_other_tree_ends_it(run_duel: Callable[..., Duel], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"side A has loaded mylib, mylib.part from this tree instead of"):
        run_duel(of_two_trees({"/new": ("mylib", "mylib.part")}, {"/new": ("mylib",)}))
    assert not list((tmp_path / "duels").iterdir())


def test_code_of_its_own_tree_is_fine_even_if_that_lies_in_the_other(run_duel: Callable[..., Duel]) -> None:
    """For example if temporary folders are inside the repository."""
    found = run_duel(of_two_trees({"/old": ("mylib",), "/new": ("mylib",)}, {"/new": ("mylib",)}), 1)
    assert found.finished and found.notes == ("a note",)


def test_sides_that_have_loaded_nothing_of_the_repository_are_told(
    run_duel: Callable[..., Duel], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can differ between them; this is printed before measuring, and stored."""
    words = "neither side has loaded any code of this repository"
    said = []
    monkeypatch.setattr(duel_commands, "restart_workers", lambda *_: said.append(capsys.readouterr().err.count(words)))
    assert words in run_duel(of_two_trees({}, {}), 1).notes[1] and said == [1]


@for_each(
    ("request_", "share", "rule"),
    [
        (Request("gemm"), None, (10, None, 2.5)),
        (Request("gemm", quick=True), None, (24, 10, 6.0)),
        (Request("gemm", rounds=7), 3.0, (24, 7, 6.0)),
        (Request("gemm", budget=9.0), 3.0, (5, None, 3.0)),
    ],
)
def test_a_session_is_as_long_as_its_options_demand(
    request_: Request, share: float | None, rule: tuple[int, int | None, float]
) -> None:
    found = duel_commands._choose_stopping_rule(request_, share)
    assert (found.least, found.fixed, found.budget) == rule
    assert share is None or (found.ceiling == share and found.whole)


def written(store: Path) -> Path:
    """A duel with two sessions of one case, another case that failed after its first, and a note."""
    writer = start_duel(header(), store)
    writer.note("both sides are the same")
    writer.write_result(result("fp32", SESSION))
    writer.write_result(result("bf16", SESSION))
    writer.write_session(header().cases[0], SESSION)
    writer.write_result(result("bf16", SESSION, status=Status.FAILED))
    writer.finish("finished")
    writer.close()
    return writer.path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(tmp_path)


def test_a_written_duel_is_read_back(path: Path) -> None:
    duel = DuelKind().load(path)
    wanted = header(
        results=(result("fp32", SESSION, SESSION), result("bf16", SESSION, status=Status.FAILED)),
        notes=("both sides are the same",),
        finished=True,
        path=str(path),
    )
    assert duel == wanted and duel.after.devices == (CPU,)
    assert path.name == "20260102T030405.678Z-0a1b2c3d.jsonl" and path.parent.name == "duels"
    assert not duel.ok and [case.is_measured for case in duel.results] == [True, False]


@for_each(
    ("line", "trouble"),
    [
        *((line, "is broken") for line in ("{", "[]", "3", '{"result": {"before": 3}}', '{"note": 3}')),
        ('{"greeting": 1}', "of an unknown kind"),
        ('{"case": "nowhere", "session": {}}', "is broken"),
    ],
)
def test_a_broken_line_is_left_out_and_named(tmp_path: Path, line: str, trouble: str) -> None:
    path = written(tmp_path)
    lines = as_older(path).read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[2:]]) + "\n")
    duel = DuelKind().load(path)
    assert duel.finished and len(duel.results) == 2
    assert len(duel.troubles) == 1 and duel.troubles[0].startswith("line 3") and trouble in duel.troubles[0]


def test_samples_that_no_clock_gave_are_left_out(path: Path) -> None:
    lines = as_older(path).read_text().splitlines()
    negative = json.loads(lines[4])
    negative["session"]["after"][0]["slots"][0]["calls_ns"] = [[-1]]
    mixed = json.loads(lines[2])
    mixed["result"]["after"]["case"]["precision"] = "fp16"
    path.write_text("\n".join([*lines, json.dumps(negative), json.dumps(mixed)]) + "\n")
    duel = DuelKind().load(path)
    assert [trouble[:6] for trouble in duel.troubles] == ["line 8", "line 9"]
    assert len(duel.results) == 2 and len(duel.results[0].sessions) == 2
