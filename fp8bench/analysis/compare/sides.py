"""The two sides of a comparison, and the figures of a case that both sides have.

A side is several runs and the facts they were measured under. Facts that differ may explain a change that the code does
not.

The best of more rounds is lower simply because there are more, and so is a sum over more parts of a step. So each run
counts only as many of its first rounds, and calls per round, as the shortest run has. If the marks within a step
changed, whole steps are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from statistics import NormalDist, fmean, median, stdev

from fp8bench.analysis import stats
from fp8bench.analysis.compare.interval import Estimate
from fp8bench.analysis.metric import Metric
from fp8bench.analysis.metrics import metrics_of
from fp8bench.analysis.verdicts import FINAL_LEVEL, cells, fewest_calls, means
from fp8bench.model import Case, Finding, Interval, Label, Record, Run, Scalar, Timing
from fp8bench.model.run import BUSY_CORES, CONDITIONS, DEVICE_SETTINGS, SWITCH, SWITCHES_SET
from fp8bench.model.specs import RELATIVE, STEP, TIME, Better, Rank

# Facts that change from minute to minute, or that are the subject of the comparison.
_PASSING = frozenset(
    {"load_1min", BUSY_CORES, "commit", "commit_date", "commit_unknown", "dirty", "interpreter", SWITCHES_SET}
)
# Older runs did not record these; if only one side recorded a fact, it may still be the same on both.
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
# The machine's name, as in a history: its entry in ~/.asv-machine.json, else the host's name.
_MACHINE = "asv_machine"
_HARDWARE = frozenset({_MACHINE, "asv_cpu", "asv_arch", "asv_num_cpu", "cpu_count", "cpu_affinity"})
_TIME_FACTS = frozenset({*CONDITIONS, "threads", "torch_threads", "asked: isolation"})
# Prefixes of facts that times depend on. Signal handlers are also switches, but cost no time.
_PREFIXES = ("env_", SWITCH, "driver's cuda", "rank ")
_SIGNALS = f"{SWITCH}the handler of "
# Fields of a request that count as facts.
_REQUESTED = ("seed", "quick", "brisk", "rounds", "budget", "isolation", "data")


@dataclass(frozen=True)
class Sighting:
    """One case as one run measured it."""

    run: Run
    record: Record
    finding: Finding | None
    reference: str = ""


@dataclass(frozen=True)
class Side:
    """Runs that count as one side, and their sightings by case id, the newest last."""

    name: str
    runs: tuple[Run, ...]
    sightings: Mapping[str, tuple[Sighting, ...]] = field(default_factory=dict)

    @property
    def cases(self) -> dict[str, Case]:
        """The newest version of each case, by id."""
        return {name: sightings[-1].record.case for name, sightings in self.sightings.items()}

    @property
    def is_measured(self) -> bool:
        """Whether any case of it was measured."""
        return any(sightings[-1].record.is_ok for sightings in self.sightings.values())


def make_side(name: str, judged_runs: Sequence[tuple[Run, Mapping[str, Finding]]]) -> Side:
    """Makes a side of some runs, each with its findings by case id."""
    ordered = sorted(judged_runs, key=lambda pair: pair[0].started)
    sightings: dict[str, list[Sighting]] = {}
    for run, findings in ordered:
        references = {record.case.setting: record.case.mode for record in run.records if record.is_reference}
        for record in run.records:
            reference = references.get(record.case.setting, "")
            sighting = Sighting(run, record, findings.get(record.case.id), reference)
            sightings.setdefault(record.case.id, []).append(sighting)
    runs = tuple(run for run, _ in ordered)
    return Side(name, runs, {case: tuple(of_case) for case, of_case in sightings.items()})


@dataclass(frozen=True)
class DifferingFact:
    """A fact that differs between the sides. `of_times`: times depend on it."""

    name: str
    before: str
    after: str
    of_times: bool = False


def list_differing_facts(old_runs: Sequence[Run], new_runs: Sequence[Run]) -> tuple[DifferingFact, ...]:
    """Returns the facts that differ, those that times depend on first."""
    old, new = _collect_facts(old_runs), _collect_facts(new_runs)
    facts = []
    for name in {**old, **new}:
        if old.get(name) == new.get(name):
            continue
        # An older run may not have recorded a fact that was already the same.
        may_be_missing = name in _OLDER or name.startswith(SWITCH)
        if may_be_missing and not (name in old and name in new):
            continue
        old_words, new_words = _describe_values(old.get(name, [])), _describe_values(new.get(name, []))
        facts.append(DifferingFact(name, old_words, new_words, _is_of_times(name)))
    return tuple(sorted(facts, key=lambda fact: not fact.of_times))


Machine = tuple[tuple[str, Scalar | None], ...]


def machine_of(run: Run) -> Machine:
    """Returns the hardware facts of a run, its machine's name first. Runs on different machines are not combined."""
    hardware = [pair for pair in _list_facts(run) if _is_hardware(pair[0])]
    return tuple(sorted(hardware, key=lambda pair: pair[0] != _MACHINE))


