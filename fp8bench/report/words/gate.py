"""A judged figure in words: one sentence, and both looks at it in detail."""

from __future__ import annotations

from collections.abc import Iterator

from fp8bench import units
from fp8bench.analysis.gate.judging import Judged, Outcome
from fp8bench.model import Comparison
from fp8bench.report.words.comparisons import signed, value


def sentence(one: Judged) -> str:
    """'time: 1.20 ms -> 1.43 ms, +19.2% [+17.0%, +21.5%]: regression'."""
    found = one.comparison
    if one.outcome is Outcome.FAILED:
        return f"{found.metric}: {one.why or 'the case failed'}"
    return f"{found.metric}: {_both(found)}: {one.outcome.value}"


def detail(one: Judged) -> str:
    """Both looks, the threshold, and why it ended so; a line each."""
    return "\n".join(_lines(one))


def limit(one: Judged) -> str:
    """'5.0% and 5.00 us'."""
    threshold = one.threshold
    smallest = value(one.comparison, threshold.smallest) if threshold.smallest else ""
    return " and ".join(filter(None, (units.percent(threshold.relative), smallest)))


def _lines(one: Judged) -> Iterator[str]:
    yield one.comparison.case
    for name, look in (("first look", one.comparison), ("second look", one.again)):
        if look is not None and look.before is not None:
            yield f"{name}: {_both(look)}, {_evidence(look)}"
    if one.comparison.since or one.comparison.until:
        yield f"between {one.comparison.since[:12] or '?'} and {one.comparison.until[:12] or '?'}"
    yield f"worse is: more than {limit(one)}"
    if one.why:
        yield one.why


def _both(found: Comparison) -> str:
    values = f"{value(found, found.before)} -> {value(found, found.after)}"
    return values if found.ratio is None else f"{values}, {signed(found.ratio)}"


def _evidence(found: Comparison) -> str:
    chance = "" if found.p_value is None else f", p = {found.p_value:.1g}"
    labels = f" ({', '.join(found.labels)})" if found.labels else ""
    return f"{found.evidence.value}{labels}{chance}"
