"""What each kind of work and each module takes of a step, where a run has looked for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fp8bench import units
from fp8bench.analysis.shares import StepParts, parts_of_record
from fp8bench.model import UNATTRIBUTED
from fp8bench.report.elements import Axis, Element, Items, Stacks, Text, Tone
from fp8bench.report.material import Material
from fp8bench.report.page.charts import stacked
from fp8bench.report.page.section import Section, sections
from fp8bench.report.panels import together
from fp8bench.report.terminal.shares import tables_of
from fp8bench.report.words.naming import NamedCase, named_cases, titled_panels

_Known = tuple[NamedCase, StepParts]
_MOST_KINDS, _OTHERS = 6, "others"


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
