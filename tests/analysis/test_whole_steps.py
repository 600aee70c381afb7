"""Steps whose stretches make up for each other: no verdict from the fastest stretches of different rounds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fp8bench.analysis.findings import find
from fp8bench.analysis.verdicts import below_every_step, best_phases, conclude
from fp8bench.model import Label, Timing, Verdict
from tests.counts import for_each
from tests.fakes import MS, record, timing

ROUNDS = 60
PHASES = ("gemm", "data_load", "elementwise")
Draw = np.random.Generator
Step = Callable[[Draw, float], tuple[float, float, float]]


def pacing(draw: Draw, wide: float) -> tuple[float, float, float]:
    """Work of a length that varies, then a wait until 5 ms are over."""
    work = 1 + wide * draw.random()
    return work, 5 - work, 0.1 + 0.01 * draw.exponential()


def prefetched(draw: Draw, wide: float) -> tuple[float, float, float]:
    """Another thread prepares a batch in 3 ms from the last step's end on: who computes longer waits less for it."""
    compute = 2 + wide * draw.random()
    return compute, max(0.0, 3 - compute) + 0.02 * draw.exponential(), 0.3


def spinning(draw: Draw, wide: float) -> tuple[float, float, float]:
    """A lock that others hold at a time of their own, before or behind the work."""
    before = wide * draw.random()
    return before, 1.0, wide - before + 0.02 * draw.exponential()


def measured(step: Step, draw: Draw, wide: float) -> Timing:
    return timing(*[tuple(int(MS * one) for one in step(draw, wide)) for _ in range(ROUNDS)], phases=PHASES)


@for_each("step", [pacing, prefetched, spinning])
def test_equal_steps_whose_stretches_make_up_for_each_other_are_neither_faster_nor_slower(step: Step) -> None:
    """Those of the case vary twice as much; by stretches it would be faster every time."""
    of_stretches = 0
    for seed in range(80):
        draw = np.random.default_rng(seed)
        reference, control = (measured(step, draw, 0.4 if step is not spinning else 1.0) for _ in range(2))
        case = measured(step, draw, 0.8 if step is not spinning else 1.0)
        best = [sum(seconds for _, seconds in best_phases(one, whole=False)) for one in (case, reference)]
        of_stretches += best[0] < 0.995 * best[1]
        known = conclude(case, reference, control)
        assert known is not None and known.whole
        assert known.verdict in (Verdict.SAME, Verdict.UNSURE), (seed, known)
    assert of_stretches == 80 or step is spinning


def test_the_best_time_is_that_of_steps_and_the_label_says_why() -> None:
    draw = np.random.default_rng(0)
    reference, control, case = (measured(pacing, draw, wide) for wide in (0.4, 0.4, 0.8))
    told = find([record(reference, "fp32", is_reference=True, control=control), record(case, "bf16")], {})
    for finding in told:
        assert Label.WHOLE_STEPS in finding.labels and not finding.doubtful
        assert finding.best_seconds == pytest.approx(5.1e-3, rel=0.01)
        assert finding.best_seconds == sum(seconds for _, seconds in finding.phases)
    words = dict(told[1].label_reasons)[Label.WHOLE_STEPS]
    assert words == "4.52 ms by stretches, 5.10 ms the fastest of 60 steps"


def test_a_reference_that_makes_up_is_named_at_the_case() -> None:
    draw = np.random.default_rng(0)
    reference, control = (measured(pacing, draw, 0.8) for _ in range(2))
    steady = timing(*[(5 * MS, 50_000, 50_000)] * ROUNDS, phases=PHASES)
    told = find([record(reference, "fp32", is_reference=True, control=control), record(steady, "bf16")], {})
    assert dict(told[1].label_reasons)[Label.WHOLE_STEPS].startswith("of the reference ")
    assert told[1].verdict in (Verdict.SAME, Verdict.UNSURE)


def test_honest_noise_that_only_adds_is_told_by_stretches() -> None:
    """A little of it in every stretch: the sum of the fastest ones is as long as the fastest steps."""
    draw = np.random.default_rng(1)
    arms = [
        timing(*[tuple(int(MS * (scale + 0.002 * draw.exponential())) for scale in (1.0, 2.0, 1.5)) for _ in range(60)],
               phases=PHASES)
        for _ in range(3)
    ]  # fmt: skip
    known = conclude(*arms)
    assert known is not None and not known.whole and known.verdict is Verdict.SAME
    assert all(below_every_step(arm) < 0.001 for arm in arms)
