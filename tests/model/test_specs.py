"""A metric is one row: a new figure is one spec."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import replace

import pytest

from docs import reference
from fp8bench.analysis import metrics
from fp8bench.analysis.compare.sides import Sighting, match_exact_costs
from fp8bench.analysis.findings import findings
from fp8bench.analysis.metric import Metric, MetricSources
from fp8bench.features.gate.thresholds import FigureThreshold, find_threshold
from fp8bench.model import Comparison, Direction, Evidence, Run, specs
from fp8bench.model.codec import decode, encode
from fp8bench.model.specs import METRICS, MetricSpec, Rank, explain_reserved_name
from fp8bench.report.data.loggers import iterate_run_scalars
from fp8bench.report.data.plain import csv_text
from fp8bench.report.data.run import run_document, run_rows
from fp8bench.report.elements import Table
from fp8bench.report.topics.results import results_section
from fp8bench.store import points
from fp8bench.store.points import extract_history_points
from tests.materials import material
from tests.runs import render_whole
from tests.store.test_points import BF16, FP32, run, samples

RESERVE = MetricSpec(
    "reserve",
    "B",
    "half of what tensors hold",
    rank=Rank.MAIN,
    heading="half",
    table="cases",
    history="half of the memory of a step",
    threshold=(0.5, 1024.0),
    page="method.md",
)


def reserve(told: MetricSources) -> Iterator[Metric]:
    peak = told.record.measurement(specs.PEAK_MEMORY)
    if peak is not None:
        half = peak.samples[0] / 2
        yield Metric(RESERVE, half, samples=lambda: (half,))


@pytest.fixture(params=["cases", "spare"])
def spec(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[MetricSpec]:
    """A spec in an existing table or a new one."""
    made = replace(RESERVE, table=request.param)
    monkeypatch.setitem(METRICS, made.name, made)
    monkeypatch.setattr(metrics, "METRIC_FUNCTIONS", [*metrics.METRIC_FUNCTIONS, reserve])
    caches = points._cached_metrics, points._make_cached_series, points._check_workload_grid
    for one in caches:
        one.cache_clear()
    yield made
    for one in caches:
        one.cache_clear()


def test_tables_and_rows_have_it(spec: MetricSpec) -> None:
    kept = decode(Run, encode(run()))
    said = findings(kept)
    text = render_whole(kept, said, 200)
    (heads,) = [line for line in text.splitlines() if " half" in line]
    assert ("verdict" in heads) is (spec.table == "cases") and "1.00 KiB" in text and "2.00 KiB" in text
    tables = [one for one in results_section(material((kept, said))) if isinstance(one, Table)]
    by_title = {}
    for table in tables:
        by_title.update({column.title: table for column in table.columns})
    texts = []
    for row in by_title["half"].rows:
        texts += [field.text for field in row]
    assert "1.00 KiB" in texts
    rows = [row for row in csv.DictReader(io.StringIO(csv_text(*run_rows([(kept, said)])))) if row["metric"] == spec]
    assert [(row["unit"], row["median_in_unit"]) for row in rows] == [("B", "2048.0"), ("B", "1024.0")]
    assert run_document(kept, said)["records"][1]["metrics"][spec] == 1024.0
    assert [value for name, _, value in iterate_run_scalars(kept, said) if "/reserve_bytes " in name] == [
        2048.0,
        1024.0,
    ]


def test_the_history_comparisons_and_the_gate_have_it(spec: MetricSpec) -> None:
    assert "gemm.Gemm.track_reserve" in [one.name for one in extract_history_points(run()).series]
    assert [samples(run(), precision)[spec] for precision in ("fp32", "bf16")] == [(2048.0,), (1024.0,)]
    sides = [[Sighting(run(), record, None)] for record in (FP32, BF16)]
    assert (2048.0, 1024.0) in [
        (old[0], new[0]) for metric, old, new in match_exact_costs(*sides) if metric.name == spec
    ]
    one = Comparison("gemm", "gemm", spec, spec.unit, Direction.WORSE, Evidence.CROSS_RUN)
    assert find_threshold(one) == FigureThreshold(0.5, 1024.0)


def test_the_docs_have_a_line_of_it(spec: MetricSpec) -> None:
    more = "([method.md](../method.md))"
    assert ("`reserve`", "B", "lower", "half", f"half of what tensors hold {more}") in reference.outputs_rows()
    assert ("`track_reserve`", "bytes", f"half of the memory of a step {more}") in reference.history_rows()
    assert ("`reserve`", "50%", "1.00 KiB") in reference.gate_rows()
    assert explain_reserved_name(spec)