def machine_words(machines: Iterable[Machine]) -> list[str]:
    """Returns names; where several machines share one, it is followed by a distinguishing fact: 'box (asv_cpu
    Xeon)'."""
    distinct = list(dict.fromkeys(machines))
    words = []
    for machine in distinct:
        name = str(machine[0][1])
        shared = set(machine)
        for namesake in distinct:
            if namesake[0] == machine[0]:
                shared &= set(namesake)
        differences = ", ".join(f"{fact} {value}" for fact, value in machine if (fact, value) not in shared)
        words.append(f"{name} ({differences})" if differences else name)
    return words


def _is_hardware(name: str) -> bool:
    return name in _HARDWARE or name.startswith("device ")


def _is_of_times(name: str) -> bool:
    if _is_hardware(name) or name in _TIME_FACTS or name.rpartition(" ")[2] in DEVICE_SETTINGS:
        return True
    return name.startswith(_PREFIXES) and not name.startswith(_SIGNALS)


def _collect_facts(runs: Sequence[Run]) -> dict[str, list[Scalar | None]]:
    """Returns the distinct values of each fact, sorted."""
    facts: dict[str, dict[Scalar | None, None]] = {}
    for run in runs:
        for name, value in _list_facts(run):
            facts.setdefault(name, {})[value] = None
    return {name: sorted(values, key=str) for name, values in facts.items()}


def _list_facts(run: Run) -> Iterator[tuple[str, Scalar | None]]:
    """Yields facts of the environment, of the request, and of the devices."""
    facts = run.environment.facts
    machine = facts.get(_MACHINE) or facts.get("machine")
    for name, value in {**facts, _MACHINE: machine}.items():
        if name not in _PASSING:
            yield name, value
    for name in _REQUESTED:
        yield f"asked: {name}", getattr(run.request, name)
    for device in run.devices:
        if not device.accelerated:
            yield f"device {device.key}", device.name
            continue
        yield f"device {device.key}", f"{device.name}, {device.memory_bytes >> 20} MiB"
        yield f"driver's cuda of {device.key}", device.cuda or device.hip


def _describe_values(values: Sequence[Scalar | None]) -> str:
    words = ["none" if value is None else " ".join(str(value).split()) for value in values]
    return " and ".join(words) or "none"


# Emulated cases have this many rounds. The fastest three of fewer rounds are not representative.
LEAST_ROUNDS = 8
# The standard error of a median over that of a mean, for Gaussian samples.
_MEDIAN_ERROR = math.sqrt(math.pi / 2)
_RATIO, _TYPICAL = attrgetter("ratio"), attrgetter("typical")


@dataclass(frozen=True)
class MatchedFigures:
    """One figure of a case on both sides, an estimate for each run.

    `extra` are estimates of further runs, which only show how much runs differ. `few`: too few rounds for an interval
    within a run. `typical` has the same three by the mean over all calls. `shown` are the figures of both sides in the
    reports of their runs; None if these have none.
    """

    metric: str
    unit: str
    old: tuple[Estimate, ...]
    new: tuple[Estimate, ...]
    few: bool = False
    extra: tuple[Estimate, ...] = ()
    typical: tuple[tuple[Estimate, ...], ...] = ()
    shown: tuple[float, float] | None = None


def match_times(
    old: Sequence[Sighting], new: Sequence[Sighting], extra: Sequence[Sighting] = ()
) -> Iterator[MatchedFigures]:
    """Yields the time of a step, and its ratio to the reference where all runs have the same reference."""
    sides = (old, new, extra)
    timings = [_list_timings(side) for side in sides]
    if not timings[0] or not timings[1]:
        return
    # 1. All runs count with as many rounds and calls as the run that has fewest.
    all_timings = [*timings[0], *timings[1], *timings[2]]
    rounds = min(timing.num_rounds for timing in all_timings)
    calls = fewest_calls(*all_timings)
    few = rounds < LEAST_ROUNDS
    # 2. Compare steps part by part only if all have the same parts.
    layouts = {(timing.segments, timing.varying) for timing in all_timings}
    whole = len(layouts) > 1 or any(map(_compares_whole_steps, (*old, *new, *extra)))
    best = [_estimate_best(side, rounds, calls, whole) for side in timings]
    typical = tuple(_estimate_means(side, rounds) for side in timings)
    yield MatchedFigures(TIME, "s", best[0], best[1], few, best[2], typical, _shown_times(old, new))
    # 3. Ratios compare only if all have the same reference.
    if len({sighting.reference for sighting in (*old, *new, *extra)}) > 1:
        return
    ratios = [_estimate_ratios(side, _RATIO) for side in sides]
    if ratios[0] and ratios[1]:
        typical = tuple(_estimate_ratios(side, _TYPICAL) for side in sides)
        has_typical = typical[0] and typical[1]
        yield MatchedFigures(RELATIVE, "x", ratios[0], ratios[1], few, ratios[2], typical if has_typical else ())


