"""`show RUN --fleet`: the machines that measured cells of the run's plan."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from fp8bench.errors import UsageError
from fp8bench.features.fleet.report import fleet_of
from fp8bench.features.fleet.view import report_page, report_rows
from fp8bench.jobs.kinds import KeptTable, View
from fp8bench.model import Run
from fp8bench.model.codec import encode
from fp8bench.store.runs.listing import store_of


def machines(run: Run, store: Path) -> View:
    report = fleet_of([run], store_of(Path(run.path)) or store)
    if report is None:
        raise UsageError(f"the run {run.id} is no cell of a fleet's plan. Leave --fleet out.")
    page = partial(report_page, report, f"plan {run.fleet_plan}")
    return View(page, partial(encode, report), partial(report_rows, report))


TABLES = (
    KeptTable(
        "fleet", "of a run that is a cell of a fleet's plan: the machines that measured cells of it, side by side",
        machines,
    ),
)  # fmt: skip
