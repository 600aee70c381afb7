"""Sides of a comparison, and the figures of a case that both have, made alike.

A side is several runs with the facts they were measured under: where these differ, something other than the code may
have changed a number.

The best case of more rounds is lower for that alone, and so is a sum over more stretches. So every run of a case counts
with as many of its first rounds, and as many calls of each, as the run that has fewest. If the marks of a step changed,
a step is one stretch on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import NormalDist, fmean, median, stdev

from fp8bench.analysis import stats
from fp8bench.analysis.compare.interval import Estimate
from fp8bench.analysis.metric import Metric
from fp8bench.analysis.metrics import metrics_of
from fp8bench.analysis.verdicts import FINAL_LEVEL, cells, means
from fp8bench.model import Case, Finding, Interval, Label, Record, Run, Scalar, Timing
from fp8bench.model.run import BUSY_CORES, CONDITIONS, DEVICE_SETTINGS, SWITCH, SWITCHES_SET
from fp8bench.model.specs import RELATIVE, STEP, TIME, Better, Rank

# Facts that change from minute to minute, are what is compared, or repeat another fact (asv_python).
_PASSING = frozenset(
    {"load_1min", BUSY_CORES, "commit", "commit_date", "commit_unknown", "dirty", "interpreter", SWITCHES_SET}
)
# Older runs did not record these; a fact that only one side has recorded may be the same on both.
_OLDER = frozenset(
    {
        "torch_threads",
        "torch_interop_threads",
        "float32_matmul_precision",
        "deterministic",
        "fp16_reduced_precision_reduction",
        "bf16_reduced_precision_reduction",
    }
)
# The machine's name, also in a history: its entry in ~/.asv-machine.json, else the host's name.
_MACHINE = "asv_machine"
_HARDWARE = frozenset({_MACHINE, "asv_cpu", "asv_arch", "asv_num_cpu", "cpu_count", "cpu_affinity"})
_OF_TIMES = frozenset({*CONDITIONS, "threads", "torch_threads", "asked: isolation"})
# Each begins the names of several conditions.
_PREFIXES = ("env_", SWITCH, "driver's cuda", "rank ")
_SIGNALS = f"{SWITCH}the handler of "
_ASKED = ("seed", "quick", "rounds", "budget", "isolation", "data")

Seen = tuple[Run, Mapping[str, Finding]]


@dataclass(frozen=True)
class Sighting:
    """What one run has of one case."""

    run: Run
    record: Record
    finding: Finding | None
    reference: str = ""


@dataclass(frozen=True)
class Side:
    """Runs that count as one, and their sightings by case id, the newest last."""

    name: str
    runs: tuple[Run, ...]
    sightings: Mapping[str, tuple[Sighting, ...]] = field(default_factory=dict)

    @property
    def cases(self) -> dict[str, Case]:
        return {name: seen[-1].record.case for name, seen in self.sightings.items()}

    @property
    def measured(self) -> bool:
        return any(sighting.record.is_ok for seen in self.sightings.values() for sighting in seen)


def side_of(name: str, seen: Sequence[Seen]) -> Side:
    ordered = sorted(seen, key=lambda pair: pair[0].started)
    sightings: dict[str, list[Sighting]] = {}
    for run, findings in ordered:
        leads = {record.case.setting: record.case.mode for record in run.records if record.is_reference}
        for record in run.records:
            lead = leads.get(record.case.setting, "")
            sighting = Sighting(run, record, findings.get(record.case.id), lead)
            sightings.setdefault(record.case.id, []).append(sighting)
    return Side(name, tuple(run for run, _ in ordered), {key: tuple(value) for key, value in sightings.items()})


@dataclass(frozen=True)
class Differing:
    """A fact that differs between the sides, in words. `of_times` means that times depend on it."""

    name: str
    before: str
    after: str
    of_times: bool = False


def differing(before: Sequence[Run], after: Sequence[Run]) -> tuple[Differing, ...]:
    old, new = _all_facts(before), _all_facts(after)
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    names = [
        name for name in changed if (name in old and name in new) or not (name in _OLDER or name.startswith(SWITCH))
    ]
    facts = [
        Differing(name, _shown(old.get(name, [])), _shown(new.get(name, [])), _is_of_times(name)) for name in names
    ]
    return tuple(sorted(facts, key=lambda fact: not fact.of_times))


Machine = tuple[tuple[str, Scalar | None], ...]


def machine_of(run: Run) -> Machine:
    """Returns the machine of a run, its name first; runs on different machines are not put together."""
    return tuple(sorted((pair for pair in _facts(run) if _is_hardware(pair[0])), key=lambda pair: pair[0] != _MACHINE))


def machine_words(machines: Iterable[Machine]) -> list[str]:
    """Returns 'box' and 'other'; after a name that several have, what differs: 'box (asv_cpu Xeon)'."""
    known = list(dict.fromkeys(machines))
    words = []
    for machine in known:
        alike = [other for other in known if other[0] == machine[0]]
        own = ", ".join(f"{pair[0]} {pair[1]}" for pair in machine if any(pair not in other for other in alike))
        words.append(f"{machine[0][1]} ({own})" if own else str(machine[0][1]))
    return words


def _is_hardware(name: str) -> bool:
    return name in _HARDWARE or name.startswith("device ")


def _is_of_times(name: str) -> bool:
    if _is_hardware(name) or name in _OF_TIMES or name.rpartition(" ")[2] in DEVICE_SETTINGS:
        return True
    return name.startswith(_PREFIXES) and not name.startswith(_SIGNALS)


def _all_facts(runs: Sequence[Run]) -> dict[str, list[Scalar | None]]:
    facts: dict[str, dict[Scalar | None, None]] = {}
    for run in runs:
        for name, value in _facts(run):
            facts.setdefault(name, {})[value] = None
    return {name: sorted(values, key=str) for name, values in facts.items()}


def _facts(run: Run) -> Iterator[tuple[str, Scalar | None]]:
    facts = run.environment.facts
    for name, value in {**facts, _MACHINE: facts.get(_MACHINE) or facts.get("machine")}.items():
        if name not in _PASSING:
            yield name, value
    for name in _ASKED:
        yield f"asked: {name}", getattr(run.request, name)
    for device in run.devices:
        yield (
            f"device {device.key}",
            f"{device.name}, {device.memory_bytes >> 20} MiB" if device.accelerated else device.name,
        )
        if device.accelerated:
            yield f"driver's cuda of {device.key}", device.cuda or device.hip


def _shown(values: Sequence[Scalar | None]) -> str:
    return " and ".join("none" if value is None else " ".join(str(value).split()) for value in values) or "none"


# Emulated cases have so many rounds; of fewer, the fastest three are not representative.
LEAST_ROUNDS = 8
# The standard error of a median over that of a mean, for Gaussian samples.
_MEDIANS = math.sqrt(math.pi / 2)
_RATIO, _TYPICAL = attrgetter("ratio"), attrgetter("typical")


@dataclass(frozen=True)
class MatchedFigures:
    """One figure of a case on both sides, an estimate for each run. `few`: too few rounds for an interval within a run.

    `beside` are other runs, which show how much runs differ. `typical` has all three by the mean over all calls.
    `shown` are the figures of both sides in the reports of their runs; None if these have none.
    """

    metric: str
    unit: str
    before: tuple[Estimate, ...]
    after: tuple[Estimate, ...]
    few: bool = False
    beside: tuple[Estimate, ...] = ()
    typical: tuple[tuple[Estimate, ...], ...] = ()
    shown: tuple[float, float] | None = None


def timed(
    before: Sequence[Sighting], after: Sequence[Sighting], beside: Sequence[Sighting] = ()
) -> Iterator[MatchedFigures]:
    timings = [
        [timing for sighting in side if sighting.record.is_ok and (timing := sighting.record.timing) and timing.slots]
        for side in (before, after, beside)
    ]
    if not all(timings[:2]):
        return
    all_timings = [timing for side in timings for timing in side]
    rounds = min(timing.num_rounds for timing in all_timings)
    few = rounds < LEAST_ROUNDS
    calls = min(len(slot.calls_ns) for timing in all_timings for slot in timing.slots)
    alike = len({(timing.segments, timing.varying) for timing in all_timings}) == 1
    findings = (sighting.finding for side in (before, after, beside) for sighting in side)
    alike = alike and not any(finding is not None and Label.WHOLE_STEPS in finding.labels for finding in findings)
    old, new, others = (tuple(_best_case(timing, rounds, calls, alike) for timing in side) for side in timings)
    means_of = (
        (stats.mean_case(means(timing, [slot.round for slot in timing.slots[:rounds]])) for timing in side)
        for side in timings
    )
    typical = tuple(tuple(Estimate(mean.point, mean.error) for mean in side) for side in means_of)
    yield MatchedFigures(TIME, "s", old, new, few, others, typical, _shown_times(before, after))
    if len({sighting.reference for sighting in (*before, *after, *beside)}) == 1:
        sides = (before, after, beside)
        old, new, others = (tuple(_ratios(side, _RATIO)) for side in sides)
        if old and new:
            typical = tuple(tuple(_ratios(side, _TYPICAL)) for side in sides)
            yield MatchedFigures(RELATIVE, "x", old, new, few, others, typical if all(typical[:2]) else ())


def _shown_times(before: Sequence[Sighting], after: Sequence[Sighting]) -> tuple[float, float] | None:
    """Returns the best cases of both sides as their runs' own reports show them, the geometric mean of several."""
    sides = []
    for side in (before, after):
        times = [sighting.finding.best_seconds for sighting in side if sighting.finding is not None]
        if not times or not all(times):
            return None
        sides.append(math.exp(fmean(math.log(seconds) for seconds in times if seconds)))
    return sides[0], sides[1]


