"""Contract of every workload; new ones are included automatically."""

from __future__ import annotations

import gzip
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import chain, product
from pathlib import Path

import pytest

from fp8bench.model import (
    CELL_PHASES,
    UNATTRIBUTED,
    Case,
    DeviceFacts,
    Level,
    Params,
    Record,
    Request,
    Run,
    Status,
    StepEffect,
    specs,
)
from fp8bench.model.raw import StateCheck
from fp8bench.model.specs import ENERGY, PEAK_MEMORIES, PEAK_MEMORY, find_metric_spec
from fp8bench.pipeline import execute
from fp8bench.plan.checked_workload import checked_products
from fp8bench.plan.corpus import Corpus
from fp8bench.plan.make import make_plan
from fp8bench.protocols import Arithmetic, Grid, Layer, Setup, SilentObserver
from fp8bench.protocols.axes import Axis
from fp8bench.registry import precisions, workloads
from fp8bench.store.points import extract_history_points
from fp8bench.store.series import check_history_grid, make_series
from fp8bench.worker.bench import Bench
from fp8bench.worker.products import find_product_formats
from fp8bench.workloads import optimizer
from fp8bench.workloads.learning import Learning
from tests.counts import for_each, paired, sampled
from tests.facts import CPU, H200
from tests.plans import cases_of

# Parameters that keep known workloads small; a workload that is not listed uses its CPU defaults.
SMALL: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "accumulate": (("width", ("64",)), ("tensors", ("3",))),
    "attention": (("part", ("layer",)), ("sequence", ("32",)), ("heads", ("2",)), ("head_width", ("16",))),
    "cast": (("shape", ("64",)),),
    "diffusion": (("denoiser", ("dit",)), ("image", ("4",)), ("width", ("32",)), ("steps", ("3",))),
    "early_exit": (("tokens", ("32",)), ("width", ("32",)), ("hidden", ("64",)), ("depth", ("3",))),
    "gemm": (("shape", ("32",)),),
    "learning": (("width", ("32",)), ("steps", ("2",)), ("draws", ("1",))),
    "optimizer": (("width", ("64",)), ("tensors", ("3",))),
    "mlp": (("tokens", ("32",)), ("width", ("64",)), ("hidden", ("128",)), ("gated", ("yes",))),
    "moe": (("tokens", ("32",)), ("width", ("32",)), ("hidden", ("64",)), ("load", ("zipf:1",))),
    "conv": (("batch", ("2",)), ("channels", ("32",)), ("image", ("8",))),
    "norm_act": (("tokens", ("32",)), ("width", ("64",))),
    "data": (("batch", ("4",)), ("record", ("1024",))),
    "numerics": (("tensor", ("gaussian",)), ("rows", ("64",)), ("columns", ("64",))),
    "transformer": (("size", ("nano",)), ("batch", ("1",)), ("sequence", ("32",))),
    "vision": (
        ("model", ("resnet",)), ("layout", ("channels_last",)), ("batch", ("2",)), ("image", ("16",)),
        ("width", ("32",)),
    ),
}  # fmt: skip
NAMES = workloads.names()
QUICK = ("optimizer",)  # whole grids always run; grids of the others run as slow tests
# Errors that are deliberately not tracked: SQNR is better when higher, which asv cannot express; the others repeat or
# only describe tracked ones.
UNFOLLOWED = {
    "attention": {"scores_bytes"},
    "diffusion": {
        "evaluations",
        *(f"{kind}_step{step}_error"
          for kind, step in product(("free", "free_floor", "single", "single_floor"), range(1, 9))),
    },
    "early_exit": {"exits_differ_percent", "mean_depth"},
    "moe": {
        "distinct_experts", "expert_bytes", "layers_that_agree", "load_ratio", "rows_least", "rows_median",
        "top_k_differs_percent",
    },
    "numerics": {
        "sqnr_db", "sqnr_row_median_db", "sqnr_row_p1_db", "sqnr_block_median_db", "sqnr_block_p1_db", "cosine_loss",
        "slope", "underflow_nonzero_percent", "subnormal_percent", "not_finite_percent", "utilisation_percent",
        "dynamic_range_octaves",
    },
    "transformer": {"scores_bytes"},
}  # fmt: skip
# Figures for which neither direction is better.
UNORDERED = ("utilisation_percent",)
ORDER = (Level.NATIVE, Level.EMULATED, Level.REFUSED)
WHERE = for_each("facts", [CPU, H200])


