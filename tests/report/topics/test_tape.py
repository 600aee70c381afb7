"""A step's operators on the page: counts by phase, and the paths of its traces."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import PhaseCount, Request
from fp8bench.report.elements import Table, Text
from tests.materials import built, of_kind, part, told
from tests.rooflines import made
from tests.runs import transformer


def test_what_a_compiler_fused_is_said_and_without_tapes_nothing_is() -> None:
    run, findings = made()
    first, *others = run.records
    assert first.tape is not None
    fused = replace(first, tape=replace(first.tape, fused="torch.compile: uncompiled", unwritten=2))
    said = " ".join(told(part("tape", (replace(run, records=(fused, *others)), findings)).elements))
    assert (
        "bf16: torch.compile: uncompiled" in said
        and "bf16: 2 tensors were written outside of torch's operators" in said
    )
    bare = tuple(replace(record, tape=None) for record in run.records)
    assert built("tape", (replace(run, records=bare), findings)) is None


def test_a_phase_that_counted_nothing_and_a_column_without_counts_are_left_out() -> None:
    run, findings = made()
    first, *others = run.records
    assert first.tape is not None
    idle = replace(first, tape=replace(first.tape, phases=(*first.tape.phases, PhaseCount("decode"))))
    (shown,) = of_kind(part("tape", (replace(run, records=(idle, *others)), findings)), Table)
    assert "decode" not in [row[1].text for row in shown.rows]
    for place, column in enumerate(shown.columns):
        assert any(row[place].text not in ("", "-", "0") for row in shown.rows), column.title


def test_traces_are_said_to_lie_where_they_were_asked_for() -> None:
    run, findings = transformer()
    records = tuple(replace(record, trace="a/b.pt.trace.json.gz") for record in run.records)
    for request, words in (
        (Request("x", trace="traces"), "The traces are in traces, one folder per case. "),
        (Request("x"), ""),
    ):
        (text,) = of_kind(part("traces", (replace(run, records=records, request=request), findings)), Text)
        assert text.text.startswith(f"{words}ui.perfetto.dev")
