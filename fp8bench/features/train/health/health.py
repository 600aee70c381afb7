"""Applies all health rules to the arms of a training: lines in, alarms out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from fp8bench.features.train.health import batches, beginnings, loops, tensors  # noqa: F401 - their rules register themselves
from fp8bench.features.train.health.steps import RULES, HealthRule, Remedy, WatchedArm
from fp8bench.features.train.request import TrainerSettings
from fp8bench.features.train.values import COVERAGE, Arm, ArmRole, LayerReading, StepFigure, StreamLine, TrainingEvent
from fp8bench.registry import precisions

# An episode ends once a rule has found nothing for this many steps; then it may alarm again.
REST = 50


class Health:
    """Raises one alarm per episode in the stream of a training. After a resume it reads the stored lines first."""

    def __init__(self, arms: Sequence[Arm], settings: TrainerSettings | None = None) -> None:
        self._arms = {arm.name: arm for arm in arms}
        self._settings = settings or TrainerSettings()
        self._rules: dict[tuple[int, str], list[HealthRule[Any]]] = {}
        # The rules that read a kind of line, by its seed, arm, type and figure.
        self._readers: dict[tuple[int, str, type, str], list[HealthRule[Any]]] = {}
        self._seeds: set[int] = set()
        self._last: dict[tuple[int, str, str, str, str], int] = {}

    def see(self, lines: Iterable[StreamLine]) -> tuple[TrainingEvent, ...]:
        """Returns the alarms of the next lines. Alarms of one rule in one step become one, about the first tensor."""
        alarms: dict[tuple[str, int, int, str], list[TrainingEvent]] = {}
        for line in lines:
            if isinstance(line, TrainingEvent):
                if line.kind == COVERAGE and line.step:
                    self._forget_tensors(line.seed, line.arm)
                continue
            for rule in self._readers_of(line):
                # A rule reads every line of its kinds, even between alarms.
                words = rule.see(line)
                if words and self._is_new(rule, line):
                    key = (rule.arm.name, line.seed, line.step, rule.name)
                    alarms.setdefault(key, []).append(self._event(rule, words, line))
        return tuple(map(_merge_tensors, alarms.values()))

    def _readers_of(self, line: StreamLine) -> list[HealthRule[Any]]:
        figure = line.name if isinstance(line, StepFigure) else ""
        key = line.seed, line.arm, type(line), figure
        if key not in self._readers:
            rules = self._rules_of(line.seed, line.arm)
            self._readers[key] = [rule for rule in rules if rule.reads_line(line)]
        return self._readers[key]

    def _rules_of(self, seed: int, arm: str) -> list[HealthRule[Any]]:
        """Returns the rules for an arm's lines: those about the arm, and those that compare another arm with it."""
        if seed not in self._seeds:
            self._seeds.add(seed)
            # Rules keep state, so each arm of each seed has separate instances.
            for watched in map(self._pair_arm, self._arms.values()):
                for kind in RULES:
                    rule = kind(watched)
                    names = {watched.name, watched.reference if kind.compares else ""}
                    for name in names - {""}:
                        self._rules.setdefault((seed, name), []).append(rule)
        return self._rules.get((seed, arm), [])

    def _forget_tensors(self, seed: int, arm: str) -> None:
        """Restarts the rules about tensors of an arm that has changed its precision, and with it its scales."""
        rules = self._rules_of(seed, arm)
        rules[:] = [type(rule)(rule.arm) if rule.reads is LayerReading else rule for rule in rules]
        self._readers.clear()

    def _pair_arm(self, arm: Arm) -> WatchedArm:
        slowest = min((factor for _, factor in self._settings.rates), default=1.0)
        if arm.role not in (ArmRole.CANDIDATE, ArmRole.REPEAT):
            return WatchedArm(arm.name, slowest=slowest)
        reference = ""
        for base in self._arms.values():  # a reference at the same rate is preferred: then only arithmetic differs
            if base.role is ArmRole.OTHER_RATE and set(base.settings) <= set(arm.settings):
                return WatchedArm(arm.name, base.name, slowest)
            if base.role is ArmRole.REFERENCE:
                reference = base.name
        return WatchedArm(arm.name, reference, slowest)

    def _is_new(self, rule: HealthRule[Any], line: StreamLine) -> bool:
        """Whether neither this rule nor the one that it waits for has alarmed about the tensor for REST steps."""
        seed, arm = line.seed, rule.arm.name
        key = seed, arm, rule.name, *_place_of(line)
        steps = self._last.get(key), self._last.get((seed, arm, rule.until, "", ""))
        self._last[key] = line.step
        return all(step is None or line.step - step > REST for step in steps)

    def _event(self, rule: HealthRule[Any], words: str, line: StreamLine) -> TrainingEvent:
        arm, (layer, tensor) = self._arms[rule.arm.name], _place_of(line)
        state = (arm.precision, arm.merge_settings(self._settings), layer)
        remedies = "; ".join(remedy.value for remedy in rule.current_remedies if changes_something(remedy, *state))
        values = (("rule", rule.name),)
        return TrainingEvent(arm.name, line.seed, line.step, "alarm", words, layer, tensor, values, remedies)


def _place_of(line: StreamLine) -> tuple[str, str]:
    """The layer and tensor that a line is about; '' for a line about the whole step."""
    return getattr(line, "layer", ""), getattr(line, "role", "")


def _merge_tensors(events: Sequence[TrainingEvent]) -> TrainingEvent:
    event, count = events[0], len(events) - 1
    if not count:
        return event
    return replace(event, words=f"{event.words}, and {count} tensor{'s' if count > 1 else ''} more")


_HIGH = ("fp32", "bf16", "tf32")


def changes_something(remedy: Remedy, precision: str, settings: TrainerSettings, layer: str) -> bool:
    """Whether an arm of this precision with these settings would train differently with the remedy."""
    # A remedy that the arm already has is useless advice.
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
