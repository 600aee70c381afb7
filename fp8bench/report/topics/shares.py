"""What each kind of work and each module takes of a step; and how much of a model's products is converted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter

from fp8bench import units
from fp8bench.analysis.tapes import StepShares, parts_of_record
from fp8bench.model import UNATTRIBUTED, Provenance, Run, SharesFrom
from fp8bench.model.codec import encode
from fp8bench.model.step import Coverage
from fp8bench.report.columns import Col, table
from fp8bench.report.data.plain import Rows
from fp8bench.report.elements import Element, Field, Items, Page, Part, Table, Text, Tone
from fp8bench.report.page.section import Material, section, titled_panels
from fp8bench.report.panels import NamedCase, Panel, together
from fp8bench.report.words.naming import join_words

# The most modules that are named.
MOST_MODULES = 20
_LEGEND = (
    "shares are those of a pass of its own, which looks at every operator; times are estimated: share x best case",
    f"{UNATTRIBUTED}: between operators, on the host; view: no work, but the time to call it",
    "cast: between dtypes of floating-point numbers; copy: without one; gather: by index",
    "module: its path in the model, and the model's class for what is done between its modules",
)
_OF_CSV = (
    "case",
    "precision",
    "kind",
    "module",
    "direction",
    "what",
    "calls",
    "share",
    "seconds",
    "provenance",
    "of",
)


def page_of(run: Run, parts: Sequence[StepShares]) -> Page:
    sections = [
        Part(f"setting-{place}", setting, tuple(_elements(some)))
        for place, (setting, some) in enumerate(together((part.case.setting, part) for part in parts).items())
    ]
    return Page(f"what a step of run {run.id} is made of", "", tuple(sections), _LEGEND)


def _elements(parts: Sequence[StepShares]) -> list[Element]:
    known = [(part.case.mode, part) for part in parts if part.shares is not None]
    elements: list[Element] = list(tables_of(known, ("", ""))) if known else []
    words = [f"{part.case.mode}: nothing is known of its parts: {part.why}" for part in parts if part.shares is None]
    words += [f"{name}: {remark}" for name, shares in known for remark in shares.remarks]
    return [*elements, Items(tuple(map(Text, words)))] if words else elements


def tables_of(parts: Sequence[tuple[str, StepShares]], captions: tuple[str, str]) -> Iterator[Table]:
    def share(key: str, seconds: float | None, own: Mapping[str, float]) -> Field | None:
        if key not in own:
            return None
        estimated = "" if seconds is None else f"  {units.seconds(own[key] * seconds)}"
        return Field(f"{units.percent(own[key])}{estimated}", own[key])

    by_kind, by_module = ([of(step) for _, step in parts] for of in (attrgetter("by_kind"), attrgetter("by_module")))
    kinds = [*_largest(by_kind), UNATTRIBUTED]
    for name, caption, shares, keys in (
        ("kind", captions[0], by_kind, kinds),
        ("module", captions[1], by_module, _largest(by_module)[:MOST_MODULES]),
    ):
        cols: list[Col[str]] = [Col(name, lambda key: key)]
        cols += [
            Col(title, partial(share, seconds=step.seconds, own=own), number=True)
            for (title, step), own in zip(parts, shares, strict=True)
        ]
        if keys:
            yield table(f"{name}s", caption, cols, keys)


def _largest(shares: Sequence[Mapping[str, float]]) -> list[str]:
    """What takes most first; the rest is left out."""
    keys = dict.fromkeys(key for own in shares for key in own if key != UNATTRIBUTED)
    return sorted(keys, key=lambda key: -max(own.get(key, 0.0) for own in shares))


def value_of(parts: Sequence[StepShares]) -> dict[str, object]:
    return {
        "shares": [
            {
                "case": part.case.id,
                "precision": part.case.mode,
                "why": part.why,
                "seconds": part.seconds,
                "of": part.shares.of.value if part.shares is not None else None,
                "remarks": list(part.remarks),
                "parts": [encode(row) for row in part.rows],
            }
            for part in parts
        ]
    }


def rows_of(parts: Sequence[StepShares]) -> Rows:
    """A row for each part of a case, the longest first and the rest last; `seconds` are estimated by shares."""
    return _OF_CSV, [
        {
            **encode(row),
            "case": part.case.id,
            "precision": part.case.mode,
            "provenance": Provenance.ESTIMATED.value,
            "of": (part.shares.of if part.shares is not None else SharesFrom.OPERATORS).value,
        }
        for part in parts
        for row in part.rows
    ]


@section("shares", "What a step is made of", 62)
def shares_section(material: Material) -> Iterator[Element]:
    """Shares come from a pass of its own that looks at every operator of a step, or every kernel of a device; times are
    estimates: those shares of the best case, which nobody looked into. Unattributed is the host, between operators.
    """
    for title, panel in titled_panels(material):
        known = [
            (case, parts)
            for case in panel.members
            if (parts := parts_of_record(case.result.record, case.result.finding)).shares is not None
        ]
        if known:
            yield from _panel(title, known)


def _panel(title: str, known: Sequence[tuple[NamedCase, StepShares]]) -> Iterator[Element]:
    workload = known[0][0].result.record.case.workload
    named = [(f"{case.name} (emulated)" if parts.emulated else case.name, parts) for case, parts in known]
    captions = f"{title}: a step by kind of work", f"{title}: the modules that take most"
    for shown in tables_of(named, captions):
        yield replace(shown, name=f"share-{shown.name}-{workload}")
    remarks = together((remark, case.name) for case, parts in known for remark in parts.remarks)
    if remarks:
        yield Items(tuple(Text(f"{', '.join(names)}: {remark}", Tone.DOUBT) for remark, names in remarks.items()))


_KINDS = {
    "linear": "linear layers",
    "conv1d": "Conv1D (GPT-2's linear layers)",
    "conv2d": "convolutions",
    "experts": "experts (a matrix for each)",
    "head": "the head",
}
_OUTSIDE = "outside of layers"


def coverages(panel: Panel) -> list[tuple[str, Coverage]]:
    """The coverages of a panel's cases, with their modes: 'bf16, fp8'."""
    known = [(result.record.coverage, result.mode) for result in panel.results]
    by_coverage = together((coverage, mode) for coverage, mode in known if coverage is not None)
    return [(", ".join(dict.fromkeys(modes)), coverage) for coverage, modes in by_coverage.items()]


