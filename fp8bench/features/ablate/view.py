"""Computes what options save (alone, added, left out), and renders the ablation. All arms were timed in the same
rounds. To compare two arms, each resample draws the same rounds for both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import numpy as np

from fp8bench import units
from fp8bench.analysis.stats import FloatArray, ResampledLogSeconds, resample_best_case
from fp8bench.features.ablate.values import AblatedArm, Ablation
from fp8bench.model import Interval, Level
from fp8bench.model.codec import encode
from fp8bench.model.stopping import LEAST_ROUNDS
from fp8bench.report.columns import Col, table
from fp8bench.report.data.plain import PlainRows
from fp8bench.report.elements import Element, Page, Part, Text, Tone
from fp8bench.report.panels import format_case_params
from fp8bench.report.words.naming import join_words

_CONFIDENCE_LEVEL = 0.99
_INTERVAL_QUANTILES = ((1 - _CONFIDENCE_LEVEL) / 2, (1 + _CONFIDENCE_LEVEL) / 2)


@dataclass(frozen=True)
class OptionSavings:
    """The seconds that options save per step, with intervals. A saving is None if the time of an arm cannot be
    compared.
    """

    ablation: Ablation

    def compute_option_savings(self, name: str) -> dict[str, Interval | None]:
        """Returns what an option saves: `alone`, in a step without other options; `cumulative`, added to all earlier
        options; `left_out`, what a step with all options loses if only this option is left out.
        """
        names = self.ablation.names
        index = names.index(name)
        earlier_names, later_names = names[:index], names[index + 1 :]
        return {
            "alone": self._sum_arm_seconds({(): 1, (name,): -1}),
            "cumulative": self._sum_arm_seconds({earlier_names: 1, (*earlier_names, name): -1}),
            "left_out": self._sum_arm_seconds({(*earlier_names, *later_names): 1, names: -1}),
        }

    def measure_interaction(self) -> Interval | None:
        """Returns how much more all options together save than the sum of what each saves alone."""
        names = self.ablation.names
        # For n options: (first - all) - sum(first - alone) = sum(alone) - all - (n - 1) * first.
        weight_by_arm: dict[tuple[str, ...], int] = {(name,): 1 for name in names}
        return self._sum_arm_seconds(weight_by_arm | {names: -1, (): 1 - len(names)})

    def measure_speedup(self, arm: AblatedArm) -> Interval | None:
        first_arm = self.ablation.arms[0]
        if not arm.is_timed or not first_arm.is_timed or arm is first_arm:
            return None
        return _resample_ratio(first_arm.rounds, arm.rounds)

    def _sum_arm_seconds(self, factors: Mapping[tuple[str, ...], int]) -> Interval | None:
        """Returns the weighted sum of the seconds of arms, or None if any arm is not timed. `factors` has the weight of
        each arm by its options.
        """
        point, resampled_sum, seconds_by_round = 0.0, np.zeros(1), np.zeros(1)
        for options, factor in factors.items():
            arm = self.ablation.find_arm(options)
            if not arm.is_timed:
                return None
            # Each resample draws the same rounds for all arms, so that the noise of a round cancels in the difference.
            case = resample_rounds(arm.rounds)
            point += factor * math.exp(case.point)
            resampled_sum = resampled_sum + factor * np.exp(case.resampled_values)
            seconds_by_round = seconds_by_round + factor * np.array(arm.rounds)
        return _make_resample_interval(point, resampled_sum, seconds_by_round)

    @property
    def floor(self) -> float | None:
        """The share of a step by which times may differ in these rounds, even if the code is identical."""
        first_arm = self.ablation.arms[0]
        if not self.ablation.control or not first_arm.is_timed:
            return None
        return _resample_ratio(self.ablation.control, first_arm.rounds).reach


def measure_arm_seconds(arm: AblatedArm) -> float | None:
    """Returns the mean of the fastest quarter of an arm's rounds."""
    return math.exp(resample_rounds(arm.rounds).point) if arm.rounds else None


@cache
def resample_rounds(rounds: tuple[float, ...]) -> ResampledLogSeconds:
    """Returns resampled times of complete steps of an arm. Arms with equally many rounds draw the same rounds."""
    return resample_best_case(np.array(rounds, dtype=np.float64)[:, None])


