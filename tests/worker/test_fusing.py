"""Compiling quantisers outside of everything timed: who asks for it when, and what a compiler's failure costs."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import pytest
import torch

from fp8bench.analysis.findings import find
from fp8bench.analysis.verdicts import is_case_decided
from fp8bench.errors import WorkerFault, WorkerHung, WorkerLost
from fp8bench.formats import compiling, operators, vector_width
from fp8bench.formats.grids import E4M3
from fp8bench.measure.arm import QuantiserCompilation
from fp8bench.measure.group import GroupMeasurement, MeasurementMethod
from fp8bench.measure.limits import COMPILE_SECONDS, RequestTimeLimits
from fp8bench.model import Case, Label, Level, PlannedCase, Record, Status, Timing
from fp8bench.model.stopping import StoppingRule
from fp8bench.protocols import SilentObserver, SilentPhases
from fp8bench.worker.bench import Bench
from tests.counts import for_each
from tests.fakes import CPU, FakeWorker, Fault, Listener, Script, by_mode, group, planned

GEMM = (("m", 16), ("n", 16), ("k", 16), ("product", "forward"), ("operands", "cast"))
# Elementwise: one kernel, the smallest possible.
MODE = "custom:scaling=none"


@pytest.fixture(autouse=True)
def operators_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "KERNELS", operators.Kernels())


def broken(kernel: compiling.Kernel) -> compiling.Compiled:
    raise RuntimeError("\n  no compiler here.\nat line 1\n")


class Held:
    """Goes when garbage is collected, and not before."""

    def __init__(self) -> None:
        self.itself = self


def held_by_itself() -> weakref.ref[Held]:
    return weakref.ref(Held())


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
    widths = vector_width.vector_widths("cpu")
    assert len(compiled.vector_bits) == bool(widths) and set(compiled.vector_bits) <= set(widths)
    assert torch.equal(operators.values(x, E4M3).view(torch.int32), before.view(torch.int32))


def test_a_compiler_that_fails_leaves_everything_eager(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The untimed step runs again, so that first calls are not timed."""
    monkeypatch.setattr(operators, "compile_kernel", broken)
    prepare(bench)
    steps = []
    workload = bench._prepared["key"].workload
    with monkeypatch.context() as patch:
        patch.setattr(workload, "step", lambda state, phase: steps.append((type(phase), held_by_itself())))
        bench.compile_quantisers("key")
    ((phases, left),) = steps
    assert phases is SilentPhases and left() is None  # no garbage collection while a slot is timed
    assert bench.quantisers() == (0, "compiling failed: RuntimeError: no compiler here")
    slot = bench.slot("key", 1, 0)
    assert (slot.eager_quantisers, slot.fused_quantisers) == (2, 0)
    prepare(bench, "another")
    assert bench.quantisers() == (0, "compiling failed: RuntimeError: no compiler here")


def test_trying_a_compiler_says_what_came_of_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "compile_kernel", lambda kernel: compiling.Compiled(lambda *arguments: None, 512))
    said = bench.compiler(CPU)
    assert said.startswith("a quantiser compiles in 0.") and said.endswith(" s, with vectors of 512 bits")
    monkeypatch.setattr(operators, "KERNELS", operators.Kernels())
    monkeypatch.setattr(operators, "compile_kernel", broken)
    assert bench.compiler(CPU) == "compiling failed: RuntimeError: no compiler here"


EMULATED = Level.EMULATED
TEN = StoppingRule(fixed=10)
CASES = (planned("fp32"), planned("mxfp8", EMULATED), planned("nvfp4", EMULATED))


def measure(
    scripts: Mapping[str, Script],
    quantisers: QuantiserCompilation | None,
    *cases: PlannedCase,
    listener: Listener | None = None,
) -> tuple[dict[str, Record], FakeWorker]:
    worker = FakeWorker(scripts)
    method = MeasurementMethod(rule=TEN, judge=is_case_decided, seed=0, quantisers=quantisers)
    grouped = group(*(cases or CASES))
    return by_mode(GroupMeasurement(grouped, {"cpu": CPU}, worker, listener or SilentObserver(), method).run()), worker


def told(records: Mapping[str, Record]) -> dict[str, tuple[str, bool]]:
    timings = {mode: record.timing for mode, record in records.items()}
    assert all(isinstance(one, Timing) and one.vector_bits == (256,) * one.fused for one in timings.values())
    return {mode: (timing.eager, timing.fused) for mode, timing in timings.items() if timing is not None}


