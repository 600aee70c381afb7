"""The comment of a duel: which of seven outcomes, and at most 25 lines; then the action's own shell, on commits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fp8bench.cli.progress import TERMINAL_JOB_OBSERVER
from fp8bench.features.duel.run import NO_CODE_LOADED_NOTE
from fp8bench.features.duel.values import CaseResult, CaseSession, Duel
from fp8bench.features.duel.verdicts import comparisons
from fp8bench.features.gate.judging import GateVerdict
from fp8bench.features.gate.stored_runs import GateSource, judge_comparisons, make_failed_comparison
from fp8bench.features.gate.view import (
    CODE_AND_TEXT_BY_STATUS,
    DuelReview,
    ReviewStatus,
    render_comment,
    review_duel,
)
from fp8bench.model import Evidence, Level, Measurement, Record, Status
from tests.commands import ROOT, environment
from tests.counts import for_each
from tests.duels import header
from tests.fakes import record, steady
from tests.features.gate.paced import PacedFolder

RAISED = {"status": Status.FAILED, "reason": "ValueError: no", "detail": "Traceback ..."}
LOST = {"status": Status.FAILED, "reason": "the worker was killed"}


def times(ratio: float, spread: float, seed: int = 0) -> tuple[CaseSession, ...]:
    draw = np.random.default_rng(seed)
    sessions = []
    for _ in range(4):
        logs = draw.normal(0, spread, 4) + np.log(1e6) + np.array([0, 0, np.log(ratio), np.log(ratio)])
        timings = tuple(steady(round(value), 12) for value in np.exp(logs))
        sessions.append(CaseSession(timings[:2], timings[2:]))
    return tuple(sessions)


def case(
    ratio: float = 1.0,
    spread: float = 0.002,
    precision: str = "bf16",
    error: float = 1e-3,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
    sessions: bool = True,
) -> CaseResult:
    """A case with its slow-down, its error on head (1e-3 on base), and the statuses of its sides."""
    sides = [
        record(None, precision, **{"measurements": (Measurement("sum_error", "", (value,)),), **(changes or {})})
        for value, changes in ((1e-3, before), (error, after))
    ]
    return CaseResult(sides[0], sides[1], times(ratio, spread) if sessions else ())


def verdict_of(results: Sequence[CaseResult], notes: tuple[str, ...] = ()) -> tuple[GateVerdict, Duel]:
    duel: Duel = header(results=tuple(results), notes=notes, finished=True, sessions=4)
    source = GateSource("duel", comparisons(duel), None, notes, duel=duel)
    return judge_comparisons(source, (), False, TERMINAL_JOB_OBSERVER), duel


REFUSED = {"status": Status.SKIPPED, "reason": "side A: no unit; side B: no unit"}
VERSIONS = {"status": Status.SKIPPED, "reason": "suite gemm has version 1 on side A and 2 on side B"}
CASES: dict[str, tuple[list[CaseResult], tuple[str, ...], ReviewStatus]] = {
    "nothing": ([case()], (), ReviewStatus.PASS),
    "faster": ([case(0.8)], (), ReviewStatus.PASS),
    "refused on both sides": ([case(), case(before=REFUSED, after=REFUSED, sessions=False)], (), ReviewStatus.PASS),
    "slower": ([case(1.3)], (), ReviewStatus.REGRESSION),
    "slower, and another case faster": ([case(0.5, precision="fp8"), case(1.3)], (), ReviewStatus.REGRESSION),
    "more error": ([case(error=2e-3)], (), ReviewStatus.QUALITY_BLOCKED),
    "faster with more error": ([case(0.5, error=2e-3)], (), ReviewStatus.QUALITY_BLOCKED),
    "less error": ([case(error=5e-4)], (), ReviewStatus.PASS),
    "head raises": ([case(1.3), case(after=RAISED, sessions=False)], (), ReviewStatus.QUALITY_BLOCKED),
    "base raises": ([case(), case(before=RAISED, sessions=False)], (), ReviewStatus.RECIPE_MISMATCH),
    "both raise": ([case(), case(before=RAISED, after=RAISED, sessions=False)], (), ReviewStatus.INFRASTRUCTURE_ERROR),
    "head's worker is killed": ([case(), case(after=LOST, sessions=False)], (), ReviewStatus.INFRASTRUCTURE_ERROR),
    "slower, and a worker is killed": ([case(1.3), case(after=LOST, sessions=False)], (), ReviewStatus.REGRESSION),
    "other work": ([case(), case(before=VERSIONS, after=VERSIONS, sessions=False)], (), ReviewStatus.RECIPE_MISMATCH),
    "emulated on one side": ([case(after={"level": Level.EMULATED})], (), ReviewStatus.RECIPE_MISMATCH),
    "noise as large as the threshold": ([case(spread=0.1)], (), ReviewStatus.CANNOT_TELL),
    "neither side has loaded the code": ([case()], (NO_CODE_LOADED_NOTE,), ReviewStatus.RECIPE_MISMATCH),
}  # fmt: skip


@for_each("name", CASES)
def test_the_comment_begins_with_the_outcome(name: str) -> None:
    results, notes, expected = CASES[name]
    verdict, duel = verdict_of(results, notes)
    reviewed = review_duel(verdict, duel)
    assert reviewed.status is expected, reviewed
    assert bool(reviewed.reasons) is (expected is not ReviewStatus.PASS)
    if expected is ReviewStatus.QUALITY_BLOCKED:
        cause = "a case fails on head alone" if name == "head raises" else "numbers became worse"
        assert reviewed.headline == f"quality blocked: {cause}"
    text = render_comment(reviewed, verdict, duel, "fp8bench gate")
    heading, _, figure = text.splitlines()[:3]
    assert heading.startswith(f"# fp8bench: {expected}") and text.count("\n") <= 25
    assert ("5%" in heading) is (expected in (ReviewStatus.PASS, ReviewStatus.CANNOT_TELL)), heading
    if expected is ReviewStatus.PASS:
        assert heading == "# fp8bench: no regression above 5%"
        assert figure.startswith("smallest slow-down that would have been found: +")
    else:
        assert markdown_free(reviewed.reasons[0])[:40] in markdown_free(figure)
    action = ["sed", "-nE", re.search(r"sed -nE '(.*)'", STEPS["compare"]["run"])[1]]  # type: ignore[index]
    word = subprocess.run(action, input=text, capture_output=True, text=True, check=True).stdout
    assert word == f"status={expected}\n"


def markdown_free(text: str) -> str:
    return re.sub(r"[\\`]", "", text)


def test_an_interrupted_duel_is_an_infrastructure_failure() -> None:
    verdict, duel = verdict_of([case()])
    lost = GateSource(
        "duel", (make_failed_comparison("gemm[m=1]@cpu/fp8", "gemm", Evidence.PAIRED, "the duel was interrupted"),)
    )
    for unfinished in (
        judge_comparisons(lost, (), False, TERMINAL_JOB_OBSERVER),
        replace(verdict, problem="nothing", code=3),
    ):
        assert review_duel(unfinished, duel).status is ReviewStatus.INFRASTRUCTURE_ERROR
    assert [code for code, _ in CODE_AND_TEXT_BY_STATUS.values()] == [1, 1, 3, 4, 4, 4, 0] and list(
        CODE_AND_TEXT_BY_STATUS
    ) == list(ReviewStatus)


def test_the_table_lists_changes_with_intervals() -> None:
    verdict, duel = verdict_of([case(1.3), case(precision="fp8")])
    text = render_comment(review_duel(verdict, duel), verdict, duel, "x")
    assert re.match(r"# fp8bench: regression: .*\n\ngemm.*bf16 time: \+30", text.replace("\\", ""))
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [re.split(r" *\| *", row)[1:-1] for row in rows]
    assert ";".join(cells[0]) == "figure;base;head;change, 99% interval;smallest slow-down;worse is;verdict"
    figure, _, _, change, smallest, _, word = cells[2]
    assert "bf16 time" in figure and change.startswith("+30") and "\\[+" in change
    assert smallest.startswith("+") and word == "regression"
    assert sum("exact" in row for row in rows) == 2


@pytest.mark.slow
def test_a_comment_on_many_cases_has_25_lines() -> None:
    def wordy(record: Record, place: int) -> Record:
        reason = record.reason and record.reason + "\n# x" * 99
        return replace(record, case=replace(record.case, params=(("m", place),)), reason=reason)

    results = []
    for some, _, _ in [*CASES.values()] * 2:
        results += some
    many = [
        replace(one, before=wordy(one.before, place), after=wordy(one.after, place))
        for place, one in enumerate(results)
    ]
    verdict, duel = verdict_of(many, tuple(f"note {place} " * 50 for place in range(9)))
    verdict = replace(verdict, judged=tuple(replace(figure, why="why\n" * 200) for figure in verdict.judged))
    text = render_comment(review_duel(verdict, duel), verdict, duel, "fp8bench gate")
    assert text.count("\n") <= 25 and "more" in text and len(text) < 10_000
    for status in ReviewStatus:
        assert render_comment(DuelReview(status, ("a",) * 99), verdict, duel, "x").count("\n") <= 25


ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}
CONFIG = "suite: ./mine.py\ndtypes: [fp32, bf16]\nsessions: 1\n"


class Job:
    """A job on a checkout with two commits: the action's own scripts, in the shell that GitHub uses."""

    def __init__(self, path: Path) -> None:
        self.repository = PacedFolder(path)
        self.temp = path.parent / "temp"
        (path / "fp8bench.yaml").write_text(CONFIG)
        programs = self.temp / "bin"
        programs.mkdir(parents=True)
        self.program("fp8bench", f'exec {sys.executable} -W error -m fp8bench "$@"')
        self.environment = environment(
            PATH=f"{programs}:{os.environ['PATH']}",
            GITHUB_STEP_SUMMARY=str(self.temp / "summary"),
            GITHUB_OUTPUT=str(self.temp / "output"),
            COMMENT=str(self.temp / "comment.md"),
            CONFIG="fp8bench.yaml",
            THRESHOLDS="",
            STRICT="false",
            ISSUE="issue",
            REPLACED="comments",
        )

    def program(self, name: str, text: str) -> None:
        file = self.temp / "bin" / name
        file.write_text(f"#!/bin/bash\n{text}\n")
        file.chmod(0o755)

    def step(self, name: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", STEPS[name]["run"]],
            cwd=self.repository.path,
            env={**self.environment, **more},
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def compared(self, base: str) -> tuple[dict[str, str], str]:
        """The outputs and the comment of the comparing step."""
        (self.temp / "output").unlink(missing_ok=True)
        done = self.step("compare", BASE=base)
        assert done.returncode == 0, done.stderr
        lines = (self.temp / "output").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines), (self.temp / "comment.md").read_text()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    folder = tmp_path / "checkout"
    folder.mkdir()
    return Job(folder)


