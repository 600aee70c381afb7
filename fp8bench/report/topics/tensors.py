"""The errors of formats and scalings on tensors: panels about errors, not times."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from fp8bench import units
from fp8bench.errors import UsageError
from fp8bench.model.specs import spec_of
from fp8bench.registry import precisions
from fp8bench.report.columns import Col, Cols, table
from fp8bench.report.elements import Elements, Field, Table, Tables, Text, Tone
from fp8bench.report.page.section import Material, section, titled_panels
from fp8bench.report.panels import NamedCase, Panel, Result, ResultGroup, value_of
from fp8bench.report.terminal.layout import GAP, INDENT
from fp8bench.report.words.naming import join_words

SQNR = "sqnr_db"
WORST_ROWS = "sqnr_row_p1_db"
WORST_BLOCKS = "sqnr_block_p1_db"
UNDERFLOW = "underflow_percent"
SATURATION = "saturation_percent"
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
# Options of precisions with one format and one scaling, and the values that choose nothing special.
_FORMAT = "format"
_SCALING = "scaling"
_EXACT = "exact"
_SAME = "same"
_ROLES = ("input", "weight", "gradient")
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
    """A precision's format, and its name, as 'e4m3fn row'; a recipe of several formats keeps its name."""

    fmt: str
    words: str


def about_tensors(panel: Panel) -> bool:
    return {SQNR, WORST_BLOCKS, UNDERFLOW} <= {*panel.metrics}


def timed_panels(material: Material) -> Iterator[tuple[str, Panel]]:
    return ((title, panel) for title, panel in titled_panels(material) if not about_tensors(panel))


def cell_of(result: Result) -> TensorCell:
    case = result.record.case
    if case.precision_map:
        return TensorCell(case.mode, case.mode)
    return _cell(case.precision)


@cache
def _cell(word: str) -> TensorCell:
    """Returns the word itself if this version does not have the precision."""
    named = TensorCell(word, word)
    try:
        precision = precisions.get(word)
    except UsageError:
        return named
    chosen = precision.chosen
    if not {_FORMAT, _SCALING} <= {*chosen} or any(chosen.get(role, _SAME) != _SAME for role in _ROLES):
        return named
    # An MX format may round its scales in four ways.
    recipe = getattr(precision, "recipe", None)
    scaling = recipe.input.scaling if recipe is not None else None
    rounding = "" if scaling is None or str(scaling.rounding) == _EXACT else str(scaling.rounding)
    fmt = str(chosen[_FORMAT])
    return TensorCell(fmt, f"{fmt} {chosen[_SCALING]} {rounding}".strip())


def tensor_name(panel: Panel, group: ResultGroup) -> str:
    params = dict(group.case.params)
    if _NAME not in params:
        return group.place or panel.suite
    all_params = [dict(neighbour.case.params) for neighbour in panel.groups]
    # The shape is only named if the tensor comes in several.
    namesakes = [neighbour for neighbour in all_params if neighbour.get(_NAME) == params[_NAME]]
    words = [str(params[_NAME])]
    for name, value in params.items():
        if any(namesake.get(name) != value for namesake in namesakes):
            words.append(f"{name}={value}")
    return " ".join(words)


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
        if 0.1 <= abs(value) < 10:
            return units.significant(value, 5)
        return units.relative_error(value)
    if unit == "%":
        return units.percentage(value)
    return units.significant(value)


def best_by_width(panel: Panel) -> Iterator[str]:
    """Yields 'with 8 bits e4m3fn 1x128 has the highest SQNR in all 13 tensors of numerics: 31.8 to 45.0 dB'.

    Widths with a single precision have no sentence.
    """
    # SQNRs of each tensor by precision, and these by the bits of elements.
    widths: dict[int, list[dict[str, float]]] = {}
    for group in panel.groups:
        for bits, by_words in _by_width(group).items():
            widths.setdefault(bits, []).append(by_words)
    for bits, tensors in sorted(widths.items(), reverse=True):
        if len(set().union(*tensors)) > 1:
            yield _sentence(bits, tensors, panel.suite)


def _by_width(group: ResultGroup) -> dict[int, dict[str, float]]:
    """Returns SQNRs by the bits of elements, then by precision."""
    by_bits: dict[int, dict[str, float]] = {}
    for result in group.results:
        cell, (_, value) = cell_of(result), figure(result, SQNR)
        match = _ELEMENTS.match(cell.fmt)
        # A recipe of several formats has no single width.
        if match and value is not None:
            bits = 1 + int(match[1]) + int(match[2])
            by_bits.setdefault(bits, {})[cell.words] = value
    return by_bits


