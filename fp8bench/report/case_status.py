"""How a case stands to its reference, and whether that may be read as a fact: one place that all reports ask.

Speed is the inverse of the time ratio: 2x is twice as fast. An emulated case has none, whatever is known of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import StrEnum

from fp8bench import units
from fp8bench.model import Interval, Label, Level, Status, Verdict
from fp8bench.report.elements import Tone
from fp8bench.report.panels import Result
from fp8bench.report.words.labels import LABELS


class Standing(StrEnum):
    """What became of a case. Only FASTER, SLOWER and SAME are facts; DOUBTED is one of them under a label."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    DOUBTED = "doubted"
    UNSURE = "unsure"
    REFERENCE = "reference"
    EMULATED = "emulated"
    UNTIMED = "untimed"
    SKIPPED = "skipped"
    FAILED = "failed"


# Whose reasons are sentences, the same for many cases: they have a place of their own.
_LONG = frozenset({Label.EAGER_QUANTISER, Label.ENERGY_UNRESOLVED, Label.REPLAY_PACE})
FACTS = {Verdict.FASTER: Standing.FASTER, Verdict.SLOWER: Standing.SLOWER, Verdict.SAME: Standing.SAME}
_TONES = {
    Standing.FASTER: Tone.GOOD,
    Standing.SLOWER: Tone.BAD,
    Standing.FAILED: Tone.BAD,
    Standing.SAME: Tone.PLAIN,
    Standing.REFERENCE: Tone.PLAIN,
}


def emulated(result: Result) -> bool:
    return result.record.support.level is Level.EMULATED


def cost_tone(result: Result) -> Tone:
    """Of a figure that is what emulating costs, and says nothing of the precision."""
    return Tone.DOUBT if emulated(result) else Tone.PLAIN


def standing(result: Result) -> Standing:
    """What may be said of a case, the gravest first."""
    if result.record.status is not Status.OK:
        return Standing.FAILED if result.record.status is Status.FAILED else Standing.SKIPPED
    if emulated(result):
        return Standing.EMULATED
    if result.record.is_reference:
        return Standing.REFERENCE
    finding = result.finding
    if finding is None or finding.verdict not in (*FACTS, Verdict.UNSURE):
        return Standing.UNTIMED
    if finding.verdict is Verdict.UNSURE:
        return Standing.UNSURE
    return Standing.DOUBTED if finding.doubtful else FACTS[finding.verdict]


def tone_of(result: Result) -> Tone:
    """Good and bad only without doubt; a failure is bad whatever was measured."""
    return _TONES.get(standing(result), Tone.DOUBT)


def speed_up(result: Result) -> Interval | None:
    """How many times as fast as its reference a case is, with the interval; None where nothing says so."""
    if standing(result) not in (Standing.FASTER, Standing.SLOWER, Standing.SAME, Standing.DOUBTED, Standing.UNSURE):
        return None
    return inverse(result.finding.ratio if result.finding else None)


def inverse(ratio: Interval | None) -> Interval | None:
    """The speed that goes with a ratio of times, if that is one."""
    return ratio.inverse if ratio is not None and 0 < ratio.point < math.inf else None


def show_speed_up(result: Result) -> str:
    return show_speed(speed_up(result))


def show_speed(speed: Interval | None) -> str:
    """'1.62x [1.60, 1.64]'; '' where there is none."""
    return f"{units.speed_up(speed.point)} {bounds(speed)}" if speed else ""


def bounds(speed: Interval) -> str:
    """'[1.60, 1.64]', '(1.5 to 1.7)' where it is the range of few rounds, or that there is no interval."""
    if math.isinf(speed.half_width) or not math.isfinite(speed.low):
        return "[no interval]"
    low, high = units.significant(speed.low), units.significant(speed.high)
    return f"[{low}, {high}]" if speed.level else f"({low} to {high})"


def what_intervals_hold(results: Iterable[Result]) -> str:
    """'99% of these rounds', '99% of reruns, by 12 earlier runs, hull of 3 sessions'; '' where there is no interval."""
    told = [result.record for result in results if (speed := speed_up(result)) is not None and speed.level]
    runs = [record.reruns.runs for record in told if record.reruns is not None]
    words = [f"99% of reruns, by {_range(runs)} earlier runs"] if runs else []
    words += ["99% of these rounds"] if len(runs) < len(told) else []
    sessions = [1 + len(record.sessions) for record in told if record.sessions]
    return " or ".join(words) + (f", hull of {_range(sessions)} sessions" if sessions else "")


def _range(numbers: Sequence[int]) -> str:
    return " to ".join(dict.fromkeys((units.whole(min(numbers)), units.whole(max(numbers)))))


def status_words(result: Result) -> str:
    """What became of a case, in a word or two: 'perhaps faster', 'FAILED', 'emulated'; '-' without a verdict."""
    found = standing(result)
    if found is Standing.FAILED:
        return "FAILED"
    if found is Standing.SKIPPED:
        refused = result.record.support.level is Level.REFUSED
        return Level.REFUSED.value if refused else found.value
    if found is Standing.EMULATED:  # whatever else is known of it: the time of an emulation is no speed
        return f"{Verdict.REFERENCE}, emulated" if result.record.is_reference else found.value
    if result.finding is None or result.finding.verdict is Verdict.NONE:
        return units.NONE
    return result.finding.verdict_words


def doubts(result: Result) -> tuple[str, ...]:
    labels = tuple(meaning(label, result) for label in result.labels if label.casts_doubt)
    why = result.finding.why if result.finding else ""
    return (*labels, why) if why else labels


def meaning(label: Label, result: Result) -> str:
    reason = result.reason(label)
    return f"{label}: {LABELS[label].meaning}{f' ({reason})' if reason else ''}"


def named_labels(result: Result) -> tuple[str, ...]:
    """'noisy', 'throttled (hw-thermal, sw-thermal)': as short as a table wants them."""
    return tuple(
        f"{label} ({reason})" if label not in _LONG and (reason := result.reason(label)) else label.value
        for label in result.labels
    )
