"""The report's files: a page and a table for each run, in the store and wherever else the user requests them."""

from __future__ import annotations

import contextlib
import os
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fp8bench.analysis.findings import findings
from fp8bench.errors import UsageError
from fp8bench.files import keeping, open_file, write_whole
from fp8bench.jobs.earlier_runs import find_earlier_steps
from fp8bench.jobs.kinds import K, Kind, join_results, meant_by
from fp8bench.model import Run
from fp8bench.report.data.plain import Rows, csv_text
from fp8bench.report.data.run import run_rows
from fp8bench.report.elements import Page
from fp8bench.report.page.html import CARD_BYTES, MOST_REPORTS, ListedReport, began, charts_of, index_page, read_card
from fp8bench.report.page.html import render as as_html
from fp8bench.report.page.markdown import render as as_markdown
from fp8bench.report.page.section import material_of, page_of
from fp8bench.store.runs.listing import each_once, load_stored_run, store_of

PAGE = "report.html"
ROWS = "results.csv"
INDEX = "index.html"
_LONGEST_NAME = 120


@dataclass(frozen=True)
class Pages:
    """Further places for a report; with `browser` the page is opened.

    `plots` is a folder for its charts as pictures, in each of `plots_formats`.
    """

    html: Path | None = None
    markdown: Path | None = None
    browser: bool = False
    plots: Path | None = None
    plots_formats: tuple[str, ...] = ("png",)

    @property
    def asked(self) -> bool:
        return self.html is not None or self.markdown is not None or self.browser


def report_of(words: Sequence[str], store: Path, pages: Pages) -> Path:
    """Writes the report of stored runs, or of another stored result; returns the page."""
    if (together := join_results(words, store)) is not None:
        kind, kept = together
        if (page := report_of_kept(kind, kept, Path(kept.path), store, pages)) is not None:
            return page
    for called, kind, path in [(word, *meant) for word in words for meant in meant_by(word, store)]:
        if len(words) > 1:
            raise UsageError(f"{called} is a {kind.name}, which has a report of its own. Name it alone.")
        if (page := report_of_kept(kind, kind.load(path), path, store, pages)) is not None:
            return page
    runs = [load_stored_run(word, store) for word in words]
    each_once(dict.fromkeys(Path(run.path) for run in runs)).check_refusals()
    ids = [run.id for run in runs]
    twice = next((text for place, text in enumerate(ids) if text in ids[:place]), None)
    if twice is not None:
        raise UsageError(f"the run {twice} was named twice. Name each run once.")
    return write_report(runs, store, pages)


def report_of_kept(kind: Kind[K], kept: K, path: Path, store: Path, pages: Pages = Pages()) -> Path | None:
    """Writes the report of another stored result; returns the page, None if that kind has none."""
    report = kind.report(kept)
    if report is None:
        return None
    page = replace(report.page(), kind=kind.name)
    return _write_page(page, report.rows(), folder_of_kept(kind.names(path)[1], store), pages)


def write_report(runs: Sequence[Run], store: Path, pages: Pages = Pages()) -> Path:
    """Writes page and table of runs side by side into the store, and the page to the other requested places.

    Returns the page in the store. Raises StoreError if a file cannot be written. The same runs give the same bytes.
    """
    verdicts = [findings(run) for run in runs]
    runs = [replace(run, path=_within(run.path, store)) for run in runs]
    earlier = find_earlier_steps(runs[0], store) if len(runs) == 1 else {}
    page = page_of(replace(material_of(runs, verdicts, store), earlier=earlier))
    rows = run_rows(list(zip(runs, verdicts, strict=True)))
    return _write_page(page, rows, folder_of(runs, store), pages)


def folder_of_kept(name: str, store: Path) -> Path:
    return store / "reports" / name


def _write_page(page: Page, rows: Rows, folder: Path, pages: Pages) -> Path:
    text = as_html(page)
    _write(folder / PAGE, text)
    _write(folder / ROWS, csv_text(*rows))
    if pages.html is not None:
        _write(pages.html, text)
    if pages.markdown is not None:
        _write(pages.markdown, as_markdown(page))
    _write(folder.parent / INDEX, as_html(_index_of(folder.parent)))
    if pages.plots is not None:
        _write_plots(page, pages.plots, pages.plots_formats)
    return folder / PAGE


def _write_plots(page: Page, folder: Path, formats: Sequence[str]) -> None:
    """Writes each chart to a file named like its id on the page."""
    from fp8bench.report.page.drawing.pictures import picture

    charts = charts_of(page)
    if not charts:
        raise UsageError(f"the report is written, and has no charts for --plots {folder}. Leave --plots out.")
    for name, chart in charts.items():
        for form in formats:
            _write(folder / f"{name}.{form}", picture(chart, page.title, form))


def _index_of(reports: Path) -> Page:
    dated = sorted(((began(path.parent.name), path) for path in reports.glob(f"*/{PAGE}")), reverse=True)
    listed = []
    for when, path in dated[:MOST_REPORTS]:
        with contextlib.suppress(OSError), open_file(path) as file:
            if (card := read_card(file.read(CARD_BYTES).decode(errors="replace"))) is not None:
                listed.append(ListedReport(card, path.parent.name, when))
    return index_page(listed, len(dated) - len(listed))


def why_not_shown(page: Path) -> str:
    """Opens a page in the user's browser; returns a sentence with its address if no browser opens."""
    address = Path(os.path.realpath(page)).as_uri()
    try:
        shown = webbrowser.open(address)
    except webbrowser.Error:
        shown = False
    return "" if shown else f"no browser could be opened. The report is at {address}"


def short_path(page: Path) -> str:
    try:
        return str(page.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(page)


def place_of_report(run: Run) -> str:
    store = store_of(Path(run.path)) if run.path else None
    page = folder_of([run], store) / PAGE if store is not None else None
    return short_path(page) if page is not None and page.is_file() else ""


def folder_of(runs: Sequence[Run], store: Path) -> Path:
    """Returns the folder of a report in the store, named like the run's file, or by the ids of several runs."""
    stems = [Path(run.path).stem or run.id for run in runs]
    name = stems[0] if len(stems) == 1 else "+".join(run.id or stem for run, stem in zip(runs, stems, strict=True))
    return store / "reports" / (name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}-{len(runs)}-runs")


def _within(path: str, store: Path) -> str:
    """Returns a run's file relative to the store: the location of the store does not belong in a report."""
    try:
        return str(Path(store.name or ".") / Path(path).resolve().relative_to(store.resolve())) if path else ""
    except ValueError:
        return Path(path).name


def _write(path: Path, text: str | bytes) -> None:
    """Replaces the file atomically: a browser may be reading the old one."""
    with keeping(f"the report {path}"):
        write_whole(path, text)
