"""Reads the figure of a claim from a stored run or training. Each figure has an interval, or the reason why it
decides nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from operator import mul, truediv

from fp8bench.analysis.energy import Demand
from fp8bench.analysis.findings import findings
from fp8bench.analysis.metric import Metric, Reference
from fp8bench.analysis.metrics import metrics_of
from fp8bench.errors import UsageError
from fp8bench.features.claim.rows import find_resolution
from fp8bench.features.claim.values import SPEEDUPS, Claim, Reading
from fp8bench.features.train.values import KeptTraining
from fp8bench.features.train.verdicts.summary import ArmSummary, JudgedTraining, list_figures
from fp8bench.model import Finding, Record, Run
from fp8bench.model.specs import ENERGY, STEP, TIME, spec_of
from fp8bench.registry import precisions

# Figures of an emulated case that would be the same on a device with the format. All other costs are those of the
# emulation.
_DEVICE_FIGURES = ("device_peak_memory", "device_max_batch", "useful_flops", "wire_bytes", "logical_bytes")
_EMULATED_TEXT = "{} is emulated on this device, so its {} is that of the emulation, not of the precision"
# Costs of a training arm that emulation changes.
_ARM_COST_FIGURES = ("tokens_per_second", "peak_memory", "joules_per_step")


def read_figure(claim: Claim, run: Run | KeptTraining) -> Reading:
    """Returns the claim's figure from a run. Raises UsageError if the run has no case that matches the claim, or
    several.
    """
    if not isinstance(run, Run):
        return _read_training(claim, run)
    records = _find_cases(claim, run)
    return _sum_cases(claim, run, records) if claim.sum else _read_case(claim, run, records[0])


def _sum_cases(claim: Claim, run: Run, records: Sequence[Record]) -> Reading:
    """Returns the sum of a figure over several cases. The ends of the intervals are summed in the same way. For a
    ratio, returns the ratio of the two sums.
    """
    readings = []
    weights = []
    for record in records:
        reading = _read_case(claim, run, record)
        if reading.why or reading.value is None or reading.low is None or reading.high is None:
            return reading
        readings.append((reading.value, reading.low, reading.high))
        # Weight each ratio by its reference, so that the result is the ratio of the sums.
        reference_value = _read_reference_value(claim, run, record) if claim.is_ratio else 1.0
        if reference_value is None:
            return Reading(None, run=run.id, why=f"{claim.metric} of the reference is unknown or 0")
        weights.append(reference_value)

    def sum_figures(figures: Sequence[float]) -> float:
        apply_weight = truediv if claim.figure in SPEEDUPS else mul
        total: float = sum(map(apply_weight, weights, figures))
        if claim.figure in SPEEDUPS:
            return sum(weights) / total
        return total / sum(weights) if claim.is_ratio else total

    value, low, high = map(sum_figures, zip(*readings, strict=True))
    return Reading(value, low, high, run.id)


def _read_case(claim: Claim, run: Run, record: Record) -> Reading:
    # 1. Find the case, its reference and their metrics.
    mode = record.case.mode
    if not record.is_ok:
        return Reading(None, run=run.id, why=f"{mode} was {record.status.value}: {record.reason}")
    finding_by_case = findings(run)
    finding = finding_by_case.get(record.case.id)
    metrics = _list_step_metrics(record, finding, run)
    name = claim.metric
    metric = metrics.get(name)
    reference = _find_reference(record, run)
    if (
        claim.is_ratio
        and reference is not None
        and (baseline := _find_other_baseline(claim.sentence, reference.case.mode))
    ):
        why = f"the sentence compares with {baseline}, but the reference of the run is {reference.case.mode}"
        return Reading(None, run=run.id, why=why)
    if metric is None:
        metric_names = ", ".join(metrics)
        raise UsageError(f"{claim.id}: the run {run.id} has no figure {name} of {mode}. It has {metric_names}.")
    # 2. Refuse costs of an emulation, because they are not the costs of the precision.
    if metric.cost or (record.support.is_emulated and not metric.spec.of_workload and name not in _DEVICE_FIGURES):
        return Reading(None, run=run.id, why=_EMULATED_TEXT.format(mode, metric.name))
    # 3. A throttled or shared device gives no time, rate or energy.
    if metric.noisy and finding is not None and finding.hard:
        why = f"the device could not be timed reliably ({', '.join(finding.hard)})"
        return Reading(None, run=run.id, why=why)
    if claim.figure in SPEEDUPS:
        return _read_speedup(metric, finding, run)
    value = _get_typical_value(metric)
    if value is None:
        return Reading(None, run=run.id, why=metric.why or f"{name} was not measured")
    # 4. Return the figure, or its ratio to the reference. A noisy figure gets the distance of its quartiles as
    # interval.
    relative_error = find_resolution(claim, spec_of(name))
    if metric.noisy and finding is not None:
        relative_error = max(relative_error, finding.spread or 0.0)
    if not claim.is_ratio:
        low, high = metric.bounds or (value - relative_error * abs(value), value + relative_error * abs(value))
        return Reading(value, low, high, run.id)
    return _read_ratio(claim, metric, record, finding, run, relative_error, value)


def _get_typical_value(metric: Metric) -> float | None:
    return metric.value if metric.best is None else metric.best


def _read_reference_value(claim: Claim, run: Run, record: Record) -> float | None:
    """Returns the metric of the case's reference, or None if it is unknown or 0."""
    reference = _find_reference(record, run)
    if reference is None:
        return None
    metric = _list_step_metrics(reference, findings(run).get(reference.case.id), run).get(claim.metric)
    return _get_typical_value(metric) or None if metric is not None else None


