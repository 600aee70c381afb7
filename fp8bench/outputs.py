"""Where a run goes when it is printed: the table, JSON or CSV on stdout, CSV into a file."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from fp8bench.arguments import DEFAULT_STORE
from fp8bench.errors import NotPrinted, UsageError
from fp8bench.export_commands import check_exports
from fp8bench.history.runs import store_of
from fp8bench.model import Finding, Run
from fp8bench.report.json_text import render as as_json
from fp8bench.streams import say


def check_outputs(arguments: argparse.Namespace) -> None:
    """What is wrong with --json and --csv is said before anything is measured."""
    if arguments.json and arguments.csv == "-":
        raise UsageError("--json and --csv - would both print on stdout. Give --csv a file, or leave one out.")
    if getattr(arguments, "dry_run", False) and (arguments.json or arguments.csv is not None):
        raise UsageError("--dry-run measures nothing, so that there is nothing for --json or --csv. Leave one out.")
    if arguments.csv not in (None, "-"):
        why = why_not_written(arguments.csv)
        if why:
            raise UsageError(f"--csv {arguments.csv!r:.200} cannot be written: {why}. Give a file, or '-'.")
    check_pages(arguments)
    check_exports(arguments)


def check_pages(arguments: argparse.Namespace) -> None:
    """The same for what goes with the report."""
    given = {"--html": getattr(arguments, "html", None), "--md": getattr(arguments, "md", None)}
    asked = [option for option, path in given.items() if path is not None]
    asked += ["--open"] if getattr(arguments, "open", False) else []
    if asked and not getattr(arguments, "report", True):
        raise UsageError(f"--no-report writes none, and {asked[0]} wants one. Leave one out.")
    if asked and getattr(arguments, "dry_run", False):
        raise UsageError(f"--dry-run measures nothing, so that there is nothing for {asked[0]}. Leave one out.")
    for option, path in given.items():
        why = why_not_written(str(path)) if path is not None else ""
        if why:
            raise UsageError(f"{option} {str(path)!r:.200} cannot be written: {why}. Give a file.")


def why_not_written(file: str) -> str:
    """Why a file cannot be written, as far as that can be known without writing it."""
    path = Path(file)
    try:
        if path.is_dir():
            return "it is a directory"
        if not path.parent.is_dir():
            return f"there is no directory {path.parent}"
    except (OSError, ValueError) as error:
        return str(error)
    return "" if os.access(path if path.exists() else path.parent, os.W_OK) else "it may not be written"


def print_run(run: Run, arguments: argparse.Namespace) -> None:
    """The run as it was asked for. A CSV file that cannot be written costs nobody the table."""
    from fp8bench.pipeline import findings

    found = findings(run)
    failure = _write_csv(run, found, arguments) if arguments.csv not in (None, "-") else ""
    try:
        say(_text(run, found, arguments))
    except NotPrinted as error:
        raise NotPrinted(f"{error} The run is kept in {run.path}.") from None
    if failure:
        raise UsageError(failure)


def how_to_resume(run: Run) -> str:
    """The command that does what a run lacks, from here."""
    return f"fp8bench suite --resume {run.id}{_in_its_store(run)}"


def _in_its_store(run: Run) -> str:
    """' --store DIR' where the run's store is not the one that commands look into by themselves."""
    store = store_of(Path(run.path))
    if store is None or store == Path(DEFAULT_STORE).resolve():
        return ""
    return f" --store {shlex.quote(os.path.relpath(store))}"


def _text(run: Run, found: Mapping[str, Finding], arguments: argparse.Namespace) -> str:
    if arguments.csv == "-":
        from fp8bench.report.csv_text import render as as_csv

        return as_csv(run, found, getattr(arguments, "csv_wide", False))
    if arguments.json:
        return as_json(run, found).rstrip("\n") + "\n"
    from fp8bench.report.text import render

    return render(run, found, color=in_color()) + "\n"


def _write_csv(run: Run, found: Mapping[str, Finding], arguments: argparse.Namespace) -> str:
    from fp8bench.report.csv_text import render as as_csv

    file, wide = arguments.csv, getattr(arguments, "csv_wide", False)
    try:
        Path(file).write_text(as_csv(run, found, wide), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        again = f"fp8bench show {run.id}{_in_its_store(run)} --csv FILE"
        return f"--csv {file} could not be written ({error.strerror}). `{again}` repeats it."
    return ""


def in_color() -> bool:
    """Whether stdout is somebody's terminal, and they have not said that they want no colour."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
