"""Judges how a case compares with its reference, and whether this is certain. All reports use this module.

A speed is the inverse of the ratio of times: 2x is twice as fast. An emulated case has no speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

from fp8bench import units
from fp8bench.model import Interval, Label, Level, Reruns, Status, Verdict
from fp8bench.report.elements import Tone
from fp8bench.report.panels import CaseValue, Result, join_parts
from fp8bench.report.words.legend import WORDS_BY_LABEL


class CaseStatus(StrEnum):
    """The status of a case. FASTER, SLOWER and SAME are certain. If a label casts doubt on one of these, the status
    is DOUBTED instead.
    """

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


# The reasons of these labels are left out here. They are long and equal for many cases, so other parts of the report
# show them once.
_LABELS_WITH_LONG_REASONS = frozenset({Label.EAGER_QUANTISER, Label.ENERGY_UNRESOLVED, Label.REPLAY_PACE})
# The status of a case by its verdict, unless a label casts doubt on the verdict.
_STATUS_BY_VERDICT = {
    Verdict.FASTER: CaseStatus.FASTER,
    Verdict.SLOWER: CaseStatus.SLOWER,
    Verdict.SAME: CaseStatus.SAME,
    Verdict.UNSURE: CaseStatus.UNSURE,
}
# The tone of a status. Other statuses are grey, because they are doubtful or not about speed.
_TONE_BY_CASE_STATUS = {
    CaseStatus.FASTER: Tone.GOOD,
    CaseStatus.SLOWER: Tone.BAD,
    CaseStatus.FAILED: Tone.BAD,
    CaseStatus.SAME: Tone.PLAIN,
    CaseStatus.REFERENCE: Tone.PLAIN,
}


def choose_cost_tone(result: Result) -> Tone:
    """Returns the tone of the figures of a case's time and memory. It is grey for an emulated case, because these are
    the cost of emulation.
    """
    return Tone.DOUBT if result.is_emulated else Tone.PLAIN


def choose_row_cost_tone(row: CaseValue[Any]) -> Tone:
    return choose_cost_tone(row.case)


def find_case_status(result: Result) -> CaseStatus:
    """Returns the status of a case, such as failed, emulated, or a verdict."""
    if not result.is_ok:
        return CaseStatus.FAILED if result.record.status is Status.FAILED else CaseStatus.SKIPPED
    if result.is_emulated:
        return CaseStatus.EMULATED
    if result.is_reference:
        return CaseStatus.REFERENCE
    finding = result.finding
    if finding.is_judged and finding.doubtful:
        return CaseStatus.DOUBTED
    return _STATUS_BY_VERDICT.get(finding.verdict, CaseStatus.UNTIMED)


def status_tone(result: Result) -> Tone:
    """Returns the tone of a case's status. It is green or red only if the verdict is certain, but a failure is always
    red.
    """
    return _TONE_BY_CASE_STATUS.get(find_case_status(result), Tone.DOUBT)


def speed_up(result: Result) -> Interval | None:
    """Returns how many times as fast as its reference a case is, with an interval. Returns None if the case has no
    speed.
    """
    if find_case_status(result) in (*_STATUS_BY_VERDICT.values(), CaseStatus.DOUBTED):
        return invert_ratio(result.finding.ratio)
    return None


def list_speeds(results: Iterable[Result]) -> list[Interval]:
    return [speed for result in results if (speed := speed_up(result)) is not None]


def invert_ratio(ratio: Interval | None) -> Interval | None:
    """Returns the speed that belongs to a ratio of times. Returns None unless the ratio is positive and finite."""
    return ratio.inverse if ratio is not None and 0 < ratio.point < math.inf else None


def show_speed(speed: Interval | None) -> str:
    """Returns a speed with its interval as '1.62x [1.60, 1.64]', or '' for None."""
    return f"{units.speed_up(speed.point)} {show_bounds(speed)}" if speed else ""


def has_finite_bounds(speed: Interval) -> bool:
    """Returns whether the bounds of a speed are known. One or two rounds may not even have a range."""
    return math.isfinite(speed.low) and math.isfinite(speed.half_width)


def show_bounds(speed: Interval) -> str:
    """Returns the bounds of a speed: '[1.60, 1.64]' for an interval, '(1.5 to 1.7)' for the range of a few rounds,
    otherwise '[no interval]'.
    """
    if not has_finite_bounds(speed):
        return "[no interval]"
    low, high = map(units.format_significant_digits, (speed.low, speed.high))
    return f"[{low}, {high}]" if speed.level else f"({low} to {high})"


def describe_intervals(results: Iterable[Result]) -> str:
    """Describes where the confidence intervals of speeds come from, as 'the 99% interval of this run, over 3 sessions'.
    Returns '' if no result has an interval.
    """
    reruns = []
    session_counts = []
    has_interval_of_rounds = False
    for result in results:
        speed = speed_up(result)
        if speed is None:
            continue
        # An interval that earlier runs have widened also covers the differences between runs.
        if speed.level and result.record.reruns is not None:
            reruns.append(result.record.reruns)
        elif speed.level:
            has_interval_of_rounds = True
        if result.record.sessions:
            # The current session and the earlier ones.
            session_counts.append(1 + len(result.record.sessions))
    interval_sources = join_parts(
        f"of any run, from {_describe_earlier_runs(reruns)}" if reruns else "",
        "of this run" if has_interval_of_rounds else "",
        separator=", else ",
    )
    return join_parts(
        f"the 99% interval {interval_sources}" if interval_sources else "",
        f"over {units.span(session_counts, str)} sessions" if session_counts else "",
    )


def _describe_earlier_runs(reruns: Sequence[Reruns]) -> str:
    """Describes the earlier runs whose differences widened the intervals, as '3 earlier runs of the same case and
    commit, and of other cases'.
    """
    same_case_run_counts = [rerun.own_runs for rerun in reruns if rerun.own_runs is not None]
    # Files of older fp8bench versions do not distinguish runs of the same case from other runs.
    if len(same_case_run_counts) < len(reruns):
        return f"{units.span((rerun.runs for rerun in reruns), str)} earlier runs"
    if not any(same_case_run_counts):
        return "earlier runs of other cases"
    run_noun = "runs" if max(same_case_run_counts) > 1 else "run"
    return f"{units.span(same_case_run_counts, str)} earlier {run_noun} of the same case and commit, and of other cases"


def describe_case_status(result: Result) -> str:
    """Returns the status of a case, as 'perhaps faster', 'FAILED' or 'emulated'. Returns '-' without a verdict."""
    status = find_case_status(result)
    if status is CaseStatus.FAILED:
        return "FAILED"
    if status is CaseStatus.SKIPPED and result.record.support.level is Level.REFUSED:
        return Level.REFUSED.value
    if status is CaseStatus.EMULATED and result.is_reference:
        return f"{Verdict.REFERENCE}, emulated"
    if status in (CaseStatus.SKIPPED, CaseStatus.EMULATED):
        return status.value
    # Without samples, or if its reference was not measured, a case has no verdict.
    return units.NONE if result.finding.verdict is Verdict.NONE else result.finding.verdict_words


def describe_case_doubts(result: Result) -> tuple[str, ...]:
    """Returns the meaning of each label that casts doubt on a case, followed by the reason for the verdict."""
    sentences = [
        f"{label}: {WORDS_BY_LABEL[label].meaning}" + (f" ({reason})" if (reason := result.reason(label)) else "")
        for label in result.labels
        if label.casts_doubt
    ]
    return tuple(filter(None, (*sentences, result.finding.why)))


def describe_labels(result: Result) -> list[str]:
    """Returns the labels of a case with short reasons, as 'noisy' or 'throttled (hw-thermal)'.

    Labels that prevent a verdict are left out, because the reason for the missing verdict names them.
    """
    descriptions = []
    for label in result.labels:
        if label in result.finding.hard:
            continue
        reason = "" if label in _LABELS_WITH_LONG_REASONS else result.reason(label)
        descriptions.append(f"{label} ({reason})" if reason else label.value)
    return descriptions
