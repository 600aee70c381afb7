"""Yields all figures of a case as metrics.

The rows of CSV and JSON, the history and comparisons all read these metrics. So a new figure needs no code in any of
them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import StrEnum
from functools import cache, partial

from fp8bench.analysis.energy import (
    EnergyFigures,
    PhaseEnergies,
    energy_figures,
    energy_ratio,
    energy_samples,
    explain_unresolved_energy,
    list_forced_throttling,
    phase_energies,
    why_no_energy,
)
from fp8bench.analysis.labels import label_shared_device
from fp8bench.analysis.metric import (
    EnergyConditions,
    Metric,
    MetricSources,
    ReadSamples,
    Reference,
    capacity_ratio,
    explain_batch_limit,
)
from fp8bench.analysis.ranks import rank_metrics
from fp8bench.analysis.roofline import find_phase_roofs
from fp8bench.analysis.samples import (
    compute_sustained_figures,
    get_sustained_samples,
    list_step_samples,
    make_mean_sample,
    phase_medians,
    phase_samples,
    relative_mean_sample,
    relative_samples,
    sustained_ratio,
)
from fp8bench.analysis.tapes import tape_metrics, yield_coverage_metrics
from fp8bench.analysis.verdicts import best_seconds, step_seconds_of_calls
from fp8bench.model import UNATTRIBUTED, Finding, Interval, Label, Provenance, Record, Verdict, specs
from fp8bench.model.consumed import ENERGY_COUNTERS, MIN_COUNTER_CHANGES, TICK_INTERVALS
from fp8bench.model.specs import STEP, MetricSpec, Rank, find_metric_spec, memory_of_role

_MEASURED_PROVENANCE = Provenance.MEASURED


def iterate_case_metrics(
    record: Record, finding: Finding | None, reference: Reference | None = None
) -> Iterator[Metric]:
    """Yields all metrics of a case, starting with the time of the step, which every case has. Metrics of best cases
    need a finding.
    """
    timing = record.timing
    # Several metrics use these samples, so compute them once, and only if a caller reads them.
    steps = cache(partial(list_step_samples, timing)) if timing is not None else tuple
    counts = {"rounds": timing.num_rounds, "count": timing.num_calls} if timing is not None else {}
    metric_sources = MetricSources(record, finding, reference, steps, counts)
    for yield_metrics in METRIC_FUNCTIONS:
        yield from yield_metrics(metric_sources)


def _mark_as_detail(spec: MetricSpec) -> MetricSpec:
    """Returns the spec of a metric of the whole step, changed into the spec for a part of the step."""
    return replace(spec, rank=Rank.DETAIL)


def _yield_step_time_metrics(sources: MetricSources) -> Iterator[Metric]:
    finding, emulated = sources.finding, sources.is_emulated
    metric_without_value = Metric(specs.TIME, provenance=None, cost=emulated, samples=sources.steps)
    if finding is None:
        yield metric_without_value
        return
    if finding.best_seconds is None:
        yield replace(metric_without_value, verdict=finding.verdict_words, why=finding.why)
        return
    eager_reason = dict(finding.label_reasons).get(Label.EAGER_QUANTISER, "")
    yield replace(
        metric_without_value,
        value=finding.median_seconds,
        best=finding.best_seconds,
        provenance=_MEASURED_PROVENANCE,
        # The time of an emulated case is the cost of emulation, so the case has no speed-up.
        interval=None if emulated else finding.ratio,
        verdict=Verdict.EMULATED.value if emulated else finding.verdict_words,
        labels=finding.labels,
        why=_join_reasons(finding.why, eager_reason),
        **sources.sample_counts,
    )


def _yield_replay_metrics(sources: MetricSources) -> Iterator[Metric]:
    replays = sources.record.replays
    if replays is None:
        return
    timing = replays.timing
    metric_without_value = Metric(specs.REPLAY, provenance=_MEASURED_PROVENANCE, why=replays.why)
    if timing is None:
        yield metric_without_value
        return
    yield replace(
        metric_without_value,
        value=statistics.median(step_seconds_of_calls(timing).tolist()),
        best=best_seconds(timing),
        rounds=timing.num_rounds,
        count=timing.num_calls,
        samples=partial(list_step_samples, timing),
        why=replays.loaded and f"without loading {replays.loaded}",
    )


def _yield_mean_times(sources: MetricSources) -> Iterator[Metric]:
    timing = sources.record.timing
    if timing is None:
        return
    samples = partial(make_mean_sample, timing)
    yield Metric(
        specs.MEAN_TIME,
        provenance=_MEASURED_PROVENANCE,
        cost=sources.is_emulated,
        samples=samples,
        **sources.sample_counts,
    )
    if not sources.is_emulated:
        yield Metric(specs.RELATIVE_MEAN_TIME, samples=partial(relative_mean_sample, sources.record, sources.base))


def _yield_sustained_step(sources: MetricSources) -> Iterator[Metric]:
    record, figures = sources.record, compute_sustained_figures(sources.record, sources.finding)
    values: dict[MetricSpec, float | None] = {}
    if figures is not None and record.is_ok:
        yield Metric(
            specs.SUSTAINED_STEP_TIME,
            figures.seconds,
            provenance=_MEASURED_PROVENANCE,
            cost=sources.is_emulated,
            count=figures.turns,
            interval=sustained_ratio(record, sources.base),
            samples=partial(get_sustained_samples, record),
        )
        values = {specs.SUSTAINED_CLOCK: figures.clock, specs.SUSTAINED_POWER: figures.watts}
    values[specs.SM_CLOCK] = record.timing.clock if record.timing is not None else None
    for spec, value in values.items():
        if value is not None:
            yield Metric(spec, value, provenance=_MEASURED_PROVENANCE)


def _join_reasons(*reasons: str) -> str:
    return "; ".join(filter(None, reasons))


def _yield_reference_ratio_metric(sources: MetricSources) -> Iterator[Metric]:
    if sources.record.timing is None or sources.is_emulated:
        return
    interval = sources.finding.ratio if sources.finding is not None else None
    point = interval.point if interval is not None else None
    samples = partial(relative_samples, sources.record, sources.base)
    yield Metric(specs.RELATIVE_TIME, point, interval=interval, samples=samples)


def _yield_phase_times(sources: MetricSources) -> Iterator[Metric]:
    """Yields the time of each phase and its share of the step. The best cases of all phases sum to the step's best
    case.
    """
    finding, timing = sources.finding, sources.record.timing
    medians_by_phase = phase_medians(timing) if timing is not None and finding is not None else {}
    best_seconds_by_phase: dict[str, float | None] = {}
    if finding is None:
        # Without a finding, best cases are unknown. List the phases nevertheless, because histories store the samples
        # of these metrics.
        best_seconds_by_phase |= dict.fromkeys(timing.segments.phases if timing is not None else ())
    elif finding.best_seconds:
        # Unattributed time is always listed. Other phases are listed only if the step has them.
        phases = finding.phases
        best_seconds_by_phase |= {
            name: fastest_seconds
            for name, fastest_seconds in phases
            if fastest_seconds or name in medians_by_phase or name == UNATTRIBUTED
        }
    for phase, fastest_seconds in best_seconds_by_phase.items():
        # If the unattributed time has no samples, it was always zero.
        seconds, share = medians_by_phase.get(phase, (0.0, 0.0) if fastest_seconds == 0 else (None, None))
        time_metric = Metric(
            specs.TIME,
            seconds,
            fastest_seconds,
            phase,
            provenance=_MEASURED_PROVENANCE,
            cost=sources.is_emulated,
            labels=_list_phase_labels(finding, phase),
            samples=tuple if timing is None else partial(phase_samples, timing, phase),
            **sources.sample_counts,
        )
        yield time_metric
        if finding is not None and finding.best_seconds and fastest_seconds is not None:
            share_of_best = fastest_seconds / finding.best_seconds
            yield replace(
                time_metric, spec=specs.SHARE_OF_STEP, value=share, best=share_of_best, provenance=Provenance.DERIVED
            )


def _list_phase_labels(finding: Finding | None, phase: str) -> tuple[Label, ...]:
    """Returns the step's labels, plus BELOW_FLOOR if the phase is too short for its markers."""
    if finding is None:
        return ()
    labels = set(finding.labels)
    if phase in finding.below_floor:
        labels.add(Label.BELOW_FLOOR)
    return tuple(label for label in Label if label in labels)


