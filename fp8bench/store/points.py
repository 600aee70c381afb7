"""Extracts points of the tracked series from a run, and merges the points of several runs of one commit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

from fp8bench.analysis.metric import Metric, Reference
from fp8bench.errors import UsageError
from fp8bench.model import (
    ENERGY_SOURCE,
    Case,
    Cell,
    Conditions,
    DeviceFacts,
    Level,
    Params,
    Point,
    Record,
    Run,
    Series,
    Status,
)
from fp8bench.model.raw import QUANTISERS_VARIABLE
from fp8bench.model.run import BENCH, DEVICE_SETTINGS, TIME_CONDITION_FACTS
from fp8bench.model.specs import COUNTS, ENERGY, STEP, TIME, MetricSpec, time_of_phase
from fp8bench.model.stopping import EMULATED_ROUNDS, LEAST_ROUNDS
from fp8bench.protocols import Grid, Workload
from fp8bench.registry import workloads
from fp8bench.store.series import (
    check_history_grid,
    class_name,
    join_versions,
    list_grid_cells,
    list_tracked_metrics,
    make_series,
    reference_precision,
)

# asv shows few digits of numbers in these units, but all digits of numbers in other units.
_UNITS_WITH_FEW_DIGITS = ("seconds", "bytes")
_SIGNIFICANT_DIGITS = 6
# Facts about the machine that change the time of a step, but not its counts (FLOPs, bytes, launches).
_FACTS_IRRELEVANT_TO_COUNTS = frozenset(
    {
        "python",
        "cpu_count",
        "cpu_affinity",
        "cpu_governor",
        "cpu_turbo_off",
        "smt",
        "cgroup_cpu_max",
        "imports_sha256",
        *DEVICE_SETTINGS,
    }
)
# This environment variable turns compiled quantisers (software casts) on or off. It is not a measuring condition,
# because each record shows how its quantisers ran.
_QUANTISERS_FACT_NAME = f"env_{QUANTISERS_VARIABLE}"


@dataclass(frozen=True)
class RunHistoryPoints:
    """The points that a run adds to the history, with their series. `untracked_cases` is the number of cases that the
    history does not track, and `why` is the reason.
    """

    points: tuple[Point, ...] = ()
    series: tuple[Series, ...] = ()
    untracked_cases: int = 0
    why: str = ""


def extract_history_points(run: Run) -> RunHistoryPoints:
    """Returns the points that a run adds to the history, and the number of cases that the history does not track."""
    reason = _explain_untracked_run(run)
    if reason:
        return RunHistoryPoints(untracked_cases=len(run.records), why=reason)
    records_by_workload: dict[str, list[Record]] = {}
    for record in run.records:
        records_by_workload.setdefault(record.case.workload, []).append(record)
    points: list[Point] = []
    series: list[Series] = []
    untracked_cases = 0
    for name, records in records_by_workload.items():
        workload_points = _extract_workload_points(name, records, run)
        points += workload_points.points
        series += workload_points.series
        untracked_cases += workload_points.untracked_cases
        reason = reason or workload_points.why
    return RunHistoryPoints(tuple(points), tuple(series), untracked_cases, reason)


def merge_points(points: Sequence[Point], series: Iterable[Series] = ()) -> dict[tuple[str, Cell], Point]:
    """Merges the points of several runs of one commit into one point for each cell of each series. The points must be
    sorted oldest first.

    A merged point has the samples of its newest measurement, and of older measurements under the same conditions. Hasty
    measurements (with few rounds) count only if the cell has no complete ones.

    Only points of one version of a series are merged: the version in `series`, or if no point has it, the version of
    the newest point.
    """
    current_versions = {(declared.name, declared.version) for declared in series}
    version_by_series = {point.series: point.version for point in points}
    version_by_series |= {
        point.series: point.version for point in points if (point.series, point.version) in current_versions
    }
    points_by_cell: dict[tuple[str, Cell], list[Point]] = {}
    for point in points:
        if point.version == version_by_series[point.series]:
            points_by_cell.setdefault((point.series, point.cell), []).append(point)
    return {key: _merge_points_of_cell(cell_points) for key, cell_points in points_by_cell.items()}


def _merge_points_of_cell(points: Sequence[Point]) -> Point:
    if len(points) == 1:
        return points[0]
    points_with_samples = [point for point in points if point.samples]
    if not points_with_samples:
        return replace(points[-1], runs=len(points))
    preferred_points = [point for point in points_with_samples if not point.hasty] or points_with_samples
    newest_point = preferred_points[-1]
    same_condition_points = [point for point in preferred_points if point.under == newest_point.under]
    if metric_of_point(newest_point) in COUNTS:  # keep the newest count: the median of several may be a fraction
        return replace(newest_point, runs=len(same_condition_points))
    samples = chain.from_iterable(point.samples for point in same_condition_points)
    return replace(newest_point, samples=tuple(samples), runs=len(same_condition_points))


def _explain_untracked_run(run: Run) -> str:
    """Returns why a run cannot be compared with asv's measurements. Returns '' if it can be."""
    request = run.request
    if request.threads != 1:
        return f"it was measured with --threads {request.threads}, but the history tracks one thread"
    if not request.isolation:
        return "it was measured without a worker (--no-isolation)"
    if request.seed != 0:
        return f"it was measured with --seed {request.seed}, but the history tracks seed 0"
    return ""


