"""Figures of stored runs and trainings, each with its interval, or with the reason why it decides nothing."""

from __future__ import annotations

from collections.abc import Mapping

from fp8bench.analysis.findings import findings
from fp8bench.analysis.metric import Metric, Reference
from fp8bench.analysis.metrics import metrics_of
from fp8bench.errors import UsageError
from fp8bench.features.claim.rows import resolution_of
from fp8bench.features.claim.values import Claim, Reading
from fp8bench.features.train.values import KeptTraining
from fp8bench.features.train.verdicts.summary import ArmSummary, JudgedTraining, figures_of
from fp8bench.model import Finding, Record, Run
from fp8bench.model.specs import STEP, TIME, spec_of

# Figures of an emulated case that are those of a device with the format; all other costs are the emulation's.
_OF_A_DEVICE = ("device_peak_memory", "device_max_batch", "useful_flops", "wire_bytes", "logical_bytes")
_EMULATED = "{} is emulated on this device, so {} is the emulation's and says nothing about the precision"
# Costs of a training's arm that an emulation changes.
_ARM_COSTS = ("tokens_per_second", "peak_memory", "joules_per_step")


def read_figure(claim: Claim, run: Run | KeptTraining) -> Reading:
    """Returns the claim's figure. Raises UsageError if the run has no such case, or several."""
    return _read_run(claim, run) if isinstance(run, Run) else _read_training(claim, run)


def _read_run(claim: Claim, run: Run) -> Reading:
    # 1. The case, its reference and their metrics.
    record = _find_case(claim, run)
    mode = record.case.mode
    if not record.is_ok:
        return Reading(None, run=run.id, why=f"{mode} was {record.status.value}: {record.reason}")
    judged = findings(run)
    finding = judged.get(record.case.id)
    metrics = _metrics(record, finding, run)
    name = claim.figure.removesuffix(" ratio")
    metric = metrics.get(str(TIME) if name == "speedup" else name)
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
    if name == "speedup":
        return _speed_up(metric, finding, run)
    value = metric.value if metric.best is None else metric.best
    if value is None:
        return Reading(None, run=run.id, why=metric.why or f"{name} was not measured")
    # 4. The figure, or its ratio to the reference's, with the distance of its quartiles if it is noisy.
    step = resolution_of(claim, spec_of(name))
    if metric.noisy and finding is not None:
        step = max(step, finding.spread or 0.0)
    if not claim.is_ratio:
        low, high = metric.bounds or (value - step * abs(value), value + step * abs(value))
        return Reading(value, low, high, run.id)
    return _ratio(name, metric, record, judged, run, step, value)


def _ratio(
    name: str, metric: Metric, record: Record, judged: Mapping[str, Finding], run: Run, step: float, value: float
) -> Reading:
    """Returns the figure over the reference's, with the interval of rounds where there is one."""
    reference = _reference_of(record, run)
    is_cost = not metric.spec.of_workload and name not in _OF_A_DEVICE
    if reference is not None and reference.support.is_emulated and is_cost:
        return Reading(None, run=run.id, why=_EMULATED.format(f"the reference {reference.case.mode}", name))
    if metric.interval is not None:
        # A ratio of times is the speed-up's inverse, and as uncertain.
        if metric.interval.level == 0:
            return Reading(None, run=run.id, why="too few rounds for an interval")
        finding = judged.get(record.case.id)
        floor = 1 + ((finding.floor or 0.0) if finding is not None and name == str(TIME) else 0.0)
        return Reading(metric.interval.point, metric.interval.low / floor, metric.interval.high * floor, run.id)
    base = _metrics(reference, judged.get(reference.case.id), run).get(name) if reference is not None else None
    base_value = None if base is None else base.value if base.best is None else base.best
    if not base_value:
        return Reading(None, run=run.id, why=f"{name} of the reference is unknown or 0")
    ratio = value / base_value
    return Reading(ratio, ratio * (1 - step), ratio * (1 + step), run.id)


def _find_case(claim: Claim, run: Run) -> Record:
    fitting = []
    for record in run.records:
        facts = {"mode": record.case.mode, **{name: str(value) for name, value in record.case.params}}
        if all(facts.get(name) == value for name, value in claim.case):
            fitting.append((record, facts))
    if len(fitting) == 1:
        return fitting[0][0]
    words = ", ".join(f"{name} = {value}" for name, value in claim.case) or "nothing"
    modes = ", ".join(dict.fromkeys(record.case.mode for record in run.records))
    raise UsageError(
        f"{claim.id}: {len(fitting)} cases of the run {run.id} fit its case ({words}), and one has to. Its modes are "
        f"{modes}; other keys are the suite's axes."
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
    name = claim.figure.removesuffix(" ratio")
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
