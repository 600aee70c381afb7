"""Computes what options save (alone, added, left out) and shows it.

Arms shared rounds, so differences between any two are resampled with the same draws of rounds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from fp8bench import units
from fp8bench.analysis.stats import Floats, Resampled, best_case
from fp8bench.features.ablate.values import AblatedArm, Ablation
from fp8bench.model import Interval, Level
from fp8bench.model.codec import encode
from fp8bench.model.stopping import LEAST_ROUNDS
from fp8bench.model.words import REMARKS
from fp8bench.report.columns import Col, table
from fp8bench.report.data.plain import Rows
from fp8bench.report.elements import Element, Page, Part, Text, Tone
from fp8bench.report.panels import show_params
from fp8bench.report.words.naming import join_words

_LEVEL = 0.99
_ENDS = ((1 - _LEVEL) / 2, (1 + _LEVEL) / 2)


@dataclass(frozen=True)
class Savings:
    """Savings in seconds per step, with intervals; None if an arm's time is not a speed."""

    ablation: Ablation

    def alone(self, name: str) -> Interval | None:
        return self._sum((((), 1), ((name,), -1)))

    def cumulative(self, name: str) -> Interval | None:
        """The saving when added to the options before it."""
        place = self.ablation.names.index(name)
        return self._sum(((self.ablation.names[:place], 1), (self.ablation.names[: place + 1], -1)))

    def left_out(self, name: str) -> Interval | None:
        """The loss if only this option is left out."""
        return self._sum(((self._but(name), 1), (self.ablation.names, -1)))

    def interaction(self) -> Interval | None:
        """The saving of all options together, beyond the sum of each alone."""
        alone = [((name,), 1.0) for name in self.ablation.names]
        return self._sum((*alone, (self.ablation.names, -1), ((), 1.0 - len(alone))))

    def speed_up(self, arm: AblatedArm) -> Interval | None:
        first = self.ablation.arms[0]
        if not arm.timed or not first.timed or arm is first:
            return None
        return _ratio(first.rounds, arm.rounds)

    def _sum(self, terms: Sequence[tuple[Sequence[str], float]]) -> Interval | None:
        """Adds up arms' seconds, each times a factor; None unless all arms are timed."""
        arms = [(self.ablation.arm(options), times) for options, times in terms]
        if not all(arm.timed for arm, _ in arms):
            return None
        # Arms draw the same rounds, so that the noise of a round cancels in the difference.
        cases = [(resample(arm.rounds), times) for arm, times in arms]
        point = sum(times * math.exp(case.point) for case, times in cases)
        draws: Floats = np.sum([times * np.exp(case.resampled) for case, times in cases], axis=0)
        by_round: Floats = np.sum([times * np.array(arm.rounds) for arm, times in arms], axis=0)
        return _interval(point, draws, by_round)

    @property
    def floor(self) -> float | None:
        """The share by which the times of identical code may differ in these rounds."""
        first = self.ablation.arms[0]
        if not self.ablation.control or not first.timed:
            return None
        return _ratio(self.ablation.control, first.rounds).reach

    def _but(self, name: str) -> tuple[str, ...]:
        return tuple(option for option in self.ablation.names if option != name)


def seconds_of(arm: AblatedArm) -> float | None:
    """Returns the mean of the fastest quarter of the rounds."""
    return math.exp(resample(arm.rounds).point) if arm.rounds else None


@cache
def resample(rounds: tuple[float, ...]) -> Resampled:
    """Resamples the best case of whole steps; arms with equally many rounds draw the same ones."""
    return best_case(np.array(rounds, dtype=np.float64)[:, None])


def _ratio(above: tuple[float, ...], below: tuple[float, ...]) -> Interval:
    numerator, denominator = resample(above), resample(below)
    draws: Floats = np.exp(numerator.resampled - denominator.resampled)
    return _interval(math.exp(numerator.point - denominator.point), draws, np.array(above) / np.array(below))


