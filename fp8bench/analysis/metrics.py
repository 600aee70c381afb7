"""What a run says of a case: every figure of it, once, with its unit and what else a reader must know of it.

The rows and boards for other programs, the history and comparisons read this one list, and so know no figure by name.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial

from fp8bench.analysis.energy import EnergyFigures, energy_figures, energy_ratio, energy_samples, why_no_energy
from fp8bench.analysis.energy_validity import energy_validity
from fp8bench.analysis.metric import (
    ENERGY,
    MEAN,
    MEMORY,
    PER,
    RELATIVE_MEAN,
    REPLAY,
    STEP,
    TIME,
    Better,
    EnergyConditions,
    Metric,
    Rank,
    Reference,
    better_of,
    capacity_ratio,
    why_no_larger,
)
from fp8bench.analysis.overlaps import overlap_metrics
from fp8bench.analysis.phase_energy import PhaseEnergies, per_work, phase_energies
from fp8bench.analysis.pipelines import pipeline_metrics
from fp8bench.analysis.ranks import rank_metrics
from fp8bench.analysis.roofline import phase_roofs
from fp8bench.analysis.samples import (
    mean_sample,
    phase_medians,
    phase_samples,
    relative_mean_sample,
    relative_samples,
    step_samples,
)
from fp8bench.analysis.scaling import scaling_metrics
from fp8bench.analysis.sustained import sustained_figures, sustained_ratio, sustained_samples
from fp8bench.analysis.tapes import coverage_metrics, tape_metrics
from fp8bench.analysis.verdicts import best_phases, totals
from fp8bench.model import (
    RELATIVE,
    UNATTRIBUTED,
    Finding,
    Interval,
    Label,
    Level,
    Measurement,
    Provenance,
    Record,
    Status,
    Verdict,
)
from fp8bench.model.metric_names import SHARE_ABOVE, SHARE_VANISHING, OwnMetric, memory_of_role

_RATES = {
    "tokens": (OwnMetric.TOKENS_PER_SECOND, "tok/s"),
    "flops": (OwnMetric.FLOPS_PER_SECOND, "FLOP/s"),
    "bytes": (OwnMetric.BYTES_PER_SECOND, "B/s"),
}
_Samples = Callable[[], tuple[float, ...]]


def metrics_of(record: Record, finding: Finding | None, reference: Reference | None = None) -> Iterator[Metric]:
    """The step's time first, which a case without one has too, with its reason. Without a finding no best cases."""
    # Once for all that rests on it, and only where somebody asks.
    steps = cache(partial(step_samples, record.timing)) if record.timing is not None else tuple
    yield _step_time(record, finding, steps)
    yield from _replays(record)
    yield from _means(record, reference)
    yield from _sustained(record, finding, reference)
    yield from _relative(record, finding, reference)
    yield from _phases(record, finding)
    yield from _by_work(record, finding, steps)
    yield from tape_metrics(record)
    yield from coverage_metrics(record)
    yield from _by_tape(record, finding)
    for measurement in record.measurements:
        yield _measured(measurement)
    yield from rank_metrics(record, finding.median_seconds if finding is not None else None)
    yield from overlap_metrics(record)
    yield from pipeline_metrics(record)
    yield from scaling_metrics(record)
    yield from _energy(record, finding, reference)
    yield from _memory(record)
    yield from _capacity(record, reference)
    yield from _data(record)


def _emulated(record: Record) -> bool:
    return record.support.level is Level.EMULATED


def _clocked(record: Record, metric: Metric) -> Metric:
    """With how many rounds and calls it rests on."""
    timing = record.timing
    return metric if timing is None else replace(metric, rounds=timing.num_rounds, count=timing.num_calls)


def _step_time(record: Record, finding: Finding | None, steps: _Samples) -> Metric:
    emulated = _emulated(record)
    blank = Metric(TIME, "s", cost=emulated, samples=steps)
    if finding is None:
        return blank
    if finding.best_seconds is None:
        return replace(blank, verdict=finding.verdict_words, why=finding.why)
    metric = replace(
        blank, value=finding.median_seconds, best=finding.best_seconds, provenance=Provenance.MEASURED,
        # Whatever is known of it, the time of an emulation is no speed.
        interval=None if emulated else finding.ratio,
        verdict=Verdict.EMULATED.value if emulated else finding.verdict_words, labels=finding.labels,
        why=_joined(finding.why, dict(finding.label_reasons).get(Label.EAGER_QUANTISER, "")),
    )  # fmt: skip
    return _clocked(record, metric)