def smallest(name: str, precision: str, corpus: Corpus) -> Case:
    """The first case of the smallest setting, as the plan creates it."""
    request = Request(name, (precision,), ("cpu",), axes=SMALL.get(name, ()))
    planned = make_plan(request, (CPU,), corpus.identity).groups[0].cases[0]
    if planned.skip:
        pytest.skip(planned.skip)
    return planned.case


def precisions_of(name: str, corpus: Corpus, *wanted: str) -> list[str]:
    """The requested precisions that support the workload's smallest case."""
    plan = make_plan(Request(name, wanted, ("cpu",), axes=SMALL.get(name, ())), (CPU,), corpus.identity)
    return [planned.case.precision for planned in plan.groups[0].cases if planned.runs]


@for_each("name", NAMES)
def test_a_workload_introduces_itself(name: str) -> None:
    workload = workloads.get(name)
    assert workload.name == name and not set(name) & set(" ,=[]{}/@'")
    assert workload.summary and "\n" not in workload.summary and workload.version
    assert len(set(workload.layer_kinds)) == len(workload.layer_kinds)


@WHERE
@for_each("name", NAMES)
def test_every_axis_has_defaults_that_parse(name: str, facts: DeviceFacts) -> None:
    axes = workloads.get(name).axes(facts)
    names = [axis.name for axis in axes]
    assert len(set(names)) == len(names) and "data" not in names
    for axis in axes:
        assert axis.description and axis.default
        assert len(axis.values(axis.default)) == len(axis.default)


def default_cases(name: str, facts: DeviceFacts) -> list[Params]:
    plan = make_plan(Request(name, ("fp32",)), (facts,), "text:00000000")
    return [planned.case.params for planned in cases_of(plan)]


@WHERE
@for_each("name", NAMES)
def test_expanding_gives_plain_hashable_cases(name: str, facts: DeviceFacts) -> None:
    cases = default_cases(name, facts)
    assert cases and len(set(cases)) == len(cases) and cases == default_cases(name, facts)
    for params in cases:
        assert len(dict(params)) == len(params)
        assert all(isinstance(key, str) and type(value) in (int, float, str, bool) for key, value in params)


@WHERE
@for_each("name", NAMES)
def test_work_is_known_and_positive(name: str, facts: DeviceFacts) -> None:
    for params in default_cases(name, facts):
        work = workloads.get(name).work(dict(params))
        assert math.isfinite(work.flops) and (work.flops > 0 or work.bytes > 0) and work.tokens >= 0
        assert 0 < work.least_memory < facts.memory_bytes


@WHERE
@for_each("name", NAMES)
def test_layers_are_declared_by_kind_and_can_be_written_in_a_map(name: str, facts: DeviceFacts) -> None:
    workload, kinds = workloads.get(name), []
    for params in default_cases(name, facts):
        layers = checked_products(workload, dict(params))
        kinds += [layer.kind for layer in layers]
        assert {layer.kind for layer in layers} in (set(), set(workload.layer_kinds))
    assert set(kinds) == set(workload.layer_kinds)


