"""Tracked series: names, parameters and versions in both interfaces, and grids that are refused."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8bench.errors import UsageError
from fp8bench.model import PHASES, DeviceFacts, Params, Scalar, Work
from fp8bench.model.specs import COUNTS
from fp8bench.protocols import Grid, Phases, Setup, Workload
from fp8bench.protocols.axes import Axis, one_of, whole_number
from fp8bench.registry import workloads
from fp8bench.store import series as followed
from fp8bench.store.series import (
    check_history_grid,
    class_name,
    join_versions,
    list_grid_cells,
    list_parameters,
    list_tracked_metrics,
    make_series,
    reference_precision,
)
from tests.counts import for_each
from tests.histories import FOLLOWED

GOLDEN = Path(__file__).parents[1] / "golden" / "grids.txt"
TEXT = "python-3.11.7:1a2b3c4d"
CPU = DeviceFacts("cpu", 0, "", 0, "")
GPU = DeviceFacts("cuda", 0, "", 0, "")
GRID = Grid(cpu={"n": ("8",)}, gpu={"n": ("64",)})
MOVED = """The grids are no longer those of tests/golden/grids.txt. If a case, a parameter or a metric was changed, old
numbers no longer compare: raise the workload's version (METHOD in followed.py, if it is all of them), write the new
text to the file and read its diff. If something was added only, write the new text and read its diff."""


class Tiny(Workload):
    """Two axes; sizes below 1 stand for as many cases more."""

    name = "tiny"
    summary = "nothing much"
    version = "3"
    history = GRID

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        return (
            Axis("n", "a number", ("64" if facts.accelerated else "8",), whole_number(low=-9)),
            Axis("way", "a word", ("to",), one_of("to", "from")),
        )

    def work(self, params: Mapping[str, Scalar]) -> Work:
        return Work(1.0)

    def prepare(self, setup: Setup) -> Any:
        raise NotImplementedError

    def step(self, state: Any, phase: Phases) -> None:
        raise NotImplementedError

    def expand(self, params: Mapping[str, Scalar]) -> tuple[Params, ...]:
        number = int(params["n"])
        return tuple((("n", number + more), ("way", params["way"])) for more in range(1 - min(number, 0)))


def tiny(name: str = "tiny", **grid: Any) -> Workload:
    """A workload of that name, whose grid has these fields instead of GRID's."""
    words = {"cpu": GRID.cpu, "gpu": GRID.gpu, **grid}
    made: Workload = type("Tiny", (Tiny,), {"name": name, "history": Grid(**words)})()
    return made


def why_not(workload: Workload) -> str:
    with pytest.raises(UsageError) as caught:
        check_history_grid(workload)
    start, _, why = str(caught.value).partition(f"suite {workload.name!r} declares cannot be tracked: ")
    assert start == "the grid that " and "\n" not in why and why.endswith(".")
    return why


def grids_as_text() -> str:
    """Every series and every cell's case, on fictional machines."""
    lines = []
    for name in FOLLOWED:
        workload = workloads.get(name)
        lines.append(name)
        series = make_series(workload, TEXT if workload.uses_corpus else None)
        lines += [f"  {one.name} ({one.unit}), version {one.version}" for one in series]
        lines += [f"  {key}: {', '.join(map(repr, values))}" for key, values in list_parameters(workload).items()]
        sizes = workload.history.ranks or (1,)  # type: ignore[union-attr]
        for facts in (replace(one, ranks=size) for one in (CPU, GPU) for size in sizes):
            for params, cell in list_grid_cells(workload, facts, TEXT).items():
                case = ", ".join(f"{key}={value!r}" for key, value in params)
                work = workload.work(dict(params))
                counts = f"{work.flops:.6g} flops, {work.tokens} tokens, {work.bytes:.6g} bytes"
                lines.append(f"  {facts.kind} ({', '.join(map(repr, cell))}) is {case}: {counts}")
        lines.append("")
    return "\n".join(lines)


def test_tracked_grids_do_not_change() -> None:
    # A changed default would silently change the meaning of a graph's line.
    assert grids_as_text() == GOLDEN.read_text(), MOVED
    own = [name for name in workloads.names() if type(workloads.get(name)).__module__.startswith("fp8bench.workloads.")]
    assert [name for name in FOLLOWED if name in own] == own and len(own) == 18
    assert workloads.get("_planted").history is None and "collective" in FOLLOWED


def test_numbers_of_ranks_never_share_a_series() -> None:
    workload = workloads.get("collective")
    sizes = workload.history.ranks  # type: ignore[union-attr]
    cells = [
        set(list_grid_cells(workload, replace(one, ranks=size), None).values()) for one in (CPU, GPU) for size in sizes
    ]
    assert all(cells) and sum(map(len, cells)) == len(set().union(*cells))
    assert {cell[-1] for cell in set().union(*cells)} == {"2 gloo", "8 gloo", "2 nccl", "8 nccl"}
    assert not list_grid_cells(workload, CPU, None) and not list_grid_cells(workload, replace(CPU, ranks=3), None)
    assert not list_grid_cells(workloads.get("gemm"), replace(CPU, ranks=2), None)


