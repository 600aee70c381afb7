"""Panels that are about what is left of tensors: their numbers are what one reads, and not their times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from fp8bench import units
from fp8bench.errors import UsageError
from fp8bench.protocols import Precision
from fp8bench.registry import precisions
from fp8bench.report.material import Material
from fp8bench.report.panels import Panel, Result, ResultGroup
from fp8bench.report.terminal.tables import value_of
from fp8bench.report.words.naming import titled_panels

SQNR = "sqnr_db"
WORST_ROWS, WORST_BLOCKS = "sqnr_row_p1_db", "sqnr_block_p1_db"
UNDERFLOW, SATURATION = "underflow_percent", "saturation_percent"
# Metrics, the titles of their columns, and what they are; docs/numerics.md has the definitions.
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
# Options of a precision that is one format under one scaling, and the words for none of their own.
_FORMAT, _SCALING = "format", "scaling"
_EXACT, _SAME, _NONE, _ROLES = "exact", "same", "none", ("input", "weight", "gradient")
OWN = "its own"
# A shape is of the tensor, and does not tell one from another unless it is made in several.
_NAME = "tensor"


@dataclass(frozen=True)
class Cell:
    """Where a precision stands in the table of formats and scalings, and what it is called where there is no table.

    A recipe that is not one format under one scaling stands under `OWN`.
    """

    fmt: str
    scaling: str
    words: str


def about_tensors(panel: Panel) -> bool:
    """Whether its cases have the figures of a rounded tensor."""
    return {SQNR, WORST_BLOCKS, UNDERFLOW} <= {*panel.metrics}


def timed_panels(material: Material) -> Iterator[tuple[str, Panel]]:
    """The others under their titles: those whose times are worth a chart."""
    return ((title, panel) for title, panel in titled_panels(material) if not about_tensors(panel))


def cell_of(result: Result) -> Cell:
    """By the options of its precision, if that is one format under one scaling; else its own name stands alone."""
    case = result.record.case
    return Cell(case.mode, OWN, case.mode) if case.precision_map else _cell(case.precision)


@cache
def _cell(word: str) -> Cell:
    """Of a precision that this version may not know: runs outlive it."""
    try:
        precision = precisions.get(word)
    except UsageError:
        return Cell(word, OWN, word)
    chosen = precision.chosen
    if not {_FORMAT, _SCALING} <= {*chosen} or any(chosen.get(role, _SAME) != _SAME for role in _ROLES):
        return Cell(word, OWN if hasattr(precision, "recipe") else _NONE, word)
    fmt, scaling = str(chosen[_FORMAT]), f"{chosen[_SCALING]} {_rounding(precision)}".strip()
    return Cell(fmt, scaling, f"{fmt} {scaling}")


def _rounding(precision: Precision) -> str:
    """How its scales are rounded, where they are: an MX format without that word may be any of four."""
    recipe = getattr(precision, "recipe", None)
    scaling = recipe.input.scaling if recipe is not None else None
    word = str(scaling.rounding) if scaling is not None else ""
    return "" if word == _EXACT else word


def tensor_name(panel: Panel, group: ResultGroup) -> str:
    """What a group's tensor is called, with what else tells it from others of that name."""
    own = dict(group.case.params)
    if _NAME not in own:
        return panel.place(group) or panel.case.workload
    alike = [other for other in panel.groups if dict(other.case.params).get(_NAME) == own[_NAME]]
    if len(alike) == 1:
        return str(own[_NAME])
    told = [name for name in own if len({dict(other.case.params).get(name) for other in alike}) > 1]
    return " ".join([str(own[_NAME]), *(f"{name}={own[name]}" for name in told)])


def figure(result: Result, metric: str) -> tuple[str, float | None]:
    """One figure of a case as text and as a number; a dash where it has none."""
    measured = result.record.measurement(metric)
    value = value_of(measured)
    if measured is None or value is None:
        return units.NONE, None
    return shown(value, measured.unit), value


def shown(value: float, unit: str) -> str:
    """Without the unit, for a column whose title has it: '31.6', '0.64%'."""
    if unit == "dB":
        return units.decibels(value).removesuffix(" dB")
    if unit == units.RATIO:
        return units.significant(value, 5) if 0.1 <= abs(value) < 10 else units.relative_error(value)
    return units.percentage(value) if unit == "%" else units.significant(value)
