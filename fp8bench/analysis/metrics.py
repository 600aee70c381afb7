"""All figures of a case as metrics.

CSV and JSON rows, the history and comparisons read this list and know no figure by name.
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
    forced_throttling,
    phase_energies,
    why_no_energy,
    why_unresolved,
)
from fp8bench.analysis.labels import label_shared_device
from fp8bench.analysis.metric import (
    EnergyConditions,
    Metric,
    MetricSources,
    Reference,
    Samples,
    capacity_ratio,
    why_no_larger,
)
from fp8bench.analysis.ranks import rank_metrics
from fp8bench.analysis.roofline import phase_roofs
from fp8bench.analysis.samples import (
    mean_sample,
    phase_medians,
    phase_samples,
    relative_mean_sample,
    relative_samples,
    step_samples,
    sustained_figures,
    sustained_ratio,
    sustained_samples,
)
from fp8bench.analysis.tapes import coverage_metrics, tape_metrics
from fp8bench.analysis.verdicts import best_seconds, totals
from fp8bench.model import UNATTRIBUTED, Finding, Interval, Label, Provenance, Record, Verdict, specs
from fp8bench.model.consumed import COUNTERS, LEAST_INTERVALS, TICK_INTERVALS
from fp8bench.model.specs import STEP, MetricSpec, Rank, memory_of_role, spec_of

_MEASURED = Provenance.MEASURED


def metrics_of(record: Record, finding: Finding | None, reference: Reference | None = None) -> Iterator[Metric]:
    """Yields all metrics, the step's time first, which every case has. Best cases need a finding."""
    timing = record.timing
    # Several metrics use these samples, but most callers read none of them.
    steps = cache(partial(step_samples, timing)) if timing is not None else tuple
    counts = {"rounds": timing.num_rounds, "count": timing.num_calls} if timing is not None else {}
    sources = MetricSources(record, finding, reference, steps, counts)
    for measure in MEASURES:
        yield from measure(sources)


def _as_detail(spec: MetricSpec) -> MetricSpec:
    """Marks a figure as belonging to a part of the step."""
    return replace(spec, rank=Rank.DETAIL)


def _step_time(sources: MetricSources) -> Iterator[Metric]:
    finding, emulated = sources.finding, sources.is_emulated
    blank = Metric(specs.TIME, provenance=None, cost=emulated, samples=sources.steps)
    if finding is None:
        yield blank
        return
    if finding.best_seconds is None:
        yield replace(blank, verdict=finding.verdict_words, why=finding.why)
        return
    eager = dict(finding.label_reasons).get(Label.EAGER_QUANTISER, "")
    yield replace(
        blank,
        value=finding.median_seconds,
        best=finding.best_seconds,
        provenance=_MEASURED,
        # An emulation's time is not a speed, whatever the finding has.
        interval=None if emulated else finding.ratio,
        verdict=Verdict.EMULATED.value if emulated else finding.verdict_words,
        labels=finding.labels,
        why=_join_reasons(finding.why, eager),
        **sources.sample_counts,
    )


def _replays(sources: MetricSources) -> Iterator[Metric]:
    replays = sources.record.replays
    if replays is None:
        return
    timing, blank = replays.timing, Metric(specs.REPLAY, provenance=_MEASURED, why=replays.why)
    if timing is None:
        yield blank
        return
    yield replace(
        blank,
        value=statistics.median(totals(timing).tolist()),
        best=best_seconds(timing),
        rounds=timing.num_rounds,
        count=timing.num_calls,
        samples=partial(step_samples, timing),
        why=replays.loaded and f"without loading {replays.loaded}",
    )


def _means(sources: MetricSources) -> Iterator[Metric]:
    timing = sources.record.timing
    if timing is None:
        return
    samples = partial(mean_sample, timing)
    yield Metric(specs.MEAN, provenance=_MEASURED, cost=sources.is_emulated, samples=samples, **sources.sample_counts)
    if not sources.is_emulated:
        yield Metric(specs.RELATIVE_MEAN, samples=partial(relative_mean_sample, sources.record, sources.base))


