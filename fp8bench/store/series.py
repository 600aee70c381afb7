"""Converts the cases that a workload tracks over commits (its grid) to series and cells under asv's names.

asv finds the same names, parameters and versions in a suite file, so fp8bench and asv write to the same series. The
list of series is the same on all machines, with and without a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from fp8bench import units
from fp8bench.errors import UsageError
from fp8bench.model import PHASES, Cell, DeviceFacts, Params, Scalar, Series
from fp8bench.model.ranks import RANK_LIBRARIES, describe_ranks
from fp8bench.model.specs import METRICS, RELATIVE_TIMES, MetricSpec, explain_reserved_name, find_metric_spec
from fp8bench.plan.checked_workload import expand_cases, list_checked_axes, user_errors_as_usage
from fp8bench.protocols import Grid, Workload
from fp8bench.protocols.axes import Axis
from fp8bench.registry import precisions, workloads

# Increase this version when the same samples give different figures. Then old figures are not compared with new ones.
METHOD_VERSION = "1"
# asv's names for units.
ASV_UNITS = {"s": "seconds", "B": "bytes", "J": "joules"}
# One device of each class is enough: axes have the same names and parsers on all devices of a class.
_DEVICE_BY_CLASS = {"cpu": DeviceFacts("cpu", 0, "", 0, ""), "gpu": DeviceFacts("cuda", 0, "", 0, "")}


def class_name(workload: str) -> str:
    """Returns the name of a workload's class in a suite file for asv: 'NormAct' for 'norm_act'."""
    return "".join(part[:1].upper() + part[1:] for part in workload.split("_"))


def list_tracked_metrics(grid: Grid) -> tuple[MetricSpec, ...]:
    """Returns the metrics of a case that the history tracks, in asv's units. The first one is the step's time."""
    history_condition_words = {"", *grid.phases, grid.per, "ranks" if grid.ranks else "one rank"}
    if grid.energy and not grid.ranks:
        history_condition_words.add("energy")
    metric_specs = [spec for spec in METRICS.values() if spec.history and spec.kept_where in history_condition_words]
    errors = [find_metric_spec(name) for name in grid.errors]
    metric_specs += [replace(spec, history="against the reference that the workload names") for spec in errors]
    return tuple(
        replace(spec, unit=units.RATIO if spec in RELATIVE_TIMES else ASV_UNITS.get(spec.unit, spec.unit))
        for spec in metric_specs
    )


def join_versions(version: str, data: str | None) -> str:
    """Returns the version of a series. It combines the versions of the measuring method and of the workload, and the
    identity of the corpus (`data`) if the workload reads one.
    """
    return f"{METHOD_VERSION}.{version}" + (f" {data}" if data else "")


def list_parameters(workload: Workload) -> dict[str, tuple[Scalar, ...]]:
    """Returns the parameters of a series with their values: dtypes, axes with several values on a CPU or a GPU, and
    numbers of ranks.
    """
    grid = _require_history_grid(workload)
    axes = {axis.name: axis for axis in list_checked_axes(workload, _DEVICE_BY_CLASS["cpu"])}
    values_by_name: dict[str, tuple[Scalar, ...]] = {"dtype": tuple(grid.dtypes)}
    for name in grid.cpu:
        values = dict.fromkeys(_parse_axis_value(axes[name], text) for text in (*grid.cpu[name], *grid.gpu[name]))
        # An axis with a single value does not distinguish cells.
        if len(values) > 1:
            values_by_name[name] = tuple(values)
    if grid.ranks:
        values_by_name["ranks"] = tuple(describe_ranks(ranks, kind) for kind in RANK_LIBRARIES for ranks in grid.ranks)
    return values_by_name


def make_series(workload: Workload, data: str | None) -> tuple[Series, ...]:
    """Returns all series of a workload. Raises UsageError if check_history_grid() refuses its grid."""
    check_history_grid(workload)
    params = list_parameters(workload)
    class_path = f"{workload.name}.{class_name(workload.name)}"
    return tuple(
        Series(
            f"{class_path}.track_{metric.name}",
            workload.name,
            metric.name,
            metric.unit,
            tuple(params),
            tuple(params.values()),
            join_versions(workload.version, data),
        )
        for metric in list_tracked_metrics(_require_history_grid(workload))
    )


def list_grid_cells(workload: Workload, facts: DeviceFacts, data: str | None) -> dict[Params, Cell]:
    """Maps the parameters of each tracked case on a device to its cell: its coordinates in graphs, without the dtype.
    Returns {} if the history does not track the device's number of ranks.
    """
    ranks = _require_history_grid(workload).ranks
    if facts.ranks not in (ranks or (1,)):
        return {}
    names = [name for name in list_parameters(workload) if name not in ("dtype", *(["ranks"] if ranks else []))]
    rank_description_values = (describe_ranks(facts.ranks, facts.kind),) if ranks else ()
    cells = {}
    with user_errors_as_usage(workload):
        for displayed_values, params in _iterate_grid_cells(workload, facts):
            key = (*params, ("data", data)) if data and workload.uses_corpus else params
            cells[key] = (*(displayed_values[name] for name in names), *rank_description_values)
    return cells


def reference_precision(workload: Workload) -> str:
    """Returns the precision that the history's relative times refer to: the highest precision of the suite's grid."""
    # The highest precision has the lowest rank.
    return min(_require_history_grid(workload).dtypes, key=lambda name: precisions.get(name).rank)


def check_history_grid(workload: Workload) -> None:
    """Raises UsageError if the cases that a workload declares for its history cannot be tracked, for example because
    of wrong names.
    """
    with user_errors_as_usage(workload):
        reason = next(_find_grid_faults(workload), "")
    if reason:
        raise UsageError(f"the grid that suite {workload.name!r} declares cannot be tracked: {reason}.")


