"""The first hour on a GPU: its planning, resuming, and a table that passes nothing that was not measured."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from suites import first_gpu
from suites.first_gpu import changes, command_of, find_open_steps, rows_of, run_steps, take
from suites.first_gpu_brisk import STEPS
from suites.first_gpu_steps import FirstStep, Line, Measured, NoFigure, StepFiles, cases, conforms, ratio
from suites.trials import conditions


def ended(folder: Path, step: FirstStep, code: int = 0) -> StepFiles:
    files = StepFiles(step, folder)
    files.write({"state": "ended", "attempts": 1, "overruns": 0, "code": code})
    return files


def probe_of(folder: Path, computes: bool = True) -> StepFiles:
    probe = ended(folder, STEPS[0])
    document = {
        "computes": computes,
        "device": {"name": "H1"},
        "torch": "2",
        "driver": {},
        "commit": "c",
        "precisions": {},
        "overheads": {"marker_on": 1e-6},
        "energy": {"why": "no driver"},
    }
    probe.path("json").write_text(json.dumps(document))
    return probe


def number(value: float) -> Any:
    return lambda files: Measured(value, f"{value:g}")


def refused(files: StepFiles) -> Measured:
    raise NoFigure("no such unit")


def verdicts(folder: Path, *steps: FirstStep, computes: bool = True) -> dict[str, str]:
    every = [probe_of(folder, computes), *(ended(folder, step) for step in steps)]
    return {row.line: row.verdict for row in rows_of(every)[len(STEPS[0].lines) :]}


def step_of(name: str, *lines: Line) -> FirstStep:
    return FirstStep(name, "fp8bench doctor", 10, lines)


def test_steps_that_could_not_run_are_rows_and_never_pass(tmp_path: Path) -> None:
    lines = Line("a", number(2), low=1), Line("b", number(2), high=1), Line("c", number(2)), Line("d", refused, low=1)
    assert verdicts(tmp_path, step_of("x", *lines)) == {
        "a": "reached",
        "b": "missed",
        "c": "measured",
        "d": "could not be: no such unit",
    }


def test_figures_that_nobody_may_trust_are_no_verdict(tmp_path: Path) -> None:
    """Of a device that computes nothing; and of speed in low precision before conform holds."""
    line = Line("a", number(2), low=1)
    assert verdicts(tmp_path, step_of("x", line), computes=False) == {
        "a": "could not be: no GPU that computes was seen"
    }
    assert changes([probe_of(tmp_path, computes=False)], []) == "Nothing changes: no GPU that computes was seen.\n"
    speed = step_of("x", Line("fast", number(2), low=1, speed=True))
    for differences, verdict in ((0, "reached"), (1, "could not be: conform and selftest have not held here")):
        verdicts_by_line = verdicts(
            tmp_path, step_of("conform", Line("unexplained", number(differences), high=0)), speed
        )
        assert verdicts_by_line["fast"] == verdict


def test_ratios_are_of_the_same_cases_and_of_native_ones(tmp_path: Path) -> None:
    files = ended(tmp_path, step_of("x"))
    head = ["precision", "level", "status", "reason", "metric", "phase", "params", "median_in_unit", "case"]

    def write(*rows: Sequence[str]) -> None:
        with files.path("csv").open("w") as file:
            csv.writer(file).writerows([head, *rows])

    low = ["fp8", "native", "ok", "", "time", "step"]
    high = ["bf16", *low[1:]]
    write([*high, "a", "3", "1"], [*high, "b", "5", "2"], [*low, "a", "1", "3"], [*low, "b", "3", "4"])
    assert ratio("time", "bf16", "fp8")(files) == (2.0, "2 (by case 3, 1.67)")
    assert cases(files).text == "4 of 4 cases"
    for rows, why in (
        ([[*high, "a", "3", "1"], [*low, "b", "1", "2"]], "not the same cases"),
        ([[*high, "a", "3", "1"], ["fp8", "emulated", *low[2:], "a", "1", "2"]], "fp8 was emulated"),
        ([[*high, "a", "3", "1"], ["fp8", "native", "failed", "no | unit", *low[4:], "a", "", "2"]], r"no \| unit"),
        ([[*high, "a", "3", "1"]], "fp8 was not measured"),
    ):
        write(*rows)
        with pytest.raises(NoFigure, match=why):
            ratio("time", "bf16", "fp8")(files)


def test_casts_that_nobody_compared_do_not_conform(tmp_path: Path) -> None:
    files = ended(tmp_path, step_of("conform"))
    for differences, counted in ((["none", "order"], 0), (["unexplained", None], 1)):
        found = [{"difference": difference, "why": "refused"} for difference in differences]
        files.path("out").write_text(json.dumps({"modes": [{"support": {"level": "native"}, "found": found}]}))
        assert conforms(files).number == counted
    files.path("out").write_text(json.dumps({"modes": [{"support": {"level": "native"}, "found": found[1:]}]}))
    with pytest.raises(NoFigure, match="refused"):
        conforms(files)


def test_files_that_do_not_read_are_rows_too(tmp_path: Path) -> None:
    every = [probe_of(tmp_path), *(ended(tmp_path, step) for step in STEPS[1:])]
    for files in every[1:]:
        for kind in ("out", "csv", "json"):
            files.path(kind).write_text("[1]\n")
    good = {row.line: row.verdict for row in rows_of(every) if not row.verdict.startswith("could not be")}
    assert good == {"driver, clocks, power cap": "measured", "event clock, us a marker": "measured"}


def test_without_a_gpu_nothing_but_the_probe_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def take(files: StepFiles, *limits: object) -> dict[str, Any]:
        taken.append(files.step.name)
        ended(tmp_path, files.step)
        return {"state": "-", "seconds": 1, "code": 0}

    monkeypatch.setattr(first_gpu, "take", take)
    StepFiles(STEPS[0], tmp_path).path("json").write_text("{}")
    run_steps((STEPS[0], step_of("next")), tmp_path, 1000)
    assert taken == ["probe"]


def test_a_run_of_another_commit_is_not_gone_on_with(tmp_path: Path) -> None:
    """After a fix its halves would not compare."""
    files = StepFiles(FirstStep("x", "json.tool --help", 1, ()), tmp_path)
    for commit, is_kept in ((conditions()["commit"], True), ("0" * 8, False)):
        (files.store / "runs").mkdir(parents=True, exist_ok=True)
        files.write({"state": "begun", "attempts": 1, "overruns": 0, "commit": commit})
        assert take(files, 60.0, {})["code"] == 0
        assert files.store.exists() is is_kept and files.state()["state"] == "ended"


def test_a_run_that_cannot_be_resumed_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = StepFiles(FirstStep("one", "fp8bench suite gemm", 1, ()), tmp_path)
    (files.store / "runs" / "box").mkdir(parents=True)
    (files.store / "runs" / "box" / "20260105T120000.000Z-0000000f-ffff.jsonl").write_text("no run\n")
    refuses = [sys.executable, "-c", "import sys; sys.exit(2 * ('--resume' in sys.argv))"]
    monkeypatch.setattr(first_gpu, "command_of", lambda *arguments: [*refuses, *command_of(*arguments)])
    state = take(files, 120, {})
    assert (state["state"], state["code"], state["attempts"]) == ("ended", 0, 2) and not files.store.exists()


def test_a_step_that_is_forgotten_is_done_anew(tmp_path: Path) -> None:
    steps = (STEPS[0], step_of("x"), step_of("x-ray"))
    for step in steps:
        ended(tmp_path, step).store.mkdir(parents=True)
    first_gpu.forget(steps, "x", tmp_path)
    assert [files.step.name for files in find_open_steps(steps, tmp_path)] == ["x"]
    assert [files.store.exists() for files in (StepFiles(step, tmp_path) for step in steps)] == [True, False, True]
    with pytest.raises(SystemExit, match="unknown step 'nosuch'"):
        first_gpu.forget(steps, "nosuch", tmp_path)


def test_every_row_of_the_architecture_that_a_step_names_is_there(tmp_path: Path) -> None:
    every = [probe_of(tmp_path), *(StepFiles(step, tmp_path) for step in STEPS[1:])]
    text = changes(every, rows_of(every))
    printed = {line.removeprefix("- | ").split(" | ")[0] for line in text.splitlines() if line.startswith("- | ")}
    assert printed == set().union(*(step.rows for step in STEPS))
    assert "**tried on H1" in text and "run on H1" not in text.partition("\n")[2]
    assert len({step.name for step in STEPS}) == len(STEPS)
    assert max(step.seconds for step in STEPS) < 9 * 60  # the value of --minutes