def _sustained_step(sources: MetricSources) -> Iterator[Metric]:
    record, figures = sources.record, sustained_figures(sources.record, sources.finding)
    values: dict[MetricSpec, float | None] = {}
    if figures is not None and record.is_ok:
        yield Metric(
            specs.SUSTAINED_TIME,
            figures.seconds,
            provenance=_MEASURED,
            cost=sources.is_emulated,
            count=figures.turns,
            interval=sustained_ratio(record, sources.base),
            samples=partial(sustained_samples, record),
        )
        values = {specs.SUSTAINED_CLOCK: figures.clock, specs.SUSTAINED_POWER: figures.watts}
    values[specs.SM_CLOCK] = record.timing.clock if record.timing is not None else None
    for spec, value in values.items():
        if value is not None:
            yield Metric(spec, value, provenance=_MEASURED)


def _join_reasons(*reasons: str) -> str:
    return "; ".join(filter(None, reasons))


def _relative(sources: MetricSources) -> Iterator[Metric]:
    if sources.record.timing is None or sources.is_emulated:
        return
    interval = sources.finding.ratio if sources.finding is not None else None
    point = interval.point if interval is not None else None
    samples = partial(relative_samples, sources.record, sources.base)
    yield Metric(specs.RELATIVE, point, interval=interval, samples=samples)


def _phases(sources: MetricSources) -> Iterator[Metric]:
    """Yields time and share of each phase of the step; best cases sum to the step's."""
    finding, timing = sources.finding, sources.record.timing
    medians = phase_medians(timing) if timing is not None and finding is not None else {}
    best_by_phase: dict[str, float | None] = {}
    if finding is None:
        best_by_phase |= dict.fromkeys(timing.segments.phases if timing is not None else ())
    elif finding.best_seconds:
        # Unattributed time is always listed, other phases only if the step has them.
        phases = finding.phases
        best_by_phase |= {name: best for name, best in phases if best or name in medians or name == UNATTRIBUTED}
    for phase, best in best_by_phase.items():
        # Unattributed time has no samples if it is always zero.
        seconds, share = medians.get(phase, (0.0, 0.0) if best == 0 else (None, None))
        metric = Metric(
            specs.TIME,
            seconds,
            best,
            phase,
            provenance=_MEASURED,
            cost=sources.is_emulated,
            labels=_phase_labels(finding, phase),
            samples=tuple if timing is None else partial(phase_samples, timing, phase),
            **sources.sample_counts,
        )
        yield metric
        if finding is not None and finding.best_seconds and best is not None:
            share_of_best = best / finding.best_seconds
            yield replace(
                metric, spec=specs.SHARE_OF_STEP, value=share, best=share_of_best, provenance=Provenance.DERIVED
            )


def _phase_labels(finding: Finding | None, phase: str) -> tuple[Label, ...]:
    """Returns the step's labels, plus one if the phase is too short for its markers."""
    if finding is None:
        return ()
    labels = set(finding.labels)
    if phase in finding.below_floor:
        labels.add(Label.BELOW_FLOOR)
    return tuple(label for label in Label if label in labels)


def _rates_of_work(sources: MetricSources) -> Iterator[Metric]:
    """Yields rates, and times for a unit of work; nothing for emulations, which have no speed."""
    if sources.is_emulated:
        return
    record, finding = sources.record, sources.finding
    for name, spec in specs.RATES.items():
        count = getattr(record.work, name)
        if count and finding is not None and finding.best_seconds:
            median = count / finding.median_seconds if finding.median_seconds else None
            yield Metric(spec, median, count / finding.best_seconds, labels=finding.labels, **sources.sample_counts)
        if count and record.timing is not None:
            per, many = specs.PER[name]
            yield Metric(per, samples=partial(_scale_samples, sources.steps, many, count))


def _rates_of_phases(sources: MetricSources) -> Iterator[Metric]:
    """Yields the rates of each phase, and their shares of what the device can do; nothing for emulations."""
    if sources.is_emulated:
        return
    for roof in phase_roofs(sources.record, sources.finding):
        labels = _phase_labels(sources.finding, roof.count.phase)
        rates = {
            specs.RATES["flops"]: roof.flop_rate,
            specs.RATES["bytes"]: roof.byte_rate,
            specs.SHARE_OF_CEILING: roof.of_ceiling,
            specs.SHARE_OF_DATASHEET: roof.of_sheet,
        }
        for spec, rate in rates.items():
            if rate is not None:
                yield Metric(spec, best=rate, phase=roof.count.phase, labels=labels)


