"""What formats and scalings leave of tensors: panels whose errors matter, and not their times."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

from fp8bench import units
from fp8bench.errors import UsageError
from fp8bench.model.specs import spec_of
from fp8bench.registry import precisions
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Element, Field, Table, Text, Tone
from fp8bench.report.page.section import Material, section, titled_panels
from fp8bench.report.panels import Panel, Result, ResultGroup, together, value_of
from fp8bench.report.terminal.layout import GAP, INDENT
from fp8bench.report.words.naming import join_words

SQNR = "sqnr_db"
WORST_ROWS, WORST_BLOCKS = "sqnr_row_p1_db", "sqnr_block_p1_db"
UNDERFLOW, SATURATION = "underflow_percent", "saturation_percent"
# Metrics with titles and descriptions of their columns; docs/formats.md defines them.
FIGURES = {
    SQNR: ("SQNR", "of the whole tensor"),
    "sqnr_row_median_db": ("rows, median", "SQNR of the middle row"),
    WORST_ROWS: ("rows, p1", "SQNR that 1% of the rows are below"),
    "sqnr_block_median_db": ("blocks, median", "SQNR of the middle block of 32"),
    WORST_BLOCKS: ("blocks, p1", "SQNR that 1% of the blocks of 32 are below"),
    "relative_error": ("relative error", "norm of the error over that of the tensor"),
    "max_ulp": ("max ulp", "largest error over the distance of neighbours on the grid; saturated values left out"),
    "cosine_loss": ("1 - cosine", "between the tensor and what is left of it"),
    "slope": ("slope", "1 if values neither shrink nor stretch on the whole"),
    UNDERFLOW: ("underflow", "values that became zero"),
    "underflow_nonzero_percent": ("of non-zeros", "the same, of the values that were not zero"),
    SATURATION: ("saturated", "beyond the format's largest, before the clamp"),
    "subnormal_percent": ("subnormal", "below the format's smallest normal number"),
    "not_finite_percent": ("lost", "numbers that became infinite or NaN"),
    "utilisation_percent": ("utilisation", "largest magnitude over the format's largest; of blocks, the middle one"),
    "dynamic_range_octaves": ("range", "octaves from the smallest magnitude that is not zero to the largest"),
    "scale_drift_octaves": ("scale drift", "the most octaves that a scale of earlier steps moved in a step"),
    "scale_lag_octaves": ("scale lag", "the most octaves above the largest value that such a scale let through"),
}
# Options of precisions that are one format under one scaling, and their words for no special one.
_FORMAT, _SCALING = "format", "scaling"
_EXACT, _SAME, _ROLES = "exact", "same", ("input", "weight", "gradient")
# The parameter that names a tensor. Its shape is only named if it comes in several.
_NAME = "tensor"
_ELEMENTS = re.compile(r"e(\d+)m(\d+)")
_MOST_NAMED = 3
LEGEND = (
    "SQNR: the tensor's power over that of its error, in dB: 6 dB more is half the error, 0 is nothing left; worst "
    "rows, blocks: the SQNR that 1% of the rows, or of blocks of 32, are below; underflow: values that became zero; "
    "saturated: values beyond the format's largest; slope: 1 if values do not shrink"
)
_OVERVIEW = "SQNR in dB, higher is better; all other figures: the report, --csv, or one tensor alone"
# In letters: a page has room for a column of every tensor.
_PAGE_WIDTH = 10_000
# For more tensors the table only has SQNRs.
_MOST_IN_FULL = 2
_SHOWN = (
    ("SQNR", SQNR),
    ("worst rows", WORST_ROWS),
    ("worst blocks", WORST_BLOCKS),
    ("underflow", UNDERFLOW),
    ("saturated", SATURATION),
    ("slope", "slope"),
)


class TensorCell(NamedTuple):
    """A precision's format, and its name: 'e4m3fn row'. A recipe of several formats is called as it is."""

    fmt: str
    words: str


def about_tensors(panel: Panel) -> bool:
    return {SQNR, WORST_BLOCKS, UNDERFLOW} <= {*panel.metrics}


