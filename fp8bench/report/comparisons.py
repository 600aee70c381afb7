"""A comparison of two sides: as a page, and for programs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from fp8bench import units
from fp8bench.analysis.compare.compare import Compared
from fp8bench.analysis.compare.interval import ALONE, LEAST_FREEDOM
from fp8bench.analysis.compare.sides import Side
from fp8bench.analysis.verdicts import FINAL_LEVEL, SAME
from fp8bench.model import Comparison, Direction, Evidence, Interval, Label
from fp8bench.model.codec import encode
from fp8bench.model.specs import BAND, COUNTS, TIME, spec_of
from fp8bench.report.columns import Col, Cols, table
from fp8bench.report.data.plain import Rows
from fp8bench.report.elements import Element, Elements, Items, Page, Part, Text, Texts, Tone
from fp8bench.report.terminal.layout import list_of
from fp8bench.report.words.legend import explain_label
from fp8bench.report.words.naming import many

TONES = {
    Direction.BETTER: Tone.GOOD,
    Direction.WORSE: Tone.BAD,
    Direction.UNSURE: Tone.DOUBT,
    Direction.DIFFERS: Tone.DOUBT,
}
# These have a verdict; all other figures are listed if they changed.
TIMES = frozenset({"time", "relative_time"})
# The CSV has all of them.
_MOST_CASES = 20
_HOW_CHANGE = (
    "change: of the figure from A to B; less is better everywhere; [low, high]: "
    f"{units.percent(FINAL_LEVEL, 0)} interval, which includes the spread between runs"
)
_HOW_TIME = (
    "time: the best case of a step, from equally many rounds on both sides; relative_time: the same over the "
    "reference's time in the same rounds, so the speed of the machine does not matter"
)
_HOW_VERDICT = (
    f"verdict: better or worse if the interval excludes 0 and the change is beyond {units.percent(BAND, 0)} "
    f"({units.percent(ALONE, 0)} where there are fewer than {LEAST_FREEDOM + 2} runs in all), same if it lies within "
    f"+-{units.percent(SAME, 0)}, else cannot tell; differs if the sides were measured under different conditions"
)
COLUMNS = (
    "case",
    "suite",
    "metric",
    "unit",
    "direction",
    "evidence",
    "before",
    "after",
    "ratio",
    "low",
    "high",
    "level",
    "p_value",
    "labels",
    "why",
    "failed",
)


def value(comparison: Comparison, number: float | None) -> str:
    return spec_of(comparison.metric).to_text(number, comparison.unit)


def show_change(interval: Interval | None) -> str:
    """Returns the change of a figure as '+4.3% [+2.1%, +6.6%]'; without the interval if that is a point."""
    if interval is None:
        return units.NONE
    if interval.low == interval.high:
        return units.change(interval.point)
    # One run on either side has no spread, so no interval.
    if math.isinf(interval.high):
        return f"{units.change(interval.point)} [no interval]"
    return f"{units.change(interval.point)} [{units.change(interval.low)}, {units.change(interval.high)}]"


def direction(comparison: Comparison) -> str:
    """'worse', 'failed', '-'."""
    if comparison.failed:
        return "FAILED"
    if comparison.direction is Direction.NONE:
        return units.NONE
    return comparison.direction.value


def setting_of(case: str) -> tuple[str, str]:
    """Splits a case id: 'gemm[m=512]@cpu' and 'bf16', the part shared with its neighbours and the mode."""
    # The mode follows the device or, without parameters, the last slash.
    device = case.rfind("]@")  # parameters and callables may be paths, which have slashes too
    end = case.find("/", device) if device >= 0 else case.rfind("/")
    return case[: max(end, 0)], case[end + 1 :]


def count_directions(comparisons: Iterable[Comparison]) -> str:
    """'12 figures: 1 worse, 2 better, 9 same'."""
    counts = Counter(map(direction, comparisons))
    total = counts.total()
    if not total:
        return "no figures"
    parts = [f"{counts['FAILED']} failed"] if counts["FAILED"] else []
    parts += [f"{counts[word]} {word}" for word in Direction if counts[word] and word is not Direction.NONE]
    if counts[units.NONE]:
        parts.append(f"{counts[units.NONE]} without a ratio")
    return f"{total} figure{'s' * (total != 1)}: {', '.join(parts)}"


def label_legend(comparisons: Iterable[Comparison]) -> list[str]:
    labels = set().union(*(comparison.labels for comparison in comparisons))
    return [explain_label(label) for label in Label if label.value in labels]


def page_of(compared: Compared, everything: bool = False) -> Page:
    comparisons = compared.comparisons
    # 1. Show the counts, why times are not judged, and a row for each figure that may matter.
    shown = [
        comparison
        for comparison in comparisons
        if everything or comparison.metric in TIMES or comparison.direction is not Direction.SAME
    ]
    counts = count_directions(comparisons)
    if len(shown) < len(comparisons):
        hidden = len(comparisons) - len(shown)
        counts += f"; {hidden} of them, memory, errors and counts that are the same on both sides, are not listed"
    elements: list[Element] = [Text(counts, Tone.STRONG), *_differing(compared)]
    if shown:
        elements += _table(shown)
    parts = [Part("sides", *_sides(compared)), Part("comparison", "", tuple(elements))]
    # 2. List uncertain figures, and those of one side only.
    unsure = [comparison for comparison in comparisons if comparison.direction is Direction.UNSURE]
    reasons = Counter(comparison.why for comparison in unsure if comparison.why)
    lists = {
        "cannot tell, because": [f"{reason} ({count})" for reason, count in reasons.items()],
        "only in A": list(compared.only_before),
        "only in B": list(compared.only_after),
    }
    for title, lines in lists.items():
        if len(lines) > _MOST_CASES:
            lines[_MOST_CASES:] = [f"and {len(lines) - _MOST_CASES} more"]
        parts += list_of(title.replace(" ", "-"), title, lines)
    # 3. How to read it.
    legend: list[str] = []
    if any(comparison.ratio is not None and comparison.evidence is Evidence.CROSS_RUN for comparison in comparisons):
        legend += (_HOW_CHANGE, _HOW_TIME, _HOW_VERDICT)
    legend += label_legend(comparisons)
    facts = (("A", side_words(compared.before)), ("B", side_words(compared.after)))
    return Page("B against A", "", tuple(parts), legend, facts)


def _differing(compared: Compared) -> Texts:
    """Returns why times are not judged, with the range of the ratios."""
    differing = [comparison for comparison in compared.comparisons if comparison.direction is Direction.DIFFERS]
    ratios = [comparison.ratio.point for comparison in differing if comparison.metric == TIME and comparison.ratio]
    if differing:
        span = f": B takes {units.span(ratios, units.ratio)} of A's time" if ratios else ""
        words = f"times differ, which is not a regression{span}. Different conditions: {compared.conditions}. "
        yield Text(f"{words}Measure both sides under the same conditions, or use `fp8bench duel`.", Tone.STRONG)


def side_words(side: Side) -> str:
    """'HEAD: commit 0a1b2c3d, 3 runs (5f6a7b8c, ...)'."""
    commits: dict[str, None] = {}
    for run in side.runs:
        commit = run.environment.get("commit")
        words = "of no commit"
        if isinstance(commit, str):
            is_clean = run.environment.get("dirty") is False
            words = f"commit {commit[:8]}{'' if is_clean else ' with other changes'}"
        commits[words] = None
    ids = [run.id for run in side.runs]
    shown = ", ".join(ids[:4]) + (f" and {len(ids) - 4} more" if len(ids) > 4 else "")
    num_unfinished = sum(not run.finished for run in side.runs)
    unfinished = f"; {num_unfinished} of them unfinished" if num_unfinished else ""
    return f"{side.name}: {' and '.join(commits)}, {many(len(ids), 'run')} ({shown}){unfinished}"


def _sides(compared: Compared) -> tuple[str, tuple[Element, ...]]:
    if not compared.differing:
        return "", (Text("measured on the same machine, with the same software and settings"),)
    lines = (f"{fact.name}: {fact.before:.60} -> {fact.after:.60}" for fact in compared.differing)
    return "what differs between the sides, apart from the commit", (Items(tuple(map(Text, lines))),)


def _table(comparisons: Sequence[Comparison]) -> Elements:
    """Yields a row for each figure; labels that all times share are listed once."""
    # A label of all times describes the machine, not a case.
    labels = [times.labels for times in comparisons if times.metric in TIMES and times.ratio is not None]
    shared = [label for label in labels[0] if label in set(labels[0]).intersection(*labels)] if labels else []
    if shared:
        yield Text(f"all times: {', '.join(shared)}")

    def tone(comparison: Comparison) -> Tone:
        if comparison.failed:
            return Tone.BAD
        return TONES.get(comparison.direction, Tone.PLAIN)

    def reason(comparison: Comparison) -> str:
        has_reason = comparison.direction is Direction.NONE or comparison.metric in COUNTS
        return comparison.why if has_reason else ""

    def other_labels(comparison: Comparison) -> str | None:
        return ", ".join(label for label in comparison.labels if label not in shared) or None

    cols: Cols[Comparison] = [
        Col("setting", lambda comparison: setting_of(comparison.case)[0], shared=True),
        Col("figure", lambda comparison: f"{setting_of(comparison.case)[1]} {comparison.metric}"),
        Col("A", lambda comparison: value(comparison, comparison.before), number=True),
        Col("B", lambda comparison: value(comparison, comparison.after), number=True),
        Col("change", lambda comparison: show_change(comparison.ratio)),
        Col("verdict", direction, tone=tone),
        Col("why", reason, below=True),
        Col("labels", other_labels, when=any(map(other_labels, comparisons))),
    ]
    yield table("comparisons", "", cols, comparisons)


def value_of(compared: Compared) -> dict[str, Any]:
    return {
        "a": _side_value(compared.before),
        "b": _side_value(compared.after),
        "differing": encode(compared.differing),
        "comparisons": encode(compared.comparisons),
        "only_a": list(compared.only_before),
        "only_b": list(compared.only_after),
    }


def _side_value(side: Side) -> dict[str, Any]:
    runs = [{"id": run.id, "started": run.started, "commit": run.environment.get("commit")} for run in side.runs]
    return {"name": side.name, "runs": runs}


def rows_of(comparisons: Iterable[Comparison]) -> Rows:
    return COLUMNS, map(_row, comparisons)


def _row(comparison: Comparison) -> dict[str, Any]:
    row: dict[str, Any] = encode(comparison)
    ratio = row["ratio"] or {}
    row |= ratio
    row["ratio"] = ratio.get("point")
    row["labels"] = " ".join(comparison.labels)
    row["failed"] = "yes" if comparison.failed else "no"
    return row