def _scale_samples(samples: Samples, many: float, count: float) -> tuple[float, ...]:
    return tuple(value * many / count for value in samples())


def _measurements(sources: MetricSources) -> Iterator[Metric]:
    for measurement in sources.record.measurements:
        spec = spec_of(measurement.metric)
        yield Metric(
            spec if spec.unit == measurement.unit else replace(spec, unit=measurement.unit),
            statistics.median(measurement.samples) if measurement.samples else None,
            phase=measurement.phase or STEP,
            provenance=measurement.provenance,
            count=len(measurement.samples),
            samples=partial(tuple, measurement.samples),
        )


def _energy(sources: MetricSources) -> Iterator[Metric]:
    """Yields energy of the step, per unit of work, and of its phases; without a value, one metric with the reason."""
    record, finding, reference, use = sources.record, sources.finding, sources.reference, sources.record.energy
    if use is None or not record.is_ok:
        return
    labels, validity = finding.labels if finding is not None else (), energy_validity(record)
    conditions = EnergyConditions(validity.value, use.power_limits) if validity is not None else None
    blank = Metric(
        specs.ENERGY, provenance=None, cost=sources.is_emulated, labels=labels, source=use.source, energy=conditions
    )
    figures = energy_figures(record)
    if figures is None:
        yield replace(blank, why=why_no_energy(record))
        return
    blank = replace(blank, count=len(figures.windows), provenance=Provenance.DERIVED)
    samples = partial(energy_samples, use)
    step = replace(blank, value=figures.gross.middle, provenance=_MEASURED, why=use.why, samples=samples)
    ratio = reference and energy_ratio(record, reference.record, (*labels, *reference.labels))
    if ratio is not None:
        interval = Interval(ratio.point, ratio.low, ratio.high, 0.0)
        step = replace(step, interval=interval, verdict=ratio.demand.value, why=_join_reasons(ratio.why, use.why))
    yield step
    yield from _energy_figures(figures, blank)
    energies = phase_energies(record, finding)
    if energies is not None:
        yield from _phase_energies(energies, finding, replace(blank, spec=_as_detail(specs.ENERGY)))


def _phase_energies(energies: PhaseEnergies, finding: Finding | None, blank: Metric) -> Iterator[Metric]:
    """Yields measured phases with their bounds, estimated ones with the reason, and the rest of the step's energy."""
    for phase_joules in energies.phases:
        labels = _phase_labels(finding, phase_joules.phase)
        phase = replace(
            blank,
            value=phase_joules.joules,
            phase=phase_joules.phase,
            provenance=phase_joules.provenance,
            labels=labels,
            why=phase_joules.why,
        )
        yield phase
        for spec, end in ((specs.ENERGY_LOW, phase_joules.low), (specs.ENERGY_HIGH, phase_joules.high)):
            if end is not None:
                yield replace(phase, spec=spec, value=end)
    if energies.residual is not None:
        yield replace(blank, spec=specs.ENERGY_RESIDUAL, value=energies.residual.middle, why=energies.void)


def _energy_figures(figures: EnergyFigures, blank: Metric) -> Iterator[Metric]:
    net = figures.net.middle if figures.net else None
    yield replace(blank, spec=specs.ENERGY_NET, value=net, why=figures.net_why)
    if figures.uncertainty is not None:
        yield replace(blank, spec=specs.ENERGY_UNCERTAINTY, value=figures.uncertainty)
    for spec, joules in figures.per:
        yield replace(blank, spec=spec, value=joules)
    yield replace(blank, spec=specs.POWER, value=figures.watts, provenance=_MEASURED)
    if figures.idle is not None:
        yield replace(blank, spec=specs.IDLE_POWER, value=figures.idle, provenance=_MEASURED, cost=False)


