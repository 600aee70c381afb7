"""What an exception in a bench is reported as."""

from __future__ import annotations

import contextlib
import traceback

from fp8bench.measure.bench import Bench


def described(error: BaseException, bench: Bench | None) -> tuple[str, str, str, bool]:
    """Its kind, its text, its traceback, and whether a device calls it an exhausted memory."""
    try:
        text, exhausted = str(error), bench is not None and bench.is_out_of_memory(error)
    except Exception:  # noqa: BLE001 - it is foreign code that makes the text
        text, exhausted = "an exception that has no text", False
    trace = "".join(traceback.format_exception(error))
    return type(error).__name__, writable(text), writable(trace), exhausted


def writable(text: str) -> str:
    """The text with what no encoding can write (half a surrogate pair) spelled out."""
    return str(text.encode("utf-8", "backslashreplace"), "utf-8")


def recovered(bench: Bench | None) -> None:
    """Give back what the aborted request holds. It may fail where the request has (a GPU after an assert)."""
    with contextlib.suppress(Exception):
        if bench is not None:
            bench.recover()
