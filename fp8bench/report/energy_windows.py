"""The windows that energy rests on, as a table: every one of them, with what the device did meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from fp8bench import units
from fp8bench.analysis.energy import EnergyFigures
from fp8bench.model import EnergyWindow
from fp8bench.report.elements import Column, Field, Table
from fp8bench.report.energies import named_source
from fp8bench.report.naming import NamedCase
from fp8bench.report.standing import emulated

_MOST_ROWS = 300
_COLUMNS = {
    "case": Column("case"),
    "source": Column("source", hint="figures of different ones do not compare"),
    "steps": Column("steps", number=True),
    "length": Column("length", number=True, unit="s"),
    "energy": Column("energy", number=True, unit="J", hint="of the whole window, idling included"),
    "step": Column("a step", number=True, unit="J"),
    "power": Column("power", number=True, unit="W"),
    "before": Column("idle before", number=True, unit="W"),
    "after": Column("idle after", number=True, unit="W"),
    "intervals": Column("intervals", number=True, hint="how often the source changed, or was read, in it"),
    "uncertainty": Column("uncertainty", number=True, hint="by how much its energy can be off; -: nobody knows"),
    "clock": Column("SM clock", number=True, unit="Hz", hint="the median one"),
    "temperature": Column("temperature", number=True, hint="the highest, in degrees Celsius"),
}


def windows_table(title: str, found: Sequence[tuple[NamedCase, EnergyFigures]]) -> Table:
    """A row for each window, the first 300; columns in which none has anything to say are left out."""
    windows = [(case, figures, window) for case, figures in found for window in figures.windows]
    rows = [_fields(*one) for one in windows[:_MOST_ROWS]]
    shown = [name for name in _COLUMNS if any(row[name].text != units.NONE for row in rows)]
    more = f" (the first {_MOST_ROWS} of {len(windows)}; the run has all)" if len(windows) > _MOST_ROWS else ""
    return Table(
        f"energy-windows-{found[0][0].result.record.case.workload}",
        f"{title}: the windows{more}",
        tuple(_COLUMNS[name] for name in shown),
        tuple(tuple(row[name] for name in shown) for row in rows),
        folded=True,
    )


def _fields(case: NamedCase, figures: EnergyFigures, window: EnergyWindow) -> dict[str, Field]:
    use = case.result.record.energy
    step, watts = window.joules / window.steps, window.joules / window.seconds
    before, after = (use.idle_before, use.idle_after) if use is not None else (None, None)
    return {
        "case": Field(f"{case.name} (emulated)" if emulated(case.result) else case.name),
        "source": Field(figures.source, hint=named_source(figures.source)),
        "steps": Field(units.whole(window.steps), float(window.steps)),
        "length": Field(units.seconds(window.seconds), window.seconds),
        "energy": Field(units.joules(window.joules), window.joules),
        "step": Field(units.joules(step, 4), step),
        "power": Field(units.count(watts, "W"), watts),
        "before": Field(units.count(before, "W"), before),
        "after": Field(units.count(after, "W"), after),
        "intervals": Field(units.whole(window.intervals), float(window.intervals)),
        "uncertainty": Field(_uncertainty(window.uncertainty), window.uncertainty),
        "clock": Field(units.count(window.sm_clock, "Hz"), window.sm_clock),
        "temperature": Field(
            units.NONE if window.temperature is None else f"{window.temperature:.0f}", window.temperature
        ),
    }


def _uncertainty(share: float | None) -> str:
    return units.NONE if share is None else f"+-{units.percent(share, 2)}"
