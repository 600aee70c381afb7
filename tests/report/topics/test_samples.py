"""The section of samples: rounds in their order where a label says that times moved."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import Label
from fp8bench.report.elements import Lines
from fp8bench.report.topics.results import samples_section
from tests.counts import for_each
from tests.materials import material
from tests.runs import measured


@for_each(
    ("labels", "drawn"),
    [((), []), ((Label.NOISY,), []), ((Label.DRIFT,), ["bf16"]), ((Label.CONTENDED, Label.BIMODAL), ["bf16"])],
)
def test_rounds_are_drawn_in_their_order_where_times_moved(labels: tuple[Label, ...], drawn: list[str]) -> None:
    run, findings = measured()
    native = next(record for record in run.records if record.case.precision == "bf16" and record.timing)
    findings = {name: replace(finding, labels=()) for name, finding in findings.items()}
    findings[native.case.id] = replace(findings[native.case.id], labels=labels)
    charts = [part for part in samples_section(material((run, findings))) if isinstance(part, Lines)]
    assert [chart.name for chart in charts] == ["rounds-in-order"] * len(drawn)
    for chart in charts:
        ((name, marks),) = chart.series
        assert "bf16" in name and len(marks) == len(chart.places) == 12
        first, last = marks[0], marks[-1]
        assert first is not None and last is not None and first.value < 1 < last.value