def _yield_work_rate_metrics(sources: MetricSources) -> Iterator[Metric]:
    """Yields rates like FLOP/s, and times per unit of work. Yields nothing for emulated cases, which have no speed."""
    if sources.is_emulated:
        return
    record, finding = sources.record, sources.finding
    for name, spec in specs.WORK_RATES.items():
        count = getattr(record.work, name)
        if count and finding is not None and finding.best_seconds:
            median_work_rate = count / finding.median_seconds if finding.median_seconds else None
            yield Metric(
                spec, median_work_rate, count / finding.best_seconds, labels=finding.labels, **sources.sample_counts
            )
        if count and record.timing is not None:
            time_spec, unit_size = specs.TIME_PER_WORK[name]
            yield Metric(time_spec, samples=partial(_scale_samples, sources.steps, unit_size, count))


def _yield_phase_rates(sources: MetricSources) -> Iterator[Metric]:
    """Yields the rates of each phase, and their shares of the device's peaks. Yields nothing for emulated cases."""
    if sources.is_emulated:
        return
    for roof in find_phase_roofs(sources.record, sources.finding):
        labels = _list_phase_labels(sources.finding, roof.count.phase)
        rates = {
            specs.WORK_RATES["flops"]: roof.flop_rate,
            specs.WORK_RATES["bytes"]: roof.byte_rate,
            specs.SHARE_OF_CEILING: roof.share_of_ceiling,
            specs.SHARE_OF_DATASHEET: roof.share_of_datasheet,
        }
        for spec, rate in rates.items():
            if rate is not None:
                yield Metric(spec, best=rate, phase=roof.count.phase, labels=labels)


