"""Compiling quantisers outside of everything timed: who asks for it when, and what a compiler's failure costs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from fp8bench.analysis.findings import find
from fp8bench.analysis.verdicts import decided
from fp8bench.api import load
from fp8bench.cli.main import main
from fp8bench.errors import WorkerFault, WorkerHung, WorkerLost
from fp8bench.formats import compiling, operators, vector_width
from fp8bench.formats.grids import E4M3, E5M2
from fp8bench.measure.arm import Quantisers
from fp8bench.measure.group import GroupMeasurement, Method
from fp8bench.measure.limits import COMPILE_SECONDS, Limits
from fp8bench.model import Case, Label, Level, PlannedCase, Record, Status, Timing
from fp8bench.model.stopping import StoppingRule
from fp8bench.nn.block_arithmetic import BlockArithmetic
from fp8bench.protocols import Role, SilentObserver, SilentPhases
from fp8bench.registry import precisions
from fp8bench.worker import fusing
from fp8bench.worker.bench import Bench
from tests.counts import for_each
from tests.fakes import CPU, FakeWorker, Fault, Listener, Script, by_mode, group, planned

GEMM = (("m", 16), ("n", 16), ("k", 16), ("product", "forward"), ("operands", "cast"))
# Elements alone: one kernel, the smallest that there is.
MODE = "custom:scaling=none"


@pytest.fixture(autouse=True)
def operators_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "KERNELS", operators.Kernels())


def broken(kernel: compiling.Kernel) -> compiling.Compiled:
    raise RuntimeError("\n  no compiler here.\nat line 1\n")


def prepare(bench: Bench, key: str = "key") -> None:
    bench.prepare(key, Case("gemm", GEMM, MODE, "cpu"), CPU)


@pytest.mark.slow
def test_a_state_asks_compiles_and_runs_compiled(bench: Bench) -> None:
    prepare(bench)
    assert bench.quantisers() == (1, "")
    eager = bench.slot("key", 2, 1)
    assert (eager.eager_quantisers, eager.fused_quantisers) == (6, 0)
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    before = operators.values(x, E4M3)

    bench.compile_quantisers("key")
    assert bench.quantisers()[1] == ""
    compiled = bench.slot("key", 2, 1)
    assert (compiled.eager_quantisers, compiled.fused_quantisers) == (0, 6)
    widths = vector_width.widths("cpu")
    assert len(compiled.vector_bits) == bool(widths) and set(compiled.vector_bits) <= set(widths)
    assert torch.equal(operators.values(x, E4M3).view(torch.int32), before.view(torch.int32))


def test_what_passes_ask_for_is_not_compiled(bench: Bench) -> None:
    bench.error(Case("gemm", GEMM, MODE, "cpu"), CPU)
    operators.values(torch.ones(8), E5M2)
    assert bench.quantisers()[0] == 2
    prepare(bench)
    assert bench.quantisers()[0] == 1


def test_a_compiler_that_fails_leaves_everything_eager(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The untimed step runs again all the same, so that first calls are not timed."""
    monkeypatch.setattr(operators, "compiled", broken)
    prepare(bench)
    steps, workload = [], bench._prepared["key"].workload
    with monkeypatch.context() as patch:
        patch.setattr(workload, "step", lambda state, phase: steps.append(type(phase)))
        bench.compile_quantisers("key")
    assert steps == [SilentPhases]
    assert bench.quantisers() == (0, "compiling failed: RuntimeError: no compiler here")
    slot = bench.slot("key", 1, 0)
    assert (slot.eager_quantisers, slot.fused_quantisers) == (2, 0)
    prepare(bench, "another")
    assert bench.quantisers() == (0, "compiling failed: RuntimeError: no compiler here")


@pytest.mark.parametrize(("mode", "kernels"), [("mxfp8", 1), ("nvfp4", 2)])
def test_native_casts_to_blocks_wait_to_be_compiled(mode: str, kernels: int, bench: Bench) -> None:
    made = BlockArithmetic(precisions.get(mode).recipe)  # type: ignore[attr-defined]
    before = fusing.calls()[0]
    made.cast(torch.randn(32, 64), Role.WEIGHT)
    assert fusing.calls()[0] == before + kernels and bench.quantisers() == (kernels, "")
    fusing.forget_waiting()
    assert bench.quantisers() == (0, "")


