"""A whole duel with workers that measure nothing: what is kept and told when it does not come to its end."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, cast

import pytest

from fp8bench.cli.outputs import show_view
from fp8bench.errors import StoreError, UsageError, WorkerLost
from fp8bench.features.duel import run as duel_commands
from fp8bench.features.duel.command import TERMINAL, DuelProgress, exit_code
from fp8bench.features.duel.kind import DuelKind, DuelWriter, load_duel
from fp8bench.features.duel.sides import Question
from fp8bench.features.duel.turns import PartnerWorker, SideWorkers, Start
from fp8bench.features.duel.values import Duel
from fp8bench.measure.quantisers import Quantisers
from fp8bench.model import PlannedCase, Request
from tests.duels import header
from tests.fakes import CPU, MS, FakeWorker, Fault, Script, gemm_steps, planned


class Startable(FakeWorker):
    """It can be started, and may fail to from some time on."""

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


def started(scripts: dict[str, Script]) -> duel_commands.Pair:
    """Two sides with a case for each script; B takes a fifth longer."""

    def side(name: str, step_ns: int) -> SideWorkers:
        own = {mode: Script(gemm_steps(step_ns), faults=script.faults) for mode, script in scripts.items()}
        workers = cast("Sequence[PartnerWorker]", [Startable(own), Startable(own)])
        cases: dict[str, PlannedCase] = {one.case.id: one for one in map(planned, scripts)}
        start = Start(name, "python", (), f"side {name}")
        return SideWorkers(start, workers, Quantisers(), (CPU,), cases, {"gemm": "1"})

    return side("A", 10 * MS), side("B", 12 * MS)


class RunDuel(Protocol):
    """Fights a duel in the test's own store."""

    def __call__(self, pair: duel_commands.Pair, sessions: int = 3) -> Duel: ...


@pytest.fixture
def run_duel(tmp_path: Path) -> RunDuel:
    def run(pair: duel_commands.Pair, sessions: int = 3) -> Duel:
        begun = header(request=Request("gemm", rounds=6), cases=tuple(pair[0].cases), sessions=sessions)
        progress = DuelProgress(None, {})
        return duel_commands._measured(pair, begun, ("a note",), tmp_path, TERMINAL, progress, 0.0)

    return run


