"""What a training tells the outside while it goes on: nothing of it may cost the training."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fp8bench.cli.main import main
from fp8bench.features.train.kind import start_training
from fp8bench.features.train.observers import PAGE_SECONDS, AlarmCommand, LiveBoard, LivePage, outward
from fp8bench.features.train.values import StreamLine, Training, TrainingEvent, TrainingObserver
from tests.counts import for_each
from tests.learning_curves import training as made
from tests.trainings import row_of, training


def alarm(step: int, arm: str = "fp8") -> TrainingEvent:
    return TrainingEvent(arm, 0, step, "alarm", "scales fall", "head", "input", (("rule", "falls"),), "raise margin")


class Told(TrainingObserver):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)


@pytest.fixture
def going(tmp_path: Path) -> Iterator[tuple[Training, Path, Callable[[int], list[StreamLine]]]]:
    """A training that is being written, and what writes its first steps."""
    begun, store = training(), tmp_path / "store"
    writer = start_training(begun, store)

    def write(until: int) -> list[StreamLine]:
        lines: list[StreamLine] = [row_of(arm, 0, step) for step in range(until) for arm in ("bf16", "fp8")]
        writer.append(lines)
        return lines

    yield begun, store, write
    writer.close()


def test_the_page_is_there_while_it_trains(
    going: tuple[Training, Path, Callable[[int], list[StreamLine]]], tmp_path: Path
) -> None:
    """From the first slice on, read again by a browser, no more often than it may; at the end as any report."""
    begun, store, write = going
    now, told, file = [0.0], Told(), tmp_path / "live.html"
    page = LivePage(file, store, told.note, lambda: now[0])
    page.trained(0, 0, ())
    assert not file.exists()  # nothing has begun
    page.begun(begun)
    page.trained(0, 4, write(4))
    first = file.read_text()
    assert 'http-equiv="refresh" content="30"' in first and "seed 1 of 2, step 4 of 20, at 20" in first
    assert "cut off" not in first and first.rstrip().endswith("</html>")
    now[0] = PAGE_SECONDS - 1
    page.trained(0, 8, write(8))
    assert file.read_text() == first
    now[0] = PAGE_SECONDS + 1
    page.trained(0, 8, ())
    assert "step 8 of 20" in file.read_text()
    page.close()
    last = file.read_text()
    assert "refresh" not in last and "Written while" not in last and "cut off" in last
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["live.html"] and told.notes == []


def test_a_page_that_cannot_be_written_is_said_once(
    going: tuple[Training, Path, Callable[[int], list[StreamLine]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is wrong: with the disk, or with the page itself."""
    begun, store, write = going
    told, now = Told(), [0.0]
    page = LivePage(tmp_path / "file" / "live.html", store, told.note, lambda: now[0])
    (tmp_path / "file").write_text("no folder")
    page.begun(begun)
    for number in range(3):
        now[0] += 100
        page.trained(0, number, write(1))
    assert len(told.notes) == 1 and re.match(r"--live .*live\.html was not written \(.*; the training", told.notes[0])
    monkeypatch.setattr("fp8bench.features.train.observers.page_of", lambda *_: 1 / 0)
    now[0] += 100
    page.trained(0, 3, ())
    assert "division by zero" in told.notes[1]


def test_a_command_has_alarms_on_its_stdin(tmp_path: Path) -> None:
    """A sentence each with the training's id; those of bands' arms stay in, and events that are none."""
    told, file = Told(), tmp_path / "alarms.txt"
    command = AlarmCommand(f"cat >> '{file}'", told.note)
    begun = made()
    command.begun(begun)
    command.trained(0, 0, ())
    command.close()
    assert not file.exists()
    stopped = TrainingEvent("fp8", 1, 9, "stopped", "the loss is nan")
    command.trained(0, 5, [alarm(3), alarm(4, "bf16 again"), replace(alarm(5), kind="not-finite"), stopped])
    command.close()
    assert file.read_text().splitlines() == [
        "training t1 of nano: fp8, seed 0, step 3: scales fall (head input). What may help: raise margin",
        "training t1 of nano: fp8, seed 1, step 9: the loss is nan",
    ]
    assert told.notes == []


