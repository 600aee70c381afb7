"""Remedies of an alarm, tried beside each other in the worker from the last good checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fp8bench.analysis.health.trials import AFTER, Trial, outcome, trials_of
from fp8bench.errors import StoreError
from fp8bench.model.training import Arm, Line, SeedTask, TrainingEvent

# Asks the lab for so many steps' worth of time: steps, a method's name, and its arguments.
Ask = Callable[..., Any]
_SLICE = 5


def try_fix(
    ask: Ask, task: SeedTask, alarm: TrainingEvent, arm: Arm, folders: Iterable[str], before: Iterable[Line]
) -> TrainingEvent:
    """What came of it. `folders` are the checkpoints before the alarm, the newest first; without one that is sound
    trials begin at the first step. `before` are the lines of the seed."""
    trials = trials_of(alarm, arm, task.settings)
    step = _begun(ask, arm, trials, [*folders, ""])
    until = min(task.steps, alarm.step + AFTER)
    lines: dict[Trial, list[Line]] = {trial: [] for trial in trials}
    for start in range(step, until, _SLICE):
        count = min(_SLICE, until - start)
        for trial in trials:
            lines[trial] += ask(count, "advance", trial.arm.name, count)
    for trial in trials:
        ask(0, "drop", trial.arm.name)
    return outcome(alarm, step, before, lines)


def _begun(ask: Ask, arm: Arm, trials: Iterable[Trial], folders: Iterable[str]) -> int:
    """Build the trials from the first of the folders that keeps the arm; the step that they come to next."""
    for folder in folders:
        try:
            steps = [ask(0, "branch", folder, arm.name, one.arm, one.settings) for one in trials]
        except StoreError:
            continue
        return int(steps[0])
    raise AssertionError("the first step needs no checkpoint")
