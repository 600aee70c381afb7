"""The progress of a training: a board on a terminal, lines in a log, its page rewritten regularly, and scalars for
boards.

All of it happens between slices, where no step is timed. A failure is reported and does not stop the training.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TextIO

from fp8bench import units
from fp8bench.cli.progress import REDRAW_SECONDS, LiveBlock, is_watched, time_left
from fp8bench.cli.streams import complain
from fp8bench.errors import StoreError
from fp8bench.features.train.data import scalars_of, source_of, summary_scalars
from fp8bench.features.train.kind import KIND, load_training
from fp8bench.features.train.page import page_of
from fp8bench.features.train.streams import loops_of
from fp8bench.features.train.values import (
    Arm,
    KeptTraining,
    Lines,
    StepRow,
    StreamLine,
    Training,
    TrainingEvent,
    TrainingObserver,
    Validation,
)
from fp8bench.features.train.verdicts.summary import JudgedTraining
from fp8bench.files import write_whole
from fp8bench.report.columns import Col, table
from fp8bench.report.data.loggers import LoggedScalar, LogTarget, ScalarLogger
from fp8bench.report.elements import Field, Page, Part, Text, Tone
from fp8bench.report.page import html
from fp8bench.report.terminal.layout import render
from fp8bench.report.words.naming import many

_OUT, _STOPPED = "out", "stopped"
# A log gets a line at least this often.
_SILENT_SECONDS = 25.0


class _Watching(TrainingObserver):
    def __init__(self, say: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._say = say
        self._clock = clock
        self._begun = clock()
        self._done_before: float | None = None
        self._number = 0
        self._arms: dict[str, ArmNow] = {}

    def begun(self, training: Training) -> None:
        self._training, self._begun, self._done_before = training, self._clock(), None
        self._arms = {arm.name: ArmNow(arm) for arm in training.arms if not arm.skip}

    def trained(self, number: int, step: int, lines: Lines) -> None:
        if number != self._number:
            self._number = number
            for now in self._arms.values():
                now.begin_seed()
        for line in lines:
            if line.arm in self._arms:
                self._arms[line.arm].take(line)
            if isinstance(line, TrainingEvent):
                self.note(line.sentence)

    def note(self, sentence: str) -> None:
        self._say(sentence)

    @property
    def _arms_with_loss(self) -> list[ArmNow]:
        """The arms of this seed; the one-ulp arm has no loss after the first seed."""
        return [now for now in self._arms.values() if now.loss is not None]

    def _where(self, number: int, step: int) -> str:
        """Returns 'seed 2/5, step 120/300, about 40 s left'."""
        request = self._training.request
        done = (number + step / request.steps) / request.seeds
        if self._done_before is None:
            # At a resume, or after the first slice: starting a worker is not part of later slices.
            self._done_before, self._begun = done, self._clock()
        remaining = ""
        if done < 1:
            share = (done - self._done_before) / (1 - self._done_before)
            remaining = time_left(self._clock() - self._begun, share)
        return f"seed {number + 1}/{request.seeds}, step {step}/{request.steps}{remaining}"


class TrainingLines(_Watching):
    """Progress for logs and pipes: a line after each validation."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(say, clock)
        self._told: tuple[int, int] | None = None
        self._said_at = self._begun

    def trained(self, number: int, step: int, lines: Lines) -> None:
        super().trained(number, step, lines)
        where = self._where(number, step)
        # A log gets a line for new held-out losses, or after a long silence.
        losses = ", ".join(f"{now.arm.name} {now.loss:.3f}" for now in self._arms_with_loss)
        validated = any(isinstance(line, Validation) for line in lines)
        silent = self._clock() - self._said_at >= _SILENT_SECONDS
        if losses and self._told != (number, step) and (validated or silent):
            self._told, self._said_at = (number, step), self._clock()
            self._say(f"{where}: {losses}")


