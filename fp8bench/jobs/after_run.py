"""What follows a measured run: history, report, and exports; exports of other kept things, too.

The run is kept by then, so a step that fails is noted and fails nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8bench.analysis.findings import findings
from fp8bench.errors import StoreError
from fp8bench.jobs.kinds import Exports, K, Kind, kinds
from fp8bench.jobs.report_files import (
    PAGE,
    ROWS,
    Pages,
    folder_of,
    folder_of_kept,
    report_of_kept,
    short_path,
    why_not_shown,
    write_report,
)
from fp8bench.model import Run
from fp8bench.report.data.boards import send_to_wandb, write_tensorboard
from fp8bench.report.words.naming import many
from fp8bench.store.asv.view import update_view
from fp8bench.store.figures.history import keep_figures
from fp8bench.store.runs.listing import store_of


@dataclass(frozen=True)
class Wanted:
    """What is made of a run beside its history. Without `pages` there is no report; `wandb` is a project."""

    pages: Pages | None = None
    tensorboard: Path | None = None
    wandb: str | None = None


def after_run(run: Run, store: Path, wanted: Wanted, note: Callable[[str], None]) -> bool:
    """Does all steps and notes each; False if interrupted. A run that was cut off only gets its history."""
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
    """Writes the report and the exports, with notes; False if interrupted."""
    if wanted.pages is not None:
        try:
            for sentence in _report(run, store, wanted.pages):
                note(f"report: {sentence}")
        except KeyboardInterrupt:
            note(f"report: interrupted while it was written; `fp8bench report {run.id}` writes it")
            return False
    return exported(run, store, wanted, note)


def into_history(run: Run, store: Path, view: bool = True) -> str:
    """Adds the run's figures to the history and updates asv's view; returns what became of the view."""
    told = update_view(run, store) if view else ""
    keep_figures(store, Path(run.path))
    return told


def exported(run: Run, store: Path, wanted: Wanted, note: Callable[[str], None]) -> bool:
    """Exports a run to TensorBoard and wandb, with notes; False if interrupted."""
    if wanted.tensorboard is None and wanted.wandb is None:
        return True
    verdicts, folder = findings(run), folder_of([run], store_of(Path(run.path)) or store)
    exports = Exports(
        lambda board: write_tensorboard(run, verdicts, board),
        lambda project, files: send_to_wandb(run, verdicts, project, files),
    )
    return _sent("run", run.id, exports, (Path(run.path), folder / PAGE, folder / ROWS), wanted, note)


def kept_exported(kind: Kind[K], kept: K, path: Path, store: Path, wanted: Wanted, note: Callable[[str], None]) -> bool:
    if wanted.tensorboard is None and wanted.wandb is None:
        return True
    name, stem = kind.names(path)
    exports, folder = kind.exports(kept), folder_of_kept(stem, store)
    return exports is None or _sent(kind.name, name, exports, (path, folder / PAGE, folder / ROWS), wanted, note)


def kept_reported(kept: Any, store: Path, note: Callable[[str], None]) -> None:
    """Writes the page of what a command has just kept, if its kind has one."""
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


def _sent(
    kind: str, name: str, exports: Exports, files: Sequence[Path], wanted: Wanted, note: Callable[[str], None]
) -> bool:
    kept = f"The {kind} is kept; `fp8bench show {name}"
    try:
        if wanted.tensorboard is not None:
            note(f"tensorboard: {_to_tensorboard(exports, wanted.tensorboard, kept)}")
        if wanted.wandb is not None:
            try:
                exports.send(wanted.wandb, [file for file in files if file.is_file()])
                note(f"wandb: sent to project {wanted.wandb}")
            except Exception as error:
                why = f"not sent ({type(error).__name__}: {error})"
                note(f"wandb: {why}. {kept} --wandb {wanted.wandb}` sends it again")
    except KeyboardInterrupt:
        note(f"interrupted; the {kind} is kept, and `fp8bench show {name}` takes --tensorboard and --wandb too")
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


def _to_tensorboard(exports: Exports, folder: Path, kept: str) -> str:
    try:
        files = exports.write(folder)
    except StoreError as error:
        return f"{error} {kept} --tensorboard DIR` writes it again"
    if not files:
        return "nothing was measured, so that there is nothing to write"
    return f"{many(len(files), 'curve')} in {folder}; `tensorboard --logdir {folder}`"
