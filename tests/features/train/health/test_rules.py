"""Every health rule on lines made by hand: what it has to find, and what is similar and well; which remedies help."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from fp8bench.features.train.health import health, steps
from fp8bench.features.train.health.health import QUIET_STEPS, RULES, TrainingHealth
from fp8bench.features.train.health.steps import HealthRule
from fp8bench.features.train.request import TrainerSettings
from fp8bench.features.train.values import (
    GRADIENTS_LEFT,
    MOMENTS_GONE,
    OTHERS_TRAIN,
    Arm,
    ArmRole,
    LayerReading,
    StepFigure,
    StepRow,
    StreamLine,
    TrainingEvent,
)
from tests.counts import for_each

ARM = Arm("bf16", "bf16", ArmRole.REFERENCE)
FP8 = Arm("fp8", "fp8-delayed")
ROW = StepRow("bf16", 0, 0, 3.0, 1e-3, 1.0, 0.0, 50.0, 1e-3, 1.0, 1024, 0.01)
READING = LayerReading("bf16", 0, 0, "blocks.0.mlp.up", "gradient", 1.0, 1e-6, 0.0, 0.1, 0.0, 256.0)


def rows(steps: int, arm: str = "bf16", **changes: Callable[[int], float | bool]) -> Iterator[StepRow]:
    """Rows of a training that learns, with noise; `changes` are functions of the step."""
    noise = random.Random(1)
    for step in range(steps):
        row = replace(
            ROW,
            arm=arm,
            step=step,
            loss=2 + 3 * (step + 5) ** -0.4 + noise.gauss(0, 0.02),
            gradient_norm=math.exp(noise.gauss(0, 0.2)),
            update_ratio=1e-3 * math.exp(noise.gauss(0, 0.1)),
            rate=1e-3 * min(1.0, (step + 1) / 20),
        )
        yield replace(row, **{name: of(step) for name, of in changes.items()})


def readings(count: int, role: str = "gradient", **changes: Callable[[int], float]) -> Iterator[LayerReading]:
    """Readings of one tensor, ten steps apart; `changes` are functions of their number."""
    noise = random.Random(1)
    for number in range(count):
        scale, lag = 256 * 2 ** noise.gauss(0, 0.5), noise.gauss(-0.2, 0.1)
        reading = replace(READING, step=10 * number, role=role, scale=scale, lag=lag)
        yield replace(reading, **{name: of(number) for name, of in changes.items()})


def figures(name: str, values: Iterable[float]) -> Iterator[StepFigure]:
    for number, value in enumerate(values):
        yield StepFigure("bf16", 0, 10 * number, name, value, "blocks.0")


def updates(share: Callable[[int], float]) -> Iterator[StreamLine]:
    """Updates of three matrices, the first multiplied by `share`, with those of a norm and an embedding."""
    for number in range(12):
        for layer, times in (("blocks.0", share(number)), ("blocks.1", 1.0), ("head", 0.5)):
            yield replace(READING, step=10 * number, layer=layer, role="weight")
            yield StepFigure("bf16", 0, 10 * number, "update_ratio", 5e-3 * times, layer)
        yield replace(READING, step=10 * number, layer="embedding", role="weight")
        yield StepFigure("bf16", 0, 10 * number, "embedding_spread", 1.0, "embedding")
        for layer in ("norm", "embedding"):
            yield StepFigure("bf16", 0, 10 * number, "update_ratio", 1e-6, layer)


def alarms(lines: Iterable[StreamLine], *arms: Arm) -> list[tuple[str, int]]:
    """The rules and steps of the alarms."""
    events = TrainingHealth(arms or (ARM,)).find_alarms(lines)
    assert all(event.kind == "alarm" and event.words and event.words[-1] != "." for event in events)
    return [(event.rule, event.step) for event in events]


def gap(share: float, **others: float) -> Iterator[StepRow]:
    """Arms in slices: the reference, a candidate behind it by this share, and others."""
    noise = random.Random(2)
    for start in range(0, 100, 10):
        for arm, behind in {"bf16": 0.0, "fp8": share, **others}.items():
            for step in range(start, start + 10):
                yield replace(ROW, arm=arm, step=step, loss=3 * (1 + behind) + noise.gauss(0, 0.005))


def falls_until(step: int) -> float:
    return max(3.0, 6 - step / 50) + step % 7 / 1000


def row_with(step: int, name: str) -> Iterator[StreamLine]:
    for row in rows(60):
        yield row
        if row.step == step:
            yield StepFigure("bf16", 0, step, name, 1.0)


def guessing(loss: Callable[[int], float]) -> Iterator[StreamLine]:
    yield StepFigure("bf16", 0, 0, "classes", 10.0)
    yield from rows(60, loss=loss)


def given(again: Iterable[float], examples: float = 32) -> Iterator[StreamLine]:
    for number, times in enumerate(again):
        yield StepFigure("bf16", 0, 10 * number, "inputs_again", times)
        yield StepFigure("bf16", 0, 10 * number, "examples", examples)


def cycled(period: int, new: int, examples: float = 32) -> Iterator[StreamLine]:
    """Watched steps of a loader that begins again after `new` batches, `period` of them over and over."""
    for step in range(0, 400, 10):
        again = max(0, step - new + 1)
        for name, value in {
            "again": 0,
            "cycled": again,
            "period": period * bool(again),
            "new": min(step + 1, new),
        }.items():
            yield StepFigure("bf16", 0, step, f"inputs_{name}", value)
        yield StepFigure("bf16", 0, step, "examples", examples)


def gradients(norms: Callable[[int], float]) -> Iterator[StreamLine]:
    """Rows with a gradient norm of 1, and the norm of one matrix's gradient in 40 readings."""
    for number in range(40):
        yield replace(ROW, step=10 * number)
        yield StepFigure("bf16", 0, 10 * number, "weight_gradient", norms(number), "blocks.0")


