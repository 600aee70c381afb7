"""What formats and scalings leave of tensors: a table of both for each tensor, and every figure for who asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fp8bench import units
from fp8bench.model.specs import spec_of
from fp8bench.report.elements import Column, Element, Field, Table, Text, Tone
from fp8bench.report.material import Material
from fp8bench.report.page.section import Section, sections
from fp8bench.report.panels import Panel, Result, ResultGroup
from fp8bench.report.tensor_panels import (
    FIGURES,
    OWN,
    SATURATION,
    SQNR,
    UNDERFLOW,
    WORST_BLOCKS,
    WORST_ROWS,
    about_tensors,
    cell_of,
    figure,
    tensor_name,
)
from fp8bench.report.words.naming import listed, titled_panels

_IN_HINTS = (WORST_ROWS, WORST_BLOCKS, UNDERFLOW, SATURATION, "slope")


@sections.register("tensors")
class Tensors(Section):
    """SQNR by format and scaling, tensor by tensor; what tells more about it on hovering."""

    name = "tensors"
    title = "What is left of a tensor"
    lead = (
        "SQNR in dB: the power of a tensor over that of its error. 6 dB more is half the error; 0 dB means that "
        "nothing is left. The largest values decide it: what happens to small ones shows in the worst rows and blocks, "
        "and in what underflows. Times have no part here: the suite cast is about them."
    )
    rank = 45

    def elements(self, material: Material) -> Iterator[Element]:
        panels = [(title, panel) for title, panel in titled_panels(material) if about_tensors(panel)]
        for title, panel in panels:
            for group in panel.groups:
                yield from _grid(title, tensor_name(panel, group), group)
        yield from (_all_figures(title, panel) for title, panel in panels)


def _grid(title: str, tensor: str, group: ResultGroup) -> Iterator[Element]:
    """Scalings down, formats across; the best scaling of each format stands out."""
    cells = {(cell.scaling, cell.fmt): one for one in group.results for cell in [cell_of(one)]}
    scalings, formats = (list(dict.fromkeys(key[place] for key in cells)) for place in (0, 1))
    best = {fmt: _best(fmt, cells) for fmt in formats}
    rows = tuple(
        (
            Field(scaling, hint="a recipe with formats and scalings by role" if scaling == OWN else ""),
            *(_sqnr(cells.get((scaling, fmt)), best[fmt]) for fmt in formats),
        )
        for scaling in scalings
    )
    columns = (Column("scaling"), *(Column(fmt, number=True, unit="dB") for fmt in formats))
    yield Table(f"sqnr-{group.case.workload}", f"{title}, {tensor}: SQNR in dB", columns, rows)
    lost = [cell_of(one).words for one in group.results if (figure(one, "not_finite_percent")[1] or 0) > 0]
    if lost:
        yield Text(f"{tensor}: numbers became infinite or NaN in {listed(lost)}; its SQNR leaves them out.", Tone.BAD)


def _best(fmt: str, cells: Mapping[tuple[str, str], Result]) -> float | None:
    """The highest SQNR of a format that has several scalings."""
    found = [figure(one, SQNR)[1] for (_, own), one in cells.items() if own == fmt]
    values = [value for value in found if value is not None]
    return max(values) if len(values) > 1 else None


def _sqnr(result: Result | None, best: float | None) -> Field:
    if result is None:
        return Field(units.NONE)
    text, value = figure(result, SQNR)
    if value is None:
        return Field(units.NONE, hint=result.record.reason)
    others = {metric: figure(result, metric)[0] for metric in _IN_HINTS}
    named = [
        f"{FIGURES[metric][0]} {text}{' dB' if metric.endswith('_db') and text != 'exact' else ''}"
        for metric, text in others.items()
        if text != units.NONE
    ]
    return Field(text, value, Tone.STRONG if value == best else Tone.PLAIN, ", ".join(named))


def _all_figures(title: str, panel: Panel) -> Table:
    """A row for each case, a column for each figure that any of them has."""
    present = [metric for metric in FIGURES if metric in panel.metrics]
    columns = [Column("tensor"), Column("precision"), *(_column(metric) for metric in present)]
    rows = tuple(
        (
            Field(tensor_name(panel, group)),
            Field(cell_of(one).words, hint=one.mode),
            *(Field(*figure(one, metric)) for metric in present),
        )
        for group, one in panel.members
        if figure(one, SQNR)[1] is not None
    )
    return Table(f"figures-{panel.case.workload}", f"{title}: all figures", tuple(columns), rows, folded=True)


def _column(metric: str) -> Column:
    name, hint = FIGURES[metric]
    unit = spec_of(metric).unit
    return Column(name, number=True, hint=f"{hint}; {metric}", unit="" if unit == units.RATIO else unit)
