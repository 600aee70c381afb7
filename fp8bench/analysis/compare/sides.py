"""The two sides of a comparison, and the figures that a case has on both sides.

A side is several runs with the conditions under which they were measured, such as the machine and torch's version. If
these conditions differ, they may explain a change that the code does not explain.

A best case is lower with more rounds, or with more parts of a step. So every run is cut to the number of rounds, and of
calls per round, that all runs have. If the runs divided their steps into different parts, whole steps are compared.
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
from fp8bench.analysis.metrics import iterate_case_metrics
from fp8bench.analysis.verdicts import FINAL_LEVEL, cell_seconds, count_common_calls, mean_seconds
from fp8bench.model import Case, Finding, Interval, Label, Record, Run, Scalar, Timing
from fp8bench.model.run import BUSY_CORES_FACT, DEVICE_SETTINGS, SWITCH_PREFIX, SWITCHES_SET, TIME_CONDITION_FACTS
from fp8bench.model.specs import RELATIVE_TIME, STEP, TIME, Better, Rank

# Facts that may differ between compared runs. Some change every minute, others are what the comparison is about.
# SWITCHES_SET lists only the unusual switches, which are compared one by one.
_UNCOMPARED_FACTS = frozenset(
    {"load_1min", BUSY_CORES_FACT, "commit", "commit_date", "commit_unknown", "dirty", "interpreter", SWITCHES_SET}
)
# The machine's name in histories: its entry in ~/.asv-machine.json, or the host's name.
_MACHINE_NAME_FACT = "asv_machine"
_HARDWARE_FACTS = frozenset({_MACHINE_NAME_FACT, "asv_cpu", "asv_arch", "asv_num_cpu", "cpu_count", "cpu_affinity"})
_FACTS_THAT_CHANGE_TIMES = frozenset({*TIME_CONDITION_FACTS, "threads", "torch_threads", "asked: isolation"})
# Prefixes of the names of facts that change measured times. Signal handlers have the same prefix as torch's switches,
# but cost no time.
_PREFIXES_OF_FACTS_THAT_CHANGE_TIMES = ("env_", SWITCH_PREFIX, "driver's cuda", "rank ")
_SIGNAL_HANDLER_PREFIX = f"{SWITCH_PREFIX}the handler of "
# Fields of a run's request whose values are compared like facts about the machine. `quick` and `brisk` runs are
# shorter than others.
_COMPARED_REQUEST_FIELDS = ("seed", "quick", "brisk", "rounds", "budget", "isolation", "data")


@dataclass(frozen=True)
class Sighting:
    """The measurement of one case by one run. `reference` is the mode (precision) of the case's reference, or ''."""

    run: Run
    record: Record
    finding: Finding | None
    reference: str = ""


@dataclass(frozen=True)
class ComparisonSide:
    """Runs that are compared together, and their measurements of each case by case id, the newest measurement last."""

    name: str
    runs: tuple[Run, ...]
    sightings_by_case: Mapping[str, tuple[Sighting, ...]] = field(default_factory=dict)

    @property
    def cases(self) -> dict[str, Case]:
        """The newest version of each case, by id."""
        return {name: case_sightings[-1].record.case for name, case_sightings in self.sightings_by_case.items()}

    @property
    def is_measured(self) -> bool:
        """Whether the newest measurement of at least one case succeeded."""
        return any(case_sightings[-1].record.is_ok for case_sightings in self.sightings_by_case.values())


def make_comparison_side(name: str, judged_runs: Sequence[tuple[Run, Mapping[str, Finding]]]) -> ComparisonSide:
    """Makes one side of a comparison. Each of `judged_runs` is a run with its findings by case id."""
    sorted_runs = sorted(judged_runs, key=lambda pair: pair[0].started)
    sightings_by_case: dict[str, list[Sighting]] = {}
    for run, findings in sorted_runs:
        # The cases of a group have the same setting.
        reference_modes = {record.case.setting: record.case.mode for record in run.records if record.is_reference}
        for record in run.records:
            reference = reference_modes.get(record.case.setting, "")
            sighting = Sighting(run, record, findings.get(record.case.id), reference)
            sightings_by_case.setdefault(record.case.id, []).append(sighting)
    runs = tuple(run for run, _ in sorted_runs)
    return ComparisonSide(
        name, runs, {case_id: tuple(case_sightings) for case_id, case_sightings in sightings_by_case.items()}
    )


