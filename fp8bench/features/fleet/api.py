"""The Python door to fleets."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fp8bench.cli.main import DEFAULT_STORE
from fp8bench.cli.option_types import folder, names
from fp8bench.features.fleet.report import fleet_report
from fp8bench.features.fleet.view import FleetFrames


def load_fleet(source: str | Path, store: str | Path = DEFAULT_STORE, *, machines: Iterable[str] = ()) -> FleetFrames:
    """Compares the machines of a fleet: of a plan's runs in `store`, or of all runs in a store. `machines` are names
    of machines that should be in it. `.report` is the whole comparison; `.cases`, `.machines`, `.kinds` and
    `.alarms` are pandas frames, made when first used."""
    return FleetFrames(fleet_report(folder("source", source), folder("store", store), names(machines)))