def _resample_ratio(above: tuple[float, ...], below: tuple[float, ...]) -> Interval:
    numerator, denominator = resample_rounds(above), resample_rounds(below)
    resampled_ratio: FloatArray = np.exp(numerator.resampled_values - denominator.resampled_values)
    return _make_resample_interval(
        math.exp(numerator.point - denominator.point), resampled_ratio, np.array(above) / np.array(below)
    )


def _make_resample_interval(point: float, resampled_values: FloatArray, values_by_round: FloatArray) -> Interval:
    """Returns the interval that holds the central 99% of the resamples. With too few rounds for reliable resamples,
    returns the range over rounds.
    """
    if has_few_rounds := len(values_by_round) < LEAST_ROUNDS:
        low, high = values_by_round.min(), values_by_round.max()
    else:
        low, high = np.quantile(resampled_values, _INTERVAL_QUANTILES)
    # All values may be below or above the point estimate, so extend the interval to include it.
    return Interval(
        point, min(float(low), point), max(float(high), point), 0.0 if has_few_rounds else _CONFIDENCE_LEVEL
    )


_LEGEND = (
    "saves: seconds of a step; below 0 it costs time; [low, high]: 99% interval of this run, or the range of rounds",
    "alone: only this option; then: added to the earlier options; left out: the loss if only this option is missing",
    "alone below left out: it needs another option; alone above left out: another option does the same work",
    "time: of a step, in the fastest quarter of the rounds; different batch sizes are scaled to as many tokens",
    "emulated: the results are right, but the times do not show speed, so no saving is computed from such an arm",
)


def render_page(ablation: Ablation) -> Page:
    title = f"ablation of {ablation.suite} on {ablation.device}"
    setting_text = f"{format_case_params(ablation.setting)} ({ablation.device_name})"
    parts = [
        Part("answer", "", tuple(Text(f"{sentence}.") for sentence in describe_results(ablation))),
        Part("options", "savings of each option per step", (_make_option_table(ablation),)),
        Part("arms", "arms, timed in the same rounds", (_make_arm_table(ablation), *_describe_labels(ablation))),
    ]
    if ablation.path:
        parts.append(Part("kept", "", (Text(f"stored in {ablation.path}"),)))
    return Page(title, setting_text, tuple(parts), _LEGEND)


def describe_results(ablation: Ablation) -> Iterator[str]:
    base_arm, full_arm = ablation.arms[0], ablation.find_arm(ablation.names)
    names = join_words(ablation.names)
    emulated_reason = "emulated, so its time says nothing about speed"
    # 1. A speed-up needs the times of the arms without options and with all options.
    if not base_arm.is_timed:
        yield f"speed is unknown: the step without options has no time ({base_arm.why or emulated_reason})"
        return
    if not full_arm.is_timed:
        yield f"{names} together have no speed: {full_arm.why or emulated_reason}"
        return
    # 2. Compare the speed-up of all options with the noise floor.
    ablation_savings = OptionSavings(ablation)
    speedup = ablation_savings.measure_speedup(full_arm)
    assert speedup is not None
    noise_factor = 1 + (ablation_savings.floor or 0.0)
    verdict = "not told apart"
    if speedup.low > noise_factor:
        verdict = "faster"
    elif speedup.high < 1 / noise_factor:
        verdict = "slower"
    yield f"{names} together: {verdict}, {_format_speedup(speedup)} of {ablation.reference}"
    # 3. Describe how the options interact.
    yield from _describe_option_interaction(ablation)
    if ablation_savings.floor is not None:
        too_few_rounds_text = f"; [low, high]: range of {len(full_arm.rounds)} rounds, too few for an interval"
        yield f"noise floor (A/A): +-{units.percent(ablation_savings.floor)}{too_few_rounds_text * (not speedup.level)}"


