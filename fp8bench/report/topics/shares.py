"""What each kind of work and each module takes of a step, where a run has looked for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from fp8bench import units
from fp8bench.analysis.shares import StepParts, parts_of_record
from fp8bench.model import UNATTRIBUTED, Provenance, Run, SharesFrom
from fp8bench.model.codec import encode
from fp8bench.report.data.plain import csv_text, json_line
from fp8bench.report.elements import Axis, Column, Element, Field, Items, Page, Part, Stacks, Table, Text, Tone
from fp8bench.report.material import Material, titled_panels
from fp8bench.report.page.charts import stacked
from fp8bench.report.page.section import Section, sections
from fp8bench.report.panels import together
from fp8bench.report.words.naming import NamedCase, named_cases

# So many modules are told by name.
MOST_MODULES = 20
_LEGEND = (
    "shares are those of a pass of its own, which looks at every operator; times are estimated: share x best case",
    f"{UNATTRIBUTED}: between operators, on the host; view: no work, but the time to call it",
    "cast: between dtypes of floating-point numbers; copy: without one; gather: by index",
    "module: its path in the model, and the model's class for what is done between its modules",
)
_Known = tuple[NamedCase, StepParts]
_MOST_KINDS, _OTHERS = 6, "others"


def page_of(run: Run, parts: Sequence[StepParts]) -> Page:
    """A part for each setting: its precisions side by side."""
    found = [
        Part(f"setting-{place}", setting, tuple(_elements(some)))
        for place, (setting, some) in enumerate(together((one.case.setting, one) for one in parts).items())
    ]
    return Page(f"what a step of run {run.id} is made of", "", tuple(found), _LEGEND)


def _elements(parts: Sequence[StepParts]) -> list[Element]:
    known = [(one.case.mode, one) for one in parts if one.shares is not None]
    found: list[Element] = list(tables_of(known, ("", ""))) if known else []
    words = [f"{one.case.mode}: nothing is known of its parts: {one.why}" for one in parts if one.shares is None]
    words += [f"{name}: {remark}" for name, one in known for remark in one.remarks]
    return [*found, Items(tuple(map(Text, words)))] if words else found


def tables_of(parts: Sequence[tuple[str, StepParts]], captions: tuple[str, str]) -> Iterator[Table]:
    """A row for each kind of work, and for each of the modules that take most in any; none where no module is known."""
    names = [name for name, _ in parts]
    shares = [one.by_kind for _, one in parts]
    kinds = dict.fromkeys(kind for one in shares for kind in one if kind != UNATTRIBUTED)
    ordered = sorted(kinds, key=lambda kind: -max(one.get(kind, 0.0) for one in shares))
    yield _table("kinds", captions[0], "kind", names, [*ordered, UNATTRIBUTED], shares, parts)
    shares = [one.by_module for _, one in parts]
    modules = dict.fromkeys(module for one in shares for module in one)
    first = sorted(modules, key=lambda module: -max(one.get(module, 0.0) for one in shares))[:MOST_MODULES]
    if first:
        yield _table("modules", captions[1], "module", names, first, shares, parts)


def _table(
    name: str, caption: str, first: str, names: Sequence[str], keys: Sequence[str],
    shares: Sequence[Mapping[str, float]], parts: Sequence[tuple[str, StepParts]],
) -> Table:  # fmt: skip
    columns = (Column(first), *(Column(one, number=True) for one in names))
    rows = [
        (Field(key), *(_cell(one, own.get(key)) for (_, one), own in zip(parts, shares, strict=True))) for key in keys
    ]
    return Table(name, caption, columns, tuple(rows))


def _cell(one: StepParts, share: float | None) -> Field:
    """'64.1%  1.20 ms'."""
    if share is None:
        return Field(units.NONE)
    seconds = "" if one.seconds is None else f"  {units.seconds(share * one.seconds)}"
    return Field(f"{units.percent(share)}{seconds}", share)


class ShareRow(NamedTuple):
    """A part of a step: `seconds` are estimated, its share of the step's best case."""

    case: str
    precision: str
    kind: str
    module: str
    direction: str
    what: str
    calls: int
    share: float
    seconds: float | None
    provenance: str
    of: str


