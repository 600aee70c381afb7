"""Applies all health rules to the arms of a training: lines in, alarms out; and judges which remedies of an alarm
help."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fp8bench.features.train.health import loops, steps, tensors
from fp8bench.features.train.health.steps import HealthAlarm, HealthRule, Remedy, WatchedArm
from fp8bench.features.train.request import TrainerSettings
from fp8bench.features.train.values import Arm, ArmRole, StepRow, StreamLine, TrainingEvent
from fp8bench.model import Scalar
from fp8bench.registry import precisions

RULES: tuple[type[HealthRule[Any]], ...] = (
    steps.GradientSpike, steps.LossPlateau, steps.UpdateBurst, steps.NotFiniteStep, steps.LossGap,
    tensors.ScaleFall, tensors.ScaleRise, tensors.ScaleUnsettled, tensors.ScaleAtEdge, tensors.Lag,
    tensors.OverflowBurst, tensors.UnderflowCreep, tensors.WeightsBehind, tensors.NotFiniteTensor,
    tensors.EmbeddingCollapse, tensors.AttentionOverflow, tensors.BatchNormDrift, tensors.LayerStill,
    # The following need no second arm to compare with.
    loops.GradientsLeft, loops.MomentsGone, loops.NoUpdate, loops.LayerGradient, loops.SameInputs,
    loops.LossAboveGuessing, loops.LossLeaked, loops.LossBackUp, steps.GradientScale, loops.AmaxJump, loops.DeadUnits,
    loops.NormGain, loops.LargeLogits, loops.DuplicateInputs, loops.DataDrift,
)  # fmt: skip
# An episode ends once a rule has found nothing for so many steps; then it may alarm again.
REST = 50


class Health:
    """Raises an alarm for each episode in the stream of a training. After a resume it is given the stored lines
    again."""

    def __init__(self, arms: Sequence[Arm], settings: TrainerSettings | None = None) -> None:
        self._arms = {arm.name: arm for arm in arms}
        self._settings = settings or TrainerSettings()
        self._rules: dict[tuple[int, str], list[HealthRule[Any]]] = {}
        self._seeds: set[int] = set()
        self._last: dict[tuple[int, str, str, str, str], int] = {}

    def see(self, lines: Iterable[StreamLine]) -> tuple[TrainingEvent, ...]:
        """The alarms of the next lines. Alarms of one rule in one step become one, about the first tensor."""
        alarms: dict[tuple[str, int, int, str], tuple[TrainingEvent, int]] = {}
        for line in lines:
            if isinstance(line, TrainingEvent):
                continue
            for rule in self._rules_of(line.seed, line.arm):
                alarm = rule.see(line) if isinstance(line, rule.reads) else None
                if alarm is None or not self._is_new(rule, alarm, line.seed, line.step):
                    continue
                key = (rule.arm.name, line.seed, line.step, rule.name)
                event, more = alarms.get(key, (self._event(rule, alarm, line.seed, line.step), -1))
                alarms[key] = event, more + 1
        return tuple(
            replace(event, words=f"{event.words}, and {more} tensor{'s' if more > 1 else ''} more") if more else event
            for event, more in alarms.values()
        )

    def _rules_of(self, seed: int, arm: str) -> list[HealthRule[Any]]:
        """The rules that read an arm's lines: its own, and those that compare another arm with it."""
        if seed not in self._seeds:
            self._seeds.add(seed)
            for watched in map(self._watched, self._arms.values()):
                for kind in RULES:
                    rule = kind(watched)
                    names = {watched.name, *((watched.reference, watched.other_seed) if kind.compares else ())}
                    for name in names - {""}:
                        self._rules.setdefault((seed, name), []).append(rule)
        return self._rules.get((seed, arm), [])

    def _watched(self, arm: Arm) -> WatchedArm:
        named = {other.role: other.name for other in self._arms.values()}
        slowest = min((factor for _, factor in self._settings.rates), default=1.0)
        if arm.role not in (ArmRole.CANDIDATE, ArmRole.REPEAT):
            return WatchedArm(arm.name, slowest=slowest)
        for other in self._arms.values():  # compare with a reference at the same rate, so that only arithmetic differs
            if other.role is ArmRole.OTHER_RATE and set(other.settings) <= set(arm.settings):
                return WatchedArm(arm.name, other.name, slowest=slowest)
        return WatchedArm(arm.name, named.get(ArmRole.REFERENCE, ""), named.get(ArmRole.OTHER_SEED, ""), slowest)

    def _is_new(self, rule: HealthRule[Any], alarm: HealthAlarm, seed: int, step: int) -> bool:
        key = seed, rule.arm.name, rule.name, alarm.layer, alarm.tensor
        before = self._last.get(key)
        self._last[key] = step
        later_rule = self._last.get((seed, rule.arm.name, rule.until, "", "")) if rule.until else None
        return all(last is None or step - last > REST for last in (before, later_rule))

    def _event(self, rule: HealthRule[Any], alarm: HealthAlarm, seed: int, step: int) -> TrainingEvent:
        arm = self._arms[rule.arm.name]
        now = (arm.precision, arm.taken(self._settings))
        remedies = [remedy for remedy in rule.remedies
                    if remedy in _FOR_PEOPLE or remedied(*now, remedy, alarm.layer) != now]  # fmt: skip
        return TrainingEvent(
            arm.name, seed, step, "alarm", alarm.words, alarm.layer, alarm.tensor,
            (("rule", rule.name), *alarm.figures), "; ".join(remedy.value for remedy in remedies),
        )  # fmt: skip


