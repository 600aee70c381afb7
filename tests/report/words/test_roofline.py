"""What phases wait for, in sentences, and what to do where nobody knows."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import Request
from fp8bench.report.page.sections.roofline import Roofline
from fp8bench.report.panels import panels_of
from fp8bench.report.terminal.run import render
from fp8bench.report.words.roofline import how_to_know, sentences
from tests.materials import Made, material
from tests.rooflines import made


def test_a_phase_far_below_its_ceilings_is_bound_by_none() -> None:
    """Ten times as slow, it waits for something else."""
    run, findings = made()
    first = run.records[0].case.id
    slow = tuple((name, 10 * seconds) for name, seconds in findings[first].phases if name != "optimizer_step")
    findings = {**findings, first: replace(findings[first], best_seconds=1.0, phases=slow)}
    (said, *_) = sentences(panels_of(run, findings)[0])
    assert said.endswith(
        " is far below its ceilings in gemm (54% of the step, 5.40 ms an operator, at 7% of the nearest) and "
        "elementwise (21% of the step, 10.5 us an operator, at 10% of the nearest)."
    )


def told(one: Made) -> str:
    run, findings = one
    return how_to_know((result for panel in panels_of(run, findings) for result in panel.results), run)


def test_without_ceilings_somebody_is_told_how_to_know() -> None:
    """Once, in the terminal and on the page, with the threads and the store of the run; never beside a roofline."""
    run, findings = made(None)
    words = told((run, findings))
    assert words.startswith("What bounds each phase is not known yet: `fp8bench doctor --ceilings` measures")
    assert " ".join(render(run, findings).split()).count("fp8bench doctor --ceilings") == 1
    (element,) = Roofline().elements(material((run, findings)))
    assert words in str(element)
    other = replace(run, request=Request("transformer", threads=2), command="fp8bench suite transformer --store kept")
    assert "`fp8bench doctor --ceilings --threads 2`, with the same --store, measures" in told((other, findings))
    assert told(made()) == "" and "doctor" not in render(*made())
    bare = replace(run, records=tuple(replace(one, tape=None) for one in run.records))
    assert told((bare, findings)) == ""
