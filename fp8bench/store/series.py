"""The grid that a workload declares for tracking from commit to commit, as series and cells under asv's names.

asv discovers the same names, parameters and versions in a suite file, so runs and asv's own measurements share them.
They do not depend on the machine: machines with and without a GPU have the same list of benchmarks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from fp8bench import units
from fp8bench.errors import UsageError
from fp8bench.model import PHASES, Cell, DeviceFacts, Params, Scalar, Series
from fp8bench.model.ranks import BACKENDS, ranks_in_words
from fp8bench.model.specs import METRICS, RATIOS, MetricSpec, reserved_name_reason, spec_of
from fp8bench.plan.checked_workload import answering, axes_of, cases_of
from fp8bench.protocols import Grid, Workload
from fp8bench.protocols.axes import Axis
from fp8bench.registry import precisions, workloads

# Increase it when the same samples give other figures: figures of different methods do not compare.
METHOD = "1"
# asv's words for units.
UNITS = {"s": "seconds", "B": "bytes", "J": "joules"}
# Stand-ins: axes have the same names and parsers on all devices of a class.
_CLASSES = {"cpu": DeviceFacts("cpu", 0, "", 0, ""), "gpu": DeviceFacts("cuda", 0, "", 0, "")}


def class_name(workload: str) -> str:
    """Returns the class that a suite file has for a workload: 'NormAct' for 'norm_act'."""
    return "".join(part[:1].upper() + part[1:] for part in workload.split("_"))


def tracked_by(grid: Grid) -> tuple[MetricSpec, ...]:
    """Returns the metrics that the history has of a case, in units as asv names them; the step's time first."""
    tags = {"", *grid.phases, grid.per, "ranks" if grid.ranks else "one rank"}
    if grid.energy and not grid.ranks:
        tags.add("energy")
    specs = [spec for spec in METRICS.values() if spec.history and spec.kept_where in tags]
    errors = [spec_of(name) for name in grid.errors]
    specs += [replace(spec, history="against the reference that the workload names") for spec in errors]
    return tuple(replace(spec, unit=_asv_unit(spec)) for spec in specs)


def _asv_unit(spec: MetricSpec) -> str:
    return units.RATIO if spec in RATIOS else UNITS.get(spec.unit, spec.unit)


def version_of(version: str, data: str | None) -> str:
    """Joins the versions of the method and the workload with the identity of the text that it reads."""
    return f"{METHOD}.{version}" + (f" {data}" if data else "")


def parameters(workload: Workload) -> dict[str, tuple[Scalar, ...]]:
    """Returns the dtypes, the values of each axis that has several, on a CPU or a GPU, and the numbers of ranks."""
    grid = _grid(workload)
    axes = {axis.name: axis for axis in axes_of(workload, _CLASSES["cpu"])}
    values_by_name: dict[str, tuple[Scalar, ...]] = {"dtype": tuple(grid.dtypes)}
    for name in grid.cpu:
        values = dict.fromkeys(_to_scalar(axes[name], text) for text in (*grid.cpu[name], *grid.gpu[name]))
        if len(values) > 1:
            values_by_name[name] = tuple(values)
    if grid.ranks:
        values_by_name["ranks"] = tuple(ranks_in_words(ranks, kind) for kind in BACKENDS for ranks in grid.ranks)
    return values_by_name


def series_of(workload: Workload, data: str | None) -> tuple[Series, ...]:
    """Returns all series of a workload. Raises UsageError for a grid that cannot be tracked."""
    check_grid(workload)
    params = parameters(workload)
    title = f"{workload.name}.{class_name(workload.name)}"
    return tuple(
        Series(
            f"{title}.track_{metric.name}",
            workload.name,
            metric.name,
            metric.unit,
            tuple(params),
            tuple(params.values()),
            version_of(workload.version, data),
        )
        for metric in tracked_by(_grid(workload))
    )


def cells_of(workload: Workload, facts: DeviceFacts, data: str | None) -> dict[Params, Cell]:
    """Returns the grid's cells on one device (or one for each rank), without the dtype, by the parameters of their
    cases; none if this number of ranks is not tracked."""
    ranks = _grid(workload).ranks
    if facts.ranks not in (ranks or (1,)):
        return {}
    names = [name for name in parameters(workload) if name not in ("dtype", *(["ranks"] if ranks else []))]
    ranks_cell = (ranks_in_words(facts.ranks, facts.kind),) if ranks else ()
    cells = {}
    with answering(workload):
        for shown, params in _combinations(workload, facts):
            key = (*params, ("data", data)) if data and workload.uses_corpus else params
            cells[key] = (*(shown[name] for name in names), *ranks_cell)
    return cells


def reference_of(workload: Workload) -> str:
    """Returns the precision that relative times are over, the highest of the grid."""
    return min(_grid(workload).dtypes, key=lambda name: precisions.get(name).rank)


def check_grid(workload: Workload) -> None:
    """Raises UsageError where the grid cannot be tracked."""
    with answering(workload):
        reason = next(_faults(workload), "")
    if reason:
        raise UsageError(f"the grid that suite {workload.name!r} declares cannot be tracked: {reason}.")


