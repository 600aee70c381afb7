"""Refusals before anything is timed, and the reported distance between results."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fp8bench.errors import UsageError
from fp8bench.features.bench.calls import compute_exact_results, draw_inputs, measure_difference, run_callable
from fp8bench.features.bench.checks import examine_callable
from fp8bench.features.bench.job import check_callable_names, choose_axes
from fp8bench.features.bench.values import parse_shapes
from fp8bench.features.bench.workload import CallableWorkload
from fp8bench.model import Case, Level
from fp8bench.model.raw import Settings
from fp8bench.protocols import Setup
from fp8bench.registry import precisions, workloads
from fp8bench.report.comparisons import split_case_id
from fp8bench.worker.bench import Bench
from tests.facts import CPU
from tests.features.bench.callables import SOURCE

SHAPE = "128x32,32x64"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("callables") / "mine.py"
    path.write_text(SOURCE)
    return str(path)


def setup_of(target: str, against: str = "torch:matmul", **params: str) -> Setup:
    given = params if "inputs" in params else {"shape": SHAPE, "dtype": "fp32", **params}
    case = Case("bench", (*given.items(), ("against", against)), target, "cpu")
    arithmetic = precisions.get("fp32").arithmetic(CPU)
    return Setup(case, CPU, 5, arithmetic, arithmetic, {})


def remarks_on(target: str, against: str = "torch:matmul", **params: str) -> list[str]:
    return examine_callable(setup_of(target, against, **params), target, against)


# A callable of the file and its message. All are compared with torch:matmul.
REFUSED = [
    ("prodct", "has no 'prodct'. Did you mean 'product'? Callables in it:"),
    ("number", "is int, and cannot be called. Give a function."),
    ("Layer", "is a class, and calling it only creates an object"),
    ("one", "takes 1 positional argument but 2 were given"),
    ("transposed", "returns 64x128 float32, and torch:matmul 128x64 float32: they do different work"),
    ("halves", "returns 128x64 float16, and torch:matmul 128x64 float32"),
    ("in_place", "changes its inputs, so the next call would get different ones. Let it change copies"),
    ("nothing", "returns nothing, so its results cannot be compared"),
    ("word", "returns str without a tensor"),
    ("raises", "cannot be measured with 128x32 float32, 32x64 float32: ValueError: no such kernel (mine.py, line"),
    ("infinite", "returns NaN, infinities or an error too large for a number where torch:matmul does not"),
    ("talks", "a step printed 'hello hello"),
    ("switches", "cannot be measured: it left the number of threads at "),
    ("threads", "a step left 1 running (helper)"),
    ("remembers", "remembers earlier inputs: it returns old results for new numbers in the same memory"),
    ("remembers_weight", "remembers earlier inputs"),
    ("constant", "returns the same results for different inputs, but torch:matmul does not"),
]


@pytest.mark.parametrize(("name", "sentence"), REFUSED, ids=[name for name, _ in REFUSED])
def test_a_callable_whose_time_would_mean_nothing_is_refused(name: str, sentence: str, file: str) -> None:
    threads = torch.get_num_threads()
    with pytest.raises(UsageError) as told:
        remarks_on(f"{file}:{name}")
    assert sentence in str(told.value)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("name", ["product", "twin", "low", "layer", "slowed"])
def test_an_honest_callable_gets_no_remark(name: str, file: str) -> None:
    assert remarks_on(f"{file}:{name}") == []


def test_remarks_on_what_a_run_cannot_show(file: str) -> None:
    (wrong,) = remarks_on(f"{file}:tiled", shape="192x32,32x64")
    assert wrong.startswith("at 96x16,16x32 ") and " from torch:matmul, so it is wrong at other shapes" in wrong
    (refused,) = remarks_on(f"{file}:even_rows", shape="64x32,32x64")
    assert "at 32x16,16x32 torch:matmul works, but" in refused and "rows must be a multiple of 64" in refused
    (hidden,) = remarks_on(f"{file}:clean")
    assert hidden.startswith("a NaN in the input does not reach the result of")
    (random,) = remarks_on(f"{file}:drops", shape="64x32,32x64")
    assert "differs from itself by " in random, "drawing numbers is not remembering"
    assert remarks_on(f"{file}:factor", f"{file}:factor_too", inputs=f"{file}:positive_definite") == []
    (drifting,) = remarks_on(f"{file}:drifts")
    assert "differs from itself by " in drifting and "with equal inputs" in drifting


def test_inputs_are_the_files_or_a_file_of_tensors(file: str, tmp_path: Path) -> None:
    assert remarks_on(f"{file}:product", f"{file}:low", inputs=f"{file}:inputs") == []
    with pytest.raises(UsageError, match="returns other inputs when it is called again with the same seed"):
        remarks_on("torch:matmul", inputs=f"{file}:other_inputs")
    with pytest.raises(UsageError, match="returns int without tensors; expected a tensor, a tuple or list"):
        remarks_on("torch:matmul", inputs=f"{file}:no_inputs")
    torch.save((torch.ones(8, 4), torch.ones(4, 8)), tmp_path / "batch.pt")
    assert remarks_on(f"{file}:product", inputs=str(tmp_path / "batch.pt")) == []
    torch.save(torch.nn.Linear(2, 2), tmp_path / "code.pt")
    with pytest.raises(UsageError, match="Other objects could run code, so they are not loaded"):
        remarks_on(f"{file}:product", inputs=str(tmp_path / "code.pt"))


def test_errors_are_those_of_an_independent_computation(file: str) -> None:
    a, b = (tensor.double().numpy() for tensor in draw_inputs(parse_shapes(SHAPE), "fp32", "cpu", 5).tensors)
    exact = torch.from_numpy(a @ b)

    def apart(result: Tensor, wanted: Tensor) -> float:
        return float((result.double() - wanted).norm() / wanted.norm())

    inputs = draw_inputs(parse_shapes(SHAPE), "fp32", "cpu", 5)
    own = run_callable(f"{file}:low", inputs)[0]
    theirs = run_callable("torch:matmul", inputs)[0]
    errors = CallableWorkload().error(setup_of(f"{file}:low"))
    assert errors == {
        "output_error": pytest.approx(apart(own, exact), rel=1e-9),
        "difference_error": pytest.approx(apart(own, theirs.double()), rel=1e-9),
    }
    assert 1e-3 < errors["output_error"] < 1e-2
    assert CallableWorkload().error(setup_of(f"{file}:twin"))["difference_error"] == 0
    assert CallableWorkload().error(setup_of("torch:matmul")) == {
        "output_error": pytest.approx(apart(theirs, exact), rel=1e-9)
    }


def test_a_reference_that_rounds_inside_is_no_float64(file: str) -> None:
    inputs = draw_inputs(parse_shapes(SHAPE), "fp32", "cpu", 5)
    for name in ("rounds_inside", "refuses_fp64", "low"):
        assert compute_exact_results(f"{file}:{name}", inputs, 0) is None, name
        assert {*CallableWorkload().error(setup_of(f"{file}:product", f"{file}:{name}"))} == {"difference_error"}
    relu = compute_exact_results("torch:relu", draw_inputs([(8, 8)], "bf16", "cpu", 5), 0)
    assert relu is not None and relu[0].dtype is torch.float64


def test_differences_of_odd_results() -> None:
    nan = math.nan
    inf = math.inf
    one = [torch.tensor([1.0, nan, inf])]
    assert measure_difference(one, [torch.tensor([1.0, nan, inf])]) == 0
    assert measure_difference([torch.tensor([1.5, nan, inf])], one) == 0.5
    assert measure_difference([torch.tensor([1.0, 0.0, inf])], one) == inf
    assert measure_difference([torch.tensor([1.0, nan, -inf])], one) == inf
    assert measure_difference([torch.tensor([1, 2, 3, 4])], [torch.tensor([1, 2, 3, 5])]) == 0.25
    assert measure_difference([torch.tensor([1 + 1j])], [torch.tensor([1 + 0j])]) == 1
    eights = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    assert measure_difference([eights], [eights.float()]) == 0
    assert measure_difference([torch.zeros(2), torch.tensor([3.0])], [torch.zeros(2), torch.tensor([2.0])]) == 0.5


def test_names_and_inputs_are_checked_before_a_worker_starts(tmp_path: Path) -> None:
    unrunnable = "raise SystemExit  # the parent reads this file, and never runs it\ndef inputs(device, seed): ...\n"
    (tmp_path / "mine.py").write_text(unrunnable)
    mine = f"{tmp_path / 'mine.py'}:f"
    assert check_callable_names([mine], "torch:relu") == ("torch:relu", mine)
    axes = dict(choose_axes(("torch:relu", mine), (), None, None, "hot"))
    assert axes["inputs"] == (f"{tmp_path / 'mine.py'}:inputs",) and axes["against"] == ("torch:relu",)
    for targets, against, sentence in (
        (["torch.relu"], "torch:relu", "is not a function"),
        (["a b:f"], "torch:relu", "is not a callable"),
        (["fp8:exact"], "torch:relu", "is not a callable"),
        (["torch:relu"], "torch:relu", "is named twice. Name it once; the reference is measured twice"),
        ([mine, mine], "torch:relu", "is named twice. Name it once"),
    ):
        with pytest.raises(UsageError, match=sentence):
            check_callable_names(targets, against)
    with pytest.raises(UsageError, match=r"the inputs of torch:abs are unknown. Give a shape for each argument"):
        choose_axes(("torch:relu", "torch:abs"), (), None, None, "hot")
    for shapes, dtype, source, sentence in (
        (("8x8",), None, "mine.py:inputs", "Give one of the two"),
        ((), "bf16", None, "Add --shape, or omit --dtype"),
        ((), None, "absent.pt", "this file does not exist"),
        ((), None, "batch.npz", "neither file.py:function nor a file of tensors"),
    ):
        with pytest.raises(UsageError, match=sentence):
            choose_axes(("torch:relu", mine), shapes, dtype, source, "hot")


def test_shapes_of_arguments_are_parsed() -> None:
    assert parse_shapes("1024x4096, 8,1") == ((1024, 4096), (8,), (1,))
    for wrong in ("", "8x", "8,,8", "-1x2", "axb", "0x4", "1000000x1000000x1000000"):
        with pytest.raises(ValueError, match=r"not a shape|elements"):
            parse_shapes(wrong)


def test_a_callable_is_no_precision_of_suites() -> None:
    assert precisions.get("fp8-delayed:history=16").mode == "fp8-delayed:history=16"
    assert precisions.get("torch:relu").mode == "torch:relu"
    assert precisions.get("torch:relu").support(CPU).level is Level.REFUSED
    assert "bench" not in workloads.names()


def test_slashes_of_paths_are_no_end_of_a_setting() -> None:
    case = Case("bench", (("inputs", "data/a.py:inputs"), ("against", "b/ref.py:f")), "c/mine.py:g", "cpu")
    assert split_case_id(case.id) == (case.setting, case.mode)
    assert split_case_id("gemm[m=8]@cuda:1/fp8") == ("gemm[m=8]@cuda:1", "fp8") and split_case_id("a/b/c") == (
        "a/b",
        "c",
    )


def test_a_callable_that_returns_its_input_does_no_work(tmp_path: Path) -> None:
    (tmp_path / "lazy.py").write_text("def same(a, b):\n    return a\n")
    case = setup_of(f"{tmp_path / 'lazy.py'}:same", "torch:add", shape="8x8,8x8").case
    worker = Bench(Settings())
    try:
        assert worker.effect(case, CPU).changes is False
        assert worker.effect(setup_of("torch:add", "torch:add", shape="8x8,8x8").case, CPU).changes
    finally:
        worker.close()
