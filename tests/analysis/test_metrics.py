"""What a run says of a case, figure by figure."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.analysis.metric import Metric, Reference
from fp8bench.analysis.metrics import metrics_of
from fp8bench.model import Run, Status, specs
from fp8bench.model.specs import STEP, Better, Rank, taken
from tests.counts import for_each
from tests.energies import energetic
from tests.runs import gemm, measured, transformer


def told(run: Run, findings: object, mode: str) -> list[Metric]:
    """Of the first case that ran in a mode."""
    record = next(one for one in run.records if one.case.mode == mode and one.status is Status.OK)
    lead = next(one for one in run.records if one.is_reference and one.case.setting == record.case.setting)
    return list(metrics_of(record, findings[record.case.id], Reference(lead)))  # type: ignore[index]


@for_each("make", [measured, gemm, transformer, energetic])
def test_every_figure_is_told_once_and_the_time_first(make: object) -> None:
    """By its phase, its name and what data it is of; each has a unit unless it is a plain magnitude."""
    run, findings = make()  # type: ignore[operator]
    for record in run.records:
        found = list(metrics_of(record, findings.get(record.case.id)))
        keys = [(one.phase, one.about, one.name) for one in found]
        assert len(set(keys)) == len(keys) and keys[0] == (STEP, None, "time")
        measured_as_is = {one.metric for one in record.measurements}
        assert {one.name for one in found if not one.unit} <= {"amax", *measured_as_is}


@for_each("make", [measured, gemm, transformer, energetic])
def test_no_workload_may_take_the_name_of_a_figure(make: object) -> None:
    """Whatever is told beside what the workload itself measures: a new figure has its name from the vocabulary."""
    run, findings = make()  # type: ignore[operator]
    for record in run.records:
        own = {one.metric for one in record.measurements} - {specs.PEAK_MEMORY}
        told = {one.name for one in metrics_of(record, findings.get(record.case.id))}
        assert all(map(taken, told - own)) and not any(map(taken, own))


def test_throughput_is_that_of_the_median_step_with_the_best_beside_it() -> None:
    run, findings = gemm()
    record = next(one for one in run.records if one.case.mode == "bf16" and one.status is Status.OK)
    finding = findings[record.case.id]
    rate = next(one for one in told(run, findings, "bf16") if one.name == "flops_per_second")
    assert finding.median_seconds and finding.best_seconds
    assert rate.value == record.work.flops / finding.median_seconds
    assert rate.best == record.work.flops / finding.best_seconds
    assert (rate.unit, rate.better) == ("FLOP/s", Better.HIGHER)


def test_what_restates_another_figure_says_so() -> None:
    """The history and comparisons have it as a figure of its own; rows have it in a column."""
    run, findings = measured()
    restated = {one.name for record in run.records for one in metrics_of(record, findings.get(record.case.id))
                if one.rank is Rank.RESTATED}  # fmt: skip
    assert {"relative_time", "mean_time", "relative_mean_time", "seconds_per_tflop"} <= restated <= {
        "relative_time", "mean_time", "relative_mean_time", "seconds_per_tflop", "seconds_per_mtok", "seconds_per_gb",
    }  # fmt: skip


def test_energy_is_over_the_reference_s_and_counted_for_what_a_step_does() -> None:
    found = {one.name: one for one in told(*energetic(), "bf16") if one.phase == STEP}
    assert found["energy"].interval is not None and found["energy"].interval.level == 0
    assert found["energy"].source and found["energy"].noisy and len(found["energy"].samples()) == found["energy"].count
    assert {"energy_per_token", "power"} <= set(found)


def test_without_a_finding_there_are_samples_and_no_best_case() -> None:
    """That is how the history reads hundreds of runs: nothing is worked out that it does not ask for."""
    run, _ = measured()
    record = next(one for one in run.records if one.timing is not None and one.timing.slots)
    found = list(metrics_of(record, None))
    times = [one for one in found if one.unit == "s"]
    assert all(one.best is None and one.value is None for one in times)
    assert found[0].samples() and len(found[0].samples()) == record.timing.num_rounds  # type: ignore[union-attr]


def test_what_was_not_measured_has_its_reason_and_no_value() -> None:
    run, findings = measured()
    failed = [one for one in run.records if one.status is not Status.OK]
    for record in failed:
        first = next(metrics_of(record, findings.get(record.case.id)))
        assert first.value is None and not first.samples()
    kept = replace(run.records[0], memory=None, energy=None, capacity=None)
    assert not {"energy", "resident_memory", "max_batch"} & {one.name for one in metrics_of(kept, None)}
