"""The trial of illnesses in ordinary loops (`python -m suites.illness_trial`): what it keeps, and its bounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8bench.features.train.health.health import RULES
from suites import illness_families, illness_trial
from suites.illness_trial import upper_bound


def test_kept_trains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trained only what was missing for leads."""
    monkeypatch.setattr(illness_trial, "lines_of", None)
    monkeypatch.setattr("sys.argv", ["trial", "--folder", str(tmp_path), "--kinds", "ill lead well", "--kept"])
    illness_trial.main()
    assert not any(tmp_path.rglob("*.gz"))


def test_halves_of_families_are_apart_and_name_rules() -> None:
    """Thresholds are set on one half of the kinds; the other half is reported."""
    halves = illness_families.split_kinds(illness_families.KINDS)
    tune, judge = ({kind.title for kind in half} for half in halves.values())
    assert len(tune) + len(judge) == len(illness_families.KINDS) == 45 and not tune & judge
    names = {name for kind in illness_families.KINDS for name in kind.rules.split()}
    # Proposed before the rules were written, but never rules: other rules' texts cover both.
    assert names - {rule.name for rule in RULES} == {"stale-scale", "rate-too-high"}
    styles = illness_families.STYLES | illness_families.HEALTHY_STYLES
    assert len(illness_families.HEALTHY) == len(styles) == 29 and not set(styles) & set(illness_trial.STYLES)


def test_bounds_of_rates() -> None:
    """One-sided bounds of Clopper and Pearson: 1 - 0.05^(1/n) for 0 of n, the others from tables."""
    assert upper_bound(0, 50_000) == pytest.approx(1 - 0.05 ** (1 / 50_000), rel=1e-6)
    assert upper_bound(1, 10) == pytest.approx(0.394163, abs=1e-6)
    assert upper_bound(5, 100) == pytest.approx(0.102253, abs=1e-6)
