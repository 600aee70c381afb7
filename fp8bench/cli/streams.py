"""Writes to stdout and stderr. A stream may be missing, its disk may be full, its pipe may be closed, or it may be
unable to encode a name.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import TextIO

from fp8bench.errors import NotPrinted


def repair_standard_streams() -> None:
    """Replaces a missing stdout or stderr by a silent stream. Letters that a stream cannot encode will be escaped."""
    for name in ("stdout", "stderr"):
        standard_stream = getattr(sys, name)
        # pythonw and some daemons start without streams.
        if standard_stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))
        elif isinstance(standard_stream, io.TextIOWrapper):
            standard_stream.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """Writes to stdout and flushes it. Ignores a closed pipe. Raises NotPrinted if stdout cannot be written."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    # A reader such as `head` closes the pipe when it has read enough lines.
    except BrokenPipeError:
        silence_stdout()
    except OSError as error:
        silence_stdout()
        raise NotPrinted(f"stdout cannot be written ({error.strerror}).") from None


def write_sentence_to_stderr(text: str) -> None:
    """Writes a sentence to stderr, wrapped at COLUMNS or the width of the terminal. If stderr is a file, the sentence
    stays on one line.

    A line of the text that begins with a blank is a command to copy, and is not wrapped.
    """
    from fp8bench.report.elements import printable
    from fp8bench.report.terminal.layout import INDENT, MIN_TERMINAL_WIDTH, wrap

    columns_variable = os.environ.get("COLUMNS", "")
    width = (int(columns_variable) if columns_variable.isdecimal() else 0) or terminal_width(sys.stderr)
    lines: list[str] = []
    for line in map(printable, f"fp8bench: {text}".splitlines()):
        # Do not wrap lines in a log, so that whole sentences can be searched.
        should_wrap_line = width and not line.startswith(" ")
        lines += wrap(line, max(width, MIN_TERMINAL_WIDTH), hang=INDENT * 2) if should_wrap_line else [line]
    # An error of stderr cannot be reported anywhere.
    with contextlib.suppress(OSError):
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        sys.stderr.flush()


def terminal_width(stream: TextIO | None) -> int:
    """Returns the number of columns of a terminal, or 0 if the stream is not a terminal or the number is unknown."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream is not None else 0
    except (OSError, ValueError, AttributeError):
        return 0


def silence_stdout() -> None:
    """Redirects stdout to os.devnull, so that Python's flush at exit does not fail."""
    with contextlib.suppress(OSError, ValueError, io.UnsupportedOperation):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