def _scale_samples(samples: ReadSamples, unit_size: float, count: float) -> tuple[float, ...]:
    return tuple(value * unit_size / count for value in samples())


def _yield_measured_metrics(sources: MetricSources) -> Iterator[Metric]:
    for measurement in sources.record.measurements:
        spec = find_metric_spec(measurement.metric)
        yield Metric(
            spec if spec.unit == measurement.unit else replace(spec, unit=measurement.unit),
            statistics.median(measurement.samples) if measurement.samples else None,
            phase=measurement.phase or STEP,
            provenance=measurement.provenance,
            count=len(measurement.samples),
            samples=partial(tuple, measurement.samples),
        )


def _yield_energy(sources: MetricSources) -> Iterator[Metric]:
    """Yields the energy of the step, of a unit of work, and of each phase. If the case has no energy, yields one
    metric with the reason.
    """
    record, finding, reference, energy_use = sources.record, sources.finding, sources.reference, sources.record.energy
    if energy_use is None or not record.is_ok:
        return
    labels, energy_validity = finding.labels if finding is not None else (), classify_energy_validity(record)
    conditions = (
        EnergyConditions(energy_validity.value, energy_use.power_limits) if energy_validity is not None else None
    )
    # 1. Without figures, yield only the reason.
    metric_without_value = Metric(
        specs.ENERGY,
        provenance=None,
        cost=sources.is_emulated,
        labels=labels,
        source=energy_use.source,
        energy=conditions,
    )
    figures = energy_figures(record)
    if figures is None:
        yield replace(metric_without_value, why=why_no_energy(record))
        return
    # 2. Yield the energy of the step, with its ratio to the reference if both can be compared.
    metric_without_value = replace(metric_without_value, count=len(figures.windows), provenance=Provenance.DERIVED)
    samples = partial(energy_samples, energy_use)
    step_energy_metric = replace(
        metric_without_value,
        value=figures.gross_energy.middle,
        provenance=_MEASURED_PROVENANCE,
        why=energy_use.why,
        samples=samples,
    )
    ratio = reference and energy_ratio(record, reference.record, (*labels, *reference.labels))
    if ratio is not None:
        # Level 0, because the bounds are extremes and not a confidence interval.
        interval = Interval(ratio.point, ratio.low, ratio.high, 0.0)
        step_energy_metric = replace(
            step_energy_metric,
            interval=interval,
            verdict=ratio.demand.value,
            why=_join_reasons(ratio.why, energy_use.why),
        )
    yield step_energy_metric
    # 3. Yield the figures that are derived from the step's energy, and the energy of the phases.
    yield from _yield_energy_figures(figures, metric_without_value)
    phase_energy = phase_energies(record, finding)
    if phase_energy is not None:
        yield from _yield_phase_energies(
            phase_energy, finding, replace(metric_without_value, spec=_mark_as_detail(specs.ENERGY))
        )