@for_each("name", NAMES)
def test_every_layer_declared_asks_for_its_arithmetic(name: str, corpus: Corpus, bench: Bench) -> None:
    """No other layer does either: a layer name in the plan that no layer has would change nothing."""
    case = smallest(name, precisions_of(name, corpus, "fp32", "bf16")[0], corpus)
    setup, asked = bench._make_case_setup(case, CPU), []

    class Asked(Setup):
        def layer(self, layer: Layer) -> Arithmetic:
            asked.append(layer)
            return super().layer(layer)

    workload = workloads.get(name)
    workload.prepare(Asked(**vars(setup)))
    assert sorted(asked) == sorted(workload.layers(dict(case.params)))


@WHERE
@for_each("name", NAMES)
def test_support_is_never_better_than_the_precision(name: str, facts: DeviceFacts) -> None:
    for params in default_cases(name, facts):
        for precision in precisions.names():
            own = precisions.get(precision).support(facts)
            support = workloads.get(name).support(dict(params), precisions.get(precision), facts)
            assert ORDER.index(support.level) >= ORDER.index(own.level)
            assert support.reason and "\n" not in support.reason


@pytest.mark.parametrize(("name", "precision"), paired(NAMES, ["fp32", "bf16", "nvfp4", "fp8"]))
def test_steps_run_and_close_their_phases(name: str, precision: str, corpus: Corpus, bench: Bench) -> None:
    case = smallest(name, precision, corpus)
    bench.prepare("one", case, CPU)
    try:
        slot = bench.slot("one", 4, 1)
        assert len(slot.steps) == 4
        for step in slot.steps:
            assert len(step.codes) == len(step.intervals_ns) and min(step.intervals_ns) >= 0
            assert CELL_PHASES[step.codes[0]] == UNATTRIBUTED and len(set(step.codes)) > 1
        assert len({step.codes for step in slot.steps}) == 1
        assert bench.check("one") == StateCheck()
    finally:
        assert bench.release("one") == ()


# Workloads that keep no step results, in any precision without state, so that results cannot be inspected.
GIVE_NOTHING_THAT_STAYS = frozenset(
    {"attention", "cast", "conv", "diffusion", "early_exit", "gemm", "mlp", "moe", "norm_act", "numerics"}
)


@pytest.mark.parametrize(("name", "precision"), paired(NAMES, ["bf16", "fp8", "fp8-delayed"]))
def test_steps_have_a_visible_effect_or_a_reason(name: str, precision: str, corpus: Corpus, bench: Bench) -> None:
    found = bench.effect(smallest(name, precision, corpus), CPU)
    if name in GIVE_NOTHING_THAT_STAYS and precision != "fp8-delayed":
        assert found == StepEffect(None, "no result of it is stored in its state or returned")
    else:
        assert found == StepEffect(True)


@pytest.mark.slow
@for_each("name", NAMES)
def test_errors_are_named_numbers_that_grow_as_bits_go(
    name: str, corpus: Corpus, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "ERROR_STEPS", 20)  # a thousand steps take a second each
    runnable = precisions_of(name, corpus, "fp32", "bf16", "nvfp4")
    first, *_, last = runnable
    found = {precision: bench.error(smallest(name, precision, corpus), CPU) for precision in runnable}
    assert found[last] == bench.error(smallest(name, last, corpus), CPU)
    for errors in found.values():
        assert set(errors) == set(found[first])
        assert all(type(value) is float and value >= 0 and math.isfinite(value) for value in errors.values())
    for metric in found[first]:
        better, worse = found[first][metric], found[last][metric]
        if find_metric_spec(metric).unit == "dB":
            assert better > worse
        elif metric.endswith("_error"):
            assert better < worse
        elif metric.endswith(("_vanished", "_percent")) and metric not in UNORDERED:
            assert better <= worse  # both may be None