def test_a_process_without_operators_has_nothing_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "fp8bench.formats.operators")
    assert (fusing.waiting(), fusing.why_eager(), fusing.calls()) == (0, "", (0, {}))
    fusing.forget_waiting()
    fusing.compile_waiting()


def test_trying_a_compiler_says_what_came_of_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "compiled", lambda kernel: compiling.Compiled(lambda *arguments: None, 512))
    said = bench.compiler(CPU)
    assert said.startswith("a quantiser compiles in 0.") and said.endswith(" s, with vectors of 512 bits")
    monkeypatch.setattr(operators, "KERNELS", operators.Kernels())
    monkeypatch.setattr(operators, "compiled", broken)
    assert bench.compiler(CPU) == "compiling failed: RuntimeError: no compiler here"


def suite(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> tuple[int, dict[str, Record]]:
    monkeypatch.chdir(folder)
    code = main(["suite", *words, "--dtypes", f"bf16,{MODE}", "--rounds", "1", "--no-report"])
    return code, {record.case.mode: record for record in load("last").records}


@pytest.mark.slow
def test_a_run_without_a_compiler_is_whole_and_labelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FP8BENCH_QUANTISERS")
    monkeypatch.setenv("CXX", "/nonexistent")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    code, records = suite(monkeypatch, tmp_path, "gemm", "--set", "shape=16")
    timing = records[MODE].timing
    assert code == 0 and records[MODE].status is Status.OK and timing is not None
    assert timing.eager.startswith("compiling failed: ") and "compiler" in timing.eager and not timing.fused
    assert records["bf16"].timing is not None and not records["bf16"].timing.eager
    assert main(["show", "last", "--notes"]) == 0 and "eager-quantiser" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variable", "words", "why"),
    [
        ("", ("gemm", "--set", "shape=16", "--quick"), "--quick compiles none"),
        ("eager", ("gemm", "--set", "shape=16"), "FP8BENCH_QUANTISERS=eager compiles none"),
        # Its table shows no times, and it has dozens of quantisers.
        (
            "", ("numerics", "--set", "tensor=gaussian", "--set", "rows=8", "--set", "columns=32"),
            "the suite is about numbers, and compiles none",
        ),
    ],
)  # fmt: skip
def test_a_run_that_shall_not_compile_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, words: tuple[str, ...], why: str
) -> None:
    monkeypatch.setenv("FP8BENCH_QUANTISERS", variable)
    monkeypatch.setattr(operators, "compiled", lambda kernel: pytest.fail("something was compiled"))
    code, records = suite(monkeypatch, tmp_path, *words, "--no-isolation")
    timing = records[MODE].timing
    assert code == 0 and timing is not None and timing.eager == why
    assert load("last").environment.get("env_FP8BENCH_QUANTISERS") == variable


EMULATED = Level.EMULATED
TEN = StoppingRule(fixed=10)
CASES = (planned("fp32"), planned("mxfp8", EMULATED), planned("nvfp4", EMULATED))


def measure(
    scripts: Mapping[str, Script], quantisers: Quantisers | None, *cases: PlannedCase, listener: Listener | None = None
) -> tuple[dict[str, Record], FakeWorker]:
    worker = FakeWorker(scripts)
    method = Method(rule=TEN, judge=decided, seed=0, quantisers=quantisers)
    grouped = group(*(cases or CASES))
    return by_mode(GroupMeasurement(grouped, {"cpu": CPU}, worker, listener or SilentObserver(), method).run()), worker


def told(records: Mapping[str, Record]) -> dict[str, tuple[str, bool]]:
    timings = {mode: record.timing for mode, record in records.items()}
    assert all(isinstance(one, Timing) and one.vector_bits == (256,) * one.fused for one in timings.values())
    return {mode: (timing.eager, timing.fused) for mode, timing in timings.items() if timing is not None}


