"""A comparison as text: how the sides differ, a table, and how to read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8bench import units
from fp8bench.analysis.verdicts import FINAL_LEVEL, SAME
from fp8bench.comparing.across import ALONE, BAND, LEAST_FREEDOM
from fp8bench.comparing.compare import Compared
from fp8bench.comparing.sides import Side
from fp8bench.comparing.surroundings import Differing
from fp8bench.model import Comparison, Evidence
from fp8bench.report.comparisons import counted, label_legend, own_labels, reasons, rows, shared_labels, told
from fp8bench.report.layout import INDENT, Column, Paint, Tone, painter, table, wrap

WIDTH = 100
_MOST_CASES = 20
_COLUMNS = (
    Column("figure"), Column("A", right=True), Column("B", right=True), Column("B / A"), Column("verdict"),
    Column("labels"),
)  # fmt: skip
_HOW_RATIO = (
    f"B / A: below 1 is less, which is better everywhere; [low, high]: {units.percent(FINAL_LEVEL, 0)} interval, with "
    "the spread between runs in it"
)
_HOW_TIME = (
    "time: the best case of a step, by as many rounds on both sides; relative_time: over the reference's time in the "
    "same rounds, so that it does not tell how fast the machine was"
)
_HOW_VERDICT = (
    f"verdict: better or worse if the interval excludes 1 and the ratio is beyond {units.percent(BAND, 0)} "
    f"({units.percent(ALONE, 0)} where there are fewer than {LEAST_FREEDOM + 2} runs in all), same if it lies within "
    f"+-{units.percent(SAME, 0)}, else unsure"
)
LEGEND = (_HOW_RATIO, _HOW_TIME, _HOW_VERDICT)


def render(compared: Compared, color: bool = False, width: int = WIDTH) -> str:
    """All of it, a paragraph each."""
    paint = painter(color)
    found = compared.comparisons
    paragraphs = [list(_head(compared, width, paint)), list(_surroundings(compared.differing, width))]
    shown = told(found)
    if shown:
        paragraphs.append(list(_table(shown, width, paint)))
    paragraphs += [
        list(_listed("unsure, because", [f"{why} ({count})" for why, count in reasons(found).items()], width)),
        list(_listed("only in A", compared.only_before, width)),
        list(_listed("only in B", compared.only_after, width)),
        list(_listed("how to read this", _legend(compared), width)),
    ]
    return "\n\n".join("\n".join(lines) for lines in paragraphs if lines)


def side_words(side: Side) -> str:
    """'HEAD: commit 0a1b2c3d, 3 runs (5f6a7b8c, ...)'."""
    commits = dict.fromkeys(_commit(run.environment.get("commit"), run.environment.get("dirty")) for run in side.runs)
    ids = [run.id for run in side.runs]
    shown = ", ".join(ids[:4]) + (f" and {len(ids) - 4} more" if len(ids) > 4 else "")
    unfinished = sum(not run.finished for run in side.runs)
    cut = f"; {unfinished} of them unfinished" if unfinished else ""
    return f"{side.name}: {' and '.join(commits)}, {len(ids)} run{'s' * (len(ids) != 1)} ({shown}){cut}"


def _commit(commit: object, dirty: object) -> str:
    if not isinstance(commit, str):
        return "of no commit"
    return f"commit {commit[:8]}" + ("" if dirty is False else " with other changes")


def _head(compared: Compared, width: int, paint: Paint) -> Iterator[str]:
    for name, side in (("A", compared.before), ("B", compared.after)):
        yield from wrap(f"{name}  {side_words(side)}", width, hang=INDENT)
    yield from (paint(line, Tone.STRONG) for line in wrap(counted(compared.comparisons), width))
    hidden = len(compared.comparisons) - len(told(compared.comparisons))
    if hidden:
        yield from wrap(f"{hidden} of them, memory and errors that are the same on both sides, are not listed", width)


def _table(shown: Sequence[Comparison], width: int, paint: Paint) -> Iterator[str]:
    shared = shared_labels(shown)
    if shared:
        yield from wrap(f"all times: {', '.join(shared)}", width, hang=INDENT)
    columns = _COLUMNS if own_labels(shown, shared) else _COLUMNS[:-1]
    yield from table(columns, list(rows(shown)), width, paint)


def _surroundings(found: Sequence[Differing], width: int) -> Iterator[str]:
    if not found:
        yield "measured on the same machine, with the same software and settings"
        return
    yield "what differs between the sides, beside the commit"
    for one in found:
        mark = " (times do not compare for it)" if one.hardware else ""
        yield from wrap(f"{one.name}: {one.before:.60} -> {one.after:.60}{mark}", width, INDENT, INDENT)


def _listed(title: str, words: Sequence[str], width: int) -> Iterator[str]:
    if not words:
        return
    yield title
    for word in words[:_MOST_CASES]:
        yield from wrap(word, width, INDENT, INDENT)
    if len(words) > _MOST_CASES:
        yield f"{INDENT}and {len(words) - _MOST_CASES} more"


def _legend(compared: Compared) -> list[str]:
    timed = any(one.ratio is not None and one.evidence is Evidence.CROSS_RUN for one in compared.comparisons)
    return [*(LEGEND if timed else ()), *label_legend(compared.comparisons)]