@for_each("name", NAMES)
def test_statistics_describe_values_by_kind_and_role(name: str, corpus: Corpus, bench: Bench) -> None:
    first = precisions_of(name, corpus, "fp32", "bf16")[0]
    found = bench.statistics(smallest(name, first, corpus), CPU)
    assert found == bench.statistics(smallest(name, first, corpus), CPU)
    assert len({(one.kind, one.role) for one in found}) == len(found)
    for one in found:
        assert one.kind and one.count > 0 and math.isfinite(one.amax)
        above = [share for _, share, _ in one.outside]
        assert above == sorted(above)
        for _, *shares in one.outside:
            assert min(shares) >= 0 and max(shares) <= 1


# One mode without scales and one with block scales always run; the others, and recipes with options, run nightly.
LOW = ("bf16", "nvfp4")
OTHERS = (
    "fp8:scale=pow2",
    "fp8:weight-gradient=bf16",
    "fp8:accumulator=short",
    "fp8-block:scale=exact",
    "nvfp4:hadamard=on",
    "custom:scaling=row",
    "custom:scaling=none",
    "custom:format=e2m1:scaling=1x128",
    "custom:format=e3m2:scaling=128x128",
)


@pytest.mark.parametrize("precision", sampled(LOW, (*precisions.names(), *OTHERS)))
def test_products_run_on_operands_of_the_precision(precision: str, corpus: Corpus, bench: Bench) -> None:
    looked = 0
    for name in NAMES:
        for one in precisions_of(name, corpus, precision):
            case = smallest(name, one, corpus)
            products = bench.products(case, CPU)
            assert products.operators > 0 or name == "data"
            if one == "fp32":
                assert products.low is None
            else:
                assert products.low or not products.count, f"{case.id}: {products}"
                looked += products.count
    # tf32 has no wide operands, and only two suites have unit scales.
    assert looked == {"fp32": 0, "fp16": 10, "tf32": 16, "bf16": 12, "fp8-unit": 2}.get(precision, 14)


def test_a_map_without_a_layer_left_is_of_its_own_precisions(corpus: Corpus, bench: Bench) -> None:
    case = replace(smallest("mlp", "fp8", corpus), precision_map=(("up", "bf16"), ("down", "bf16")))
    workload = workloads.get("mlp")
    assert [one.name for one in find_product_formats(workload, case, CPU)] == ["bf16"]
    partly = replace(case, precision_map=(("up", "bf16"),))
    assert [one.name for one in find_product_formats(workload, partly, CPU)] == ["e4m3fn", "e5m2"]
    assert find_product_formats(workload, replace(case, precision_map=(("up", "fp32"), ("down", "fp32"))), CPU) == ()
    for one in (case, partly):
        assert bench.products(one, CPU).low


@pytest.fixture(scope="module")
def short_trainings() -> Iterator[None]:
    """Shortens the trainings behind errors: a few steps show which errors exist."""
    whole, few = Learning.axes, {"steps": ("4",), "draws": ("1",)}

    def axes(self: Learning, facts: DeviceFacts) -> tuple[Axis, ...]:
        return tuple(replace(axis, default=few.get(axis.name, axis.default)) for axis in whole(self, facts))

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(Learning, "axes", axes)
        yield


@pytest.fixture(scope="module")
def grid_of(
    tmp_path_factory: pytest.TempPathFactory, short_trainings: None, short_slots: None
) -> Callable[[str], tuple[Grid, Run]]:
    """The workload's declared grid, and its measurement on the CPU with few rounds and all passes."""

    @cache
    def measured(name: str) -> tuple[Grid, Run]:
        grid = workloads.get(name).history
        assert grid is not None, f"{name} declares no grid: see Grid in fp8bench/protocols/workload.py"
        request = Request(name, devices=("cpu",), rounds=2, grid=True, tape=True)
        run = execute(request, tmp_path_factory.mktemp("store"), SilentObserver(), f"fp8bench suite {name} --grid")
        assert run.finished and not run.troubles
        # Pretends that this is the only device: on a machine with a GPU the series follow the GPU.
        return grid, replace(run, devices=tuple(one for one in run.devices if not one.accelerated))

    return measured


