"""Compiling quantisers outside of everything timed: who asks for it when, and what a compiler's failure costs."""

from __future__ import annotations

from collections.abc import Mapping

from fp8bench.analysis.findings import find
from fp8bench.analysis.verdicts import decided
from fp8bench.errors import WorkerFault, WorkerHung, WorkerLost
from fp8bench.measure.arm import Quantisers
from fp8bench.measure.group import GroupMeasurement, Method
from fp8bench.measure.limits import COMPILE_SECONDS, Limits
from fp8bench.model import Label, Level, PlannedCase, Record, Status, Timing
from fp8bench.model.stopping import StoppingRule
from fp8bench.protocols import SilentObserver
from tests.counts import for_each
from tests.fakes import CPU, FakeWorker, Fault, Listener, Script, by_mode, group, planned

EMULATED = Level.EMULATED
TEN = StoppingRule(fixed=10)
CASES = (planned("fp32"), planned("mxfp8", EMULATED), planned("nvfp4", EMULATED))


def measure(
    scripts: Mapping[str, Script], quantisers: Quantisers | None, *cases: PlannedCase, listener: Listener | None = None
) -> tuple[dict[str, Record], FakeWorker]:
    """The records by mode, and the worker with its log."""
    worker = FakeWorker(scripts)
    method = Method(rule=TEN, judge=decided, seed=0, quantisers=quantisers)
    grouped = group(*(cases or CASES))
    return by_mode(GroupMeasurement(grouped, {"cpu": CPU}, worker, listener or SilentObserver(), method).run()), worker


def told(records: Mapping[str, Record]) -> dict[str, tuple[str, bool]]:
    """By mode: why quantisers were eager, and whether some were compiled, which have vectors of 256 bits here."""
    timings = {mode: one.timing for mode, one in records.items()}
    assert all(isinstance(one, Timing) and one.vector_bits == (256,) * one.fused for one in timings.values())
    return {mode: (one.eager, one.fused) for mode, one in timings.items() if one is not None}


def test_what_waits_is_compiled_before_the_first_timed_slot() -> None:
    """Once for each mode; who asks for nothing is not asked to wait. --case-timeout does not cut it short."""
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
    """A first step finds its scales, the next remember them: another kernel. Still before anything is kept."""
    records, worker = measure({"mxfp8": Script(quantisers=[1, 1])}, Quantisers(), CASES[0], CASES[1])
    assert told(records)["mxfp8"] == ("", True)
    assert [entry[2] for entry in worker.log if entry[0] == "compile"] == [1, 1]
    records, worker = measure({"mxfp8": Script(quantisers=[1] * 50)}, Quantisers(), CASES[0], CASES[1])
    assert told(records)["mxfp8"] == ("they were first asked for while it was timed", True)
    assert len([entry for entry in worker.log if entry[0] == "compile"]) == 3


@for_each("why", ["--quick compiles none", "FP8BENCH_QUANTISERS=eager compiles none"])
def test_nothing_is_compiled_where_that_was_asked_for_or_nobody_asks(why: str) -> None:
    records, worker = measure({"mxfp8": Script(quantisers=[2])}, Quantisers(why))
    assert told(records) == {"fp32": ("", False), "mxfp8": (why, False), "nvfp4": ("", False)}
    assert not [entry for entry in worker.log if entry[0] in ("compile", "quantisers")]
    labels = {one.case.mode: one.labels for one in find(list(records.values()), {})}
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
    assert {one.status for one in records.values()} == {Status.OK}


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
    assert {one.status for one in records.values()} == {Status.OK}
    assert told(records) == {"fp32": ("", False), "mxfp8": (why, False), "nvfp4": (why, False)}
    assert quantisers.why_eager == why and worker.restarts == 1
    assert len([entry for entry in worker.log if entry[0] == "compile"]) == 1


def test_a_step_that_fails_after_compiling_fails_its_case() -> None:
    fault = Fault("compile", WorkerFault("ValueError", "no such thing", "the trace"))
    records, _ = measure({"mxfp8": Script(quantisers=[1], faults=[fault])}, Quantisers(), CASES[0], CASES[1])
    assert records["mxfp8"].status is Status.FAILED and records["mxfp8"].reason == "ValueError: no such thing"
    assert records["fp32"].status is Status.OK
