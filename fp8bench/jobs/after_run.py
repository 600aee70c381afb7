"""What follows a measured run, whoever asked for it: history, report, and what other programs read of it, and of
other things that are kept.

The run is kept by then, so that a step that cannot be done is told and fails nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8bench.analysis.findings import findings
from fp8bench.errors import StoreError
from fp8bench.jobs.kinds import K, Kind
from fp8bench.jobs.report_files import (
    PAGE,
    ROWS,
    Pages,
    folder_of,
    folder_of_kept,
    typed_from_here,
    why_not_shown,
    write_report,
)
from fp8bench.model import Run
from fp8bench.report.data.boards import send_to_wandb, write_tensorboard
from fp8bench.report.words.naming import many
from fp8bench.store.asv.view import update_view
from fp8bench.store.index.history import keep_figures
from fp8bench.store.runs.listing import store_of


@dataclass(frozen=True)
class Wanted:
    """What is made of a run beside its history. `pages` is None for no report; `wandb` is a project."""

    pages: Pages | None = None
    tensorboard: Path | None = None
    wandb: str | None = None


def after_run(run: Run, store: Path, wanted: Wanted, note: Callable[[str], None]) -> bool:
    """All of it, told step by step; False where that was interrupted. A run that was cut off gets its history only."""
    store = store_of(Path(run.path)) or store
    try:
        note(into_history(run, store))
    except KeyboardInterrupt:
        note(
            f"history: interrupted while asv's view was brought up to date; the run is kept in {run.path}, and "
            "`fp8bench history rebuild` makes the view again"
        )
        return False
    if not run.finished:
        return True
    if wanted.pages is not None:
        try:
            for sentence in _report(run, store, wanted.pages):
                note(f"report: {sentence}")
        except KeyboardInterrupt:
            note(f"report: interrupted while it was written; `fp8bench report {run.id}` writes it")
            return False
    return exported(run, store, wanted, note)


def into_history(run: Run, store: Path, view: bool = True) -> str:
    """Keep the run's figures, and bring asv's view up to date; returns what became of the view."""
    told = update_view(run, store) if view else ""
    keep_figures(store, Path(run.path))
    return told


@dataclass(frozen=True)
class Kept:
    """Something that is kept, called so in sentences, and what writes it for TensorBoard and sends it to wandb."""

    called: str
    id: str
    write: Callable[[Path], Sequence[Path]]
    send: Callable[[str], None]


def exported(run: Run, store: Path, wanted: Wanted, note: Callable[[str], None]) -> bool:
    """What other programs get of a run, told one by one; False where that was interrupted."""
    if wanted.tensorboard is None and wanted.wandb is None:
        return True
    found, folder = findings(run), folder_of([run], store_of(Path(run.path)) or store)
    files = [file for file in (Path(run.path), folder / PAGE, folder / ROWS) if run.path and file.is_file()]
    kept = Kept(
        "run", run.id, lambda folder: write_tensorboard(run, found, folder),
        lambda project: send_to_wandb(run, found, project, files),
    )  # fmt: skip
    return _sent(kept, wanted, note)


def kept_exported(kind: Kind[K], kept: K, path: Path, store: Path, wanted: Wanted, note: Callable[[str], None]) -> bool:
    """The same of another kind of thing that is kept."""
    if wanted.tensorboard is None and wanted.wandb is None:
        return True
    exports, folder = kind.exports(kept), folder_of_kept(path, store)
    if exports is None:
        return True
    files = [file for file in (path, folder / PAGE, folder / ROWS) if file.is_file()]
    named = Kept(kind.name, kind.names(path)[0], exports.write, lambda project: exports.send(project, files))
    return _sent(named, wanted, note)


def _sent(kept: Kept, wanted: Wanted, note: Callable[[str], None]) -> bool:
    try:
        if wanted.tensorboard is not None:
            note(f"tensorboard: {_to_tensorboard(kept, wanted.tensorboard)}")
        if wanted.wandb is not None:
            note(f"wandb: {_to_wandb(kept, wanted.wandb)}")
    except KeyboardInterrupt:
        note(
            f"interrupted; the {kept.called} is kept, and `fp8bench show {kept.id}` takes --tensorboard and --wandb too"
        )
        return False
    return True


def _report(run: Run, store: Path, pages: Pages) -> Iterator[str]:
    try:
        page = write_report([run], store, pages)
    except StoreError as error:
        yield f"{error} The run is kept; `fp8bench report {run.id}` writes it again"
        return
    yield typed_from_here(page)
    problem = why_not_shown(page) if pages.browser else ""
    if problem:
        yield problem


def _to_tensorboard(kept: Kept, folder: Path) -> str:
    try:
        files = kept.write(folder)
    except StoreError as error:
        again = f"`fp8bench show {kept.id} --tensorboard DIR` writes it again"
        return f"{error} The {kept.called} is kept; {again}"
    if not files:
        return "nothing was measured, so that there is nothing to write"
    return f"{many(len(files), 'curve')} in {folder}; `tensorboard --logdir {folder}`"


def _to_wandb(kept: Kept, project: str) -> str:
    try:
        kept.send(project)
    except Exception as error:
        again = f"`fp8bench show {kept.id} --wandb {project}` sends it again"
        return f"not sent ({type(error).__name__}: {error}). The {kept.called} is kept; {again}"
    return f"sent to project {project}"
