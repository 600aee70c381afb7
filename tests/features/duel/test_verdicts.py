"""What a result's samples and values come to, and how a duel reads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8bench.features.duel.values import CaseResult, Session
from fp8bench.features.duel.verdicts import compared, comparisons, judged, p_value
from fp8bench.features.duel.view import page_of
from fp8bench.model import Comparison, Direction, Evidence, Level, Measurement, Record, Status, Support
from fp8bench.report.terminal.layout import render
from tests.duels import header
from tests.fakes import record, steady


def session(before: tuple[int, ...], after: tuple[int, ...], rounds: int = 8) -> Session:
    """Processes that take so many nanoseconds in every round."""
    return Session(tuple(steady(one, rounds) for one in before), tuple(steady(one, rounds) for one in after))


SLOWER = tuple(session((1000 + k, 1003 - k), (1050 + k, 1054 - k)) for k in range(4))


def measured(**values: float) -> Record:
    """A record with these values; peak_memory in bytes."""
    found = (Measurement(name, "B" if name == "peak_memory" else "ratio", (value,)) for name, value in values.items())
    return replace(record(None), measurements=tuple(found))


def of(result: CaseResult) -> dict[str, Comparison]:
    """Comparisons by metric."""
    return {one.metric: one for one in compared(result)}


def test_a_slower_side() -> None:
    """Seconds of both sides, the ratio with its interval, and a chance beyond what the deals alone can tell."""
    one = of(CaseResult(record(None), record(None), SLOWER))["time"]
    assert (one.direction, one.evidence, one.unit, one.failed) == (Direction.WORSE, Evidence.PAIRED, "s", False)
    assert one.before == pytest.approx(1.0008e-6, rel=1e-3) and one.after == pytest.approx(1.051e-6, rel=1e-3)
    assert one.ratio is not None and one.ratio.low < 1.05 < one.ratio.high and one.ratio.level == 0.99
    assert one.p_value is not None and one.p_value < 1e-4 < 2 / 6**4


def test_a_verdict_beside_processes_further_apart_says_why_it_stands() -> None:
    """One process of a side was slow, and the sides differ by less, for certain; alike processes need no word."""
    slow = (session((1000, 1100), (1050, 1051)), *SLOWER)
    result = CaseResult(record(None), record(None), tuple(slow))
    one = of(result)["time"]
    assert one.direction is Direction.WORSE and one.ratio is not None and one.ratio.point < 1.06
    assert one.why.startswith("processes of one side lay 1") and "more than 4.6%" in one.why
    assert of(CaseResult(record(None), record(None), SLOWER))["time"].why == ""


def test_chance_without_sessions_enough_is_not_known() -> None:
    """One session has six deals."""
    result = CaseResult(record(None), record(None), SLOWER[:1])
    found = judged(result)
    assert found is not None and p_value(found) is None
    one = of(result)["time"]
    assert one.direction is Direction.UNSURE and "1 session cannot tell" in one.why


def test_chance_that_the_deals_can_tell_is_theirs() -> None:
    """Processes in any order: no distribution is assumed."""
    mixed = tuple(session((1000, 1020 + k), (1010, 1015 - k)) for k in range(4))
    found = judged(CaseResult(record(None), record(None), mixed))
    assert found is not None and p_value(found) == found.chance > 0.05


def test_values_of_one_side_and_those_that_are_no_cost() -> None:
    """More decibels are better, and their error says the same."""
    found = of(CaseResult(measured(sqnr_db=30.0, utilisation_percent=3.0), measured(sqnr_db=20.0, peak_memory=8.0)))
    assert set(found) == {"time", "peak_memory"}
    assert found["peak_memory"].direction is Direction.NONE and "only side B has it" in found["peak_memory"].why


@pytest.mark.parametrize(("side", "failed"), [("before", False), ("after", True)])
def test_a_failure_is_no_comparison(side: str, failed: bool) -> None:
    """And counts as one where side A had none."""
    broke, fine = record(None, status=Status.FAILED, reason="it broke"), record(None)
    result = CaseResult(broke, fine, SLOWER) if side == "before" else CaseResult(fine, broke, SLOWER)
    one = of(result)["time"]
    assert (one.direction, one.ratio, one.failed) == (Direction.NONE, None, failed)
    assert one.why == f"it failed on side {'A' if side == 'before' else 'B'}: it broke"


def test_emulated_on_both_sides_compares_and_on_one_does_not() -> None:
    """The same work, or not."""
    low = replace(record(None), support=Support(Level.EMULATED, "no kernel"))
    assert of(CaseResult(low, low, SLOWER))["time"].direction is Direction.WORSE
    one = of(CaseResult(low, record(None), SLOWER))["time"]
    assert one.direction is Direction.NONE and one.ratio is None and one.before is not None
    assert one.why == "emulated on side A and native on side B: not the same work"


@pytest.mark.parametrize("width", [40, 60, 100])
def test_the_text_keeps_within_its_width_and_says_it_all(width: int) -> None:
    """Who fought, ratios, failures, values that differ, what was not measured."""
    results = (
        CaseResult(measured(output_error=0.1, peak_memory=10.0), measured(output_error=0.1, peak_memory=20.0), SLOWER),
        CaseResult(record(None, "fp32"), record(None, "fp32", status=Status.FAILED, reason="it broke"), ()),
    )
    duel = header(
        results=results, cases=("a", "b", "c"), sessions=4, notes=("mind the gap",), troubles=("line 3 is broken",)
    )
    lines = render(page_of(duel), width=width).split("\n")
    text = " ".join(" ".join(lines).split())
    assert all(len(line) <= width for line in lines)
    for words in (
        "side A",
        "torch 2.13.0",
        "worse",
        "FAILED",
        "+100.0%",
        "it broke",
        "mind the gap",
        "line 3 is broken",
    ):
        assert words in text
    assert "1 of 3 cases were not measured" in text and "this duel was not stored" in text
    assert len(comparisons(duel)) == 4


def test_nothing_measured_is_said() -> None:
    """Not an empty table."""
    assert "Nothing was measured." in render(page_of(header()))
