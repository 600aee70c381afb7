"""How a case compares with its reference, and whether that is certain; all reports use this module.

Speed is the inverse of the time ratio: 2x is twice as fast. An emulated case has no speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum

from fp8bench import units
from fp8bench.model import Interval, Label, Level, Status, Verdict
from fp8bench.report.elements import Tone
from fp8bench.report.panels import Result, join_parts
from fp8bench.report.words.legend import LABELS


class Standing(StrEnum):
    """The status of a case. Only FASTER, SLOWER and SAME are facts; DOUBTED is one of these with a doubtful label."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    DOUBTED = "doubted"
    UNSURE = "cannot tell"
    REFERENCE = "reference"
    EMULATED = "emulated"
    UNTIMED = "untimed"
    SKIPPED = "skipped"
    FAILED = "failed"


# Labels whose reasons are long and the same for many cases, and are therefore reported elsewhere.
_LONG = frozenset({Label.EAGER_QUANTISER, Label.ENERGY_UNRESOLVED, Label.REPLAY_PACE})
# Statuses that are stated without a "perhaps".
FACTS = {Verdict.FASTER: Standing.FASTER, Verdict.SLOWER: Standing.SLOWER, Verdict.SAME: Standing.SAME}
# Other statuses are grey: they are doubtful, or not about speed.
_TONES = {
    Standing.FASTER: Tone.GOOD,
    Standing.SLOWER: Tone.BAD,
    Standing.FAILED: Tone.BAD,
    Standing.SAME: Tone.PLAIN,
    Standing.REFERENCE: Tone.PLAIN,
}


def cost_tone(result: Result) -> Tone:
    """Returns grey for figures of emulated cases, which are the cost of emulation."""
    if result.is_emulated:
        return Tone.DOUBT
    return Tone.PLAIN


def standing(result: Result) -> Standing:
    """Returns the most serious status that applies to a case."""
    if not result.is_ok:
        if result.record.status is Status.FAILED:
            return Standing.FAILED
        return Standing.SKIPPED
    if result.is_emulated:
        return Standing.EMULATED
    if result.is_reference:
        return Standing.REFERENCE
    finding = result.finding
    if finding is None or finding.verdict not in (*FACTS, Verdict.UNSURE):
        return Standing.UNTIMED
    if finding.verdict is Verdict.UNSURE:
        return Standing.UNSURE
    if finding.doubtful:
        return Standing.DOUBTED
    return FACTS[finding.verdict]


def tone_of(result: Result) -> Tone:
    """Returns good or bad only without doubt; a failure is always bad."""
    return _TONES.get(standing(result), Tone.DOUBT)


def speed_up(result: Result) -> Interval | None:
    """Returns how many times as fast as its reference a case is, with an interval; None if it has no speed."""
    if standing(result) not in (*FACTS.values(), Standing.DOUBTED, Standing.UNSURE):
        return None
    return inverse(result.finding.ratio if result.finding else None)


def inverse(ratio: Interval | None) -> Interval | None:
    """Returns the speed for a ratio of times; None if it is not a positive number."""
    if ratio is not None and 0 < ratio.point < math.inf:
        return ratio.inverse
    return None


def show_speed(speed: Interval | None) -> str:
    """Returns '1.62x [1.60, 1.64]'; '' for None."""
    if speed:
        return f"{units.speed_up(speed.point)} {bounds(speed)}"
    return ""


def bounds(speed: Interval) -> str:
    """Returns '[1.60, 1.64]', '(1.5 to 1.7)' for the range of few rounds, or '[no interval]'."""
    # Too few rounds have no interval, and some not even a range.
    if math.isinf(speed.half_width) or not math.isfinite(speed.low):
        return "[no interval]"
    low = units.significant(speed.low)
    high = units.significant(speed.high)
    if speed.level:
        return f"[{low}, {high}]"
    return f"({low} to {high})"


def describe_intervals(results: Iterable[Result]) -> str:
    """Returns what the intervals of some cases are: 'the 99% interval of this run', 'the 99% interval of any run, from
    12 earlier runs, over 3 sessions'; '' without intervals."""
    runs = []
    sessions = []
    of_rounds = False
    for result in results:
        speed = speed_up(result)
        record = result.record
        if speed is None:
            continue
        # Intervals that earlier runs widened cover more than this run's rounds.
        if speed.level and record.reruns is not None:
            runs.append(record.reruns.runs)
        elif speed.level:
            of_rounds = True
        if record.sessions:
            sessions.append(1 + len(record.sessions))
    words = join_parts(
        f"of any run, from {units.span(runs, '{:.0f}'.format)} earlier runs" if runs else "",
        "of this run" if of_rounds else "",
        by=", else ",
    )
    if words:
        words = f"the 99% interval {words}"
    return join_parts(words, f"over {units.span(sessions, '{:.0f}'.format)} sessions" if sessions else "")


def status_words(result: Result) -> str:
    """Returns the status of a case: 'perhaps faster', 'FAILED', 'emulated'; '-' without a verdict."""
    status = standing(result)
    if status is Standing.FAILED:
        return "FAILED"
    if status is Standing.SKIPPED:
        is_refused = result.record.support.level is Level.REFUSED
        if is_refused:
            return Level.REFUSED.value
        return status.value
    if status is Standing.EMULATED:
        if result.is_reference:
            return f"{Verdict.REFERENCE}, emulated"
        return status.value
    # A case without samples, or whose reference was not measured.
    if result.finding is None or result.finding.verdict is Verdict.NONE:
        return units.NONE
    return result.finding.verdict_words


def doubts(result: Result) -> tuple[str, ...]:
    """Returns labels with their meanings, then the reason for the verdict."""
    words = []
    for label in result.labels:
        if label.casts_doubt:
            reason = result.reason(label)
            words.append(f"{label}: {LABELS[label].meaning}{f' ({reason})' if reason else ''}")
    if result.finding and result.finding.why:
        words.append(result.finding.why)
    return tuple(words)


def named_labels(result: Result) -> list[str]:
    """Returns labels with short reasons: 'noisy', 'throttled (hw-thermal)'; without those that withdrew the verdict."""
    hard = result.finding.hard if result.finding else ()
    words = []
    for label in result.labels:
        if label in hard:
            continue
        reason = "" if label in _LONG else result.reason(label)
        words.append(f"{label} ({reason})" if reason else label.value)
    return words
