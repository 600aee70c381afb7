"""Which limit phases wait for, advice where it is unknown, and devices' best rates, measurement by measurement."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import Label, Limit, Request, Verdict
from fp8bench.report.elements import Text, TextList
from fp8bench.report.panels import group_into_panels
from fp8bench.report.topics.roofline import describe_speed_limits_of_phases, explain_unknown_limits
from tests.materials import Made, built, of_kind, part
from tests.rooflines import CEILING, made
from tests.runs import render_whole
from tests.told_before import Told, as_before

MEMORY = (Limit.COPY, Limit.TRIAD)


def advice(material: Made) -> str:
    return explain_unknown_limits(group_into_panels(*material), material[0])


@as_before
def test_roofline() -> Told:
    yield (
        "what bounds each phase, and by Amdahl what fp8 could give; a roof for each kind of products",
        part("roofline", made()),
    )
    run, findings = made()
    first, own = (record.case.id for record in run.records[:2])
    slow = tuple((name, 10 * seconds) for name, seconds in findings[first].phases if name != "optimizer_step")
    far = {**findings, first: replace(findings[first], best_seconds=1.0, phases=slow)}
    yield (
        "a phase far below its ceilings waits for something else",
        list(describe_speed_limits_of_phases(group_into_panels(run, far)[0])),
    )
    noisy = {**findings, own: replace(findings[own], labels=(Label.NOISY,), floor=0.2)}
    yield "a case under a label gives it perhaps", of_kind(part("roofline", (run, noisy)), TextList)
    unsure = {**findings, own: replace(findings[own], verdict=Verdict.UNSURE)}
    yield "one without a verdict does not say what", of_kind(part("roofline", (run, unsure)), TextList)
    unverified = made(replace(CEILING, device="NVIDIA GB200", rates=()))
    yield "what nobody has checked is unverified", of_kind(part("roofline", unverified), Text)
    run, findings = made(None)
    yield "without ceilings a sentence", part("roofline", (run, findings))
    bare = replace(run, records=tuple(replace(record, tape=None) for record in run.records))
    yield "without tapes nothing", built("roofline", (bare, findings))
    other = replace(run, request=Request("transformer", threads=2), command="fp8bench suite transformer --store kept")
    yield "with the threads and the store of the run", advice((other, findings))


def test_somebody_is_told_how_to_know_once_and_never_beside_a_roofline() -> None:
    run, findings = made(None)
    assert " ".join(render_whole(run, findings).split()).count("fp8bench suite ceilings") == 1
    assert advice(made()) == "" and "doctor" not in render_whole(*made())
    bare = replace(run, records=tuple(replace(record, tape=None) for record in run.records))
    assert advice((bare, findings)) == ""


def test_a_phase_above_its_ceiling_has_no_percentage() -> None:
    """An optimizer ten times as fast as memory reads from a cache."""
    run, findings = made()
    first = run.records[0].case.id
    fast = [(name, seconds / (10 if name == "optimizer_step" else 1)) for name, seconds in findings[first].phases]
    run_and_findings = run, {**findings, first: replace(findings[first], phases=tuple(fast), best_seconds=0.08)}
    (sentence, *_) = describe_speed_limits_of_phases(group_into_panels(*run_and_findings)[0])
    assert "served from cache in optimizer (" in sentence and "of the step, above its ceiling)" in sentence
    assert "800%" not in sentence