def unused(steps: Callable[[int], int]) -> Iterator[StreamLine]:
    """Readings of a matrix without a gradient for `steps(number)` steps, next to a matrix that has one."""
    for number in range(40):
        for layer in ("blocks.0", "head"):
            yield replace(READING, step=10 * number, layer=layer, role="weight")
        absent = steps(number)
        used = ("head",) if absent else ("blocks.0", "head")
        for layer in used:
            yield StepFigure("bf16", 0, 10 * number, "weight_gradient", 1.0, layer)
        for layer in ("blocks.0", "head"):
            yield StepFigure("bf16", 0, 10 * number, "update_ratio", 5e-3 * (layer in used), layer)
        if absent:
            yield StepFigure("bf16", 0, 10 * number, "steps_without_gradient", absent, "blocks.0")


def dead(count: int, total: int = 17) -> Iterator[StreamLine]:
    """Matrices of which `count` have zero gradients from the start; weight decay moves them."""
    for number in range(8):
        for layer in range(total):
            yield replace(READING, step=10 * number, layer=f"layers.{layer}", role="weight")
            yield StepFigure("bf16", 0, 10 * number, "weight_gradient", float(layer >= count), f"layers.{layer}")
            moved = 5e-3 if layer >= count else 1e-5
            yield StepFigure("bf16", 0, 10 * number, "update_ratio", moved, f"layers.{layer}")


def drifting(mean: Callable[[int], float], deviation: float = 2.0) -> Iterator[StepFigure]:
    """Twenty watched batches whose inputs have these means, with noise between batches."""
    for number in range(20):
        yield StepFigure("bf16", 0, 10 * number, "input_deviation", deviation)
        yield StepFigure("bf16", 0, 10 * number, "input_mean", mean(number) + 0.05 * (number * 7 % 5 - 2))


def wavering(level: float, step: int) -> float:
    return level * (1 + 0.02 * (step * 7 % 5 - 2))