@pytest.mark.nightly
def test_the_action_compares_two_commits(job: Job) -> None:
    base = job.repository.commit(20_000)
    job.repository.commit(60_000)
    outputs, text = job.compared(base)
    assert outputs == {"code": "1", "status": "regression"}, text
    assert text.startswith("# fp8bench: regression: ") and text.count("\n") <= 25 and base[:8] in text
    assert "bf16 time" in text and "%" in text and (job.temp / "summary").read_text().endswith(text)
    assert job.step("verdict", CODE=outputs["code"], STATUS=outputs["status"]).returncode == 1


def test_an_action_that_cannot_compare_names_the_cause(job: Job) -> None:
    first = job.repository.commit(20_000)
    outputs, text = job.compared("0" * 40)
    assert outputs == {"code": "2", "status": "infrastructure error"} and "is not a commit of the repository" in text
    job.program("fp8bench", "exit 139")
    outputs, text = job.compared(first)
    assert outputs == {"code": "139", "status": "infrastructure error"} and "ended with 139" in text


@for_each(
    ("code", "may_write", "strict", "conclusion", "expected", "said"),
    [
        ("0", True, "false", "success", 0, ""),
        ("1", True, "false", "failure", 1, ""),
        ("139", True, "true", "failure", 139, ""),
        ("4", True, "false", "neutral", 0, "::notice::fp8bench: a word. The check mine is neutral. This job is green"),
        ("4", True, "true", "neutral", 4, "::notice::fp8bench: a word. The check mine is neutral. This job is red"),
        ("4", False, "false", "", 0, "::warning::fp8bench: a word. This job is green, which says nothing of speed"),
        ("4", False, "true", "", 4, "::warning::fp8bench: a word. This job is red"),
    ],
)
def test_the_action_sets_a_check_with_its_verdict(
    tmp_path: Path, code: str, may_write: bool, strict: str, conclusion: str, expected: int, said: str
) -> None:
    (tmp_path / "checkout").mkdir(exist_ok=True)
    job = Job(tmp_path / "checkout")
    words = {"CODE": code, "STATUS": "a word", "CHECK": "mine", "STRICT": strict}
    (job.temp / "comment.md").write_text("# fp8bench: a word\n")
    job.program("gh", f'printf "%s\\n" "$@" > {job.temp}/calls; exit {int(not may_write)}')
    (job.temp / "output").write_text("")
    done = job.step("check", CHECKS="checks", HEAD_SHA="1234", **words)
    asked = (job.temp / "calls").read_text().splitlines()
    assert done.returncode == 0 and {"name=mine", "head_sha=1234", "status=completed", "output[title]=a word"} < {
        *asked
    }
    assert asked[:4] == ["api", "--method", "POST", "checks"] and f"output[summary]=@{job.temp}/comment.md" in asked
    shown = (job.temp / "output").read_text().strip()
    assert shown == (f"shown={conclusion}" if may_write else "")
    assert not conclusion or f"conclusion={conclusion}" in asked
    done = job.step("verdict", SHOWN=shown.partition("=")[2], **words)
    assert done.returncode == expected and done.stdout.startswith(said) and bool(said) == bool(done.stdout)


def test_the_comment_of_the_action_replaces_its_own(job: Job) -> None:
    (job.temp / "comment.md").write_text("# fp8bench: no regression above 5%\n")
    calls = job.temp / "calls"
    for mine, expected in (("", "--method POST issue"), ("17", "--method PATCH comments/17")):
        calls.write_text("")
        job.program("gh", f'case "$*" in *--paginate*) echo "{mine}";; *) echo "$*" >> {calls};; esac')
        assert job.step("comment").returncode == 0 and expected in calls.read_text()
        assert f"body=@{job.temp}/comment.md" in calls.read_text()
    job.program("gh", "exit 1")
    done = job.step("comment")
    assert done.returncode == 0 and "::warning::" in done.stdout


def test_no_script_of_the_action_holds_an_expression() -> None:
    """An expression would let whoever sets its value run code."""
    assert not any("${{" in step["run"] for step in STEPS.values())
