"""Reads the figure of a claim from a stored run or training. Raises CannotDecide if the figure decides nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from fp8bench.analysis.energy import EnergyDemand
from fp8bench.analysis.findings import findings
from fp8bench.analysis.metric import Metric, Reference
from fp8bench.analysis.metrics import iterate_case_metrics
from fp8bench.errors import UsageError
from fp8bench.features.claim.rows import find_resolution
from fp8bench.features.claim.values import SPEEDUPS, CannotDecide, Claim, FigureReading
from fp8bench.features.train.values import StoredTraining
from fp8bench.features.train.verdicts.summary import JudgedTraining, list_figures
from fp8bench.model import Finding, Level, Record, Run
from fp8bench.model.specs import ENERGY, STEP, TIME, find_metric_spec
from fp8bench.registry import precisions

# Figures of an emulated case that would be the same on a device with the format. All other costs are those of the
# emulation.
_FIGURES_SAME_UNDER_EMULATION = (
    "device_peak_memory",
    "device_max_batch",
    "useful_flops",
    "wire_bytes",
    "logical_bytes",
)
_TOO_FEW_ROUNDS = "too few rounds for an interval"
# Costs of a training arm, which differ under emulation.
_ARM_COST_FIGURES = ("tokens_per_second", "peak_memory", "joules_per_step")


def read_claim_figure(claim: Claim, run: Run | StoredTraining) -> FigureReading:
    """Returns the claim's figure from a run. Raises CannotDecide if the run does not show it, and UsageError if the
    run has no case that matches the claim, or several.
    """
    if not isinstance(run, Run):
        return _read_training_figure(claim, run)
    records = _find_cases(claim, run)
    return _sum_cases(claim, run, records) if claim.sum else _read_case_figure(claim, run, records[0])


def _sum_cases(claim: Claim, run: Run, records: Sequence[Record]) -> FigureReading:
    """Returns the sum of a figure over several cases. The ends of the intervals are summed in the same way. For a
    ratio, returns the ratio of the two sums.
    """
    case_readings = [_read_case_figure(claim, run, record) for record in records]
    # Weight each ratio by the reference's value, so that the result is the ratio of the sums.
    case_weights = [_read_reference_value(claim, run, record) if claim.is_ratio else 1.0 for record in records]

    def sum_figures(figures: Iterable[float]) -> float:
        weights_and_figures = zip(case_weights, figures, strict=True)
        if claim.figure in SPEEDUPS:
            # A speed-up divides the time of the reference by that of the case, so the case took weight / speed-up.
            return sum(case_weights) / sum(weight / speedup for weight, speedup in weights_and_figures)
        total = sum(weight * figure for weight, figure in weights_and_figures)
        return total / sum(case_weights) if claim.is_ratio else total

    return FigureReading(
        sum_figures(case_reading.value for case_reading in case_readings),
        sum_figures(case_reading.low for case_reading in case_readings),
        sum_figures(case_reading.high for case_reading in case_readings),
    )


def _read_case_figure(claim: Claim, run: Run, record: Record) -> FigureReading:
    # 1. Find the case, its reference and their metrics.
    mode = record.case.mode
    if not record.is_ok:
        remedy = _suggest_native_device(claim) if record.support.level is Level.REFUSED else ""
        raise CannotDecide(f"{mode} was {record.status.value}: {record.reason}", remedy)
    finding = findings(run).get(record.case.id)
    metrics = _list_step_metrics(record, finding, run)
    name = claim.metric
    metric = metrics.get(name)
    reference = _find_reference(record, run)
    if claim.is_ratio and reference is not None:
        reference_mode = reference.case.mode
        baseline = _find_other_baseline(claim.sentence, reference_mode)
        if baseline:
            raise CannotDecide(
                f"the sentence compares with {baseline}, but the reference of the run is {reference_mode}"
            )
    if metric is None:
        metric_names = ", ".join(metrics)
        raise UsageError(f"{claim.id}: the run {run.id} has no figure {name} of {mode}. It has {metric_names}.")
    # 2. Refuse costs of emulated cases, because they are not the costs of the precision.
    if metric.cost or (
        record.support.is_emulated and not metric.spec.of_workload and name not in _FIGURES_SAME_UNDER_EMULATION
    ):
        raise _refuse_emulated_figure(claim, mode, metric.name)
    # 3. Refuse times, rates and energies of a device that was throttled or shared.
    if metric.noisy and finding is not None and finding.hard:
        why = f"the device could not be timed reliably ({', '.join(finding.hard)})"
        raise CannotDecide(why, suggest_more_rounds(claim))
    if claim.figure in SPEEDUPS:
        return _read_claimed_speedup(claim, metric, finding)
    value = _get_typical_value(metric)
    if value is None:
        raise CannotDecide(metric.why or f"{name} was not measured")
    # 4. Return the figure, or its ratio to the reference. The interval of a figure with noise is the distance of its
    # quartiles.
    relative_error = find_resolution(claim, find_metric_spec(name))
    if metric.noisy and finding is not None:
        relative_error = max(relative_error, finding.spread or 0.0)
    if claim.is_ratio:
        return _read_ratio(claim, metric, record, finding, run, relative_error, value)
    low, high = metric.bounds or (value - relative_error * abs(value), value + relative_error * abs(value))
    return FigureReading(value, low, high)


def suggest_more_rounds(claim: Claim) -> str:
    """Returns how to measure the run of a claim more precisely."""
    if " --quick" in claim.run:
        return f"`fp8bench {claim.run.replace(' --quick', '')}`: remove --quick from `run` in the row"
    return f"`fp8bench {claim.run}` with more time, rounds or seeds, or on an idle machine"


def _suggest_native_device(claim: Claim) -> str:
    return f"`fp8bench {claim.run}` on a device that has the format"


def _refuse_emulated_figure(claim: Claim, name: str, figure: str) -> CannotDecide:
    why = f"{name} is emulated on this device, so its {figure} is that of the emulation, not of the precision"
    return CannotDecide(why, _suggest_native_device(claim))


def _get_typical_value(metric: Metric) -> float | None:
    return metric.value if metric.best is None else metric.best


def _read_reference_value(claim: Claim, run: Run, record: Record) -> float:
    """Returns the value of the claim's metric for the reference of a case. Raises CannotDecide if this value is
    unknown or 0."""
    reference = _find_reference(record, run)
    if reference is not None:
        metric = _list_step_metrics(reference, findings(run).get(reference.case.id), run).get(claim.metric)
        value = _get_typical_value(metric) if metric is not None else None
        if value:
            return value
    raise CannotDecide(f"{claim.metric} of the reference is unknown or 0")


def _find_other_baseline(sentence: str, reference: str) -> str:
    """Returns the precision with which a sentence compares, such as bf16 in 'faster than bf16'. Returns '' if the
    sentence names none but the run's reference.
    """
    for name in re.findall(r"\b(?:than|over|against|versus|vs\.?) (?:the )?([\w-]+)", sentence):
        if name.lower() in precisions.names() and name.lower() != reference.partition(":")[0]:
            return str(name)
    return ""


def _read_ratio(
    claim: Claim, metric: Metric, record: Record, finding: Finding | None, run: Run, relative_error: float, value: float
) -> FigureReading:
    """Returns the case's figure divided by the reference's figure. The interval is that over rounds; without one, it is
    `relative_error` around the ratio.
    """
    name = claim.metric
    reference = _find_reference(record, run)
    depends_on_emulation = not metric.spec.of_workload and name not in _FIGURES_SAME_UNDER_EMULATION
    if reference is not None and reference.support.is_emulated and depends_on_emulation:
        raise _refuse_emulated_figure(claim, f"the reference {reference.case.mode}", name)
    if metric.interval is None:
        ratio = value / _read_reference_value(claim, run, record)
        return FigureReading(ratio, ratio * (1 - relative_error), ratio * (1 + relative_error))
    # A ratio of times is the inverse of the speed-up, with the same uncertainty. A ratio of energies only has a range
    # over all pairs of windows, which is accepted if the energies of the two cases clearly differ.
    interval = metric.interval
    is_energy_difference_clear = metric.verdict in (EnergyDemand.LESS, EnergyDemand.MORE) and name == str(ENERGY)
    if interval.level == 0 and not is_energy_difference_clear:
        raise CannotDecide(metric.why or _TOO_FEW_ROUNDS, suggest_more_rounds(claim))
    noise_floor = finding.floor if finding is not None and name == str(TIME) else None
    noise_factor = 1 + (noise_floor or 0.0)
    return FigureReading(interval.point, interval.low / noise_factor, interval.high * noise_factor)


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
    reference_candidates = (candidate for candidate in run.records if candidate.is_reference)
    return next(
        (reference for reference in reference_candidates if reference.case.setting == record.case.setting), None
    )


def _list_step_metrics(record: Record, finding: Finding | None, run: Run) -> dict[str, Metric]:
    """Returns the metrics of whole steps by name, without those of phases. If several have the same name, returns the
    first one."""
    reference_record = _find_reference(record, run)
    metrics: dict[str, Metric] = {}
    for metric in iterate_case_metrics(
        record, finding, Reference(reference_record) if reference_record is not None else None
    ):
        if metric.phase == STEP:
            metrics.setdefault(metric.name, metric)
    return metrics


def _read_claimed_speedup(claim: Claim, metric: Metric, finding: Finding | None) -> FigureReading:
    """Returns the speed-up with its interval. The interval is widened by the noise floor of the run, which is how much
    identical code differs.
    """
    if metric.interval is None or finding is None:
        raise CannotDecide(metric.why or _TOO_FEW_ROUNDS, suggest_more_rounds(claim))
    speedup = metric.interval.inverse
    if metric.interval.level == 0:
        reason = f"{_TOO_FEW_ROUNDS}: they gave {speedup.low:.3g} x to {speedup.high:.3g} x"
        raise CannotDecide(metric.why or reason, suggest_more_rounds(claim), speedup.point)
    noise_factor = 1 + (finding.floor or 0.0)
    return FigureReading(speedup.point, speedup.low / noise_factor, speedup.high * noise_factor)


def _read_training_figure(claim: Claim, run: StoredTraining) -> FigureReading:
    # 1. Find the arm.
    judged_training = JudgedTraining(run)
    name = claim.metric
    arm_name = dict(claim.case).get("arm", "")
    summaries = {summary.arm.name: summary for summary in judged_training.summaries}
    if arm_name not in summaries:
        arm_names = ", ".join(summaries)
        raise UsageError(
            f"{claim.id}: the training {run.training.id} has no arm {arm_name!r}. Set case.arm to one of {arm_names}."
        )
    summary = summaries[arm_name]
    if summary.arm.skip:
        raise CannotDecide(f"{arm_name} was not trained: {summary.arm.skip}")
    # 2. Read the figure of the arm. A ratio also needs that of the reference, which is the first arm.
    arm_summaries = [summary, judged_training.summaries[0]] if claim.is_ratio else [summary]
    values = []
    for position, compared_summary in enumerate(arm_summaries):
        if name in _ARM_COST_FIGURES and not compared_summary.arm.native:
            raise _refuse_emulated_figure(claim, compared_summary.arm.name, name)
        figures = list_figures(compared_summary, judged_training.verdicts)
        # A gap is already relative to the reference, so it is never a ratio.
        if name in ("gap", "held_out_gap"):
            return _read_loss_gap(claim, figures)
        value = figures.get(name)
        if value is None or (position == 1 and not value):
            raise CannotDecide(f"{name} of {compared_summary.arm.name} is unknown")
        values.append(value)
    # 3. Return the figure or the ratio. The resolution of the figure is its interval.
    figure = values[0] / values[1] if claim.is_ratio else values[0]
    relative_error = find_resolution(claim, None)
    return FigureReading(figure, figure * (1 - relative_error), figure * (1 + relative_error))


def _read_loss_gap(claim: Claim, figures: Mapping[str, float | None]) -> FigureReading:
    """Returns a loss gap with its 99% interval. A training with too few seeds has no interval."""
    name = claim.metric
    value = figures[name]
    low = figures[f"{name}_deciding_low"]
    high = figures[f"{name}_deciding_high"]
    if value is None or low is None or high is None:
        raise CannotDecide("too few seeds for an interval: raise --seeds", suggest_more_rounds(claim), value)
    return FigureReading(value, low, high)
