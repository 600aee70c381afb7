"""A run's warnings about its verdicts: the sitting, and the number of wrong ones expected by chance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fp8bench.analysis.findings import findings
from fp8bench.analysis.verdicts import conclude_comparison
from fp8bench.model import Environment, Reruns, Run, Scalar, Timing, Verdict
from fp8bench.report.page.html import render as html
from fp8bench.report.page.section import make_report_material, report_page
from fp8bench.report.terminal.run import render
from tests.counts import counts, for_each
from tests.fakes import called, record
from tests.runs import case, render_whole, run_of

QUIET: dict[str, Scalar] = {"load_1min": 1.1, "cpu_count": 2, "busy_cores": 0.2}


def timed(microseconds: float, draw: np.random.Generator) -> Timing:
    return called(*(1e3 * microseconds * np.exp(draw.exponential(0.02, (24, 8)))).astype(int).tolist())


def settings(count: int, speed: float = 2.0) -> Run:
    """Groups, each with a case of this speed-up."""
    draw, records = np.random.default_rng(0), []
    for number in range(count):
        lead, other = (case("gemm", mode, {"m": number}) for mode in ("fp32", "bf16"))
        reference = record(timed(1000, draw), is_reference=True, control=timed(1000, draw))
        records += [replace(reference, case=lead), replace(record(timed(1000 / speed, draw)), case=other)]
    return run_of(records, command="fp8bench suite gemm --store kept")


def texts(run: Run) -> list[str]:
    found = findings(run)
    page = html(report_page(make_report_material([run], [found])))
    return [" ".join(text.split()) for text in (render(run, found), render_whole(run, found), page)]


LOADS = ({"load_1min": 4.0}, {"load_1min": 0.4, "busy_cores": 1.0}, {"load_1min": 1.4, "busy_cores": None})


@for_each("facts", LOADS)
def test_under_load_other_runs_may_differ_by_more(facts: dict[str, Scalar]) -> None:
    run = replace(settings(1), environment=Environment({**QUIET, **facts}))
    answer, all_parts, page = texts(run)
    for text in (answer, all_parts, page):
        assert f"other programs were running (load {facts['load_1min']:g} on 2 cores" in text
        assert "another run may differ by more than these intervals" in text
    assert "Caution: other programs were running" in answer
    # A decided verdict needs no second run.
    assert "measure again: fp8bench suite gemm --store kept" in all_parts
    assert not any("measure again" in text for text in (answer, page))


def test_a_quiet_machine_or_one_that_knows_its_reruns_needs_no_caution() -> None:
    """A run that has just ended is in the mean load of a minute, with its one thread."""
    one, busy = settings(1), Environment({**QUIET, "load_1min": 4.0})
    known = tuple(replace(each, reruns=Reruns(0.01, 8, 9)) for each in one.records)
    many_cores = Environment({"load_1min": 1.6, "cpu_count": 64, "busy_cores": 1.2})
    quiet = [replace(one, environment=facts) for facts in (Environment({}), Environment(QUIET), many_cores)]
    for run in (*quiet, replace(one, records=known, environment=busy)):
        assert not any("another run may differ" in text for text in texts(run))


@for_each(
    ("count", "expected"),
    [(1, ""), (12, "each of the 12 cases is judged separately: if none really differed, the chance is 12% that one")],
)
def test_several_cases_say_how_many_verdicts_to_expect_by_chance(count: int, expected: str) -> None:
    for text in texts(settings(count))[1:]:
        assert expected in text and ("by mistake" in text) is bool(expected)


@counts(4, 100)
def test_families_without_a_difference_have_no_more_false_verdicts_than_is_said(count: int) -> None:
    """50 cases per suite: the page promises at most half a false verdict per suite."""
    draw, false = np.random.default_rng(7), 0
    for _ in range(50 * count):
        concluded = conclude_comparison(*(timed(1000, draw) for _ in range(3)))
        assert concluded is not None
        false += concluded.verdict in (Verdict.FASTER, Verdict.SLOWER)
    assert false <= 0.5 * count