# Lines with an illness, by the rule that has to alarm; and the step in which it does.
ILL: dict[str, tuple[Callable[[], Iterable[StreamLine]], int]] = {
    "gradient-norm-spike": (lambda: rows(80, gradient_norm=lambda step: 18.0 if step == 60 else 1.0), 60),
    "update-norm-burst": (lambda: rows(60, update_ratio=lambda step: 5e-3 if step >= 40 else 1e-3), 40),
    "plateau": (lambda: rows(400, loss=falls_until), 289),
    "not-finite": (lambda: rows(30, loss=lambda step: math.nan if step >= 17 else 3.0), 17),
    "scale-falls": (lambda: readings(12, "input", scale=lambda number: 8.0 if number >= 8 else 256.0), 80),
    "scale-rises": (lambda: readings(12, scale=lambda number: 2.0**17 if number >= 8 else 256.0), 80),
    "scale-never-settles": (lambda: readings(20, scale=lambda number: 256.0 * 8 ** (number % 2)), 90),
    "scale-at-edge": (lambda: readings(5, least_scale=lambda number: 0.0 if number == 3 else 1.0), 30),
    "lag": (lambda: readings(9, lag=lambda number: 0.3 * number), 50),
    "overflow-burst": (lambda: readings(9, saturated=lambda number: 0.1 if number == 6 else 0.006), 60),
    "underflow-creep": (lambda: readings(30, underflow=lambda number: 0.1 + 0.02 * number), 180),
    "tensor-not-finite": (lambda: readings(5, not_finite=lambda number: 1e-6 if number == 4 else 0.0), 40),
    "embedding-collapse": (lambda: figures("embedding_spread", (1.0, 1.5, 1.2, 1.1, 1.0)), 30),
    "attention-score-overflow": (lambda: figures("attention_score", (3.0, 20.0, 90.0)), 20),
    "kept-scale-jumps": (lambda: figures("kept_scale", (100.0, 90.0, 0.0, 120.0, 110.0, 6400.0)), 50),
    "batch-norm-drift": (lambda: figures("batch_norm_drift", (3, 3, 2, 1, 0.1, 0.1, 2, 3, 4, 5)), 80),
    "loss-gap": (lambda: gap(0.04), 49),
    "weights-behind": (lambda: readings(15, "weight", signal_to_noise=lambda number: 32 - max(0, number - 5)), 90),
    "layer-stands-still": (lambda: updates(lambda number: 0.02 if number >= 4 else 1.0), 60),
    "gradients-left": (lambda: row_with(20, GRADIENTS_LEFT), 20),
    "moments-gone": (lambda: row_with(20, MOMENTS_GONE), 20),
    "no-update": (lambda: rows(60, rate=lambda step: 0.0 if step >= 30 else 1e-3), 34),
    "same-inputs": (lambda: given((0.0, 0.0, 5.0, 15.0)), 30),
    "loss-above-guessing": (lambda: guessing(lambda step: wavering(150.0, step)), 15),
    "loss-leaked": (lambda: rows(60, loss=lambda step: wavering(0.01 if step >= 40 else 1.0, step)), 42),
    "loss-back-up": (lambda: rows(60, loss=lambda step: wavering(3.5 if step >= 40 else 4 - step / 20, step)), 44),
    "gradient-scale": (lambda: rows(60, gradient_norm=lambda step: wavering(8.0 if step >= 40 else 1.0, step)), 42),
    "amax-jump": (lambda: readings(9, "input", scale=lambda _: 1.0, amax=lambda at: 40.0 if at == 6 else 2.0), 60),
    "dead-units": (lambda: readings(9, "input", zeros=lambda number: 0.99 if number >= 6 else 0.5), 60),
    "norm-gain": (lambda: figures("gain", (1.0, 1.1, 1.4, 5.0)), 30),
    "duplicate-inputs": (lambda: figures("duplicates", (0.0, 0.5, 0.75, 0.6)), 30),
    "data-drift": (lambda: drifting(lambda at: 5.0 if at >= 15 else 1.0), 180),
    "slow-growth": (lambda: readings(30, "weight", amax=lambda number: 2.0 * 1.3 ** max(0, number - 15)), 190),
    "embedding-row": (lambda: figures("largest_row", (1.4, 1.5, 1.6, 2.9)), 30),
    "gradient-vanished": (lambda: gradients(lambda number: 0.2 * (number < 20)), 210),
    "same-conditioning": (lambda: figures("condition_again", (0.0, 0.0, 8.0, 18.0)), 20),
    "same-targets": (lambda: figures("targets_again", (0.0, 0.0, 1.0, 2.0, 3.0)), 30),
    "label-shift": (lambda: figures("label_shift", (1.0, 0.9, 1.2, 1.1, 1.3, 2.5, 2.6, 2.4)), 60),
    "part-in-eval": (lambda: figures("parts_in_eval", (2.0,)), 0),
    "replicas-apart": (lambda: figures("replicas_apart", (1.0, 1.0)), 0),
    "large-logits": (lambda: figures("logit_range", (8.0, 9.0, 12.0, 60.0)), 30),
}
WELL: dict[str, Callable[[], Iterable[StreamLine]]] = {
    "a gain of ones, exact until it moves":
        lambda: readings(15, "weight", signal_to_noise=lambda number: 37 if number else 200),
    "a training that learns": lambda: rows(2000),
    "a batch that is ten times as steep": lambda: rows(80, gradient_norm=lambda step: 10.0 if step == 60 else 1.0),
    "a batch of rare text among few tokens":
        lambda: rows(400, gradient_norm=lambda step: {90: 6.0, 300: 20.0}.get(step, 1.0)),
    "noisy losses that seem to stand still": lambda: rows(500, loss=lambda step: 3.0 + 0.4 * (step % 2)),
    "a rate that warms up": lambda: rows(60, update_ratio=lambda step: 1e-4 * (step + 1)),
    "a plateau at a low rate": lambda: rows(600, loss=falls_until, rate=lambda step: 1.0 / (step + 1)),
    "a plateau whose gradients fall": lambda: rows(600, loss=falls_until, gradient_norm=lambda step: 9.0 / (step + 9)),
    "a loss scale that tries":
        lambda: rows(90, gradient_norm=lambda step: 1.0 if step % 9 else math.inf, skipped=lambda step: step % 9 == 0,
                     loss_scale=lambda step: 1024.0),
    "scales of a tensor that grows": lambda: readings(40, scale=lambda number: 256.0 * 2 ** (-number / 2)),
    "a scale that is 1 before its first amax": lambda: readings(40, scale=lambda number: 1e6 if number else 1.0),
    "a delayed scale that is a little late": lambda: readings(40, lag=lambda number: 0.1),
    "the least scales of NVFP4, rounded": lambda: readings(40, lag=lambda number: 0.58),
    "an expert without tokens in some readings": lambda: readings(
        40, scale=lambda number: 1.0 if number % 5 == 4 else 2.0**14, amax=lambda number: float(number % 5 != 4)),
    "a gradient of rare text": lambda: readings(40, scale=lambda number: 2.0**2.2 if number == 20 else 256.0),
    "weights that are rounded as ever":
        lambda: readings(40, "weight", signal_to_noise=lambda number: 31.6 - 0.4 * (number % 3)),
    "a layer that is slow and not still": lambda: updates(lambda number: 0.3),
    "a layer that stood still for a reading": lambda: updates(lambda number: number % 3 / 3),
    "scales rounded down": lambda: readings(40, saturated=lambda number: 0.0064),
    "scales of NVFP4 from the first step on": lambda: readings(40, saturated=lambda number: 0.036),
    "underflow as usual": lambda: readings(40, underflow=lambda number: 0.8 + 0.1 * (number % 2)),
    "an embedding that spreads": lambda: figures("embedding_spread", (0.02 + number / 100 for number in range(30))),
    "a rate that warms up from 0 and ends there": lambda: rows(60, rate=lambda step: min(step, 59 - step) / 1e4),
    "a loss of exactly 0, which has no gradient":
        lambda: rows(60, loss=lambda step: max(0.0, 3 - step / 8), gradient_norm=lambda step: float(step < 24)),
    "a loss that rises while another model trains against it":
        lambda: (StepFigure("bf16", 0, 0, OTHERS_TRAIN, 1.0), *rows(60, loss=lambda step: 0.7 + step / 9)),
    "a first loss above guessing that falls": lambda: guessing(lambda step: 20 * 0.9**step + 2.0),
    "losses of single examples": lambda: rows(400, loss=lambda step: 10 ** (-(step * 37 % 11) / 3)),
    "gradients that fade with the loss":
        lambda: rows(200, gradient_norm=lambda step: 0.9**step, loss=lambda step: 3 * 0.9**step),
    "a plateau at the entropy of the labels":
        lambda: (line for row in rows(600, loss=falls_until)
                 for line in (row, StepFigure("bf16", 0, row.step, "entropy", row.loss))),
    "all data in each step": lambda: given((0.0, 10.0, 20.0, 30.0), 512),
    "bags of words": lambda: readings(20, "input", zeros=lambda number: 0.995),
    "a weight that grows ever slower": lambda: readings(60, "weight", amax=lambda number: 0.1 * (number + 1)),
    "an amax of few outliers": lambda: readings(60, "input", amax=lambda number: 2.0 ** (number * 37 % 11 / 6)),
    "a part that every fifth step uses": lambda: unused(lambda number: number * 3 % 5),
    "a part that every fifth step uses, with gradients of zeros":
        lambda: gradients(lambda number: 0.2 * (number * 3 % 5 == 0)),
    "a part that is used later": lambda: gradients(lambda number: 0.2 * (number > 9)),
    "30 batches an epoch, in order": lambda: cycled(30, 30),
    "40 batches an epoch, shuffled": lambda: cycled(70, 40),
    "all data in four batches": lambda: cycled(4, 4, 128),
    "targets that are those of a watched step by chance": lambda: figures("targets_again", (0.0, 1.0, 0.0, 1.0)),
    "labels of few examples": lambda: figures("label_shift", (0.9, 2.1, 0.4, 1.9, 0.8, 2.2, 1.0, 2.3)),
    "a table of positions that shrinks as the loss falls":
        lambda: (line for row in rows(400, loss=lambda step: 3 - step / 200)
                 for line in (row, StepFigure("bf16", 0, row.step, "embedding_spread", 1 - row.step / 500))),
    "labels of kinds of batches in turn": lambda: figures("label_shift", (9.0, 6.1, 3.8, 3.0, 2.5, 1.9, 3.5, 3.2, 2.7)),
    "bursts of updates far below the first":
        lambda: rows(200, update_ratio=lambda step: 4e-3 if step < 40 else 1e-3 if step == 150 else 1e-4),
    "rows of frequent words": lambda: figures("largest_row", (1.3 + number / 40 for number in range(40))),
    "gains that shrink a little": lambda: figures("gain", (1.0, 0.9, 0.7, 0.6)),
    "a warm-up with a hard batch":
        lambda: rows(80, rate=lambda step: 1e-4 * (step + 1),
                     loss=lambda step: wavering(3.6 if step in (50, 51, 52) else 4 - step / 40, step)),
    "kept scales that follow": lambda: figures("kept_scale", (0.0, 1.0, 4.0, 2.0, 8.0, 16.0, 30.0, 100.0)),
    "gains that are learned": lambda: figures("gain", (0.0, 0.1, 0.5, 0.9)),
    "a layer whose group is slow":
        lambda: (StepFigure("bf16", 0, 0, "rate_share", 0.02, "blocks.0"), *updates(lambda number: 0.02)),
    "few examples that are drawn again": lambda: figures("duplicates", (0.6, 0.6, 0.4, 0.9, 0.7, 0.3)),
    "inputs that move within their noise": lambda: drifting(lambda at: 0.02 * at),
    "inputs that move by little of their size": lambda: drifting(lambda at: 5.0 if at >= 15 else 1.0, 20.0),
    "three batches of another kind": lambda: drifting(lambda at: 5.0 if 12 <= at < 15 else 1.0),
    "kinds of batches in turn": lambda: drifting(lambda at: 5.0 * (at % 2)),
    "inputs that are all alike": lambda: drifting(lambda at: 1.0, 0.0),
    "batch norms that begin anywhere": lambda: figures("batch_norm_drift", (9, 5, 3, 2, 1.5, 0.4, 2, 0.2, 0.1)),
}  # fmt: skip


