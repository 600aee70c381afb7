"""Prints results on stdout as a page, JSON or CSV, and writes the files that options name."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8bench.cli.main import DEFAULT_STORE
from fp8bench.cli.option_types import parse_log_target
from fp8bench.cli.streams import say, write_sentence_to_stderr
from fp8bench.errors import EXIT_OK, NotPrinted, UsageError
from fp8bench.model import Run
from fp8bench.model.request import PROFILERS
from fp8bench.registry import backends
from fp8bench.report.data.loggers import LogTarget, check_log_target
from fp8bench.report.data.plain import PlainRows, csv_text, json_line, results_frame
from fp8bench.report.elements import Page
from fp8bench.report.notebook import page_as_html
from fp8bench.report.page import markdown
from fp8bench.report.terminal.layout import render, wrap
from fp8bench.store.runs.listing import find_store_of_run

if TYPE_CHECKING:
    import pandas as pd

    from fp8bench.jobs.after_run import RequestedOutputs

# A page has at most this many columns, because longer lines are hard to read.
_MAX_PAGE_COLUMNS = 160


@dataclass(frozen=True, repr=False, eq=False)
class CommandResult:
    """The result of a command: a page for people, a JSON value and CSV rows for programs, and an exit code.

    The page, the value and the rows are made from the object `found`. `files` has a path and a text for each option
    that names a file. `whole` is the page for Markdown if it is longer than `page`.
    """

    found: Any
    page: Callable[[], Page]
    as_value: Callable[[], Any] = dict
    as_rows: Callable[[], PlainRows] = lambda: ((), ())
    whole: Callable[[], Page] | None = None
    code: int = EXIT_OK
    files: Mapping[str, tuple[Path | None, str]] = field(default_factory=dict)

    def __str__(self) -> str:
        return render(replace(self.page(), footer=())).rstrip("\n")

    def __repr__(self) -> str:
        return f"<{self.page().title}; exit code {self.code}>"

    def _repr_html_(self) -> str:
        return page_as_html(self.page())

    @property
    def value(self) -> Any:
        return self.as_value()

    @cached_property
    def results(self) -> pd.DataFrame:
        """The rows that --csv prints, as a pandas frame."""
        return results_frame(self.as_rows())

    def print_result(self, arguments: argparse.Namespace) -> int:
        with write_outputs(self.files):
            tell(arguments, self.page, self.as_value, self.as_rows, self.whole)
        # A result with a path was stored. Write its page, if results of its kind have one.
        if getattr(self.found, "path", ""):
            from fp8bench.jobs.after_run import report_result

            report_result(self.found, arguments.store, write_sentence_to_stderr)
        return self.code


def check_outputs(arguments: argparse.Namespace) -> None:
    """Raises UsageError if the requested outputs are impossible. Called before anything is measured."""
    # 1. Refuse two outputs on stdout, and pages together with --no-report.
    values = vars(arguments)
    if values.get("json") and values.get("csv") == "-":
        raise UsageError("--json and --csv - would both print on stdout. Give --csv a file, or leave one out.")
    page_options = [name for name in ("html", "md", "open") if values.get(name)]
    if page_options and not values.get("report", True):
        raise UsageError(f"--no-report and --{page_options[0]} contradict each other. Leave one out.")
    # 2. Refuse exports of a dry run, because it has no data.
    if values.get("dry_run"):
        check_output_files({"--write-plan": values.get("write_plan")})
        refused_options = ["--json or --csv"] if values["json"] or values["csv"] is not None else []
        export_options = [name for name in ("trace", "log", "live") if values.get(name)]
        if str(values.get("trace")) in PROFILERS:
            # A dry run prints the command of the profiler, so --trace is allowed.
            export_options.remove("trace")
        refused_options += [f"--{name}" for name in (*page_options, *export_options)]
        if refused_options:
            raise UsageError(f"--dry-run measures nothing, so {refused_options[0]} would have no data. Leave one out.")
    # 3. Refuse files that cannot be written. Later, the error would come after an hour of measuring.
    if values.get("csv") not in (None, "-"):
        check_output_files({"--csv": values["csv"]}, "a file, or '-'")
    for name in ("html", "md", "live"):
        if str(values.get(name)) == "-":
            raise UsageError(f"--{name} '-' would be a file of that name. Give another name.")
    check_output_files({f"--{name}": values.get(name) for name in ("html", "md", "output", "live")})
    for target in values.get("log", ()):
        check_log_target(target)


def parse_log_argument(target_texts: str | Iterable[str]) -> tuple[LogTarget, ...]:
    """Parses and checks the targets that a Python caller passes as `log`."""
    texts = [target_texts] if isinstance(target_texts, str) else target_texts
    try:
        targets = tuple(map(parse_log_target, texts))
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"log: {error}.") from None
    for target in targets:
        check_log_target(target)
    return targets


def check_output_files(files: Mapping[str, str | Path | None], expected: str = "a file") -> None:
    """Raises UsageError if the file of an option cannot be written. The check writes nothing, so it does not find every
    reason.
    """
    for option, file in files.items():
        reason = _explain_unwritable_path(Path(file)) if file is not None else ""
        if reason:
            raise UsageError(f"{option} {str(file)!r:.200} cannot be written: {reason}. Give {expected}.")


def _explain_unwritable_path(path: Path) -> str:
    try:
        if path.is_dir():
            return "it is a directory"
        if not path.parent.is_dir():
            return f"there is no directory {path.parent}"
    except (OSError, ValueError) as error:
        return str(error)
    return "" if os.access(path if path.exists() else path.parent, os.W_OK) else "it may not be written"


@contextmanager
def write_outputs(text_by_option: Mapping[str, tuple[str | Path | None, str]], repeat_hint: str = "") -> Iterator[None]:
    """A context that first writes the text of each option to its file, except '-', which stands for stdout.

    A failure raises UsageError only at the end of the context, so that the result is still printed. The error ends with
    `repeat_hint`, a sentence with the command that writes the file.
    """
    failure = ""
    for option, (path, text) in text_by_option.items():
        if path is None or path == "-":
            continue
        try:
            # Escape what UTF-8 cannot encode, such as undecodable bytes of a file's name.
            Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            failure = f"{option} {path} could not be written ({error.strerror}).{repeat_hint}"
    yield
    if failure:
        raise UsageError(failure)


def read_requested_outputs(arguments: argparse.Namespace) -> RequestedOutputs:
    from fp8bench.jobs.after_run import RequestedOutputs
    from fp8bench.jobs.report_files import ReportDestinations

    values = vars(arguments)
    requested_pages = ReportDestinations(values.get("html"), values.get("md"), values.get("open", False))
    return RequestedOutputs(requested_pages if values.get("report", True) else None, tuple(values.get("log", ())))


def tell(
    arguments: argparse.Namespace,
    page: Callable[[], Page],
    document: Callable[[], Any] = dict,
    rows: Callable[[], PlainRows] = lambda: ((), ()),
    full_page: Callable[[], Page] | None = None,
    repeat_hint: str = "",
) -> None:
    """Prints a result in the requested form (page, JSON or CSV), and writes the requested files.

    `page` and `full_page` are as `page` and `whole` of CommandResult. For `repeat_hint`, see `write_outputs`.
    """
    values = vars(arguments)
    csv_table = csv_text(*rows()) if values.get("csv") is not None else ""
    markdown_text = markdown.render((full_page or page)()) if values.get("md") is not None else ""
    texts = {"--csv": (values.get("csv"), csv_table), "--md": (values.get("md"), markdown_text)}
    with write_outputs(texts, repeat_hint):
        if values.get("csv") == "-":
            say(csv_table)
        elif values.get("json"):
            say(json_line(document()))
        else:
            say(render(page(), *stdout_format(values.get("explain", False))))


def import_renderers() -> None:
    """Imports all modules that print a run and write its report. Called while workers import torch, before anything is
    timed, so that these imports take no time after the run.
    """
    for name in ("fp8bench.jobs.after_run", "fp8bench.report.data.run", "fp8bench.report.terminal.run"):
        import_module(name)
    from fp8bench.report.page import html, section

    section.load_sections()
    html.load_template()
    # Listing the backends imports their modules.
    backends.names()


def print_run(run: Run, arguments: argparse.Namespace) -> None:
    """Prints a run in the requested form. The table is printed even if the CSV file cannot be written."""
    from fp8bench.analysis.findings import findings
    from fp8bench.jobs.report_files import find_report_page
    from fp8bench.report.data.run import run_document, run_rows
    from fp8bench.report.terminal.run import answer_page

    findings_by_case = findings(run)
    make_page = partial(
        answer_page, run, findings_by_case, stdout_format()[0], find_report_page(run), format_store_option(run)
    )
    rows = partial(run_rows, [(run, findings_by_case)])
    repeat_hint = f" `fp8bench show {run.id}{format_store_option(run)} --csv FILE` repeats it."
    # For a run, --md names the file of its report, which is written after the run is printed. So write no page to it
    # here.
    print_arguments = argparse.Namespace(**{**vars(arguments), "md": None})
    try:
        tell(print_arguments, make_page, partial(run_document, run, findings_by_case), rows, repeat_hint=repeat_hint)
    except NotPrinted as error:
        # stdout cannot be written. So name the path at which the run was stored.
        raise NotPrinted(f"{error} The run is kept in {run.path}.") from None


def format_store_option(run_or_store: Run | Path) -> str:
    """Returns the option ' --store DIR' with which another command finds this store or the store of this run, where DIR
    is the user's spelling. Returns '' for the default store.
    """
    path = run_or_store
    if isinstance(path, Run):
        run_path = Path(path.path)
        store = find_store_of_run(run_path)
        if store is None or store == Path(DEFAULT_STORE).resolve():
            return ""
        path = next((folder for folder in run_path.parents if folder.resolve() == store), store)
    return "" if path == Path(DEFAULT_STORE) else f" --store {shlex.quote(str(path))}"


def store_and_import_options(arguments: argparse.Namespace) -> str:
    """Returns the options with which another command finds the same results: ' --store DIR --import MODULE'."""
    return format_store_option(arguments.store) + "".join(
        f" --import {shlex.quote(name)}" for name in arguments.imports
    )


def stdout_format(explain: bool = False) -> tuple[int, bool, bool]:
    """Returns how to render a page on stdout: the width, whether to use colour, and whether to explain the page
    (`explain`).

    The width is COLUMNS or that of the terminal. Colour is used only on a terminal.
    """
    width = min(shutil.get_terminal_size((100, 24)).columns, _MAX_PAGE_COLUMNS)
    # NO_COLOR and TERM=dumb are the usual requests for output without colour.
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return width, color, explain


def print_lines(lines: Iterable[str]) -> None:
    """Prints lines on stdout, wrapped at its width. The rest of a wrapped line is indented by 4 blanks, or by 8 if the
    line itself is indented.
    """
    width = stdout_format()[0]
    for line in lines:
        hanging_indent = " " * (8 if line.startswith(" ") else 4)
        say("".join(f"{part}\n" for part in wrap(line, width, hang=hanging_indent)))
