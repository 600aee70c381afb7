"""`fp8bench gate --history`: steps that are open fail, what is known does not, and nothing is green for nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from junitparser import JUnitXml

from fp8bench.cli.progress import TERMINAL_JOB_OBSERVER
from fp8bench.features.gate.history import compare_history
from fp8bench.features.gate.judging import (
    GateOutcome,
    JudgedFigure,
    SecondMeasurement,
    apply_second_look,
    case_and_metric,
    judge_first_look,
)
from fp8bench.features.gate.stored_runs import SuspectRemeasurer
from fp8bench.model import Comparison, Direction, Evidence, Interval, Record, Run, Status
from tests.commands import Say, git
from tests.counts import for_each
from tests.histories import history, keep, records, run_at
from tests.runs import error

FLAT = [1.0, 1.003, 0.998, 1.001, 0.997, 1.002, 1.0, 0.999, 1.004, 0.998, 1.001, 1.0, 0.999, 1.002]
STEPPED = [*FLAT[:7], *(1.5 * time for time in FLAT[7:])]


def bf16_at(milliseconds: float) -> tuple[Record, ...]:
    """A run's bf16 at this time, with a constant fp32."""
    usual = records()
    own = records(milliseconds)
    return tuple(record if record.is_reference else slow for record, slow in zip(usual, own, strict=True))


def bf16_history(store: Path, *milliseconds: float) -> None:
    for number, time in enumerate(milliseconds):
        keep(store, run_at(number, records=bf16_at(time)))


def test_a_step_fails_until_it_is_acknowledged(store: Path, fp8bench: Say) -> None:
    bf16_history(store, *STEPPED)
    code, out, _ = fp8bench("gate", "--history", "--no-rerun", "--junit", "out.xml", "--md", "out.md")
    assert code == 1 and "bf16 relative_time" in out and "bf16 time " not in out
    xml = JUnitXml.fromfile("out.xml")
    (failure,) = next(case for case in next(iter(xml)) if case.result).result
    assert "between 000000" in failure.text and xml.failures == 1
    assert fp8bench("history", "ack", "*", "--because", "known")[0] == 0
    code, out, _ = fp8bench("gate", "--history", "--no-rerun")
    assert code == 4 and "acknowledged" in out and "history too young: 6 nights" in " ".join(out.split())


def test_a_larger_improvement_before_it_hides_no_regression(store: Path, fp8bench: Say) -> None:
    bf16_history(store, *FLAT, *(0.5 * time for time in FLAT), *(0.58 * time for time in FLAT))
    assert fp8bench("history", "regressions")[0] == 1
    code, out, _ = fp8bench("gate", "--history", "--no-rerun")
    assert code == 1 and "+16." in out and "better" not in out


def test_a_slower_reference_is_a_regression_of_its_own(store: Path, fp8bench: Say) -> None:
    history(store, *STEPPED)
    code, out, err = fp8bench("gate", "--history")
    assert code == 1 and "fp32 time " in out and "bf16" not in out and "seconds_per" not in out
    assert "not measured again" in out and "suspected" in err


FindSteps = tuple[tuple[JudgedFigure, ...], list[Comparison]]


def looked_again(store: Path) -> FindSteps:
    """All figures of the history after both looks, and the initial suspects."""
    found = compare_history(store, TERMINAL_JOB_OBSERVER)
    figures = judge_first_look(found.comparisons)
    suspects = [figure.comparison for figure in figures if figure.outcome is GateOutcome.SUSPECTED]
    assert suspects and found.confirm is not None
    return apply_second_look(figures, found.confirm(suspects)), suspects


