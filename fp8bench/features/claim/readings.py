"""Figures of stored runs and trainings, each with its interval, or with the reason why it decides nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from operator import mul, truediv

from fp8bench.analysis.energy import Demand
from fp8bench.analysis.findings import findings
from fp8bench.analysis.metric import Metric, Reference
from fp8bench.analysis.metrics import metrics_of
from fp8bench.errors import UsageError
from fp8bench.features.claim.rows import resolution_of
from fp8bench.features.claim.values import SPEEDUPS, Claim, Reading
from fp8bench.features.train.values import KeptTraining
from fp8bench.features.train.verdicts.summary import ArmSummary, JudgedTraining, figures_of
from fp8bench.model import Finding, Record, Run
from fp8bench.model.specs import ENERGY, STEP, TIME, spec_of
from fp8bench.registry import precisions

# Figures of an emulated case that are those of a device with the format; all other costs are the emulation's.
_OF_A_DEVICE = ("device_peak_memory", "device_max_batch", "useful_flops", "wire_bytes", "logical_bytes")
_EMULATED = "{} is emulated on this device, so {} is the emulation's and says nothing about the precision"
# Costs of a training's arm that an emulation changes.
_ARM_COSTS = ("tokens_per_second", "peak_memory", "joules_per_step")


def read_figure(claim: Claim, run: Run | KeptTraining) -> Reading:
    """Returns the claim's figure. Raises UsageError if the run has no such case, or several."""
    if not isinstance(run, Run):
        return _read_training(claim, run)
    records = _find_cases(claim, run)
    return _add_up(claim, run, records) if claim.sum else _read_case(claim, run, records[0])


def _add_up(claim: Claim, run: Run, records: Sequence[Record]) -> Reading:
    """Returns the sum of a figure over cases; a ratio is the ratio of the sums. Ends of intervals are added up in the
    same way."""
    readings, weights = [], []
    for record in records:
        reading = _read_case(claim, run, record)
        if reading.why or reading.value is None or reading.low is None or reading.high is None:
            return reading
        readings.append((reading.value, reading.low, reading.high))
        # Ratios are weighted by the reference, so that the result is the ratio of the sums.
        base = _base_value(claim, run, record) if claim.is_ratio else 1.0
        if base is None:
            return Reading(None, run=run.id, why=f"{claim.metric} of the reference is unknown or 0")
        weights.append(base)

    def add_up(figures: Sequence[float]) -> float:
        weigh = truediv if claim.figure in SPEEDUPS else mul
        total: float = sum(map(weigh, weights, figures))
        if claim.figure in SPEEDUPS:
            return sum(weights) / total
        return total / sum(weights) if claim.is_ratio else total

    value, low, high = map(add_up, zip(*readings, strict=True))
    return Reading(value, low, high, run.id)


def _read_case(claim: Claim, run: Run, record: Record) -> Reading:
    # 1. The case, its reference and their metrics.
    mode = record.case.mode
    if not record.is_ok:
        return Reading(None, run=run.id, why=f"{mode} was {record.status.value}: {record.reason}")
    judged = findings(run)
    finding = judged.get(record.case.id)
    metrics = _metrics(record, finding, run)
    name = claim.metric
    metric = metrics.get(name)
    reference = _reference_of(record, run)
    if claim.is_ratio and reference is not None and (baseline := _baseline_in(claim.sentence, reference.case.mode)):
        why = f"the sentence compares with {baseline}, and the reference of the run is {reference.case.mode}"
        return Reading(None, run=run.id, why=why)
    if metric is None:
        names = ", ".join(metrics)
        raise UsageError(f"{claim.id}: the run {run.id} has no figure {name} of {mode}. It has {names}.")
    # 2. Costs of an emulation are not the precision's.
    if metric.cost or (record.support.is_emulated and not metric.spec.of_workload and name not in _OF_A_DEVICE):
        return Reading(None, run=run.id, why=_EMULATED.format(mode, metric.name))
    # 3. A device that was throttled or shared gives no time, rate or energy.
    if metric.noisy and finding is not None and finding.hard:
        why = f"the device was not in a state to be timed ({', '.join(finding.hard)})"
        return Reading(None, run=run.id, why=why)
    if claim.figure in SPEEDUPS:
        return _speed_up(metric, finding, run)
    value = _typical(metric)
    if value is None:
        return Reading(None, run=run.id, why=metric.why or f"{name} was not measured")
    # 4. The figure, or its ratio to the reference's, with the distance of its quartiles if it is noisy.
    step = resolution_of(claim, spec_of(name))
    if metric.noisy and finding is not None:
        step = max(step, finding.spread or 0.0)
    if not claim.is_ratio:
        low, high = metric.bounds or (value - step * abs(value), value + step * abs(value))
        return Reading(value, low, high, run.id)
    return _ratio(claim, metric, record, finding, run, step, value)


def _typical(metric: Metric) -> float | None:
    return metric.value if metric.best is None else metric.best


def _base_value(claim: Claim, run: Run, record: Record) -> float | None:
    """Returns the metric of the case's reference, None if it is unknown or 0."""
    reference = _reference_of(record, run)
    if reference is None:
        return None
    metric = _metrics(reference, findings(run).get(reference.case.id), run).get(claim.metric)
    return _typical(metric) or None if metric is not None else None


def _baseline_in(sentence: str, reference: str) -> str:
    """Returns the precision that a sentence compares with, if it is not the run's reference; else ''."""
    for name in re.findall(r"\b(?:than|over|against|versus|vs\.?) (?:the )?([\w-]+)", sentence):
        if name.lower() in precisions.names() and name.lower() != reference.partition(":")[0]:
            return str(name)
    return ""