def _replays(record: Record) -> Iterator[Metric]:
    """The device's time of a step that was done again as one launch; where that was tried and failed, why."""
    found = record.replays
    if found is None:
        return
    blank = Metric(REPLAY, "s", provenance=Provenance.MEASURED, why=found.why)
    if found.timing is None:
        yield blank
        return
    best = sum(seconds for _, seconds in best_phases(found.timing))
    middle = statistics.median(totals(found.timing).tolist())
    rounds, calls = found.timing.num_rounds, found.timing.num_calls
    yield replace(
        blank,
        value=middle,
        best=best,
        rounds=rounds,
        count=calls,
        samples=partial(step_samples, found.timing),
        why=found.loaded and f"without loading {found.loaded}",
    )


def _means(record: Record, reference: Reference | None) -> Iterator[Metric]:
    """Over all calls. In a run they stand beside the time's ratio."""
    if record.timing is None:
        return
    blank = Metric(MEAN, "s", provenance=Provenance.MEASURED, rank=Rank.RESTATED, cost=_emulated(record))
    yield replace(_clocked(record, blank), samples=partial(mean_sample, record.timing))
    if not _emulated(record):
        samples = partial(relative_mean_sample, record, reference.record if reference is not None else None)
        yield replace(blank, name=RELATIVE_MEAN, unit="x", provenance=Provenance.DERIVED, samples=samples)


def _sustained(record: Record, finding: Finding | None, reference: Reference | None) -> Iterator[Metric]:
    """In turns of seconds."""
    found = sustained_figures(record, finding)
    if found is not None and record.status is Status.OK:
        yield Metric(
            OwnMetric.SUSTAINED_TIME, "s", found.seconds, provenance=Provenance.MEASURED, cost=_emulated(record),
            interval=sustained_ratio(record, reference.record if reference is not None else None), count=found.turns,
            rank=Rank.DETAIL, samples=partial(sustained_samples, record),
        )  # fmt: skip
        yield from _beside_time(OwnMetric.SUSTAINED_CLOCK, "Hz", found.clock)
        yield from _beside_time(OwnMetric.SUSTAINED_POWER, "W", found.watts)
    yield from _beside_time(OwnMetric.SM_CLOCK, "Hz", record.timing.clock if record.timing is not None else None)


def _beside_time(name: str, unit: str, value: float | None) -> Iterator[Metric]:
    """What the device said of itself meanwhile, where it did: neither more nor less of it is better."""
    if value is not None:
        measured = Provenance.MEASURED
        yield Metric(name, unit, value, provenance=measured, better=Better.NONE, rank=Rank.DETAIL)


def _joined(*words: str) -> str:
    return "; ".join(filter(None, words))


def _relative(record: Record, finding: Finding | None, reference: Reference | None) -> Iterator[Metric]:
    """The time over the reference's of the same rounds."""
    if record.timing is None or _emulated(record):
        return
    interval = finding.ratio if finding is not None else None
    samples = partial(relative_samples, record, reference.record if reference is not None else None)
    point = interval.point if interval is not None else None
    yield Metric(
        RELATIVE, "x", point, interval=interval, provenance=Provenance.DERIVED, rank=Rank.RESTATED, samples=samples
    )


def _phases(record: Record, finding: Finding | None) -> Iterator[Metric]:
    """Time of each phase the step has, and its share; best cases sum to the step's."""
    timing = record.timing
    medians = phase_medians(timing) if timing is not None and finding is not None else {}
    if finding is None:
        found: dict[str, float | None] = dict.fromkeys(timing.segments.phases if timing is not None else ())
    else:
        known = dict(finding.phases) if finding.best_seconds else {}
        found = {name: best for name, best in known.items() if best or name in medians or name == UNATTRIBUTED}
    for phase, best in found.items():
        # What the marks of no phase cover is 0 in every call where there is nothing.
        seconds, share = medians.get(phase, (0.0, 0.0) if best == 0 else (None, None))
        samples = tuple if timing is None else partial(phase_samples, timing, phase)
        metric = Metric(
            TIME, "s", seconds, best, phase, provenance=Provenance.MEASURED, cost=_emulated(record),
            labels=_with_floor(finding, phase), samples=samples,
        )  # fmt: skip
        yield _clocked(record, metric)
        if finding is not None and finding.best_seconds and best is not None:
            yield replace(
                _clocked(record, metric), name=OwnMetric.SHARE_OF_STEP, unit="ratio", value=share,
                best=best / finding.best_seconds, provenance=Provenance.DERIVED, better=Better.NONE, rank=Rank.DETAIL,
            )  # fmt: skip


