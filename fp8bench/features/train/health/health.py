"""Applies all health rules to the arms of a training: lines in, alarms out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from fp8bench.features.train.health import loops, steps, tensors
from fp8bench.features.train.health.steps import HealthAlarm, HealthRule, Remedy, WatchedArm
from fp8bench.features.train.request import TrainerSettings
from fp8bench.features.train.values import Arm, ArmRole, StreamLine, TrainingEvent
from fp8bench.registry import precisions

RULES: tuple[type[HealthRule[Any]], ...] = (
    steps.GradientSpike, steps.LossPlateau, steps.UpdateBurst, steps.NotFiniteStep, steps.LossGap,
    tensors.ScaleFall, tensors.ScaleRise, tensors.ScaleUnsettled, tensors.ScaleAtEdge, tensors.Lag,
    tensors.OverflowBurst, tensors.UnderflowCreep, tensors.WeightsBehind, tensors.NotFiniteTensor,
    tensors.EmbeddingCollapse, tensors.AttentionOverflow, tensors.BatchNormDrift, tensors.LayerStill,
    # The following need no second arm to compare with.
    loops.GradientsLeft, loops.MomentsGone, loops.NoUpdate, loops.SameInputs,
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
                    names = {watched.name, watched.reference if kind.compares else ""}
                    for name in names - {""}:
                        self._rules.setdefault((seed, name), []).append(rule)
        return self._rules.get((seed, arm), [])

    def _watched(self, arm: Arm) -> WatchedArm:
        slowest = min((factor for _, factor in self._settings.rates), default=1.0)
        if arm.role not in (ArmRole.CANDIDATE, ArmRole.REPEAT):
            return WatchedArm(arm.name, slowest=slowest)
        reference = ""
        for other in self._arms.values():  # a reference at the same rate comes first: then only arithmetic differs
            if other.role is ArmRole.OTHER_RATE and set(other.settings) <= set(arm.settings):
                return WatchedArm(arm.name, other.name, slowest)
            if other.role is ArmRole.REFERENCE:
                reference = other.name
        return WatchedArm(arm.name, reference, slowest)

    def _is_new(self, rule: HealthRule[Any], alarm: HealthAlarm, seed: int, step: int) -> bool:
        key = seed, rule.arm.name, rule.name, alarm.layer, alarm.tensor
        before = self._last.get(key)
        self._last[key] = step
        later_rule = self._last.get((seed, rule.arm.name, rule.until, "", "")) if rule.until else None
        return all(last is None or step - last > REST for last in (before, later_rule))

    def _event(self, rule: HealthRule[Any], alarm: HealthAlarm, seed: int, step: int) -> TrainingEvent:
        arm = self._arms[rule.arm.name]
        now = (arm.precision, arm.taken(self._settings), alarm.layer)
        remedies = [remedy for remedy in rule.remedies if changes_something(remedy, *now)]
        return TrainingEvent(
            arm.name,
            seed,
            step,
            "alarm",
            alarm.words,
            alarm.layer,
            alarm.tensor,
            (("rule", rule.name), *alarm.figures),
            "; ".join(remedy.value for remedy in remedies),
        )


_HIGH = ("fp32", "bf16", "tf32")


def changes_something(remedy: Remedy, precision: str, settings: TrainerSettings, layer: str) -> bool:
    """Whether an arm of this precision with these settings would train differently with the remedy."""
    name, chosen = precision.partition(":")[0], precisions.get(precision).chosen
    match remedy:
        case Remedy.LAYER_IN_BF16:
            return bool(layer) and name not in _HIGH
        case Remedy.DYNAMIC_LOSS_SCALE:
            return settings.loss_scale != "dynamic"
        case Remedy.HIGHER_MASTER:
            return {settings.master, settings.optimizer_states, settings.gradients} != {"fp32"}
        case Remedy.RAISE_MARGIN:
            return "margin" in chosen
        case Remedy.SHORTER_HISTORY:
            return "history" in chosen and (int(chosen["history"]), int(chosen["interval"])) != (1, 1)
        case Remedy.E5M2_GRADIENTS:
            return name == "fp8-e4m3" or chosen.get("formats") == "e4m3"
    return True
