"""All rules over all arms of a training: lines in, alarms out; and which remedies of an alarm help."""

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
    # From here on: nothing beside the training is needed.
    loops.GradientsLeft, loops.MomentsGone, loops.NoUpdate, loops.LayerGradient, loops.SameInputs,
    loops.LossAboveGuessing, loops.LossLeaked, loops.LossBackUp, steps.GradientScale, loops.AmaxJump, loops.DeadUnits,
    loops.NormGain, loops.LargeLogits, loops.DuplicateInputs, loops.DataDrift,
)  # fmt: skip
# An episode ends, and another alarm may be raised, when a rule has found nothing for so many steps.
REST = 50


class Health:
    """Reads the stream of a training and raises alarms: one for an episode, however long it lasts.

    After a resume it is given the stored lines again, and what it says to those is let go.
    """

    def __init__(self, arms: Sequence[Arm], settings: TrainerSettings | None = None) -> None:
        self._arms = {arm.name: arm for arm in arms}
        self._settings = settings or TrainerSettings()
        self._rules: dict[tuple[int, str], list[HealthRule[Any]]] = {}
        self._seeds: set[int] = set()
        self._last: dict[tuple[int, str, str, str, str], int] = {}

    def see(self, lines: Iterable[StreamLine]) -> tuple[TrainingEvent, ...]:
        """The alarms of the next lines. Those of one rule in one step are one, about the tensor it saw first."""
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
        others = {more: f", and {more} tensor{'s' if more > 1 else ''} more" for _, more in alarms.values() if more}
        return tuple(replace(event, words=event.words + others.get(more, "")) for event, more in alarms.values())

    def _rules_of(self, seed: int, arm: str) -> list[HealthRule[Any]]:
        """The rules that read the lines of an arm: its own, and those that compare others with it."""
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
        for other in self._arms.values():  # the reference where it learns as fast: what is left is the arithmetic
            if other.role is ArmRole.OTHER_RATE and set(other.settings) <= set(arm.settings):
                return WatchedArm(arm.name, other.name, slowest=slowest)
        return WatchedArm(arm.name, named.get(ArmRole.REFERENCE, ""), named.get(ArmRole.OTHER_SEED, ""), slowest)

    def _is_new(self, rule: HealthRule[Any], alarm: HealthAlarm, seed: int, step: int) -> bool:
        key = seed, rule.arm.name, rule.name, alarm.layer, alarm.tensor
        before = self._last.get(key)
        self._last[key] = step
        foretold = self._last.get((seed, rule.arm.name, rule.until, "", "")) if rule.until else None
        return all(last is None or step - last > REST for last in (before, foretold))

    def _event(self, rule: HealthRule[Any], alarm: HealthAlarm, seed: int, step: int) -> TrainingEvent:
        arm = self._arms[rule.arm.name]
        remedies = [remedy for remedy in rule.remedies if _can(remedy, arm, self._settings, alarm.layer)]
        return TrainingEvent(
            arm.name, seed, step, "alarm", alarm.words, alarm.layer, alarm.tensor,
            (("rule", rule.name), *alarm.figures), "; ".join(remedy.value for remedy in remedies),
        )  # fmt: skip


def _can(remedy: Remedy, arm: Arm, settings: TrainerSettings, layer: str) -> bool:
    people = remedy in (Remedy.LOOK_AT_DATA, Remedy.LOOK_AT_LOOP, Remedy.LOOK_AT_LAYER)
    now = (arm.precision, arm.taken(settings))
    return people or helped(*now, remedy, layer) != now


_CLIP_SHARE = 0.25
_RATE_SHARE = 0.5
_HISTORY_SHARE = 16
_HIGH = ("fp32", "bf16", "tf32")


def helped(precision: str, settings: TrainerSettings, remedy: Remedy, layer: str = "") -> tuple[str, TrainerSettings]:
    """Precision and settings of an arm with a remedy; as they were where it changes nothing, or people have to look."""
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


