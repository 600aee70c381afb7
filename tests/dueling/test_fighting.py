"""A whole duel with workers that measure nothing: what is kept and told when it does not come to its end."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from fp8bench import duel_commands
from fp8bench.dueling.corner import Corner
from fp8bench.dueling.duel import Duel
from fp8bench.dueling.keeping import DuelWriter, load_duel
from fp8bench.dueling.opening import Ready, Sides
from fp8bench.dueling.progress import DuelProgress
from fp8bench.errors import StoreError, UsageError, WorkerLost
from fp8bench.measure.partner import PartnerWorker, Start
from fp8bench.measure.quantisers import Quantisers
from fp8bench.model import PlannedCase, Request
from tests.duels import header
from tests.fakes import CPU, MS, FakeWorker, Fault, Script, gemm_steps, planned

REQUEST = Request("gemm", rounds=6)


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


def meeting(scripts: dict[str, Script], sittings: int = 3) -> duel_commands.Meeting:
    """Two sides with a case for each script; B takes a fifth longer."""

    def side(name: str, step_ns: int) -> Corner:
        own = {mode: Script(gemm_steps(step_ns), faults=script.faults) for mode, script in scripts.items()}
        workers = cast("Sequence[PartnerWorker]", [Startable(own), Startable(own)])
        cases: dict[str, PlannedCase] = {one.case.id: one for one in map(planned, scripts)}
        return Corner(Start(name, "python", ()), workers, Quantisers(), (CPU,), cases, {"gemm": "1"})

    ready = [Ready(Start(name, "python", ()), f"side {name}", ()) for name in ("A", "B")]
    corners = (side("A", 10 * MS), side("B", 12 * MS))
    return duel_commands.Meeting(Sides(ready[0], ready[1], ("a note",)), corners, tuple(corners[0].cases), sittings)


@pytest.fixture
def fight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[duel_commands.Meeting], Duel]:
    """What fights a duel in the test's own store."""

    def begun(meeting: duel_commands.Meeting, request: Request) -> Duel:
        return header(request=request, cases=meeting.cases, sittings=meeting.sittings)

    monkeypatch.setattr(duel_commands, "_begun", begun)
    return lambda one: duel_commands._fought(one, REQUEST, tmp_path, DuelProgress(None, {}), 0.0)


Fight = Callable[[duel_commands.Meeting], Duel]


def workers_of(one: duel_commands.Meeting) -> list[Startable]:
    """Those of A first."""
    return [cast(Startable, worker) for corner in one.corners for worker in corner.workers]


def test_every_sitting_has_fresh_processes(fight: Fight) -> None:
    """All cases sit in each; what is told is what was kept."""
    one = meeting({"fp32": Script(), "bf16": Script()})
    found = fight(one)
    assert found.finished and found.ok and found.notes == ("a note",)
    assert [len(bout.sittings) for bout in found.bouts] == [3, 3]
    assert all((worker.starts, worker.restarts) == (3, 2) for worker in workers_of(one))
    assert found == load_duel(Path(found.path)) and duel_commands.exit_code(found) == 1


def test_a_case_that_fails_late_keeps_its_sittings_and_the_others_go_on(fight: Fight) -> None:
    """It strikes both sides' first workers in their second sitting, whichever comes first."""
    late = Script(faults=[Fault("slot", WorkerLost("gone"), at=9)])
    found = fight(meeting({"fp32": Script(), "bf16": late}))
    assert [len(bout.sittings) for bout in found.bouts] == [3, 1] and found.bouts[1].failed
    assert found.finished and duel_commands.exit_code(found) == 3


