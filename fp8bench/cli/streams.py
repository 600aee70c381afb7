"""stdout and stderr as they may be: closed, full, a pipe nobody reads any more, or without a letter for every name."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path

from fp8bench.errors import NotPrinted


def make_usable() -> None:
    """Streams that are not there become silent ones; names that are no text can be printed all the same."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """Write to stdout, now. A reader who has left is no error; a stdout that takes nothing raises NotPrinted."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        silence()
    except OSError as error:
        silence()
        raise NotPrinted(f"stdout cannot be written ({error.strerror}).") from None


def complain(text: str) -> None:
    """One line on stderr, if anybody takes it."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"fp8bench: {text}\n")
        sys.stderr.flush()


def silence() -> None:
    """Point stdout nowhere, so that the interpreter's last flush is quiet."""
    with contextlib.suppress(OSError, ValueError, io.UnsupportedOperation):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
