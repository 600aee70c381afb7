"""One speed-up a case: every text, page and file of a run prints the same figure, and times that have it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import numpy as np
import pytest

from fp8bench import units
from fp8bench.analysis.findings import findings
from fp8bench.features.advise.basis import AdviceBasis
from fp8bench.features.advise.decide import advise
from fp8bench.features.advise.view import render_page as advice_page
from fp8bench.model import Finding, Label, Run, Segments, SlotSample, Timing, Work
from fp8bench.report.data.run import tidy_rows
from fp8bench.report.page.html import render as html
from fp8bench.report.page.section import make_report_material, report_page
from fp8bench.report.terminal import layout
from fp8bench.report.terminal.run import render
from tests.counts import for_each
from tests.fakes import record
from tests.runs import render_whole, run_of

# Matches '0.914x' and '2.85x', but no tick of an axis.
SPEED = re.compile(r"\d*\.\d{2,}x")
# The ends of an interval, one phase's speed-up, advice's gain, ticks of an axis, and the table of a chart's numbers.
OF_PART = re.compile(
    r"(?:could be|seen) [\d.]+x to [\d.]+x|\([\d.]+x(?: slower)?\)|would be [\d.]+x|\[[\d.]+x, [\d.]+x\]"
    r'|<text class="tick".*?</text>|<summary [^>]*>The numbers.*?</details>'
)
SECONDS = re.compile(r"\d[\d.]* (?:ns|us|ms|s)\b")


def steps(microseconds: float, calls: int, seed: int, slow: float = 0.0) -> Timing:
    """Slots of `calls` calls, a share of them 1.6 times as long; the minimum of more calls is lower."""
    draw = np.random.default_rng(seed)
    slots = []
    for number in range(32):
        times = microseconds * np.exp(np.abs(draw.normal(0, 0.1, calls))) * np.where(draw.random(calls) < slow, 1.6, 1)
        whole = tuple((int(150 * time), int(850 * time)) for time in times)
        seconds = float(times.sum()) * 1e-6
        slots.append(SlotSample(number, whole, seconds, seconds))
    return Timing(Segments(("cast", "gemm"), (0, 0)), tuple(slots))


def measured(microseconds: float, slow: float) -> Run:
    lead = record(steps(900, 9, 1), "fp32", is_reference=True, control=steps(912, 9, 2), work=Work(flops=1e9))
    return run_of([lead, record(steps(microseconds, 60, 3, slow), "bf16", work=Work(flops=1e9))])


def prints(run: Run, found: dict[str, Finding]) -> Iterator[str]:
    yield render(run, found)
    yield render_whole(run, found)
    yield html(report_page(make_report_material([run], [found])))
    yield layout.render(advice_page(advise(AdviceBasis(run, found)), ()), 400)


@for_each(("microseconds", "slow"), [(300.0, 0.0), (860.0, 0.0), (700.0, 0.4), (2000.0, 0.0)])
def test_all_that_is_printed_of_a_case_has_one_speed_up(microseconds: float, slow: float) -> None:
    run = measured(microseconds, slow)
    found = findings(run)
    lead, case = found.values()
    assert (Label.UNEVEN in case.labels) is (slow > 0)
    assert case.ratio is not None and lead.best_seconds is not None and case.best_seconds is not None
    speed = case.ratio.inverse
    assert lead.best_seconds / case.best_seconds == pytest.approx(speed.point)
    shown = units.speed_up(speed.point)
    for whole in prints(run, found):
        text = re.sub(OF_PART, "", " ".join(whole.split()))
        printed = {word for word in SPEED.findall(text) if not math.isclose(float(word[:-1]), 1.0)}
        assert shown in text and printed == {shown}
    times = set(SECONDS.findall(render_whole(run, found)))
    assert times == {units.seconds(lead.best_seconds), units.seconds(case.best_seconds)}
    table = {row["mode"]: row for row in tidy_rows(run, found) if row["metric"] == "time" and row["phase"] == "step"}
    row = table["bf16"]
    assert row["speedup"] == pytest.approx(speed.point) and 1 / row["ratio_to_reference"] == pytest.approx(speed.point)  # type: ignore[operator]
    assert table["fp32"]["best_in_unit"] / row["best_in_unit"] == pytest.approx(speed.point)  # type: ignore[operator]
