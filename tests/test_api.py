"""The same as the command line, from Python."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8bench
from fp8bench import Run
from fp8bench.cli.main import build_parser, subparsers_by_name
from fp8bench.errors import RunNotFound, UnknownName, UsageError
from fp8bench.model import Case, DeviceFacts, Plan, Record, Scalar, Status, Work
from fp8bench.protocols import Phases, Setup, Workload
from fp8bench.protocols.axes import Axis, whole_number
from fp8bench.registry import workloads
from fp8bench.store.runs.listing import run_files
from tests.counts import for_each


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    store = tmp_path_factory.mktemp("api") / "store"
    run = fp8bench.run(
        "gemm",
        dtypes=["fp8", "bf16"],
        set={"shape": [32, "16x8x32"], "operands": "cast"},
        rounds=3,
        isolation=False,
        store=store,
    )
    return run, store


def test_run_returns_the_run_with_its_records(kept: tuple[Run, Path]) -> None:
    run, _ = kept
    assert isinstance(run, Run) and run.finished and run.ok
    assert run.request.axes == (("shape", ("32", "16x8x32")), ("operands", ("cast",)))
    assert [record.case.mode for record in run.records] == ["fp32", "bf16", "fp8"] * 2
    assert all(record.timing is not None and record.timing.num_rounds == 3 for record in run.records)
    assert all(record.measurement("product_error") and record.capacity is None for record in run.records)


def test_load_reads_it_back_by_any_name(kept: tuple[Run, Path]) -> None:
    run, store = kept
    for word in ("last", run.id, Path(run.path), Path(run.path).stem):
        assert fp8bench.load(word, store) == run
    assert fp8bench.load(run) is run
    with pytest.raises(RunNotFound):
        fp8bench.load("nothing", store)


@for_each(("value", "texts"), [(64, ("64",)), (range(1, 3), ("1", "2"))])
def test_values_of_options_may_be_one_text_or_many(value: object, texts: tuple[str, ...], tmp_path: Path) -> None:
    run = fp8bench.run(
        "gemm", dtypes="fp32,bf16", devices="cpu", set={"shape": value}, rounds=1, isolation=False, store=tmp_path
    )
    assert (run.request.dtypes, run.request.devices) == (("fp32", "bf16"), ("cpu",))
    assert run.request.axes == (("shape", texts),) and len(run.records) == 2 * len(texts)


@for_each(
    ("wrong", "sentence"),
    [
        ({"rounds": 0}, "rounds must be a whole number from 1"),
        ({"rounds": 1.5}, "rounds must be a whole number"),
        ({"budget": float("nan")}, "budget must be a number of seconds"),
        ({"set": {"shape": []}}, "set must be a mapping of axes to values, at least one each"),
        ({"rounds": True}, "rounds must be a whole number"),
        ({"threads": 1_000_000}, "threads must be a whole number from 1 to 1024"),
        ({"budget": "5"}, "budget must be a number of seconds above 0, got '5'"),
        ({"case_timeout": 5}, "--case-timeout is impossible with --no-isolation"),
        ({"dtypes": None}, "dtypes must be a list of names, got None"),
        ({"dtypes": [3]}, "dtypes must be a list of names"),
        ({"set": 3}, "set must be a mapping of axes to values, .* got 3"),
        ({"static_scales": 0}, "static_scales must be a whole number from 1 to 100000, got 0"),
        ({"static_scales": 2, "saturation_bound": 100}, "saturation_bound must be a percentage from 0 to below 100"),
        ({"saturation_bound": 1}, "Add --static-scales N"),
        ({"max_batch": "lots"}, "max_batch must be a size above 0 and up to 100 TiB, like 2GiB, or device, got 'lots'"),
        ({"precision_map": "mlp=fp8"}, "precision_map must be a mapping of layers, .* got 'mlp=fp8'"),
        ({"reference": 3}, "reference must be a dtype's name, got 3"),
        ({"data": 3}, "data must be a path, got 3"),
        ({"quick": "no"}, "quick must be True or False, got 'no'"),
        ({"dtypes": ["fp9"]}, "unknown precision 'fp9'"),
        ({"precision_map": {"mlp": "fp8"}}, "unknown layer of suite"),
        ({"suite": None}, "suite must be a suite's name, .* got None"),
        ({"store": ""}, "store cannot be ''"),  # would be the working directory
        ({"store": "s3://bucket/store"}, "which is an address"),
        ({"sessions": "3@soon"}, "sessions: expected a time below a week"),
    ],
)
def test_what_cannot_be_is_refused_as_at_the_door(wrong: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=sentence):
        fp8bench.run(**{"suite": "gemm", "isolation": False, "store": tmp_path, **wrong})
    assert not list(run_files(tmp_path))


def test_an_unknown_suite_names_the_nearest() -> None:
    with pytest.raises(UnknownName) as caught:
        fp8bench.run("gem")
    assert isinstance(caught.value, fp8bench.Fp8benchError) and caught.value.nearest == "gemm"


class Notebook(Workload):
    """A workload as somebody would write it in a notebook."""

    name = "notebook"
    summary = "sums of a matrix"

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        return (Axis("side", "of the matrix", ("64",), whole_number()),)

    def work(self, params: Mapping[str, Scalar]) -> Work:
        return Work(flops=float(params["side"]) ** 2)

    def prepare(self, setup: Setup) -> torch.Tensor:
        side = int(setup.case.param("side"))
        return setup.arithmetic.cast(torch.ones(side, side), "input").data  # type: ignore[arg-type]

    def step(self, state: torch.Tensor, phase: Phases) -> None:
        with phase.elementwise:
            state.sum()

    def error(self, setup: Setup) -> Mapping[str, float]:
        return {"sum_error": torch.tensor(0.25)}  # type: ignore[dict-item]


class Listener:
    """An observer that records what it receives."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def planned(self, plan: Plan) -> None:
        self.heard.append(f"planned {plan.num_cases}")

    def working(self, case: Case, doing: str, share: float) -> None:
        assert 0 <= share <= 1
        if self.heard[-1] != doing:
            self.heard.append(doing)

    def finished(self, record: Record) -> None:
        self.heard.append(f"finished {record.case.mode}")


