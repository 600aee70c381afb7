"""Phases of fp8bench's own suites, held by the worker: each gives the numbers of its step, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from fp8bench.model import UNATTRIBUTED, Case, Phase
from fp8bench.model.raw import RawReplay
from fp8bench.nn.sizes import SIZES, GPTConfig
from fp8bench.plan.corpus import Corpus
from fp8bench.protocols import Setup
from fp8bench.registry import devices, workloads
from fp8bench.worker import held_phase as held_phase_module
from fp8bench.worker.bench import Bench
from fp8bench.worker.held_phase import HeldPhase, store_phase_inputs
from tests.counts import sampled
from tests.workloads.steps import CPU, SMALL, marks, setup_of

TINY = GPTConfig(256, 32, 2, 2, 2, 64, batch=2, sequence=16)
GPT = {"size": "tiny", "batch": 2, "sequence": 16, "micro_batches": 2}
MODES = ("fp32", "bf16", "fp16", "fp8", "fp8-delayed", "fp8-block", "fp8-rowwise", "mxfp8", "nvfp4", "mxfp4")
SAMPLE = {("attention", "fp8"), ("optimizer", "bf16"), ("data", "fp8")}
NO_OPERATOR = "it calls no operator of torch"
NO_LOAD = "its suite loads data within its step, and has no `load` that only loads data"


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "tiny", TINY)
    monkeypatch.setattr(held_phase_module, "WARM_SECONDS", 0.0)


def check(setup: Setup) -> dict[str, str]:
    """Holds every phase of a case's steps and replays it; returns the reasons where impossible."""
    workload = workloads.get(setup.case.workload)
    cpu = devices.get("cpu")
    whys = {}
    state = workload.prepare(setup)
    for phase in dict.fromkeys(marks(workload, state, 2)):
        held = store_phase_inputs(workload, state, cpu, 0, phase, 1 << 28)
        if isinstance(held, RawReplay):
            whys[phase] = held.why
            continue
        held.loop(2)
        assert held.replay.find_replay_difference() == "" and held.replay.find_lost_values() == ""
    return whys


def rows() -> Iterator[object]:
    for name in sorted(SMALL):
        for mode in MODES:
            if name in ("decode", "prefill") and mode == "fp16":  # which a plan refuses
                continue
            if (name, mode) in SAMPLE:
                yield name, mode
            elif name != "norm_act" or not mode.startswith(("fp8", "mx", "nv")):
                yield pytest.param(name, mode, marks=pytest.mark.nightly)


@pytest.mark.parametrize(("name", "mode"), list(rows()))
def test_every_phase_is_done_again_bit_for_bit(name: str, mode: str, corpus: Corpus, bench: Bench) -> None:
    whys = check(setup_of(name, SMALL[name], mode, corpus=corpus.path))
    assert whys.pop(UNATTRIBUTED, NO_OPERATOR) == NO_OPERATOR
    assert whys == ({Phase.DATA_LOAD: NO_LOAD} if name == "data" else {})


@pytest.mark.slow
@pytest.mark.parametrize("mode", sampled(("bf16", "nvfp4"), MODES))
def test_every_phase_of_a_training_step_is(mode: str, corpus: Corpus, bench: Bench) -> None:
    setup = setup_of("transformer", GPT | {"data": corpus.identity}, mode, corpus=corpus.path)
    assert check(setup) == {UNATTRIBUTED: NO_OPERATOR}


def test_a_prepared_case_holds_one_phase_at_a_time(corpus: Corpus, bench: Bench) -> None:
    case = Case("transformer", tuple((GPT | {"data": corpus.identity}).items()), "bf16", "cpu")
    bench.prepare("key", case, CPU)
    for phase in (Phase.DATA_LOAD, Phase.GEMM):
        held = bench.hold_phase("key", phase, 1 << 28)
        assert held.why == "" and held.operators > 0 and held.bytes > 0 and held.seconds > 0
        assert bench.loop_phase("key", 2) > 0
        assert bench.drop_phase("key") == ""
    assert "more than the 16 bytes" in bench.hold_phase("key", Phase.GEMM, 16).why
    assert bench.slot("key", 1, 0).steps and bench.check("key").wrong == ""
    bench.release("key")


def test_warming_up_repeats_a_phase_in_short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only the phase moves: 1 ms a time, so that no piece may be much longer than 50."""
    clock = [0.0]
    pieces = []

    def loop(_: HeldPhase, times: int) -> float:
        pieces.append(times)
        clock[0] += 1e-3 * times
        return 1e-3 * times

    monkeypatch.setattr(held_phase_module, "WARM_SECONDS", 0.3)
    monkeypatch.setattr(held_phase_module.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(HeldPhase, "loop", loop)
    replay = SimpleNamespace(restore=lambda: None, calls=[None], bytes=8)
    held = HeldPhase(None, None, None, 0, replay, loads_data=False)  # type: ignore[arg-type]
    assert held.warm_up().seconds == pytest.approx(1e-3)
    assert max(pieces) == 50 and 0.3 <= clock[0] < 0.4
