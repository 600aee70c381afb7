"""All figures of a case, once, as metrics.

Rows and boards for other programs, the history and comparisons read this list and know no figure by name.
"""

from __future__ import annotations

import functools
import operator
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
    phase_energies,
    why_no_energy,
    why_unresolved,
)
from fp8bench.analysis.labels import shared
from fp8bench.analysis.metric import EnergyConditions, Metric, Reference, Samples, Told, capacity_ratio, why_no_larger
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
from fp8bench.model.consumed import CHOSEN, COUNTERS, LEAST_INTERVALS, TICK_INTERVALS, reasons_in
from fp8bench.model.specs import STEP, MetricSpec, Rank, memory_of_role, spec_of

_MEASURED = Provenance.MEASURED


def metrics_of(record: Record, finding: Finding | None, reference: Reference | None = None) -> Iterator[Metric]:
    """Yields all metrics, the step's time first, which every case has. Without a finding there are no best cases."""
    # Once for all that rests on it, and only where somebody asks.
    steps = cache(partial(step_samples, record.timing)) if record.timing is not None else tuple
    timed = {"rounds": record.timing.num_rounds, "count": record.timing.num_calls} if record.timing is not None else {}
    told = Told(record, finding, reference, steps, timed)
    for measured in MEASURES:
        yield from measured(told)


def _detail(spec: MetricSpec) -> MetricSpec:
    """Marks a figure of a part of the step."""
    return replace(spec, rank=Rank.DETAIL)


def _step_time(told: Told) -> Iterator[Metric]:
    finding, emulated = told.finding, told.emulated
    blank = Metric(specs.TIME, provenance=None, cost=emulated, samples=told.steps)
    if finding is None:
        yield blank
    elif finding.best_seconds is None:
        yield replace(blank, verdict=finding.verdict_words, why=finding.why)
    else:
        yield replace(
            blank,
            value=finding.median_seconds,
            best=finding.best_seconds,
            provenance=_MEASURED,
            # Whatever is known of it, the time of an emulation is no speed.
            interval=None if emulated else finding.ratio,
            verdict=Verdict.EMULATED.value if emulated else finding.verdict_words,
            labels=finding.labels,
            why=_joined(finding.why, dict(finding.label_reasons).get(Label.EAGER_QUANTISER, "")),
            **told.timed,
        )


def _replays(told: Told) -> Iterator[Metric]:
    replays = told.record.replays
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


def _means(told: Told) -> Iterator[Metric]:
    timing = told.record.timing
    if timing is None:
        return
    samples = partial(mean_sample, timing)
    yield Metric(specs.MEAN, provenance=_MEASURED, cost=told.emulated, samples=samples, **told.timed)
    if not told.emulated:
        yield Metric(specs.RELATIVE_MEAN, samples=partial(relative_mean_sample, told.record, told.base))


def _sustained(told: Told) -> Iterator[Metric]:
    record, figures = told.record, sustained_figures(told.record, told.finding)
    beside: dict[MetricSpec, float | None] = {}
    if figures is not None and record.is_ok:
        yield Metric(
            specs.SUSTAINED_TIME,
            figures.seconds,
            provenance=_MEASURED,
            cost=told.emulated,
            count=figures.turns,
            interval=sustained_ratio(record, told.base),
            samples=partial(sustained_samples, record),
        )
        beside = {specs.SUSTAINED_CLOCK: figures.clock, specs.SUSTAINED_POWER: figures.watts}
    beside[specs.SM_CLOCK] = record.timing.clock if record.timing is not None else None
    for spec, value in beside.items():
        if value is not None:
            yield Metric(spec, value, provenance=_MEASURED)


def _joined(*words: str) -> str:
    return "; ".join(filter(None, words))


def _relative(told: Told) -> Iterator[Metric]:
    if told.record.timing is None or told.emulated:
        return
    interval = told.finding.ratio if told.finding is not None else None
    point = interval.point if interval is not None else None
    samples = partial(relative_samples, told.record, told.base)
    yield Metric(specs.RELATIVE, point, interval=interval, samples=samples)