def _list_timings(side: Sequence[Sighting]) -> list[Timing]:
    records = [sighting.record for sighting in side if sighting.record.is_ok]
    return [record.timing for record in records if record.timing is not None and record.timing.slots]


def _compares_whole_steps(sighting: Sighting) -> bool:
    return sighting.finding is not None and Label.WHOLE_STEPS in sighting.finding.labels


def _shown_times(*sides: Sequence[Sighting]) -> tuple[float, float] | None:
    """Returns the best cases of both sides as the reports of their runs show them, the geometric mean of several."""
    means = []
    for side in sides:
        times = [sighting.finding.best_seconds for sighting in side if sighting.finding is not None]
        if not times or not all(times):
            return None
        means.append(math.exp(fmean(math.log(seconds) for seconds in times if seconds)))
    return means[0], means[1]


def match_noisy_costs(
    old: Sequence[Sighting], new: Sequence[Sighting], extra: Sequence[Sighting] = ()
) -> Iterator[MatchedFigures]:
    """Yields energy and similar costs, with the error of the median of each run's samples."""
    sides = [list(map(_costs_of, side)) for side in (old, new, extra)]
    for metric in _list_metrics(sides[1]):
        if metric.noisy:
            estimates = [_estimate_medians(side, metric) for side in sides]
            if estimates[0] and estimates[1]:
                yield MatchedFigures(metric.name, metric.unit, estimates[0], estimates[1], extra=estimates[2])


def match_exact_costs(
    old: Sequence[Sighting], new: Sequence[Sighting]
) -> Iterator[tuple[Metric, list[float], list[float]]]:
    """Yields memory and errors, which no clock measures: all values of each side that both sides have."""
    sides = [list(map(_costs_of, side)) for side in (old, new)]
    for metric in _list_metrics(sides[1]):
        if not metric.noisy:
            old_values, new_values = (list(chain(*_list_samples(side, metric))) for side in sides)
            if old_values and new_values:
                yield metric, old_values, new_values


_Costs = Mapping[str, Metric]


def _costs_of(sighting: Sighting) -> _Costs:
    """Returns a step's main figures by name, without its time; low values are good."""
    costs: dict[str, Metric] = {}
    if not sighting.record.is_ok:
        return costs
    for metric in metrics_of(sighting.record, None):
        is_main = metric.rank is Rank.MAIN and metric.phase == STEP
        if is_main and metric.better is Better.LOWER and metric.name != TIME and metric.samples():
            costs[metric.name] = metric
    return costs


def _list_metrics(side: Sequence[_Costs]) -> Iterable[Metric]:
    """Returns the metrics that any run has, each as the newest run with it describes it."""
    return dict(chain(*(costs.items() for costs in side))).values()


def _list_samples(side: Sequence[_Costs], metric: Metric) -> list[tuple[float, ...]]:
    """Returns the samples of runs that have the metric from the same source and in the same unit."""
    same = [costs[metric.name] for costs in side if metric.name in costs]
    return [cost.samples() for cost in same if (cost.source, cost.unit) == (metric.source, metric.unit)]


def _estimate_medians(side: Sequence[_Costs], metric: Metric) -> tuple[Estimate, ...]:
    estimates = []
    for samples in _list_samples(side, metric):
        logs = [math.log(value) for value in samples if 0 < value < math.inf]
        if logs:
            error = _MEDIAN_ERROR * stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
            estimates.append(Estimate(median(logs), error))
    return tuple(estimates)


def _first_rounds(timing: Timing, rounds: int) -> list[int]:
    return [slot.round for slot in timing.slots[:rounds]]


def _estimate_best(side: Sequence[Timing], rounds: int, calls: int, whole: bool) -> tuple[Estimate, ...]:
    estimates = []
    for timing in side:
        samples = cells(timing, calls, _first_rounds(timing, rounds))
        best = stats.best_case(samples.sum(axis=1, keepdims=True) if whole else samples)
        estimates.append(Estimate(best.point, best.error))
    return tuple(estimates)


def _estimate_means(side: Sequence[Timing], rounds: int) -> tuple[Estimate, ...]:
    estimates = []
    for timing in side:
        mean = stats.mean_case(means(timing, _first_rounds(timing, rounds)))
        estimates.append(Estimate(mean.point, mean.error))
    return tuple(estimates)


def _estimate_ratios(side: Sequence[Sighting], read: Callable[[Finding], Interval | None]) -> tuple[Estimate, ...]:
    """Returns estimates of the ratios that `read` takes from findings, with errors from their intervals."""
    reach = NormalDist().inv_cdf((1 + FINAL_LEVEL) / 2)
    estimates = []
    for sighting in side:
        ratio = read(sighting.finding) if sighting.finding is not None else None
        if ratio is not None and sighting.record.is_ok and math.isfinite(ratio.half_width):
            estimates.append(Estimate(math.log(ratio.point), ratio.half_width / reach))
    return tuple(estimates)
