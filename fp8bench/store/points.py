"""From a run to points of the tracked series, and from the points of several runs to those of their commit."""

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
from fp8bench.model.run import CONDITIONS, DEVICE_SETTINGS
from fp8bench.model.specs import COUNTS, ENERGY, STEP, TIME, MetricSpec, time_of_phase
from fp8bench.model.stopping import EMULATED_ROUNDS, LEAST_ROUNDS
from fp8bench.protocols import Grid, Workload
from fp8bench.registry import workloads
from fp8bench.store.series import cells_of, check_grid, class_name, reference_of, series_of, tracked_by, version_of

# asv shows few digits of numbers in these units, and all digits of others.
_PRINTED_UNITS = ("seconds", "bytes")
_DIGITS = 6
# Times depend on these; counts of a step do not.
_NOT_OF_COUNTS = frozenset(
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
# Only cases with quantisers depend on it, and they record how these ran.
_SAID_BY_CASES = f"env_{QUANTISERS_VARIABLE}"


@dataclass(frozen=True)
class RunPoints:
    """A run's contribution to the history: points, their series, the number of its other cases, and the reason."""

    points: tuple[Point, ...] = ()
    series: tuple[Series, ...] = ()
    others: int = 0
    why: str = ""


def points_of_run(run: Run) -> RunPoints:
    """Returns the points of a run. Cases outside of the declared grids are only counted."""
    reason = _why_none(run)
    if reason:
        return RunPoints(others=len(run.records), why=reason)
    by_workload: dict[str, list[Record]] = {}
    for record in run.records:
        by_workload.setdefault(record.case.workload, []).append(record)
    points: list[Point] = []
    series: list[Series] = []
    outside = 0
    for name, records in by_workload.items():
        part = _points_of_workload(name, records, run)
        points += part.points
        series += part.series
        outside += part.others
        reason = reason or part.why
    return RunPoints(tuple(points), tuple(series), outside, reason)


def merge_points(points: Sequence[Point], series: Iterable[Series] = ()) -> dict[tuple[str, Cell], Point]:
    """Combines the points of several runs of one commit, oldest first, into one for each cell.

    Samples of complete measurements are joined if they were taken under the same conditions as the newest; hasty ones
    count if there is nothing better. Points of another version are left out. The version is that of the series if any
    point has it, else that of the newest point.
    """
    current = {(declared.name, declared.version) for declared in series}
    versions = {point.series: point.version for point in points}
    versions |= {point.series: point.version for point in points if (point.series, point.version) in current}
    by_cell: dict[tuple[str, Cell], list[Point]] = {}
    for point in points:
        if point.version == versions[point.series]:
            by_cell.setdefault((point.series, point.cell), []).append(point)
    return {key: _merge_cell(of_cell) for key, of_cell in by_cell.items()}


def _merge_cell(points: Sequence[Point]) -> Point:
    if len(points) == 1:
        return points[0]
    sampled = [point for point in points if point.samples]
    if not sampled:
        return replace(points[-1], runs=len(points))
    best = [point for point in sampled if not point.hasty] or sampled
    newest = best[-1]
    same = [point for point in best if point.under == newest.under]
    if metric_of(newest) in COUNTS:  # the median of two counts need not be a count
        return replace(newest, runs=len(same))
    samples = chain.from_iterable(point.samples for point in same)
    return replace(newest, samples=tuple(samples), runs=len(same))


def _why_none(run: Run) -> str:
    """Returns why a run does not compare with what asv would measure; '' if it does."""
    request = run.request
    if request.threads != 1:
        return f"it was measured with --threads {request.threads}, and the history is of one thread"
    if not request.isolation:
        return "it was measured without a worker (--no-isolation)"
    if request.seed != 0:
        return f"it was measured with --seed {request.seed}, and the history is of seed 0"
    return ""


def _points_of_workload(name: str, records: Sequence[Record], run: Run) -> RunPoints:
    if name not in workloads.names(hidden=True):
        return RunPoints(others=len(records), why=f"the suite {name} is not known here; --import its module")
    workload = workloads.get(name)
    if workload.history is None:
        return RunPoints(others=len(records), why=f"the suite {name} declares no grid")
    try:
        _check(type(workload))
        main, sizes = _main_device(run), workload.history.ranks or (1,)
        if main is not None and main.ranks not in sizes:
            words = f"it was measured by {main.ranks} rank{'s' * (main.ranks != 1)}"
            followed_ones = ", ".join(map(str, sizes))
            return RunPoints(others=len(records), why=f"{words}, and the history of {name} is of {followed_ones}")
        return _points_of_grid(workload, workload.history, records, run)
    except UsageError as error:
        return RunPoints(others=len(records), why=str(error).rstrip("."))


def _points_of_grid(workload: Workload, grid: Grid, records: Sequence[Record], run: Run) -> RunPoints:
    under = _conditions(workload, run)
    points: list[Point] = []
    outside = 0
    data = None
    references = {record.case.setting: record for record in reversed(records) if record.is_reference}
    for record in records:
        cell = _cell(workload, record.case, run)
        if cell is None:
            outside += 1
            continue
        data = _data(workload, record.case)
        reference = references.get(record.case.setting)
        points += _points(workload, grid, record, reference, cell, _is_hasty(run, record), under)
    return RunPoints(tuple(points), _series(type(workload), data) if points else (), outside)


def _conditions_of(grid: Grid, record: Record, metric: str, sampled: bool, under: Conditions) -> Conditions:
    """Returns the conditions that a metric of a case depends on.

    Compiled quantisers matter to all metrics but errors, which are the same bit for bit, and counts. Joules of
    different sources do not compare.
    """
    timing = record.timing
    if metric in COUNTS:
        return tuple(pair for pair in under if pair[0] not in _NOT_OF_COUNTS)
    if timing is not None and metric not in grid.errors and (timing.eager or timing.fused):
        under = (*under, ("quantisers", "eager" if timing.eager else "compiled"))
    if metric == ENERGY and record.energy is not None and sampled:
        under = (*under, (ENERGY_SOURCE, record.energy.source))
    return under


def metric_of(point: Point) -> str:
    return point.series.rpartition(".track_")[2]


def _is_hasty(run: Run, record: Record) -> bool:
    """Whether a run asked for fewer rounds than a plain command, or its --budget cut them short."""
    request = run.request
    least = EMULATED_ROUNDS if record.support.level is Level.EMULATED else LEAST_ROUNDS
    hurried = request.brisk or request.budget is not None
    cut = hurried and record.timing is not None and record.timing.num_rounds < least
    return request.quick or cut or (request.rounds is not None and request.rounds < LEAST_ROUNDS)


def _conditions(workload: Workload, run: Run) -> Conditions:
    """Returns the conditions that a workload's samples of a run were measured under.

    Load is not one of them, because it passes. The user's code is one where the workload comes from it.
    """
    facts = run.environment.facts
    # Figures of one commit do not compare if these facts differ, nor if a variable that a run notes does.
    names = [*CONDITIONS, *sorted(name for name in facts if name.startswith("env_") and name != _SAID_BY_CASES)]
    is_ours = type(workload).__module__.startswith("fp8bench.")
    names += [] if is_ours else ["imports_sha256"]
    main = _main_device(run)
    device = (("device", main.name), ("cuda", main.cuda), ("hip", main.hip)) if main is not None else ()
    settings = [(name, facts.get(f"{main.key} {name}")) for name in DEVICE_SETTINGS] if main is not None else []
    settings += sorted((name, value) for name, value in facts.items() if name.startswith("rank "))
    return (*((name, facts.get(name)) for name in names), *device, *settings)


def _main_device(run: Run) -> DeviceFacts | None:
    return next((device for device in run.devices if device.accelerated), next(iter(run.devices), None))


# These depend on a workload's class alone, and a commit may have hundreds of runs.


@cache
def _check(kind: type[Workload]) -> None:
    check_grid(kind())


@cache
def _series(kind: type[Workload], data: str | None) -> tuple[Series, ...]:
    return series_of(kind(), data)


@cache
def _metrics(kind: type[Workload]) -> tuple[MetricSpec, ...]:
    assert kind.history is not None
    return tracked_by(kind.history)


@cache
def _reference(kind: type[Workload]) -> str:
    return reference_of(kind())


def cell_of(case: Case, run: Run) -> Cell | None:
    """Returns the cell of a declared grid that a case of a run is in; None if it is in none."""
    if case.workload not in workloads.names(hidden=True) or workloads.get(case.workload).history is None:
        return None
    return _cell(workloads.get(case.workload), case, run)


def _cell(workload: Workload, case: Case, run: Run) -> Cell | None:
    """Like cell_of, for a workload with a grid."""
    assert workload.history is not None
    main = _main_device(run)
    outside = case.precision_map or case.static or case.precision not in workload.history.dtypes
    if outside or main is None or (case.device, case.ranks) != (main.key, main.ranks):
        return None
    if run.request.data is not None and workload.uses_corpus:
        return None
    place = _cells(type(workload), main, _data(workload, case)).get(case.params)
    return None if place is None else (case.precision, *place)


@cache
def _cells(kind: type[Workload], facts: DeviceFacts, data: str | None) -> dict[Params, Cell]:
    return cells_of(kind(), facts, data)


def _data(workload: Workload, case: Case) -> str | None:
    """Returns the identity of the text that a case reads; a user's axis may have the same name."""
    return next((str(value) for name, value in case.params if workload.uses_corpus and name == "data"), None)


def _points(
    workload: Workload, grid: Grid, record: Record, reference: Record | None, cell: Cell, hasty: bool, under: Conditions
) -> Iterator[Point]:
    title = f"{workload.name}.{class_name(workload.name)}.track_"
    version = version_of(record.case.version, _data(workload, record.case))
    metrics_by_name = _metrics_by_name(workload, record, reference)
    for metric in _metrics(type(workload)):
        values = metrics_by_name[metric.name].samples() if metric.name in metrics_by_name else ()
        if metric.unit not in _PRINTED_UNITS and not metric.counted:
            values = tuple(float(f"{value:.{_DIGITS}g}") for value in values)
        yield Point(
            title + metric.name,
            cell,
            version,
            values,
            record.status,
            record.reason,
            hasty and metric not in grid.errors and metric.unit != "bytes" and not metric.counted,
            under=_conditions_of(grid, record, metric.name, bool(values), under),
        )


def _metrics_by_name(workload: Workload, record: Record, reference: Record | None) -> dict[str, Metric]:
    """Returns the metrics of a record by the names that the history has for them."""
    if record.status is not Status.OK:
        return {}
    comparable = reference is not None and reference.case.precision == _reference(type(workload))
    against = Reference(reference) if reference is not None and comparable else None
    named: dict[str, Metric] = {}
    from fp8bench.analysis.metrics import metrics_of

    for metric in metrics_of(record, None, against):
        if metric.phase == STEP or (metric.phase is not None and metric.name == TIME):
            name = metric.name if metric.phase == STEP else time_of_phase(str(metric.phase))
            named.setdefault(name, metric)
    return named
