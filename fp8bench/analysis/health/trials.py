"""What may help an ill arm, tried side by side from the last good checkpoint: what is tried, and which of it helped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fp8bench.analysis.health.health import RULES, Health
from fp8bench.analysis.health.remedies import helped
from fp8bench.model.training import Arm, Line, StepRow, TrainerSettings, TrainingEvent

# Steps behind the alarm that are trained once more; losses are the means of the last of them.
AFTER, LAST = 50, 20
# A loss that is lower by less is chance.
_BETTER = 0.01


@dataclass(frozen=True)
class Trial:
    """The arm with a remedy, or as it was: a name of its own, its precision, and all of its settings."""

    remedy: str
    arm: Arm
    settings: TrainerSettings


def trials_of(alarm: TrainingEvent, arm: Arm, settings: TrainerSettings) -> tuple[Trial, ...]:
    """The arm as it was, and with every remedy that changes it; one that changes what states are kept in cannot be
    tried in the middle of a training."""
    rule = next(one for one in RULES if one.name == rule_of(alarm))
    own = arm.taken(settings)
    found = [Trial("", _called(arm, "as it was", arm.precision), own)]
    for remedy in rule.remedies:
        precision, changed = helped(arm.precision, own, remedy, alarm.layer)
        kept = ("master", "gradients", "optimizer_states")
        if (precision, changed) != (arm.precision, own) and all(getattr(changed, a) == getattr(own, a) for a in kept):
            found.append(Trial(remedy.value, _called(arm, remedy.value, precision), changed))
    return tuple(found)


def _called(arm: Arm, words: str, precision: str) -> Arm:
    return Arm(f"{arm.name}: {words}", precision, native=arm.native)


def rule_of(alarm: TrainingEvent) -> str:
    """The rule that raised an alarm."""
    return str(dict(alarm.values)["rule"])


def outcome(
    alarm: TrainingEvent, step: int, before: Iterable[Line], trials: Mapping[Trial, Sequence[Line]]
) -> TrainingEvent:
    """Which remedies helped, by how much: the alarm stays away, or the loss is lower than that of the arm as it was.

    `before` are the lines of the ill arm up to `step`, from which the trials began.
    """
    known = [line for line in before if line.arm == alarm.arm and line.seed == alarm.seed and line.step < step]
    (as_it_was, *_), losses = trials, {trial: _loss(lines) for trial, lines in trials.items()}
    again = {trial: _alarmed(alarm, trial, known, lines) for trial, lines in trials.items()}
    gains = {trial: _gain(losses[trial], losses[as_it_was]) for trial in trials}

    def helps(trial: Trial) -> bool:
        cured = again[as_it_was] and not again[trial] and gains[trial] > -_BETTER
        return cured or (gains[trial] > _BETTER and again[trial] <= again[as_it_was])

    tried = [trial for trial in trials if trial is not as_it_was]
    good = sorted(filter(helps, tried), key=lambda trial: (again[trial], -gains[trial]))
    said = [f"{one.remedy}: {_words(again[one], gains[one])}" for one in (*good, *(t for t in tried if t not in good))]
    said.append(f"as it was: {'the alarm again' if again[as_it_was] else 'no alarm'}")
    head = f"{good[0].remedy} helped most" if good else "nothing that was tried helped"
    figures = [(one.remedy, _plain(gains[one])) for one in tried]
    return TrainingEvent(
        alarm.arm, alarm.seed, alarm.step, "tried-fix", f"{head}, from step {step} on: {'; '.join(said)}", alarm.layer,
        alarm.tensor, (("rule", rule_of(alarm)), *figures), good[0].remedy if good else "",
    )  # fmt: skip


def _alarmed(alarm: TrainingEvent, trial: Trial, known: Sequence[Line], lines: Sequence[Line]) -> bool:
    """Whether the rule alarms in a trial, too, about the same layer."""
    health = Health((trial.arm,), trial.settings)
    health.see(_as_of(trial.arm, known))
    return any((rule_of(one), one.layer) == (rule_of(alarm), alarm.layer) for one in health.see(lines))


def _as_of(arm: Arm, lines: Iterable[Line]) -> Iterable[Line]:
    for line in lines:
        changed: Any = replace(line, arm=arm.name)
        yield changed


def _loss(lines: Sequence[Line]) -> float:
    """The mean of the last steps; infinite where one of them is not finite, or there are none."""
    losses = [line.loss for line in lines if isinstance(line, StepRow)][-LAST:]
    mean = math.fsum(losses) / len(losses) if losses else math.inf
    return mean if math.isfinite(mean) else math.inf


def _gain(loss: float, base: float) -> float:
    """The share by which a loss is lower than another."""
    if math.isinf(base) or math.isinf(loss):
        return 0.0 if math.isinf(base) and math.isinf(loss) else math.copysign(math.inf, base - loss)
    return 1 - loss / base


def _words(again: bool, gain: float) -> str:
    alarm = "the alarm again" if again else "no alarm"
    if math.isinf(gain):
        return f"{alarm}, a loss that is {'' if gain > 0 else 'not '}finite"
    return f"{alarm}, a loss {abs(gain):.1%} {'lower' if gain >= 0 else 'higher'}"


def _plain(gain: float) -> float | str:
    return gain if math.isfinite(gain) else str(gain)
