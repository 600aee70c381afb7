"""The command `fp8bench report`, and the report that every suite run ends with."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fp8bench.errors import EXIT_OK, StoreError, UsageError
from fp8bench.history.runs import load_named, store_of
from fp8bench.model import Run
from fp8bench.outputs import check_pages
from fp8bench.reporting import write_report
from fp8bench.streams import complain, say


def tell_report(run: Run, arguments: argparse.Namespace) -> bool:
    """Write the report of a run that was measured, and say where it is; False where that was interrupted.

    That it cannot be written is no failure of the run.
    """
    try:
        page = _written([run], store_of(Path(run.path)) or arguments.store, arguments)
    except KeyboardInterrupt:
        complain(f"report: interrupted while it was written; `fp8bench report {run.id}` writes it")
        return False
    except StoreError as error:
        complain(f"report: {error} The run is kept; `fp8bench report {run.id}` writes it again")
        return True
    complain(f"report: {_shown(page)}")
    return True


def report(arguments: argparse.Namespace) -> int:
    """Write the report of stored runs, side by side if there are several, and print where it is."""
    check_pages(arguments)
    runs = [load_named(word, arguments.store) for word in arguments.runs]
    twice = next((run for place, run in enumerate(runs) if run.path in [one.path for one in runs[:place]]), None)
    if twice is not None:
        raise UsageError(f"the run {twice.id} was named twice. Name each run once.")
    say(f"{_shown(_written(runs, arguments.store, arguments))}\n")
    return EXIT_OK


def _shown(page: Path) -> str:
    """A path as short as it can be typed from here."""
    try:
        return str(page.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(page)


def _written(runs: Sequence[Run], store: Path, arguments: argparse.Namespace) -> Path:
    return write_report(
        runs, store, html=arguments.html, markdown=arguments.md, wide=arguments.csv_wide, browser=arguments.open
    )