def _phases(told: Told) -> Iterator[Metric]:
    """Yields time and share of each phase of the step; best cases sum to the step's."""
    finding, timing = told.finding, told.record.timing
    medians = phase_medians(timing) if timing is not None and finding is not None else {}
    if finding is None:
        best_by_phase: dict[str, float | None] = dict.fromkeys(timing.segments.phases if timing is not None else ())
    else:
        known = dict(finding.phases) if finding.best_seconds else {}
        best_by_phase = {name: best for name, best in known.items() if best or name in medians or name == UNATTRIBUTED}
    for phase, best in best_by_phase.items():
        # What the marks of no phase cover is 0 in every call where there is nothing.
        seconds, share = medians.get(phase, (0.0, 0.0) if best == 0 else (None, None))
        samples = tuple if timing is None else partial(phase_samples, timing, phase)
        metric = Metric(
            specs.TIME,
            seconds,
            best,
            phase,
            provenance=_MEASURED,
            cost=told.emulated,
            labels=_with_floor(finding, phase),
            samples=samples,
            **told.timed,
        )
        yield metric
        if finding is not None and finding.best_seconds and best is not None:
            share_of_best = best / finding.best_seconds
            yield replace(
                metric, spec=specs.SHARE_OF_STEP, value=share, best=share_of_best, provenance=Provenance.DERIVED
            )


def _with_floor(finding: Finding | None, phase: str) -> tuple[Label, ...]:
    if finding is None:
        return ()
    labels = {*finding.labels, *([Label.BELOW_FLOOR] if phase in finding.below_floor else [])}
    return tuple(label for label in Label if label in labels)


def _by_work(told: Told) -> Iterator[Metric]:
    """Yields rates, and times for so much work; nothing for emulations, which have no speed."""
    if told.emulated:
        return
    record, finding = told.record, told.finding
    for name, spec in specs.RATES.items():
        count = getattr(record.work, name)
        if count and finding is not None and finding.best_seconds:
            median = count / finding.median_seconds if finding.median_seconds else None
            yield Metric(spec, median, count / finding.best_seconds, labels=finding.labels, **told.timed)
        if count and record.timing is not None:
            per, many = specs.PER[name]
            yield Metric(per, samples=partial(_scaled, told.steps, many, count))


def _by_tape(told: Told) -> Iterator[Metric]:
    for roof in () if told.emulated else phase_roofs(told.record, told.finding):
        labels = _with_floor(told.finding, roof.count.phase)
        rates = {
            specs.RATES["flops"]: roof.flop_rate,
            specs.RATES["bytes"]: roof.byte_rate,
            specs.SHARE_OF_CEILING: roof.of_ceiling,
            specs.SHARE_OF_DATASHEET: roof.of_sheet,
        }
        for spec, rate in rates.items():
            if rate is not None:
                yield Metric(spec, best=rate, phase=roof.count.phase, labels=labels)


def _scaled(samples: Samples, many: float, count: float) -> tuple[float, ...]:
    return tuple(value * many / count for value in samples())


def _measurements(told: Told) -> Iterator[Metric]:
    for measurement in told.record.measurements:
        spec = spec_of(measurement.metric)
        yield Metric(
            spec if spec.unit == measurement.unit else replace(spec, unit=measurement.unit),
            statistics.median(measurement.samples) if measurement.samples else None,
            phase=measurement.phase or STEP,
            provenance=measurement.provenance,
            count=len(measurement.samples),
            samples=partial(tuple, measurement.samples),
        )


