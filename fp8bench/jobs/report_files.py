"""Writes the files of reports: a page and a table for each run, in the store and in other places that the user
requests.
"""

from __future__ import annotations

import contextlib
import os
import webbrowser
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from fp8bench.analysis.compare.compare import compare
from fp8bench.analysis.compare.sides import make_comparison_side
from fp8bench.analysis.findings import findings
from fp8bench.errors import UsageError
from fp8bench.files import convert_write_errors, open_file, write_whole
from fp8bench.jobs.earlier_runs import find_earlier_step_seconds
from fp8bench.jobs.kinds import K, ResultKind, find_results, join_results
from fp8bench.model import Run
from fp8bench.report.comparisons import comparison_page
from fp8bench.report.data.plain import PlainRows, csv_text
from fp8bench.report.data.run import run_rows
from fp8bench.report.elements import Page
from fp8bench.report.page.html import (
    CARD_BYTES,
    MAX_REPORTS,
    ListedReport,
    format_folder_time,
    index_page,
    list_charts,
    read_page_card,
)
from fp8bench.report.page.html import render as as_html
from fp8bench.report.page.markdown import render as as_markdown
from fp8bench.report.page.section import make_report_material, report_page
from fp8bench.report.panels import FindingsById
from fp8bench.report.words.naming import format_run_start
from fp8bench.store.runs.listing import find_store_of_run, list_distinct_runs, load_stored_run

PAGE_NAME = "report.html"
TABLE_NAME = "results.csv"
INDEX_FILE_NAME = "index.html"
_MAX_NAME_LENGTH = 120


@dataclass(frozen=True)
class ReportDestinations:
    """Places to write a report to, besides the store. With `browser`, the page is also opened.

    `plots` is a folder for the charts as pictures, in each of `plots_formats`.
    """

    html: Path | None = None
    markdown: Path | None = None
    browser: bool = False
    plots: Path | None = None
    plots_formats: tuple[str, ...] = ("png",)

    @property
    def are_report_pages_requested(self) -> bool:
        return self.html is not None or self.markdown is not None or self.browser


def write_named_report(names: Sequence[str], store: Path, pages: ReportDestinations) -> Path:
    """Writes the report of stored results: of runs, of a single result of a different kind, or of results that can be
    combined. Returns the path of the page.
    """
    if (joined := join_results(names, store)) is not None:
        result_kind, result = joined
        if (page := write_result_report(result_kind, result, Path(result.path), store, pages)) is not None:
            return page
    for name in names:
        for result_kind, path in find_results(name, store):
            if len(names) > 1:
                raise UsageError(f"{name} is a {result_kind.name}, which has a separate report. Give it alone.")
            if (page := write_result_report(result_kind, result_kind.load(path), path, store, pages)) is not None:
                return page
    runs = [load_stored_run(name, store) for name in names]
    list_distinct_runs(dict.fromkeys(Path(run.path) for run in runs)).raise_for_refused_files()
    for run_id, count in Counter(run.id for run in runs).items():
        if count > 1:
            raise UsageError(f"the run {run_id} was given twice. Give each run once.")
    return write_report(runs, store, pages)


def write_result_report(
    kind: ResultKind[K], result: K, path: Path, store: Path, pages: ReportDestinations = ReportDestinations()
) -> Path | None:
    """Writes the report of a stored result that is not a run. Returns the path of the page; None if its kind has no
    report.
    """
    report = kind.report(result)
    if report is None:
        return None
    page = replace(report.page(), kind=kind.name)
    return _write_page(page, report.rows(), result_report_folder(kind.names(path)[1], store), pages)


def write_report(runs: Sequence[Run], store: Path, pages: ReportDestinations = ReportDestinations()) -> Path:
    """Writes the page and the table of one or several runs into the store, and the page to other requested places.

    Returns the path of the page in the store. Raises StoreError if a file cannot be written. The same runs give files
    with the same bytes.
    """
    verdicts = [findings(run) for run in runs]
    runs = [replace(run, path=_get_path_in_store(run.path, store)) for run in runs]
    earlier_steps = find_earlier_step_seconds(runs[0], store) if len(runs) == 1 else {}
    page = report_page(replace(make_report_material(runs, verdicts, store), earlier=earlier_steps))
    if len(runs) == 2 and (comparison := _compare_two_runs(runs, verdicts)) is not None:
        page = replace(page, parts=(*comparison.parts, *page.parts), facts=comparison.facts)
    rows = run_rows(list(zip(runs, verdicts, strict=True)))
    return _write_page(page, rows, report_folder(runs, store), pages)


