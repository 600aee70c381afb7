"""How a case stands to its reference, and whether that may be read as a fact: one place that all reports ask.

Speed is the inverse of the time ratio: 2x is twice as fast. An emulated case has none, whatever is known of it.
"""

from __future__ import annotations

import math
from enum import StrEnum

from fp8bench.analysis.trust import casts_doubt, doubted
from fp8bench.model import Interval, Label, Level, Status, Verdict
from fp8bench.report import legend
from fp8bench.report.blocks import Result
from fp8bench.report.elements import Tone


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
_LONG = frozenset({Label.EAGER_QUANTISER, Label.ENERGY_UNRESOLVED})
_FACTS = {Verdict.FASTER: Standing.FASTER, Verdict.SLOWER: Standing.SLOWER, Verdict.SAME: Standing.SAME}
_TONES = {
    Standing.FASTER: Tone.GOOD,
    Standing.SLOWER: Tone.BAD,
    Standing.FAILED: Tone.BAD,
    Standing.SAME: Tone.PLAIN,
    Standing.REFERENCE: Tone.PLAIN,
}


def emulated(result: Result) -> bool:
    return result.record.support.level is Level.EMULATED


def standing(result: Result) -> Standing:
    """What may be said of a case, the gravest first."""
    if result.record.status is not Status.OK:
        return Standing.FAILED if result.record.status is Status.FAILED else Standing.SKIPPED
    if emulated(result):
        return Standing.EMULATED
    if result.record.is_reference:
        return Standing.REFERENCE
    finding = result.finding
    if finding is None or finding.verdict not in (*_FACTS, Verdict.UNSURE):
        return Standing.UNTIMED
    if finding.verdict is Verdict.UNSURE:
        return Standing.UNSURE
    return Standing.DOUBTED if doubted(finding) else _FACTS[finding.verdict]


def tone_of(result: Result) -> Tone:
    """Good and bad only without doubt; a failure is bad whatever was measured."""
    return _TONES.get(standing(result), Tone.DOUBT)


def speed_up(result: Result) -> Interval | None:
    """How many times as fast as its reference a case is, with the interval; None where nothing says so."""
    if standing(result) not in (Standing.FASTER, Standing.SLOWER, Standing.SAME, Standing.DOUBTED, Standing.UNSURE):
        return None
    ratio = result.finding.ratio if result.finding else None
    if ratio is None or not (math.isfinite(ratio.point) and ratio.point > 0):
        return None
    return Interval(1 / ratio.point, _inverse(ratio.high), _inverse(ratio.low), ratio.level)


def _inverse(bound: float) -> float:
    if math.isnan(bound):
        return bound
    return 1 / bound if bound > 0 else math.inf


def doubts(result: Result) -> tuple[str, ...]:
    """Why a case is not to be trusted, in words: its labels with what they mean, and why it has no verdict."""
    labels = tuple(meaning(label, result) for label in result.labels if casts_doubt(label))
    why = result.finding.why if result.finding else ""
    return (*labels, why) if why else labels


def meaning(label: Label, result: Result) -> str:
    """A label with its sentence, and what there is to say of this case."""
    reason = result.reason(label)
    return f"{label}: {legend.LABELS[label]}{f' ({reason})' if reason else ''}"


def named_labels(result: Result) -> tuple[str, ...]:
    """'noisy', 'throttled (hw-thermal, sw-thermal)': as short as a table wants them."""
    return tuple(
        f"{label} ({reason})" if label not in _LONG and (reason := result.reason(label)) else label.value
        for label in result.labels
    )