def _extract_workload_points(name: str, records: Sequence[Record], run: Run) -> RunHistoryPoints:
    # 1. Leave out suites without a history.
    if name == BENCH:
        reason = "the history does not follow bench; write a suite of your function (docs/user-suites.md)"
        return RunHistoryPoints(untracked_cases=len(records), why=reason)
    if name not in workloads.names(hidden=True):
        return RunHistoryPoints(untracked_cases=len(records), why=f"the suite {name} is unknown; --import its module")
    workload = workloads.get(name)
    if workload.history is None:
        return RunHistoryPoints(untracked_cases=len(records), why=f"the suite {name} declares no grid")
    try:
        # 2. Leave out a run with a number of ranks that the grid does not track. Without ranks, a grid tracks one
        # process.
        _check_workload_grid(type(workload))
        main_device, tracked_ranks = _find_main_device(run), workload.history.ranks or (1,)
        if main_device is not None and main_device.ranks not in tracked_ranks:
            actual_ranks_text = f"it was measured by {main_device.ranks} rank{'s' * (main_device.ranks != 1)}"
            tracked_ranks_text = ", ".join(map(str, tracked_ranks))
            return RunHistoryPoints(
                untracked_cases=len(records),
                why=f"{actual_ranks_text}, but the history of {name} tracks {tracked_ranks_text}",
            )
        return _extract_grid_points(workload, workload.history, records, run)
    except UsageError as error:
        return RunHistoryPoints(untracked_cases=len(records), why=str(error).rstrip("."))


def _extract_grid_points(workload: Workload, grid: Grid, records: Sequence[Record], run: Run) -> RunHistoryPoints:
    conditions = _collect_conditions(workload, run)
    points: list[Point] = []
    untracked_cases = 0
    text_data_identity = None
    reference_by_setting = {record.case.setting: record for record in reversed(records) if record.is_reference}
    for record in records:
        cell = _find_grid_cell(workload, record.case, run)
        if cell is None:
            untracked_cases += 1
            continue
        text_data_identity = _find_data_identity(workload, record.case)
        reference = reference_by_setting.get(record.case.setting)
        points += _make_history_points(
            workload, grid, record, reference, cell, _has_few_rounds(run, record), conditions
        )
    return RunHistoryPoints(
        tuple(points), _make_cached_series(type(workload), text_data_identity) if points else (), untracked_cases
    )


def _add_metric_conditions(
    grid: Grid, record: Record, metric: str, has_samples: bool, conditions: Conditions
) -> Conditions:
    """Returns the conditions that must be equal for two values of the metric to be comparable.

    Compiled and eager casts are different conditions, except for counts and errors, which are the same bit for bit.
    Energies are comparable only if they come from the same source.
    """
    timing = record.timing
    if metric in COUNTS:
        return tuple(pair for pair in conditions if pair[0] not in _FACTS_IRRELEVANT_TO_COUNTS)
    if timing is not None and metric not in grid.errors and (timing.eager or timing.fused):
        conditions = (*conditions, ("quantisers", "eager" if timing.eager else "compiled"))
    if metric == ENERGY and record.energy is not None and has_samples:
        conditions = (*conditions, (ENERGY_SOURCE, record.energy.source))
    return conditions


def metric_of_point(point: Point) -> str:
    return point.series.rpartition(".track_")[2]


def _has_few_rounds(run: Run, record: Record) -> bool:
    """Returns whether a case was measured in few rounds: the run asked for fewer rounds than the default, or its
    --budget ended the rounds early.
    """
    request = run.request
    min_rounds = EMULATED_ROUNDS if record.support.level is Level.EMULATED else LEAST_ROUNDS
    has_time_limit = request.brisk or request.budget is not None
    is_cut_short = has_time_limit and record.timing is not None and record.timing.num_rounds < min_rounds
    return request.quick or is_cut_short or (request.rounds is not None and request.rounds < LEAST_ROUNDS)


def _collect_conditions(workload: Workload, run: Run) -> Conditions:
    """Returns the conditions under which a run measured a workload.

    The load of the machine is not a condition, because it is temporary. The hash of imported code is a condition only
    for the user's workloads.
    """
    facts = run.environment.facts
    # Figures of one commit cannot be compared if one of these facts or a recorded environment variable differs.
    names = [
        *TIME_CONDITION_FACTS,
        *sorted(name for name in facts if name.startswith("env_") and name != _QUANTISERS_FACT_NAME),
    ]
    is_built_in = type(workload).__module__.startswith("fp8bench.")
    names += [] if is_built_in else ["imports_sha256"]
    conditions = [(name, facts.get(name)) for name in names]
    main_device = _find_main_device(run)
    if main_device is not None:
        conditions += [("device", main_device.name), ("cuda", main_device.cuda), ("hip", main_device.hip)]
        conditions += [(name, facts.get(f"{main_device.key} {name}")) for name in DEVICE_SETTINGS]
    conditions += sorted((name, value) for name, value in facts.items() if name.startswith("rank "))
    return tuple(conditions)


