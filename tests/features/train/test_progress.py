"""The progress of a training: lines of a log, a board, a page, wandb; none of it may cost the training."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench.cli import progress as live
from fp8bench.features.train.kind import start_training
from fp8bench.features.train.progress import (
    PAGE_INTERVAL_SECONDS,
    LiveLog,
    LiveTrainingPage,
    TrainingBoard,
    TrainingLines,
    add_training_outputs,
)
from fp8bench.features.train.values import StreamLine, TrainingEvent, Validation
from fp8bench.report.data.loggers import LogTarget
from tests.cli.test_progress import Clock, Screen, lines_on_terminal
from tests.report.data.test_loggers import Wandb
from tests.trainings import NotedTraining, row_of, training

SHOWN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
LOOK = Validation("bf16", 0, 10, "held-out", 3.25, 64)


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
    """Messages appear above the board, which counts alarms of all seeds and disappears at the end."""
    logged = list[str]()
    said = list[str]()
    screen = Screen()
    monkeypatch.setattr(live, "_terminal_size", lambda stream: (120, 30))
    log = TrainingLines(logged.append, clock)
    board = TrainingBoard(screen, {}, said.append, clock)
    for observer in (log, board):
        observer.begun(training())

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
    assert re.fullmatch(r"seed 1/2, step 10/20, about 1 min 30 s left: bf16 \d\.\d{3}, fp8 \d\.\d{3}", line)
    assert "about 1 min 30 s left" in last_board(screen)
    assert re.search(r"bf16 +1\.\d{4} +3\.2500 +64\.0 +no alarm\n", last_board(screen))
    assert re.search(r"fp8 +1\.\d{4} +- +- +no alarm", last_board(screen)), "emulated arms have no speed"
    goes_on(0, 15, alarm(12))
    assert logged[1:] == said == [alarm(12).describe()]
    assert "1 alarm, last in seed 0, step 12" in last_board(screen)
    goes_on(1, 5, *rows(1, 0, 5, ["fp8"]), replace(LOOK, arm="fp8", seed=1, step=5), seconds=1)
    assert re.fullmatch(r"seed 2/2, step 5/20, about .* left: fp8 \d\.\d{3}", logged[-1])
    shown = last_board(screen)
    assert "seed 2/2, step 5/20" in shown and "bf16" not in shown and "1 alarm" in shown
    goes_on(1, 6, TrainingEvent("fp8", 1, 5, "stopped", "not finite"))
    assert "stopped in step 5" in last_board(screen)
    board.close()
    written = screen.getvalue()
    assert "".join(lines_on_terminal(written)) == ""


def test_losses_of_different_arms_are_of_the_same_step(clock: Clock) -> None:
    """Arms take turns, and the line of a validation waits for the slowest. A new seed begins with empty lines."""
    logged = list[str]()
    log = TrainingLines(logged.append, clock)
    log.begun(training())
    by_arm = {
        arm: [replace(row_of(arm, 0, step), loss=float(step + 1)) for step in range(20)] for arm in ("bf16", "fp8")
    }
    for arm, first, last in (("fp8", 0, 5), ("bf16", 0, 5), ("bf16", 5, 10), ("fp8", 5, 10), ("fp8", 10, 15)):
        log.trained(0, last, [*by_arm[arm][first:last], *([replace(LOOK, arm=arm)] if last == 10 else [])])
    assert logged == ["seed 1/2, step 10/20: bf16 10.000, fp8 10.000"]
    log.trained(0, 12, [by_arm["bf16"][10], by_arm["bf16"][11], TrainingEvent("bf16", 0, 12, "stopped", "by the user")])
    log.trained(0, 15, [replace(LOOK, arm="fp8", step=15)])
    assert logged[-1] == "seed 1/2, step 15/20: fp8 15.000"


def test_the_time_left_is_of_the_rest_of_a_resumed_training(clock: Clock) -> None:
    said = list[str]()
    log = TrainingLines(said.append, clock)
    log.begun(training())
    clock.now += 60  # starting a worker
    for seed, step in ((0, 10), (0, 20), (1, 10), (1, 20)):
        log.trained(seed, step, [row_of("fp8", seed, step - 1), replace(LOOK, arm="fp8", seed=seed, step=step)])
        clock.now += 10
    left = [re.search("about (.*) left", line) for line in said]
    assert [found and found[1] for found in left] == [None, "20 s", "10 s", None]


def test_the_page_is_there_while_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first slice on, reloaded by a browser at a limited rate; any fault is reported once."""
    begun = training()
    store = tmp_path / "store"
    file = tmp_path / "live.html"
    told = NotedTraining()
    now = [0.0]
    writer = start_training(begun, store)
    page, broken = (LiveTrainingPage(path, store, told.note, lambda: now[0]) for path in (file, file / "live.html"))
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
    assert goes_on(PAGE_INTERVAL_SECONDS - 1, 8) == first and "step 12 of 20" in goes_on(PAGE_INTERVAL_SECONDS + 1, 12)
    page.close()
    last = file.read_text()
    assert "refresh" not in last and "Written while" not in last and "cut off" in last
    assert sorted(path.name for path in tmp_path.iterdir()) == ["live.html", "store"]
    monkeypatch.setattr("fp8bench.features.train.progress.render_page", lambda *_: 1 / 0)
    broken.close()
    writer.close()
    assert len(told.notes) == 2 and "live.html was not written" in told.notes[0] and "division" in told.notes[1]


def test_scalars_are_logged_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Wandb()
    told = NotedTraining()
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
    told = NotedTraining()
    with add_training_outputs(told, tmp_path, None) as alone:
        assert alone is told
    with add_training_outputs(told, tmp_path, tmp_path / "live.html") as several:
        several.begun(training())
        several.note("a word")
        several.trained(0, 1, [alarm(1)])
    assert told.notes == ["a word"]
    assert not (tmp_path / "live.html").exists()  # the store has no such training


def test_a_log_is_never_silent_for_long(clock: Clock) -> None:
    said = list[str]()
    log = TrainingLines(said.append, clock)
    log.begun(training())
    for step in range(1, 11):
        log.trained(0, step, [row_of("fp8", 0, step - 1)])
        clock.now += 10
    assert [line.partition(", about")[0] for line in said] == [f"seed 1/2, step {step}/20" for step in (4, 7, 10)]


def test_a_command_runs_for_each_alarm(tmp_path: Path) -> None:
    """It gets the alarm in its environment; the training waits for its end only, and a failure is a sentence."""
    said = list[str]()
    inner = NotedTraining()
    inner.note = said.append  # type: ignore[method-assign,assignment]
    command = (
        f'echo "$FP8BENCH_RULE $FP8BENCH_ARM $FP8BENCH_STEP $FP8BENCH_ALARM" >> {tmp_path}/told; exit $FP8BENCH_STEP'
    )
    with add_training_outputs(inner, tmp_path, None, on_alarm=command) as observer:
        observer.begun(training())
        observer.trained(0, 10, [row_of("fp8", 0, 5), alarm(0), LOOK])
    assert (tmp_path / "told").read_text() == f"falls fp8 0 {alarm(0).describe()}\n" and not said
    with add_training_outputs(inner, tmp_path, None, on_alarm=command) as observer:
        observer.trained(0, 10, [alarm(3)])
    assert len((tmp_path / "told").read_text().splitlines()) == 2
    assert [sentence.endswith("ended with 3; the training goes on") for sentence in said] == [True]
