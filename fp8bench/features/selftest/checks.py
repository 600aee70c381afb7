"""Checks of the harness that take a minute on this machine; each can fail."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fp8bench.analysis.verdicts import conclude, is_decided, totals
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
from fp8bench.plan.make import device_named
from fp8bench.registry import workloads
from fp8bench.units import percent, seconds

NATIVE = Support(Level.NATIVE, "self-test")


@dataclass(frozen=True)
class SelfCheck:
    """One check: its claim, whether it held, and the observation."""

    what: str
    held: bool
    seen: str


def checks(device: str = "cpu") -> Iterator[SelfCheck]:
    """Yields each finished check; timings are taken on `device`."""
    yield rounding()
    with tempfile.TemporaryDirectory() as folder:
        corpus = prepare_corpus(None, Path(folder))
        with ProcessWorker(Settings(corpus=corpus.path)) as worker:
            facts = device_named(device, worker.probe())
            yield from verdicts(worker, facts)
            yield phases(worker, facts, corpus)


def rounding() -> SelfCheck:
    import torch

    from fp8bench.formats.quantise import round_to

    wrong = total = 0
    for form, dtype in ((E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)):
        codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        finite = codes[codes.isfinite()].unique()  # type: ignore[no-untyped-call]
        middles = (finite[1:].double() + finite[:-1].double()).div(2).float()
        values = torch.cat((finite, middles))
        wrong += int((round_to(values, form) != values.to(dtype).float()).sum())
        total += len(values)
    return SelfCheck("FP8 values and midpoints round as torch's own casts do", wrong == 0, f"{wrong} of {total} differ")


def product(side: int) -> Params:
    return (
        ("base", "gemm"),
        ("base.m", side),
        ("base.n", side),
        ("base.k", side),
        ("base.product", "forward"),
        ("base.operands", "cast"),
    )


# The sides of products that take some tenths of a millisecond, on a CPU and a GPU.
SIDE, GPU_SIDE = 256, 2048


def _planted_case(side: int, extra: int, device: str = "cpu") -> Case:
    return Case("_planted", (*product(side), ("extra", extra)), "fp32", device)


def verdicts(worker: Worker, facts: DeviceFacts) -> Iterator[SelfCheck]:
    """Checks that an identical product gets no verdict of a difference, and one with 10 to 20% of extra work is
    slower."""
    side = GPU_SIDE if facts.accelerated else SIDE
    # 1. The same product four times: reference, control, an equal one and a slower one.
    arms = [
        MeasuredArm(key, PlannedCase(_planted_case(side, extra, facts.key), NATIVE, Work()), facts)
        for key, extra in (("a", 0), ("a'", 0), ("same", 0), ("slowed", 800))
    ]
    # 2. Run rounds as in any suite, because the estimator is checked as used.
    session = RoundSession(arms[0], arms[1], arms[2:])
    session.prepare(worker)
    session.run(worker, StoppingRule(budget=8.0), is_decided, 0, lambda arm, share: None)
    session.release(worker)
    timings = [arm.timing() for arm in arms]
    # 3. Unsure is allowed for equal ones, but not for extra work.
    for name, timing, allowed in (
        ("an identical product is not called faster or slower", timings[2], (Verdict.SAME, Verdict.UNSURE)),
        ("a GEMM with injected extra work is called slower", timings[3], (Verdict.SLOWER,)),
    ):
        concluded = conclude(timing, timings[0], timings[1])
        assert concluded is not None
        verdict, interval = concluded.verdict, concluded.ratio
        measured = f"{verdict.value}, {interval.point:.4f} [{interval.low:.4f}, {interval.high:.4f}]"
        yield SelfCheck(name, verdict in allowed, measured)


def phases(worker: Worker, facts: DeviceFacts, corpus: Corpus) -> SelfCheck:
    params = (("size", "nano"), ("batch", 2), ("sequence", 96), ("micro_batches", 2), ("data", corpus.identity))
    case = Case("transformer", params, "bf16", facts.key)
    work = workloads.get("transformer").work(dict(params))
    arm = MeasuredArm("phases", PlannedCase(case, NATIVE, work), facts)
    arm.prepare(worker)
    for number in range(5):
        arm.run(worker, number)
    worker.release(arm.key)
    timing = arm.timing()
    best = min(range(5), key=lambda number: sum(timing.slots[number].calls_ns[0]))
    cells = timing.slots[best].calls_ns[0]
    unattributed = sum(ns for phase, ns in zip(timing.segments.phases, cells, strict=True) if phase == UNATTRIBUTED)
    # These two occur only with several ranks, and with data from records.
    expected = [phase for phase in Phase if phase not in (Phase.COMMUNICATION, Phase.DECODE)]
    missing = [phase for phase in expected if phase not in timing.segments.phases]
    share = unattributed / sum(cells)
    measured = f"{percent(share)} unattributed of {seconds(float(totals(timing).min()))}"
    if missing:
        measured += f"; never seen: {', '.join(missing)}"
    return SelfCheck(
        "a training step shows all seven phases and leaves under 5% unattributed",
        not missing and share < 0.05,
        measured,
    )