def _with_floor(finding: Finding | None, phase: str) -> tuple[Label, ...]:
    """The labels of a case and, of a phase too short to be told from its markers, that it is."""
    if finding is None:
        return ()
    labels = {*finding.labels, *([Label.BELOW_FLOOR] if phase in finding.below_floor else [])}
    return tuple(label for label in Label if label in labels)


def _by_work(record: Record, finding: Finding | None, steps: _Samples) -> Iterator[Metric]:
    """By each count of work, what is done in a second, and the time for so many; nothing for emulations, which have no
    speed."""
    counts = {name: count for name in _RATES if (count := getattr(record.work, name))}
    if _emulated(record):
        return
    for name, count in counts.items():
        if finding is not None and finding.best_seconds:
            median = count / finding.median_seconds if finding.median_seconds else None
            rate = Metric(
                *_RATES[name], median, count / finding.best_seconds, labels=finding.labels,
                provenance=Provenance.DERIVED, better=Better.HIGHER, rank=Rank.DETAIL,
            )  # fmt: skip
            yield _clocked(record, rate)
        if record.timing is None:
            continue
        metric, many = PER[name]
        samples = partial(_scaled, steps, many, count)
        yield Metric(metric, "s", provenance=Provenance.DERIVED, rank=Rank.RESTATED, samples=samples)


def _by_tape(record: Record, finding: Finding | None) -> Iterator[Metric]:
    """What each phase did in a second, by what was counted of it, and how near that is to the most."""
    for roof in () if _emulated(record) else phase_roofs(record, finding):
        detail = partial(
            Metric, phase=roof.count.phase, provenance=Provenance.DERIVED, better=Better.HIGHER, rank=Rank.DETAIL,
            labels=_with_floor(finding, roof.count.phase),
        )  # fmt: skip
        if roof.count.flops:
            yield detail(OwnMetric.FLOPS_PER_SECOND, "FLOP/s", best=roof.flop_rate)
        if roof.byte_rate is not None:
            yield detail(OwnMetric.BYTES_PER_SECOND, "B/s", best=roof.byte_rate)
        for name, share in (
            (OwnMetric.SHARE_OF_CEILING, roof.of_ceiling), (OwnMetric.SHARE_OF_DATASHEET, roof.of_sheet),
        ):  # fmt: skip
            if share is not None:
                yield detail(name, "ratio", best=share)


def _scaled(samples: _Samples, many: float, count: float) -> tuple[float, ...]:
    return tuple(value * many / count for value in samples())


def _measured(one: Measurement) -> Metric:
    return Metric(
        one.metric, one.unit, statistics.median(one.samples) if one.samples else None, phase=one.phase or STEP,
        provenance=one.provenance, better=better_of(one.metric), count=len(one.samples), samples=lambda: one.samples,
    )  # fmt: skip


def _energy(record: Record, finding: Finding | None, reference: Reference | None) -> Iterator[Metric]:
    """Of the step, for its work and of phases; where nobody could tell, one figure without a value, with the reason."""
    use = record.energy
    if use is None or record.status is not Status.OK:
        return
    labels = finding.labels if finding is not None else ()
    blank = Metric(ENERGY, "J", cost=_emulated(record), labels=labels, source=use.source, energy=_conditions(record))
    found = energy_figures(record)
    if found is None:
        yield replace(blank, why=why_no_energy(record))
        return
    blank = replace(blank, count=len(found.windows))
    step = replace(
        blank,
        value=found.gross.middle,
        provenance=Provenance.MEASURED,
        why=use.why,
        samples=lambda: energy_samples(use),
    )
    ratio = reference and energy_ratio(record, reference.record, (*labels, *reference.labels))
    if ratio is not None:
        interval = Interval(ratio.point, ratio.low, ratio.high, 0.0)
        step = replace(step, interval=interval, verdict=ratio.demand.value, why=_joined(ratio.why, use.why))
    yield step
    yield from _beside(found, replace(blank, provenance=Provenance.DERIVED))
    phases = phase_energies(record, finding)
    if phases is not None:
        yield from _of_phases(record, phases, finding, replace(blank, rank=Rank.DETAIL))


def _conditions(record: Record) -> EnergyConditions | None:
    use, validity = record.energy, energy_validity(record)
    return None if use is None or validity is None else EnergyConditions(validity.value, use.power_limits)


