"""The worker's side of compiling quantisers, with the real compiler once, and with compilers that fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fp8bench.api import load
from fp8bench.cli.main import main
from fp8bench.formats import compiling, operators, vector_width
from fp8bench.formats.grids import E4M3, E5M2
from fp8bench.model import Case, Record, Status
from fp8bench.nn.block_arithmetic import BlockArithmetic
from fp8bench.protocols import Role, SilentPhases
from fp8bench.registry import precisions
from fp8bench.worker import fusing
from fp8bench.worker.bench import Bench
from tests.facts import CPU

GEMM = (("m", 16), ("n", 16), ("k", 16), ("product", "forward"), ("operands", "cast"))
# Elements alone: one kernel, the smallest that there is.
MODE = "custom:scaling=none"


@pytest.fixture(autouse=True)
def operators_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel that another test has compiled or failed to."""
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
    """A state asks anew with every step; the pass that measures errors has nobody who waits."""
    bench.error(Case("gemm", GEMM, MODE, "cpu"), CPU)
    operators.values(torch.ones(8), E5M2)
    assert bench.quantisers()[0] == 2
    prepare(bench)
    assert bench.quantisers()[0] == 1


def test_a_compiler_that_fails_leaves_everything_eager(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its first line as the reason; nothing waits any more. The untimed step runs again all the same, so that
    first calls lie behind what is timed."""
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
    """A small run in a folder of its own; its exit code, and its records by mode."""
    monkeypatch.chdir(folder)
    code = main(["suite", *words, "--dtypes", f"bf16,{MODE}", "--rounds", "1", "--no-report"])
    return code, {record.case.mode: record for record in load("last").run.records}


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
    """In this very process, where a compiler would be seen at work."""
    monkeypatch.setenv("FP8BENCH_QUANTISERS", variable)
    monkeypatch.setattr(operators, "compiled", lambda kernel: pytest.fail("something was compiled"))
    code, records = suite(monkeypatch, tmp_path, *words, "--no-isolation")
    timing = records[MODE].timing
    assert code == 0 and timing is not None and timing.eager == why
    assert load("last").run.environment.get("env_FP8BENCH_QUANTISERS") == variable