def timed_panels(material: Material) -> Iterator[tuple[str, Panel]]:
    return ((title, panel) for title, panel in titled_panels(material) if not about_tensors(panel))


def cell_of(result: Result) -> TensorCell:
    case = result.record.case
    return TensorCell(case.mode, case.mode) if case.precision_map else _cell(case.precision)


@cache
def _cell(word: str) -> TensorCell:
    """Runs outlive versions, so the precision may be unknown here."""
    try:
        precision = precisions.get(word)
    except UsageError:
        return TensorCell(word, word)
    chosen = precision.chosen
    if not {_FORMAT, _SCALING} <= {*chosen} or any(chosen.get(role, _SAME) != _SAME for role in _ROLES):
        return TensorCell(word, word)
    recipe = getattr(precision, "recipe", None)
    own = recipe.input.scaling if recipe is not None else None
    # An MX format may round its scales in four ways.
    rounding = "" if own is None or str(own.rounding) == _EXACT else str(own.rounding)
    fmt = str(chosen[_FORMAT])
    return TensorCell(fmt, f"{fmt} {chosen[_SCALING]} {rounding}".strip())


def tensor_name(panel: Panel, group: ResultGroup) -> str:
    own = dict(group.case.params)
    if _NAME not in own:
        return group.place or panel.case.workload
    alike = [other for other in panel.groups if dict(other.case.params).get(_NAME) == own[_NAME]]
    if len(alike) == 1:
        return str(own[_NAME])
    told = [name for name in own if len({dict(other.case.params).get(name) for other in alike}) > 1]
    return " ".join([str(own[_NAME]), *(f"{name}={own[name]}" for name in told)])


def figure(result: Result, metric: str) -> tuple[str, float | None]:
    measured = result.record.measurement(metric)
    value = value_of(measured)
    if measured is None or value is None:
        return units.NONE, None
    return show_figure(value, measured.unit), value


def show_figure(value: float, unit: str) -> str:
    if unit == "dB":
        return units.decibels(value).removesuffix(" dB")
    if unit == units.RATIO:
        return units.significant(value, 5) if 0.1 <= abs(value) < 10 else units.relative_error(value)
    return units.percentage(value) if unit == "%" else units.significant(value)


def best_by_width(panel: Panel) -> Iterator[str]:
    """'with 8 bits e4m3fn 1x128 has the highest SQNR in all 13 tensors of numerics: 31.8 to 45.0 dB'.

    Widths with a single precision have no sentence.
    """
    known = [_by_width(group) for group in panel.groups]
    for bits in sorted({bits for group in known for bits in group}, reverse=True):
        by_group = [group[bits] for group in known if group.get(bits)]
        if len({words for group in by_group for words in group}) > 1:
            yield _sentence(bits, by_group, panel.case.workload)


def _by_width(group: ResultGroup) -> dict[int, dict[str, float]]:
    """SQNRs by the bits of elements, then by precision."""
    cells = ((cell_of(result), figure(result, SQNR)[1]) for result in group.results)
    known = ((_ELEMENTS.match(cell.fmt), cell.words, value) for cell, value in cells if value is not None)
    by_bits = together((1 + int(match[1]) + int(match[2]), (words, value)) for match, words, value in known if match)
    return {bits: dict(pairs) for bits, pairs in by_bits.items()}


def _sentence(bits: int, by_group: Sequence[Mapping[str, float]], suite: str) -> str:
    winners = [max(by_words, key=lambda words: by_words[words]) for by_words in by_group]
    best = [by_words[words] for by_words, words in zip(by_group, winners, strict=True)]
    low, high = units.decibels(min(best)), units.decibels(max(best))
    span = low if low == high else f"{low.removesuffix(' dB')} to {high}"
    (first, number), *others = Counter(winners).most_common()
    named = "".join(f", {words} in {times}" for words, times in others[:_MOST_NAMED])
    total = len(by_group)
    some = f"{number} of" if number < total else "all"
    where = f"on {suite}" if total == 1 else f"in {some} {total} tensors of {suite}"
    return f"with {bits} bits {first} has the highest SQNR {where}{named}: {span}"