def test_what_waits_is_compiled_before_the_first_timed_slot() -> None:
    """Once per mode; --case-timeout does not shorten it."""
    listener = Listener()
    scripts = {"mxfp8": Script(quantisers=[2]), "nvfp4": Script(quantisers=[1])}
    records, worker = measure(scripts, QuantiserCompilation(), listener=listener)
    assert told(records) == {"fp32": ("", False), "mxfp8": ("", True), "nvfp4": ("", True)}
    compiled = [entry for entry in worker.log if entry[0] == "compile"]
    assert compiled == [("compile", "mxfp8", 2), ("compile", "nvfp4", 1)]
    for mode in ("mxfp8", "nvfp4"):
        first = next(place for place, entry in enumerate(worker.log) if entry[:2] == ("slot", mode))
        assert any(entry[:2] == ("compile", mode) for entry in worker.log[:first])
    assert [doing for mode, doing, _ in listener.told if "compiling" in doing] == [
        "compiling 2 quantisers",
        "compiling 1 quantiser",
    ]
    limits = [limit for name, limit in worker.limits if name == "compile_quantisers"]
    assert limits[0] >= 2 * COMPILE_SECONDS
    assert RequestTimeLimits(1.0).for_compiling(CASES[0].work, 2) == 2 * COMPILE_SECONDS + 1.0


def test_quantisers_that_later_steps_ask_for_are_compiled_too_until_that_comes_to_an_end() -> None:
    """The first step computes scales, later ones update their history with another kernel."""
    records, worker = measure({"mxfp8": Script(quantisers=[1, 1])}, QuantiserCompilation(), CASES[0], CASES[1])
    assert told(records)["mxfp8"] == ("", True)
    assert [entry[2] for entry in worker.log if entry[0] == "compile"] == [1, 1]
    records, worker = measure({"mxfp8": Script(quantisers=[1] * 50)}, QuantiserCompilation(), CASES[0], CASES[1])
    assert told(records)["mxfp8"] == ("they were first requested during the timing", True)
    assert len([entry for entry in worker.log if entry[0] == "compile"]) == 3


@for_each("why", ["--quick compiles none", "FP8BENCH_QUANTISERS=eager compiles none"])
def test_nothing_is_compiled_if_switched_off_or_not_needed(why: str) -> None:
    records, worker = measure({"mxfp8": Script(quantisers=[2])}, QuantiserCompilation(why))
    assert told(records) == {"fp32": ("", False), "mxfp8": (why, False), "nvfp4": ("", False)}
    assert not [entry for entry in worker.log if entry[0] in ("compile", "quantisers")]
    labels = {finding.case.mode: finding.labels for finding in find(list(records.values()), {})}
    assert Label.EAGER_QUANTISER in labels["mxfp8"] and Label.EAGER_QUANTISER not in labels["nvfp4"]
    records, worker = measure({"mxfp8": Script(quantisers=[2])}, None)
    assert not [entry for entry in worker.log if entry[0] in ("compile", "quantisers")]
    assert told(records)["mxfp8"] == ("", False)


@for_each(
    ("error", "why"),
    [
        (WorkerHung("no answer; --case-timeout sets the limit"), "compiling took more than 660 s"),
        (WorkerLost("the worker crashed"), "compiling failed: the worker crashed"),
    ],
)
def test_a_compiler_that_ends_the_worker_costs_no_case(error: Exception, why: str) -> None:
    quantisers = QuantiserCompilation()
    scripts = {"mxfp8": Script(quantisers=[2], faults=[Fault("compile", error)]), "nvfp4": Script(quantisers=[1])}
    records, worker = measure(scripts, quantisers)
    assert {record.status for record in records.values()} == {Status.OK}
    assert told(records) == {"fp32": ("", False), "mxfp8": (why, False), "nvfp4": (why, False)}
    assert quantisers.why_eager == why and worker.restarts == 1
    assert len([entry for entry in worker.log if entry[0] == "compile"]) == 1


def test_a_step_that_fails_after_compiling_fails_its_case() -> None:
    fault = Fault("compile", WorkerFault("ValueError", "no such thing", "the trace"))
    records, _ = measure({"mxfp8": Script(quantisers=[1], faults=[fault])}, QuantiserCompilation(), CASES[0], CASES[1])
    assert records["mxfp8"].status is Status.FAILED and records["mxfp8"].reason == "ValueError: no such thing"
    assert records["fp32"].status is Status.OK
