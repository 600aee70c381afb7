"""All rules over all arms of a training: lines in, alarms out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fp8bench.analysis.health.layers import AttentionOverflow, BatchNormDrift, EmbeddingCollapse, LayerStill
from fp8bench.analysis.health.remedies import Remedy, helped
from fp8bench.analysis.health.rule import Alarm, Rule, WatchedArm
from fp8bench.analysis.health.steps import GradientSpike, LossGap, NotFinite, Plateau, UpdateBurst
from fp8bench.analysis.health.tensors import (
    Lag,
    NotFiniteTensor,
    OverflowBurst,
    ScaleAtEdge,
    ScaleFall,
    ScaleRise,
    ScaleUnsettled,
    UnderflowCreep,
    WeightsBehind,
)
from fp8bench.model.training import Arm, ArmRole, Line, TrainerSettings, TrainingEvent

RULES: tuple[type[Rule[Any]], ...] = (
    GradientSpike, Plateau, UpdateBurst, NotFinite, LossGap,
    ScaleFall, ScaleRise, ScaleUnsettled, ScaleAtEdge, Lag, OverflowBurst, UnderflowCreep, WeightsBehind,
    NotFiniteTensor, EmbeddingCollapse, AttentionOverflow, BatchNormDrift, LayerStill,
)  # fmt: skip
# An episode ends, and another alarm may be raised, when a rule has found nothing for so many steps.
REST = 50


@dataclass(frozen=True)
class _Key:
    seed: int
    arm: str
    rule: str
    layer: str
    tensor: str


class Health:
    """Reads the stream of a training and raises alarms: one for an episode, however long it lasts.

    After a resume it is given the stored lines again, and what it says to those is let go.
    """

    def __init__(self, arms: Sequence[Arm], settings: TrainerSettings | None = None) -> None:
        self._arms = {arm.name: arm for arm in arms}
        self._settings = settings or TrainerSettings()
        self._rules: dict[tuple[int, str], list[Rule[Any]]] = {}
        self._seeds: set[int] = set()
        self._last: dict[_Key, int] = {}

    def see(self, lines: Iterable[Line]) -> tuple[TrainingEvent, ...]:
        """The alarms of the next lines. Those of one rule in one step are one, about the tensor it saw first."""
        found: dict[tuple[str, int, int, str], tuple[TrainingEvent, int]] = {}
        for line in lines:
            if isinstance(line, TrainingEvent):
                continue
            for rule in self._rules_of(line.seed, line.arm):
                alarm = rule.see(line) if isinstance(line, rule.reads) else None
                if alarm is None or not self._is_new(rule, alarm, line.seed, line.step):
                    continue
                key = (rule.arm.name, line.seed, line.step, rule.name)
                event, more = found.get(key, (self._event(rule, alarm, line.seed, line.step), -1))
                found[key] = event, more + 1
        return tuple(_with(event, more) for event, more in found.values())

    def _rules_of(self, seed: int, arm: str) -> list[Rule[Any]]:
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
        named = {one.role: one.name for one in self._arms.values()}
        slowest = min((factor for _, factor in self._settings.rates), default=1.0)
        if arm.role not in (ArmRole.CANDIDATE, ArmRole.REPEAT):
            return WatchedArm(arm.name, slowest=slowest)
        return WatchedArm(arm.name, named.get(ArmRole.REFERENCE, ""), named.get(ArmRole.OTHER_SEED, ""), slowest)

    def _is_new(self, rule: Rule[Any], alarm: Alarm, seed: int, step: int) -> bool:
        key = _Key(seed, rule.arm.name, rule.name, alarm.layer, alarm.tensor)
        before = self._last.get(key)
        self._last[key] = step
        return before is None or step - before > REST

    def _event(self, rule: Rule[Any], alarm: Alarm, seed: int, step: int) -> TrainingEvent:
        arm = self._arms[rule.arm.name]
        remedies = [one for one in rule.remedies if _can(one, arm, self._settings, alarm.layer)]
        return TrainingEvent(
            arm.name, seed, step, "alarm", alarm.words, alarm.layer, alarm.tensor,
            (("rule", rule.name), *alarm.figures), "; ".join(one.value for one in remedies),
        )  # fmt: skip


def _can(remedy: Remedy, arm: Arm, settings: TrainerSettings, layer: str) -> bool:
    """Whether a remedy would change the arm, or is for people."""
    people = remedy in (Remedy.LOOK_AT_DATA, Remedy.LOOK_AT_LAYER)
    now = (arm.precision, arm.taken(settings))
    return people or helped(*now, remedy, layer) != now


def _with(event: TrainingEvent, more: int) -> TrainingEvent:
    """The event with how many tensors more it is about."""
    others = f", and {more} tensor{'s' if more > 1 else ''} more" if more else ""
    return replace(event, words=event.words + others)
