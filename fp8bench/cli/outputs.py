"""Where results go: the table, JSON or CSV on stdout, files that options name, and steps after a run."""

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
from fp8bench.cli.option_types import log_target
from fp8bench.cli.streams import complain, say
from fp8bench.errors import EXIT_OK, NotPrinted, UsageError
from fp8bench.model import Run
from fp8bench.model.request import PROFILERS
from fp8bench.registry import backends
from fp8bench.report.data.loggers import LogTarget, check_target
from fp8bench.report.data.plain import Rows, csv_text, json_line, results_frame
from fp8bench.report.elements import Page
from fp8bench.report.notebook import as_html
from fp8bench.report.page import markdown
from fp8bench.report.terminal.layout import render, wrap
from fp8bench.store.runs.listing import store_of

if TYPE_CHECKING:
    import pandas as pd

    from fp8bench.jobs.after_run import Wanted

# Longer lines are hard to read.
_WIDEST = 160


@dataclass(frozen=True, repr=False, eq=False)
class CommandResult:
    """The result of a command: a page for people, a value and rows for programs, and its exit code.

    `found` is the value behind them, `files` are texts for files that options name, `whole` is the page for Markdown if
    that has more.
    """

    found: Any
    page: Callable[[], Page]
    as_value: Callable[[], Any] = dict
    as_rows: Callable[[], Rows] = lambda: ((), ())
    whole: Callable[[], Page] | None = None
    code: int = EXIT_OK
    files: Mapping[str, tuple[Path | None, str]] = field(default_factory=dict)

    def __str__(self) -> str:
        return render(replace(self.page(), footer=())).rstrip("\n")

    def __repr__(self) -> str:
        return f"<{self.page().title}; exit code {self.code}>"

    def _repr_html_(self) -> str:
        return as_html(self.page())

    @property
    def value(self) -> Any:
        return self.as_value()

    @cached_property
    def results(self) -> pd.DataFrame:
        """Returns the rows of --csv as a pandas frame."""
        return results_frame(self.as_rows())

    def print_result(self, arguments: argparse.Namespace) -> int:
        with write_outputs(self.files):
            tell(arguments, self.page, self.as_value, self.as_rows, self.whole)
        if getattr(self.found, "path", ""):
            from fp8bench.jobs.after_run import kept_reported

            kept_reported(self.found, arguments.store, complain)
        return self.code


def check_outputs(arguments: argparse.Namespace) -> None:
    """Refuses impossible outputs before anything is measured."""
    # 1. Two outputs to stdout.
    options = vars(arguments)
    if options.get("json") and options.get("csv") == "-":
        raise UsageError("--json and --csv - would both print on stdout. Give --csv a file, or leave one out.")
    pages = [name for name in ("html", "md", "open") if options.get(name)]
    if pages and not options.get("report", True):
        raise UsageError(f"--no-report and --{pages[0]} contradict each other. Leave one out.")
    # 2. A dry run has nothing to export.
    if options.get("dry_run"):
        check_files({"--write-plan": options.get("write_plan")})
        on_stdout = ["json or --csv"] if options["json"] or options["csv"] is not None else []
        exports = [name for name in ("trace", "log", "live") if options.get(name)]
        if str(options.get("trace")) in PROFILERS:
            exports.remove("trace")  # it prints the profiler's command
        for name in (*on_stdout, *pages, *exports):
            raise UsageError(f"--dry-run measures nothing, so --{name} would have no data. Leave one out.")
    # 3. Files that cannot be written: report that now, not after an hour.
    if options.get("csv") not in (None, "-"):
        check_files({"--csv": options["csv"]}, "a file, or '-'")
    for name in ("html", "md", "live"):
        if str(options.get(name)) == "-":
            raise UsageError(f"--{name} '-' would be a file of that name. Give another name.")
    check_files({f"--{name}": options.get(name) for name in ("html", "md", "output", "live")})
    for target in options.get("log", ()):
        check_target(target)


def log_targets(texts: str | Iterable[str]) -> tuple[LogTarget, ...]:
    """Parses and checks the log targets of a call from Python."""
    try:
        targets = tuple(log_target(text) for text in ([texts] if isinstance(texts, str) else texts))
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"log: {error}.") from None
    for target in targets:
        check_target(target)
    return targets


def check_files(files: Mapping[str, str | Path | None], expected: str = "a file") -> None:
    """Raises UsageError for an option's file that cannot be written, as far as that is known without writing."""
    for option, file in files.items():
        reason = _why_not_written(Path(file)) if file is not None else ""
        if reason:
            raise UsageError(f"{option} {str(file)!r:.200} cannot be written: {reason}. Give {expected}.")