@dataclass(frozen=True)
class DifferingRunFact:
    """A fact about the runs or their machine that differs between the sides. `of_times` is True if measured times
    depend on it.
    """

    name: str
    before: str
    after: str
    of_times: bool = False


def list_differing_run_facts(old_runs: Sequence[Run], new_runs: Sequence[Run]) -> tuple[DifferingRunFact, ...]:
    """Returns the facts that differ between old and new runs. Facts that measured times depend on come first."""
    old_facts, new_facts = _collect_distinct_facts(old_runs), _collect_distinct_facts(new_runs)
    facts = []
    for name in {**old_facts, **new_facts}:
        if old_facts.get(name) == new_facts.get(name):
            continue
        # Compare a switch (a setting of torch) only if both sides have it, because a version of torch may lack it.
        if name.startswith(SWITCH_PREFIX) and not (name in old_facts and name in new_facts):
            continue
        old_words, new_words = _describe_values(old_facts.get(name, [])), _describe_values(new_facts.get(name, []))
        facts.append(DifferingRunFact(name, old_words, new_words, _may_change_times(name)))
    return tuple(sorted(facts, key=lambda fact: not fact.of_times))


MachineFacts = tuple[tuple[str, Scalar | None], ...]


def collect_hardware_facts(run: Run) -> MachineFacts:
    """Returns the hardware facts of a run, starting with its machine's name. Runs are combined only if these facts are
    equal.
    """
    hardware_facts = [pair for pair in _list_run_facts(run) if _is_hardware_fact(pair[0])]
    return tuple(sorted(hardware_facts, key=lambda pair: pair[0] != _MACHINE_NAME_FACT))


def name_machines(machines: Iterable[MachineFacts]) -> list[str]:
    """Returns the machines' names. If several machines share a name, a fact that distinguishes them follows it, like
    'box (asv_cpu Xeon)'.
    """
    distinct_machines = list(dict.fromkeys(machines))
    machine_names = []
    for machine in distinct_machines:
        name = str(machine[0][1])
        common_machine_facts = set(machine)
        for namesake in distinct_machines:
            if namesake[0] == machine[0]:
                common_machine_facts &= set(namesake)
        differences = ", ".join(
            f"{fact} {value}" for fact, value in machine if (fact, value) not in common_machine_facts
        )
        machine_names.append(f"{name} ({differences})" if differences else name)
    return machine_names


def _is_hardware_fact(name: str) -> bool:
    return name in _HARDWARE_FACTS or name.startswith("device ")


def _may_change_times(name: str) -> bool:
    # The settings of a device are facts such as 'cuda:0 power_cap'.
    setting_word = name.rpartition(" ")[2]
    if _is_hardware_fact(name) or name in _FACTS_THAT_CHANGE_TIMES or setting_word in DEVICE_SETTINGS:
        return True
    return name.startswith(_PREFIXES_OF_FACTS_THAT_CHANGE_TIMES) and not name.startswith(_SIGNAL_HANDLER_PREFIX)


def _collect_distinct_facts(runs: Sequence[Run]) -> dict[str, list[Scalar | None]]:
    """Returns the distinct values of each fact in sorted order."""
    facts: dict[str, dict[Scalar | None, None]] = {}
    for run in runs:
        for name, value in _list_run_facts(run):
            facts.setdefault(name, {})[value] = None
    # The values of a fact may have different types, which Python cannot compare.
    return {name: sorted(values, key=str) for name, values in facts.items()}


def _list_run_facts(run: Run) -> Iterator[tuple[str, Scalar | None]]:
    """Yields the name and value of each fact about a run's environment, its request and its devices."""
    facts = run.environment.facts
    machine = facts.get(_MACHINE_NAME_FACT) or facts.get("machine")
    for name, value in {**facts, _MACHINE_NAME_FACT: machine}.items():
        if name not in _UNCOMPARED_FACTS:
            yield name, value
    for name in _COMPARED_REQUEST_FIELDS:
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


# Resampling fewer rounds than this, as in emulated cases, gives no reliable interval, because a best case is the mean
# of at least three rounds.
MIN_ROUNDS_FOR_BEST_CASE = 8
# The standard error of a median divided by that of a mean, for Gaussian samples.
_MEDIAN_ERROR_FACTOR = math.sqrt(math.pi / 2)
_get_best_ratio, _get_mean_ratio = attrgetter("ratio"), attrgetter("typical")


