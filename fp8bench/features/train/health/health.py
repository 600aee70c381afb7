"""Applies all health rules to the arms of a training: lines in, alarms out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from fp8bench.features.train.health import batches, beginnings, loops, tensors  # noqa: F401 - their rules register themselves
from fp8bench.features.train.health.steps import RULES, HealthRule, Remedy, WatchedArm
from fp8bench.features.train.health.tensors import may_be_cast
from fp8bench.features.train.request import TrainerSettings
from fp8bench.features.train.values import (
    COVERAGE_EVENT,
    Arm,
    ArmRole,
    LayerReading,
    StepFigure,
    StreamLine,
    TrainingEvent,
)
from fp8bench.registry import precisions
from fp8bench.report.words.naming import join_words

# An alarm may be repeated once its rule has found no problem for this many steps.
QUIET_STEPS = 50


class TrainingHealth:
    """Applies all rules to the output lines of a training. While a problem lasts, only one alarm is raised about it.
    When a training is resumed, its stored lines are read first.
    """

    def __init__(self, arms: Sequence[Arm], settings: TrainerSettings | None = None) -> None:
        self._arms = {arm.name: arm for arm in arms}
        self._settings = settings or TrainerSettings()
        self._rules: dict[tuple[int, str], list[HealthRule[Any]]] = {}
        # The rules that read a line, by its seed, its arm, and the properties that `accepts_line` checks.
        self._readers: dict[tuple[int, str, tuple[object, ...]], list[HealthRule[Any]]] = {}
        self._cast_tensors: set[tuple[int, str, str, str]] = set()
        self._seeds: set[int] = set()
        # The last step in which a rule found a problem, by the key (seed, arm, rule, layer, tensor).
        self._last_alarms: dict[tuple[int, str, str, str, str], int] = {}

    def find_alarms(self, lines: Iterable[StreamLine]) -> tuple[TrainingEvent, ...]:
        """Returns the alarms that the given lines cause. If a rule alarms several times in one step, these alarms
        become one, which is about the first tensor and names the others.
        """
        alarms: dict[tuple[str, int, int, str], list[TrainingEvent]] = {}
        for line in lines:
            if isinstance(line, TrainingEvent):
                # A coverage event after step 0 means that the arm has changed its precision.
                if line.kind == COVERAGE_EVENT and line.step:
                    self._forget_tensors(line.seed, line.arm)
                continue
            for rule in self._find_reading_rules(line):
                # A rule has to read every line that it accepts, even if its alarm will be suppressed.
                text = rule.read_line(line)
                if text and self._starts_alarm_episode(rule, line):
                    key = (rule.arm.name, line.seed, line.step, rule.name)
                    alarms.setdefault(key, []).append(self._make_alarm(rule, text, line))
        return tuple(map(_merge_tensors, alarms.values()))

    def _find_reading_rules(self, line: StreamLine) -> list[HealthRule[Any]]:
        line_key: tuple[object, ...] = (type(line),)
        if isinstance(line, StepFigure):
            line_key = (line.name,)
        elif isinstance(line, LayerReading):
            tensor = (line.seed, line.arm, line.layer, line.role)
            if may_be_cast(line):
                self._cast_tensors.add(tensor)
            line_key = (line.role, tensor in self._cast_tensors)
        key = line.seed, line.arm, line_key
        reading_rules = self._readers.get(key)
        if reading_rules is None:
            rules = self._find_health_rules(line.seed, line.arm)
            reading_rules = self._readers[key] = [rule for rule in rules if rule.accepts_line(line)]
        return reading_rules

    def _find_health_rules(self, seed: int, arm: str) -> list[HealthRule[Any]]:
        """Returns the rules that read an arm's lines: the arm's rules, and those of arms that are compared with it."""
        if seed not in self._seeds:
            self._seeds.add(seed)
            # Rules have a state, so every arm of every seed has its own instances.
            for watched in map(self._make_watched_arm, self._arms.values()):
                for rule_class in RULES:
                    rule = rule_class(watched)
                    arms_to_read = {watched.name}
                    if rule_class.compares_arms and watched.reference:
                        arms_to_read.add(watched.reference)
                    for name in arms_to_read:
                        self._rules.setdefault((seed, name), []).append(rule)
        return self._rules.get((seed, arm), [])

    def _forget_tensors(self, seed: int, arm: str) -> None:
        """Restarts the rules about tensors of an arm whose precision has changed, because earlier scales are not
        comparable."""
        rules = self._find_health_rules(seed, arm)
        rules[:] = [type(rule)(rule.arm) if rule.judged_line_types is LayerReading else rule for rule in rules]
        # This cache still has the replaced rules.
        self._readers.clear()
        self._cast_tensors.clear()

    def _make_watched_arm(self, arm: Arm) -> WatchedArm:
        # --rates multiplies the learning rates of some layers or kinds of parameters by factors.
        min_rate_factor = min((factor for _, factor in self._settings.rates), default=1.0)
        if arm.role not in (ArmRole.CANDIDATE, ArmRole.REPEAT):
            return WatchedArm(arm.name, min_rate_factor=min_rate_factor)
        reference = ""
        # Prefer a reference at the candidate's learning rate: then only the arithmetic differs. An arm with the role
        # OTHER_RATE differs from the reference only in its rate.
        for candidate_reference in self._arms.values():
            if candidate_reference.role is ArmRole.OTHER_RATE and set(candidate_reference.settings) <= set(
                arm.settings
            ):
                return WatchedArm(arm.name, candidate_reference.name, min_rate_factor)
            if candidate_reference.role is ArmRole.REFERENCE:
                reference = candidate_reference.name
        return WatchedArm(arm.name, reference, min_rate_factor)

    def _starts_alarm_episode(self, rule: HealthRule[Any], line: StreamLine) -> bool:
        """Records that a rule has found a problem, and returns whether the problem is new. It is new if in the last 50
        steps neither this rule (about the same tensor) nor the rule named by its `suppressed_by` has found a problem.
        """
        seed, arm = line.seed, rule.arm.name
        key = seed, arm, rule.name, *_find_tensor(line)
        steps = self._last_alarms.get(key), self._last_alarms.get((seed, arm, rule.suppressed_by, "", ""))
        self._last_alarms[key] = line.step
        return all(step is None or line.step - step > QUIET_STEPS for step in steps)

    def _make_alarm(self, rule: HealthRule[Any], words: str, line: StreamLine) -> TrainingEvent:
        arm = self._arms[rule.arm.name]
        layer, tensor = _find_tensor(line)
        settings = arm.merge_settings(self._settings)
        useful_remedies = [
            remedy.value
            for remedy in rule.last_alarm_remedies
            if has_remedy_effect(remedy, arm.precision, settings, layer)
        ]
        remedies = "; ".join(useful_remedies)
        values = (("rule", rule.name),)
        return TrainingEvent(arm.name, line.seed, line.step, "alarm", words, layer, tensor, values, remedies)


def _find_tensor(line: StreamLine) -> tuple[str, str]:
    """Returns the layer and the tensor of a line. Both are '' for a line about a complete step."""
    return getattr(line, "layer", ""), getattr(line, "role", "")


def _merge_tensors(events: Sequence[TrainingEvent]) -> TrainingEvent:
    event, places = events[0], [event.place for event in events[1:] if event.place]
    return replace(event, words=f"{event.words}; also {join_words(places, 3)}") if places else event


_HIGH_PRECISIONS = ("fp32", "bf16", "tf32")


def has_remedy_effect(remedy: Remedy, precision: str, settings: TrainerSettings, layer: str) -> bool:
    """Returns whether the remedy would change the training of an arm with this precision and these settings."""
    # A remedy that the arm already uses would be useless advice.
    name = precision.partition(":")[0]
    option_values = precisions.get(precision).chosen
    match remedy:
        case Remedy.LOOK_AT_LAYER:
            return bool(layer)
        case Remedy.LAYER_IN_BF16:
            return bool(layer) and name not in _HIGH_PRECISIONS
        case Remedy.DYNAMIC_LOSS_SCALE:
            return settings.loss_scale != "dynamic"
        case Remedy.HIGHER_MASTER:
            return {settings.master, settings.optimizer_states, settings.gradients} != {"fp32"}
        case Remedy.RAISE_MARGIN:
            return "margin" in option_values
        case Remedy.SHORTER_HISTORY:
            return "history" in option_values and (
                (int(option_values["history"]), int(option_values["interval"])) != (1, 1)
            )
        case Remedy.E5M2_GRADIENTS:
            return name == "fp8-e4m3" or option_values.get("formats") == "e4m3"
    return True