@for_each("name", workloads.names())
def test_cells_are_combinations_of_the_series_parameters(name: str) -> None:
    workload = workloads.get(name)
    values = list_parameters(workload)
    assert next(iter(values)) == "dtype" and values["dtype"] == tuple(workload.history.dtypes)  # type: ignore[union-attr]
    combinations = set(itertools.product(*list(values.values())[1:]))
    cpu, gpu = (list_grid_cells(workload, facts, TEXT) for facts in (CPU, GPU))
    for cells in (cpu, gpu):
        assert cells and set(cells.values()) <= combinations and len(set(cells.values())) == len(cells)
    assert not set(cpu.values()) & set(gpu.values())
    # asv has one version and one list of parameters per class.
    found = make_series(workload, None)
    assert len({(one.param_names, one.params, one.version, one.workload) for one in found}) == 1
    assert [one.metric for one in found] == [metric.name for metric in list_tracked_metrics(workload.history)]  # type: ignore[arg-type]
    assert {one.name for one in found} == {f"{name}.{class_name(name)}.track_{one.metric}" for one in found}


def test_a_class_is_called_like_its_workload() -> None:
    names = {"gemm": "Gemm", "norm_act": "NormAct", "my__own_": "MyOwn", "_x": "X", "aB_c": "ABC", "größe": "Größe"}
    assert {name: class_name(name) for name in names} == names
    for name in names:
        check_history_grid(tiny(name))


def test_metrics_are_those_that_a_grid_declares() -> None:
    names = [
        metric.name
        for metric in list_tracked_metrics(Grid({}, {}, phases=("cast",), errors=("loss_error",), per="tokens"))
    ]
    assert names == [
        "time",
        "mean_time",
        "time_cast",
        "seconds_per_mtok",
        "relative_time",
        "relative_mean_time",
        "peak_memory",
        "flops",
        "moved_bytes",
        "launches",
        "energy",
        "loss_error",
    ]
    of_all = ["time", "mean_time", "relative_time", "relative_mean_time", "peak_memory", *COUNTS, "energy"]
    assert [metric.name for metric in list_tracked_metrics(GRID)] == of_all
    assert all(metric.description for metric in list_tracked_metrics(GRID))


@given(st.from_regex(r"[a-z_][a-zA-Z0-9_]{0,20}", fullmatch=True))
def test_a_name_is_refused_or_makes_a_class(name: str) -> None:
    try:
        check_history_grid(tiny(name))
    except UsageError:
        assert not class_name(name).isidentifier()
    else:
        assert class_name(name).isidentifier()


def test_parameters_are_axes_of_which_the_grid_has_several_values() -> None:
    assert list_parameters(tiny(dtypes=("bf16",))) == {"dtype": ("bf16",), "n": (8, 64)}
    both = tiny(cpu={"way": ("from", "to"), "n": ("8", "4")}, gpu={"way": ("from", "to"), "n": ("64", "064")[:1]})
    assert list_parameters(both) == {"dtype": ("fp32", "bf16", "fp8"), "way": ("from", "to"), "n": (8, 4, 64)}
    # A cell is in the order of the parameters, not in that of the workload's axes.
    assert list_grid_cells(both, CPU, None)[("n", 4), ("way", "from")] == ("from", 4)
    mode = "fp8-delayed:history=16:margin=1"
    assert list(list_parameters(tiny(dtypes=("bf16", mode)))["dtype"]) == ["bf16", mode]
    for dtypes, highest in ((("bf16", mode), "bf16"), (("fp8", "bf16", "fp32"), "fp32")):
        assert reference_precision(tiny(dtypes=dtypes)) == highest


def test_the_text_is_part_of_the_cases_of_those_who_read_it() -> None:
    plain = tiny()
    reader = type("Reader", (Tiny,), {"uses_corpus": True})()
    assert list(list_grid_cells(plain, CPU, TEXT)) == [(("n", 8), ("way", "to"))]
    assert list(list_grid_cells(reader, CPU, TEXT)) == [(("n", 8), ("way", "to"), ("data", TEXT))]
    assert list(list_grid_cells(reader, GPU, None)) == [(("n", 64), ("way", "to"))]
    assert join_versions("2", TEXT) == f"{join_versions('2', None)} {TEXT}" == f"{followed.METHOD_VERSION}.2 {TEXT}"
    assert {metric.version for metric in make_series(reader, TEXT)} == {f"{followed.METHOD_VERSION}.3 {TEXT}"}


class Many(Tiny):
    """An axis with several defaults on a GPU: a cell is one case, whatever else an axis has."""

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        way = Axis("way", "a word", ("to", "from") if facts.accelerated else ("to",), one_of("to", "from"))
        return (*super().axes(facts)[:1], way)