def _find_main_device(run: Run) -> DeviceFacts | None:
    # If the run used a GPU, the history tracks only its cases on the GPU.
    return next((device for device in run.devices if device.accelerated), next(iter(run.devices), None))


# The following functions are cached, because they depend only on a workload's class, and a commit may have hundreds
# of runs.


@cache
def _check_workload_grid(workload_class: type[Workload]) -> None:
    check_history_grid(workload_class())


@cache
def _make_cached_series(workload_class: type[Workload], data_identity: str | None) -> tuple[Series, ...]:
    return make_series(workload_class(), data_identity)


@cache
def _cached_metrics(workload_class: type[Workload]) -> tuple[MetricSpec, ...]:
    assert workload_class.history is not None
    return list_tracked_metrics(workload_class.history)


@cache
def _cached_reference(workload_class: type[Workload]) -> str:
    return reference_precision(workload_class())


def find_grid_cell_of_case(case: Case, run: Run) -> Cell | None:
    """Returns the cell (the tracked combination of parameters) that a case belongs to in its suite's grid, or None if
    the grid does not have the case.
    """
    if case.workload not in workloads.names(hidden=True) or workloads.get(case.workload).history is None:
        return None
    return _find_grid_cell(workloads.get(case.workload), case, run)


def _find_grid_cell(workload: Workload, case: Case, run: Run) -> Cell | None:
    """Returns the cell (the tracked combination of parameters) that a case belongs to in a workload's grid, or None if
    the grid does not have the case.
    """
    assert workload.history is not None
    main_device = _find_main_device(run)
    is_untracked = case.precision_map or case.static or case.precision not in workload.history.dtypes
    if is_untracked or main_device is None or (case.device, case.ranks) != (main_device.key, main_device.ranks):
        return None
    # The history tracks only the default corpus, and not a text that the user chose.
    if run.request.data is not None and workload.uses_corpus:
        return None
    axis_values = _list_cached_cells(type(workload), main_device, _find_data_identity(workload, case)).get(case.params)
    return None if axis_values is None else (case.precision, *axis_values)


@cache
def _list_cached_cells(
    workload_class: type[Workload], facts: DeviceFacts, data_identity: str | None
) -> dict[Params, Cell]:
    return list_grid_cells(workload_class(), facts, data_identity)


def _find_data_identity(workload: Workload, case: Case) -> str | None:
    """Returns the parameter 'data' of a case, which identifies the text that the case reads. Returns None if the
    workload reads no corpus: then 'data' has a different meaning.
    """
    return next((str(value) for name, value in case.params if workload.uses_corpus and name == "data"), None)


def _make_history_points(
    workload: Workload,
    grid: Grid,
    record: Record,
    reference: Record | None,
    cell: Cell,
    is_hasty: bool,
    conditions: Conditions,
) -> Iterator[Point]:
    class_path = f"{workload.name}.{class_name(workload.name)}.track_"
    version = join_versions(record.case.version, _find_data_identity(workload, record.case))
    metrics_by_name = _collect_metrics(workload, record, reference)
    for metric in _cached_metrics(type(workload)):
        values = metrics_by_name[metric.name].samples() if metric.name in metrics_by_name else ()
        if metric.unit not in _UNITS_WITH_FEW_DIGITS and not metric.counted:
            values = tuple(float(f"{value:.{_SIGNIFICANT_DIGITS}g}") for value in values)
        yield Point(
            class_path + metric.name,
            cell,
            version,
            values,
            record.status,
            record.reason,
            is_hasty and metric not in grid.errors and metric.unit != "bytes" and not metric.counted,
            under=_add_metric_conditions(grid, record, metric.name, bool(values), conditions),
        )


def _collect_metrics(workload: Workload, record: Record, reference: Record | None) -> dict[str, Metric]:
    """Returns the metrics of a record, by the names that they have in the history."""
    if record.status is not Status.OK:
        return {}
    is_comparable = reference is not None and reference.case.precision == _cached_reference(type(workload))
    reference_metrics = Reference(reference) if reference is not None and is_comparable else None
    metric_by_name: dict[str, Metric] = {}
    from fp8bench.analysis.metrics import iterate_case_metrics

    for metric in iterate_case_metrics(record, None, reference_metrics):
        if metric.phase == STEP or (metric.phase is not None and metric.name == TIME):
            name = metric.name if metric.phase == STEP else time_of_phase(str(metric.phase))
            metric_by_name.setdefault(name, metric)
    return metric_by_name
