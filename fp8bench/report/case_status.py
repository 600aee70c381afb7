"""How a case compares with its reference, and whether that may be stated as a fact: all reports ask here.

Speed is the inverse of the time ratio: 2x is twice as fast. An emulated case has no speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import StrEnum

from fp8bench import units
from fp8bench.model import Interval, Label, Level, Status, Verdict
from fp8bench.report.elements import Tone
from fp8bench.report.panels import Result
from fp8bench.report.words.legend import LABELS


class Standing(StrEnum):
    """What became of a case. Only FASTER, SLOWER and SAME are facts; DOUBTED is one of these under a label."""

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


# Labels whose reasons are long and the same for many cases: they are told elsewhere.
_LONG = frozenset({Label.EAGER_QUANTISER, Label.ENERGY_UNRESOLVED, Label.REPLAY_PACE})
FACTS = {Verdict.FASTER: Standing.FASTER, Verdict.SLOWER: Standing.SLOWER, Verdict.SAME: Standing.SAME}
_TONES = {
    Standing.FASTER: Tone.GOOD,
    Standing.SLOWER: Tone.BAD,
    Standing.FAILED: Tone.BAD,
    Standing.SAME: Tone.PLAIN,
    Standing.REFERENCE: Tone.PLAIN,
}


def is_emulated(result: Result) -> bool:
    return result.record.support.is_emulated


def cost_tone(result: Result) -> Tone:
    """Grey for figures of emulated cases, which are the cost of emulation."""
    return Tone.DOUBT if is_emulated(result) else Tone.PLAIN


def standing(result: Result) -> Standing:
    """The gravest thing that may be said of a case."""
    if not result.record.is_ok:
        return Standing.FAILED if result.record.status is Status.FAILED else Standing.SKIPPED
    if is_emulated(result):
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
    """Good and bad only without doubt; a failure is always bad."""
    return _TONES.get(standing(result), Tone.DOUBT)


def speed_up(result: Result) -> Interval | None:
    """How many times as fast as its reference a case is, with the interval; None if it has no speed."""
    if standing(result) not in (Standing.FASTER, Standing.SLOWER, Standing.SAME, Standing.DOUBTED, Standing.UNSURE):
        return None
    return inverse(result.finding.ratio if result.finding else None)


def inverse(ratio: Interval | None) -> Interval | None:
    """The speed for a ratio of times; None if it is no positive number."""
    return ratio.inverse if ratio is not None and 0 < ratio.point < math.inf else None


def show_speed_up(result: Result) -> str:
    return show_speed(speed_up(result))


def show_speed(speed: Interval | None) -> str:
    """'1.62x [1.60, 1.64]'; '' for None."""
    return f"{units.speed_up(speed.point)} {bounds(speed)}" if speed else ""


def bounds(speed: Interval) -> str:
    """'[1.60, 1.64]', '(1.5 to 1.7)' for the range of few rounds, or '[no interval]'."""
    if math.isinf(speed.half_width) or not math.isfinite(speed.low):
        return "[no interval]"
    low, high = units.significant(speed.low), units.significant(speed.high)
    return f"[{low}, {high}]" if speed.level else f"({low} to {high})"


def what_intervals_hold(results: Iterable[Result]) -> str:
    """'99% of these rounds', '99% of reruns, by 12 earlier runs, hull of 3 sessions'; '' without intervals."""
    known = [(result.record, speed) for result in results if (speed := speed_up(result)) is not None]
    told = [record for record, speed in known if speed.level]
    runs = [record.reruns.runs for record in told if record.reruns is not None]
    words = [f"99% of reruns, by {_range(runs)} earlier runs"] if runs else []
    words += ["99% of these rounds"] if len(runs) < len(told) else []
    sessions = [1 + len(record.sessions) for record, _ in known if record.sessions]
    hull = [f"hull of {_range(sessions)} sessions"] if sessions else []
    return ", ".join(filter(None, (" or ".join(words), *hull)))


def _range(numbers: Sequence[int]) -> str:
    return " to ".join(dict.fromkeys((units.whole(min(numbers)), units.whole(max(numbers)))))


def status_words(result: Result) -> str:
    """What became of a case: 'perhaps faster', 'FAILED', 'emulated'; '-' without a verdict."""
    status = standing(result)
    if status is Standing.FAILED:
        return "FAILED"
    if status is Standing.SKIPPED:
        refused = result.record.support.level is Level.REFUSED
        return Level.REFUSED.value if refused else status.value
    if status is Standing.EMULATED:
        return f"{Verdict.REFERENCE}, emulated" if result.record.is_reference else status.value
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
    """Labels with their short reasons: 'noisy', 'throttled (hw-thermal, sw-thermal)'."""
    return tuple(
        f"{label} ({reason})" if label not in _LONG and (reason := result.reason(label)) else label.value
        for label in result.labels
    )