def _find_other_baseline(sentence: str, reference: str) -> str:
    """Returns the precision with which a sentence compares. Returns '' if that is the run's reference."""
    for name in re.findall(r"\b(?:than|over|against|versus|vs\.?) (?:the )?([\w-]+)", sentence):
        if name.lower() in precisions.names() and name.lower() != reference.partition(":")[0]:
            return str(name)
    return ""


def _read_ratio(
    claim: Claim, metric: Metric, record: Record, finding: Finding | None, run: Run, relative_error: float, value: float
) -> Reading:
    """Returns the case's figure divided by the reference's figure. The interval is over rounds, if there is one."""
    name = claim.metric
    reference = _find_reference(record, run)
    is_cost = not metric.spec.of_workload and name not in _DEVICE_FIGURES
    if reference is not None and reference.support.is_emulated and is_cost:
        return Reading(None, run=run.id, why=_EMULATED_TEXT.format(f"the reference {reference.case.mode}", name))
    if metric.interval is not None:
        # A ratio of times is the inverse of the speed-up, with the same uncertainty. A ratio of energies has no
        # interval, only a range over all pairs of windows. It counts if the windows of the two cases clearly differ.
        is_clear = metric.verdict in (Demand.LESS, Demand.MORE) and name == str(ENERGY)
        if metric.interval.level == 0 and not is_clear:
            return Reading(None, run=run.id, why=metric.why or "too few rounds for an interval")
        noise_factor = 1 + ((finding.floor or 0.0) if finding is not None and name == str(TIME) else 0.0)
        return Reading(
            metric.interval.point, metric.interval.low / noise_factor, metric.interval.high * noise_factor, run.id
        )
    reference_value = _read_reference_value(claim, run, record)
    if reference_value is None:
        return Reading(None, run=run.id, why=f"{name} of the reference is unknown or 0")
    ratio = value / reference_value
    return Reading(ratio, ratio * (1 - relative_error), ratio * (1 + relative_error), run.id)