@dataclass(frozen=True)
class MatchedFigures:
    """One figure of a case on both sides, with an estimate for each run.

    Estimates of `extra` runs only show how much runs differ. `has_few_rounds` is True if the runs have too few rounds
    for an interval. `mean_estimates` are estimates of the mean over all calls, for old, new and extra runs.
    `shown_values` are the two values that the reports of both sides show, or None.
    """

    metric: str
    unit: str
    old: tuple[Estimate, ...]
    new: tuple[Estimate, ...]
    has_few_rounds: bool = False
    extra: tuple[Estimate, ...] = ()
    mean_estimates: tuple[tuple[Estimate, ...], ...] = ()
    shown_values: tuple[float, float] | None = None


def match_step_times(
    old: Sequence[Sighting], new: Sequence[Sighting], extra: Sequence[Sighting] = ()
) -> Iterator[MatchedFigures]:
    """Yields the time of a step on both sides. Also yields its ratio to the reference's time, if all runs have the
    same reference.
    """
    sides = (old, new, extra)
    timings = [_list_side_timings(side) for side in sides]
    if not timings[0] or not timings[1]:
        return
    # 1. Compare only as many rounds, and calls per round, as every run has.
    timings_of_all_sides = [*timings[0], *timings[1], *timings[2]]
    rounds = min(timing.num_rounds for timing in timings_of_all_sides)
    common_call_count = count_common_calls(*timings_of_all_sides)
    has_few_rounds = rounds < MIN_ROUNDS_FOR_BEST_CASE
    # 2. Compare parts of steps (`segments`) only if all runs have the same parts. In a `varying` timing, the sequence
    # of phases differs between steps.
    segment_layouts = {(timing.segments, timing.varying) for timing in timings_of_all_sides}
    whole_steps = len(segment_layouts) > 1 or any(
        sighting.finding is not None and Label.WHOLE_STEPS in sighting.finding.labels
        for sighting in (*old, *new, *extra)
    )
    best_time_estimates = [_estimate_best_cases(side, rounds, common_call_count, whole_steps) for side in timings]
    mean_estimates = tuple(_estimate_mean_times(side, rounds) for side in timings)
    yield MatchedFigures(
        TIME,
        "s",
        best_time_estimates[0],
        best_time_estimates[1],
        has_few_rounds,
        best_time_estimates[2],
        mean_estimates,
        _get_reported_times(old, new),
    )
    # 3. Compare ratios only if all runs have the same reference.
    if len({sighting.reference for sighting in (*old, *new, *extra)}) > 1:
        return
    time_ratios_of_sides = [_estimate_log_ratios(side, _get_best_ratio) for side in sides]
    if time_ratios_of_sides[0] and time_ratios_of_sides[1]:
        mean_estimates = tuple(_estimate_log_ratios(side, _get_mean_ratio) for side in sides)
        has_mean_estimates = mean_estimates[0] and mean_estimates[1]
        yield MatchedFigures(
            RELATIVE_TIME,
            "x",
            time_ratios_of_sides[0],
            time_ratios_of_sides[1],
            has_few_rounds,
            time_ratios_of_sides[2],
            mean_estimates if has_mean_estimates else (),
        )


def _list_side_timings(side: Sequence[Sighting]) -> list[Timing]:
    records = [sighting.record for sighting in side if sighting.record.is_ok]
    return [record.timing for record in records if record.timing is not None and record.timing.slots]


def _get_reported_times(*sides: Sequence[Sighting]) -> tuple[float, float] | None:
    """Returns for each side the best-case seconds that its run reported. For several runs, this is the geometric mean
    of their times. Returns None if a run reported no best case.
    """
    side_mean_seconds = []
    for side in sides:
        reported_seconds = [sighting.finding.best_seconds for sighting in side if sighting.finding is not None]
        if not reported_seconds or not all(reported_seconds):
            return None
        side_mean_seconds.append(math.exp(fmean(math.log(seconds) for seconds in reported_seconds if seconds)))
    return side_mean_seconds[0], side_mean_seconds[1]


def match_noisy_costs(
    old: Sequence[Sighting], new: Sequence[Sighting], extra: Sequence[Sighting] = ()
) -> Iterator[MatchedFigures]:
    """Yields noisy figures for which low values are good, such as energy. The estimate of a run is the median of its
    samples, with the standard error of this median.
    """
    costs_by_side = [list(map(_collect_costs, side)) for side in (old, new, extra)]
    for metric in _list_metrics(costs_by_side[1]):
        if metric.noisy:
            median_estimates_by_side = [_estimate_medians(side, metric) for side in costs_by_side]
            if median_estimates_by_side[0] and median_estimates_by_side[1]:
                yield MatchedFigures(
                    metric.name,
                    metric.unit,
                    median_estimates_by_side[0],
                    median_estimates_by_side[1],
                    extra=median_estimates_by_side[2],
                )