@for_each(("name", "lines", "step"), [(name, *row) for name, row in ILL.items()])
def test_what_is_ill_is_found(name: str, lines: Callable[[], Iterable[StreamLine]], step: int) -> None:
    """A rule alarms once, in the step that shows it."""
    arms = (ARM, FP8) if name == "loss-gap" else ()
    assert alarms(lines(), *arms) == [(name, step)]


@for_each(("name", "lines", "step"), [
    ("loss-back-up",
     lambda: rows(80, rate=lambda step: 1e-3 * (1 + 0.2 * max(0, step - 40)),
                  loss=lambda step: wavering(2.8 if step >= 60 else 4 - step / 30, step)), 64),
    ("norm-gain", lambda: figures("gain", (1.0, 0.8, 0.6, 0.3)), 30),
    ("data-drift", lambda: figures("input_deviation", [2.0, 2.1] * 5 + [3.5] * 4), 130),
    ("same-inputs", lambda: cycled(4, 104), 120),
    ("same-inputs", lambda: cycled(3, 3), 10),
    ("label-shift", lambda: figures("label_shift", (4.1, 3.8, 4.4, 3.9, 3.6)), 40),
    ("gradient-vanished", lambda: gradients(lambda number: 0.2 if number < 20 else 1e-3), 210),
    ("gradient-vanished", lambda: gradients(lambda number: 0.2 * (number < 20 and number != 10)), 240),
    ("layer-stands-still", lambda: unused(lambda number: 10 * max(0, number - 20)), 210),
    ("layer-stands-still", lambda: unused(lambda number: 10 * number + 1), 30),
    ("layer-stands-still", lambda: dead(9), 30),
    ("layer-stands-still", lambda: dead(16), 30),
])  # fmt: skip
def test_rules_find_more_than_one_kind(name: str, lines: Callable[[], Iterable[StreamLine]], step: int) -> None:
    assert alarms(lines())[0] == (name, step)


