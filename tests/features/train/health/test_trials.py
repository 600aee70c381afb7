"""Which remedies are tried, and what is made of the lines of the trials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from fp8bench.features.train.health.health import Health, RemedyTrial, outcome, trials_of
from fp8bench.features.train.request import TrainerSettings
from fp8bench.features.train.values import Arm, LayerReading, StepRow, StreamLine, TrainingEvent
from tests.counts import for_each

ARM = Arm("fp8", "fp8-delayed:history=16", settings=(("rate", 0.01),))
SETTINGS = TrainerSettings()
BEHIND = [
    LayerReading("fp8", 0, 10 * number, "blocks.0.mlp.up", "input", 1.0, 0.1, 0.0, 0.1, 0.0, 256.0, lag=0.4 * number)
    for number in range(6)
]


def alarm_of(lines: Sequence[StreamLine]) -> TrainingEvent:
    (event,) = Health((ARM,)).see(lines)
    return event


def stream(trial: RemedyTrial, loss: float, lag: float = 0.0) -> list[StreamLine]:
    """What a trial says from step 30 to 90."""
    row = StepRow(trial.arm.name, 0, 30, loss, 1e-3, 1.0, 0.0, 50.0, 1e-3, 1.0, 1024, 0.01)
    rows = [replace(row, step=step) for step in range(30, 90)]
    return [*rows, *(replace(BEHIND[0], arm=trial.arm.name, step=step, lag=lag) for step in range(30, 90, 10))]


def told(losses: Sequence[float], lags: Sequence[float]) -> TrainingEvent:
    """Of the arm as it was, a history of 1 and a margin of 1, in this order."""
    alarm = alarm_of(BEHIND)
    trials = trials_of(alarm, ARM, SETTINGS)
    lines = {trial: stream(trial, *how) for trial, *how in zip(trials, losses, lags, strict=True)}
    return outcome(alarm, 30, BEHIND, lines)


def test_what_changes_the_arm_is_tried() -> None:
    """Beside it as it was: with its own settings, under names of their own."""
    trials = trials_of(alarm_of(BEHIND), ARM, SETTINGS)
    assert [(one.arm.name, one.arm.precision) for one in trials] == [
        ("fp8: as it was", "fp8-delayed:history=16"),
        ("fp8: shorter history or interval of delayed scales", "fp8-delayed:history=1"),
        ("fp8: raise the margin of delayed scales by an octave", "fp8-delayed:history=16:margin=1"),
    ]
    assert {one.settings for one in trials} == {replace(SETTINGS, rate=0.01)}


def test_a_layer_in_bf16_a_lower_rate_and_harder_clipping() -> None:
    """Settings change, the precision stays; what states are kept in cannot change in the middle."""
    poisoned = [replace(BEHIND[0], not_finite=1.0)]
    changed = [one.settings for one in trials_of(alarm_of(poisoned), ARM, SETTINGS)]
    own = replace(SETTINGS, rate=0.01)
    assert changed == [
        own,
        replace(own, precision_map=(("blocks.0.mlp.up", "bf16"),)),
        replace(own, rate=0.005),
        replace(own, loss_scale="dynamic"),
    ]
    row = StepRow("fp8", 0, 0, 3.0, 1e-3, 1.0, 0.0, 50.0, 1e-3, 1.0, 1024, 0.01)
    spike = alarm_of([*(replace(row, step=step) for step in range(30)), replace(row, step=30, gradient_norm=99.0)])
    clipped = [one.settings.clip for one in trials_of(spike, ARM, replace(SETTINGS, optimizer_states="bf16"))]
    assert clipped == [1.0, 0.25, 1.0]


@for_each(
    ("losses", "lags", "head", "remedy"),
    [
        # The alarm stays away, and the loss is no worse.
        ((3.0, 3.0, 3.0), (2.0, 0.0, 2.0), "shorter history", "shorter history or interval of delayed scales"),
        # Both cure it: the lower loss is better.
        ((3.0, 2.9, 2.8), (2.0, 0.0, 0.0), "raise the margin", "raise the margin of delayed scales by an octave"),
        # A cure that costs more than it brings is none.
        ((3.0, 3.2, 3.0), (2.0, 0.0, 2.0), "nothing that was tried helped", ""),
        # An alarm in none of them, and no better loss.
        ((3.0, 3.0, 2.99), (0.0, 0.0, 0.0), "nothing that was tried helped", ""),
        # A loss that is finite again.
        (
            (math.nan, 2.9, math.nan),
            (2.0, 2.0, 2.0),
            "shorter history",
            "shorter history or interval of delayed scales",
        ),
    ],
)
def test_what_helped(losses: tuple[float, ...], lags: tuple[float, ...], head: str, remedy: str) -> None:
    """By how much: the share by which the loss is lower than that of the arm as it was."""
    event = told(losses, lags)
    assert event.kind == "tried-fix" and event.words.startswith(head) and event.remedy == remedy
    assert (event.arm, event.step, event.layer, event.tensor) == ("fp8", 40, "blocks.0.mlp.up", "input")
    gain = dict(event.values)["raise the margin of delayed scales by an octave"]
    if math.isfinite(losses[0]):
        assert gain == pytest.approx(1 - losses[2] / losses[0])


def test_the_words() -> None:
    assert told((3.0, 2.94, 3.3), (2.0, 0.0, 2.0)).words == (
        "shorter history or interval of delayed scales helped most, from step 30 on: shorter history or interval of "
        "delayed scales: no alarm, a loss 2.0% lower; raise the margin of delayed scales by an octave: the alarm "
        "again, a loss 10.0% higher; as it was: the alarm again"
    )
