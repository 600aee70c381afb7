"""One line that replaces itself, where somebody watches."""

from __future__ import annotations

import io

import pytest

from fp8bench.report import live_line
from fp8bench.report.live_line import LiveLine


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


def test_a_line_replaces_the_one_before_and_is_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wider than the terminal less a column."""
    monkeypatch.setattr(live_line, "columns_of", lambda stream: 12)
    stream = Terminal()
    line = LiveLine(stream, {})
    line.show("one")
    line.show("a long line of words")
    line.close()
    line.close()
    assert stream.getvalue() == "\r\x1b[2Kone\r\x1b[2Ka long line\r\x1b[2K"


@pytest.mark.parametrize(
    ("stream", "environ"),
    [(io.StringIO(), {}), (None, {}), (Terminal(), {"CI": "1"}), (Terminal(), {"TERM": "dumb"})],
    ids=["pipe", "none", "CI", "dumb"],
)
def test_nobody_watching_sees_nothing(stream: io.StringIO | None, environ: dict[str, str]) -> None:
    """Nothing at all is written."""
    line = LiveLine(stream, environ)
    line.show("one")
    line.close()
    assert stream is None or stream.getvalue() == ""


def test_a_terminal_that_has_gone_away_ends_nothing() -> None:
    """Nor does one that was closed."""

    class Gone(Terminal):
        def write(self, text: str) -> int:
            raise OSError("gone")

    line = LiveLine(Gone(), {})
    line.show("one")
    line.close()