def test_one_command_runs_at_a_time(tmp_path: Path) -> None:
    """What is told meanwhile goes to the next one, all of it."""
    told, file, gate = Told(), tmp_path / "alarms.txt", tmp_path / "gate"
    script = f"echo begun >> '{file}'; cat >> '{file}'; while ! [ -e '{gate}' ]; do sleep 0.01; done"
    command = AlarmCommand(script, told.note)
    command.begun(made())
    for step in range(5):
        command.trained(0, step, [alarm(step)])
    gate.touch()
    command.close()
    words = [line if line == "begun" else line.split(", ")[2][:6] for line in file.read_text().splitlines()]
    assert words == ["begun", "step 0", "begun", "step 1", "step 2", "step 3", "step 4"]


@for_each(
    ("script", "seconds", "said"),
    [
        ("echo no route >&2; exit 7", 30.0, "ended with 7: no route"),
        ("/no/such/command", 30.0, "ended with 127: "),
        ("kill -9 $$", 30.0, "ended with -9"),
        ("sleep 600 & sleep 600", 0.2, "did not end within 0.2 s"),
        ("exec 0<&-; trap '' TERM; sleep 600", 0.2, "did not end within 0.2 s"),
    ],
)
def test_a_command_that_fails_or_hangs_is_said(script: str, seconds: float, said: str) -> None:
    """And nothing is waited for: a text that nobody reads, however long, fills no pipe."""
    told = Told()
    command = AlarmCommand(script, told.note, seconds)
    command.begun(made())
    begun = time.monotonic()
    command.trained(0, 1, [replace(alarm(1), words="x" * 1_000_000)])
    assert time.monotonic() - begun < 10
    command.close()
    assert len(told.notes) == 1 and said in told.notes[0] and told.notes[0].endswith("; the training goes on")


def test_a_process_that_hangs_leaves_nothing(tmp_path: Path) -> None:
    marker = f"{tmp_path}/marker"
    command = AlarmCommand(f"sh -c 'sleep 600; : {marker}' & wait", Told().note, 0.3)
    command.begun(made())
    command.trained(0, 1, [alarm(1)])
    command.close()
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=False).stdout
    assert marker not in listed


def test_curves_go_to_wandb_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run for all arms, by steps of their own; what raises ends that, and is said."""
    logged: list[dict[str, float]] = []
    told, options, ends = Told(), {}, []

    def init(**given: Any) -> SimpleNamespace:
        options.update(given)
        return SimpleNamespace(
            log=logged.append, finish=lambda exit_code=0: ends.append(exit_code),
            define_metric=lambda name, step_metric: ends.append(f"{name} by {step_metric}"),
        )  # fmt: skip

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    board = LiveBoard("mine", told.note)
    board.begun(made())
    board.trained(0, 2, [row_of("bf16", 0, 0), row_of("bf16", 0, 1), row_of("fp8", 0, 0)])
    board.close()
    assert (options["project"], options["id"], options["resume"]) == ("mine", "fp8bench-t1-live", "allow")
    assert [one["step"] for one in logged] == [0, 1, 0] and "fp8/seed-0/training/loss" in logged[2]
    assert ends == ["* by step", 0] and told.notes == []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: 1 / 0))
    board = LiveBoard("mine", told.note)
    board.begun(made())
    board.trained(0, 2, [row_of("bf16", 0, 0)])
    board.close()
    assert told.notes == [
        "--wandb shows nothing as it goes (ZeroDivisionError: division by zero); the training goes on"
    ]


def test_whoever_watched_before_is_told_all_the_same(tmp_path: Path) -> None:
    """The first observer has notes and what is worked on; without options it is the observer itself."""
    told = Told()
    with outward(told, tmp_path, None, None) as alone:
        assert alone is told
    file = tmp_path / "a.txt"
    with outward(told, tmp_path, tmp_path / "live.html", f"cat > '{file}'; exit 3") as several:
        several.begun(made())
        several.note("a word")
        several.trained(0, 1, [alarm(1)])
    assert told.notes[0] == "a word" and "ended with 3" in told.notes[1] and file.read_text()
    assert not (tmp_path / "live.html").exists()  # the store has no such training


@for_each(
    ("words", "said"),
    [
        (["--live", "no/such/x.html"], "there is no directory no/such"),
        (["--live", "."], "it is a directory"),
        (["--live", "-"], "would be a file of that name"),
        (["--live", "a.html", "--dry-run"], "there is nothing for --live"),
        (["--on-alarm", " "], "--on-alarm was given no command"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_trained(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the code of a wrong usage, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--quick", *words]) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())