def _interval(point: float, draws: Floats, by_round: Floats) -> Interval:
    """Returns the central 99% of the resamples or, if rounds are few and resamples unreliable, the range over
    rounds."""
    # The interval must include the point, even if that is outside the middle of its resamples.
    if few := len(by_round) < LEAST_ROUNDS:
        low, high = by_round.min(), by_round.max()
    else:
        low, high = np.quantile(draws, _ENDS)
    return Interval(point, min(float(low), point), max(float(high), point), 0.0 if few else _LEVEL)


# The speed-up that is often quoted for FP8 with these axis values, and only with all of them.
_QUOTED = (3.0, 4.0)
_QUOTED_WITH = {"compile": "yes", "attention": "flash", "fused": "yes", "checkpointing": "blocks"}
_LEGEND = (
    "saves: in seconds of a step; below 0 it costs; [low, high]: 99% interval of this run, or the range of its rounds",
    "alone: the option and no other; then: added to those before it; left out: what is lost where it alone is missing",
    "reading: alone below left out: it needs another; alone above left out: another does the same work",
    "times: of whole steps, the fastest quarter of the rounds; of another batch as if it had as many tokens",
    "emulated: right in numbers, and no speed: neither it nor what is measured with it has a saving",
)


def page_of(ablation: Ablation) -> Page:
    title = f"ablation of {ablation.suite} on {ablation.device}"
    setting = f"{show_params(ablation.setting)} ({ablation.device_name})"
    parts = [
        Part("answer", "", tuple(Text(f"{sentence}.") for sentence in sentences(ablation))),
        Part("options", "what each option saves of a step", (_options(ablation),)),
        Part("arms", "arms, all timed in the same rounds", (_arms(ablation), *_labels(ablation))),
    ]
    if ablation.path:
        parts.append(Part("kept", "", (Text(f"stored in {ablation.path}"),)))
    return Page(title, setting, tuple(parts), _LEGEND)


def sentences(ablation: Ablation) -> Iterator[str]:
    first, complete = ablation.arms[0], ablation.arm(ablation.names)
    names = join_words(ablation.names)
    emulated = "emulated: its time does not show a speed"
    # 1. A speed needs both ends.
    if not first.timed:
        yield f"speed is unknown: the step without options has none ({first.why or emulated})"
        return
    if not complete.timed:
        yield f"{names} together have no speed here: {complete.why or emulated}"
        return
    # 2. Compare all options together with the noise floor.
    savings = Savings(ablation)
    speed = savings.speed_up(complete)
    assert speed is not None
    beyond = 1 + (savings.floor or 0.0)
    word = "faster" if speed.low > beyond else "slower" if speed.high < 1 / beyond else "not told apart"
    yield f"{names} together: {word}, {_show_speed(speed)} of {ablation.reference}"
    # 3. Describe how options interact.
    yield from _interplay(ablation)
    # 4. Judge the often-quoted claim only if intervals and machine allow it.
    if speed.level and savings.floor is not None and _is_quoted(ablation) and _are_quiet((first, complete)):
        quoted = f"{_QUOTED[0]:g} to {_QUOTED[1]:g} times"
        judged = "refuted" if speed.high < _QUOTED[0] else "reached" if speed.low >= _QUOTED[0] else "not decided"
        yield (
            f"the often-quoted '{quoted}' of FP8 with compile, flash attention, a fused optimizer and checkpointing: "
            f"{judged} here"
        )
    if savings.floor is not None:
        few = "" if speed.level else f"; [low, high]: range of {len(complete.rounds)} rounds, too few for an interval"
        yield f"noise floor (A/A): +-{units.percent(savings.floor)}{few}"


def _is_quoted(ablation: Ablation) -> bool:
    """Whether all options of the often-quoted speed-up were measured: other sets do not test it."""
    values = {option.axis: option.on for option in ablation.options}
    has_fp8 = any("fp8" in option.precision for option in ablation.options)
    return has_fp8 and _QUOTED_WITH.items() <= values.items()


def _are_quiet(arms: Sequence[AblatedArm]) -> bool:
    remarks = {label.value for label in REMARKS}
    return all(remarks.issuperset(arm.labels) for arm in arms)


