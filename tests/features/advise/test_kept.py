"""Checks of advice: a line each, whose order says nothing, and whose broken lines count as none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench.errors import StoreError
from fp8bench.features.advise.kept import checks_of, keep_checks, load_checks
from fp8bench.features.advise.values import Advice, AdviceKind, Checked, Ground
from fp8bench.model import Interval

ADVICE = Advice(
    "step", AdviceKind.ADOPT, "bf16", "fp32", "adopt bf16", ("gemm[m=64]@cpu",), "--dtypes fp32,bf16",
    gain=Interval(1.5, 1.4, 1.6, 0.99), case="gemm[m=64]@cpu/bf16", grounds=(Ground("gemm[m=64]@cpu/bf16", "1.5x"),),
)  # fmt: skip
CHECKED = Checked(
    ADVICE, "0a", "0b", "2026-01-05T12:00:00+00:00", Interval(1.45, 1.4, 1.5, 0.99), under=(("torch", "2"),)
)


def test_what_is_kept_is_read(tmp_path: Path) -> None:
    """By when it was; a line that was cut off, or is of a later version, is left out and said."""
    later = replace(CHECKED, when="2026-01-06", measured=None, why="it was throttled")
    keep_checks(tmp_path, [later])
    with checks_of(tmp_path).open("a") as file:
        file.write('{"version": 1, "checked": {"adv\n{"version": 9}\n{"version": 1}\n{"version": 1, "che')
    keep_checks(tmp_path, [CHECKED, CHECKED])
    found, troubles = load_checks(tmp_path)
    assert found == (CHECKED, later) and [one.split()[1] for one in troubles] == ["2", "3", "4", "5"]
    assert [one.hit for one in found] == [True, None]


def test_without_a_file_there_is_none(tmp_path: Path) -> None:
    """And where nothing can be written, that is said."""
    assert load_checks(tmp_path) == ((), [])
    with pytest.raises(StoreError, match="cannot be written"):
        keep_checks(tmp_path / "nowhere", [CHECKED])
    checks_of(tmp_path).mkdir()
    with pytest.raises(StoreError, match="cannot be read"):
        load_checks(tmp_path)


@pytest.mark.parametrize(("point", "hit"), [(1.39, False), (1.4, True), (1.6, True), (1.61, False)])
def test_a_hit_lies_within_what_was_predicted(point: float, hit: bool) -> None:
    measured = Interval(point, 1.0, 2.0, 0.99)
    assert replace(CHECKED, measured=measured).hit is hit
    assert replace(CHECKED, advice=replace(ADVICE, gain=None)).hit is None
