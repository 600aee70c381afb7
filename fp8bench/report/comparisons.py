"""A comparison of two sides: as a page, and for programs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fp8bench import units
from fp8bench.analysis.compare.compare import Compared
from fp8bench.analysis.compare.interval import ALONE, LEAST_FREEDOM
from fp8bench.analysis.compare.sides import Side
from fp8bench.analysis.verdicts import FINAL_LEVEL, SAME
from fp8bench.model import Comparison, Direction, Evidence, Interval, Label
from fp8bench.model.codec import encode
from fp8bench.model.specs import BAND, COUNTS, TIME, spec_of
from fp8bench.report.columns import Col, table
from fp8bench.report.data.plain import Rows
from fp8bench.report.elements import Element, Items, Page, Part, Text, Tone
from fp8bench.report.terminal.layout import list_of
from fp8bench.report.words.legend import explain_label
from fp8bench.report.words.naming import many

TONES = {
    Direction.BETTER: Tone.GOOD,
    Direction.WORSE: Tone.BAD,
    Direction.UNSURE: Tone.DOUBT,
    Direction.DIFFERS: Tone.DOUBT,
}
TIMES = frozenset({"time", "relative_time"})
_MOST_CASES = 20
_HOW_CHANGE = (
    "change: from A to B, of the figure itself; less is better everywhere; [low, high]: "
    f"{units.percent(FINAL_LEVEL, 0)} interval, with the spread between runs in it"
)
_HOW_TIME = (
    "time: the best case of a step, by as many rounds on both sides; relative_time: over the reference's time in the "
    "same rounds, so that it does not tell how fast the machine was"
)
_HOW_VERDICT = (
    f"verdict: better or worse if the interval excludes 0 and the change is beyond {units.percent(BAND, 0)} "
    f"({units.percent(ALONE, 0)} where there are fewer than {LEAST_FREEDOM + 2} runs in all), same if it lies within "
    f"+-{units.percent(SAME, 0)}, else unsure; differs where the sides were measured under other conditions"
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
    return spec_of(comparison.metric).shown(number, comparison.unit)


def show_change(interval: Interval | None) -> str:
    """'+4.3% [+2.1%, +6.6%]', the change of the figure; without the interval if that is a point."""
    if interval is None:
        return units.NONE
    if interval.low == interval.high:
        return units.change(interval.point)
    if math.isinf(interval.high):
        return f"{units.change(interval.point)} [no interval]"
    return f"{units.change(interval.point)} [{units.change(interval.low)}, {units.change(interval.high)}]"


def direction(comparison: Comparison) -> str:
    """'worse', 'failed', '-'."""
    if comparison.failed:
        return "FAILED"
    return units.NONE if comparison.direction is Direction.NONE else comparison.direction.value


def setting_of(case: str) -> tuple[str, str]:
    """What a case shares with its neighbours, and its mode: 'gemm[m=512]@cpu' and 'bf16'."""
    device = case.rfind("]@")  # parameters and callables may be paths, which have slashes too
    end = case.find("/", device) if device >= 0 else case.rfind("/")
    return case[: max(end, 0)], case[end + 1 :]


def count_directions(comparisons: Iterable[Comparison]) -> str:
    """'12 figures: 1 worse, 2 better, 9 same'."""
    counts = Counter(direction(comparison) for comparison in comparisons)
    words = {"FAILED": "failed", units.NONE: "without a ratio"}
    order = ["FAILED", *(way.value for way in Direction if way is not Direction.NONE), units.NONE]
    parts = [f"{counts[name]} {words.get(name, name)}" for name in order if counts[name]]
    total = sum(counts.values())
    return f"{total} figure{'s' * (total != 1)}: {', '.join(parts)}" if total else "no figures"


def label_legend(comparisons: Iterable[Comparison]) -> list[str]:
    used = {label for comparison in comparisons for label in comparison.labels}
    return [explain_label(label) for label in Label if label.value in used]


def page_of(compared: Compared, everything: bool = False) -> Page:
    comparisons = compared.comparisons
    shown = [
        comparison
        for comparison in comparisons
        if everything or comparison.metric in TIMES or comparison.direction is not Direction.SAME
    ]
    hidden = len(comparisons) - len(shown)
    left_out = f"; {hidden} of them, memory, errors and counts that are the same on both sides, are not listed"
    counts = Text(count_directions(comparisons) + left_out * bool(hidden), Tone.STRONG)
    cases: list[Element] = [counts, *_differing(compared), *(_table(shown) if shown else ())]
    unsure = Counter(
        comparison.why for comparison in comparisons if comparison.direction is Direction.UNSURE and comparison.why
    )
    whys = tuple(f"{why} ({count})" for why, count in unsure.items())
    parts = [Part("sides", *_sides(compared)), Part("comparison", "", tuple(cases))]
    lists = {"unsure, because": whys, "only in A": compared.only_before, "only in B": compared.only_after}
    for title, words in lists.items():
        more = [f"and {len(words) - _MOST_CASES} more"] if len(words) > _MOST_CASES else []
        parts += list_of(title.replace(" ", "-"), title, [*words[:_MOST_CASES], *more])
    timed = any(
        comparison.ratio is not None and comparison.evidence is Evidence.CROSS_RUN for comparison in comparisons
    )
    legend = [*((_HOW_CHANGE, _HOW_TIME, _HOW_VERDICT) if timed else ()), *label_legend(comparisons)]
    facts = (("A", side_words(compared.before)), ("B", side_words(compared.after)))
    return Page("B against A", "", tuple(parts), legend, facts)


def _differing(compared: Compared) -> Iterator[Text]:
    """Says why no time is judged, with the range of the ratios."""
    differing = [comparison for comparison in compared.comparisons if comparison.direction is Direction.DIFFERS]
    ratios = [comparison.ratio.point for comparison in differing if comparison.metric == TIME and comparison.ratio]
    if differing:
        told = f": B takes {units.span(ratios, units.ratio)} of A's time" if ratios else ""
        words = f"times differ, which is no regression{told}. Other conditions: {compared.conditions}. "
        yield Text(f"{words}Measure both sides alike, or duel.", Tone.STRONG)


def side_words(side: Side) -> str:
    """'HEAD: commit 0a1b2c3d, 3 runs (5f6a7b8c, ...)'."""
    known = ((run.environment.get("commit"), run.environment.get("dirty")) for run in side.runs)
    commits = dict.fromkeys(
        f"commit {commit[:8]}{'' if dirty is False else ' with other changes'}"
        if isinstance(commit, str)
        else "of no commit"
        for commit, dirty in known
    )
    ids = [run.id for run in side.runs]
    shown = ", ".join(ids[:4]) + (f" and {len(ids) - 4} more" if len(ids) > 4 else "")
    unfinished = sum(not run.finished for run in side.runs)
    cut = f"; {unfinished} of them unfinished" if unfinished else ""
    return f"{side.name}: {' and '.join(commits)}, {many(len(ids), 'run')} ({shown}){cut}"


def _sides(compared: Compared) -> tuple[str, tuple[Element, ...]]:
    if not compared.differing:
        return "", (Text("measured on the same machine, with the same software and settings"),)
    lines = (f"{fact.name}: {fact.before:.60} -> {fact.after:.60}" for fact in compared.differing)
    return "what differs between the sides, beside the commit", (Items(tuple(map(Text, lines))),)


def _table(shown: Sequence[Comparison]) -> Iterator[Element]:
    """A row for each figure; labels that all times have are said once."""
    labels = [comparison.labels for comparison in shown if comparison.metric in TIMES and comparison.ratio is not None]
    shared = tuple(label for label in (labels[0] if labels else ()) if all(label in own for own in labels))
    if shared:
        yield Text(f"all times: {', '.join(shared)}")
    cols: list[Col[Comparison]] = [
        Col("setting", lambda comparison: setting_of(comparison.case)[0], shared=True),
        Col("figure", lambda comparison: f"{setting_of(comparison.case)[1]} {comparison.metric}"),
        Col("A", lambda comparison: value(comparison, comparison.before), number=True),
        Col("B", lambda comparison: value(comparison, comparison.after), number=True),
        Col("change", lambda comparison: show_change(comparison.ratio)),
        Col(
            "verdict",
            direction,
            tone=lambda comparison: Tone.BAD if comparison.failed else TONES.get(comparison.direction, Tone.PLAIN),
        ),
        Col(
            "why",
            below=True,
            of=lambda comparison: (
                comparison.why if comparison.direction is Direction.NONE or comparison.metric in COUNTS else ""
            ),
        ),
        Col(
            "labels",
            lambda comparison: ", ".join(label for label in comparison.labels if label not in shared) or None,
            when=any(set(comparison.labels) - set(shared) for comparison in shown),
        ),
    ]
    yield table("comparisons", "", cols, shown)


def value_of(compared: Compared) -> dict[str, Any]:
    sides = (
        {
            "name": side.name,
            "runs": [
                {"id": run.id, "started": run.started, "commit": run.environment.get("commit")} for run in side.runs
            ],
        }
        for side in (compared.before, compared.after)
    )
    return {
        **dict(zip("ab", sides, strict=True)),
        "differing": encode(compared.differing),
        "comparisons": encode(compared.comparisons),
        "only_a": list(compared.only_before),
        "only_b": list(compared.only_after),
    }


def rows_of(comparisons: Iterable[Comparison]) -> Rows:
    encoded = ((comparison, encode(comparison)) for comparison in comparisons)
    return COLUMNS, (
        {
            **row,
            **(ratio := row["ratio"] or {}),
            "ratio": ratio.get("point"),
            "labels": " ".join(comparison.labels),
            "failed": "yes" if comparison.failed else "no",
        }
        for comparison, row in encoded
    )
