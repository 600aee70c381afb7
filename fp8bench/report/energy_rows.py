"""The tidy rows of a case's energy: a row for each figure, of phases too, with where they come from."""

from __future__ import annotations

from collections.abc import Iterator

from fp8bench.analysis.energy import EnergyFigures, why_no_energy
from fp8bench.model import Label, Provenance, Status
from fp8bench.report.blocks import Result, ResultGroup
from fp8bench.report.energies import figures_of, ratio_within
from fp8bench.report.tidy_row import STEP, TidyRow

_METRIC = "energy"


def energy_rows(group: ResultGroup, result: Result) -> Iterator[TidyRow]:
    """Nothing where nobody asked; where nobody could tell, one row with the reason."""
    use = result.record.energy
    if use is None or result.record.status is not Status.OK:
        return
    common: TidyRow = {"phase": STEP, "labels": " ".join(result.labels), "energy_source": use.source}
    found = figures_of(result)
    if found is None:
        yield common | {"metric": _METRIC, "unit": "J", "why": why_no_energy(result.record)}
        return
    common["n_samples"] = len(found.windows)
    yield common | _step(found) | _against(group, result, use.why)
    for metric, unit, value, provenance, why in _others(found):
        yield common | {
            "metric": metric, "unit": unit, "median_in_unit": value, "provenance": provenance.value, "why": why,
        }  # fmt: skip
    below = result.finding.below_floor if result.finding else ()
    for phase, joules in found.phases:
        labels = {*result.labels, *([Label.BELOW_FLOOR] if phase in below else [])}
        yield common | {
            "phase": phase, "metric": _METRIC, "unit": "J", "median_in_unit": joules,
            "provenance": Provenance.ESTIMATED.value, "labels": " ".join(one for one in Label if one in labels),
        }  # fmt: skip


def _step(found: EnergyFigures) -> TidyRow:
    return {
        "metric": _METRIC, "unit": "J", "median_in_unit": found.gross.middle, "provenance": Provenance.MEASURED.value,
    }  # fmt: skip


def _against(group: ResultGroup, result: Result, why: str) -> TidyRow:
    """How it compares with the reference; its range has no confidence."""
    ratio = ratio_within(group, result)
    if ratio is None:
        return {"why": why}
    return {
        "ratio_to_reference": ratio.point, "ratio_low": ratio.low, "ratio_high": ratio.high,
        "verdict": ratio.demand.value, "why": "; ".join(filter(None, (ratio.why, why))),
    }  # fmt: skip


def _others(found: EnergyFigures) -> Iterator[tuple[str, str, float | None, Provenance, str]]:
    """Metric, unit, value, provenance and why there is none."""
    measured, derived = Provenance.MEASURED, Provenance.DERIVED
    yield "energy_net", "J", found.net.middle if found.net else None, derived, found.net_why
    if found.uncertainty is not None:
        yield "energy_uncertainty", "ratio", found.uncertainty, derived, ""
    for name, joules in found.per:
        yield f"energy_per_{name}", "J", joules, derived, ""
    yield "power", "W", found.watts, measured, ""
    if found.idle is not None:
        yield "idle_power", "W", found.idle, measured, ""