def _why_not_written(path: Path) -> str:
    try:
        if path.is_dir():
            return "it is a directory"
        if not path.parent.is_dir():
            return f"there is no directory {path.parent}"
    except (OSError, ValueError) as error:
        return str(error)
    return "" if os.access(path if path.exists() else path.parent, os.W_OK) else "it may not be written"


@contextmanager
def write_outputs(outputs: Mapping[str, tuple[str | Path | None, str]], repeat_words: str = "") -> Iterator[None]:
    """Writes texts to the files that options name ('-' means stdout); failures are raised after everything else."""
    failed = ""
    for option, (path, text) in outputs.items():
        if path is None or path == "-":
            continue
        try:
            Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            failed = f"{option} {path} could not be written ({error.strerror}).{repeat_words}"
    yield
    if failed:
        raise UsageError(failed)


def wanted_of(arguments: argparse.Namespace) -> Wanted:
    from fp8bench.jobs.after_run import Wanted
    from fp8bench.jobs.report_files import Pages

    options = vars(arguments)
    pages = Pages(options.get("html"), options.get("md"), options.get("open", False))
    return Wanted(pages if options.get("report", True) else None, tuple(options.get("log", ())))


def tell(
    arguments: argparse.Namespace,
    page: Callable[[], Page],
    value: Callable[[], Any] = dict,
    rows: Callable[[], Rows] = lambda: ((), ()),
    full_page: Callable[[], Page] | None = None,
    repeat_words: str = "",
) -> None:
    """Prints a result as requested: as a page, JSON or CSV, and writes the requested files.

    `full_page` is the page for Markdown if that has more; `repeat_words` describe how to write a failed file again.
    """
    options = vars(arguments)
    table, text = csv_text(*rows()) if options.get("csv") is not None else "", ""
    if options.get("md") is not None:
        text = markdown.render((full_page or page)())
    with write_outputs({"--csv": (options.get("csv"), table), "--md": (options.get("md"), text)}, repeat_words):
        if options.get("csv") == "-":
            say(table)
        else:
            say(
                json_line(value())
                if options.get("json")
                else render(page(), *stdout_look(options.get("explain", False)))
            )


def import_renderers() -> None:
    """Imports what `print_run` and the report need, so that this takes no time after the run."""
    for name in ("fp8bench.jobs.after_run", "fp8bench.report.data.run", "fp8bench.report.terminal.run"):
        import_module(name)
    from fp8bench.report.page import html, section

    section.sections()
    html.load_template()
    backends.names()


def print_run(run: Run, arguments: argparse.Namespace) -> None:
    """Prints a run as requested. A CSV file that cannot be written does not prevent the table."""
    from fp8bench.analysis.findings import findings
    from fp8bench.jobs.report_files import place_of_report
    from fp8bench.report.data.run import run_rows, run_value
    from fp8bench.report.terminal.run import page_of

    verdicts = findings(run)
    page = partial(page_of, run, verdicts, stdout_look()[0], place_of_report(run), in_store(run))
    rows = partial(run_rows, [(run, verdicts)])
    repeat_words = f" `fp8bench show {run.id}{in_store(run)} --csv FILE` repeats it."
    without_md = argparse.Namespace(**{**vars(arguments), "md": None})  # --md is the report's
    try:
        tell(without_md, page, partial(run_value, run, verdicts), rows, repeat_words=repeat_words)
    except NotPrinted as error:
        raise NotPrinted(f"{error} The run is kept in {run.path}.") from None


def in_store(run_or_store: Run | Path) -> str:
    """Returns ' --store DIR' if commands need it to find this store, or that of a run; else ''."""
    if isinstance(run_or_store, Path):
        return "" if run_or_store == Path(DEFAULT_STORE) else f" --store {shlex.quote(str(run_or_store))}"
    store = store_of(Path(run_or_store.path))
    if store is None or store == Path(DEFAULT_STORE).resolve():
        return ""
    shorter = min(os.path.relpath(store), str(store.absolute()), key=len)
    return f" --store {shlex.quote(shorter)}"


def options_of(arguments: argparse.Namespace) -> str:
    """Returns the options with which another command finds the same: ' --store DIR --import MODULE'."""
    return in_store(arguments.store) + "".join(f" --import {shlex.quote(name)}" for name in arguments.imports)


def stdout_look(explain: bool = False) -> tuple[int, bool, bool]:
    """Returns width (the terminal's or COLUMNS), colour (for a person) and explanation of a page on stdout."""
    width = min(shutil.get_terminal_size((100, 24)).columns, _WIDEST)
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return width, color, explain


def print_lines(lines: Iterable[str]) -> None:
    width = stdout_look()[0]
    for line in lines:
        hang = "        " if line.startswith(" ") else "    "
        say("".join(f"{part}\n" for part in wrap(line, width, hang=hang)))