# Steps behind the alarm that are trained once more; losses are the means of the last of them.
AFTER, LAST = 50, 20
# A loss that is lower by less is chance.
_BETTER = 0.01


@dataclass(frozen=True)
class RemedyTrial:
    """The arm with a remedy, or as it was: a name of its own, its precision, and all of its settings."""

    remedy: str
    arm: Arm
    settings: TrainerSettings


def trials_of(alarm: TrainingEvent, arm: Arm, settings: TrainerSettings) -> tuple[RemedyTrial, ...]:
    """The arm as it was, and with every remedy that changes it; one that changes what states are kept in cannot be
    tried in the middle of a training."""
    rule = next(kind for kind in RULES if kind.name == rule_of(alarm))
    own = arm.taken(settings)
    trials = [RemedyTrial("", _called(arm, "as it was", arm.precision), own)]
    for remedy in rule.remedies:
        precision, changed = helped(arm.precision, own, remedy, alarm.layer)
        kept = ("master", "gradients", "optimizer_states")
        if (precision, changed) != (arm.precision, own) and all(getattr(changed, a) == getattr(own, a) for a in kept):
            trials.append(RemedyTrial(remedy.value, _called(arm, remedy.value, precision), changed))
    return tuple(trials)


def _called(arm: Arm, words: str, precision: str) -> Arm:
    return Arm(f"{arm.name}: {words}", precision, native=arm.native)


def rule_of(alarm: TrainingEvent) -> str:
    return str(dict(alarm.values)["rule"])


def outcome(
    alarm: TrainingEvent, step: int, before: Iterable[StreamLine], trials: Mapping[RemedyTrial, Sequence[StreamLine]]
) -> TrainingEvent:
    """Which remedies helped, by how much: the alarm stays away, or the loss is lower than that of the arm as it was.

    `before` are the lines of the ill arm up to `step`, from which the trials began.
    """
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
    said = [f"{trial.remedy}: {_words(again[trial], gains[trial])}" for trial in ordered]
    said.append(f"as it was: {'the alarm again' if again[as_it_was] else 'no alarm'}")
    head = f"{good[0].remedy} helped most" if good else "nothing that was tried helped"
    figures = [(trial.remedy, gain if math.isfinite(gain := gains[trial]) else str(gain)) for trial in tried]
    return TrainingEvent(
        alarm.arm, alarm.seed, alarm.step, "tried-fix", f"{head}, from step {step} on: {'; '.join(said)}", alarm.layer,
        alarm.tensor, (("rule", rule_of(alarm)), *figures), good[0].remedy if good else "",
    )  # fmt: skip


def _alarmed(
    alarm: TrainingEvent, trial: RemedyTrial, known: Sequence[StreamLine], lines: Sequence[StreamLine]
) -> bool:
    health = Health((trial.arm,), trial.settings)
    health.see(replace(line, arm=trial.arm.name) for line in known)
    return any((rule_of(event), event.layer) == (rule_of(alarm), alarm.layer) for event in health.see(lines))


def _loss(lines: Sequence[StreamLine]) -> float:
    """The mean of the last steps; infinite where one of them is not finite, or there are none."""
    losses = [line.loss for line in lines if isinstance(line, StepRow)][-LAST:]
    mean = math.fsum(losses) / len(losses) if losses else math.inf
    return mean if math.isfinite(mean) else math.inf


def _gain(loss: float, base: float) -> float:
    if math.isinf(base) or math.isinf(loss):
        return 0.0 if math.isinf(base) and math.isinf(loss) else math.copysign(math.inf, base - loss)
    return 1 - loss / base


def _words(again: bool, gain: float) -> str:
    alarm = "the alarm again" if again else "no alarm"
    if math.isinf(gain):
        return f"{alarm}, a loss that is {'' if gain > 0 else 'not '}finite"
    return f"{alarm}, a loss {abs(gain):.1%} {'lower' if gain >= 0 else 'higher'}"