def measured_of(run: Run) -> list[Record]:
    return [record for record in run.records if record.status is Status.OK]


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(QUICK, NAMES))
def test_a_grid_declares_what_its_cases_have(name: str, grid_of: Callable[[str], tuple[Grid, Run]]) -> None:
    check_history_grid(workloads.get(name))
    grid, run = grid_of(name)
    records = measured_of(run)
    timings = [record.timing for record in records if record.timing]
    phases = set(chain.from_iterable(timing.segments.phases for timing in timings)) - {UNATTRIBUTED}
    assert set(grid.phases) == (phases if len(phases) > 1 else set())
    values = chain.from_iterable(record.measurements for record in records)
    measurements = [one for one in values if one.metric not in PEAK_MEMORIES]
    assert all(one.unit == find_metric_spec(one.metric).unit for one in measurements)
    errors = {one.metric for one in measurements}
    assert set(grid.errors) == errors - UNFOLLOWED.get(name, set())


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(QUICK, NAMES))
def test_every_series_of_a_grid_has_figures(name: str, grid_of: Callable[[str], tuple[Grid, Run]]) -> None:
    _, run = grid_of(name)
    records = measured_of(run)
    found = {point.series for point in extract_history_points(run).points if point.samples}
    corpus = next((str(record.case.param("data")) for record in records if workloads.get(name).uses_corpus), None)
    silent = {ENERGY} if all(not record.energy or not record.energy.windows for record in records) else set()
    if all(record.is_reference or record.support.level is Level.EMULATED for record in records):
        silent |= {specs.RELATIVE_TIME, specs.RELATIVE_MEAN_TIME}
    wanted = {one.name for one in make_series(workloads.get(name), corpus) if one.metric not in silent}
    assert wanted <= found


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(QUICK, NAMES))
def test_cases_of_a_grid_run_and_record_their_memory(name: str, grid_of: Callable[[str], tuple[Grid, Run]]) -> None:
    _, run = grid_of(name)
    records = measured_of(run)
    assert records and all(record.status is not Status.FAILED for record in run.records)
    assert all(record.reason for record in run.records if record.status is Status.SKIPPED)
    for record in records:
        peak = record.measurement(PEAK_MEMORY)
        assert peak.samples[0] > 0


def test_planning_any_workload_needs_no_torch() -> None:
    program = """
import sys
from fp8bench.model import DeviceFacts, Request
from fp8bench.plan.make import make_plan
from fp8bench.registry import devices, precisions, workloads
for facts in (DeviceFacts("cpu", 0, "", 1, "2.13"), DeviceFacts("cuda", 0, "", 1, "2.13", (9, 0), "13.0")):
    for name in workloads.names():
        assert make_plan(Request(name, tuple(precisions.names())), (facts,), "text:00000000").num_cases
assert devices.names(hidden=True) and workloads.names(hidden=True)
print([heavy for heavy in ("torch", "numpy", "pandas", "matplotlib") if heavy in sys.modules])
"""
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False, timeout=300
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@pytest.mark.parametrize("name", sampled(QUICK, NAMES))
def test_its_phases_are_ranges_of_its_trace(name: str, bench: Bench, corpus: Corpus, tmp_path: Path) -> None:
    for precision in precisions_of(name, corpus, "bf16", "fp8"):
        case = smallest(name, precision, corpus)
        bench.prepare("key", case, CPU)
        timed = {CELL_PHASES[code] for code in bench.slot("key", 1, 0).steps[0].codes} - {UNATTRIBUTED}
        bench.release("key")
        file = tmp_path / f"{precision}.pt.trace.json.gz"
        bench.trace(case, CPU, str(file))
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        spans = [one["name"] for one in events if one.get("cat") == "user_annotation"]
        ranges = {name.removeprefix("fp8bench.") for name in spans if name.startswith("fp8bench.")}
        assert timed and ranges == timed, precision
