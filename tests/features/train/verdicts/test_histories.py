"""Replayed amaxes: scales of a training bit by bit, overflow and underflow counted by hand."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from fp8bench.errors import UsageError
from fp8bench.features.train.values import Arm, LayerReading
from fp8bench.features.train.verdicts.histories import DELAYED_WAYS, Trace, best_of, replayed, scales_of, traces_of
from fp8bench.formats.grids import E4M3, E5M2, Format
from fp8bench.formats.recipes import Amax, Delayed
from fp8bench.model import Params
from fp8bench.nn.tensor_scales import DelayedScale
from fp8bench.plan.corpus import Corpus
from fp8bench.protocols import Role
from tests.counts import for_each
from tests.features.train.lab.labs import lab_of, task_of
from tests.learning_curves import training

DELAYED = Arm("fp8-delayed", "fp8-delayed", native=False)


def reading(step: int, role: str = "input", layer: str = "head", *, arm: str = "fp8-delayed", seed: int = 0) -> Any:
    """Its amax tells its step."""
    return LayerReading(arm, seed, step, layer, role, 1.0 + step, 0.5, 0.0, 1.0, 0.0)


def trace_of(draw: random.Random, length: int) -> list[float]:
    """Amaxes over all of float32, among them zeros, infinities, NaN and subnormals."""
    odd = (0.0, math.inf, math.nan, 1e-45, 1e-40, 3e38, 1.0)
    return [draw.choice(odd) if draw.random() < 0.15 else 2.0 ** draw.uniform(-30, 30) for _ in range(length)]


def trained(amaxes: list[float], delayed: Delayed, fmt: Format) -> list[float]:
    memory, x = DelayedScale(delayed, fmt), torch.zeros(1)
    return [float(memory.next(x, amax=torch.tensor(amax, dtype=torch.float32)).scale) for amax in amaxes]


WAYS = [
    *(Delayed(history, algorithm, margin, interval)
      for history in (1, 3, 16, 100) for algorithm in Amax for margin in (0, 2) for interval in (1, 3)),
    Delayed(1024, Amax.MAX, 32, 7),
]  # fmt: skip


@for_each("fmt", [E4M3, E5M2], ids=str)
def test_scales_are_those_of_a_training(fmt: Format) -> None:
    draw = random.Random(fmt.name)
    for delayed in WAYS:
        amaxes = trace_of(draw, 40)
        assert scales_of(amaxes, delayed, fmt.largest).tolist() == trained(amaxes, delayed, fmt), delayed


def test_the_most_recent_is_a_history_of_one() -> None:
    amaxes = trace_of(random.Random(1), 50)
    recent, longer = (scales_of(amaxes, way, 448.0) for way in (Delayed(1, Amax.MAX), Delayed(64, Amax.MOST_RECENT)))
    assert recent.tolist() == longer.tolist()
    assert len(set(DELAYED_WAYS)) == len(DELAYED_WAYS) == 6 * 3 * 3


def test_overflow_and_underflow_by_hand() -> None:
    """In E4M3 the first cast is not scaled; then amaxes double, so each cast is an octave beyond the one before."""
    growing = Trace("a", Role.INPUT, (448.0, 448.0, 896.0, 1792.0, 1792.0), (1.0, 1e-3, 2e-3, 1.0, 1e-3))
    (replay,) = replayed([growing], Delayed(1, Amax.MOST_RECENT))
    # Scales: 1, 1, 1, 1/2, 1/4. Up to 2^-10 becomes 0: of these the last alone.
    assert (replay.casts, replay.overflow, replay.worst, replay.underflow) == (5, 2 / 5, 1.0, 1 / 5)
    (spared,) = replayed([growing], Delayed(1, Amax.MOST_RECENT, margin=1))
    assert (spared.overflow, spared.worst, spared.idle) == (0.0, 0.0, pytest.approx((0 + 1 + 0 + 0 + 1) / 5))


def test_longer_histories_overflow_less_and_leave_more_idle() -> None:
    draw = random.Random(0)
    noisy = [Trace("a", Role.GRADIENT, tuple(2.0 ** draw.gauss(0, 1) for _ in range(400)))]
    replays = [next(iter(replayed(noisy, Delayed(history)))) for history in (1, 4, 16, 64)]
    overflows, idles = [replay.overflow for replay in replays], [replay.idle for replay in replays]
    assert overflows == sorted(overflows, reverse=True) and idles == sorted(idles) and replays[0].underflow is None


@for_each("amax", [0.1, 0.3, 1 / 3, 7e-4, 1234.567])
def test_an_amax_that_stays_overflows_nowhere(amax: float) -> None:
    """Quotient and product are rounded, and the product may lie one unit above the largest value."""
    (replay,) = replayed([Trace("a", Role.WEIGHT, (amax,) * 20)], Delayed(4))
    assert replay.overflow == (1 / 20 if amax > 448 else 0)


def test_amaxes_come_from_the_lines_of_a_training() -> None:
    """There is a trace for each tensor and seed, in the order of steps; a step that is not finite enters no amax.
    Tensors without a product are left out and, in an arm with scales, those without one."""
    lines = [reading(1), reading(0), replace(reading(2), not_finite=0.5), reading(0, arm="fp8"), reading(0, "output")]
    lines += [reading(0, role) for role in ("weight", "gradient")]
    trace, *_ = traces_of(training(DELAYED), lines, DELAYED)
    assert trace == Trace("head", Role.INPUT, (1.0, 2.0, math.inf), (0.5, 0.5, 0.5))
    assert len(traces_of(training(DELAYED), [*lines, reading(0, seed=1)], DELAYED)) == 4
    every = [reading(0, role, layer) for layer in ("head", "mlp") for role in ("input", "weight", "gradient")]
    for scale, layers in ((1.0, {"head", "mlp"}), (2.0, {"mlp"})):
        told = [*every[:-1], replace(every[-1], scale=scale), reading(0, "weight", "embedding")]
        assert {trace.layer for trace in traces_of(training(DELAYED), told, DELAYED)} == layers


def test_the_scales_are_those_of_a_real_training(corpus: Corpus) -> None:
    """Scales are replayed from amaxes of every step, for all layers but the head, which stays in bf16."""
    task = replace(task_of(corpus, DELAYED, steps=4, model="nano"), stride=1)
    lines = lab_of(task).advance(DELAYED.name, 4)
    traces = traces_of(training(DELAYED), lines, DELAYED)
    assert len(traces) == 8 * 3 and "head" not in {trace.layer for trace in traces}
    for trace in traces:
        largest = (E5M2 if trace.role is Role.GRADIENT else E4M3).largest
        known = [line.scale for line in lines if isinstance(line, LayerReading)
                 and (line.layer, line.role) == (trace.layer, trace.role)]  # fmt: skip
        assert scales_of(trace.amax, Delayed(), largest).tolist() == known and known[-1] != 1


def test_the_best_way_cuts_off_least_and_then_leaves_least_idle() -> None:
    trace = Trace("a", Role.GRADIENT, tuple(2.0 if step % 7 == 3 else 1.0 for step in range(200)))
    best = best_of([replay for way in DELAYED_WAYS for replay in replayed([trace], way)])
    assert (best.margin, best.interval) == (1, 1) and best.history in (1, 4)


@for_each(("readings", "settings", "why"), [
    ([reading(0), reading(10)], (), "head input in fp8-delayed has 2 amaxes in 11 steps"),
    ([], (), "fp8-delayed was not watched"),
    ([reading(0)], (("micro_batches", 2),), "casts each tensor 2 times a step"),
])  # fmt: skip
def test_amaxes_that_are_not_of_every_cast_are_refused(
    readings: list[LayerReading], settings: Params, why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        traces_of(training(DELAYED), readings, replace(DELAYED, settings=settings))
