"""Labels with their reasons in everything that shows a run: table, CSV, JSON, the report's sections and sentences."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import Finding, Label, Run, Verdict
from fp8bench.model.words import REMARK_LABELS
from fp8bench.report.case_status import describe_case_doubts
from fp8bench.report.elements import TextList
from fp8bench.report.panels import group_into_panels
from fp8bench.report.topics.verdict import compare_precisions
from fp8bench.report.words import legend
from fp8bench.report.words.legend import WORDS_BY_LABEL, explain_label
from tests.counts import for_each
from tests.fakes import MS, steady
from tests.materials import Made, of_kind, part
from tests.runs import judged, render_whole, transformer
from tests.told_before import Told, as_before, on_terminal

CAPPED = (Verdict.FASTER, 0.5, Label.POWER_CAPPED)


def labelled(
    verdict: Verdict, *labels: Label, reasons: tuple[tuple[Label, str], ...], **changes: object
) -> tuple[Run, dict[str, Finding]]:
    """A group with these labels on bf16, which is twice as fast as fp32."""
    run, findings = judged((verdict, 0.5, *labels))
    case = run.records[1].case.id
    findings[case] = replace(findings[case], label_reasons=reasons, **changes)  # type: ignore[arg-type]
    return run, findings


WHY = "labelled throttled (hw-thermal, sw-thermal), so there is no verdict"
HOT = labelled(
    Verdict.UNSURE,
    Label.NOISY,
    Label.THROTTLED,
    reasons=((Label.THROTTLED, "hw-thermal, sw-thermal"),),
    hard=(Label.THROTTLED,),
    why=WHY,
)
LONG = labelled(
    Verdict.FASTER,
    Label.CONTENDED,
    Label.EAGER_QUANTISER,
    reasons=((Label.EAGER_QUANTISER, "there is no compiler"), (Label.CONTENDED, "less than a fifth of a core")),
)


def capped(number: int) -> Made:
    run, findings = judged(*[CAPPED] * number)
    for place, record in enumerate(run.records[1::2]):
        reasons = ((Label.POWER_CAPPED, f"reason {place}"),)
        findings[record.case.id] = replace(findings[record.case.id], label_reasons=reasons)
    return run, findings


@as_before
def test_labels() -> Told:
    def sentences(made: Made) -> list[object]:
        return [text for panel in group_into_panels(*made) for text in compare_precisions(panel)]

    yield "a table has the reason beside the label, and the ratio beside no verdict", on_terminal(HOT, "labels", "bf16")
    yield "the sentence says why once: the hard label is in the why", sentences(HOT)
    yield (
        "a power cap is told with its clock and casts no doubt",
        sentences(labelled(*CAPPED[::2], reasons=((Label.POWER_CAPPED, "SM clock 1.41 GHz"),))),
    )
    yield "of some cases, too", sentences(judged(CAPPED, (Verdict.FASTER, 0.5)))
    for number in (5, 9):
        yield (
            f"of {number} reasons five are shown, of more the first four",
            of_kind(part("environment", capped(number)), TextList),
        )
    yield "a long reason is not in the row, and stands in the notes", on_terminal(LONG, "labels", "notes")
    yield "eager quantisers are told with the reason they ran so", on_terminal(eager(), "labels", "notes")


def test_legends_say_what_labels_mean() -> None:
    text = render_whole(*HOT, width=300)
    assert f"\n  {explain_label(Label.THROTTLED)}\n" in text and f"\n  {legend.NO_VERDICT_LEGEND}\n" in text


@for_each("label", sorted(REMARK_LABELS))
def test_remarks_are_shown_and_are_no_doubt(label: Label) -> None:
    run, findings = judged((Verdict.FASTER, 0.5, label))
    text = render_whole(run, findings, width=300)
    assert f"labels: {label}" in text and WORDS_BY_LABEL[label].meaning in text
    assert describe_case_doubts(group_into_panels(run, findings)[0].named_cases[1]) == ()


def eager() -> Made:
    why = "--quick compiles nothing"
    run, findings = transformer()
    *others, fp8 = run.records
    run = replace(run, records=(*others, replace(fp8, timing=replace(steady(60 * MS, 8), eager=why))))
    reasons = ((Label.EAGER_QUANTISER, why),)
    findings[fp8.case.id] = replace(findings[fp8.case.id], labels=(Label.EAGER_QUANTISER,), label_reasons=reasons)
    return run, findings
