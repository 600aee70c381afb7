"""Labels with their reasons in everything that shows a run: table, CSV, JSON, the report's sections and sentences."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import Finding, Label, Run, Verdict
from fp8bench.model.specs import STEP
from fp8bench.model.words import REMARKS
from fp8bench.report.case_status import doubts, named_labels
from fp8bench.report.data.run import rows, run_value
from fp8bench.report.elements import Items, Text, Tone
from fp8bench.report.panels import panels_of
from fp8bench.report.words import legend
from fp8bench.report.words.labels import LABELS, explained
from fp8bench.report.words.speed import comparisons, said_once
from tests.counts import for_each
from tests.fakes import MS, steady
from tests.materials import of_kind, part
from tests.runs import judged, render_whole, transformer

HOT = ((Label.THROTTLED, "hw-thermal, sw-thermal"),)
CLOCK = ((Label.POWER_CAPPED, "SM clock 1.41 GHz"),)
WHY = "labelled throttled (hw-thermal, sw-thermal): times measured so get no verdict"


def made(
    verdict: Verdict, *labels: Label, reasons: tuple[tuple[Label, str], ...], **changes: object
) -> tuple[Run, dict[str, Finding]]:
    """One group: bf16 is twice as fast as fp32, with these labels."""
    run, findings = judged((verdict, 0.5, *labels))
    case = run.records[1].case.id
    findings[case] = replace(findings[case], label_reasons=reasons, **changes)  # type: ignore[arg-type]
    return run, findings


def hot() -> tuple[Run, dict[str, Finding]]:
    """Slowed down by its hardware."""
    labels = (Label.NOISY, Label.THROTTLED)
    return made(Verdict.UNSURE, *labels, reasons=HOT, hard=(Label.THROTTLED,), why=WHY)


def capped() -> tuple[Run, dict[str, Finding]]:
    """At its power cap."""
    return made(Verdict.FASTER, Label.POWER_CAPPED, reasons=CLOCK)


def sentences(made: tuple[Run, dict[str, Finding]]) -> list[Text]:
    return [text for panel in panels_of(*made) for text in comparisons(panel)]


def test_the_table_has_the_reason_beside_the_label_and_the_ratio_beside_no_verdict() -> None:
    """And the legend what labels mean."""
    text = render_whole(*hot(), width=300)
    assert "\n      labels: noisy, throttled (hw-thermal, sw-thermal)\n" in text
    assert "unsure     2.00x [1.98, 2.02]" in text and f"- bf16 unsure: {WHY}" in " ".join(text.split())
    assert f"\n  {explained(Label.THROTTLED)}\n" in text
    assert f"\n  {legend.HARD}\n" in text and legend.HARD not in render_whole(*capped(), width=300)


def test_the_sentence_says_why_once() -> None:
    """The hard label is in the why; the other one follows."""
    (text,) = sentences(hot())
    assert text.text.endswith(f": {WHY}; the times varied a lot (noisy)") and text.tone is Tone.DOUBT
    assert said_once(panels_of(*hot())) == frozenset()


def test_a_power_cap_is_told_with_its_clock_and_casts_no_doubt() -> None:
    """In the sentence, of all cases or of some."""
    (text,) = sentences(capped())
    assert text == Text(
        "bf16 is 2.00x [1.98, 2.02] faster than fp32 on gemm m=64 k=64; it ran at the clocks that the device's "
        "power cap allows (power-capped, SM clock 1.41 GHz)",
        Tone.GOOD,
    )
    several = judged((Verdict.FASTER, 0.5, Label.POWER_CAPPED), (Verdict.FASTER, 0.5))
    assert sentences(several)[0].text.endswith(
        "; it ran at the clocks that the device's power cap allows in 1 of 2 (power-capped)"
    )


@for_each("label", sorted(REMARKS))
def test_remarks_are_shown_and_are_no_doubt(label: Label) -> None:
    """In the table's row and in the legend, not among the doubts."""
    run, findings = judged((Verdict.FASTER, 0.5, label))
    assert f"labels: {label}" in render_whole(run, findings) and LABELS[label].meaning in render_whole(
        run, findings, width=300
    )
    assert doubts(panels_of(run, findings)[0].results[1]) == ()


def test_many_reasons_are_cut() -> None:
    """Each clock is one; five are shown, of more the first four."""
    for number, end in ((5, "reason 3; reason 4). "), (9, "reason 3; 5 more reasons). ")):
        run, findings = judged(*[(Verdict.FASTER, 0.5, Label.POWER_CAPPED)] * number)
        for place, record in enumerate(run.records[1::2]):
            reasons = ((Label.POWER_CAPPED, f"reason {place}"),)
            findings[record.case.id] = replace(findings[record.case.id], label_reasons=reasons)
        (text,) = (text for items in of_kind(part("environment", (run, findings)), Items) for text in items.items)
        assert end in text.text and text.tone is Tone.PLAIN


def test_a_long_reason_is_not_in_the_row() -> None:
    """Why quantisers ran eagerly is a sentence, and stands in the notes."""
    reasons = ((Label.EAGER_QUANTISER, "there is no compiler"), (Label.CONTENDED, "less than a fifth of a core"))
    run, findings = made(Verdict.FASTER, Label.CONTENDED, Label.EAGER_QUANTISER, reasons=reasons)
    result = panels_of(run, findings)[0].results[1]
    assert named_labels(result) == ("contended (less than a fifth of a core)", "eager-quantiser")
    assert "- bf16 eager-quantiser: there is no compiler" in render_whole(run, findings)


def test_eager_quantisers_are_told_with_the_reason_they_ran_so() -> None:
    """In the table's notes and legend, in CSV in the row of the step, in JSON with the stored fact, on the page."""
    why = "--quick compiles nothing"
    run, findings = transformer()
    *others, fp8 = run.records
    timed = replace(fp8, timing=replace(steady(60 * MS, 8), eager=why))
    run = replace(run, records=(*others, timed))
    reasons = ((Label.EAGER_QUANTISER, why),)
    findings[fp8.case.id] = replace(findings[fp8.case.id], labels=(Label.EAGER_QUANTISER,), label_reasons=reasons)
    sentence = LABELS[Label.EAGER_QUANTISER].meaning
    text = " ".join(render_whole(run, findings).split())
    for words in ("labels: eager-quantiser", f"eager-quantiser: {sentence}", f"- fp8 eager-quantiser: {why}"):
        assert words in text
    found = [row for row in rows(run, findings) if row["mode"] == "fp8"]
    (step,) = [row for row in found if (row["phase"], row["metric"]) == (STEP, "time")]
    assert (step["labels"], step["label_reasons"], step["why"]) == ("eager-quantiser", f"eager-quantiser: {why}", why)
    assert all(row["why"] is None for row in found if row["phase"] not in (STEP, None))
    record = run_value(run, findings)["records"][-1]
    assert record["finding"]["labels"] == ["eager-quantiser"]
    assert record["timing"]["eager"] == why and record["timing"]["fused"] is False
    remarks = [one.text for items in of_kind(part("environment", (run, findings)), Items) for one in items.items]
    begun = f"eager-quantiser (1 of 3 cases): {sentence} ({why}). Usual cause: "
    assert any(text.startswith(begun) for text in remarks)
    assert doubts(panels_of(run, findings)[0].results[-1]) == (f"eager-quantiser: {sentence} ({why})",)