def _interplay(ablation: Ablation) -> Iterator[str]:
    savings = Savings(ablation)
    gained = savings.interaction()
    if gained is None:
        return
    comparison = "less" if gained.point > 0 else "more"
    beyond = f"the whole takes {units.seconds(abs(gained.point))} {comparison} than the options alone add up to"
    # An interval around 0 shows neither synergy nor overlap.
    if gained.low <= 0 <= gained.high:
        yield f"additive within these rounds: savings alone add up to the whole, but for {_show_saving(gained)}"
    else:
        yield f"{'they need one another' if gained.point > 0 else 'they overlap'}: {beyond} {_show_range(gained)}"


def _options(ablation: Ablation) -> Element:
    savings = Savings(ablation)
    cols: list[Col[str]] = [
        Col("option", lambda name: name),
        Col("alone saves", lambda name: _show_saving(savings.alone(name)), number=True),
        Col("then saves", lambda name: _show_saving(savings.cumulative(name)), number=True),
        Col("left out loses", lambda name: _show_saving(savings.left_out(name)), number=True),
    ]
    return table("options", "", cols, ablation.names)


def _arms(ablation: Ablation) -> Element:
    cols: list[Col[AblatedArm]] = [
        Col("arm", lambda arm: " + ".join(arm.options) or f"none ({ablation.reference})"),
        Col(
            "time",
            lambda arm: "emulated " * (arm.level is Level.EMULATED) + units.seconds(seconds_of(arm)),
            number=True,
        ),
        Col("speed-up", lambda arm: _show_speed(Savings(ablation).speed_up(arm)), number=True),
        Col("memory", lambda arm: arm.memory, unit="B"),
        Col("energy", lambda arm: arm.joules, unit="J", when=any(arm.joules for arm in ablation.arms)),
        Col(
            ablation.error.replace("_", " ") or "error",
            lambda arm: arm.error,
            show=units.relative_error,
            when=bool(ablation.error),
        ),
        Col("why", lambda arm: arm.why, below=True, when=any(arm.why for arm in ablation.arms)),
    ]
    return table("arms", "", cols, ablation.arms)


def _labels(ablation: Ablation) -> Iterator[Text]:
    counts: Counter[str] = Counter()
    for arm in ablation.arms:
        counts.update(arm.labels)
    if counts:
        shown = (f"{label} ({count} of {len(ablation.arms)} arms)" for label, count in counts.items())
        yield Text(f"labels: {', '.join(shown)}", Tone.DOUBT)


def _show_saving(saved: Interval | None) -> str:
    return units.NONE if saved is None else f"{_show_seconds(saved.point)} {_show_range(saved)}"


def _show_seconds(seconds: float) -> str:
    return f"{'-' * (seconds < 0)}{units.seconds(abs(seconds))}"


def _show_range(saved: Interval) -> str:
    return f"[{_show_seconds(saved.low)}, {_show_seconds(saved.high)}]"


def _show_speed(speed: Interval | None) -> str:
    if speed is None:
        return units.NONE
    return f"{units.speed_up(speed.point)} [{units.significant(speed.low)}, {units.significant(speed.high)}]"


def value_of(ablation: Ablation) -> dict[str, Any]:
    savings = Savings(ablation)
    figures = {
        name: {
            "alone": encode(savings.alone(name)),
            "cumulative": encode(savings.cumulative(name)),
            "left_out": encode(savings.left_out(name)),
        }
        for name in ablation.names
    }
    saved = {"options": figures, "interaction": encode(savings.interaction()), "floor": savings.floor}
    return {**encode(ablation), "saved": saved, "sentences": list(sentences(ablation))}


def rows_of(ablation: Ablation) -> Rows:
    speeds = [(arm, Savings(ablation).speed_up(arm)) for arm in ablation.arms]
    rows = [
        {
            "arm": "+".join(arm.options),
            "options": len(arm.options),
            "level": arm.level.value,
            "seconds": seconds_of(arm),
            "speed_up": speed and speed.point,
            "low": speed and speed.low,
            "high": speed and speed.high,
            "memory": arm.memory,
            "joules": arm.joules,
            "error": arm.error,
            "labels": " ".join(arm.labels),
            "why": arm.why,
        }
        for arm, speed in speeds
    ]
    return tuple(rows[0]), rows