def _find_cases(claim: Claim, run: Run) -> list[Record]:
    """Returns the cases of a run that match the claim's `case`. There must be exactly one, or at least one if the
    claim asks for their sum. Otherwise raises UsageError.
    """
    matching_records = []
    for record in run.records:
        facts = {"mode": record.case.mode, **{name: str(value) for name, value in record.case.params}}
        if all(facts.get(name) == value for name, value in claim.case):
            matching_records.append(record)
    if len(matching_records) == 1 or (matching_records and claim.sum):
        return matching_records
    case_text = ", ".join(f"{name} = {value}" for name, value in claim.case) or "nothing"
    modes = ", ".join(dict.fromkeys(record.case.mode for record in run.records))
    raise UsageError(
        f"{claim.id}: {len(matching_records)} cases of the run {run.id} match `case` ({case_text}), "
        "and exactly one must. The run's "
        f"modes are {modes}; other keys of `case` are axes of the suite."
    )


def _find_reference(record: Record, run: Run) -> Record | None:
    references = (candidate for candidate in run.records if candidate.is_reference)
    return next((reference for reference in references if reference.case.setting == record.case.setting), None)


def _list_step_metrics(record: Record, finding: Finding | None, run: Run) -> dict[str, Metric]:
    """Returns the metrics of a complete step by name. If several metrics have one name, the first one counts."""
    reference_record = _find_reference(record, run)
    metrics: dict[str, Metric] = {}
    for metric in metrics_of(record, finding, Reference(reference_record) if reference_record is not None else None):
        if metric.phase == STEP:
            metrics.setdefault(metric.name, metric)
    return metrics


def _read_speedup(metric: Metric, finding: Finding | None, run: Run) -> Reading:
    """Returns the speed-up with its interval. The interval is widened by the difference that this run shows between
    identical code.
    """
    if metric.interval is None or finding is None:
        return Reading(None, run=run.id, why=metric.why or "too few rounds for an interval")
    speedup = metric.interval.inverse
    if metric.interval.level == 0:
        reason = f"too few rounds for an interval: they gave {speedup.low:.3g} x to {speedup.high:.3g} x"
        return Reading(speedup.point, run=run.id, why=metric.why or reason)
    noise_factor = 1 + (finding.floor or 0.0)
    return Reading(speedup.point, speedup.low / noise_factor, speedup.high * noise_factor, run.id)


def _read_training(claim: Claim, run: KeptTraining) -> Reading:
    judged_training = JudgedTraining(run)
    training = run.training
    name = claim.metric
    arm_name = dict(claim.case).get("arm", "")
    summaries = {summary.arm.name: summary for summary in judged_training.summaries}
    if arm_name not in summaries:
        arms = ", ".join(summaries)
        raise UsageError(
            f"{claim.id}: the training {training.id} has no arm {arm_name!r}. Set case.arm to one of {arms}."
        )
    summary = summaries[arm_name]
    if summary.arm.skip:
        return Reading(None, run=training.id, why=f"{arm_name} was not trained: {summary.arm.skip}")
    if name in _ARM_COST_FIGURES and not summary.arm.native:
        return Reading(None, run=training.id, why=_EMULATED_TEXT.format(arm_name, name))
    figures = list_figures(summary, judged_training.verdicts)
    value = figures.get(name)
    if name in ("gap", "held_out_gap"):
        return _read_gap(name, figures, training.id)
    if claim.is_ratio:
        reference: ArmSummary = judged_training.summaries[0]
        if name in _ARM_COST_FIGURES and not reference.arm.native:
            return Reading(None, run=training.id, why=_EMULATED_TEXT.format(reference.arm.name, name))
        reference_value = list_figures(reference, judged_training.verdicts).get(name)
        value = value / reference_value if value is not None and reference_value else None
    if value is None:
        return Reading(None, run=training.id, why=f"{name} of {arm_name} is unknown")
    relative_error = find_resolution(claim, None)
    return Reading(value, value * (1 - relative_error), value * (1 + relative_error), training.id)


def _read_gap(name: str, figures: Mapping[str, float | None], training: str) -> Reading:
    """Returns a loss gap with its 99% interval. A training with too few seeds has no interval."""
    value = figures[name]
    low = figures[f"{name}_deciding_low"]
    high = figures[f"{name}_deciding_high"]
    if low is None or high is None:
        return Reading(value, run=training, why="too few seeds for an interval: raise --seeds")
    return Reading(value, low, high, training)