@pytest.mark.slow
def test_a_workload_of_the_callers_own_runs_without_isolation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workloads.names()
    monkeypatch.setattr(workloads, "_leaves", dict(workloads._leaves))
    workloads.register("notebook")(Notebook)
    listener = Listener()
    run = fp8bench.run(
        "notebook",
        dtypes=["fp32", "bf16"],
        quick=True,
        isolation=False,
        store=tmp_path,
        observer=listener,
        energy=False,
    )
    assert [record.status for record in run.records] == [Status.OK] * 2
    assert listener.heard == [
        "planned 2",
        "preparing",
        "measuring",
        "checking numbers",
        "looking at products",
        "checking what steps do",
        "measuring memory",
        "finished fp32",
        "finished bf16",
    ]
    error = fp8bench.load("last", tmp_path).records[1].measurement("sum_error")
    assert error is not None and error.samples == (0.25,)


def test_without_isolation_the_process_is_left_as_it_was(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.manual_seed(123)
        expected = torch.random.get_rng_state()
        fp8bench.run(
            "transformer",
            dtypes=["bf16"],
            set={"size": "nano", "batch": 1, "sequence": 16, "micro_batches": 1},
            rounds=1,
            isolation=False,
            store=tmp_path,
        )
        assert torch.get_num_threads() == 2
        assert torch.equal(torch.random.get_rng_state(), expected)
    finally:
        torch.set_num_threads(before)


def test_the_signature_is_the_command_lines_options() -> None:
    suite = subparsers_by_name(build_parser())["suite"]
    plain = vars(build_parser().parse_args(["suite"]))
    # A call has other parameters for these, or needs none.
    of_the_line = {
        "dry_run",
        "config",
        "resume",
        "plan",
        "cell",
        "write_plan",
        "json",
        "csv",
        "html",
        "md",
        "open",
        "explain",
        "help",
        "help_all",
    }
    called = {"axes": "set", "memory_limit": "max_batch"}
    options = {called.get(action.dest, action.dest) for action in suite._actions} - of_the_line
    parameters = inspect.signature(fp8bench.run).parameters
    assert set(parameters) - {"observer", "progress"} == options
    assert inspect.signature(fp8bench.suite) == inspect.signature(fp8bench.run)
    for name, parameter in parameters.items():
        if name not in ("suite", "observer", "progress", "set", "precision_map", "store", "sessions", "max_batch"):
            assert parameter.default == plain[name] or (parameter.default == () and not plain[name]), name


def test_a_run_that_was_cut_off_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # outside any repository, as a commit made during the test would forbid it

    class Stopping(Listener):
        def finished(self, record: Record) -> None:
            raise KeyboardInterrupt

    half = fp8bench.run(
        "gemm", dtypes=["fp32"], set={"shape": [8, 16]}, rounds=1, isolation=False, store=tmp_path, observer=Stopping()
    )
    assert not half.finished and len(half.records) == 1
    listener = Listener()
    whole = fp8bench.resume(half, observer=listener)
    assert whole.finished and len(whole.records) == 2 and whole.id == half.id and listener.heard[0] == "planned 1"
    for word in ("last", whole.id, Path(whole.path)):
        assert fp8bench.resume(word, store=tmp_path) == whole


def test_a_run_that_was_not_stored_cannot_be_resumed(kept: tuple[Run, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="was not stored"):
        fp8bench.resume(replace(kept[0], path=""))
    with pytest.raises(RunNotFound):
        fp8bench.resume("last", store=tmp_path)