def test_what_waits_is_compiled_before_the_first_timed_slot() -> None:
    """Once for each mode; --case-timeout does not cut it short."""
    listener = Listener()
    scripts = {"mxfp8": Script(quantisers=[2]), "nvfp4": Script(quantisers=[1])}
    records, worker = measure(scripts, Quantisers(), listener=listener)
    assert told(records) == {"fp32": ("", False), "mxfp8": ("", True), "nvfp4": ("", True)}
    compiled = [entry for entry in worker.log if entry[0] == "compile"]
    assert compiled == [("compile", "mxfp8", 2), ("compile", "nvfp4", 1)]
    for mode in ("mxfp8", "nvfp4"):
        first = next(place for place, entry in enumerate(worker.log) if entry[:2] == ("slot", mode))
        assert any(entry[:2] == ("compile", mode) for entry in worker.log[:first])
    assert [doing for mode, doing, _ in listener.told if "compiling" in doing] == [
        "compiling 2 quantisers", "compiling 1 quantiser",
    ]  # fmt: skip
    limits = [limit for name, limit in worker.limits if name == "compile_quantisers"]
    assert limits[0] >= 2 * COMPILE_SECONDS
    assert Limits(1.0).compiling(CASES[0].work, 2) == 2 * COMPILE_SECONDS + 1.0


def test_quantisers_that_later_steps_ask_for_are_compiled_too_until_that_comes_to_an_end() -> None:
    """The first step finds its scales, the next ones remember them with another kernel."""
    records, worker = measure({"mxfp8": Script(quantisers=[1, 1])}, Quantisers(), CASES[0], CASES[1])
    assert told(records)["mxfp8"] == ("", True)
    assert [entry[2] for entry in worker.log if entry[0] == "compile"] == [1, 1]
    records, worker = measure({"mxfp8": Script(quantisers=[1] * 50)}, Quantisers(), CASES[0], CASES[1])
    assert told(records)["mxfp8"] == ("they were first asked for while it was timed", True)
    assert len([entry for entry in worker.log if entry[0] == "compile"]) == 3


@for_each("why", ["--quick compiles none", "FP8BENCH_QUANTISERS=eager compiles none"])
def test_nothing_is_compiled_if_switched_off_or_not_needed(why: str) -> None:
    records, worker = measure({"mxfp8": Script(quantisers=[2])}, Quantisers(why))
    assert told(records) == {"fp32": ("", False), "mxfp8": (why, False), "nvfp4": ("", False)}
    assert not [entry for entry in worker.log if entry[0] in ("compile", "quantisers")]
    labels = {finding.case.mode: finding.labels for finding in find(list(records.values()), {})}
    assert Label.EAGER_QUANTISER in labels["mxfp8"] and Label.EAGER_QUANTISER not in labels["nvfp4"]
    records, worker = measure({"mxfp8": Script(quantisers=[2])}, None)
    assert not [entry for entry in worker.log if entry[0] in ("compile", "quantisers")]
    assert told(records)["mxfp8"] == ("", False)


def test_what_does_not_compile_runs_eagerly_with_the_reason() -> None:
    why = "compiling failed: InvalidCxxCompiler: No working C++ compiler found"
    scripts = {"mxfp8": Script(quantisers=[2], uncompilable=why), "nvfp4": Script(quantisers=[1])}
    records, worker = measure(scripts, Quantisers())
    assert told(records) == {"fp32": ("", False), "mxfp8": (why, False), "nvfp4": ("", True)}
    assert [entry[1] for entry in worker.log if entry[0] == "compile"] == ["mxfp8", "nvfp4"]
    assert {record.status for record in records.values()} == {Status.OK}


@for_each(
    ("error", "why"),
    [
        (WorkerHung("no answer; --case-timeout sets the limit"), "compiling took more than 660 s"),
        (WorkerLost("the worker crashed"), "compiling failed: the worker crashed"),
    ],
)
def test_a_compiler_that_ends_the_worker_costs_no_case(error: Exception, why: str) -> None:
    quantisers = Quantisers()
    scripts = {"mxfp8": Script(quantisers=[2], faults=[Fault("compile", error)]), "nvfp4": Script(quantisers=[1])}
    records, worker = measure(scripts, quantisers)
    assert {record.status for record in records.values()} == {Status.OK}
    assert told(records) == {"fp32": ("", False), "mxfp8": (why, False), "nvfp4": (why, False)}
    assert quantisers.why_eager == why and worker.restarts == 1
    assert len([entry for entry in worker.log if entry[0] == "compile"]) == 1


def test_a_step_that_fails_after_compiling_fails_its_case() -> None:
    fault = Fault("compile", WorkerFault("ValueError", "no such thing", "the trace"))
    records, _ = measure({"mxfp8": Script(quantisers=[1], faults=[fault])}, Quantisers(), CASES[0], CASES[1])
    assert records["mxfp8"].status is Status.FAILED and records["mxfp8"].reason == "ValueError: no such thing"
    assert records["fp32"].status is Status.OK