def _of_phases(record: Record, found: PhaseEnergies, finding: Finding | None, blank: Metric) -> Iterator[Metric]:
    """Measured ones with their ends, estimates with why they are none; and what of a step no measured one takes."""
    for one in found.phases:
        labels = _with_floor(finding, one.phase)
        phase = replace(blank, value=one.joules, phase=one.phase, provenance=one.provenance, labels=labels, why=one.why)
        yield phase
        for name, end in ((OwnMetric.ENERGY_LOW, one.low), (OwnMetric.ENERGY_HIGH, one.high)):
            if end is not None:
                yield replace(phase, name=name, value=end)
        if one.found is not None:
            for name, joules in per_work(record, one):
                yield replace(phase, name=name, value=joules, provenance=Provenance.DERIVED)
    if found.residual is not None:
        yield replace(
            blank, name=OwnMetric.ENERGY_RESIDUAL, value=found.residual.middle, provenance=Provenance.DERIVED,
            why=found.void, better=Better.NONE,
        )  # fmt: skip


def _beside(found: EnergyFigures, blank: Metric) -> Iterator[Metric]:
    """What else the windows say of the step, and the power of the device."""
    net = found.net.middle if found.net else None
    yield replace(blank, name=OwnMetric.ENERGY_NET, value=net, why=found.net_why)
    if found.uncertainty is not None:
        yield replace(blank, name=OwnMetric.ENERGY_UNCERTAINTY, unit="ratio", value=found.uncertainty, rank=Rank.DETAIL)
    for name, joules in found.per:
        yield replace(blank, name=name, value=joules)
    power = replace(blank, name=OwnMetric.POWER, unit="W", provenance=Provenance.MEASURED)
    yield replace(power, value=found.watts)
    if found.idle is not None:
        yield replace(power, name=OwnMetric.IDLE_POWER, value=found.idle, cost=False, better=Better.NONE)


def _memory(record: Record) -> Iterator[Metric]:
    """What it is for, the highest points of phases, what others count. What could not be had has its reason."""
    use = record.memory
    if use is None or record.status is not Status.OK:
        return
    for role, size in use.roles:
        yield _size(memory_of_role(role), size, provenance=Provenance.DERIVED)
    for one in use.phases:
        yield _size(MEMORY, one.allocated, one.phase)
        if one.reserved is not None:
            yield _size(OwnMetric.RESERVED_MEMORY, one.reserved, one.phase)
    for name, counted in ((OwnMetric.RESERVED_MEMORY, use.reserved), (OwnMetric.PROCESS_MEMORY, use.process)):
        if counted is not None:
            yield _size(name, counted)
    yield replace(_size(OwnMetric.RESIDENT_MEMORY, use.resident), why=use.why)


def _size(name: str, size: int | None, phase: str = STEP, provenance: Provenance = Provenance.MEASURED) -> Metric:
    known = None if size is None else float(size)
    return Metric(name, "B", known, phase=phase, provenance=provenance if known is not None else None, rank=Rank.DETAIL)


def _capacity(record: Record, reference: Reference | None) -> Iterator[Metric]:
    """The largest batch that fits; without an answer one figure with the reason."""
    found = record.capacity
    if found is None:
        return
    share = capacity_ratio(record, reference.record if reference is not None else None)
    batch = Metric(
        OwnMetric.MAX_BATCH, "count", None if found.batch is None else float(found.batch),
        provenance=Provenance.MEASURED, better=Better.HIGHER, rank=Rank.DETAIL, why=why_no_larger(found),
        interval=None if share is None else Interval(share, share, share, 1.0),
    )  # fmt: skip
    yield batch
    if found.tokens:
        yield replace(batch, name=OwnMetric.MAX_BATCH_TOKENS, value=float(found.tokens), interval=None, why="")
    for name, size in ((OwnMetric.MAX_BATCH_MEMORY, found.peak), (OwnMetric.MAX_BATCH_LIMIT, found.limit)):
        if size is not None:
            yield _size(name, size)


def _data(record: Record) -> Iterator[Metric]:
    """What the data are made of, before any scaling."""
    for one in record.statistics:
        figures = [(str(OwnMetric.VALUES), "count", float(one.count)), (OwnMetric.AMAX, "", one.amax)]
        for name, above, vanishing in one.outside:
            figures += [(f"{SHARE_ABOVE}{name}", "ratio", above), (f"{SHARE_VANISHING}{name}", "ratio", vanishing)]
        for name, unit, value in figures:
            yield Metric(
                name, unit, value, phase=None, about=(one.kind, one.role), provenance=Provenance.MEASURED,
                better=Better.NONE, rank=Rank.DETAIL, count=one.count,
            )  # fmt: skip