def _energy(told: Told) -> Iterator[Metric]:
    """Yields the energy of the step, for its work, and of phases; without a value one metric with the reason."""
    record, finding, reference, use = told.record, told.finding, told.reference, told.record.energy
    if use is None or not record.is_ok:
        return
    labels, validity = finding.labels if finding is not None else (), energy_validity(record)
    conditions = EnergyConditions(validity.value, use.power_limits) if validity is not None else None
    blank = Metric(
        specs.ENERGY, provenance=None, cost=told.emulated, labels=labels, source=use.source, energy=conditions
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
        step = replace(step, interval=interval, verdict=ratio.demand.value, why=_joined(ratio.why, use.why))
    yield step
    yield from _beside(figures, blank)
    phases = phase_energies(record, finding)
    if phases is not None:
        yield from _of_phases(phases, finding, replace(blank, spec=_detail(specs.ENERGY)))


def _of_phases(energies: PhaseEnergies, finding: Finding | None, blank: Metric) -> Iterator[Metric]:
    """Measured ones with their ends, estimates with why they are none; and what of a step no measured one takes."""
    for phase_joules in energies.phases:
        labels = _with_floor(finding, phase_joules.phase)
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


def _beside(figures: EnergyFigures, blank: Metric) -> Iterator[Metric]:
    net = figures.net.middle if figures.net else None
    yield replace(blank, spec=specs.ENERGY_NET, value=net, why=figures.net_why)
    if figures.uncertainty is not None:
        yield replace(blank, spec=specs.ENERGY_UNCERTAINTY, value=figures.uncertainty)
    for spec, joules in figures.per:
        yield replace(blank, spec=spec, value=joules)
    yield replace(blank, spec=specs.POWER, value=figures.watts, provenance=_MEASURED)
    if figures.idle is not None:
        yield replace(blank, spec=specs.IDLE_POWER, value=figures.idle, provenance=_MEASURED, cost=False)


def _memory(told: Told) -> Iterator[Metric]:
    use = told.record.memory
    if use is None or not told.record.is_ok:
        return
    for role, size in use.roles:
        yield _size(spec_of(memory_of_role(role)), size, provenance=Provenance.DERIVED)
    for phase in use.phases:
        yield _size(_detail(specs.PEAK_MEMORY), phase.allocated, phase.phase)
        if phase.reserved is not None:
            yield _size(specs.RESERVED_MEMORY, phase.reserved, phase.phase)
    for spec, counted in ((specs.RESERVED_MEMORY, use.reserved), (specs.PROCESS_MEMORY, use.process)):
        if counted is not None:
            yield _size(spec, counted)
    yield replace(_size(specs.RESIDENT_MEMORY, use.resident), why=use.why)


def _size(spec: MetricSpec, size: int | None, phase: str = STEP, provenance: Provenance = _MEASURED) -> Metric:
    known = None if size is None else float(size)
    return Metric(spec, known, phase=phase, provenance=None if known is None else provenance)


def _capacity(told: Told) -> Iterator[Metric]:
    capacity = told.record.capacity
    if capacity is None:
        return
    share = capacity_ratio(told.record, told.base)
    yield Metric(
        specs.MAX_BATCH,
        None if capacity.batch is None else float(capacity.batch),
        provenance=_MEASURED,
        why=why_no_larger(capacity),
        interval=None if share is None else Interval(share, share, share, 1.0),
    )
    beside = {
        specs.MAX_BATCH_TOKENS: capacity.tokens or None,
        specs.MAX_BATCH_MEMORY: capacity.peak,
        specs.MAX_BATCH_LIMIT: capacity.limit,
    }
    yield from (_size(spec, size) for spec, size in beside.items() if size is not None)
    if capacity.on_device is not None:
        yield _size(specs.DEVICE_MAX_BATCH, capacity.on_device, provenance=Provenance.DERIVED)


def _data(told: Told) -> Iterator[Metric]:
    for statistic in told.record.statistics:
        figures = {specs.VALUES: float(statistic.count), specs.AMAX: statistic.amax}
        for name, above, vanishing in statistic.outside:
            figures |= {
                replace(spec, name=spec.replace("*", name)): share
                for spec, share in ((specs.SHARE_ABOVE, above), (specs.SHARE_VANISHING, vanishing))
            }
        for spec, value in figures.items():
            about = statistic.kind, statistic.role
            yield Metric(spec, value, phase=None, about=about, provenance=_MEASURED, count=statistic.count)


# The order of a case's rows.
MEASURES: list[Callable[[Told], Iterator[Metric]]] = [
    _step_time,
    _replays,
    _means,
    _sustained,
    _relative,
    _phases,
    _by_work,
    tape_metrics,
    coverage_metrics,
    _by_tape,
    _measurements,
    rank_metrics,
    _energy,
    _memory,
    _capacity,
    _data,
]


class EnergyValidity(StrEnum):
    """Whether an energy is certified, or the gravest reason why not."""

    CERTIFIED = "certified"
    SHARED = "shared-device"
    NO_COUNTER = "no-counter"
    TOO_FEW_TICKS = "too-few-ticks"
    THROTTLED = "throttled"
    LIMIT_CHANGED = "power-limit-changed"
    UNRESOLVED = "unresolved"


def energy_validity(record: Record) -> EnergyValidity | None:
    """Returns None where energy was not asked for."""
    use = record.energy
    if use is None:
        return None
    if any(shared(record.watch)):
        return EnergyValidity.SHARED
    if use.source not in COUNTERS:
        return EnergyValidity.NO_COUNTER
    few = TICK_INTERVALS in use.why and not use.windows
    if few or any(window.intervals < LEAST_INTERVALS for window in use.windows):
        return EnergyValidity.TOO_FEW_TICKS
    seen = functools.reduce(operator.or_, (window.throttle or 0 for window in use.windows), 0)
    if any(name not in CHOSEN for name in reasons_in(seen)):
        return EnergyValidity.THROTTLED
    if len(use.power_limits) > 1:
        return EnergyValidity.LIMIT_CHANGED
    return EnergyValidity.UNRESOLVED if why_unresolved(use) else EnergyValidity.CERTIFIED