def _describe_option_interaction(ablation: Ablation) -> Iterator[str]:
    ablation_savings = OptionSavings(ablation)
    interaction = ablation_savings.measure_interaction()
    if interaction is None:
        return
    # An interval that contains 0 shows neither synergy nor overlap.
    if interaction.low <= 0 <= interaction.high:
        yield (
            "additive within these rounds: separate savings add up to the saving of all, except "
            f"{_format_saving(interaction)}"
        )
        return
    relation, comparison = ("they need one another", "less") if interaction.point > 0 else ("they overlap", "more")
    yield (
        f"{relation}: all together take {units.seconds(abs(interaction.point))} {comparison} than the separate savings "
        f"add up to {_format_saving_interval(interaction)}"
    )


def _make_option_table(ablation: Ablation) -> Element:
    savings_by_option = {name: OptionSavings(ablation).compute_option_savings(name) for name in ablation.names}
    columns: list[Col[str]] = [
        Col("option", str),
        Col("alone saves", lambda name: _format_saving(savings_by_option[name]["alone"]), number=True),
        Col("then saves", lambda name: _format_saving(savings_by_option[name]["cumulative"]), number=True),
        Col("left out loses", lambda name: _format_saving(savings_by_option[name]["left_out"]), number=True),
    ]
    return table("options", "", columns, ablation.names)


def _make_arm_table(ablation: Ablation) -> Element:
    columns: list[Col[AblatedArm]] = [
        Col("arm", lambda arm: " + ".join(arm.options) or f"none ({ablation.reference})"),
        Col(
            "time",
            lambda arm: "emulated " * (arm.level is Level.EMULATED) + units.seconds(measure_arm_seconds(arm)),
            number=True,
        ),
        Col("speed-up", lambda arm: _format_speedup(OptionSavings(ablation).measure_speedup(arm)), number=True),
        Col("memory", "memory", unit="B"),
        Col("energy", "joules", unit="J", when=any(arm.joules for arm in ablation.arms)),
        Col(ablation.error.replace("_", " "), "error", show=units.relative_error, when=bool(ablation.error)),
        Col("why", "why", below=True, when=any(arm.why for arm in ablation.arms)),
    ]
    return table("arms", "", columns, ablation.arms)


def _describe_labels(ablation: Ablation) -> Iterator[Text]:
    counts = Counter(chain.from_iterable(arm.labels for arm in ablation.arms))
    if counts:
        label_texts = (f"{label} ({count} of {len(ablation.arms)} arms)" for label, count in counts.items())
        yield Text(f"labels: {', '.join(label_texts)}", Tone.DOUBT)


def _format_saving(saved: Interval | None) -> str:
    return units.NONE if saved is None else f"{_format_seconds(saved.point)} {_format_saving_interval(saved)}"


def _format_seconds(seconds: float) -> str:
    return f"{'-' * (seconds < 0)}{units.seconds(abs(seconds))}"


def _format_saving_interval(saved: Interval) -> str:
    return f"[{_format_seconds(saved.low)}, {_format_seconds(saved.high)}]"


def _format_speedup(speed: Interval | None) -> str:
    if speed is None:
        return units.NONE
    low, high = units.format_significant_digits(speed.low), units.format_significant_digits(speed.high)
    return f"{units.speed_up(speed.point)} [{low}, {high}]"


def encode_ablation_result(ablation: Ablation) -> dict[str, Any]:
    ablation_savings = OptionSavings(ablation)
    savings_value = {
        "options": {name: encode(ablation_savings.compute_option_savings(name)) for name in ablation.names},
        "interaction": encode(ablation_savings.measure_interaction()),
        "floor": ablation_savings.floor,
    }
    return {**encode(ablation), "saved": savings_value, "sentences": list(describe_results(ablation))}


def list_rows(ablation: Ablation) -> PlainRows:
    speedups = [(arm, OptionSavings(ablation).measure_speedup(arm)) for arm in ablation.arms]
    rows = [
        {
            "arm": "+".join(arm.options),
            "options": len(arm.options),
            "level": arm.level.value,
            "seconds": measure_arm_seconds(arm),
            "speed_up": speedup and speedup.point,
            "low": speedup and speedup.low,
            "high": speedup and speedup.high,
            "memory": arm.memory,
            "joules": arm.joules,
            "error": arm.error,
            "labels": " ".join(arm.labels),
            "why": arm.why,
        }
        for arm, speedup in speedups
    ]
    return tuple(rows[0]), rows