def sensed(
    before: Sequence[Sighting], after: Sequence[Sighting], beside: Sequence[Sighting] = ()
) -> Iterator[MatchedFigures]:
    """Yields energy and its like, with the error of the median of each run's samples."""
    sides = [list(map(_costs, side)) for side in (before, after, beside)]
    for metric in _names(sides[1]):
        if metric.noisy:
            old, new, others = (tuple(_sensed(side, metric)) for side in sides)
            if old and new:
                yield MatchedFigures(metric.name, metric.unit, old, new, beside=others)


def counted(before: Sequence[Sighting], after: Sequence[Sighting]) -> Iterator[tuple[Metric, list[float], list[float]]]:
    """Yields memory and errors, which no clock measures: a value for each run of what both sides have."""
    sides = [list(map(_costs, side)) for side in (before, after)]
    for metric in _names(sides[1]):
        if not metric.noisy:
            old, new = ([value for values in _alike(side, metric) for value in values] for side in sides)
            if old and new:
                yield metric, old, new


_Costs = Mapping[str, Metric]


def _costs(sighting: Sighting) -> _Costs:
    if not sighting.record.is_ok:
        return {}
    told = (metric for metric in metrics_of(sighting.record, None) if metric.rank is Rank.MAIN and metric.phase == STEP)
    return {
        metric.name: metric
        for metric in told
        if metric.better is Better.LOWER and metric.name != TIME and metric.samples()
    }


