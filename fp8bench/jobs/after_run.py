"""The steps after a measured run: history, report, and scalars for boards; also scalars of other stored results.

The run is already stored, so a step that fails is noted and does not stop the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8bench.analysis.findings import findings
from fp8bench.errors import StoreError
from fp8bench.jobs.kinds import K, Kind, kinds
from fp8bench.jobs.report_files import (
    Pages,
    report_of_kept,
    short_path,
    why_not_shown,
    write_report,
)
from fp8bench.model import Run
from fp8bench.report.data.loggers import LoggedScalar, LogSource, LogTarget, ScalarLogger, run_scalars, run_source
from fp8bench.store.asv.view import update_view
from fp8bench.store.figures.history import keep_figures
from fp8bench.store.runs.listing import store_of


@dataclass(frozen=True)
class Wanted:
    """The outputs requested for a run in addition to its history. Without `pages` no report is written."""

    pages: Pages | None = None
    log: Sequence[LogTarget] = ()


def after_run(run: Run, store: Path, wanted: Wanted, note: Callable[[str], None]) -> bool:
    """Does all steps and notes each; False if interrupted. An incomplete run is only added to the history."""
    store = store_of(Path(run.path)) or store
    try:
        note(into_history(run, store))
    except KeyboardInterrupt:
        note(
            f"history: interrupted while asv's view was brought up to date; the run is kept in {run.path}, and "
            "`fp8bench history rebuild` makes the view again"
        )
        return False
    if run.finished:
        return published(run, store, wanted, note)
    if wanted.pages is not None and wanted.pages.asked:
        note(f"report: none of a run that was cut off; `fp8bench report {run.id}` writes one")
    return True


def published(run: Run, store: Path, wanted: Wanted, note: Callable[[str], None]) -> bool:
    """Writes the report and logs scalars, with notes; False if interrupted."""
    if wanted.pages is not None:
        try:
            for sentence in _report(run, store, wanted.pages):
                note(f"report: {sentence}")
        except KeyboardInterrupt:
            note(f"report: interrupted while it was written; `fp8bench report {run.id}` writes it")
            return False
    return log_run(run, wanted.log, note)


def into_history(run: Run, store: Path, view: bool = True) -> str:
    """Adds the run's figures to the history and updates asv's view; returns the outcome of the update."""
    sentence = update_view(run, store) if view else ""
    keep_figures(store, Path(run.path))
    return sentence


def log_run(run: Run, targets: Sequence[LogTarget], note: Callable[[str], None]) -> bool:
    """Logs the figures of a run, with notes; False if interrupted."""
    if not targets:
        return True
    return _log_scalars("run", run_source(run), run_scalars(run, findings(run)), targets, note)


def log_kept(kind: Kind[K], kept: K, targets: Sequence[LogTarget], note: Callable[[str], None]) -> bool:
    source = kind.log_source(kept) if targets else None
    if source is None:
        return True
    return _log_scalars(kind.name, source, kind.scalars(kept), targets, note)


def kept_reported(kept: Any, store: Path, note: Callable[[str], None]) -> None:
    """Writes the page of a result that a command has just stored, if its kind has one."""
    path = Path(getattr(kept, "path", ""))
    for kind in kinds():
        if isinstance(kept, kind.holds) and path.is_file():
            try:
                page = report_of_kept(kind, kept, path, store)
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
    note: Callable[[str], None],
) -> bool:
    how_to_log = f"`fp8bench show {source.id}` takes --log, too"
    try:
        logger = ScalarLogger(targets, source, note, f"the {kind} is kept, and {how_to_log}")
        for scalar in scalars:
            logger.log(*scalar)
        logger.close()
    except KeyboardInterrupt:
        note(f"interrupted; the {kind} is kept, and {how_to_log}")
        return False
    return True


def _report(run: Run, store: Path, pages: Pages) -> Iterator[str]:
    try:
        page = write_report([run], store, pages)
    except StoreError as error:
        yield f"{error} The run is kept; `fp8bench report {run.id}` writes it again"
        return
    yield short_path(page)
    problem = why_not_shown(page) if pages.browser else ""
    if problem:
        yield problem