def fingerprint_grid(name: str) -> str:
    """Returns a text that describes the cases that a suite's history tracks (its grid). While this text is unchanged,
    later records continue the same series.

    Returns '' for a suite that is not registered.
    """
    if name not in workloads.names(hidden=True):
        return ""
    workload = workloads.get(name)
    if workload.history is None:
        return "no grid"
    try:
        metric_series = make_series(workload, None)
        cells = []
        for kind, ranks in itertools.product(_DEVICE_BY_CLASS.values(), workload.history.ranks or (1,)):
            cells.append(list_grid_cells(workload, replace(kind, ranks=ranks), None))
        is_built_in = type(workload).__module__.startswith("fp8bench.")
        return repr(
            (workload.history, workload.uses_corpus, is_built_in, reference_precision(workload), metric_series, cells)
        )
    except UsageError as error:
        return str(error)


def _find_grid_faults(workload: Workload) -> Iterator[str]:
    try:
        yield from _find_wrong_grid_values(_require_history_grid(workload))
        yield from _find_unusable_asv_names(workload)
        yield from _find_wrong_axes(workload)
        yield from _describe_ambiguous_cells(workload)
    except UsageError as error:
        yield str(error).rstrip(".")


def _find_unusable_asv_names(workload: Workload) -> Iterator[str]:
    name = class_name(workload.name)
    if not workload.name.isidentifier() or not name.isidentifier():
        yield "asv uses the name for a module, so it must be letters, digits and underscores. Rename it"
    yield from filter(None, map(explain_reserved_name, _require_history_grid(workload).errors))


def _find_wrong_axes(workload: Workload) -> Iterator[str]:
    grid = _require_history_grid(workload)
    if set(grid.cpu) != set(grid.gpu):
        yield f"cpu names the axes {', '.join(grid.cpu) or 'none'} and gpu {', '.join(grid.gpu) or 'none'}"
    axes = {axis.name: axis for axis in list_checked_axes(workload, _DEVICE_BY_CLASS["cpu"])}
    for name in grid.cpu:
        if name not in axes:
            yield f"{name!r} is not an axis; the axes are {', '.join(sorted(axes))}"
        if not grid.cpu[name] or not grid.gpu[name]:
            yield f"the axis {name!r} has no value on a {'gpu' if grid.cpu[name] else 'cpu'}"
    do_all_axis_values_overlap = all(
        _parse_axis_values(axes[name], grid.cpu[name]) & _parse_axis_values(axes[name], grid.gpu[name])
        for name in grid.cpu
    )
    if do_all_axis_values_overlap and not grid.ranks:
        yield "no axis has entirely different values on cpu and gpu, so a machine could mix both in one series"


def _find_wrong_grid_values(grid: Grid) -> Iterator[str]:
    for phase in grid.phases:
        if phase not in PHASES:
            yield f"{phase!r} is not a phase; the phases are {', '.join(PHASES)}"
    if not grid.dtypes or len(set(grid.dtypes)) < len(grid.dtypes):
        yield f"its dtypes are {', '.join(grid.dtypes) or 'none'}; give at least one, and each once"
    for name in grid.dtypes:
        if precisions.find_canonical_name(name) != name:
            yield f"the dtype {name!r} is an alias of {precisions.find_canonical_name(name)}"


def _describe_ambiguous_cells(workload: Workload) -> Iterator[str]:
    for kind, facts in _DEVICE_BY_CLASS.items():
        for axis in list_checked_axes(workload, facts):
            if axis.name not in _get_grid_axis_values(workload, facts) and len(axis.values(axis.default)) != 1:
                yield f"the axis {axis.name!r} has several defaults on a {kind}, and the grid does not choose one"
        cases: set[Params] = set()
        for displayed_values, params in _iterate_grid_cells(workload, facts):
            if params in cases:
                yield f"two cells are the same case on a {kind} ({displayed_values})"
            cases.add(params)


def _iterate_grid_cells(workload: Workload, facts: DeviceFacts) -> Iterator[tuple[dict[str, Scalar], Params]]:
    """Yields a pair for each case of the grid on a class of devices: its values by axis, as graphs show them, and its
    parameters.
    """
    grid_axis_values = _get_grid_axis_values(workload, facts)
    axes = list_checked_axes(workload, facts)
    texts = [grid_axis_values.get(axis.name, axis.default) for axis in axes]
    for combination in itertools.product(*texts):
        axis_text_pairs = list(zip(axes, combination, strict=True))
        cases = expand_cases(workload, axes, {axis.name: axis.values((text,))[0] for axis, text in axis_text_pairs})
        if len(cases) != 1:
            raise UsageError(f"{', '.join(combination)} gives {len(cases)} cases, but a cell is one case.")
        yield {axis.name: _parse_axis_value(axis, text) for axis, text in axis_text_pairs}, cases[0]


def _parse_axis_value(axis: Axis, text: str) -> Scalar:
    """Returns an axis value as an integer if it is one, because a graph can use it as a coordinate. Returns other texts
    unchanged.
    """
    (value,) = axis.values((text,))
    return value if isinstance(value, int) and not isinstance(value, bool) else text


def _parse_axis_values(axis: Axis, values: Iterable[str]) -> set[Scalar]:
    return {_parse_axis_value(axis, text) for text in values}


def _get_grid_axis_values(workload: Workload, facts: DeviceFacts) -> Mapping[str, tuple[str, ...]]:
    grid = _require_history_grid(workload)
    return grid.gpu if facts.accelerated else grid.cpu


def _require_history_grid(workload: Workload) -> Grid:
    if workload.history is None:
        raise UsageError(f"the suite {workload.name!r} declares no grid with a history.")
    return workload.history