def share_rows(parts: Sequence[StepParts]) -> Iterator[ShareRow]:
    """Those of every case, the longest part first, what is left of its step last."""
    for one in parts:
        of = one.shares.of if one.shares is not None else SharesFrom.OPERATORS
        for row in one.rows:
            yield ShareRow(
                one.case.id, one.case.mode, row.kind, row.module, row.direction, row.what, row.calls, row.share,
                row.seconds, Provenance.ESTIMATED.value, of.value,
            )  # fmt: skip


def as_json(parts: Sequence[StepParts]) -> str:
    """Every case with its parts and what is left of its step, or why nobody knows them."""
    return json_line({
        "shares": [
            {"case": one.case.id, "precision": one.case.mode, "why": one.why, "seconds": one.seconds,
             "of": one.shares.of.value if one.shares is not None else None, "remarks": list(one.remarks),
             "parts": [encode(row) for row in one.rows]}
            for one in parts
        ]
    })  # fmt: skip


def as_csv(parts: Sequence[StepParts]) -> str:
    """A row a part."""
    return csv_text(ShareRow._fields, (row._asdict() for row in share_rows(parts)))


@sections.register("shares")
class ShareSection(Section):
    """A bar for each case, cut into kinds of work, and the modules that take most."""

    name = "shares"
    title = "What a step is made of"
    lead = (
        "Shares come from a pass of its own that looks at every operator of a step, or every kernel of a device; times "
        "are estimates: those shares of the best case, which nobody looked into. Unattributed is the host, between "
        "operators."
    )
    rank = 62

    def elements(self, material: Material) -> Iterator[Element]:
        for title, panel in titled_panels(material):
            found = [
                (case, parts)
                for case in named_cases(panel)
                if (parts := parts_of_record(case.result.record, case.result.finding)).shares is not None
            ]
            if found:
                yield from _panel(title, found)


def _panel(title: str, found: Sequence[_Known]) -> Iterator[Element]:
    workload = found[0][0].result.record.case.workload
    if timed := [(case, parts) for case, parts in found if parts.seconds]:
        yield _chart(f"shares-{workload}", title, timed)
    captions = f"{title}: a step by kind of work", f"{title}: the modules that take most"
    for table in tables_of([(_name(case, parts), parts) for case, parts in found], captions):
        yield replace(table, name=f"share-{table.name}-{workload}")
    remarks = together((remark, case.name) for case, parts in found for remark in parts.remarks)
    if remarks:
        yield Items(tuple(Text(f"{', '.join(names)}: {remark}", Tone.DOUBT) for remark, names in remarks.items()))


def _name(case: NamedCase, parts: StepParts) -> str:
    return f"{case.name} (emulated)" if parts.emulated else case.name


def _chart(name: str, title: str, timed: Sequence[_Known]) -> Stacks:
    """The smallest kinds are one: there are so many colours that can be told apart."""
    shares = [parts.by_kind for _, parts in timed]
    kinds = dict.fromkeys(kind for own in shares for kind in own if kind != UNATTRIBUTED)
    ordered = sorted(kinds, key=lambda kind: -max(own.get(kind, 0.0) for own in shares))
    drawn = {kind: kind if place < _MOST_KINDS else _OTHERS for place, kind in enumerate(ordered)}
    drawn[UNATTRIBUTED] = UNATTRIBUTED
    rows = []
    for (case, parts), own in zip(timed, shares, strict=True):
        seconds = dict.fromkeys(drawn.values(), 0.0)
        for kind, share in own.items():
            seconds[drawn[kind]] += share * (parts.seconds or 0.0)
        rows.append((_name(case, parts), parts.seconds or 0.0, seconds))
    most = max(shares[0], key=lambda kind: shares[0][kind])
    said = f"In {timed[0][0].name} {most} takes most of the step, {units.percent(shares[0][most], 0)}."
    axis = Axis("best case of a step, parted by estimated shares", "s")
    words = {kind: kind for kind in dict.fromkeys(drawn.values())}
    return stacked(name, f"{title}: a step by kind of work", said, axis, "share of the step", words, rows)