_FOR_PEOPLE = (Remedy.LOOK_AT_DATA, Remedy.LOOK_AT_LOOP, Remedy.LOOK_AT_LAYER)
_CLIP_SHARE = 0.25
_RATE_SHARE = 0.5
_HISTORY_SHARE = 16
_HIGH = ("fp32", "bf16", "tf32")


def remedied(precision: str, settings: TrainerSettings, remedy: Remedy, layer: str = "") -> tuple[str, TrainerSettings]:
    """Precision and settings of an arm with a remedy; unchanged where the remedy does not apply or is for a person."""
    name, chosen = precision.partition(":")[0], precisions.get(precision).chosen
    change: dict[str, Any] = {}
    options: dict[str, Scalar] = {}
    match remedy:
        case Remedy.LAYER_IN_BF16 if layer and name not in _HIGH:
            change["precision_map"] = (*settings.precision_map, (layer, "bf16"))
        case Remedy.DYNAMIC_LOSS_SCALE:
            change["loss_scale"] = "dynamic"
        case Remedy.CLIP_HARDER:
            change["clip"] = settings.clip * _CLIP_SHARE or 1.0
        case Remedy.LOWER_RATE if settings.make:  # whose own optimizer, if it gives one, knows no --rate
            change["handicap"] = settings.handicap * _RATE_SHARE
        case Remedy.LOWER_RATE:
            change["rate"] = settings.rate * _RATE_SHARE
        case Remedy.HIGHER_MASTER:
            change.update(master="fp32", optimizer_states="fp32", gradients="fp32")
        case Remedy.RAISE_MARGIN if "margin" in chosen:
            options["margin"] = int(chosen["margin"]) + 1
        case Remedy.SHORTER_HISTORY if "history" in chosen:
            options.update(history=max(1, int(chosen["history"]) // _HISTORY_SHARE), interval=1)
        case Remedy.E5M2_GRADIENTS if name == "fp8-e4m3":
            precision = "fp8"
        case Remedy.E5M2_GRADIENTS if chosen.get("formats") == "e4m3":
            options["formats"] = "hybrid"
    if options:
        options = {**chosen, **options}
        precision = precisions.canonical(":".join([name, *(f"{key}={value}" for key, value in options.items())]))
    return precision, replace(settings, **change)


# A trial repeats so many steps after the alarm; its loss is the mean of the last ones.
AFTER, LAST = 50, 20
# A smaller difference in loss counts as chance.
_BETTER = 0.01


@dataclass(frozen=True)
class RemedyTrial:
    """An arm with a remedy, or unchanged where `remedy` is '', under its own name and with all of its settings."""

    remedy: str
    arm: Arm
    settings: TrainerSettings


def trials_of(alarm: TrainingEvent, arm: Arm, settings: TrainerSettings) -> tuple[RemedyTrial, ...]:
    """The arm as it was, and with each remedy that changes it, but not what its states are kept in."""
    rule = next(kind for kind in RULES if kind.name == alarm.rule)
    own = arm.taken(settings)
    trials = [RemedyTrial("", Arm(f"{arm.name}: as it was", arm.precision, native=arm.native), own)]
    for remedy in rule.remedies:
        precision, changed = remedied(arm.precision, own, remedy, alarm.layer)
        kept = ("master", "gradients", "optimizer_states")
        if (precision, changed) != (arm.precision, own) and all(getattr(changed, a) == getattr(own, a) for a in kept):
            trial = Arm(f"{arm.name}: {remedy.value}", precision, native=arm.native)
            trials.append(RemedyTrial(remedy.value, trial, changed))
    return tuple(trials)


def outcome(
    alarm: TrainingEvent, step: int, before: Iterable[StreamLine], trials: Mapping[RemedyTrial, Sequence[StreamLine]]
) -> TrainingEvent:
    """Which remedies helped, and by how much. `before` are the arm's lines up to `step`, where the trials began."""
    known = [line for line in before if line.arm == alarm.arm and line.seed == alarm.seed and line.step < step]
    (as_it_was, *_), losses = trials, {trial: _loss(lines) for trial, lines in trials.items()}
    again = {trial: _alarmed(alarm, trial, known, lines) for trial, lines in trials.items()}
    gains = {trial: _gain(losses[trial], losses[as_it_was]) for trial in trials}

    def helps(trial: RemedyTrial) -> bool:
        cured = again[as_it_was] and not again[trial] and gains[trial] > -_BETTER
        return cured or (gains[trial] > _BETTER and again[trial] <= again[as_it_was])

    tried = [trial for trial in trials if trial is not as_it_was]
    good = sorted(filter(helps, tried), key=lambda trial: (again[trial], -gains[trial]))
    ordered = (*good, *(trial for trial in tried if trial not in good))
    if next(kind for kind in RULES if kind.name == alarm.rule).compares:  # no arm that it compares with was tried
        results = [f"{trial.remedy}: {_of_loss(gains[trial])}" for trial in ordered]
    else:
        words = {True: "the alarm again", False: "no alarm"}
        results = [f"{trial.remedy}: {words[again[trial]]}, {_of_loss(gains[trial])}" for trial in ordered]
        results.append(f"as it was: {words[again[as_it_was]]}")
    head = f"{good[0].remedy} helped most" if good else "nothing that was tried helped"
    figures = [(trial.remedy, gain if math.isfinite(gain := gains[trial]) else str(gain)) for trial in tried]
    return TrainingEvent(
        alarm.arm, alarm.seed, alarm.step, "tried-fix", f"{head}, from step {step} on: {'; '.join(results)}",
        alarm.layer, alarm.tensor, (("rule", alarm.rule), *figures), good[0].remedy if good else "",
    )  # fmt: skip


def _alarmed(
    alarm: TrainingEvent, trial: RemedyTrial, known: Sequence[StreamLine], lines: Sequence[StreamLine]
) -> bool:
    health = Health((trial.arm,), trial.settings)
    health.see(replace(line, arm=trial.arm.name) for line in known)
    return any((event.rule, event.layer) == (alarm.rule, alarm.layer) for event in health.see(lines))


def _loss(lines: Sequence[StreamLine]) -> float:
    """The mean of the last steps; infinite where one of them is not finite, or there are none."""
    losses = [line.loss for line in lines if isinstance(line, StepRow)][-LAST:]
    mean = math.fsum(losses) / len(losses) if losses else math.inf
    return mean if math.isfinite(mean) else math.inf


def _gain(loss: float, base: float) -> float:
    if math.isinf(base) or math.isinf(loss):
        return 0.0 if math.isinf(base) and math.isinf(loss) else math.copysign(math.inf, base - loss)
    return 1 - loss / base


def _of_loss(gain: float) -> str:
    if math.isinf(gain):
        return f"a loss that is {'' if gain > 0 else 'not '}finite"
    return f"a loss {abs(gain):.1%} {'lower' if gain >= 0 else 'higher'}"
