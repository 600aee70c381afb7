"""`fp8bench report`: writes the report of stored runs or of a training; several runs are shown side by side."""

from __future__ import annotations

import argparse

from fp8bench.cli import option_types as types
from fp8bench.cli.options import add_common_options
from fp8bench.cli.outputs import check_outputs
from fp8bench.cli.streams import say, write_sentence_to_stderr
from fp8bench.errors import EXIT_OK, UsageError
from fp8bench.files import check_folder
from fp8bench.report.data.loggers import check_option_package
from fp8bench.report.elements import PICTURE_FORMATS, printable


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="runs, or a training: ids, names, paths or 'last'",
    )
    add_common_options(parser, "--store", help="as in suite")
    add_common_options(parser, "--html", "--md", "--open")
    parser.add_argument(
        "--plots",
        type=types.path,
        metavar="DIR",
        help="also write each chart to DIR as a picture for slides and papers, named as on the page",
    )
    parser.add_argument(
        "--plots-format",
        type=types.words,
        metavar="FORMAT,...",
        help=f"formats of these pictures: {', '.join(PICTURE_FORMATS)}; default {PICTURE_FORMATS[0]}",
    )


def run(arguments: argparse.Namespace) -> int:
    from fp8bench.jobs.report_files import ReportDestinations, open_in_browser, short_path, write_named_report

    check_outputs(arguments)
    picture_formats = _choose_picture_formats(arguments)
    requested_pages = ReportDestinations(arguments.html, arguments.md, arguments.open, arguments.plots, picture_formats)
    report_path = write_named_report(arguments.runs, arguments.store, requested_pages)
    for written_file in (report_path, arguments.html, arguments.md):
        if written_file is not None:
            say(f"{printable(short_path(written_file))}\n")
    no_browser_message = open_in_browser(report_path) if requested_pages.browser else ""
    if no_browser_message:
        write_sentence_to_stderr(no_browser_message)
    return EXIT_OK


def _choose_picture_formats(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Returns the formats of --plots-format, each once. Raises UsageError if pictures cannot be drawn or written."""
    picture_formats = tuple(dict.fromkeys(arguments.plots_format or PICTURE_FORMATS[:1]))
    unknown_formats = [picture_format for picture_format in picture_formats if picture_format not in PICTURE_FORMATS]
    if unknown_formats:
        raise UsageError(
            f"--plots-format {unknown_formats[0]!r:.80} is not supported. Give one of {', '.join(PICTURE_FORMATS)}."
        )
    if arguments.plots is not None:
        # Charts are drawn with matplotlib.figure.
        check_option_package("matplotlib", "'fp8bench[plots]'", ".figure", option="--plots")
        check_folder("--plots", arguments.plots)
    elif arguments.plots_format:
        raise UsageError("--plots-format needs a folder to write to. Add --plots DIR, or leave it out.")
    return picture_formats