@for_each(("changes", "words", "remedy"), [
    ({}, "equal the reference's, so that the arithmetic is suspected", "this layer in bf16"),
    ({"rate": 5e-4}, "its rate is 0.5 times as large", "the reference's rate"),
    ({"clipped": 0.4}, "clipping takes 40% more of its gradients", "the reference's rate"),
    ({"loss_scale": 256.0}, "its loss scale is 256 times as large", "the reference's rate"),
    ({"tokens": 512}, "its number of tokens per step is 0.5 times as large", "the reference's rate"),
    ({"shuffled": 7}, "its batches or their order differ", "the reference's rate"),
])  # fmt: skip
def test_a_gap_is_explained_by_settings_before_arithmetic(changes: dict[str, Any], words: str, remedy: str) -> None:
    """Both arms have the losses of the same batches, the second one 4% more, unless its batches are shuffled."""
    noise, shift = [random.Random(step).gauss(0, 0.2) for step in range(80)], changes.pop("shuffled", 0)
    lines: list[StreamLine] = []
    for step in range(60):
        lines += [replace(ROW, step=step, loss=3 + noise[step])]
        lines += [replace(ROW, arm="fp8", step=step, loss=1.04 * (3 + noise[step + shift]), **changes)]
    (event,) = TrainingHealth((ARM, replace(FP8, precision="fp8"))).find_alarms(lines)
    assert event.words.endswith((words, words + ": the losses do not rise and fall together"))
    assert remedy in event.remedy or (not changes and not shift and event.remedy == "a lower learning rate")