def _ratio(
    claim: Claim, metric: Metric, record: Record, finding: Finding | None, run: Run, step: float, value: float
) -> Reading:
    """Returns the figure over the reference's, with the interval of rounds where there is one."""
    name, reference = claim.metric, _reference_of(record, run)
    is_cost = not metric.spec.of_workload and name not in _OF_A_DEVICE
    if reference is not None and reference.support.is_emulated and is_cost:
        return Reading(None, run=run.id, why=_EMULATED.format(f"the reference {reference.case.mode}", name))
    if metric.interval is not None:
        # A ratio of times is the speed-up's inverse, and as uncertain. A ratio of energies has no interval, but a range
        # over all pairs of windows; it counts if the windows of both cases differ clearly.
        is_clear = metric.verdict in (Demand.LESS, Demand.MORE) and name == str(ENERGY)
        if metric.interval.level == 0 and not is_clear:
            return Reading(None, run=run.id, why=metric.why or "too few rounds for an interval")
        floor = 1 + ((finding.floor or 0.0) if finding is not None and name == str(TIME) else 0.0)
        return Reading(metric.interval.point, metric.interval.low / floor, metric.interval.high * floor, run.id)
    base = _base_value(claim, run, record)
    if base is None:
        return Reading(None, run=run.id, why=f"{name} of the reference is unknown or 0")
    ratio = value / base
    return Reading(ratio, ratio * (1 - step), ratio * (1 + step), run.id)


def _find_cases(claim: Claim, run: Run) -> list[Record]:
    """Returns the case that the claim is about; for a sum all that fit."""
    fitting = []
    for record in run.records:
        facts = {"mode": record.case.mode, **{name: str(value) for name, value in record.case.params}}
        if all(facts.get(name) == value for name, value in claim.case):
            fitting.append(record)
    if len(fitting) == 1 or (fitting and claim.sum):
        return fitting
    words = ", ".join(f"{name} = {value}" for name, value in claim.case) or "nothing"
    modes = ", ".join(dict.fromkeys(record.case.mode for record in run.records))
    raise UsageError(
        f"{claim.id}: {len(fitting)} cases of the run {run.id} match `case` ({words}), and exactly one must. The run's "
        f"modes are {modes}; the remaining keys are axes of the suite."
    )


def _reference_of(record: Record, run: Run) -> Record | None:
    references = (candidate for candidate in run.records if candidate.is_reference)
    return next((reference for reference in references if reference.case.setting == record.case.setting), None)


def _metrics(record: Record, finding: Finding | None, run: Run) -> dict[str, Metric]:
    """Returns the metrics of a whole step by name; the first of a name counts."""
    base = _reference_of(record, run)
    metrics: dict[str, Metric] = {}
    for metric in metrics_of(record, finding, Reference(base) if base is not None else None):
        if metric.phase == STEP:
            metrics.setdefault(metric.name, metric)
    return metrics


def _speed_up(metric: Metric, finding: Finding | None, run: Run) -> Reading:
    """Returns the speed-up with its interval, widened by what identical code differs by in this run."""
    if metric.interval is None or finding is None or metric.interval.level == 0:
        return Reading(None, run=run.id, why=metric.why or "too few rounds for an interval")
    speed = metric.interval.inverse
    floor = 1 + (finding.floor or 0.0)
    return Reading(speed.point, speed.low / floor, speed.high * floor, run.id)


def _read_training(claim: Claim, run: KeptTraining) -> Reading:
    judged = JudgedTraining(run)
    training = run.training
    name = claim.metric
    arm_name = dict(claim.case).get("arm", "")
    summaries = {summary.arm.name: summary for summary in judged.summaries}
    if arm_name not in summaries:
        arms = ", ".join(summaries)
        raise UsageError(
            f"{claim.id}: the training {training.id} has no arm {arm_name!r}. Set case.arm to one of {arms}."
        )
    summary = summaries[arm_name]
    if summary.arm.skip:
        return Reading(None, run=training.id, why=f"{arm_name} was not trained: {summary.arm.skip}")
    if name in _ARM_COSTS and not summary.arm.native:
        return Reading(None, run=training.id, why=_EMULATED.format(arm_name, name))
    figures = figures_of(summary, judged.verdicts)
    value = figures.get(name)
    if name in ("gap", "held_out_gap"):
        return _gap(name, figures, training.id)
    if claim.is_ratio:
        reference: ArmSummary = judged.summaries[0]
        if name in _ARM_COSTS and not reference.arm.native:
            return Reading(None, run=training.id, why=_EMULATED.format(reference.arm.name, name))
        base = figures_of(reference, judged.verdicts).get(name)
        value = value / base if value is not None and base else None
    if value is None:
        return Reading(None, run=training.id, why=f"{name} of {arm_name} is unknown")
    step = resolution_of(claim, None)
    return Reading(value, value * (1 - step), value * (1 + step), training.id)


def _gap(name: str, figures: Mapping[str, float | None], training: str) -> Reading:
    """Returns a loss gap with its interval of 99%; a training with too few seeds has none."""
    value, low, high = figures[name], figures[f"{name}_deciding_low"], figures[f"{name}_deciding_high"]
    if low is None or high is None:
        return Reading(value, run=training, why="too few seeds for an interval: raise --seeds")
    return Reading(value, low, high, training)
