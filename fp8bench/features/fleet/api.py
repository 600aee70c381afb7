"""Fleets from Python and notebooks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fp8bench.cli.main import DEFAULT_STORE
from fp8bench.cli.option_types import folder, names
from fp8bench.features.fleet.report import fleet_report
from fp8bench.features.fleet.view import FleetFrames


def load_fleet(source: str | Path, store: str | Path = DEFAULT_STORE, *, machines: Iterable[str] = ()) -> FleetFrames:
    """A fleet's machines beside each other as pandas frames: of a plan's runs in `store`, or of those in a store.

    `machines` are names of some that should be in it. `.report` is all of it; `.cases`, `.machines`, `.kinds` and
    `.alarms` are made when they are first asked for.
    """
    return FleetFrames(fleet_report(folder("source", source), folder("store", store), names(machines)))
