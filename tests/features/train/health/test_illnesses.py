"""Illnesses planted in real trainings, as by `python -m suites.health`, and how its figures are computed."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from fp8bench.features.train.health.health import RULES
from fp8bench.features.train.values import StepRow
from suites import illness_trial
from suites.health import PARTS, judge_ill, judge_well, keep, page, together, upper_bound
from suites.illness_trial import KINDS
from suites.illnesses import ILLNESSES
from tests.counts import sampled


def test_every_rule_has_one() -> None:
    planted = {illness.rule for illness in ILLNESSES} | {rule for kind in KINDS for rule in kind.rules.split()}
    assert planted - {"unseen"} == {rule.name for rule in RULES}


def test_kept_trains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trained what is missing of leads."""
    monkeypatch.setattr(illness_trial, "lines_of", None)
    monkeypatch.setattr("sys.argv", ["trial", "--folder", str(tmp_path), "--kinds", "ill lead well", "--kept"])
    illness_trial.main()
    assert not any(tmp_path.rglob("*.gz"))


def test_bounds_of_rates() -> None:
    """Expected are the one-sided bounds of Clopper and Pearson: 1 - 0.05^(1/n) for 0 of n, the others from tables."""
    assert upper_bound(0, 50_000) == pytest.approx(1 - 0.05 ** (1 / 50_000), rel=1e-6)
    assert upper_bound(1, 10) == pytest.approx(0.394163, abs=1e-6)
    assert upper_bound(5, 100) == pytest.approx(0.102253, abs=1e-6)


def test_without_trainings_there_are_no_rows(tmp_path: Path) -> None:
    assert judge_well("well", tmp_path) is None and judge_ill(tmp_path) == []
    assert "of 2" not in page([], [])


def test_a_training_that_was_cut_off_counts_as_far_as_it_came(tmp_path: Path) -> None:
    """That holds for a healthy one; for an ill one it is unknown whether its rule would have alarmed."""
    rows = [
        StepRow("bf16", 0, step, 3 - step / 1000, 1e-3, 1.0, 0.0, 50.0, 1e-3, 1.0, 256, 0.01) for step in range(600)
    ]
    for study in (PARTS["well"][0], PARTS["ill"][0]):
        whole = gzip.compress(b"".join(json.dumps([0, *astuple(row)]).encode() + b"\n" for row in rows))
        (tmp_path / f"{study.name}.jsonl.77").write_bytes(whole[:-20])
    well = judge_well("well", tmp_path)
    assert well is not None and (well.trainings, well.whole, well.alarms) == (1, 0, {}) and 500 < well.steps < 600
    both = together((well, replace(well, alarms={"lag": 2})))
    assert (both.trainings, both.steps, both.alarms) == (2, 2 * well.steps, {"lag": 2})
    assert both.at_most == pytest.approx(1e4 * upper_bound(2, both.steps)) and math.isnan(together(()).at_most)
    assert judge_ill(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("rule", sampled(["lag"], ["gradient-norm-spike", "lag", "batch-norm-drift"]))
def test_a_planted_illness_is_found(rule: str, tmp_path: Path) -> None:
    """The real trainer runs; no rule alarms before the illness begins."""
    study = next(study for study in PARTS["ill"] if study.illness is not None and study.illness.rule == rule)
    keep(study, tmp_path)
    (row,) = judge_ill(tmp_path)
    assert (row.rule, row.found, row.seeds, row.early) == (rule, 1, 1, 0)
    assert row.delays[0] <= 60
