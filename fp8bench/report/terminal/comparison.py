"""A comparison as a page: how the sides differ, a table, and how to read it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fp8bench import units
from fp8bench.analysis.compare.compare import Compared
from fp8bench.analysis.compare.interval import ALONE, LEAST_FREEDOM
from fp8bench.analysis.compare.sides import Side
from fp8bench.analysis.verdicts import FINAL_LEVEL, SAME
from fp8bench.model import Comparison, Direction, Evidence
from fp8bench.model.specs import BAND, COUNTS
from fp8bench.report.elements import Column, Element, Field, Items, Page, Part, Table, Text, Tone
from fp8bench.report.terminal.layout import list_of
from fp8bench.report.words.comparisons import (
    TIMES,
    TONES,
    counted,
    direction,
    label_legend,
    reasons,
    setting_of,
    signed,
    value,
)
from fp8bench.report.words.run_facts import many

_MOST_CASES = 20
# Of these the operators are named.
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
    f"+-{units.percent(SAME, 0)}, else unsure"
)


def page_of(compared: Compared, everything: bool = False) -> Page:
    """The sides, what else differs between them, every figure worth a line (or `everything`), and what is in doubt."""
    found = compared.comparisons
    shown = [one for one in found if everything or one.metric in TIMES or one.direction is not Direction.SAME]
    hidden = len(found) - len(shown)
    counts = counted(found)
    counts += (
        f"; {hidden} of them, memory, errors and counts that are the same on both sides, are not listed"
        if hidden
        else ""
    )
    cases: list[Element] = [Text(counts, Tone.STRONG), *(_table(shown) if shown else ())]
    whys = tuple(f"{why} ({count})" for why, count in reasons(found).items())
    parts = [Part("sides", *_sides(compared)), Part("comparison", "", tuple(cases))]
    lists = {"unsure, because": whys, "only in A": compared.only_before, "only in B": compared.only_after}
    for title, words in lists.items():
        more = [f"and {len(words) - _MOST_CASES} more"] if len(words) > _MOST_CASES else []
        parts += list_of(title.replace(" ", "-"), title, [*words[:_MOST_CASES], *more])
    timed = any(one.ratio is not None and one.evidence is Evidence.CROSS_RUN for one in found)
    legend = [*((_HOW_CHANGE, _HOW_TIME, _HOW_VERDICT) if timed else ()), *label_legend(found)]
    facts = (("A", side_words(compared.before)), ("B", side_words(compared.after)))
    return Page("B against A", "", tuple(parts), legend, facts)


def side_words(side: Side) -> str:
    """'HEAD: commit 0a1b2c3d, 3 runs (5f6a7b8c, ...)'."""
    commits = dict.fromkeys(_commit(run.environment.get("commit"), run.environment.get("dirty")) for run in side.runs)
    ids = [run.id for run in side.runs]
    shown = ", ".join(ids[:4]) + (f" and {len(ids) - 4} more" if len(ids) > 4 else "")
    unfinished = sum(not run.finished for run in side.runs)
    cut = f"; {unfinished} of them unfinished" if unfinished else ""
    return f"{side.name}: {' and '.join(commits)}, {many(len(ids), 'run')} ({shown}){cut}"


def _commit(commit: object, dirty: object) -> str:
    if not isinstance(commit, str):
        return "of no commit"
    return f"commit {commit[:8]}" + ("" if dirty is False else " with other changes")


def _sides(compared: Compared) -> tuple[str, tuple[Element, ...]]:
    """A title, and what differs beside the commit."""
    if not compared.differing:
        return "", (Text("measured on the same machine, with the same software and settings"),)
    lines = (
        Text(f"{one.name}: {one.before:.60} -> {one.after:.60}{' (times do not compare for it)' * one.hardware}")
        for one in compared.differing
    )
    return "what differs between the sides, beside the commit", (Items(tuple(lines)),)


def _table(shown: Sequence[Comparison]) -> Iterator[Element]:
    """A row a figure; the labels that all times have are said once, and what has no numbers says why below."""
    labels = [one.labels for one in shown if one.metric in TIMES and one.ratio is not None]
    shared = tuple(label for label in (labels[0] if labels else ()) if all(label in one for one in labels))
    if shared:
        yield Text(f"all times: {', '.join(shared)}")
    columns = (
        Column("setting", shared=True), Column("figure"), Column("A", number=True), Column("B", number=True),
        Column("change"), Column("verdict"), Column("why", below=True), Column("labels"),
    )  # fmt: skip
    last = None if any(set(one.labels) - set(shared) for one in shown) else -1
    yield Table("comparisons", "", columns[:last], tuple(_fields(one, shared)[:last] for one in shown))


def _fields(one: Comparison, shared: Iterable[str]) -> tuple[Field, ...]:
    setting, mode = setting_of(one.case)
    tone = Tone.BAD if one.failed else TONES.get(one.direction, Tone.PLAIN)
    own = ", ".join(label for label in one.labels if label not in shared)
    return (
        Field(setting), Field(f"{mode} {one.metric}"), Field(value(one, one.before)), Field(value(one, one.after)),
        Field(signed(one.ratio)), Field(direction(one), tone=tone),
        Field(one.why if one.direction is Direction.NONE or one.metric in COUNTS else ""), Field(own or units.NONE),
    )  # fmt: skip
