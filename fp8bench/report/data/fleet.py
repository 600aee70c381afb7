"""Where the cells of a plan stand, for programs."""

from __future__ import annotations

from collections.abc import Sequence

from fp8bench.model.codec import encode
from fp8bench.model.fleet import CellState, FleetPlan
from fp8bench.report.data.plain import csv_text, json_line

_COLUMNS = ("plan", "cell", "setting", "status", "run", "machine", "attempts", "seconds", "why")


def as_json(plan: FleetPlan, states: Sequence[CellState]) -> str:
    """The plan, and every cell with its attempts."""
    return json_line({"plan": encode(plan), "cells": [encode(one) for one in states]})


def as_csv(plan: FleetPlan, states: Sequence[CellState]) -> str:
    """A row a cell; `seconds` are those of its last attempt."""
    rows = [
        {
            "plan": plan.id, "cell": one.number, "setting": one.cell.setting, "status": one.status.value,
            "run": one.run, "machine": one.machine, "attempts": len(one.attempts),
            "seconds": one.attempts[-1].seconds if one.attempts else None, "why": one.why,
        }
        for one in states
    ]  # fmt: skip
    return csv_text(_COLUMNS, rows)
