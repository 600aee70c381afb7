"""A run as wide rows: one a case, a column for each figure. docs/outputs.md says what the columns hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fp8bench.report.tidy_row import STEP, Cell, TidyRow
from fp8bench.units import unit_of

# Of the row of the step's time, which says what became of a case; of other rows the figures alone.
_OF_A_FIGURE = (
    "phase", "kind", "role", "metric", "unit", "median_in_unit", "best_in_unit", "n_rounds", "n_samples", "provenance",
    "labels", "energy_source",
)  # fmt: skip


def widened(tidy: Iterable[Mapping[str, Cell]]) -> tuple[tuple[str, ...], list[TidyRow]]:
    """Columns and rows. A figure of a phase is called '<phase>_<metric>', its columns end in its unit."""
    cases: dict[tuple[Cell, Cell], TidyRow] = {}
    for row in tidy:
        wide = cases.setdefault((row["run"], row["case"]), {})
        if row["metric"] == "time" and row["phase"] == STEP:
            figures = {name: cell for name, cell in row.items() if name not in _OF_A_FIGURE or name == "labels"}
            wide.update({name: cell for name, cell in figures.items() if name not in wide})
        wide.update(_figures(row))
        if row["metric"] == "energy" and row["phase"] == STEP:
            wide.update({"energy_source": row["energy_source"], "energy_why": row["why"]})
    columns = _columns(list(cases.values()))
    return columns, [{name: wide.get(name) for name in columns} for wide in cases.values()]


def _figures(row: Mapping[str, Cell]) -> TidyRow:
    """The best and the median of one figure, where it has them."""
    parts = [row["kind"], row["role"]] if row["phase"] is None else [None if row["phase"] == STEP else row["phase"]]
    name = "_".join(str(part) for part in (*parts, row["metric"]) if part)
    named = row["unit"] in (None, "count", unit_of(str(row["metric"])))  # the metric's own name says it
    unit = "" if named else f"_{_word(str(row['unit']))}"
    values = {"best": row["best_in_unit"], "median": row["median_in_unit"]}
    if row["best_in_unit"] is None:
        return {f"{name}{unit}": row["median_in_unit"]}
    return {f"{name}_{which}{unit}": value for which, value in values.items()}


def _word(unit: str) -> str:
    return unit.replace("/", "_per_")


def _columns(rows: Sequence[TidyRow]) -> tuple[str, ...]:
    """All names, those that say which case it is first, figures in the order in which cases bring them."""
    return tuple(dict.fromkeys(name for row in rows for name in row))
