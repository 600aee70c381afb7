"""Checks the harness on this machine, in about a minute: rounding, verdicts, and times of phases."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fp8bench.analysis.verdicts import conclude_comparison, is_case_decided, step_seconds_of_calls
from fp8bench.formats.grids import E4M3, E5M2
from fp8bench.measure.arm import MeasuredArm
from fp8bench.measure.handle import ProcessWorker, Worker
from fp8bench.measure.rounds import RoundSession
from fp8bench.model import (
    UNATTRIBUTED,
    Case,
    DeviceFacts,
    Level,
    Params,
    Phase,
    PlannedCase,
    Support,
    Verdict,
    Work,
)
from fp8bench.model.raw import Settings
from fp8bench.model.stopping import StoppingRule
from fp8bench.plan.corpus import Corpus, prepare_corpus
from fp8bench.plan.make import find_device
from fp8bench.registry import workloads
from fp8bench.units import percent, seconds

NATIVE_SUPPORT = Support(Level.NATIVE, "self-test")


@dataclass(frozen=True)
class SelfCheck:
    """The result of one check: what the check claims, whether that is true, and what was observed."""

    claim: str
    holds: bool
    observation: str


def run_selfchecks(device: str = "cpu") -> Iterator[SelfCheck]:
    """Yields the results of checks of rounding, verdicts and phases. `device` runs the timed checks."""
    yield check_rounding()
    with tempfile.TemporaryDirectory() as folder:
        corpus = prepare_corpus(None, Path(folder))
        with ProcessWorker(Settings(corpus=corpus.path)) as worker:
            facts = find_device(device, worker.probe())
            yield from check_verdicts(worker, facts)
            yield check_phases(worker, facts, corpus)


def check_rounding() -> SelfCheck:
    import torch

    from fp8bench.formats.quantise import round_to

    wrong_value_count = total = 0
    for number_format, dtype in ((E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)):
        decoded_values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        finite_values = decoded_values[decoded_values.isfinite()].unique()  # type: ignore[no-untyped-call]
        # Midpoints between adjacent values show how ties are rounded.
        value_midpoints = (finite_values[1:].double() + finite_values[:-1].double()).div(2).float()
        values = torch.cat((finite_values, value_midpoints))
        wrong_value_count += int((round_to(values, number_format) != values.to(dtype).float()).sum())
        total += len(values)
    return SelfCheck(
        "FP8 values and midpoints round as in torch's casts",
        wrong_value_count == 0,
        f"{wrong_value_count} of {total} differ",
    )


def make_base_params(workload: str, **params: str | int) -> Params:
    """Returns parameters for the workload `_planted`, which runs another workload with `params`, and slows it down by
    extra work."""
    return ("base", workload), *((f"base.{name}", value) for name, value in params.items())


def make_product_params(side: int) -> Params:
    return make_base_params("gemm", m=side, n=side, k=side, product="forward", operands="cast")


# The m, n and k of a matrix product that takes a few tenths of a millisecond, on a CPU and on a GPU.
CPU_SIDE, GPU_SIDE = 256, 2048


def _make_slowed_case(side: int, extra: int, device: str = "cpu") -> Case:
    """Returns a case of a matrix product of `side` x `side` matrices, with `extra` tiny operations that slow it down by
    a known amount."""
    return Case("_planted", (*make_product_params(side), ("extra", extra)), "fp32", device)


def check_verdicts(worker: Worker, facts: DeviceFacts) -> Iterator[SelfCheck]:
    """Checks two verdicts: that an identical product is not called faster or slower, and that a product with 10 to
    20% of extra work is called slower.
    """
    side = GPU_SIDE if facts.accelerated else CPU_SIDE
    # 1. Time one matrix product four times: as reference, as control, as a candidate, and as a slowed candidate.
    arms = [
        MeasuredArm(key, PlannedCase(_make_slowed_case(side, extra, facts.key), NATIVE_SUPPORT, Work()), facts)
        for key, extra in (("a", 0), ("a'", 0), ("same", 0), ("slowed", 800))
    ]
    # 2. Run the same rounds as a benchmark suite, to check the estimator that suites use.
    session = RoundSession(arms[0], arms[1], arms[2:])
    session.prepare(worker)
    session.run(worker, StoppingRule(budget=8.0), is_case_decided, 0, lambda arm, share: None)
    session.release_states(worker)
    timings = [arm.timing() for arm in arms]
    # 3. Allow "unsure" for the unchanged product, but not for the slower one.
    for claim, timing, allowed in (
        ("an identical product is not called faster or slower", timings[2], (Verdict.SAME, Verdict.UNSURE)),
        ("a GEMM with injected extra work is called slower", timings[3], (Verdict.SLOWER,)),
    ):
        conclusion = conclude_comparison(timing, timings[0], timings[1])
        assert conclusion is not None
        verdict, interval = conclusion.verdict, conclusion.ratio
        observation_text = f"{verdict.value}, {interval.point:.4f} [{interval.low:.4f}, {interval.high:.4f}]"
        yield SelfCheck(claim, verdict in allowed, observation_text)


def check_phases(worker: Worker, facts: DeviceFacts, corpus: Corpus) -> SelfCheck:
    params = (("size", "nano"), ("batch", 2), ("sequence", 96), ("micro_batches", 2), ("data", corpus.identity))
    case = Case("transformer", params, "bf16", facts.key)
    work = workloads.get("transformer").work(dict(params))
    arm = MeasuredArm("phases", PlannedCase(case, NATIVE_SUPPORT, work), facts)
    arm.prepare(worker)
    for number in range(5):
        arm.run(worker, number)
    worker.release(arm.key)
    timing = arm.timing()
    phases = timing.segments.phases
    # Other programs can only lengthen a step, so use the fastest one.
    fastest_phase_ns = min((slot.calls_ns[0] for slot in timing.slots), key=sum)
    unattributed_ns = sum(ns for phase, ns in zip(phases, fastest_phase_ns, strict=True) if phase == UNATTRIBUTED)
    unattributed_share = unattributed_ns / sum(fastest_phase_ns)
    # These two phases occur only with several ranks, and with data read from records.
    missing_phases = [phase for phase in Phase if phase not in (*phases, Phase.COMMUNICATION, Phase.DECODE)]
    observation_text = (
        f"{percent(unattributed_share)} unattributed of {seconds(float(step_seconds_of_calls(timing).min()))}"
    )
    if missing_phases:
        observation_text += f"; missing phases: {', '.join(missing_phases)}"
    return SelfCheck(
        "a training step shows all seven phases and leaves under 5% unattributed",
        not missing_phases and unattributed_share < 0.05,
        observation_text,
    )
