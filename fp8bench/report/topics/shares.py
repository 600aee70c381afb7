"""Reports the share of each kind of work and of each module in a step, and how many of a model's products are
converted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import itemgetter

from fp8bench import units
from fp8bench.analysis.tapes import StepShares, make_step_shares
from fp8bench.model import UNATTRIBUTED, Provenance, Run, SharesFrom
from fp8bench.model.codec import encode
from fp8bench.model.step import Coverage
from fp8bench.report.columns import Col, ColumnList, table
from fp8bench.report.data.plain import PlainRows
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
    bullet_list,
)
from fp8bench.report.page.section import Material, iterate_titled_panels, mark_emulation, section
from fp8bench.report.panels import NamedCase, Panel, together
from fp8bench.report.words.naming import join_remarks, join_words

# The table of modules has at most this many rows.
MAX_MODULE_ROWS = 20
_LEGEND = (
    "shares come from a separate pass, which looks at every operator; times are estimates: share x best case",
    f"{UNATTRIBUTED}: between operators, on the host; view: no work, only the time of the call",
    "cast: all copies between floating-point dtypes (the phase cast is only those of operands)",
    "copy: all other copies; gather: reads by index",
    "module: path in the model; the model's class for operators outside of its modules",
)
_CSV_COLUMNS = (
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


def step_shares_page(run: Run, parts: Sequence[StepShares]) -> Page:
    page_sections = []
    for setting_number, (setting, parts_of_setting) in enumerate(
        together((part.case.setting, part) for part in parts).items()
    ):
        page_sections.append(
            Part(f"setting-{setting_number}", setting, tuple(_render_setting_shares(parts_of_setting)))
        )
    return Page(f"the parts of a step of run {run.id}", "", tuple(page_sections), _LEGEND)


def _render_setting_shares(parts: Sequence[StepShares]) -> Elements:
    cases = [(part.case.mode, part) for part in parts if part.shares is not None]
    if cases:
        yield from make_time_share_tables(cases, ("", ""))
    remarks = [f"the parts of {part.case.mode} are unknown: {part.why}" for part in parts if part.shares is None]
    for mode, part in cases:
        remarks += [f"{mode}: {remark}" for remark in part.remarks]
    yield from bullet_list(remarks)


def make_time_share_tables(parts: Sequence[tuple[str, StepShares]], captions: tuple[str, str]) -> Tables:
    """Yields a table of time shares by kind of work, and a table by module. `parts` has a column title and the shares
    of a case for each column.
    """
    sorted_kinds = _sort_by_share([step.by_kind for _, step in parts])
    yield _make_shares_table("kind", captions[0], parts, [*sorted_kinds, UNATTRIBUTED])
    if top_modules := _sort_by_share([step.by_module for _, step in parts])[:MAX_MODULE_ROWS]:
        yield _make_shares_table("module", captions[1], parts, top_modules)


def _make_shares_table(name: str, caption: str, parts: Sequence[tuple[str, StepShares]], keys: Sequence[str]) -> Table:
    def share_field(key: str, step: StepShares) -> Field | None:
        share = (step.by_kind if name == "kind" else step.by_module).get(key)
        if share is None:
            return None
        seconds_text = "" if step.seconds is None else f"  {units.seconds(share * step.seconds)}"
        return Field(f"{units.percent(share)}{seconds_text}", share)

    cols: ColumnList[str] = [Col(name, str)]
    cols += [Col(title, partial(share_field, step=step), number=True) for title, step in parts]
    return table(f"{name}s", caption, cols, keys)


def _sort_by_share(shares: Sequence[Mapping[str, float]]) -> list[str]:
    """Returns the kinds of work or modules, sorted by their largest share in any case. The unattributed time is left
    out.
    """
    shares_by_name = together(chain.from_iterable(shares_of_case.items() for shares_of_case in shares))
    shares_by_name.pop(UNATTRIBUTED, None)
    return sorted(shares_by_name, key=lambda key: -max(shares_by_name[key]))


def step_shares_document(parts: Sequence[StepShares]) -> dict[str, object]:
    shares = [
        {
            "case": part.case.id,
            "precision": part.case.mode,
            "why": part.why,
            "seconds": part.seconds,
            "of": part.shares.of.value if part.shares is not None else None,
            "remarks": list(part.remarks),
            "parts": list(map(encode, part.rows)),
        }
        for part in parts
    ]
    return {"shares": shares}


def make_share_rows(parts: Sequence[StepShares]) -> PlainRows:
    """Returns a CSV row for each kind of work and each module of a case, the longest first and unattributed time last.
    Seconds are estimates: the share times the best-case step time.
    """
    rows = []
    for part in parts:
        source = part.shares.of if part.shares is not None else SharesFrom.OPERATORS
        case_row_fields = {
            "case": part.case.id,
            "precision": part.case.mode,
            "provenance": Provenance.ESTIMATED.value,
            "of": source.value,
        }
        rows += [encode(row) | case_row_fields for row in part.rows]
    return _CSV_COLUMNS, rows


@section("shares", "The parts of a step", 62)
def shares_section(material: Material) -> Elements:
    """Shares come from a separate pass that looks at every operator of a step, or every kernel of a device. Times are
    estimates: the share times the best case. Cast is all copies between dtypes; the phase cast is only the copies of
    operands. Unattributed is time of the host between operators.
    """
    for title, panel in iterate_titled_panels(material):
        cases = [(case, make_step_shares(case.record, case.finding)) for case in panel.named_cases]
        cases = [(case, parts) for case, parts in cases if parts.shares is not None]
        if cases:
            yield from _make_panel_share_elements(title, panel.suite, cases)


def _make_panel_share_elements(title: str, suite: str, cases: Sequence[tuple[NamedCase, StepShares]]) -> Elements:
    named_parts = [(mark_emulation(case, case.name), parts) for case, parts in cases]
    captions = f"{title}: a step by kind of work", f"{title}: the modules that take most"
    for shares in make_time_share_tables(named_parts, captions):
        yield replace(shares, name=f"share-{shares.name}-{suite}")
    yield from bullet_list(join_remarks(((case.name, parts.remarks) for case, parts in cases), ", ".join), Tone.DOUBT)


_LAYER_KINDS = {
    "linear": "linear layers",
    "conv1d": "Conv1D (GPT-2's linear layers)",
    "conv2d": "convolutions",
    "experts": "experts (a matrix for each)",
    "head": "the head",
}
_OUTSIDE_OF_LAYERS = "outside of layers"
# Products that are not converted for the same reason: the reason, their names (or their weights'), and their FLOPs.
UnconvertedProducts = tuple[str, list[str], int]


def list_distinct_coverages(panel: Panel) -> list[tuple[str, Coverage]]:
    """Returns the distinct coverages of a panel's cases with their precisions, as ('bf16, fp8', coverage). A coverage
    shows which matrix products are converted to a lower precision, and their share of the FLOPs.
    """
    covered_cases = panel.find_case_values(lambda result: result.record.coverage)
    modes_by_coverage = together((row.value, row.case.mode) for row in covered_cases)
    return [(", ".join(dict.fromkeys(modes)), coverage) for coverage, modes in modes_by_coverage.items()]


def describe_coverage(modes: str, coverage: Coverage) -> str:
    """Returns how many FLOPs are converted, as '92.1% of the FLOPs of a step's products are converted in bf16, fp8:
    1.2 GFLOP of 1.3 GFLOP'.
    """
    share_text = f"{units.percent(coverage.share)} of the FLOPs of a step's products are converted in {modes}"
    return f"{share_text}: {units.count(coverage.converted_flops, 'FLOP')} of {units.count(coverage.flops, 'FLOP')}"


def render_coverage(panel: Panel, number: int = 0) -> Elements:
    for index, (modes, coverage) in enumerate(list_distinct_coverages(panel)):
        table_name_suffix = f"{number}-{index}" if number or index else "kinds"
        yield Text(f"{describe_coverage(modes, coverage)}.", Tone.STRONG)
        yield _make_layer_kinds_table(f"coverage-{table_name_suffix}", modes, coverage)
        if reasons := list_unconverted_products(coverage):
            yield _unconverted_products_table(f"coverage-left-{table_name_suffix}", modes, reasons, coverage)
        yield from bullet_list(_coverage_remarks(coverage))


def _make_layer_kinds_table(name: str, modes: str, coverage: Coverage) -> Table:
    layer_counts = Counter(weight_holder.kind for weight_holder in coverage.holders)
    rows: list[tuple[str, int | None, int, int]] = []
    for layer_kind, flops in coverage.by_kind().items():
        rows.append((_LAYER_KINDS.get(layer_kind, layer_kind), layer_counts[layer_kind], *flops))
    if coverage.others:
        rows.append((_OUTSIDE_OF_LAYERS, None, sum(product.flops or 0 for product in coverage.others), 0))
    cols: ColumnList[tuple[str, int | None, int, int]] = [
        Col("products of", itemgetter(0)),
        Col("weights", itemgetter(1), show=str),
        Col("FLOPs", itemgetter(2), show=units.count),
        Col("share", lambda row: row[2] / max(coverage.flops, 1), show=units.percent),
        Col("converted", lambda row: row[3] / max(row[2], 1), show=units.percent),
    ]
    return table(name, f"what is converted in {modes}", cols, rows)


def list_unconverted_products(coverage: Coverage) -> list[UnconvertedProducts]:
    """Returns the matrix products that are not converted to a lower precision as (reason, names, FLOPs), the largest
    FLOPs first.
    """
    products = [
        (weight_holder.reason, (weight_holder.name, weight_holder.flops))
        for weight_holder in coverage.holders
        if not weight_holder.converted
    ]
    for product in coverage.others:
        name = product.weight or product.module or product.operator
        products.append((product.reason, (name, product.flops or 0)))
    rows = []
    for reason, named_flops in together(products).items():
        rows.append((reason, [name for name, _ in named_flops], sum(flops for _, flops in named_flops)))
    return sorted(rows, key=lambda row: -row[2])


def _unconverted_products_table(
    name: str, modes: str, reasons: Sequence[UnconvertedProducts], coverage: Coverage
) -> Table:
    cols: ColumnList[UnconvertedProducts] = [
        Col("not converted", lambda row: join_words(row[1], 3)),
        Col("share", lambda row: row[2] / max(coverage.flops, 1), show=units.percent),
        Col("why", itemgetter(0), below=True),
    ]
    return table(name, f"what is not converted in {modes}, and why", cols, reasons)


def _coverage_remarks(coverage: Coverage) -> Sentences:
    yield from coverage.remarks
    if coverage.loss:
        yield f"backward begins from {coverage.loss}"
    yield from describe_refused_shapes(coverage)
    if coverage.unknown:
        yield f"{coverage.unknown} calls of operators without a formula are not counted"


def describe_refused_shapes(coverage: Coverage) -> Sentences:
    """Yields why native products would refuse the shapes of some converted layers, with the names of these layers."""
    refused_weight_holders = [
        weight_holder for weight_holder in coverage.holders if weight_holder.converted and weight_holder.native
    ]
    for reason, names in together(
        (weight_holder.native, weight_holder.name) for weight_holder in refused_weight_holders
    ).items():
        yield f"{join_words(names, 3)}: {reason}"


@section("coverage", "Coverage", 15)
def coverage_section(material: Material) -> Elements:
    """An untimed step shows how many of a model's matrix products are computed in a lower precision."""
    for panel_number, (_, panel) in enumerate(material.panels()):
        yield from render_coverage(panel, panel_number)