def test_a_stale_history_is_the_cause() -> None:
    """The scale stays while the tensor grows out of it; a scale that follows has no history to blame."""

    def grown(scale: Callable[[int], float]) -> list[TrainingEvent]:
        lines = readings(
            9, "input", lag=lambda number: 0.3 * number, amax=lambda number: 2 ** (0.3 * number), scale=scale
        )
        return [
            event
            for event in TrainingHealth((FP8,)).find_alarms(replace(line, arm="fp8") for line in lines)
            if event.rule == "lag"
        ]

    (stale,) = grown(lambda _: 256.0)
    assert "its amax history is stale, since the scale stayed at 256 for 3 readings" in stale.words
    assert stale.remedy.startswith("shorter history or interval of delayed scales")
    (follows,) = grown(lambda number: 256.0 / (1 + number))
    assert "history" not in follows.words


def test_a_gap_within_the_margin_raises_no_alarm() -> None:
    for share in (0.015, -0.05):
        assert alarms(gap(share), ARM, FP8) == []


@for_each("name", WELL)
def test_what_is_well_raises_no_alarm(name: str) -> None:
    assert alarms(WELL[name]()) == []


def test_every_rule_has_an_illness_and_texts_with_its_constants() -> None:
    """Texts give constants as numbers or shares, counting the judged line or not."""
    assert {rule.name for rule in RULES} == set(ILL) and len(set(ILL)) == len(RULES)
    for rule in RULES:
        assert rule.remedies and rule.rationale(), rule.name
        numbers = {float(number) for number in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?", rule.alarms_at)}
        missing = {
            name: value
            for name, value in constants_of(rule).items()
            if not {value, round(100 * value, 6), *((value + 1, value - 1) if name in COUNTS else ())} & numbers
        }
        assert not missing, rule.name


# Constants that texts do not name as numbers; and counts of lines before the one that is judged.
UNSAID, COUNTS = ("falling_factor", "exact_db"), ("window", "repeated_steps")


def constants_of(rule: type[HealthRule[Any]]) -> dict[str, float]:
    names = (name for kind in rule.__mro__ for name in vars(kind) if name[0] != "_" and name not in UNSAID)
    values = {name: getattr(rule, name) for name in names}
    return {name: value for name, value in values.items() if type(value) in (int, float) and value not in (1, -1)}


@for_each(("loss", "times", "steps"), [(6.0, 9.0, [70]), (3.2, 9.0, []), (6.0, 7.0, [])])
def test_a_steep_batch_with_a_loss_of_its_own_is_found_sooner(loss: float, times: float, steps: list[int]) -> None:
    noisy = rows(
        90,
        gradient_norm=lambda step: {40: 15.0, 70: times}.get(step, 1.0),
        loss=lambda step: loss if step == 70 else 3.0 + step % 7 / 50,
    )
    assert alarms(noisy) == [("gradient-norm-spike", step) for step in steps]


@for_each(("first", "steps"), [(3.0, []), (0.11, [70])])
def test_a_spike_of_a_loss_that_is_learned_by_heart_is_no_alarm(first: float, steps: list[int]) -> None:
    """The same step alarms if the loss has not come down before."""

    def loss(step: int) -> float:
        if step < 3:
            return first
        return 0.2 if step == 70 else 0.1 + step % 7 / 500

    spike = rows(90, gradient_norm=lambda step: 12.0 if step == 70 else 1.0, loss=loss)
    assert alarms(spike) == [("gradient-norm-spike", step) for step in steps]


def test_a_layer_whose_rate_becomes_0_is_found() -> None:
    """Its group's share of the highest rate is 0 from then on, as if that were meant."""
    lines = list[StreamLine]()
    for line in updates(lambda number: 1.0 if number < 5 else 0.0):
        if isinstance(line, StepFigure) and line.value == 0:
            lines.append(replace(line, name="rate_share"))
        lines.append(line)
    assert alarms(lines) == [("layer-stands-still", 60)]


def test_a_layer_that_is_slow_on_purpose_raises_no_alarm() -> None:
    lines = list(updates(lambda number: 0.02))
    assert alarms(lines) == [("layer-stands-still", 30)]
    for factor in (0.02, 0.0):
        slow = TrainerSettings(rates=(("layer", factor),))
        assert not TrainingHealth((ARM,), slow).find_alarms(updates(lambda number, factor=factor: factor))


def test_a_gap_is_to_the_reference_at_the_arms_rate() -> None:
    rate = (("rate", 4e-3),)
    arms = ARM, Arm("bf16 rate=0.004", "bf16", ArmRole.OTHER_RATE, rate), Arm("fp8", "fp8", settings=rate)
    for other, count in ((0.039, 0), (0.01, 1)):
        events = TrainingHealth(arms).find_alarms(gap(0.04, **{arms[1].name: other}))
        assert len(events) == count
        assert all(f"behind that of {arms[1].name} over" in event.words for event in events)


def test_large_updates_alarm_before_a_jump_and_not_after_it() -> None:
    """There is one alarm however long updates stay large; a new episode alarms again."""

    def lines(burst: int) -> Iterator[StepRow]:
        return rows(
            240,
            loss=lambda step: wavering(3.5 if 60 <= step < 80 else 2.0 if step >= 40 else 4 - step / 20, step),
            update_ratio=lambda step: 5e-3 if burst <= step < burst + 9 else 1e-3,
        )

    assert alarms(lines(59)) == [("update-norm-burst", 59), ("loss-back-up", 64)]
    assert alarms(lines(65)) == alarms(lines(120)) == [("loss-back-up", 64)]
    assert alarms(lines(140)) == [("loss-back-up", 64), ("update-norm-burst", 140)]


def test_an_episode_is_one_alarm() -> None:
    long = rows(100, loss=lambda step: math.nan if 10 <= step < 90 else 3.0)
    assert alarms(long) == [("not-finite", 10)]
    twice = rows(200, loss=lambda step: math.inf if step in (10, 11 + QUIET_STEPS, 13 + 2 * QUIET_STEPS) else 3.0)
    assert [step for _, step in alarms(twice)] == [10, 11 + QUIET_STEPS, 13 + 2 * QUIET_STEPS]


def test_tensors_of_one_step_share_an_alarm() -> None:
    lines = [replace(READING, layer=f"blocks.{layer}", not_finite=1.0) for layer in range(3)]
    (event,) = TrainingHealth((ARM,)).find_alarms(lines)
    assert (event.layer, event.tensor) == ("blocks.0", "gradient")
    assert (
        event.words == "100.00% of blocks.0's gradient is infinite or NaN; also blocks.1 gradient and blocks.2 gradient"
    )


@for_each(("lines", "words", "remedies"), [
    (lambda: rows(60, loss=lambda step: 5.0 + step * (step % 4 + 1)),
     ("the loss rose from 5 in the first watched step to 13 or more in the last 5: "
      "is the learning rate too high, or did the data change?"),
     "a lower learning rate; clip gradients harder; look at the batches of these steps"),
    (lambda: guessing(lambda step: 40.0 if step % 2 else 120.0),
     "the loss is 40, 17.4 times that of guessing: is the learning rate too high, or the loss a sum?",
     None),
    (lambda: figures("logit_range", (310.0,)), "the logits of an example span 310", None),
    (lambda: rows(30, loss=lambda step: 3.0, gradient_norm=lambda step: 1e15 if step == 25 else 1.0),
     "the gradient norm is 1e+15, 1e+15 times its median, at a loss of 3", None),
    (lambda: rows(60, gradient_norm=lambda step: 0.125 if step >= 40 else 1.0),
     "the gradient norm is 0.125 times that of the 20 steps before: a loss scale, a sum, or micro-batches?", None),
    (lambda: figures("largest_row", (1.4, 1.5, 1.6, 2.9)),
     "the largest row of blocks.0 is 2.9 times as large as the median row, and once was 1.4 times",
     "a lower learning rate; look at how this layer is made: its gain, its momentum, whether anything reaches it"),
])  # fmt: skip
def test_words_of_alarms(lines: Callable[[], Iterable[StreamLine]], words: str, remedies: str | None) -> None:
    """They state what was seen, with readable numbers, and the likeliest remedy first."""
    event = TrainingHealth((ARM,)).find_alarms(lines())[0]
    assert event.words == words
    assert remedies is None or event.remedy == remedies


def test_a_sentence_has_one_end_and_a_watched_loop_no_seed() -> None:
    event = TrainingEvent("own", 0, 3, "alarm", "is it a sum?", remedy="a lower learning rate")
    assert event.describe(is_watched=True) == "own, step 3: is it a sum? What may help: a lower learning rate"
    assert (
        replace(event, words="the loss is nan", layer="head")
        .describe()
        .startswith("own, seed 0, step 3: the loss is nan (head). What may help")
    )


def test_arms_and_seeds_are_apart() -> None:
    quiet = list(rows(40, "bf16", gradient_norm=lambda step: 1.0))
    loud = list(rows(40, "fp8", gradient_norm=lambda step: 9.0))
    mixed: list[StreamLine] = [line for pair in zip(quiet, loud, strict=True) for line in pair]
    again = [replace(row, seed=1, gradient_norm=100.0) for row in quiet]
    assert alarms([*mixed, *again], ARM, FP8) == []


def test_events_in_the_stream_raise_no_alarm() -> None:
    """After a resume, stored lines are read again together with their alarms."""
    health = TrainingHealth((ARM,))
    lines = list(rows(80, gradient_norm=lambda step: 18.0 if step == 60 else 1.0))
    first = health.find_alarms(lines[:70])
    assert TrainingHealth((ARM,)).find_alarms([*lines[:70], *first]) == first
    assert not health.find_alarms([*first, *lines[70:]])


def test_a_rule_is_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "RULES", [])

    class LossOfTwo(HealthRule[StepRow]):
        name, remedies = "loss-of-two", ()

        def read_line(self, line: StepRow) -> str:
            return "the loss is 2" if line.loss == 2 else ""

    monkeypatch.setattr(health, "RULES", steps.RULES)
    assert alarms(rows(5, loss=lambda step: 2.0 if step == 3 else 1.0)) == [("loss-of-two", 3)]


def test_a_remedy_changes_something() -> None:
    def remedy(arm: Arm) -> str:
        (event,) = TrainingHealth((arm,)).find_alarms(
            replace(line, arm=arm.name) for line in readings(9, lag=lambda at: 0.3 * at)
        )
        return event.remedy

    assert "margin" in remedy(FP8)
    assert "margin" not in remedy(replace(FP8, precision="fp8"))


def test_a_long_training_is_checked_for_a_plateau_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check reads half of all losses, so the time of a step would grow with the training."""
    checks: list[int] = []
    monkeypatch.setattr(steps, "measure_noise", lambda losses: checks.append(len(losses)) or math.inf)
    rule = steps.LossPlateau(steps.WatchedArm("bf16"))
    for row in rows(6000):
        rule.read_line(row)
    assert checks[:3] == [100, 104, 108]
    assert len(checks) < 200 + 220
