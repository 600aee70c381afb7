"""Every figure of every tensor, for who wants them beside each other."""

from __future__ import annotations

from fp8bench import units
from fp8bench.report.blocks import Panel, Result
from fp8bench.report.elements import Column, Field, Part, Table
from fp8bench.report.material import Material
from fp8bench.report.naming import titled_panels
from fp8bench.report.section import Section, sections
from fp8bench.report.tensor_panels import FIGURES, SQNR, about_tensors, cell_of, figure, tensor_name

_LEAD = "SQNR in dB, shares in percent of all values, ranges in octaves; words on hovering say what each is."


@sections.register("tensor-figures")
class TensorFigures(Section):
    """A long table, and so far down."""

    name = "tensor-figures"
    summary = "all figures of what is left of each tensor"
    rank = 125

    def build(self, material: Material) -> Part | None:
        panels = [(title, panel) for title, panel in titled_panels(material) if about_tensors(panel)]
        tables = tuple(_all_figures(title, panel) for title, panel in panels)
        return Part(self.name, "All figures of tensors", tables, _LEAD) if tables else None


def _all_figures(title: str, panel: Panel) -> Table:
    """A row for each case, a column for each figure that any of them has."""
    present = [metric for metric in FIGURES if metric in panel.metrics]
    columns = [Column("tensor"), Column("precision"), *(_column(metric) for metric in present)]
    rows = tuple(
        (
            Field(tensor_name(panel, group)),
            Field(cell_of(one).words, hint=one.mode),
            *(_field(one, metric) for metric in present),
        )
        for group in panel.groups
        for one in group.results
        if figure(one, SQNR)[1] is not None
    )
    return Table(f"figures-{panel.case.workload}", f"{title}: all figures", tuple(columns), rows)


def _column(metric: str) -> Column:
    name, hint = FIGURES[metric]
    unit = units.unit_of(metric)
    return Column(name, number=True, hint=f"{hint}; {metric}", unit="" if unit == units.RATIO else unit)


def _field(result: Result, metric: str) -> Field:
    text, value = figure(result, metric)
    return Field(text, value)