def test_several_ranks_are_no_side(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a side of a duel is one process, and this would be 2 ranks on each"):
        duel_commands.run_duel(Question(), Request("collective", ranks=2), tmp_path, TERMINAL)


def workers_of(pair: duel_commands.Pair) -> list[Startable]:
    """Those of A first."""
    return [cast(Startable, worker) for side in pair for worker in side.workers]


def test_every_session_has_fresh_processes(run_duel: RunDuel) -> None:
    """All cases are measured in each; what is told is what was kept."""
    one = started({"fp32": Script(), "bf16": Script()})
    found = run_duel(one)
    assert found.finished and found.ok and found.notes == ("a note",)
    assert [len(result.sessions) for result in found.results] == [3, 3]
    assert all((worker.starts, worker.restarts) == (3, 2) for worker in workers_of(one))
    assert found == load_duel(Path(found.path)) and exit_code(found) == 1


def test_a_case_that_fails_late_keeps_its_sessions_and_the_others_go_on(run_duel: RunDuel) -> None:
    """It strikes both sides' first workers in their second session, whichever comes first."""
    late = Script(faults=[Fault("slot", WorkerLost("gone"), at=9)])
    found = run_duel(started({"fp32": Script(), "bf16": late}))
    assert [len(result.sessions) for result in found.results] == [3, 1] and found.results[1].failed
    assert found.finished and exit_code(found) == 3


@pytest.mark.parametrize("line", range(2, 8))
def test_a_store_that_fails_costs_nobody_the_table(
    line: int, run_duel: RunDuel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What was finished before is in the file, and all that was measured is printed."""
    write, written = DuelWriter._lines, [0]

    def full(self: DuelWriter, values: Sequence[dict[str, object]]) -> None:
        written[0] += 1
        if written[0] == line:
            raise StoreError("the disk is full")
        write(self, values)

    monkeypatch.setattr(DuelWriter, "_lines", full)
    with pytest.raises(StoreError, match="the disk is full"):
        run_duel(started({"fp32": Script(), "bf16": Script()}), 2)
    out = capsys.readouterr().out
    files = list((tmp_path / "duels").iterdir())
    if line == 2:  # the note, before anything was measured
        assert (out, files) == ("", [])
        return
    assert "trouble: the disk is full" in out and "change" in out
    (file,) = files
    assert len(load_duel(file).results) == min(line - 3, 2) and not load_duel(file).finished


def test_a_side_that_does_not_start_again_ends_it(
    run_duel: RunDuel, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In the second session: the first is kept and told, and the error says which side."""
    one = started({"fp32": Script()})
    workers_of(one)[3].last_start = 1
    with pytest.raises(WorkerLost, match="side B"):
        run_duel(one)
    assert "trouble: side B (python): the worker crashed" in capsys.readouterr().out
    (file,) = (tmp_path / "duels").iterdir()
    assert [len(result.sessions) for result in load_duel(file).results] == [1]


def test_an_interrupt_keeps_what_was_finished(run_duel: RunDuel, capsys: pytest.CaptureFixture[str]) -> None:
    """In the second session's second case; exit code 130, and how much is there is told."""
    struck = [Script(), Script(faults=[Fault("slot", KeyboardInterrupt(), at=9)])]  # type: ignore[arg-type]
    found = run_duel(started(dict(zip(("fp32", "bf16"), struck, strict=True))))
    assert not found.finished and exit_code(found) == 130
    assert [len(result.sessions) for result in found.results] == [2, 1]
    assert "interrupted; what was finished is kept in" in capsys.readouterr().err
    show_view(DuelKind().view(found), Namespace())
    assert "2 of 2 cases have fewer sessions than were planned" in capsys.readouterr().out


def of_two_trees(before: Mapping[str, tuple[str, ...]], after: Mapping[str, tuple[str, ...]]) -> duel_commands.Pair:
    """Sides of two working trees, '/old' and '/new', with what each side has loaded from below which."""
    pair = started({"fp32": Script()})
    for place, worker in enumerate(workers_of(pair)):
        worker.modules = before if place < 2 else after
    pair[0].start = replace(pair[0].start, tree=Path("/old"))
    pair[1].start = replace(pair[1].start, tree=Path("/new"), commit="abc")
    return pair


def test_a_side_with_code_of_the_other_tree_ends_it(run_duel: RunDuel, tmp_path: Path) -> None:
    """What is installed from this tree wins over the path: that would be no duel."""
    with pytest.raises(UsageError, match=r"side A has loaded mylib, mylib.part from this tree and not"):
        run_duel(of_two_trees({"/new": ("mylib", "mylib.part")}, {"/new": ("mylib",)}))
    assert not list((tmp_path / "duels").iterdir())


def test_code_of_its_own_tree_is_fine_even_if_that_lies_in_the_other(run_duel: RunDuel) -> None:
    """Where everything temporary is below the repository, say."""
    found = run_duel(of_two_trees({"/old": ("mylib",), "/new": ("mylib",)}, {"/new": ("mylib",)}), 1)
    assert found.finished and found.notes == ("a note",)


def test_sides_that_have_loaded_nothing_of_the_repository_are_told(
    run_duel: RunDuel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can differ between them; that is said before anything is measured, and kept."""
    words = "neither side has loaded any code of this repository"
    said: list[int] = []
    monkeypatch.setattr(duel_commands, "refresh", lambda *_: said.append(capsys.readouterr().err.count(words)))
    assert words in run_duel(of_two_trees({}, {}), 1).notes[1] and said == [1]


def test_markdown_for_a_pull_request(run_duel: RunDuel, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """In a file of its own, beside the tables on stdout."""
    file = tmp_path / "page.md"
    show_view(DuelKind().view(run_duel(started({"fp32": Script()}))), Namespace(md=file))
    page = file.read_text()
    assert page.startswith("# duel ") and "| worse |" in page.replace("\N{BLACK DOWN-POINTING TRIANGLE} ", "")
    assert "worse" in capsys.readouterr().out


def test_json_holds_samples_and_comparisons(run_duel: RunDuel, capsys: pytest.CaptureFixture[str]) -> None:
    """One document on one line."""
    show_view(DuelKind().view(run_duel(started({"fp32": Script()}))), Namespace(json=True))
    document = json.loads(capsys.readouterr().out)
    assert document["comparisons"][0]["ratio"]["point"] == pytest.approx(1.2)
    assert len(document["results"][0]["sessions"][2]["after"][1]["slots"]) == 6


@pytest.mark.parametrize(
    ("request_", "share", "rule"),
    [
        (Request("gemm"), None, (10, None, 2.5)),
        (Request("gemm", quick=True), None, (24, 10, 10.0)),
        (Request("gemm", rounds=7), 3.0, (24, 7, 10.0)),
        (Request("gemm", budget=9.0), 3.0, (5, None, 3.0)),
    ],
)
def test_how_long_a_session_is(request_: Request, share: float | None, rule: tuple[int, int | None, float]) -> None:
    """Least rounds, fixed ones, seconds; a budget ends it whatever was asked for."""
    found = duel_commands._rule(request_, share)
    assert (found.least, found.fixed, found.budget) == rule
    assert share is None or (found.ceiling == share and found.whole)
