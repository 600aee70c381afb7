"""What turns of seconds say: a step's time, its ratio by rounds of turns, and how far it is from that in slots."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fp8bench.analysis.findings import find
from fp8bench.analysis.metrics import metrics_of
from fp8bench.analysis.samples import sustained_figures, sustained_ratio, sustained_samples
from fp8bench.model import Level, Provenance, Record, SustainedTurn
from fp8bench.model.stopping import ClockLook, Settling
from fp8bench.report.panels import panels_of
from tests.counts import for_each
from tests.fakes import MS, record, steady
from tests.runs import render_whole, run_of

LOOKS = (ClockLook(0.0, 1.9e9, 50.0), ClockLook(4.0, 1.7e9, 60.0))


def turns(
    *milliseconds: float, settled: Sequence[bool] = (), clock: float | None = None, watts: float | None = None
) -> tuple[SustainedTurn, ...]:
    """Each of four chunks of 25 steps."""
    courses = [Settling(LOOKS, one, 8.0) for one in settled] or [None] * len(milliseconds)
    return tuple(
        SustainedTurn(25, (25 * one / 1e3,) * 4, course, clock, watts)
        for one, course in zip(milliseconds, courses, strict=True)
    )


def pair(own: tuple[SustainedTurn, ...], base: tuple[SustainedTurn, ...], **options: Any) -> tuple[Record, Record]:
    """A case and its reference, which took 5 and 10 ms in slots."""
    reference = record(steady(10 * MS, 24), "fp32", is_reference=True, control=steady(10 * MS, 24), sustained=base)
    return record(steady(5 * MS, 24), sustained=own, **options), reference


def test_figures_are_of_the_middle_turn() -> None:
    """With clock and power, how many had settled, and how far it is from the time in slots."""
    case, reference = pair(
        turns(5.5, 5.4, 5.9, settled=(True, False, True), clock=1.7e9, watts=650.0), turns(10.0, 10.0, 10.0)
    )
    finding = {one.case.mode: one for one in find([reference, case], {})}["bf16"]
    found = sustained_figures(case, finding)
    assert found is not None and sustained_samples(case) == pytest.approx((5.5e-3, 5.4e-3, 5.9e-3))
    assert (found.seconds, found.low, found.high) == pytest.approx((5.5e-3, 5.4e-3, 5.9e-3))
    assert (found.turns, found.settled, found.clock, found.watts) == (3, 2, 1.7e9, 650.0)
    assert found.change == pytest.approx(1.1)
    assert sustained_figures(record(steady(5 * MS, 24)), finding) is None


def test_the_ratio_is_paired_by_rounds_of_turns() -> None:
    """A device that becomes slower from round to round makes both slower."""
    case, reference = pair(turns(6.0, 7.2, 8.64, 10.4), turns(10.0, 12.0, 14.4, 17.3))
    ratio = sustained_ratio(case, reference)
    assert ratio is not None and ratio.level == 0.99 and ratio.low < 0.6 < ratio.high < 0.605
    few = sustained_ratio(*pair(turns(6.0, 5.0), turns(10.0, 10.0)))
    assert few is not None and few.level == 0.0 and (few.low, few.high) == pytest.approx((0.5, 0.6))


@for_each("options", [{"level": Level.EMULATED}, {"paired": False}, {"paired_with": steady(10 * MS, 24)}])
def test_no_ratio_where_it_would_be_none(options: dict[str, Any]) -> None:
    """An emulation's time, or turns at another time."""
    case, reference = pair(turns(6.0, 6.0, 6.0), turns(10.0, 10.0, 10.0), **options)
    assert sustained_ratio(case, reference) is None and sustained_ratio(reference, reference) is None
    assert sustained_ratio(case, None) is None


def test_nonsense_from_a_file_is_no_turn() -> None:
    odd = (SustainedTurn(0, (1.0,)), SustainedTurn(5, ()), SustainedTurn(5, (math.nan,)), SustainedTurn(5, (-1.0,)))
    assert sustained_samples(record(steady(5 * MS, 24), sustained=odd)) == ()


def test_it_is_a_figure_of_its_own_and_a_table() -> None:
    """In rows for other programs too; where nobody could tell whether it had settled, that is said."""
    case, reference = pair(turns(5.5, 5.5, 5.5, clock=1.7e9), turns(10.0, 10.0, 10.0))
    findings = {one.case.id: one for one in find([reference, case], {})}
    metric = next(one for one in metrics_of(case, findings[case.case.id]) if one.name == "sustained_time")
    assert (metric.unit, metric.value, metric.count, metric.provenance) == (
        "s",
        pytest.approx(5.5e-3),
        3,
        Provenance.MEASURED,
    )
    told = {one.name: one.value for one in metrics_of(case, findings[case.case.id])}
    assert told["sustained_clock"] == 1.7e9 and "sustained_power" not in told and "sm_clock" not in told
    run = run_of([reference, case])
    (panel,) = panels_of(run, findings)
    text = " ".join(render_whole(run, findings, 120).split())
    assert "bf16 5.50 ms 1.82x [1.82, 1.82] +10.0% 1.70 GHz - 3, cannot be told" in text and panel
    plain = run_of([replace(one, sustained=()) for one in run.records])
    assert "sustained" not in render_whole(plain, findings, 120)


@pytest.mark.slow
def test_an_interval_of_four_turns_holds_the_ratio_as_often_as_it_says() -> None:
    """Of 2,000 pairs with noise of 1% a turn: 99%, and not all."""
    draw, held = random.Random(17), 0
    for _ in range(2000):
        own, base = ([middle * math.exp(draw.gauss(0, 0.01)) for _ in range(4)] for middle in (6.0, 10.0))
        case, reference = pair(turns(*own), turns(*base))
        ratio = sustained_ratio(case, reference)
        assert ratio is not None
        held += ratio.low <= 0.6 <= ratio.high
    assert 0.98 <= held / 2000 < 1.0
