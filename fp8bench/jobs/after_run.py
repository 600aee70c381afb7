"""Runs the steps after a measured run: history, report, and scalars for experiment loggers. Also logs the scalars of
other stored results.

The run is stored before these steps. If a step fails, this is noted, and the next step still runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8bench.analysis.findings import findings
from fp8bench.errors import StoreError
from fp8bench.jobs.kinds import K, ResultKind, kinds
from fp8bench.jobs.report_files import (
    ReportDestinations,
    open_in_browser,
    short_path,
    write_report,
    write_result_report,
)
from fp8bench.model import Run
from fp8bench.report.data.loggers import (
    LoggedScalar,
    LogSource,
    LogTarget,
    ScalarLogger,
    iterate_run_scalars,
    run_log_source,
)
from fp8bench.store.asv.view import update_view
from fp8bench.store.figures.history import cache_commit_figures
from fp8bench.store.runs.listing import find_store_of_run

# A callback that gets a sentence about the outcome of a step.
ReportNote = Callable[[str], None]


@dataclass(frozen=True)
class RequestedOutputs:
    """The outputs to write for a run besides its history. Without `report_pages`, no report is written. `log` are the
    loggers that get scalars.
    """

    report_pages: ReportDestinations | None = None
    log: Sequence[LogTarget] = ()


def after_run(run: Run, store: Path, outputs: RequestedOutputs, note: ReportNote) -> bool:
    """Runs all steps after a run (history, report, scalars), and reports their outcomes by `note`. Returns False after
    an interrupt. A run that is not finished is only added to the history.
    """
    store = find_store_of_run(Path(run.path)) or store
    try:
        if sentence := add_to_history(run, store):
            note(sentence)
    except KeyboardInterrupt:
        note(
            f"history: interrupted while asv's view was updated; the run is stored in {run.path}, and "
            "`fp8bench history rebuild` updates the view"
        )
        return False
    if run.finished:
        return publish_run(run, store, outputs, note)
    if outputs.report_pages is not None and outputs.report_pages.are_report_pages_requested:
        note(f"report: not written, because the run was interrupted; `fp8bench report {run.id}` writes it")
    return True


def publish_run(run: Run, store: Path, outputs: RequestedOutputs, note: ReportNote) -> bool:
    """Writes the report of a run and logs the run's scalars. Returns False after an interrupt."""
    if outputs.report_pages is not None:
        try:
            page = write_report([run], store, outputs.report_pages)
            note(f"report: {short_path(page)}")
            if outputs.report_pages.browser and (problem := open_in_browser(page)):
                note(f"report: {problem}")
        except StoreError as error:
            note(f"report: {error} The run is kept; `fp8bench report {run.id}` writes it again")
        except KeyboardInterrupt:
            note(f"report: interrupted while it was written; `fp8bench report {run.id}` writes it")
            return False
    return log_run(run, outputs.log, note)


def add_to_history(run: Run, store: Path, view: bool = True) -> str:
    """Adds the figures of a run to the history, and updates the files that asv shows. Returns a sentence about the
    update, or '' if there is nothing to report.
    """
    sentence = update_view(run, store) if view else ""
    cache_commit_figures(store, Path(run.path))
    return sentence


def log_run(run: Run, targets: Sequence[LogTarget], note: ReportNote) -> bool:
    """Logs the scalars of a run. Returns False after an interrupt."""
    if not targets:
        return True
    return _log_scalars("run", run_log_source(run), iterate_run_scalars(run, findings(run)), targets, note)


def log_result(kind: ResultKind[K], result: K, targets: Sequence[LogTarget], note: ReportNote) -> bool:
    source = kind.log_source(result) if targets else None
    if source is None:
        return True
    return _log_scalars(kind.name, source, kind.scalars(result), targets, note)


def report_result(result: Any, store: Path, note: ReportNote) -> None:
    """Writes the page of a result that a command has just stored, if results of this kind have a page."""
    path = Path(getattr(result, "path", ""))
    for kind in kinds():
        if isinstance(result, kind.holds) and path.is_file():
            try:
                page = write_result_report(kind, result, path, store)
            except StoreError as error:
                note(f"report: {error} The {kind.name} is kept; `fp8bench report {kind.names(path)[0]}` writes it")
                continue
            if page is not None:
                note(f"report: {short_path(page)}")


def _log_scalars(
    kind: str,
    source: LogSource,
    scalars: Iterable[LoggedScalar],
    targets: Sequence[LogTarget],
    note: ReportNote,
) -> bool:
    advice = f"`fp8bench show {source.id}` also takes --log"
    try:
        logger = ScalarLogger(targets, source, note, f"the {kind} is kept, and {advice}")
        for scalar in scalars:
            logger.log(*scalar)
        logger.close()
    except KeyboardInterrupt:
        note(f"interrupted; the {kind} is kept, and {advice}")
        return False
    return True