def coverage_sentence(modes: str, coverage: Coverage) -> str:
    """'92.1% of the FLOPs of a step's products are converted in bf16, fp8: 1.2 GFLOP of 1.3 GFLOP'."""
    words = f"{units.percent(coverage.share)} of the FLOPs of a step's products are converted in {modes}"
    return f"{words}: {units.count(coverage.converted_flops, 'FLOP')} of {units.count(coverage.flops, 'FLOP')}"


def coverage_elements(panel: Panel, number: int = 0) -> Iterator[Element]:
    for place, (modes, coverage) in enumerate(coverages(panel)):
        name = f"{number}-{place}" if number or place else "kinds"
        yield Text(f"{coverage_sentence(modes, coverage)}.", Tone.STRONG)
        yield _kinds(f"coverage-{name}", modes, coverage)
        left = left_of(coverage)
        if left:
            yield _reasons(f"coverage-left-{name}", modes, left, coverage)
        if remarks := list(_remarks(coverage)):
            yield Items(tuple(map(Text, remarks)))


def _kinds(name: str, modes: str, coverage: Coverage) -> Table:
    cols: list[Col[tuple[str, int | None, int, int]]] = [
        Col("products of", lambda row: row[0]),
        Col("weights", lambda row: row[1], number=True, show=str),
        Col("FLOPs", lambda row: row[2], number=True, show=units.count),
        Col("share", lambda row: _over(row[2], coverage.flops), number=True, show=units.percent),
        Col("converted", lambda row: _over(row[3], row[2]), number=True, show=units.percent),
    ]
    counts = Counter(holder.kind for holder in coverage.holders)
    rows: list[tuple[str, int | None, int, int]] = [
        (_KINDS.get(kind, kind), counts[kind], *flops) for kind, flops in coverage.by_kind().items()
    ]
    rows += [(_OUTSIDE, None, sum(other.flops or 0 for other in coverage.others), 0)] if coverage.others else []
    return table(name, f"what is converted in {modes}", cols, rows)


def left_of(coverage: Coverage) -> list[tuple[str, list[str], int]]:
    """What is not converted, most FLOPs first: (reason, names, FLOPs)."""
    names, flops = defaultdict[str, list[str]](list), defaultdict[str, int](int)
    for holder in coverage.holders:
        if not holder.converted:
            names[holder.reason].append(holder.name)
            flops[holder.reason] += holder.flops
    for other in coverage.others:
        names[other.reason].append(other.weight or other.module or other.operator)
        flops[other.reason] += other.flops or 0
    return sorted(((why, names[why], flops[why]) for why in names), key=lambda row: -row[2])


def _reasons(name: str, modes: str, left: Sequence[tuple[str, list[str], int]], coverage: Coverage) -> Table:
    cols: list[Col[tuple[str, list[str], int]]] = [
        Col("not converted", lambda row: join_words(list(dict.fromkeys(row[1])), 3)),
        Col("share", lambda row: _over(row[2], coverage.flops), number=True, show=units.percent),
        Col("why", lambda row: row[0], below=True),
    ]
    return table(name, f"what is not converted in {modes}, and why", cols, left)


def _remarks(coverage: Coverage) -> Iterator[str]:
    yield from coverage.remarks
    if coverage.loss:
        yield f"backward begins from {coverage.loss}"
    yield from shape_remarks(coverage)
    if coverage.unknown:
        yield f"{coverage.unknown} calls of operators without a formula are in no sum"


def shape_remarks(coverage: Coverage) -> Iterator[str]:
    """Yields what native products would refuse in the shapes of converted layers, a line for each reason."""
    wanted = together((holder.native, holder.name) for holder in coverage.holders if holder.converted and holder.native)
    for why, names in wanted.items():
        yield f"{join_words(names, 3)}: {why}"


def _over(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


@section("coverage", "Coverage", 15)
def coverage_section(material: Material) -> Iterator[Element]:
    """Which of a model's products its cases make in another precision; counted in a step that nobody timed."""
    for number, (_, panel) in enumerate(material.panels()):
        yield from coverage_elements(panel, number)
