"""Panels about tensors for a terminal: every figure of a few tensors, the SQNR alone of many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8bench.report.elements import Column, Element, Field, Table, Tone
from fp8bench.report.panels import Panel, Result
from fp8bench.report.tensor_panels import (
    SATURATION,
    SQNR,
    UNDERFLOW,
    WORST_BLOCKS,
    WORST_ROWS,
    cell_of,
    figure,
    tensor_name,
)
from fp8bench.report.terminal.layout import GAP, INDENT

LEGEND = (
    "SQNR: the tensor's power over that of its error, in dB: 6 dB more is half the error, 0 is nothing left; worst "
    "rows, blocks: the SQNR that 1% of the rows, or of blocks of 32, are below; underflow: values that became zero; "
    "saturated: values beyond the format's largest; slope: 1 if values do not shrink"
)
_OVERVIEW = "SQNR in dB, higher is better; all other figures: the report, --csv, or one tensor alone"
# More tensors than this would be read by nobody at that length.
_MOST_IN_FULL = 2
_FIGURES = (
    ("SQNR", SQNR), ("worst rows", WORST_ROWS), ("worst blocks", WORST_BLOCKS), ("underflow", UNDERFLOW),
    ("saturated", SATURATION), ("slope", "slope"),
)  # fmt: skip


def tensors(panel: Panel, width: int) -> Iterator[Element]:
    """A table of the figures of each tensor, or of many tensors one of the SQNR by precision and tensor."""
    if len(panel.groups) > _MOST_IN_FULL:
        yield from _overview(panel, width)
        return
    columns = (
        Column("tensor", shared=True),
        Column("precision"),
        *(Column(title, number=True) for title, _ in _FIGURES),
    )
    rows = tuple(
        (Field(tensor_name(panel, group) if len(panel.groups) > 1 else ""),
         *_row(one, [figure(one, metric)[0] for _, metric in _FIGURES], Tone.STRONG))
        for group, one in panel.members
    )  # fmt: skip
    yield Table("tensors", "", columns, rows)


def _overview(panel: Panel, width: int) -> Iterator[Element]:
    """As many tensors beside each other as fit, the others below."""
    modes = {result.mode: result for group in panel.groups for result in group.results}
    found = [{one.mode: figure(one, SQNR)[0] for one in group.results} for group in panel.groups]
    names = [tensor_name(panel, group) for group in panel.groups]
    label = max(len(cell_of(one).words) for one in modes.values())
    for number, places in enumerate(_fitting([len(name) for name in names], width - len(INDENT) - label)):
        columns = (Column("precision"), *(Column(names[place], number=True) for place in places))
        rows = tuple(_row(one, [found[place].get(mode, "-") for place in places]) for mode, one in modes.items())
        yield Table("sqnr", "" if number else _OVERVIEW, columns, rows)


def _row(result: Result, cells: Sequence[str], first: Tone = Tone.PLAIN) -> tuple[Field, ...]:
    return Field(cell_of(result).words), Field(cells[0], tone=first), *map(Field, cells[1:])


def _fitting(widths: Sequence[int], room: int) -> list[list[int]]:
    """Places of columns in as few even runs as fit into the room; the last resort is one column each."""
    places = range(len(widths))
    for count in range(1, len(widths) + 1):
        size = -(-len(widths) // count)
        runs = [list(places[start : start + size]) for start in range(0, len(widths), size)]
        if all(sum(widths[place] + len(GAP) for place in run) <= room for run in runs):
            return runs
    return [[place] for place in places]
