"""One line on a terminal that says what is being done; nothing in pipes, CI and dumb terminals."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TextIO

from fp8bench.report.progress import columns_of, is_watched

_ERASE = "\r\x1b[2K"


class LiveLine:
    """A line that replaces itself. `close` erases it."""

    def __init__(self, stream: TextIO | None, environ: Mapping[str, str]) -> None:
        self._stream = stream if is_watched(stream, environ) else None

    def show(self, text: str) -> None:
        """That text, cut where the terminal ends: a full last column would wrap on some."""
        if self._stream is not None:
            self._write(_ERASE + text[: max(0, columns_of(self._stream) - 1)])

    def close(self) -> None:
        """Erase the line. May be called twice."""
        self._write(_ERASE)
        self._stream = None

    def _write(self, text: str) -> None:
        """A terminal that has gone away must not end anything."""
        if self._stream is not None:
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(text)
                self._stream.flush()
