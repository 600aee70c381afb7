"""Figures of a case in a run."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.analysis.metric import Metric, Reference
from fp8bench.analysis.metrics import iterate_case_metrics
from fp8bench.model import Run, Status, specs
from fp8bench.model.specs import STEP, Better, Rank, explain_reserved_name
from tests.counts import for_each
from tests.energies import energetic
from tests.runs import gemm, measured, transformer


def told(run: Run, findings: object, mode: str) -> list[Metric]:
    """The figures of the first case that ran in `mode`."""
    record = next(record for record in run.records if record.case.mode == mode and record.status is Status.OK)
    lead = next(one for one in run.records if one.is_reference and one.case.setting == record.case.setting)
    return list(iterate_case_metrics(record, findings[record.case.id], Reference(lead)))  # type: ignore[index]


@for_each("make", [measured, gemm, transformer, energetic])
def test_every_figure_is_yielded_once_and_the_time_first(make: object) -> None:
    run, findings = make()  # type: ignore[operator]
    for record in run.records:
        found = list(iterate_case_metrics(record, findings.get(record.case.id)))
        keys = [(one.phase, one.about, one.name) for one in found]
        assert len(set(keys)) == len(keys) and keys[0] == (STEP, None, "time")
        measured_as_is = {measurement.metric for measurement in record.measurements}
        assert {one.name for one in found if not one.unit} <= {"amax", *measured_as_is}
        # A new figure takes its name from the vocabulary, which workloads may not use.
        own = measured_as_is - {specs.PEAK_MEMORY}
        assert all(map(explain_reserved_name, {one.name for one in found} - own)) and not any(
            map(explain_reserved_name, own)
        )


def test_derived_figures_have_their_values() -> None:
    run, findings = gemm()
    record = next(record for record in run.records if record.case.mode == "bf16" and record.status is Status.OK)
    finding = findings[record.case.id]
    rate = next(one for one in told(run, findings, "bf16") if one.name == "flops_per_second")
    assert finding.median_seconds and finding.best_seconds
    assert rate.value == record.work.flops / finding.median_seconds
    assert rate.best == record.work.flops / finding.best_seconds
    assert (rate.unit, rate.better) == ("FLOP/s", Better.HIGHER)
    found = {one.name: one for one in told(*energetic(), "bf16") if one.phase == STEP}
    assert found["energy"].interval.level == 0
    assert found["energy"].source and found["energy"].noisy and len(found["energy"].samples()) == found["energy"].count
    assert {"energy_per_token", "power"} <= set(found)
    run, findings = measured()
    restated = {
        metric.name
        for record in run.records
        for metric in iterate_case_metrics(record, findings.get(record.case.id))
        if metric.rank is Rank.RESTATED
    }
    assert (
        {"relative_time", "mean_time", "relative_mean_time", "seconds_per_tflop"}
        <= restated
        <= {
            "relative_time",
            "mean_time",
            "relative_mean_time",
            "seconds_per_tflop",
            "seconds_per_mtok",
            "seconds_per_gb",
        }
    )


def test_unmeasured_figures_have_no_value() -> None:
    run, _ = measured()
    record = next(record for record in run.records if record.timing is not None and record.timing.slots)
    found = list(iterate_case_metrics(record, None))
    times = [one for one in found if one.unit == "s"]
    assert all(one.best is None and one.value is None for one in times)
    assert found[0].samples() and len(found[0].samples()) == record.timing.num_rounds  # type: ignore[union-attr]
    run, findings = measured()
    failed = [record for record in run.records if record.status is not Status.OK]
    for record in failed:
        first = next(iterate_case_metrics(record, findings.get(record.case.id)))
        assert first.value is None and not first.samples()
    kept = replace(run.records[0], memory=None, energy=None, capacity=None)
    assert not {"energy", "resident_memory", "max_batch"} & {metric.name for metric in iterate_case_metrics(kept, None)}