def tensors(panel: Panel, width: int) -> Iterator[Element]:
    if len(panel.groups) > _MOST_IN_FULL:
        yield from _overview(panel, width)
        return
    several = len(panel.groups) > 1
    cols: list[Col[tuple[ResultGroup, Result]]] = [
        Col("tensor", lambda row: tensor_name(panel, row[0]) if several else "", shared=True),
        Col("precision", lambda row: cell_of(row[1]).words),
        *(
            Col(
                title,
                partial(lambda metric, row: figure(row[1], metric)[0], metric),
                number=True,
                tone=(lambda _: Tone.STRONG) if metric == SQNR else None,
            )
            for title, metric in _SHOWN
        ),
    ]
    yield table("tensors", "", cols, panel.members)


def _overview(panel: Panel, width: int) -> Iterator[Table]:
    modes = {result.mode: result for group in panel.groups for result in group.results}
    by_group = [{result.mode: Field(*figure(result, SQNR)) for result in group.results} for group in panel.groups]
    names = [tensor_name(panel, group) for group in panel.groups]
    label = max(len(cell_of(mode).words) for mode in modes.values())
    for number, places in enumerate(_fitting([len(name) for name in names], width - len(INDENT) - label)):
        cols: list[Col[Result]] = [
            Col("precision", lambda result: cell_of(result).words),
            *(
                Col(names[place], partial(lambda own, result: own.get(result.mode), by_group[place]), number=True)
                for place in places
            ),
        ]
        yield table("sqnr", "" if number else _OVERVIEW, cols, modes.values())


def _fitting(widths: Sequence[int], room: int) -> list[list[int]]:
    """Column indices in as few even runs as fit into the room, at least one a run."""
    places = range(len(widths))
    for count in range(1, len(widths) + 1):
        size = -(-len(widths) // count)
        runs = [list(places[start : start + size]) for start in range(0, len(widths), size)]
        if all(sum(widths[place] + len(GAP) for place in run) <= room for run in runs):
            return runs
    return [[place] for place in places]


@section("tensors", "What is left of a tensor", 45)
def tensors_section(material: Material) -> Iterator[Element]:
    """SQNR in dB: the power of a tensor over that of its error. 6 dB more is half the error; 0 dB means that nothing is
    left. The largest values decide it: what happens to small ones shows in the worst rows and blocks, and in what
    underflows. Times have no part here: the suite cast is about them.
    """
    panels = [(title, panel) for title, panel in titled_panels(material) if about_tensors(panel)]
    for title, panel in panels:
        for shown_table in _overview(panel, _PAGE_WIDTH):
            yield replace(
                shown_table, name=f"sqnr-{panel.case.workload}", caption=f"{title}: SQNR in dB, higher is better"
            )
        for group in panel.groups:
            lost = [cell_of(own).words for own in group.results if (figure(own, "not_finite_percent")[1] or 0) > 0]
            if lost:
                words = f"{tensor_name(panel, group)}: numbers became infinite or NaN in {join_words(lost)}"
                yield Text(f"{words}; its SQNR leaves them out.", Tone.BAD)
    yield from (_all_figures(title, panel) for title, panel in panels)


def _all_figures(title: str, panel: Panel) -> Table:
    def of(metric: str) -> Col[tuple[ResultGroup, Result]]:
        (name, hint), unit = FIGURES[metric], spec_of(metric).unit
        return Col(
            name,
            lambda row: Field(*figure(row[1], metric)),
            number=True,
            hint=f"{hint}; {metric}",
            unit="" if unit == units.RATIO else unit,
        )

    cols: list[Col[tuple[ResultGroup, Result]]] = [
        Col("tensor", lambda row: tensor_name(panel, row[0])),
        Col("precision", lambda row: Field(cell_of(row[1]).words, hint=row[1].mode)),
        *(of(metric) for metric in FIGURES if metric in panel.metrics and metric != SQNR),
    ]
    known = [(group, result) for group, result in panel.members if figure(result, SQNR)[1] is not None]
    return table(f"figures-{panel.case.workload}", f"{title}: all other figures", cols, known, folded=True)
