"""What a training tells the outside while it goes on: its page, written again and again; a command for alarms; a board.

All of it is done between slices, where no step is timed, and none of it costs the training: what fails is said.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from fp8bench.features.train.data import series_of
from fp8bench.features.train.kind import find_training, load_training
from fp8bench.features.train.page import page_of
from fp8bench.features.train.values import KeptTraining, StreamLine, Training, TrainingEvent, TrainingObserver
from fp8bench.features.train.verdicts.verdicts import verdicts_of
from fp8bench.features.train.view import event_words
from fp8bench.files import write_whole
from fp8bench.report.data.boards import sending, told_of
from fp8bench.report.elements import Part, Text, Tone
from fp8bench.report.page.html import render

# The page is written no more often than this, and takes no larger a share of the time.
PAGE_SECONDS, _PAGE_SHARE = 10.0, 0.02
# A command has so long, and the next one waits for it.
COMMAND_SECONDS = 30.0
_TOLD = ("alarm", "stopped", "out")
Say = Callable[[str], None]


@contextmanager
def outward(
    inner: TrainingObserver, store: Path, live: Path | None, on_alarm: str | None, wandb: str | None = None
) -> Iterator[TrainingObserver]:
    told: list[_Outward] = []
    if live is not None:
        told.append(LivePage(live, store, inner.note))
    if on_alarm is not None:
        told.append(AlarmCommand(on_alarm, inner.note))
    if wandb is not None:
        told.append(LiveBoard(wandb, inner.note))
    with ExitStack() as stack:
        for part in told:
            stack.callback(part.close)
        yield _Several(inner, told) if told else inner


class _Outward(TrainingObserver):
    _training: Training | None = None

    def begun(self, training: Training) -> None:
        self._training = training

    def close(self) -> None:
        """It has ended, however."""


class _Several(TrainingObserver):
    def __init__(self, first: TrainingObserver, others: Sequence[TrainingObserver]) -> None:
        self._every = (first, *others)
        self.working, self.note = first.working, first.note  # type: ignore[method-assign]

    def begun(self, training: Training) -> None:
        for observer in self._every:
            observer.begun(training)

    def trained(self, number: int, step: int, lines: Sequence[StreamLine]) -> None:
        for observer in self._every:
            observer.trained(number, step, lines)


class LivePage(_Outward):
    """The report of what was kept so far, which a browser reads again by itself; at the end without that."""

    def __init__(self, file: Path, store: Path, say: Say, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._store, self._say, self._clock = file, store, say, clock
        self._due, self._failed = -PAGE_SECONDS, ""

    def trained(self, number: int, step: int, lines: Sequence[StreamLine]) -> None:
        if self._training is None or self._clock() < self._due:
            return
        begun, request = self._clock(), self._training.request
        where = f"seed {number + 1} of {request.seeds}, step {step} of {request.steps}"
        written = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self._write(f"Written while it trains, in {where}, at {written}: what is said is of what was kept.")
        self._due = self._clock() + max(PAGE_SECONDS, (self._clock() - begun) / _PAGE_SHARE)

    def close(self) -> None:
        self._write("")

    def _write(self, going: str) -> None:
        path = find_training(self._training.id, self._store) if self._training is not None else None
        if path is None:
            return
        try:
            kept = load_training(path)
            page = page_of(replace(kept, finished=kept.finished or bool(going)), verdicts_of(kept.training, kept.lines))
            if going:
                head = Part("live", "As it goes", (Text(going, Tone.DOUBT),))
                page = replace(page, parts=(head, *page.parts), refresh=round(3 * PAGE_SECONDS))
            write_whole(self._file, render(page), sync=False)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a page, a training of days is worth more
            why = f"--live {self._file} was not written ({error}); the training goes on"
            if why != self._failed:
                self._say(why)
            self._failed = why


class AlarmCommand(_Outward):
    """A command of the user's for alarms, one at a time, with a sentence a line on its stdin."""

    def __init__(self, command: str, say: Say, seconds: float = COMMAND_SECONDS) -> None:
        self._command, self._say, self._seconds = command, say, seconds
        self._waiting: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._end = 0.0

    def trained(self, number: int, step: int, lines: Sequence[StreamLine]) -> None:
        if self._training is not None:
            name = f"training {self._training.id} of {self._training.request.settings.called}"
            bands = {arm.name for arm in self._training.arms if arm.is_band}
            events = [line for line in lines if isinstance(line, TrainingEvent) and line.kind in _TOLD]
            self._waiting += [f"{name}: {event_words(event)}\n" for event in events if event.arm not in bands]
        self._go_on()

    def close(self) -> None:
        while self._process is not None or self._waiting:
            self._go_on()
            if self._process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(max(0.0, self._end - time.monotonic()))

    def _go_on(self) -> None:
        if self._process is not None and self._process.poll() is None and time.monotonic() >= self._end:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._ended(f"did not end within {self._seconds:g} s")
        elif self._process is not None and (code := self._process.poll()) is not None:
            self._ended(f"ended with {code}" if code else "")
        if self._process is None and self._waiting:
            text, self._waiting = "".join(self._waiting), []
            self._start(text)

    def _start(self, text: str) -> None:
        try:
            # A file, and no pipe: whoever does not read it holds nobody up.
            with tempfile.TemporaryFile() as given:
                given.write(text.encode(errors="backslashreplace"))
                given.seek(0)
                self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
                self._process = subprocess.Popen(
                    self._command, shell=True, stdin=given, stdout=subprocess.DEVNULL, stderr=self._errors,
                    start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            self._ended(f"could not be started ({error.strerror})")
        self._end = time.monotonic() + self._seconds

    def _ended(self, why: str) -> None:
        self._process, errors, self._errors = None, self._errors, None
        first = b""
        if errors is not None:
            errors.seek(0)
            first = errors.read(300).strip().partition(b"\n")[0]
            errors.close()
        if why:
            said = f": {first.decode(errors='replace')}" if first else ""
            self._say(f"--on-alarm {shlex.quote(self._command)} {why}{said}; the training goes on")


class LiveBoard(_Outward):
    """A run of wandb with the curves of all arms as they come; runs of single arms are sent at the end."""

    def __init__(self, project: str, say: Say) -> None:
        self._project, self._say = project, say
        self._stack = ExitStack()
        self._sent: Any = None

    def begun(self, training: Training) -> None:
        super().begun(training)
        config = {**told_of(training.environment), "command": training.command, "training": training.id}
        self._try(partial(self._open, training, config))

    def trained(self, number: int, step: int, lines: Sequence[StreamLine]) -> None:
        if self._sent is not None and self._training is not None:
            curves = series_of(KeptTraining(self._training, tuple(lines), False, ""))
            for (arm, seed), curve in curves.items():
                for at, values in curve.items():
                    named = {f"{arm}/seed-{seed}/{tag}": value for tag, value in values.items()}
                    self._try(partial(self._log, {"step": at, **named}))

    def close(self) -> None:
        self._try(self._stack.close)

    def _log(self, values: dict[str, float]) -> None:
        if self._sent is not None:
            self._sent.log(values)

    def _open(self, training: Training, config: dict[str, Any]) -> None:
        self._sent = self._stack.enter_context(
            sending(project=self._project, group=f"fp8bench {training.id}", name=f"training {training.id} live",
                    job_type="live", id=f"fp8bench-{training.id}-live", resume="allow", config=config)
        )  # fmt: skip
        self._sent.define_metric("*", step_metric="step")

    def _try(self, do: Callable[[], Any]) -> None:
        try:
            do()
        except Exception as error:  # noqa: BLE001 - it is another program's network
            self._sent = None
            self._say(f"--wandb shows nothing as it goes ({type(error).__name__}: {error}); the training goes on")
