"""The report's files: a page and a table for each run, in the store, and wherever else they are wanted."""

from __future__ import annotations

import os
import secrets
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from fp8bench.errors import StoreError
from fp8bench.model import Run
from fp8bench.pipeline import findings
from fp8bench.report.compose import page_of
from fp8bench.report.csv_text import render_all
from fp8bench.report.entries import material_of
from fp8bench.report.html import render as as_html
from fp8bench.report.markdown import render as as_markdown
from fp8bench.report_past import past_of

PAGE = "report.html"
ROWS = "results.csv"
_LONGEST_NAME = 120


def write_report(
    runs: Sequence[Run],
    store: Path,
    *,
    html: Path | None = None,
    markdown: Path | None = None,
    wide: bool = False,
    browser: bool = False,
) -> Path:
    """Write page and table of some runs side by side into the store, and the page where else it is wanted.

    Returns the page in the store. With `wide` the table has one row a case; with `browser` the page is shown. Raises
    StoreError with a sentence where a file cannot be written. The same runs give the same bytes.
    """
    found = [findings(run) for run in runs]
    past = past_of(runs, store)
    runs = [replace(run, path=_within(run.path, store)) for run in runs]
    page = page_of(material_of(runs, found, past))
    text = as_html(page)
    folder = folder_of(runs, store)
    _write(folder / PAGE, text)
    _write(folder / ROWS, render_all(list(zip(runs, found, strict=True)), wide))
    if html is not None:
        _write(html, text)
    if markdown is not None:
        _write(markdown, as_markdown(page))
    if browser:
        _open(folder / PAGE)
    return folder / PAGE


def folder_of(runs: Sequence[Run], store: Path) -> Path:
    """The folder of a report in the store: called as the run's file, or as the ids of several."""
    stems = [Path(run.path).stem or run.id for run in runs]
    name = stems[0] if len(stems) == 1 else "+".join(run.id or stem for run, stem in zip(runs, stems, strict=True))
    return store / "reports" / (name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}-{len(runs)}-runs")


def _within(path: str, store: Path) -> str:
    """A run's file as it lies in its store: where the store lies is none of the report's business."""
    try:
        return str(Path(store.name or ".") / Path(path).resolve().relative_to(store.resolve())) if path else ""
    except ValueError:
        return Path(path).name


def _write(path: Path, text: str) -> None:
    """In one step: a browser may be reading the one before."""
    partial = path.with_name(f".{path.name[:80]}-{secrets.token_hex(4)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise StoreError(f"the report {path} cannot be written ({error.strerror}).") from None


def _open(page: Path) -> None:
    """Show the page in the user's browser; where there is none, say where the page is."""
    if not webbrowser.open(Path(os.path.realpath(page)).as_uri()):
        raise StoreError(f"no browser could be opened. The report is in {page}.")