def _names(side: Sequence[_Costs]) -> Iterable[Metric]:
    return {name: metric for costs in side for name, metric in costs.items()}.values()


def _alike(side: Sequence[_Costs], metric: Metric) -> Iterator[tuple[float, ...]]:
    for costs in side:
        own = costs.get(metric.name)
        if own is not None and (own.source, own.unit) == (metric.source, metric.unit):
            yield own.samples()


def _sensed(side: Sequence[_Costs], metric: Metric) -> Iterator[Estimate]:
    for samples in _alike(side, metric):
        logs = [math.log(value) for value in samples if 0 < value < math.inf]
        if logs:
            error = _MEDIANS * stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
            yield Estimate(median(logs), error)


def _best_case(timing: Timing, rounds: int, calls: int, alike: bool) -> Estimate:
    first = [slot.round for slot in timing.slots[:rounds]]
    samples = cells(timing, calls, first)
    best = stats.best_case(samples if alike else samples.sum(axis=1, keepdims=True))
    return Estimate(best.point, best.error)


def _ratios(side: Sequence[Sighting], of: Callable[[Finding], Interval | None]) -> Iterator[Estimate]:
    reach = NormalDist().inv_cdf((1 + FINAL_LEVEL) / 2)
    for sighting in side:
        ratio = of(sighting.finding) if sighting.finding is not None else None
        if ratio is not None and sighting.record.is_ok and math.isfinite(ratio.half_width):
            yield Estimate(math.log(ratio.point), ratio.half_width / reach)
