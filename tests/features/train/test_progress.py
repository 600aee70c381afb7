"""What is seen of a training while it goes on: lines in a log, a board on a terminal that leaves nothing behind."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from fp8bench.cli import progress as live
from fp8bench.features.train.observers import PARTS, ArmNow, TrainingBoard, TrainingLines, board_of
from fp8bench.features.train.values import StreamLine, TrainingEvent, Validation
from fp8bench.report.elements import Table, Tone
from tests.cli.test_progress import Clock, Screen
from tests.commands import environment
from tests.learning_curves import CANDIDATE, REFERENCE
from tests.trainings import row_of, training

SHOWN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
LOOK = Validation("bf16", 0, 10, "held-out", 3.25, 64, 64)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def rows(seed: int, first: int, last: int, arms: Sequence[str] = ("bf16", "fp8")) -> list[StreamLine]:
    return [row_of(arm, seed, step) for arm in arms for step in range(first, last)]


def last_board(screen: Screen) -> str:
    """What was drawn last, without what moves and colours."""
    return re.split(r"(?=seed \d+/\d+)", SHOWN.sub("", screen.getvalue()))[-1]


def test_a_log_has_a_line_a_look(clock: Clock) -> None:
    """Of all arms that have a loss in this seed, once a place; what happens is said."""
    said: list[str] = []
    lines = TrainingLines(said.append, clock)
    lines.begun(training())
    lines.trained(0, 0, [Validation("bf16", 0, 0, "held-out", 5.5, 64, 64)])
    lines.trained(0, 5, rows(0, 0, 5))
    assert not said
    clock.now += 30
    lines.trained(0, 10, rows(0, 5, 10))
    for _ in range(2):
        lines.trained(0, 10, [LOOK])
    (told,) = said
    assert re.fullmatch(r"seed 1/2, step 10/20, about 1 min 30 s left: bf16 \d\.\d{3}, fp8 \d\.\d{3}", told)
    lines.trained(0, 15, [TrainingEvent("fp8", 0, 12, "alarm", "the gradient norm is 14.4")])
    assert said[-1] == "seed 0, step 12, fp8: the gradient norm is 14.4"
    lines.trained(1, 20, [*rows(1, 0, 20, ["fp8"]), Validation("fp8", 1, 20, "held-out", 3.0, 64, 64)])
    assert said[-1].startswith("seed 2/2, step 20/20: fp8 ") and "bf16" not in said[-1]


def test_a_board_says_where_every_arm_is(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """And goes on below what is said; losses are of this seed, alarms of all; in the end it is gone."""
    said: list[str] = []
    screen = Screen()
    monkeypatch.setattr(live, "_size", lambda stream: (120, 30))
    board = TrainingBoard(screen, {}, said.append, clock)
    board.begun(training())
    board.trained(0, 0, [Validation("bf16", 0, 0, "held-out", 5.5, 64, 64)])
    assert not screen.getvalue(), "there is nothing to be seen before a step"
    board.trained(0, 10, rows(0, 0, 10))
    clock.now += 30
    board.trained(0, 10, [LOOK])
    shown = last_board(screen)
    assert "seed 1/2, step 10/20, about 1 min 30 s left" in shown and "no alarm" in shown
    assert re.search(r"bf16 +1\.\d{4} +3\.2500 +64\.0 +no alarm +[▁▂▃▄▅▆▇█]{10}\n", shown)
    board.trained(0, 15, [TrainingEvent("fp8", 0, 12, "alarm", "a norm")])
    assert said == ["seed 0, step 12, fp8: a norm"] and "1 alarm, last in seed 0, step 12" in last_board(screen)
    clock.now += 1
    board.trained(1, 5, rows(1, 0, 5, ["fp8"]))
    shown = last_board(screen)
    assert "seed 2/2, step 5/20" in shown and "bf16" not in shown and "1 alarm" in shown
    board.trained(1, 6, [TrainingEvent("fp8", 1, 5, "stopped", "not finite")])
    assert "stopped in step 5" in last_board(screen)
    board.close()
    board.close()
    written = screen.getvalue()
    assert written.count("\x1b[?25h") >= written.count("\x1b[?25l") and written.endswith("\x1b[2K"), (
        "erased, cursor seen"
    )


def test_a_board_is_drawn_at_most_five_times_a_second(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(live, "_size", lambda stream: (100, 30))
    board = TrainingBoard(screen, {}, str, clock)
    board.begun(training())
    for step in range(20):
        clock.now += 0.02
        board.trained(0, step + 1, rows(0, step, step + 1))
    assert screen.getvalue().count("seed 1/2") <= 3
    board.close()


@pytest.mark.parametrize("size", [(20, 5), (41, 8), (80, 24), (150, 40)])
def test_a_board_is_never_wider_nor_higher_than_the_terminal(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    """Where its size has changed all of the screen is cleared: nobody knows how what is drawn was folded."""
    screen, now = Screen(), [(150, 40)]
    monkeypatch.setattr(live, "_size", lambda stream: now[0])
    board = TrainingBoard(screen, {"NO_COLOR": "1"}, str, clock)
    board.begun(training())
    board.trained(0, 5, rows(0, 0, 5))
    before, now[0] = len(screen.getvalue()), size
    clock.now += 1
    board.trained(0, 10, rows(0, 5, 10))
    drawn = screen.getvalue()[before:]
    lines = SHOWN.sub("", drawn).replace("\r", "").split("\n")
    assert max(map(len, lines)) <= size[0] and len(lines) <= size[1]
    assert ("\x1b[2J" in drawn) == (size != (150, 40)) and not re.search(r"\x1b\[\d*m", drawn.replace("\x1b[0m", ""))
    board.close()


def test_a_terminal_that_has_gone_away_ends_no_training(clock: Clock) -> None:
    screen = Screen()
    board = TrainingBoard(screen, {}, str, clock)
    board.begun(training())
    board.trained(0, 5, rows(0, 0, 5))
    screen.close()
    for step in (10, 15):
        clock.now += 1
        board.trained(0, step, rows(0, step - 5, step))
    board.close()
    assert screen.closed


def test_bars_are_left_out_where_the_terminal_has_no_letters_for_them(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Old(Screen):
        encoding = "latin-1"  # type: ignore[assignment]

    screen = Old()
    board = TrainingBoard(screen, {}, str, clock)
    board.begun(training())
    board.trained(0, 5, rows(0, 0, 5))
    assert "fp8" in screen.getvalue() and screen.getvalue().isascii()


NOW = ArmNow(REFERENCE, ((6.0, 2), (2.0, 1), *((0.0, 0),) * (PARTS - 2)), 2.0, 2.5, 192, 0.01)


def table_of(*arms: ArmNow, drawn: bool = True) -> dict[str, list[str]]:
    (part,) = board_of("seed 1/2, step 3/20", arms, drawn).parts
    (table,) = part.elements
    assert isinstance(table, Table)
    return {row[0].text: [field.text for field in row[1:]] for row in table.rows}


def test_a_row_says_loss_speed_and_health() -> None:
    """Means of parts are drawn on one scale for all arms; what has not been yet is blank, and no emulation is fast."""
    other = replace(NOW, arm=CANDIDATE, parts=((4.0, 2), (math.nan, 1), *NOW.parts[2:]), alarms=2,
                    last_alarm="seed 0, step 2")  # fmt: skip
    shown = table_of(NOW, other)
    blank = " " * (PARTS - 2)
    assert shown["bf16"] == ["2.0000", "2.5000", "19.2 k", "no alarm", f"█▁{blank}"]
    assert shown["fp8"] == ["2.0000", "2.5000", "-", "2 alarms, last in seed 0, step 2", f"▁x{blank}"]
    assert table_of(NOW, drawn=False)["bf16"] == ["2.0000", "2.5000", "19.2 k", "no alarm"]


def test_what_is_not_known_is_not_made_up() -> None:
    """Nothing at all yet; losses that are all the same, or no numbers; an arm that came to an early end."""
    assert table_of(ArmNow(REFERENCE))["bf16"] == ["-", "-", "-", "no alarm", " " * PARTS]
    assert table_of(replace(NOW, parts=((2.0, 1),) * PARTS))["bf16"][-1] == "▁" * PARTS
    assert table_of(replace(NOW, parts=((math.inf, 1),) * PARTS))["bf16"][-1] == "x" * PARTS
    assert table_of(replace(NOW, ended="stopped in step 9"))["bf16"][3] == "stopped in step 9"
    (part,) = board_of("", [NOW, replace(NOW, alarms=1)], drawn=True).parts
    (table,) = part.elements
    assert isinstance(table, Table) and [row[4].tone for row in table.rows] == [Tone.GOOD, Tone.BAD]


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
    return int(boards[0]) if len(boards) == 1 and shown.count("no alarm") == 5 and shown.count("held-out") == 1 else 0


def goes_on(before: str, height: int, shown: str) -> bool:
    """Whether a later board is there, once and whole; where there is not room for all of it, its top."""
    if height > 20:
        return at(shown) > at(before)
    return len(re.findall(r"seed 1/1, step \d+", shown)) == 1 and shown.startswith("seed 1/1") and shown != before


def children(process: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux, which is a terminal that can be read")
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc, to find the worker")
def test_nothing_is_left_of_a_board(terminal: Terminal) -> None:
    """On a real terminal, resized, its worker killed, interrupted: it is there once, whatever the size; sentences stay
    above it; in the end there are cursor, echo and prompt."""
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