def _yield_phase_energies(
    energies: PhaseEnergies, finding: Finding | None, metric_without_value: Metric
) -> Iterator[Metric]:
    """Yields the energy of each phase and the remaining energy of the step. A measured phase has bounds. An estimated
    phase has the reason why it was not measured.
    """
    for phase_joules in energies.phases:
        labels = _list_phase_labels(finding, phase_joules.phase)
        phase_metric = replace(
            metric_without_value,
            value=phase_joules.joules,
            phase=phase_joules.phase,
            provenance=phase_joules.provenance,
            labels=labels,
            why=phase_joules.why,
        )
        yield phase_metric
        if phase_joules.range is not None:
            yield replace(phase_metric, spec=specs.ENERGY_LOW, value=phase_joules.range.low)
            yield replace(phase_metric, spec=specs.ENERGY_HIGH, value=phase_joules.range.high)
    if energies.residual is not None:
        yield replace(
            metric_without_value, spec=specs.ENERGY_RESIDUAL, value=energies.residual.middle, why=energies.void_reason
        )


def _yield_energy_figures(figures: EnergyFigures, metric_without_value: Metric) -> Iterator[Metric]:
    net_joules = figures.net_energy.middle if figures.net_energy else None
    yield replace(metric_without_value, spec=specs.ENERGY_NET, value=net_joules, why=figures.net_why)
    if figures.uncertainty is not None:
        yield replace(metric_without_value, spec=specs.ENERGY_UNCERTAINTY, value=figures.uncertainty)
    for spec, joules in figures.per:
        yield replace(metric_without_value, spec=spec, value=joules)
    yield replace(metric_without_value, spec=specs.POWER, value=figures.watts, provenance=_MEASURED_PROVENANCE)
    if figures.idle is not None:
        yield replace(
            metric_without_value, spec=specs.IDLE_POWER, value=figures.idle, provenance=_MEASURED_PROVENANCE, cost=False
        )


def _yield_memory_metrics(sources: MetricSources) -> Iterator[Metric]:
    memory_use = sources.record.memory
    if memory_use is None or not sources.record.is_ok:
        return
    for role, byte_count in memory_use.roles:
        yield _make_size_metric(find_metric_spec(memory_of_role(role)), byte_count, provenance=Provenance.DERIVED)
    for phase in memory_use.phases:
        yield _make_size_metric(_mark_as_detail(specs.PEAK_MEMORY), phase.allocated, phase.phase)
        if phase.reserved is not None:
            yield _make_size_metric(specs.RESERVED_MEMORY, phase.reserved, phase.phase)
    for spec, memory_bytes in (
        (specs.RESERVED_MEMORY, memory_use.reserved),
        (specs.PROCESS_MEMORY, memory_use.process),
    ):
        if memory_bytes is not None:
            yield _make_size_metric(spec, memory_bytes)
    yield replace(_make_size_metric(specs.RESIDENT_MEMORY, memory_use.resident), why=memory_use.why)


def _make_size_metric(
    spec: MetricSpec, size: int | None, phase: str = STEP, provenance: Provenance = _MEASURED_PROVENANCE
) -> Metric:
    if size is None:
        return Metric(spec, phase=phase, provenance=None)
    return Metric(spec, float(size), phase=phase, provenance=provenance)