FAULTS: dict[str, tuple[Workload, str]] = {
    "several defaults": (Many(), "the axis 'way' has several defaults on a gpu, and the grid does not choose one."),
    "name with a dash": (tiny("my-own"), "asv uses the name for a module"),
    "name of underscores": (tiny("___"), "asv uses the name for a module"),
    "name that leaves a number": (tiny("_1"), "asv uses the name for a module"),
    "axes that differ": (tiny(gpu={}), "cpu names the axes n and gpu none"),
    "axes that differ both ways": (tiny(gpu={"way": ("to",)}), "cpu names the axes n and gpu way"),
    "no axes": (tiny(cpu={}, gpu={}), "no axis has entirely different values on cpu and gpu"),
    "no such axis": (tiny(cpu={"m": ("1",)}, gpu={"m": ("2",)}), "'m' is not an axis; the axes are cache, n, way"),
    "no value on a cpu": (tiny(cpu={"n": ()}), "the axis 'n' has no value on a cpu"),
    "no value on a gpu": (tiny(gpu={"n": ()}), "the axis 'n' has no value on a gpu"),
    "no such value": (tiny(cpu={"n": ("x",)}), "axis 'n' cannot be 'x': expected a whole number"),
    "no such value on a gpu": (tiny(gpu={"n": ("x",)}), "axis 'n' cannot be 'x': expected a whole number"),
    "the same on both": (tiny(gpu={"n": ("8", "64")}), "no axis has entirely different values on cpu and gpu"),
    "the same in other words": (tiny(gpu={"n": ("008",)}), "no axis has entirely different values on cpu and gpu"),
    "the same case twice": (tiny(cpu={"n": ("8", "08")}), "two cells are the same case on a cpu ({'n': 8, "),
    "several cases": (tiny(gpu={"n": ("-2",)}), "-2, to, hot gives 3 cases, but a cell is one case"),
    "no such phase": (tiny(phases=("gem",)), f"'gem' is not a phase; the phases are {', '.join(PHASES)}"),
    "an error called as a metric": (tiny(errors=("peak_memory",)), "'peak_memory' is the name of a figure"),
    "an error called as a phase's time": (tiny(errors=("time_gemm",)), "'time_gemm' is the name of a figure"),
    "an alias": (tiny(dtypes=("fp32", "fp4")), "the dtype 'fp4' is an alias of nvfp4"),
    "another word for a mode": (tiny(dtypes=("fp8:gw=low",)), "the dtype 'fp8:gw=low' is an alias of fp8"),
    "a mode that cannot be": (tiny(dtypes=("fp8-delayed:history=0",)), "fp8-delayed: history cannot be '0'"),
    "no such dtype": (tiny(dtypes=("fp33",)), "unknown precision 'fp33'. Did you mean 'fp32'?"),
    "a dtype twice": (tiny(dtypes=("fp32", "fp32")), "its dtypes are fp32, fp32; give at least one, and each once"),
    "no dtype": (tiny(dtypes=()), "its dtypes are none; give at least one, and each once"),
}  # fmt: skip


@for_each(("workload", "sentence"), FAULTS.values())
def test_a_grid_that_cannot_be_tracked_gives_a_message(workload: Workload, sentence: str) -> None:
    assert why_not(workload).startswith(sentence)
    with pytest.raises(UsageError):
        make_series(workload, None)


def test_errors_of_a_users_workload_give_a_message() -> None:
    class Raising(Tiny):
        def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
            raise ZeroDivisionError("oh no")

    with pytest.raises(UsageError, match=r"suite 'tiny' cannot be planned: ZeroDivisionError: oh no"):
        check_history_grid(Raising())
    bare = type("Bare", (Tiny,), {"history": None})()
    for ask in (check_history_grid, list_parameters, reference_precision, lambda one: make_series(one, None)):
        with pytest.raises(UsageError, match="declares no grid with a history"):
            ask(bare)


words = st.lists(st.sampled_from(["8", "08", "9", "64", "-1", "x", ""]), max_size=3, unique=True).map(tuple)
grids = st.fixed_dictionaries({}, optional={"n": words, "way": words, "m": words})


@given(grids, grids, st.lists(st.sampled_from(["fp32", "bf16", "float32", "no"]), max_size=3).map(tuple))
def test_any_grid_is_refused_or_unambiguous(cpu: dict[str, Any], gpu: dict[str, Any], dtypes: tuple[str, ...]) -> None:
    workload = tiny(cpu=cpu, gpu=gpu, dtypes=dtypes)
    try:
        series = make_series(workload, None)
    except UsageError:
        return
    values = dict(zip(series[0].param_names, series[0].params, strict=True))
    assert all(len(set(value)) == len(value) and value for value in values.values())
    known = [list_grid_cells(workload, facts, None) for facts in (CPU, GPU)]
    places = [place for cells in known for place in cells.values()]
    assert len(set(places)) == len(places)
    assert set(places) <= set(itertools.product(*list(values.values())[1:]))
