"""What stays where it is on a terminal and changes there: a line, or a block of them. Nothing in pipes, CI and dumb
terminals. There are no threads: it is drawn when something is told.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

from fp8bench import units
from fp8bench.cli.streams import columns_of
from fp8bench.report.elements import printable

if TYPE_CHECKING:
    from rich.live import Live

REDRAW_SECONDS = 0.2
# An estimate from less than this would jump about.
_LEAST_SECONDS = 3.0
_LEAST_SHARE = 0.05
_ERASE = "\r\x1b[2K"
_FALLBACK_COLUMNS, _FALLBACK_LINES = 80, 24
_NOT_DRAWN = (0, 0)


class LiveLine:
    """A line that replaces itself where a person watches; nothing in pipes, CI and dumb terminals."""

    def __init__(self, stream: TextIO | None, environ: Mapping[str, str]) -> None:
        self._stream = stream if is_watched(stream, environ) else None
        self._drawn = False

    @property
    def room(self) -> int:
        """So many columns may be used: a full last one would wrap on some terminals."""
        return (columns_of(self._stream) or _FALLBACK_COLUMNS) - 1 if self._stream is not None else 0

    def show(self, text: str) -> None:
        """That text, cut where the terminal ends."""
        self._write(_ERASE + printable(text)[: self.room])
        self._drawn = True

    def close(self) -> None:
        """Erase the line. May be called twice."""
        if self._drawn:
            self._write(_ERASE)
            self._drawn = False

    def _write(self, text: str) -> None:
        """A terminal that has gone away must not end anything."""
        if self._stream is not None:
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError):
                self._stream = None


class LiveBlock:
    """Lines that replace themselves on a terminal. The cursor stays to be seen, whatever ends the process.

    A terminal whose size has changed has folded, scrolled or brought back what was drawn, and nobody knows how far: its
    screen is cleared and drawn anew. What has scrolled off it stays.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self._live: Live | None = None
        self._size = _NOT_DRAWN

    @property
    def room(self) -> int:
        """So many columns may be used, as of a line."""
        return _size(self._stream)[0] - 1

    def can_show(self, letters: str) -> bool:
        """Whether the terminal's encoding has these."""
        try:
            letters.encode(getattr(self._stream, "encoding", None) or "utf-8")
        except (UnicodeError, LookupError):
            return False
        return True

    def show(self, text: str) -> None:
        """These lines, cut where the terminal ends. Text may be coloured."""
        if self._stream is not None:
            try:
                self._draw(self._stream, text.rstrip("\n"))
            except (OSError, ValueError):  # a terminal that has gone away must not end anything
                self._stream = self._live = None

    def _draw(self, stream: TextIO, text: str) -> None:
        from rich.text import Text

        live = self._live or self._begun(stream)
        before, self._size = self._size, _size(stream)
        live.console.size = self._size
        if before not in (self._size, _NOT_DRAWN):
            live.console.clear()
        live.update(Text.from_ansi(text, no_wrap=True, overflow="crop"), refresh=True)

    def _begun(self, stream: TextIO) -> Live:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(
            console=Console(file=stream, force_terminal=True), auto_refresh=False, transient=True,
            redirect_stdout=False, redirect_stderr=False, vertical_overflow="crop",
        )  # fmt: skip
        self._live.start()
        self._live.console.show_cursor(True)
        return self._live

    def close(self) -> None:
        """Erase them. May be called twice."""
        if self._live is not None:
            with contextlib.suppress(OSError, ValueError):
                self._live.update("", refresh=True)  # else the last ones would be drawn in full, beyond the screen
                self._live.stop()
            self._live, self._size = None, _NOT_DRAWN


def _size(stream: TextIO | None) -> tuple[int, int]:
    """Columns and lines of a terminal, as far as it says so."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        size = os.get_terminal_size(stream.fileno() if stream is not None else -1)
        return size.columns or _FALLBACK_COLUMNS, size.lines or _FALLBACK_LINES
    return _FALLBACK_COLUMNS, _FALLBACK_LINES


def time_left(spent: float, share: float) -> str:
    """', about 42 s left', from the share of the work done so far; '' while it is too early to tell."""
    if spent < _LEAST_SECONDS or not _LEAST_SHARE <= share <= 1:
        return ""
    return f", about {units.clock(spent * (1 - share) / share)} left"


def is_watched(stream: TextIO | None, environ: Mapping[str, str]) -> bool:
    """Whether a person looks at a stream, on a terminal that can redraw a line."""
    if stream is None or stream.closed or not stream.isatty():
        return False
    return not environ.get("CI") and environ.get("TERM") != "dumb"