@pytest.mark.parametrize("line", range(2, 8))
def test_a_store_that_fails_costs_nobody_the_table(
    line: int, fight: Fight, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What was finished before is in the file, and all that was measured is printed."""
    write, written = DuelWriter._line, [0]

    def full(self: DuelWriter, value: dict[str, object]) -> None:
        written[0] += 1
        if written[0] == line:
            raise StoreError("the disk is full")
        write(self, value)

    monkeypatch.setattr(DuelWriter, "_line", full)
    with pytest.raises(StoreError, match="the disk is full"):
        fight(meeting({"fp32": Script(), "bf16": Script()}, 2))
    out = capsys.readouterr().out
    files = list((tmp_path / "duels").iterdir())
    if line == 2:  # the note, before anything was measured
        assert (out, files) == ("", [])
        return
    assert "trouble: the disk is full" in out and "B / A" in out
    (file,) = files
    assert len(load_duel(file).bouts) == min(line - 3, 2) and not load_duel(file).finished


def test_a_side_that_does_not_start_again_ends_it(
    fight: Fight, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In the second sitting: the first is kept and told, and the error says which side."""
    one = meeting({"fp32": Script()})
    workers_of(one)[3].last_start = 1
    with pytest.raises(WorkerLost, match="side B"):
        fight(one)
    assert "trouble: side B (python): the worker crashed" in capsys.readouterr().out
    (file,) = (tmp_path / "duels").iterdir()
    assert [len(bout.sittings) for bout in load_duel(file).bouts] == [1]


def test_an_interrupt_keeps_what_was_finished(fight: Fight, capsys: pytest.CaptureFixture[str]) -> None:
    """In the second sitting's second case; exit code 130, and how much is there is told."""
    struck = [Script(), Script(faults=[Fault("slot", KeyboardInterrupt(), at=9)])]  # type: ignore[arg-type]
    found = fight(meeting(dict(zip(("fp32", "bf16"), struck, strict=True))))
    assert not found.finished and duel_commands.exit_code(found) == 130
    assert [len(bout.sittings) for bout in found.bouts] == [2, 1]
    assert "interrupted; what was finished is kept in" in capsys.readouterr().err
    duel_commands.show(found, as_json=False)
    assert "2 of 2 cases have fewer sittings than were planned" in capsys.readouterr().out


def of_two_trees(before: Mapping[str, tuple[str, ...]], after: Mapping[str, tuple[str, ...]]) -> duel_commands.Meeting:
    """A meeting of two working trees, '/old' and '/new', with what each side has loaded from below which."""
    one = meeting({"fp32": Script()}, 1)
    for place, worker in enumerate(workers_of(one)):
        worker.modules = before if place < 2 else after
    before_, after_ = replace(one.sides.before, tree=Path("/old")), replace(one.sides.after, tree=Path("/new"))
    return replace(one, sides=Sides(before_, after_))


def test_a_side_with_code_of_the_other_tree_ends_it(fight: Fight, tmp_path: Path) -> None:
    """What is installed from this tree wins over the path: that would be no duel."""
    with pytest.raises(UsageError, match=r"side A has loaded mylib, mylib.part from this tree and not"):
        fight(of_two_trees({"/new": ("mylib", "mylib.part")}, {"/new": ("mylib",)}))
    assert not list((tmp_path / "duels").iterdir())


def test_code_of_its_own_tree_is_fine_even_if_that_lies_in_the_other(fight: Fight) -> None:
    """Where everything temporary is below the repository, say."""
    found = fight(of_two_trees({"/old": ("mylib",), "/new": ("mylib",)}, {"/new": ("mylib",)}))
    assert found.finished and found.notes == ()


def test_sides_that_have_loaded_nothing_of_the_repository_are_told(fight: Fight) -> None:
    """Nothing can differ between them."""
    assert "neither side loaded any code of this repository" in fight(of_two_trees({}, {})).notes[0]


def test_json_holds_samples_and_comparisons(fight: Fight, capsys: pytest.CaptureFixture[str]) -> None:
    """One document on one line."""
    duel_commands.show(fight(meeting({"fp32": Script()})), as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["comparisons"][0]["ratio"]["point"] == pytest.approx(1.2)
    assert len(document["bouts"][0]["sittings"][2]["after"][1]["slots"]) == 6


@pytest.mark.parametrize(
    ("request_", "share", "rule"),
    [
        (Request("gemm"), None, (10, None, 2.5)),
        (Request("gemm", quick=True), None, (24, 10, 10.0)),
        (Request("gemm", rounds=7), 3.0, (24, 7, 10.0)),
        (Request("gemm", budget=9.0), 3.0, (5, None, 3.0)),
    ],
)
def test_how_long_a_case_sits(request_: Request, share: float | None, rule: tuple[int, int | None, float]) -> None:
    """Least rounds, fixed ones, seconds; a budget ends it whatever was asked for."""
    found = duel_commands._rule(request_, share)
    assert (found.least, found.fixed, found.budget) == rule
    assert share is None or (found.ceiling == share and found.whole)