def _yield_batch_capacity(sources: MetricSources) -> Iterator[Metric]:
    capacity = sources.record.capacity
    if capacity is None:
        return
    # A batch size is exact, so both ends of its ratio's interval are the ratio itself.
    ratio = capacity_ratio(sources.record, sources.base)
    yield Metric(
        specs.MAX_BATCH,
        None if capacity.batch is None else float(capacity.batch),
        provenance=_MEASURED_PROVENANCE,
        why=explain_batch_limit(capacity),
        interval=None if ratio is None else Interval(ratio, ratio, ratio, 1.0),
    )
    value_by_spec = {
        specs.MAX_BATCH_TOKENS: capacity.tokens or None,
        specs.MAX_BATCH_MEMORY: capacity.peak,
        specs.MAX_BATCH_LIMIT: capacity.limit,
    }
    for spec, size in value_by_spec.items():
        if size is not None:
            yield _make_size_metric(spec, size)
    if capacity.on_device is not None:
        yield _make_size_metric(specs.DEVICE_MAX_BATCH, capacity.on_device, provenance=Provenance.DERIVED)


def _yield_tensor_statistics(sources: MetricSources) -> Iterator[Metric]:
    """Yields statistics of tensors, and the shares of their values outside the range of each format."""
    for statistic in sources.record.statistics:
        figures = {specs.VALUE_COUNT: float(statistic.count), specs.AMAX: statistic.amax}
        for name, share_above, share_vanishing in statistic.outside:
            for spec, share in ((specs.ABOVE_RANGE_SHARE, share_above), (specs.SHARE_VANISHING, share_vanishing)):
                figures[replace(spec, name=spec.replace("*", name))] = share
        for spec, value in figures.items():
            kind_and_role = statistic.kind, statistic.role
            yield Metric(
                spec, value, phase=None, about=kind_and_role, provenance=_MEASURED_PROVENANCE, count=statistic.count
            )


# The functions that yield metrics, in the order of a case's rows.
METRIC_FUNCTIONS: list[Callable[[MetricSources], Iterator[Metric]]] = [
    _yield_step_time_metrics,
    _yield_replay_metrics,
    _yield_mean_times,
    _yield_sustained_step,
    _yield_reference_ratio_metric,
    _yield_phase_times,
    _yield_work_rate_metrics,
    tape_metrics,
    yield_coverage_metrics,
    _yield_phase_rates,
    _yield_measured_metrics,
    rank_metrics,
    _yield_energy,
    _yield_memory_metrics,
    _yield_batch_capacity,
    _yield_tensor_statistics,
]


class EnergyValidity(StrEnum):
    """The validity of an energy figure: certified, or the gravest reason why it is not."""

    CERTIFIED = "certified"
    SHARED = "shared-device"
    NO_COUNTER = "no-counter"
    TOO_FEW_TICKS = "too-few-ticks"
    THROTTLED = "throttled"
    LIMIT_CHANGED = "power-limit-changed"
    UNRESOLVED = "unresolved"


def classify_energy_validity(record: Record) -> EnergyValidity | None:
    """Returns CERTIFIED if a case's energy figure can be trusted, and otherwise the gravest reason why not. If energy
    was not requested, returns None.
    """
    energy_use = record.energy
    if energy_use is None:
        return None
    # Check the reasons from the gravest to the mildest.
    if any(label_shared_device(record.watch)):
        return EnergyValidity.SHARED
    if energy_use.source not in ENERGY_COUNTERS:
        return EnergyValidity.NO_COUNTER
    has_too_few_ticks = TICK_INTERVALS in energy_use.why and not energy_use.windows
    if has_too_few_ticks or any(window.intervals < MIN_COUNTER_CHANGES for window in energy_use.windows):
        return EnergyValidity.TOO_FEW_TICKS
    if list_forced_throttling(energy_use.windows):
        return EnergyValidity.THROTTLED
    if len(energy_use.power_limits) > 1:
        return EnergyValidity.LIMIT_CHANGED
    return EnergyValidity.UNRESOLVED if explain_unresolved_energy(energy_use) else EnergyValidity.CERTIFIED
