"""The label eager-quantiser: its sentence and its reason in table, CSV, JSON and the report's sections."""

from __future__ import annotations

import json
from dataclasses import replace

from fp8bench.analysis.metric import STEP
from fp8bench.model import Finding, Label, Run
from fp8bench.report.case_status import doubts
from fp8bench.report.data.run import as_csv, as_json
from fp8bench.report.data.tidy import rows
from fp8bench.report.elements import Items
from fp8bench.report.panels import panels_of
from fp8bench.report.terminal.run import render
from fp8bench.report.words import legend
from tests.fakes import MS, steady
from tests.materials import of_kind, part
from tests.runs import transformer

WHY = "--quick compiles nothing"


def eager() -> tuple[Run, dict[str, Finding]]:
    """The emulated fp8 of the transformer, timed with eager quantisers."""
    run, findings = transformer()
    *others, fp8 = run.records
    timed = replace(fp8, timing=replace(steady(60 * MS, 8), eager=WHY))
    findings[fp8.case.id] = replace(
        findings[fp8.case.id], labels=(Label.EAGER_QUANTISER,), label_reasons=((Label.EAGER_QUANTISER, WHY),)
    )
    return replace(run, records=(*others, timed)), findings


def test_the_table_names_the_label_its_meaning_and_its_reason() -> None:
    """Under the row, in the legend, and in the notes."""
    text = " ".join(render(*eager()).split())

    assert "labels: eager-quantiser" in text
    assert f"eager-quantiser: {legend.LABELS[Label.EAGER_QUANTISER]}" in text
    assert f"- fp8 eager-quantiser: {WHY}" in text


def test_csv_has_label_and_reason_in_the_row_of_the_steps_time() -> None:
    """The phases have the label alone."""
    run, findings = eager()
    fp8 = [row for row in rows(run, findings) if row["mode"] == "fp8"]
    (step,) = [row for row in fp8 if (row["phase"], row["metric"]) == (STEP, "time")]

    assert (step["labels"], step["label_reasons"], step["why"]) == ("eager-quantiser", f"eager-quantiser: {WHY}", WHY)
    assert all(row["why"] is None for row in fp8 if row["phase"] not in (STEP, None))
    assert WHY in as_csv(run, findings)


def test_json_has_the_label_and_the_fact() -> None:
    """The one computed, the other stored."""
    fp8 = json.loads(as_json(*eager()))["records"][-1]

    assert fp8["finding"]["labels"] == ["eager-quantiser"]
    assert fp8["timing"]["eager"] == WHY and fp8["timing"]["fused"] is False


def test_the_report_explains_it() -> None:
    """Among the remarks on the run, and as the hint of the row's word."""
    run, findings = eager()
    remarks = [text.text for items in of_kind(part("environment", (run, findings)), Items) for text in items.items]
    wanted = f"eager-quantiser (1 of 3 cases): {legend.LABELS[Label.EAGER_QUANTISER]} ({WHY})"

    assert wanted in remarks
    fp8 = next(one for one in panels_of(run, findings)[0].results if one.mode == "fp8")
    assert doubts(fp8) == (f"eager-quantiser: {legend.LABELS[Label.EAGER_QUANTISER]} ({WHY})",)
