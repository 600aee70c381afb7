"""A training on a real terminal: resized, its worker killed, interrupted. What is left is as sane as before."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.commands import environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux, which is a terminal that can be read"),
]
TRAIN = (
    f"{sys.executable} -m fp8bench train --dtypes bf16,fp8 --data text.txt --steps 1000000 --seeds 1 --keep 20 "
    "--batch 1 --sequence 16 --evaluate 1000"
)
PATIENCE = 90.0


class Terminal:
    """A terminal of tmux with a shell in it."""

    def __init__(self) -> None:
        self._tmux = ("tmux", "-L", f"fp8bench-{os.getpid()}", "-f", os.devnull)
        self.say("new-session", "-d", "-x", "110", "-y", "30", "bash", "--norc")

    def say(self, *words: str) -> str:
        done = subprocess.run(
            [*self._tmux, *words], env=environment(PS1="$ ", CI=""), capture_output=True, text=True, check=True
        )
        return done.stdout

    def type(self, text: str) -> None:
        self.say("send-keys", "-l", text)
        self.say("send-keys", "Enter")

    def resized(self, columns: int, lines: int) -> str:
        """The screen before that."""
        before = self.screen()
        self.say("resize-window", "-x", str(columns), "-y", str(lines))
        return before

    def screen(self) -> str:
        return self.say("capture-pane", "-p").rstrip()

    def waits_for(self, holds: Callable[[str], object]) -> str:
        end = time.monotonic() + PATIENCE
        while not holds(shown := self.screen()):
            assert time.monotonic() < end, shown
            time.sleep(0.1)
        return shown


@pytest.fixture
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("every token is a byte of this text. " * 4000)
    made = Terminal()
    yield made
    made.say("kill-server")


def at(shown: str) -> int:
    """The step that a board is at; it is there once."""
    boards = re.findall(r"^seed 1/1, step (\d+)/1000000", shown, re.MULTILINE)
    return int(boards[0]) if len(boards) == 1 and shown.count("no alarm") == 4 and shown.count("held-out") == 1 else 0


def goes_on(before: str, height: int, shown: str) -> bool:
    """Whether a later board is there, once and whole; where there is not room for all of it, its top."""
    if height > 20:
        return at(shown) > at(before)
    return len(re.findall(r"seed 1/1, step \d+", shown)) == 1 and shown.startswith("seed 1/1") and shown != before


def children(process: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc, to find the worker")
def test_nothing_is_left_of_a_board(terminal: Terminal) -> None:
    """It is there once, whatever the size; sentences stay above it; in the end there are cursor, echo and prompt."""
    shell = int(terminal.say("display-message", "-p", "#{pane_pid}"))
    terminal.type(TRAIN)
    terminal.waits_for(at)
    for width, height in ((60, 30), (44, 12), (130, 40)):
        before = terminal.resized(width, height)
        shown = terminal.waits_for(partial(goes_on, before, height))
        assert max(map(len, shown.splitlines())) <= width
    (parent,) = children(shell)
    os.kill(children(parent)[0], signal.SIGKILL)
    shown = terminal.waits_for(lambda shown: "a fresh worker goes on" in shown and at(shown))
    assert shown.index("a fresh worker") < shown.index("seed 1/1, step"), "what is said stays above the board"
    terminal.say("send-keys", "C-c")
    terminal.waits_for(lambda shown: "--explain says how to read this" in shown and shown.endswith("$"))
    assert "losses so far" not in terminal.screen() and "To go on:" in terminal.say("capture-pane", "-p", "-S", "-90")
    terminal.type("clear; stty -a | grep -o '.icanon .*echo ' ; echo $((40 + 2))")
    assert "42" in terminal.waits_for(lambda shown: re.search(r"^42$", shown, re.MULTILINE))
    assert terminal.say("display-message", "-p", "#{cursor_flag}").strip() == "1"