def match_exact_costs(
    old: Sequence[Sighting], new: Sequence[Sighting]
) -> Iterator[tuple[Metric, list[float], list[float]]]:
    """Yields exact figures for which low values are good, such as memory and errors. Each figure comes with its values
    in the old runs and in the new runs. Figures that one side lacks are skipped.
    """
    costs_by_side = [list(map(_collect_costs, side)) for side in (old, new)]
    for metric in _list_metrics(costs_by_side[1]):
        if not metric.noisy:
            old_values, new_values = (list(chain(*_list_metric_samples(side, metric))) for side in costs_by_side)
            if old_values and new_values:
                yield metric, old_values, new_values


_CostByName = Mapping[str, Metric]


def _collect_costs(sighting: Sighting) -> _CostByName:
    """Returns, by name, the main figures of a measured step for which lower values are better, without its time."""
    metric_by_name: dict[str, Metric] = {}
    if not sighting.record.is_ok:
        return metric_by_name
    # Samples need no finding, and best cases are compared only for times.
    for metric in iterate_case_metrics(sighting.record, None):
        is_main_figure = metric.rank is Rank.MAIN and metric.phase == STEP
        if is_main_figure and metric.better is Better.LOWER and metric.name != TIME and metric.samples():
            metric_by_name[metric.name] = metric
    return metric_by_name


def _list_metrics(side: Sequence[_CostByName]) -> Iterable[Metric]:
    """Returns the metrics that any run of a side has. Their descriptions come from the newest run."""
    return dict(chain(*(costs.items() for costs in side))).values()


def _list_metric_samples(side: Sequence[_CostByName], metric: Metric) -> list[tuple[float, ...]]:
    """Returns the samples of a metric from each run that measured it with the same source (sensor) and in the same
    unit.
    """
    costs_of_metric = [costs[metric.name] for costs in side if metric.name in costs]
    return [cost.samples() for cost in costs_of_metric if (cost.source, cost.unit) == (metric.source, metric.unit)]


def _estimate_medians(side: Sequence[_CostByName], metric: Metric) -> tuple[Estimate, ...]:
    median_estimates = []
    for samples in _list_metric_samples(side, metric):
        sample_logs = [math.log(value) for value in samples if 0 < value < math.inf]
        if sample_logs:
            error = (
                _MEDIAN_ERROR_FACTOR * stdev(sample_logs) / math.sqrt(len(sample_logs)) if len(sample_logs) > 1 else 0.0
            )
            median_estimates.append(Estimate(median(sample_logs), error))
    return tuple(median_estimates)


def _list_first_rounds(timing: Timing, rounds: int) -> list[int]:
    return [slot.round for slot in timing.slots[:rounds]]


def _estimate_best_cases(side: Sequence[Timing], rounds: int, calls: int, whole_steps: bool) -> tuple[Estimate, ...]:
    best_case_estimates = []
    for timing in side:
        # Each row is a round, and each column a cell: a part of the step.
        samples = cell_seconds(timing, calls, _list_first_rounds(timing, rounds))
        best_case = stats.resample_best_case(samples.sum(axis=1, keepdims=True) if whole_steps else samples)
        best_case_estimates.append(Estimate(best_case.point, best_case.error))
    return tuple(best_case_estimates)


def _estimate_mean_times(side: Sequence[Timing], rounds: int) -> tuple[Estimate, ...]:
    mean_estimates = []
    for timing in side:
        mean = stats.resample_mean(mean_seconds(timing, _list_first_rounds(timing, rounds)))
        mean_estimates.append(Estimate(mean.point, mean.error))
    return tuple(mean_estimates)


def _estimate_log_ratios(side: Sequence[Sighting], read: Callable[[Finding], Interval | None]) -> tuple[Estimate, ...]:
    """Returns the ratio that `read` takes from each finding as an estimate: the ratio's logarithm, with a standard
    error that follows from the ratio's interval.
    """
    normal_quantile = NormalDist().inv_cdf((1 + FINAL_LEVEL) / 2)
    ratio_estimates = []
    for sighting in side:
        ratio = read(sighting.finding) if sighting.finding is not None else None
        if ratio is not None and sighting.record.is_ok and math.isfinite(ratio.half_width):
            ratio_estimates.append(Estimate(math.log(ratio.point), ratio.half_width / normal_quantile))
    return tuple(ratio_estimates)
