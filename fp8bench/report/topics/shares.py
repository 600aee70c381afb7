"""The share of each kind of work and each module in a step; and how much of a model's products is converted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter

from fp8bench import units
from fp8bench.analysis.tapes import StepShares, parts_of_record
from fp8bench.model import UNATTRIBUTED, Provenance, Run, SharesFrom
from fp8bench.model.codec import encode
from fp8bench.model.step import Coverage
from fp8bench.report.columns import Col, Cols, table
from fp8bench.report.data.plain import Rows
from fp8bench.report.elements import (
    Elements,
    Field,
    Page,
    Part,
    Sentences,
    Table,
    Tables,
    Text,
    Tone,
    items_of,
)
from fp8bench.report.page.section import Material, mark_emulated, section, titled_panels
from fp8bench.report.panels import NamedCase, Panel, together
from fp8bench.report.words.naming import join_words

# The most modules that are named.
MOST_MODULES = 20
_LEGEND = (
    "shares come from a separate pass, which looks at every operator; times are estimates: share x best case",
    f"{UNATTRIBUTED}: between operators, on the host; view: no work, only the time of the call",
    "cast: copies between floating-point dtypes; copy: all other copies; gather: reads by index",
    "module: path in the model; the model's class for operators outside of its modules",
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
    sections = []
    for place, (setting, members) in enumerate(together((part.case.setting, part) for part in parts).items()):
        sections.append(Part(f"setting-{place}", setting, tuple(_elements(members))))
    return Page(f"the parts of a step of run {run.id}", "", tuple(sections), _LEGEND)


def _elements(parts: Sequence[StepShares]) -> Elements:
    cases = [(part.case.mode, part) for part in parts if part.shares is not None]
    if cases:
        yield from tables_of(cases, ("", ""))
    words = [f"{part.case.mode}: its parts are unknown: {part.why}" for part in parts if part.shares is None]
    for mode, part in cases:
        words += [f"{mode}: {remark}" for remark in part.remarks]
    yield from items_of(words)


def tables_of(parts: Sequence[tuple[str, StepShares]], captions: tuple[str, str]) -> Tables:
    """Yields the shares of titled cases by kind of work and by module, a column for each case."""
    kinds = _sort_keys([step.by_kind for _, step in parts])
    yield _shares_table("kind", captions[0], parts, [*kinds, UNATTRIBUTED])
    if modules := _sort_keys([step.by_module for _, step in parts])[:MOST_MODULES]:
        yield _shares_table("module", captions[1], parts, modules)


def _shares_table(name: str, caption: str, parts: Sequence[tuple[str, StepShares]], keys: Sequence[str]) -> Table:
    def field(key: str, step: StepShares) -> Field | None:
        share = (step.by_kind if name == "kind" else step.by_module).get(key)
        if share is None:
            return None
        estimated = "" if step.seconds is None else f"  {units.seconds(share * step.seconds)}"
        return Field(f"{units.percent(share)}{estimated}", share)

    cols: Cols[str] = [Col(name, str)]
    cols += [Col(title, partial(field, step=step), number=True) for title, step in parts]
    return table(f"{name}s", caption, cols, keys)


def _sort_keys(shares: Sequence[Mapping[str, float]]) -> list[str]:
    """Returns the keys by their largest share in any case, largest first, without the unattributed rest."""
    largest: dict[str, float] = {}
    for shares_of_case in shares:
        for key, share in shares_of_case.items():
            largest[key] = max(largest.get(key, 0.0), share)
    largest.pop(UNATTRIBUTED, None)
    return sorted(largest, key=lambda key: -largest[key])


def value_of(parts: Sequence[StepShares]) -> dict[str, object]:
    shares = []
    for part in parts:
        values = {
            "case": part.case.id,
            "precision": part.case.mode,
            "why": part.why,
            "seconds": part.seconds,
            "of": part.shares.of.value if part.shares is not None else None,
            "remarks": list(part.remarks),
            "parts": [encode(row) for row in part.rows],
        }
        shares.append(values)
    return {"shares": shares}


def rows_of(parts: Sequence[StepShares]) -> Rows:
    """Returns a row for each part of a case, longest first and the rest last; `seconds` are estimated by shares."""
    rows = []
    for part in parts:
        source = part.shares.of if part.shares is not None else SharesFrom.OPERATORS
        about = {
            "case": part.case.id,
            "precision": part.case.mode,
            "provenance": Provenance.ESTIMATED.value,
            "of": source.value,
        }
        rows += [encode(row) | about for row in part.rows]
    return _OF_CSV, rows


@section("shares", "The parts of a step", 62)
def shares_section(material: Material) -> Elements:
    """Shares come from a separate pass that looks at every operator of a step, or every kernel of a device; times are
    estimates: these shares of the best case. Unattributed is time of the host between operators.
    """
    for title, panel in titled_panels(material):
        cases = [(case, parts_of_record(case.record, case.finding)) for case in panel.members]
        cases = [(case, parts) for case, parts in cases if parts.shares is not None]
        if cases:
            yield from _panel(title, panel.suite, cases)


def _panel(title: str, suite: str, cases: Sequence[tuple[NamedCase, StepShares]]) -> Elements:
    named = [(mark_emulated(case, case.name), parts) for case, parts in cases]
    captions = f"{title}: a step by kind of work", f"{title}: the modules that take most"
    for shares in tables_of(named, captions):
        yield replace(shares, name=f"share-{shares.name}-{suite}")
    names_by_remark: dict[str, list[str]] = {}
    for case, parts in cases:
        for remark in parts.remarks:
            names_by_remark.setdefault(remark, []).append(case.name)
    yield from items_of((f"{', '.join(names)}: {remark}" for remark, names in names_by_remark.items()), Tone.DOUBT)


_KINDS = {
    "linear": "linear layers",
    "conv1d": "Conv1D (GPT-2's linear layers)",
    "conv2d": "convolutions",
    "experts": "experts (a matrix for each)",
    "head": "the head",
}
_OUTSIDE = "outside of layers"
# The reason, the names of weights or products, and their FLOPs.
Unconverted = tuple[str, list[str], int]


def coverages(panel: Panel) -> list[tuple[str, Coverage]]:
    """Returns the coverages of a panel's cases, each once, with the modes of its cases, as 'bf16, fp8'."""
    covered = panel.find_values(lambda result: result.record.coverage)
    by_coverage = together((row.value, row.case.mode) for row in covered)
    return [(", ".join(dict.fromkeys(modes)), coverage) for coverage, modes in by_coverage.items()]