def fingerprint(name: str) -> str:
    """Returns a text that stays the same as long as the same records belong to the same cells of the same series.

    It is '' for a suite that is not registered here.
    """
    if name not in workloads.names(hidden=True):
        return ""
    workload = workloads.get(name)
    if workload.history is None:
        return "no grid"
    try:
        series = series_of(workload, None)
        cells = []
        for kind, ranks in itertools.product(_CLASSES.values(), workload.history.ranks or (1,)):
            cells.append(cells_of(workload, replace(kind, ranks=ranks), None))
        is_ours = type(workload).__module__.startswith("fp8bench.")
        return repr((workload.history, workload.uses_corpus, is_ours, reference_of(workload), series, cells))
    except UsageError as error:
        return str(error)


def _faults(workload: Workload) -> Iterator[str]:
    try:
        yield from _wrong_words(_grid(workload))
        yield from _wrong_names(workload)
        yield from _wrong_axes(workload)
        yield from _ambiguous_cells(workload)
    except UsageError as error:
        yield str(error).rstrip(".")


def _wrong_names(workload: Workload) -> Iterator[str]:
    name = class_name(workload.name)
    if not workload.name.isidentifier() or not name.isidentifier():
        yield "asv takes the name for a module's, so that it must be letters, digits and underscores. Rename it"
    yield from filter(None, map(reserved_name_reason, _grid(workload).errors))


def _wrong_axes(workload: Workload) -> Iterator[str]:
    grid = _grid(workload)
    if set(grid.cpu) != set(grid.gpu):
        yield f"cpu names the axes {', '.join(grid.cpu) or 'none'} and gpu {', '.join(grid.gpu) or 'none'}"
    axes = {axis.name: axis for axis in axes_of(workload, _CLASSES["cpu"])}
    for name in grid.cpu:
        if name not in axes:
            yield f"{name!r} is no axis; it has {', '.join(sorted(axes))}"
        if not grid.cpu[name] or not grid.gpu[name]:
            yield f"the axis {name!r} has no value on a {'gpu' if grid.cpu[name] else 'cpu'}"
    overlaps = all(_texts(axes[name], grid.cpu[name]) & _texts(axes[name], grid.gpu[name]) for name in grid.cpu)
    if overlaps and not grid.ranks:
        yield "no axis differs wholly between cpu and gpu, so that a machine could mix the two in one series"


def _wrong_words(grid: Grid) -> Iterator[str]:
    for phase in grid.phases:
        if phase not in PHASES:
            yield f"{phase!r} is no phase; they are {', '.join(PHASES)}"
    if not grid.dtypes or len(set(grid.dtypes)) < len(grid.dtypes):
        yield f"its dtypes are {', '.join(grid.dtypes) or 'none'}; name at least one, and each once"
    for name in grid.dtypes:
        if precisions.canonical(name) != name:
            yield f"the dtype {name!r} is an alias of {precisions.canonical(name)}"


def _ambiguous_cells(workload: Workload) -> Iterator[str]:
    for kind, facts in _CLASSES.items():
        for axis in axes_of(workload, facts):
            if axis.name not in _values(workload, facts) and len(axis.values(axis.default)) != 1:
                yield f"the axis {axis.name!r} has several defaults on a {kind}, and the grid does not choose one"
        cases: set[Params] = set()
        for shown, params in _combinations(workload, facts):
            if params in cases:
                yield f"two cells are the same case on a {kind} ({shown})"
            cases.add(params)


def _combinations(workload: Workload, facts: DeviceFacts) -> Iterator[tuple[dict[str, Scalar], Params]]:
    """Yields each cell of a device's class: its printed values, and the parameters of its case."""
    chosen = _values(workload, facts)
    axes = axes_of(workload, facts)
    texts = [chosen.get(axis.name, axis.default) for axis in axes]
    for combination in itertools.product(*texts):
        named = list(zip(axes, combination, strict=True))
        cases = cases_of(workload, axes, {axis.name: axis.values((text,))[0] for axis, text in named})
        if len(cases) != 1:
            raise UsageError(f"{', '.join(combination)} stands for {len(cases)} cases, and a cell is one.")
        yield {axis.name: _to_scalar(axis, text) for axis, text in named}, cases[0]


def _to_scalar(axis: Axis, text: str) -> Scalar:
    """Returns a number as a number, so that graphs can use it as an axis; other texts unchanged."""
    (value,) = axis.values((text,))
    return value if isinstance(value, int) and not isinstance(value, bool) else text


def _texts(axis: Axis, values: Iterable[str]) -> set[Scalar]:
    return {_to_scalar(axis, text) for text in values}


def _values(workload: Workload, facts: DeviceFacts) -> Mapping[str, tuple[str, ...]]:
    grid = _grid(workload)
    return grid.gpu if facts.accelerated else grid.cpu


def _grid(workload: Workload) -> Grid:
    if workload.history is None:
        raise UsageError(f"the suite {workload.name!r} declares no grid with a history.")
    return workload.history