def _memory(sources: MetricSources) -> Iterator[Metric]:
    use = sources.record.memory
    if use is None or not sources.record.is_ok:
        return
    for role, size in use.roles:
        yield _size(spec_of(memory_of_role(role)), size, provenance=Provenance.DERIVED)
    for phase in use.phases:
        yield _size(_as_detail(specs.PEAK_MEMORY), phase.allocated, phase.phase)
        if phase.reserved is not None:
            yield _size(specs.RESERVED_MEMORY, phase.reserved, phase.phase)
    for spec, counted in ((specs.RESERVED_MEMORY, use.reserved), (specs.PROCESS_MEMORY, use.process)):
        if counted is not None:
            yield _size(spec, counted)
    yield replace(_size(specs.RESIDENT_MEMORY, use.resident), why=use.why)


def _size(spec: MetricSpec, size: int | None, phase: str = STEP, provenance: Provenance = _MEASURED) -> Metric:
    if size is None:
        return Metric(spec, phase=phase, provenance=None)
    return Metric(spec, float(size), phase=phase, provenance=provenance)


def _capacity(sources: MetricSources) -> Iterator[Metric]:
    capacity = sources.record.capacity
    if capacity is None:
        return
    ratio = capacity_ratio(sources.record, sources.base)
    yield Metric(
        specs.MAX_BATCH,
        None if capacity.batch is None else float(capacity.batch),
        provenance=_MEASURED,
        why=why_no_larger(capacity),
        interval=None if ratio is None else Interval(ratio, ratio, ratio, 1.0),
    )
    sizes = {
        specs.MAX_BATCH_TOKENS: capacity.tokens or None,
        specs.MAX_BATCH_MEMORY: capacity.peak,
        specs.MAX_BATCH_LIMIT: capacity.limit,
    }
    for spec, size in sizes.items():
        if size is not None:
            yield _size(spec, size)
    if capacity.on_device is not None:
        yield _size(specs.DEVICE_MAX_BATCH, capacity.on_device, provenance=Provenance.DERIVED)


def _data(sources: MetricSources) -> Iterator[Metric]:
    """Yields statistics of tensors, and the shares of their values outside each format."""
    for statistic in sources.record.statistics:
        figures = {specs.VALUES: float(statistic.count), specs.AMAX: statistic.amax}
        for name, above, vanishing in statistic.outside:
            for spec, share in ((specs.SHARE_ABOVE, above), (specs.SHARE_VANISHING, vanishing)):
                figures[replace(spec, name=spec.replace("*", name))] = share
        for spec, value in figures.items():
            about = statistic.kind, statistic.role
            yield Metric(spec, value, phase=None, about=about, provenance=_MEASURED, count=statistic.count)


# The order of a case's rows.
MEASURES: list[Callable[[MetricSources], Iterator[Metric]]] = [
    _step_time,
    _replays,
    _means,
    _sustained_step,
    _relative,
    _phases,
    _rates_of_work,
    tape_metrics,
    coverage_metrics,
    _rates_of_phases,
    _measurements,
    rank_metrics,
    _energy,
    _memory,
    _capacity,
    _data,
]


class EnergyValidity(StrEnum):
    """Whether an energy figure is certified, or the gravest reason why it is not."""

    CERTIFIED = "certified"
    SHARED = "shared-device"
    NO_COUNTER = "no-counter"
    TOO_FEW_TICKS = "too-few-ticks"
    THROTTLED = "throttled"
    LIMIT_CHANGED = "power-limit-changed"
    UNRESOLVED = "unresolved"


def energy_validity(record: Record) -> EnergyValidity | None:
    """Returns the validity of a case's energy; None if energy was not requested."""
    use = record.energy
    if use is None:
        return None
    if any(label_shared_device(record.watch)):
        return EnergyValidity.SHARED
    if use.source not in COUNTERS:
        return EnergyValidity.NO_COUNTER
    too_short = TICK_INTERVALS in use.why and not use.windows
    if too_short or any(window.intervals < LEAST_INTERVALS for window in use.windows):
        return EnergyValidity.TOO_FEW_TICKS
    if forced_throttling(use.windows):
        return EnergyValidity.THROTTLED
    if len(use.power_limits) > 1:
        return EnergyValidity.LIMIT_CHANGED
    return EnergyValidity.UNRESOLVED if why_unresolved(use) else EnergyValidity.CERTIFIED