def _compare_two_runs(runs: Sequence[Run], verdicts: Sequence[FindingsById]) -> Page | None:
    """Returns the page of `fp8bench compare`, the earlier run first. Returns None if the runs share no case."""
    sorted_runs_and_verdicts = sorted(zip(runs, verdicts, strict=True), key=lambda pair: pair[0].started)
    comparison_of_runs = compare(
        *(
            make_comparison_side(format_run_start(run), [(run, findings_of_run)])
            for run, findings_of_run in sorted_runs_and_verdicts
        )
    )
    if not comparison_of_runs.comparisons:
        return None
    page = comparison_page(comparison_of_runs, with_reasons=True)
    sides_part, comparison_part, *lists = page.parts
    elements = (*comparison_part.elements, *sides_part.elements)
    return replace(page, parts=(replace(comparison_part, title=page.title, elements=elements), *lists))


def result_report_folder(name: str, store: Path) -> Path:
    return store / "reports" / name


def _write_page(page: Page, rows: PlainRows, folder: Path, pages: ReportDestinations) -> Path:
    text = as_html(page)
    _replace_report_file(folder / PAGE_NAME, text)
    _replace_report_file(folder / TABLE_NAME, csv_text(*rows))
    if pages.html is not None:
        _replace_report_file(pages.html, text)
    if pages.markdown is not None:
        _replace_report_file(pages.markdown, as_markdown(page))
    # The index is made from the pages in the folder, so it comes after the new page.
    _replace_report_file(folder.parent / INDEX_FILE_NAME, as_html(_make_report_index(folder.parent)))
    if pages.plots is not None:
        _write_chart_pictures(page, pages.plots, pages.plots_formats)
    return folder / PAGE_NAME


def _write_chart_pictures(page: Page, folder: Path, formats: Sequence[str]) -> None:
    """Writes each chart to a file in each format. The files are named after the chart's id on the page."""
    from fp8bench.report.page.drawing.pictures import draw_chart_picture

    charts_by_id = list_charts(page)
    if not charts_by_id:
        raise UsageError(f"the report is written, and has no charts for --plots {folder}. Leave --plots out.")
    for name, chart in charts_by_id.items():
        for form in formats:
            _replace_report_file(folder / f"{name}.{form}", draw_chart_picture(chart, page.title, form))


def _make_report_index(reports: Path) -> Page:
    dated_report_paths = []
    for path in reports.glob(f"*/{PAGE_NAME}"):
        # Most folders have a start time in their name. Folders of loss pages from `fp8bench.watch` have none, so use
        # the time when the page was written.
        start = format_folder_time(path.parent.name)
        if not start:
            start = f"{datetime.fromtimestamp(path.stat().st_mtime, UTC):%Y-%m-%d %H:%M}"
        dated_report_paths.append((start, path))
    dated_report_paths.sort(reverse=True)
    listed = []
    for start, path in dated_report_paths[:MAX_REPORTS]:
        with contextlib.suppress(OSError), open_file(path) as file:
            if (card := read_page_card(file.read(CARD_BYTES).decode(errors="replace"))) is not None:
                listed.append(ListedReport(card, path.parent.name, start))
    return index_page(listed, len(dated_report_paths) - len(listed))


def open_in_browser(page: Path) -> str:
    """Opens a page in the user's browser. If no browser opens, returns a sentence with the address, else ''."""
    address = Path(os.path.realpath(page)).as_uri()
    try:
        was_browser_opened = webbrowser.open(address)
    except webbrowser.Error:
        was_browser_opened = False
    return "" if was_browser_opened else f"no browser could be opened. The report is at {address}"


def short_path(page: Path) -> str:
    try:
        return str(page.resolve().relative_to(Path.cwd()))
    except ValueError:  # the page is not in the working directory
        return str(page)


def find_report_page(run: Run) -> str:
    store = find_store_of_run(Path(run.path)) if run.path else None
    page = report_folder([run], store) / PAGE_NAME if store is not None else None
    return short_path(page) if page is not None and page.is_file() else ""


def report_folder(runs: Sequence[Run], store: Path) -> Path:
    """Returns the folder of a report in the store. The folder has the name of the run's file, or the ids of several
    runs.
    """
    name = Path(runs[0].path).stem or runs[0].id
    if len(runs) > 1:
        name = "+".join(run.id or Path(run.path).stem for run in runs)
    if len(name) > _MAX_NAME_LENGTH:
        name = f"{name[:_MAX_NAME_LENGTH]}-{len(runs)}-runs"
    return store / "reports" / name


def _get_path_in_store(path: str, store: Path) -> str:
    """Returns the path of a run's file relative to the store, because reports should not depend on where the store
    is.
    """
    try:
        return str(Path(store.name or ".") / Path(path).resolve().relative_to(store.resolve())) if path else ""
    except ValueError:  # the run is not in this store
        return Path(path).name


def _replace_report_file(path: Path, text: str | bytes) -> None:
    """Replaces a file atomically, because a browser may be reading the old file."""
    with convert_write_errors(f"the report {path}"):
        write_whole(path, text)