class TrainingBoard(_Watching):
    """Progress for a terminal: a board that updates in place, below the sentences."""

    def __init__(
        self,
        stream: TextIO,
        environ: Mapping[str, str],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(say, clock)
        self._block = LiveBlock(stream)
        self._color = not environ.get("NO_COLOR")
        self._shown_at = -REDRAW_SECONDS

    def working(self, arm: str, doing: str) -> None:
        self._block.show(f"{doing} of {arm}")

    def trained(self, number: int, step: int, lines: Lines) -> None:
        super().trained(number, step, lines)
        where = self._where(number, step)
        # Redrawing a terminal after each slice would flicker.
        if self._arms_with_loss and self._clock() - self._shown_at >= REDRAW_SECONDS:
            self._shown_at = self._clock()
            page = board_of(where, self._arms_with_loss)
            self._block.show(render(page, self._block.room, self._color))

    def note(self, sentence: str) -> None:
        self._block.close()
        super().note(sentence)
        self._shown_at = -REDRAW_SECONDS  # the board comes back at once

    def close(self) -> None:
        self._block.close()


@dataclass
class ArmNow:
    """An arm in the current seed. `seconds` is the time of the last timed step, `alarms` are of all seeds, `ended` says
    why the arm ended early."""

    arm: Arm
    loss: float | None = None
    held_out: float | None = None
    tokens: int = 0
    seconds: float = 0.0
    alarms: int = 0
    last_alarm: str = ""
    ended: str = ""

    def begin_seed(self) -> None:
        self.loss = self.held_out = None
        if not self.ended.startswith(_OUT):  # an arm that is out stays out in later seeds
            self.ended = ""

    def take(self, line: StreamLine) -> None:
        match line:
            case StepRow():
                self.loss, self.tokens, self.seconds = line.loss, line.tokens, line.seconds or self.seconds
            case Validation(of="held-out"):
                self.held_out = line.loss
            case TrainingEvent(kind="alarm"):
                self.alarms += 1
                self.last_alarm = f"seed {line.seed}, step {line.step}"
            case TrainingEvent() if line.kind in (_OUT, _STOPPED):
                self.ended = f"{line.kind} in step {line.step}"

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.arm.native and self.seconds else None


def board_of(where: str, arms: Sequence[ArmNow]) -> Page:
    cols: list[Col[ArmNow]] = [
        Col("arm", attrgetter("arm.name")),
        Col("loss", attrgetter("loss"), number=True, show="{:.4f}".format),
        Col("held-out", attrgetter("held_out"), number=True, show="{:.4f}".format),
        Col("tokens/s", attrgetter("tokens_per_second"), number=True, show=units.count),
        Col("health", _health),
    ]
    return Page(where, "", (Part("arms", "", (table("arms", "", cols, arms),)),))


def _health(now: ArmNow) -> Field:
    if now.ended:
        return Field(now.ended, tone=Tone.BAD)
    if not now.alarms:
        return Field("no alarm", tone=Tone.GOOD)
    return Field(f"{many(now.alarms, 'alarm')}, last in {now.last_alarm}", tone=Tone.BAD)


@contextmanager
def on_terminal() -> Iterator[TrainingObserver]:
    if not is_watched(sys.stderr, os.environ):
        yield TrainingLines(complain)
        return
    with closing(TrainingBoard(sys.stderr, os.environ, complain)) as observer:
        yield observer


# The page is written at most this often, and takes at most this share of the time.
PAGE_SECONDS, _PAGE_SHARE = 10.0, 0.02
Say = Callable[[str], None]


@contextmanager
def outward(
    inner: TrainingObserver, place: Path, live: Path | None, log: Sequence[LogTarget] = (), on_alarm: str = ""
) -> Iterator[TrainingObserver]:
    """Yields an observer that also writes a page, logs, and runs a command on alarms. `place` is the store, or a
    watched loop's stream."""
    # Each sink may fail separately: the training and the others continue.
    observers: list[_Outward] = []
    if live is not None:
        observers.append(LivePage(live, place, inner.note))
    if log:
        observers.append(LiveLog(log, place, inner.note))
    if on_alarm:
        observers.append(AlarmCommand(on_alarm, inner.note))
    with ExitStack() as stack:
        for observer in observers:
            stack.callback(observer.close)
        yield _Several(inner, observers) if observers else inner


class _Outward(TrainingObserver):
    _training: Training | None = None
    _place: Path

    def begun(self, training: Training) -> None:
        self._training = training

    def _load(self) -> KeptTraining | None:
        """Returns the lines stored until now; None if the training has not begun."""
        if self._training is None:
            return None
        if self._training.is_watched:
            return loops_of([[self._place]])
        path = KIND.find(self._training.id, self._place)
        return None if path is None else load_training(path)

    def close(self) -> None:
        """The training has ended, for any reason."""


class _Several(TrainingObserver):
    def __init__(self, first: TrainingObserver, further: Sequence[TrainingObserver]) -> None:
        self._every = (first, *further)
        self.working, self.note = first.working, first.note  # type: ignore[method-assign]

    def begun(self, training: Training) -> None:
        for observer in self._every:
            observer.begun(training)

    def trained(self, number: int, step: int, lines: Lines) -> None:
        for observer in self._every:
            observer.trained(number, step, lines)


class LivePage(_Outward):
    """The report of the lines stored until now, which a browser reloads until the training ends."""

    def __init__(self, file: Path, place: Path, say: Say, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._place, self._say, self._clock = file, place, say, clock
        self._due, self._failed = -PAGE_SECONDS, ""

    def trained(self, number: int, step: int, lines: Lines) -> None:
        if self._training is None or self._clock() < self._due:
            return
        begun, request = self._clock(), self._training.request
        where = f"seed {number + 1} of {request.seeds}, step {step} of {request.steps}"
        if self._training.is_watched:  # how many steps a loop will take is unknown
            where = f"step {step}"
        written = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self._write(f"Written while it trains, in {where}, at {written}: all figures are of what was kept.")
        # A page of a long training takes seconds to write; limit it to two percent of the time.
        self._due = self._clock() + max(PAGE_SECONDS, (self._clock() - begun) / _PAGE_SHARE)

    def close(self) -> None:
        self._write("")

    def _write(self, state: str) -> None:
        try:
            stored = self._load()
            if stored is None:
                return
            # During the training the page must not call it cut off.
            page = page_of(JudgedTraining(replace(stored, finished=stored.finished or bool(state))))
            if state:
                head = Part("live", "In progress", (Text(state, Tone.DOUBT),))
                page = replace(page, parts=(head, *page.parts), refresh=round(3 * PAGE_SECONDS))
            write_whole(self._file, html.render(page), sync=False)
        except Exception as error:  # noqa: BLE001 - a broken page must not end a training of days
            reason = f"--live {self._file} was not written ({error}); the training goes on"
            if reason != self._failed:
                self._say(reason)
            self._failed = reason


class LiveLog(_Outward):
    """Logs the scalars of all arms as they arrive, and the summaries of a finished training."""

    def __init__(self, targets: Sequence[LogTarget], place: Path, say: Say) -> None:
        self._targets, self._place, self._say = targets, place, say
        self._logger: ScalarLogger | None = None

    def begun(self, training: Training) -> None:
        super().begun(training)
        self._logger = ScalarLogger(self._targets, source_of(training), self._say, "the training goes on")

    def trained(self, number: int, step: int, lines: Lines) -> None:
        if self._training is not None:
            self._log(scalars_of(self._training, lines))

    def close(self) -> None:
        if self._logger is None or self._training is None:
            return
        with contextlib.suppress(StoreError):
            stored = self._load() if not self._training.is_watched else None
            if stored is not None and stored.finished:
                self._log(summary_scalars(JudgedTraining(stored)))
        self._logger.close()
        self._logger = None

    def _log(self, scalars: Iterable[LoggedScalar]) -> None:
        if self._logger is not None:
            for scalar in scalars:
                self._logger.log(*scalar)


class AlarmCommand(_Outward):
    """Runs a command of the user's shell for each alarm, next to the training, which waits for nothing."""

    def __init__(self, command: str, say: Say) -> None:
        self._command, self._say = command, say
        self._running: list[subprocess.Popen[bytes]] = []

    def trained(self, number: int, step: int, lines: Lines) -> None:
        for line in lines:
            if isinstance(line, TrainingEvent) and line.kind == "alarm":
                self._run(line)
        for process in [process for process in self._running if process.poll() is not None]:
            self._running.remove(process)
            self._complain(process)

    def close(self) -> None:
        limit = time.monotonic() + _COMMAND_SECONDS
        for process in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, limit - time.monotonic()))
                self._complain(process)

    def _run(self, alarm: TrainingEvent) -> None:
        facts = {"ALARM": alarm.sentence, "RULE": alarm.rule, "ARM": alarm.arm, "STEP": str(alarm.step)}
        environment = {**os.environ, **{f"FP8BENCH_{name}": value for name, value in facts.items()}}
        try:
            process = subprocess.Popen(self._command, shell=True, stdin=subprocess.DEVNULL, env=environment)
        except (OSError, ValueError) as error:
            self._say(f"--on-alarm {self._command!r} was not run ({error}); the training goes on")
            return
        self._running.append(process)

    def _complain(self, process: subprocess.Popen[bytes]) -> None:
        if process.returncode:
            self._say(f"--on-alarm {self._command!r} ended with {process.returncode}; the training goes on")


# How long the end of a training waits for commands that still run.
_COMMAND_SECONDS = 10.0