def coverage_sentence(modes: str, coverage: Coverage) -> str:
    """'92.1% of the FLOPs of a step's products are converted in bf16, fp8: 1.2 GFLOP of 1.3 GFLOP'."""
    words = f"{units.percent(coverage.share)} of the FLOPs of a step's products are converted in {modes}"
    return f"{words}: {units.count(coverage.converted_flops, 'FLOP')} of {units.count(coverage.flops, 'FLOP')}"


def coverage_elements(panel: Panel, number: int = 0) -> Elements:
    for place, (modes, coverage) in enumerate(coverages(panel)):
        name = f"{number}-{place}" if number or place else "kinds"
        yield Text(f"{coverage_sentence(modes, coverage)}.", Tone.STRONG)
        yield _kinds(f"coverage-{name}", modes, coverage)
        if reasons := left_of(coverage):
            yield _reasons(f"coverage-left-{name}", modes, reasons, coverage)
        yield from items_of(_remarks(coverage))


def _kinds(name: str, modes: str, coverage: Coverage) -> Table:
    counts = Counter(holder.kind for holder in coverage.holders)
    rows: list[tuple[str, int | None, int, int]] = []
    for kind, flops in coverage.by_kind().items():
        rows.append((_KINDS.get(kind, kind), counts[kind], *flops))
    if coverage.others:
        rows.append((_OUTSIDE, None, sum(product.flops or 0 for product in coverage.others), 0))
    cols: Cols[tuple[str, int | None, int, int]] = [
        Col("products of", itemgetter(0)),
        Col("weights", itemgetter(1), show=str),
        Col("FLOPs", itemgetter(2), show=units.count),
        Col("share", lambda row: _over(row[2], coverage.flops), show=units.percent),
        Col("converted", lambda row: _over(row[3], row[2]), show=units.percent),
    ]
    return table(name, f"what is converted in {modes}", cols, rows)


def left_of(coverage: Coverage) -> list[Unconverted]:
    """Returns what is not converted, most FLOPs first: (reason, names, FLOPs)."""
    names = defaultdict[str, list[str]](list)
    flops = Counter[str]()
    for holder in coverage.holders:
        if not holder.converted:
            names[holder.reason].append(holder.name)
            flops[holder.reason] += holder.flops
    for product in coverage.others:
        names[product.reason].append(product.weight or product.module or product.operator)
        flops[product.reason] += product.flops or 0
    return sorted(((reason, names[reason], flops[reason]) for reason in names), key=lambda row: -row[2])


def _reasons(name: str, modes: str, reasons: Sequence[Unconverted], coverage: Coverage) -> Table:
    cols: Cols[Unconverted] = [
        Col("not converted", lambda row: join_words(row[1], 3)),
        Col("share", lambda row: _over(row[2], coverage.flops), show=units.percent),
        Col("why", itemgetter(0), below=True),
    ]
    return table(name, f"what is not converted in {modes}, and why", cols, reasons)


def _remarks(coverage: Coverage) -> Sentences:
    yield from coverage.remarks
    if coverage.loss:
        yield f"backward begins from {coverage.loss}"
    yield from shape_remarks(coverage)
    if coverage.unknown:
        yield f"{coverage.unknown} calls of operators without a formula are not counted"


def shape_remarks(coverage: Coverage) -> Sentences:
    """Yields what native products would refuse in the shapes of converted layers, a line for each reason."""
    refused = [holder for holder in coverage.holders if holder.converted and holder.native]
    for reason, names in together((holder.native, holder.name) for holder in refused).items():
        yield f"{join_words(names, 3)}: {reason}"


def _over(part: int, total: int) -> float:
    if total:
        return part / total
    return 0.0


@section("coverage", "Coverage", 15)
def coverage_section(material: Material) -> Elements:
    """How many of a model's products are computed in a lower precision, counted in an untimed step."""
    for number, (_, panel) in enumerate(material.panels()):
        yield from coverage_elements(panel, number)
