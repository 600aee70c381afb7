"""The trial of illnesses in ordinary loops (`python -m suites.illness_trial`): what it stores, and its bounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8bench.features.train.health.health import RULES
from suites import illness_families, illness_trial
from suites.illness_trial import upper_bound


def test_a_trial_finds_an_illness_and_trains_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(illness_trial, "SEEDS", {"judge": (10,)})
    words = ["--only", "a rate of 0", "--report", str(tmp_path / "report")]
    monkeypatch.setattr("sys.argv", ["trial", "--folder", str(tmp_path), "--kinds", "ill", *words])
    illness_trial.main()
    monkeypatch.setattr(illness_trial, "train", None)
    illness_trial.main()
    row = json.loads((tmp_path / "report" / "rows.jsonl").read_text().splitlines()[1])
    assert row["found"] and row["right"] and "no-update" in row["rules"]


def test_halves_of_families_are_apart_and_name_rules() -> None:
    """Thresholds are set on one half of the illnesses; the other half is reported."""
    tune, judge = ({illness.title for illness in half} for half in illness_families.split_in_halves().values())
    assert len(tune) + len(judge) == len(illness_families.ILLNESSES) == 45 and not tune & judge
    names = {name for illness in illness_families.ILLNESSES for name in illness.rules.split()}
    # Proposed before the rules were written, but never rules: the texts of existing rules cover them.
    assert names - {rule.name for rule in RULES} == {"stale-scale", "rate-too-high"}
    styles = illness_families.STYLES | illness_families.HEALTHY_STYLES
    assert len(illness_families.HEALTHY) == len(styles) == 29 and not set(styles) & set(illness_trial.STYLES)


def test_bounds_of_rates() -> None:
    """One-sided bounds of Clopper and Pearson: 1 - 0.05^(1/n) for 0 of n, the others from tables."""
    assert upper_bound(0, 50_000) == pytest.approx(1 - 0.05 ** (1 / 50_000), rel=1e-6)
    assert upper_bound(1, 10) == pytest.approx(0.394163, abs=1e-6)
    assert upper_bound(5, 100) == pytest.approx(0.102253, abs=1e-6)
