"""Writing to stdout and stderr, which may be closed, full, an unread pipe, or unable to encode a name."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import TextIO

from fp8bench.errors import NotPrinted


def make_usable() -> None:
    """Replaces missing streams by silent ones, and makes unencodable names printable."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # pythonw and some daemons start without streams.
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """Writes to stdout and flushes. A closed pipe is ignored; if stdout cannot be written, raises NotPrinted."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    # Users who pipe into head have seen what they wanted.
    except BrokenPipeError:
        silence()
    except OSError as error:
        silence()
        raise NotPrinted(f"stdout cannot be written ({error.strerror}).") from None


def complain(text: str) -> None:
    """Writes a sentence to stderr, folded to COLUMNS or the terminal's width; in a file it stays one line.

    A line that begins with blanks is meant for copying and is not folded.
    """
    from fp8bench.report.elements import printable
    from fp8bench.report.terminal.layout import INDENT, MIN_WIDTH, wrap

    columns = os.environ.get("COLUMNS", "")
    width = (int(columns) if columns.isdecimal() else 0) or columns_of(sys.stderr)
    lines = [printable(line) for line in f"fp8bench: {text}".splitlines()]
    # In a log, whole lines can be searched.
    if width:
        wide = max(width, MIN_WIDTH)
        folded: list[str] = []
        for line in lines:
            folded += [line] if line.startswith(" ") else wrap(line, wide, hang=INDENT * 2)
        lines = folded
    with contextlib.suppress(OSError):
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        sys.stderr.flush()


def columns_of(stream: TextIO | None) -> int:
    """Returns the width of a terminal; 0 if the stream is not a terminal or has no known width."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream is not None else 0
    except (OSError, ValueError, AttributeError):
        return 0


def silence() -> None:
    """Redirects stdout to os.devnull, so that the interpreter's last flush does not fail."""
    with contextlib.suppress(OSError, ValueError, io.UnsupportedOperation):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
