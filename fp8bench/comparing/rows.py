"""A comparison for programs: one JSON document, CSV with a row a figure, Markdown for a pull request."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from typing import Any

from fp8bench.codec import encode
from fp8bench.comparing.compare import Compared
from fp8bench.comparing.sides import Side
from fp8bench.comparing.text import LEGEND, side_words
from fp8bench.model import Comparison, Direction
from fp8bench.report import markdown
from fp8bench.report.comparisons import counted, direction, label_legend, ratio, value
from fp8bench.report.elements import Column, Element, Facts, Field, Items, Page, Part, Table, Text, Tone

COLUMNS = (
    "case", "suite", "metric", "unit", "direction", "evidence", "before", "after", "ratio", "low", "high", "level",
    "p_value", "labels", "why", "since", "until", "failed",
)  # fmt: skip
_TONES = {Direction.BETTER: Tone.GOOD, Direction.WORSE: Tone.BAD, Direction.UNSURE: Tone.DOUBT}


def as_json(compared: Compared) -> str:
    """The document on one line."""
    document = {
        "a": _side(compared.before),
        "b": _side(compared.after),
        "differing": encode(compared.differing),
        "comparisons": encode(compared.comparisons),
        "only_a": list(compared.only_before),
        "only_b": list(compared.only_after),
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n"


def _side(side: Side) -> dict[str, Any]:
    runs = [{"id": run.id, "started": run.started, "commit": run.environment.get("commit")} for run in side.runs]
    return {"name": side.name, "runs": runs}


def as_csv(comparisons: Iterable[Comparison]) -> str:
    """The rows under their column names; nothing stands for what is not known."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_row(one) for one in comparisons)
    return text.getvalue()


def _row(one: Comparison) -> dict[str, Any]:
    plain = encode(one)
    interval = plain.pop("ratio") or {}
    ends = {"ratio": interval.get("point"), **{name: interval.get(name) for name in ("low", "high", "level")}}
    return {**plain, **ends, "labels": " ".join(one.labels), "failed": "yes" if one.failed else "no"}


def as_markdown(compared: Compared) -> str:
    """A page with the table of everything that has a ratio or failed."""
    elements: list[Element] = []
    if compared.comparisons:
        elements.append(comparison_table("comparisons", counted(compared.comparisons), compared.comparisons))
    alone = [f"only in A: {name}" for name in compared.only_before]
    alone += [f"only in B: {name}" for name in compared.only_after]
    parts = [Part("comparison", "Case by case", tuple(elements))] if elements else []
    if compared.differing:
        pairs = tuple((one.name, f"{one.before:.60} -> {one.after:.60}") for one in compared.differing)
        parts.append(Part("differing", "What differs between the sides, beside the commit", (Facts(pairs),)))
    if alone:
        parts.append(Part("alone", "Not compared", (Items(tuple(map(Text, alone))),)))
    legend = [*LEGEND, *label_legend(compared.comparisons)]
    facts = (("A", side_words(compared.before)), ("B", side_words(compared.after)))
    return markdown.render(Page("Comparison", "", tuple(parts), legend, facts))


def comparison_table(name: str, caption: str, comparisons: Iterable[Comparison]) -> Table:
    """The same table as on a terminal, every row with its whole name."""
    columns = (
        Column("case"), Column("figure"), Column("A", number=True), Column("B", number=True), Column("B / A"),
        Column("verdict"), Column("why"),
    )  # fmt: skip
    return Table(name, caption, columns, tuple(map(_fields, comparisons)))


def _fields(one: Comparison) -> tuple[Field, ...]:
    tone = Tone.BAD if one.failed else _TONES.get(one.direction, Tone.PLAIN)
    why = "; ".join(filter(None, (", ".join(one.labels), one.why)))
    return (
        Field(one.case), Field(one.metric), Field(value(one, one.before), one.before),
        Field(value(one, one.after), one.after), Field(ratio(one.ratio)), Field(direction(one), tone=tone), Field(why),
    )  # fmt: skip