@for_each(("times", "outcome"), [(1.45, GateOutcome.REGRESSION), (1.02, GateOutcome.CLEARED)])
def test_a_second_look_must_lie_near_the_new_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: float, outcome: GateOutcome
) -> None:
    bf16_history(tmp_path, *STEPPED)
    asked = []

    def measured(_: object, run: Run, cases: set[str]) -> tuple[Run, str]:
        asked.append(cases)
        return run_at(99, records=bf16_at(times)), ""

    monkeypatch.setattr(SuspectRemeasurer, "measure_cases", measured)
    settled, suspects = looked_again(tmp_path)
    assert {figure.outcome for figure in settled if figure.comparison in suspects} == {outcome}
    assert len(asked) == 1 and all(case.startswith("gemm[") and case.endswith("/bf16") for case in asked[0])


def test_an_error_that_became_nan_fails(store: Path, fp8bench: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_error(value: float) -> tuple[Record, ...]:
        return tuple(replace(one, measurements=(error("product_error", value),)) for one in records())

    for number in range(14):
        keep(store, run_at(number, records=with_error(0.02 if number < 13 else math.nan)))
    assert fp8bench("gate", "--history", "--no-rerun")[0] == 1
    _, out, _ = fp8bench("history", "show", "track_product_error(bf16")
    assert out.split("\n")[-3].split()[-3:] == ["nan", "-", "-"]
    for again, outcome in ((math.nan, GateOutcome.REGRESSION), (0.02, GateOutcome.CLEARED)):
        answer = run_at(99, records=with_error(again)), ""
        monkeypatch.setattr(SuspectRemeasurer, "measure_cases", lambda *_, answer=answer: answer)
        settled, suspects = looked_again(store)
        assert {figure.outcome for figure in settled if figure.comparison in suspects} == {outcome}


def test_rules_are_of_all_series_and_not_of_those_that_changed_tonight(store: Path, fp8bench: Say) -> None:
    bf16_history(store, *STEPPED)
    for rules, code in (("cast: {time: ignore}", 2), ("gemm: {mean_time: ignore}", 1)):
        Path("rules.yaml").write_text(rules)
        assert fp8bench("gate", "--history", "--no-rerun", "--thresholds", "rules.yaml")[0] == code
    bf16_history(Path("flat"), *FLAT)
    Path("rules.yaml").write_text("gemm: {time: {relative: 3%}}")
    code, _, err = fp8bench("gate", "--history", "--no-rerun", "--thresholds", "rules.yaml", "--store", "flat")
    assert code == 0 and "matches no figure" not in err


def test_each_suite_may_have_a_run_of_its_own(store: Path, fp8bench: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    others = tuple(replace(one, case=replace(one.case, workload="copy")) for one in records())
    asked = []

    def measured(_: object, run: Run, __: object) -> tuple[Run, str]:
        asked.append(run.id)
        return run_at(99, records=bf16_at(1.5)), ""

    monkeypatch.setattr(SuspectRemeasurer, "measure_cases", measured)
    for number, time in enumerate(STEPPED):
        path = keep(store, run_at(number, records=bf16_at(time)))
        keep(store, run_at(number, number + 1.5, records=others))
    settled, suspects = looked_again(store)
    assert asked == [path.stem.rpartition("-")[2]]
    assert {figure.outcome for figure in settled if figure.comparison in suspects} == {GateOutcome.REGRESSION}
    for number, code in ((len(STEPPED), 3), (len(STEPPED) + 1, 1)):
        keep(store, run_at(number, records=tuple(records(status=Status.FAILED))))
        keep(store, run_at(number, number + 1.5, records=others))
        assert fp8bench("gate", "--history", "--no-rerun")[0] == code


@for_each(("times", "outcome"), [(1.4, GateOutcome.REGRESSION), (1.0, GateOutcome.CLEARED)])
def test_a_duel_with_the_commit_before_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: float, outcome: GateOutcome
) -> None:
    bf16_history(tmp_path, *STEPPED)
    asked = []

    def duel_with_commit(_: object, commit: str, __: object, suspects: Sequence[Comparison]) -> SecondMeasurement:
        asked.append((commit, [suspect.case for suspect in suspects]))
        where = Direction.WORSE if times > 1 else Direction.SAME
        ratio = Interval(times, times * 0.99, times * 1.01, 0.99)
        changes = {"metric": "time", "unit": "s", "direction": where, "evidence": Evidence.PAIRED, "ratio": ratio}
        found = {
            case_and_metric(suspect): replace(suspect, before=1e-3, after=1e-3 * times, p_value=1e-6, **changes)
            for suspect in suspects
        }
        return SecondMeasurement(found, "in duel abc")

    monkeypatch.setattr(SuspectRemeasurer, "duel_with_commit", duel_with_commit)
    settled, suspects = looked_again(tmp_path)
    figure = next(figure for figure in settled if figure.comparison.metric == "relative_time")
    assert figure.outcome is outcome and "in duel abc" in figure.why
    assert {commit for commit, _ in asked} == {suspect.since for suspect in suspects}
    for _, cases in asked:
        assert all("@cpu/bf16" in case for case in cases)


NOISY = [1.0, 1.12, 0.9, 1.08, 0.93, 1.1, 0.95, 1.06, 0.89, 1.07, 1.0, 0.92, 1.11, 0.97, 1.05, 0.9]


def test_a_night_that_is_in_no_history_does_not_hide_a_blind_one(store: Path, fp8bench: Say) -> None:
    bf16_history(store, *NOISY)
    keep(store, run_at(len(NOISY), facts={"dirty": True}))
    code, out, _ = fp8bench("gate", "--history", "--no-rerun")
    assert code == 4 and "and the threshold is +5.0%" in " ".join(out.split())
    for number, time in enumerate(FLAT, len(NOISY) + 1):
        keep(store, run_at(number, records=[record for record in bf16_at(time) if record.is_reference]))
    code, out, _ = fp8bench("gate", "--history", "--no-rerun")
    assert code == 0 and "smallest slow-down: +" in out and "/fp32" in out and "bf16" not in out


def test_a_case_that_fails_tonight_fails_the_gate(store: Path, fp8bench: Say) -> None:
    history(store, *FLAT)
    for number, code in ((len(FLAT), 3), (len(FLAT) + 1, 0)):
        keep(store, run_at(number, records=tuple(records(status=Status.FAILED))))
        assert fp8bench("gate", "--history")[0] == code
    cut = run_at(len(FLAT) + 2, finished=False)
    keep(store, replace(cut, records=cut.records[:1]))
    code, out, _ = fp8bench("gate", "--history")
    assert code == 3 and "was interrupted" in out


def test_an_empty_history_does_not_pass(store: Path, fp8bench: Say) -> None:
    code, _, err = fp8bench("gate", "--history")
    assert code == 2 and "does not exist" in err
    (store / "runs").mkdir(parents=True)
    assert fp8bench("gate", "--history")[0] == 3
    history(store, 1.0, 1.0)
    code, out, _ = fp8bench("gate", "--history", "--junit", "out.xml")
    assert code == 4 and "nothing to compare" in out and "too few" in out
    assert JUnitXml.fromfile("out.xml").errors == 1
    keep(store, replace(run_at(3), records=()))
    code, out, _ = fp8bench("gate", "--history")
    assert code == 3 and "was measured" in out


def test_a_night_without_runs_of_this_commit_fails(store: Path, fp8bench: Say) -> None:
    git(Path(), "init", "-q")
    git(Path(), "commit", "-q", "--allow-empty", "-m", "x")
    history(store, *FLAT[:-1])
    keep(store, run_at(len(FLAT), facts={"commit": git(Path(), "rev-parse", "HEAD")}))
    assert fp8bench("gate", "--history")[0] == 0
    git(Path(), "commit", "-q", "--allow-empty", "-m", "x")
    code, out, _ = fp8bench("gate", "--history")
    assert code == 3 and "Measure the current commit" in out
