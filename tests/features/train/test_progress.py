"""The progress of a training: lines of a log, a board, a page, a command, wandb; none of it may cost the training."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench.cli import progress as live
from fp8bench.features.train.kind import start_training
from fp8bench.features.train.progress import (
    PAGE_SECONDS,
    PARTS,
    AlarmCommand,
    ArmNow,
    LiveLog,
    LivePage,
    TrainingBoard,
    TrainingLines,
    board_of,
    outward,
)
from fp8bench.features.train.values import StreamLine, TrainingEvent, Validation
from fp8bench.report.data.loggers import LogTarget
from fp8bench.report.elements import Table, Tone
from tests.cli.test_progress import Clock, Screen
from tests.counts import for_each
from tests.learning_curves import CANDIDATE, REFERENCE
from tests.report.data.test_loggers import Wandb
from tests.trainings import NotedTraining, row_of, training

SHOWN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
LOOK = Validation("bf16", 0, 10, "held-out", 3.25, 64, 64)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def rows(seed: int, first: int, last: int, arms: Sequence[str] = ("bf16", "fp8")) -> list[StreamLine]:
    return [row_of(arm, seed, step) for arm in arms for step in range(first, last)]


def alarm(step: int, arm: str = "fp8") -> TrainingEvent:
    return TrainingEvent(arm, 0, step, "alarm", "scales fall", "head", "input", (("rule", "falls"),), "raise margin")


def last_board(screen: Screen) -> str:
    return re.split(r"(?=seed \d+/\d+)", SHOWN.sub("", screen.getvalue()))[-1]


def test_a_log_has_a_line_a_validation_and_a_board_shows_every_arm(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sentences appear above the board, which is drawn at most five times a second, counts alarms of all seeds, and is
    gone in the end."""
    logged, said, screen = list[str](), list[str](), Screen()
    monkeypatch.setattr(live, "_size", lambda stream: (120, 30))
    log, board = TrainingLines(logged.append, clock), TrainingBoard(screen, {}, said.append, clock)
    for observer in (log, board):
        observer.begun(training())
        observer.turn(0, 2)

    def goes_on(number: int, step: int, *lines: StreamLine, seconds: float = 0.0) -> None:
        clock.now += seconds
        for observer in (log, board):
            observer.trained(number, step, lines)

    goes_on(0, 0, replace(LOOK, step=0))
    assert not logged and not screen.getvalue(), "there is nothing to be seen before a step"
    goes_on(0, 10, *rows(0, 0, 10))
    goes_on(0, 10, LOOK, seconds=30)
    goes_on(0, 10, LOOK)
    (line,) = logged
    assert re.fullmatch(r"seed 1/2, step 10/20, about 4 min 30 s left: bf16 \d\.\d{3}, fp8 \d\.\d{3}", line)
    assert "about 4 min 30 s left" in last_board(screen)
    assert re.search(r"bf16 +1\.\d{4} +3\.2500 +64\.0 +no alarm +[▁▂▃▄▅▆▇█]{10}\n", last_board(screen))
    goes_on(0, 15, alarm(12))
    assert logged[1:] == said == ["seed 0, step 12, fp8: scales fall"]
    assert "1 alarm, last in seed 0, step 12" in last_board(screen)
    for observer in (log, board):
        observer.turn(1, 2)
    goes_on(1, 5, *rows(1, 0, 5, ["fp8"]), replace(LOOK, arm="fp8", seed=1, step=5), seconds=1)
    assert re.fullmatch(r"seed 2/2, step 5/20, about .* left: fp8 \d\.\d{3}", logged[-1])
    shown = last_board(screen)
    assert "seed 2/2, step 5/20" in shown and "bf16" not in shown and "1 alarm" in shown
    goes_on(1, 6, TrainingEvent("fp8", 1, 5, "stopped", "not finite"))
    assert "stopped in step 5" in last_board(screen)
    drawn = screen.getvalue().count("seed 2/2")
    for step in range(6, 16):
        goes_on(1, step + 1, *rows(1, step, step + 1, ["fp8"]), seconds=0.02)
    assert screen.getvalue().count("seed 2/2") <= drawn + 2
    board.close()
    board.close()
    written = screen.getvalue()
    assert written.count("\x1b[?25h") >= written.count("\x1b[?25l") and written.endswith("\x1b[2K")


