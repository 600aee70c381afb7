"""Advice as a page: what to do first, then the checklist; checks and the advisor's score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fp8bench import units
from fp8bench.model.advice import Advised, Checked, Cost
from fp8bench.report.advices import LEGEND, advice_elements, checklist, cost_tables, short_names, speed
from fp8bench.report.elements import Column, Element, Field, Page, Part, Table, Text, Tone
from fp8bench.report.panels import together
from fp8bench.report.terminal.layout import list_of
from fp8bench.report.words.run_facts import many

_NOTHING = "There is nothing to advise on: the run has no case beside a reference."


_COST = "the cost of a decision: each precision over its reference; time, energy and money are those to the same loss"


@dataclass(frozen=True)
class Asked:
    """What is told beside the advice: what was checked, what decisions cost (by the `price` of an hour), and notes."""

    checked: Sequence[Checked] = ()
    costs: Sequence[Cost] = ()
    price: float | None = None
    notes: Sequence[str] = ()


def page_of(advised: Advised, more: Asked) -> Page:
    """Of one run."""
    told: tuple[Element, ...] = tuple(advice_elements(advised)) if advised.advice else (Text(_NOTHING),)
    parts = [Part("advice", "", told)]
    parts += (
        [Part("checks", "predicted and measured", (checks(more.checked, short_names(advised)),))]
        if more.checked
        else []
    )
    parts += [Part("cost", _COST, tuple(cost_tables(advised, more.costs, more.price)))] if more.costs else []
    parts += [Part("checklist", "the checklist", tuple(checklist(advised, shared=True)))] if advised.answers else []
    parts += list_of("notes", "notes", more.notes)
    return Page(f"advice on run {advised.run}", "", tuple(parts), LEGEND)


def checks(checked: Sequence[Checked], named: Callable[[str], str] = str) -> Table:
    """What was predicted beside what was measured."""
    columns = (
        Column("advice"), Column("predicted", number=True, unit="x"), Column("measured", number=True, unit="x"),
        Column("hit"), Column("of"), Column("by run"), Column("why", below=True),
    )  # fmt: skip
    rows = tuple(
        (
            Field(f"{one.advice.kind} {one.advice.mode}"), speed(one.advice.gain), speed(one.measured),
            _hit(one), Field(named(one.advice.case or one.advice.settings[0])), Field(one.run or units.NONE),
            Field(one.why),
        )
        for one in checked
    )  # fmt: skip
    return Table("checks", "", columns, rows)


def _hit(one: Checked) -> Field:
    tones = {True: Tone.GOOD, False: Tone.BAD, None: Tone.DOUBT}
    return Field({True: "yes", False: "no", None: "-"}[one.hit], tone=tones[one.hit])


def score_page(checked: Sequence[Checked], troubles: Sequence[str] = ()) -> Page:
    """How often what was measured lay within what was predicted, by the kind of advice and its rule."""
    told = [one for one in checked if one.hit is not None]
    hits = sum(one.hit is True for one in told)
    rate = f"{units.percent(hits / len(told), 0)}: {hits} of {len(told)}" if told else "unknown: 0 of 0"
    columns = (Column("advice"), Column("rule"), Column("hits", number=True), Column("checks", number=True))
    by_rule = together(((one.advice.kind, one.advice.rule), one) for one in told)
    rows = tuple(
        (Field(kind), Field(rule), Field(str(sum(one.hit is True for one in found))), Field(str(len(found))))
        for (kind, rule), found in by_rule.items()
    )
    elements: list[Element] = [Text(f"hit rate {rate} checks lay within what was predicted.", Tone.STRONG)]
    if len(told) < len(checked):
        elements.append(Text(f"{many(len(checked) - len(told), 'check')} came to no figure and count as none."))
    elements += [Table("score", "", columns, rows), checks(checked)] if rows else []
    return Page("the advisor's score", "", (Part("score", "", (*elements, *map(Text, troubles))),))
