"""Renders a comparison of two sides, A and B, as a page, as a JSON document and as CSV rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from fp8bench import units
from fp8bench.analysis.compare.compare import ComparedSides
from fp8bench.analysis.compare.interval import MIN_DEGREES_OF_FREEDOM, MIN_VISIBLE_FEW_RUNS_CHANGE
from fp8bench.analysis.compare.sides import ComparisonSide, DifferingRunFact
from fp8bench.analysis.verdicts import FINAL_LEVEL, SAME_BAND
from fp8bench.model import Comparison, Direction, Evidence, Interval, Label
from fp8bench.model.codec import encode
from fp8bench.model.specs import BAND, COUNTS, TIME, find_metric_spec
from fp8bench.report.columns import Col, ColumnList, table
from fp8bench.report.data.plain import PlainRows
from fp8bench.report.elements import Element, Elements, Page, Part, Text, TextList, Texts, Tone
from fp8bench.report.terminal.layout import make_list_part
from fp8bench.report.words.legend import explain_label
from fp8bench.report.words.naming import many

DIRECTION_TONES = {
    Direction.BETTER: Tone.GOOD,
    Direction.WORSE: Tone.BAD,
    Direction.UNSURE: Tone.DOUBT,
    Direction.DIFFERS: Tone.DOUBT,
}
# Times are always listed, because they have a verdict. Other metrics are listed only if they changed.
TIME_METRICS = frozenset({"time", "relative_time"})
# A list on the page ends after this many cases. The CSV has all cases.
_MAX_LISTED_CASES = 20
_CHANGE_LEGEND = (
    "change: of the figure from A to B; less is better everywhere; [low, high]: "
    f"{units.percent(FINAL_LEVEL, 0)} interval, which includes the spread between runs"
)
_TIME_LEGEND = (
    "time: the best case of a step, from equally many rounds on both sides; relative_time: the same over the "
    "reference's time in the same rounds, so the speed of the machine does not matter"
)
_VERDICT_LEGEND = (
    f"verdict: better or worse if the interval excludes 0 and the change is beyond {units.percent(BAND, 0)} "
    f"({units.percent(MIN_VISIBLE_FEW_RUNS_CHANGE, 0)} where there are fewer than {MIN_DEGREES_OF_FREEDOM + 2} runs in "
    f"all), same if it lies within +-{units.percent(SAME_BAND, 0)}, else cannot tell; differs if the sides were "
    "measured under different conditions"
)
CSV_COLUMNS = (
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
    return find_metric_spec(comparison.metric).format_value(number, comparison.unit)


def show_change(interval: Interval | None) -> str:
    """Returns the change of a figure as '+4.3% [+2.1%, +6.6%]'. The interval is left out if its width is zero."""
    if interval is None:
        return units.NONE
    if interval.low == interval.high:
        return units.change(interval.point)
    # If each side is a single run, the spread between runs is unknown, and so is the interval.
    if math.isinf(interval.high):
        return f"{units.change(interval.point)} [no interval]"
    return f"{units.change(interval.point)} [{units.change(interval.low)}, {units.change(interval.high)}]"


def describe_direction(comparison: Comparison) -> str:
    """Returns the direction of a change, as 'worse' or 'FAILED'. Returns '-' for a figure without a direction."""
    if comparison.failed:
        return "FAILED"
    return units.NONE if comparison.direction is Direction.NONE else comparison.direction.value


def split_case_id(case_id: str) -> tuple[str, str]:
    """Splits 'gemm[m=512]@cpu/bf16' into 'gemm[m=512]@cpu', which all modes share, and the mode 'bf16'."""
    # A case's id has the mode after the device. Search for its slash after the parameters, because they may contain
    # paths. Without parameters, the mode follows the last slash.
    device_index = case_id.rfind("]@")
    mode_separator_index = case_id.find("/", device_index) if device_index >= 0 else case_id.rfind("/")
    return case_id[: max(mode_separator_index, 0)], case_id[mode_separator_index + 1 :]


def describe_direction_counts(comparisons: Iterable[Comparison]) -> str:
    """Returns how many figures changed in each direction, as '12 figures: 1 worse, 2 better, 9 same'."""
    counts = Counter(map(describe_direction, comparisons))
    total = counts.total()
    if not total:
        return "no figures"
    parts = [f"{counts['FAILED']} failed"] if counts["FAILED"] else []
    parts += [f"{counts[word]} {word}" for word in Direction if counts[word] and word is not Direction.NONE]
    if counts[units.NONE]:
        parts.append(f"{counts[units.NONE]} without a ratio")
    return f"{many(total, 'figure')}: {', '.join(parts)}"


def explain_labels(comparisons: Iterable[Comparison]) -> list[str]:
    labels = set().union(*(comparison.labels for comparison in comparisons))
    return [explain_label(label) for label in Label if label.value in labels]


def comparison_page(compared: ComparedSides, with_unchanged: bool = False, with_reasons: bool = False) -> Page:
    """Returns the page of a comparison. `with_unchanged` also lists memory, errors and counts that are the same.
    `with_reasons` shows the reason for 'cannot tell' in each row instead of in a list.
    """
    comparisons = compared.comparisons
    # 1. Show the counts, the reason if times have no verdict, and a row for each time and each changed figure.
    listed_comparisons = [
        comparison
        for comparison in comparisons
        if with_unchanged or comparison.metric in TIME_METRICS or comparison.direction is not Direction.SAME
    ]
    direction_counts_text = describe_direction_counts(comparisons)
    if len(listed_comparisons) < len(comparisons):
        num_hidden_comparisons = len(comparisons) - len(listed_comparisons)
        direction_counts_text += (
            f". Not listed: {num_hidden_comparisons} that are the same on both sides (memory, errors and counts)"
        )
    elements: list[Element] = [Text(direction_counts_text, Tone.STRONG), *_explain_missing_verdicts(compared)]
    if listed_comparisons:
        elements += _comparison_table(listed_comparisons, with_reasons)
    parts = [Part("sides", *_describe_differences(compared)), Part("comparison", "", tuple(elements))]
    # 2. Explain figures with the verdict "cannot tell", and list figures that only one side has.
    unsure_comparisons = [comparison for comparison in comparisons if comparison.direction is Direction.UNSURE]
    reasons = Counter(comparison.why for comparison in unsure_comparisons if comparison.why)
    lines_by_section_title = {
        "cannot tell, because": [
            f"{reason} ({many(count, 'figure')})" for reason, count in reasons.items() if not with_reasons
        ],
        "only in A": list(compared.only_before),
        "only in B": list(compared.only_after),
    }
    for title, lines in lines_by_section_title.items():
        if len(lines) > _MAX_LISTED_CASES:
            lines[_MAX_LISTED_CASES:] = [f"and {len(lines) - _MAX_LISTED_CASES} more"]
        parts += make_list_part(title.replace(" ", "-"), title, lines)
    # 3. Explain how to read the page.
    legend: list[str] = []
    # These lines explain intervals between runs that were measured at different times.
    if any(comparison.ratio is not None and comparison.evidence is Evidence.CROSS_RUN for comparison in comparisons):
        legend += (_CHANGE_LEGEND, _TIME_LEGEND, _VERDICT_LEGEND)
    legend += explain_labels(comparisons)
    side_descriptions = (
        ("A", describe_comparison_side(compared.before)),
        ("B", describe_comparison_side(compared.after)),
    )
    return Page("B against A", "", tuple(parts), legend, side_descriptions)


def _explain_missing_verdicts(compared: ComparedSides) -> Texts:
    """If the two sides were measured under different conditions, yields a sentence that explains why times have no
    verdict. The sentence has the range of their ratios.
    """
    unjudged_comparisons = [
        comparison for comparison in compared.comparisons if comparison.direction is Direction.DIFFERS
    ]
    ratios = [
        comparison.ratio.point for comparison in unjudged_comparisons if comparison.metric == TIME and comparison.ratio
    ]
    if unjudged_comparisons:
        ratio_text = f": B takes {units.span(ratios, units.ratio)} of A's time" if ratios else ""
        explanation = (
            f"times differ, which is not a regression{ratio_text}. Different conditions: {compared.conditions}. "
        )
        yield Text(f"{explanation}Measure both sides under the same conditions, or use `fp8bench duel`.", Tone.STRONG)


def describe_comparison_side(side: ComparisonSide) -> str:
    """Returns one side of the comparison with its commits and runs, as 'HEAD: commit 0a1b2c3d, 3 runs (5f6a7b8c,
    ...)'.
    """
    commits = []
    for run in side.runs:
        # If it is unknown whether files differed from the commit, assume that they did.
        commit, is_clean = run.environment.get("commit"), run.environment.get("dirty") is False
        name = f"commit {commit[:8]}" if isinstance(commit, str) else ""
        commits.append(f"{name}{'' if is_clean else ' with other changes'}" if name else "of no commit")
    ids = [run.id for run in side.runs]
    ids_text = ", ".join(ids[:4]) + (f" and {len(ids) - 4} more" if len(ids) > 4 else "")
    num_unfinished_runs = sum(not run.finished for run in side.runs)
    unfinished_text = f"; {num_unfinished_runs} of them unfinished" if num_unfinished_runs else ""
    return f"{side.name}: {' and '.join(dict.fromkeys(commits))}, {many(len(ids), 'run')} ({ids_text}){unfinished_text}"


# The name of the environment property with the digest of the user's code (modules of --import, and callables).
CODE_DIGEST_FACT = "imports_sha256"


def describe_differing_fact(fact: DifferingRunFact, values: str) -> str:
    """Formats a fact that differs between the two sides by the template `values`. Changed code is only mentioned,
    because its values are digests.
    """
    if fact.name == CODE_DIGEST_FACT:
        return "the code of your files changed"
    return f"{fact.name}{values.format(f'{fact.before:.60}', f'{fact.after:.60}')}"


def _describe_differences(compared: ComparedSides) -> tuple[str, tuple[Element, ...]]:
    if not compared.differing_facts:
        return "", (Text("measured on the same machine, with the same software and settings"),)
    lines = (describe_differing_fact(fact, ": {} -> {}") for fact in compared.differing_facts)
    return "what differs between the sides, apart from the commit", (TextList(tuple(map(Text, lines))),)


def _comparison_table(comparisons: Sequence[Comparison], with_reasons: bool) -> Elements:
    """Yields a table with a row for each compared figure. A label that all time figures have is printed once, above the
    table.
    """
    # A label that all times have describes the machine, not a single case.
    labels = [
        time_comparison.labels
        for time_comparison in comparisons
        if time_comparison.metric in TIME_METRICS and time_comparison.ratio is not None
    ]
    shared_labels = [label for label in labels[0] if label in set(labels[0]).intersection(*labels)] if labels else []
    if shared_labels:
        yield Text(f"all times (best case, not the median): {', '.join(shared_labels)}")

    def direction_tone(comparison: Comparison) -> Tone:
        return Tone.BAD if comparison.failed else DIRECTION_TONES.get(comparison.direction, Tone.PLAIN)

    def explain_no_direction(comparison: Comparison) -> str:
        # The page lists reasons for uncertain figures below the table, unless `with_reasons` puts them into the rows.
        always_shows_reason = comparison.direction is Direction.NONE or comparison.metric in COUNTS
        return comparison.why if always_shows_reason or with_reasons else ""

    def labels_of_case(comparison: Comparison) -> str | None:
        return ", ".join(label for label in comparison.labels if label not in shared_labels) or None

    cols: ColumnList[Comparison] = [
        Col("setting", lambda comparison: split_case_id(comparison.case)[0], shared=True),
        Col("figure", lambda comparison: f"{split_case_id(comparison.case)[1]} {comparison.metric}"),
        Col("A", lambda comparison: value(comparison, comparison.before), number=True),
        Col("B", lambda comparison: value(comparison, comparison.after), number=True),
        Col("change", lambda comparison: show_change(comparison.ratio)),
        Col("verdict", describe_direction, tone=direction_tone),
        Col("why", explain_no_direction, below=True, when=any(map(explain_no_direction, comparisons))),
        Col("labels", labels_of_case, when=any(map(labels_of_case, comparisons))),
    ]
    yield table("comparisons", "", cols, comparisons)


def comparison_document(compared: ComparedSides) -> dict[str, Any]:
    return {
        "a": _compared_side_document(compared.before),
        "b": _compared_side_document(compared.after),
        "differing": encode(compared.differing_facts),
        "comparisons": encode(compared.comparisons),
        "only_a": list(compared.only_before),
        "only_b": list(compared.only_after),
    }


def _compared_side_document(side: ComparisonSide) -> dict[str, Any]:
    runs = [{"id": run.id, "started": run.started, "commit": run.environment.get("commit")} for run in side.runs]
    return {"name": side.name, "runs": runs}


def comparison_rows(comparisons: Iterable[Comparison]) -> PlainRows:
    return CSV_COLUMNS, map(_csv_row, comparisons)


def _csv_row(comparison: Comparison) -> dict[str, Any]:
    row: dict[str, Any] = encode(comparison)
    ratio = row["ratio"] or {}
    row |= ratio
    row["ratio"] = ratio.get("point")
    row["labels"] = " ".join(comparison.labels)
    row["failed"] = "yes" if comparison.failed else "no"
    return row