def test_the_time_left_is_of_all_pairs_of_a_seed_also_when_resumed(clock: Clock) -> None:
    """Resumed in the middle of the second of four turns. Ten steps take 10 s, reading the held-out text 30 s."""
    said = list[str]()
    log = TrainingLines(said.append, clock)
    log.begun(training())
    for turn, seed, step in ((1, 0, 10), (1, 0, 20), (2, 1, 10), (2, 1, 20), (3, 1, 10), (3, 1, 20)):
        log.turn(turn, 4)
        log.trained(seed, step, [row_of("fp8", seed, step), replace(LOOK, arm="fp8", seed=seed, step=step)])
        clock.now += 40 if step == 10 else 10
    left = [re.search("about (.*) left", line) for line in said]
    assert [found and found[1] for found in left] == [None, "1 min 40 s", "1 min 30 s", "50 s", "40 s", None]


@for_each("size", [(20, 5), (41, 8), (80, 24), (150, 40)])
def test_a_board_is_never_wider_nor_higher_than_the_terminal(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    """After a change of size the whole screen is cleared, as it is unknown how the board was wrapped."""
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


def test_a_lost_terminal_ends_no_training_and_an_old_one_has_no_bars(clock: Clock) -> None:
    class Old(Screen):
        encoding = "latin-1"  # type: ignore[assignment]

    for screen in (Old(), Screen()):
        board = TrainingBoard(screen, {}, str, clock)
        board.begun(training())
        board.trained(0, 5, rows(0, 0, 5))
        assert "fp8" in screen.getvalue() and screen.getvalue().isascii() == (screen.encoding == "latin-1")
        screen.close()
        clock.now += 1
        board.trained(0, 10, rows(0, 5, 10))
        board.close()


NOW = ArmNow(REFERENCE, ((6.0, 2), (2.0, 1), *((0.0, 0),) * (PARTS - 2)), 2.0, 2.5, 192, 0.01)


def cells(*arms: ArmNow, drawn: bool = True) -> Table:
    (part,) = board_of("seed 1/2, step 3/20", arms, drawn).parts
    (table,) = part.elements
    assert isinstance(table, Table)
    return table


def test_a_row_has_loss_speed_and_health() -> None:
    """Bars share one scale; parts to come are blank, and emulated arms have no speed."""
    other = replace(NOW, arm=CANDIDATE, parts=((4.0, 2), (math.nan, 1), *NOW.parts[2:]), alarms=2,
                    last_alarm="seed 0, step 2")  # fmt: skip
    both, blank = cells(NOW, other), " " * (PARTS - 2)
    assert [[field.text for field in row] for row in both.rows] == [
        ["bf16", "2.0000", "2.5000", "19.2 k", "no alarm", f"█▁{blank}"],
        ["fp8", "2.0000", "2.5000", "-", "2 alarms, last in seed 0, step 2", f"▁x{blank}"],
    ]
    assert [row[4].tone for row in both.rows] == [Tone.GOOD, Tone.BAD]
    for now, drawn, shown in (
        (NOW, False, ["2.0000", "2.5000", "19.2 k", "no alarm"]),
        (ArmNow(REFERENCE), True, ["-", "-", "-", "no alarm", " " * PARTS]),
        (ArmNow(REFERENCE, ((2.0, 1),) * PARTS), True, ["-", "-", "-", "no alarm", "▁" * PARTS]),
        (ArmNow(REFERENCE, ((math.inf, 1),) * PARTS, ended="out"), True, ["-", "-", "-", "out", "x" * PARTS]),
    ):  # fmt: skip
        assert [field.text for field in cells(now, drawn=drawn).rows[0][1:]] == shown


PATIENCE = 240.0


def test_the_page_is_there_while_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first slice on, reloaded by a browser, and not too often; any fault is reported once."""
    begun, store, file = training(), tmp_path / "store", tmp_path / "live.html"
    told, now, writer = NotedTraining(), [0.0], start_training(begun, store)
    page, broken = (LivePage(path, store, told.note, lambda: now[0]) for path in (file, file / "live.html"))
    page.trained(0, 0, ())
    assert not file.exists()  # nothing has begun
    page.begun(begun)
    broken.begun(begun)

    def goes_on(seconds: float, step: int) -> str:
        now[0] = seconds
        writer.append(rows(0, step - 4, step))
        page.trained(0, step, ())
        broken.trained(0, step, ())
        return file.read_text()

    first = goes_on(0, 4)
    assert 'http-equiv="refresh" content="30"' in first and "seed 1 of 2, step 4 of 20, at 20" in first
    assert "cut off" not in first and first.rstrip().endswith("</html>")
    assert goes_on(PAGE_SECONDS - 1, 8) == first and "step 12 of 20" in goes_on(PAGE_SECONDS + 1, 12)
    page.close()
    last = file.read_text()
    assert "refresh" not in last and "Written while" not in last and "cut off" in last
    assert sorted(path.name for path in tmp_path.iterdir()) == ["live.html", "store"]
    monkeypatch.setattr("fp8bench.features.train.progress.page_of", lambda *_: 1 / 0)
    broken.close()
    writer.close()
    assert len(told.notes) == 2 and "live.html was not written" in told.notes[0] and "division" in told.notes[1]


def test_a_command_has_alarms_on_its_stdin(tmp_path: Path) -> None:
    """A sentence each, one command at a time, for which nothing waits: later alarms go to the next one. Alarms of bands
    are left out."""
    told, file, gate = NotedTraining(), tmp_path / "alarms.txt", tmp_path / "gate"
    command = AlarmCommand(
        f"echo begun >> '{file}'; cat >> '{file}'; while ! [ -e '{gate}' ]; do sleep 0.01; done", told.note
    )
    command.begun(training())
    command.trained(0, 0, [alarm(4, "bf16 again"), replace(alarm(5), kind="not-finite")])
    command.close()
    assert not file.exists()
    for step in range(3):
        command.trained(0, step, [alarm(step)])
    command.trained(0, 5, [TrainingEvent("fp8", 1, 9, "stopped", "the loss is nan")])
    gate.touch()
    command.close()
    lines = [
        line if line == "begun" else line.removeprefix("training 00000001 of nano: fp8, ")
        for line in file.read_text().splitlines()
    ]
    words = [f"seed 0, step {step}: scales fall (head input). What may help: raise margin" for step in range(3)]
    assert lines == ["begun", words[0], "begun", *words[1:], "seed 1, step 9: the loss is nan"] and told.notes == []


@for_each(
    ("script", "seconds", "said"),
    [
        ("echo no route >&2; exit 7", 240.0, "ended with 7: no route"),
        ("/no/such/command", 240.0, "ended with 127: "), ("kill -9 $$", 240.0, "ended with -9"),
        ("sleep 600 & sh -c 'sleep 600; : MARKER'", 0.1, "did not end within"),
        ("exec 0<&-; trap '' TERM; sleep 600", 0.1, "did not end within"),
    ],
)  # fmt: skip
def test_a_command_that_fails_or_hangs_is_reported(script: str, seconds: float, said: str, tmp_path: Path) -> None:
    """An unread text fills no pipe, and no process is left."""
    told, marker = NotedTraining(), f"{tmp_path}/marker"
    command = AlarmCommand(script.replace("MARKER", marker), told.note, seconds)
    command.begun(training())
    command.trained(0, 1, [replace(alarm(1), words="x" * 1_000_000)])
    command.close()
    assert len(told.notes) == 1 and said in told.notes[0] and told.notes[0].endswith("; the training goes on")
    end = time.monotonic() + PATIENCE
    while marker in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=False).stdout:
        assert time.monotonic() < end  # it is ended, and may have to wait for a core before it can
        time.sleep(0.05)


def test_scalars_are_logged_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb, told = Wandb(), NotedTraining()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    log = LiveLog([LogTarget("wandb", "mine")], tmp_path, told.note)
    log.begun(training())
    log.trained(0, 2, [row_of("bf16", 0, 0), row_of("bf16", 0, 1), row_of("fp8", 0, 0)])
    log.close()
    names = [name for name, _ in wandb.calls]
    assert names == ["init", "define", "log", "log", "log", "finish"]
    rows = [values for name, values in wandb.calls if name == "log"]
    assert [values["step"] for values in rows] == [0, 1, 0] and "fp8 seed 0/training/loss" in rows[2]
    assert told.notes == ["logged to wandb:mine"]


def test_the_inner_observer_still_gets_everything(tmp_path: Path) -> None:
    told, file = NotedTraining(), tmp_path / "a.txt"
    with outward(told, tmp_path, None, None) as alone:
        assert alone is told
    with outward(told, tmp_path, tmp_path / "live.html", f"cat > '{file}'; exit 3") as several:
        several.begun(training())
        several.note("a word")
        several.trained(0, 1, [alarm(1)])
    assert told.notes[0] == "a word" and "ended with 3" in told.notes[1] and file.read_text()
    assert not (tmp_path / "live.html").exists()  # the store has no such training


def test_a_log_is_never_silent_for_long(clock: Clock) -> None:
    said = list[str]()
    log = TrainingLines(said.append, clock)
    log.begun(training())
    for step in range(1, 11):
        log.trained(0, step, [row_of("fp8", 0, step)])
        clock.now += 10
    assert [line.partition(", about")[0] for line in said] == [f"seed 1/2, step {step}/20" for step in (4, 7, 10)]