def _sentence(bits: int, tensors: Sequence[Mapping[str, float]], suite: str) -> str:
    winners: Counter[str] = Counter()
    for by_words in tensors:
        winners[max(by_words, key=lambda words: by_words[words])] += 1
    highest = [max(by_words.values()) for by_words in tensors]
    low = units.decibels(min(highest))
    high = units.decibels(max(highest))
    span = low if low == high else f"{low.removesuffix(' dB')} to {high}"
    (first, number), *runners_up = winners.most_common()
    total = len(tensors)
    share = f"{number} of" if number < total else "all"
    place = f"on {suite}" if total == 1 else f"in {share} {total} tensors of {suite}"
    place += "".join(f", {words} in {times}" for words, times in runners_up[:_MOST_NAMED])
    return f"with {bits} bits {first} has the highest SQNR {place}: {span}"


def tensors(panel: Panel, width: int) -> Elements:
    if len(panel.groups) > _MOST_IN_FULL:
        yield from _overview(panel, width)
        return
    several = len(panel.groups) > 1

    def of(heading: str, metric: str) -> Col[NamedCase]:
        tone = Tone.STRONG if metric == SQNR else Tone.PLAIN
        return Col(heading, lambda case: figure(case, metric)[0], number=True, tone=lambda _: tone)

    cols: Cols[NamedCase] = [
        Col("tensor", lambda case: tensor_name(panel, case.group) if several else "", shared=True),
        Col("precision", lambda case: cell_of(case).words),
        *itertools.starmap(of, _SHOWN),
    ]
    yield table("tensors", "", cols, panel.members)


def _overview(panel: Panel, width: int) -> Tables:
    """Yields SQNRs, a row for each precision and a column for each tensor, in tables that fit into the width."""
    modes = {case.mode: case for case in panel.members}
    names = [tensor_name(panel, group) for group in panel.groups]
    label = max(len(cell_of(result).words) for result in modes.values())

    def of(place: int) -> Col[Result]:
        fields = {result.mode: Field(*figure(result, SQNR)) for result in panel.groups[place].results}
        return Col(names[place], lambda result: fields.get(result.mode), number=True)

    for number, places in enumerate(_fitting([len(name) for name in names], width - len(INDENT) - label)):
        cols: Cols[Result] = [Col("precision", lambda result: cell_of(result).words), *map(of, places)]
        yield table("sqnr", "" if number else _OVERVIEW, cols, modes.values())


def _fitting(widths: Sequence[int], room: int) -> Sequence[Sequence[int]]:
    """Returns the indices of columns in as few groups of equal size as fit into the room."""
    places = range(len(widths))
    # As few tables as possible, equally wide.
    for count in range(1, len(widths) + 1):
        size = -(-len(widths) // count)
        runs = [places[start : start + size] for start in places[::size]]
        widest = max(sum(widths[run.start : run.stop]) + len(GAP) * len(run) for run in runs)
        if widest <= room:
            break
    return runs


@section("tensors", "Errors of tensors", 45)
def tensors_section(material: Material) -> Elements:
    """SQNR in dB: the power of a tensor over that of its error. 6 dB more is half the error; 0 dB means that nothing is
    left. The largest values decide it; for small values look at the worst rows and blocks, and at underflow. The suite
    cast is about the times.
    """
    panels = [(title, panel) for title, panel in titled_panels(material) if about_tensors(panel)]
    for title, panel in panels:
        for overview in _overview(panel, _PAGE_WIDTH):
            yield replace(overview, name=f"sqnr-{panel.suite}", caption=f"{title}: SQNR in dB, higher is better")
        for group in panel.groups:
            # An SQNR without the lost values would look better than it is.
            lossy = [result for result in group.results if (figure(result, "not_finite_percent")[1] or 0) > 0]
            if lossy:
                names = join_words(cell_of(result).words for result in lossy)
                words = f"{tensor_name(panel, group)}: numbers became infinite or NaN in {names}"
                yield Text(f"{words}; its SQNR leaves them out.", Tone.BAD)
    yield from (_all_figures(title, panel) for title, panel in panels)


def _all_figures(title: str, panel: Panel) -> Table:
    def of(metric: str) -> Col[NamedCase]:
        name, hint = FIGURES[metric]
        unit = spec_of(metric).unit.removeprefix(units.RATIO)
        return Col(name, lambda case: Field(*figure(case, metric)), number=True, hint=hint, unit=unit)

    cols: Cols[NamedCase] = [
        Col("tensor", lambda case: tensor_name(panel, case.group)),
        Col("precision", lambda case: cell_of(case).words),
        *(of(metric) for metric in FIGURES if metric in panel.metrics and metric != SQNR),
    ]
    rows = [case for case in panel.members if figure(case, SQNR)[1] is not None]
    return table(f"figures-{panel.suite}", f"{title}: all other figures", cols, rows, folded=True)
