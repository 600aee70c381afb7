"""Shows the progress of a training: a board on a terminal, lines in a log, a page that is rewritten regularly, and
scalars for TensorBoard or wandb. All of this happens between the turns of arms, while no step is timed. If an output
fails, the failure is reported and the training continues.
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
from pathlib import Path
from typing import TextIO

from fp8bench import units
from fp8bench.cli.progress import REDRAW_SECONDS, LiveBlock, describe_time_left, is_watched
from fp8bench.cli.streams import write_sentence_to_stderr
from fp8bench.errors import StoreError
from fp8bench.features.train.data import list_scalars, list_summary_scalars, make_log_source
from fp8bench.features.train.kind import KIND, load_training
from fp8bench.features.train.page import render_page
from fp8bench.features.train.streams import load_recorded_loops
from fp8bench.features.train.values import (
    Arm,
    Lines,
    StepRow,
    StoredTraining,
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
from fp8bench.report.elements import Page, Part, Text, Tone
from fp8bench.report.page import html
from fp8bench.report.terminal.layout import render
from fp8bench.report.words.naming import many

# Events with which an arm ends early: it was excluded, or it stopped at NaN or infinity.
_ARM_EXCLUDED_EVENT = "out"
_ARM_STOPPED_EVENT = "stopped"
# A log gets a line at least this often.
_MAX_SILENT_SECONDS = 25.0


class _ProgressObserver(TrainingObserver):
    def __init__(self, print_line: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._print_line = print_line
        self._clock = clock
        self._start = clock()
        self._done_at_start: float | None = None
        self._number = self._common_steps = 0
        self._arms: dict[str, ArmProgress] = {}

    def begun(self, training: Training) -> None:
        self._training, self._start, self._done_at_start = training, self._clock(), None
        self._arms = {arm.name: ArmProgress(arm) for arm in training.arms if not arm.skip}

    def trained(self, number: int, step: int, lines: Lines) -> None:
        if number != self._number:
            self._number = number
            self._common_steps = 0
            for arm_progress in self._arms.values():
                arm_progress.reset_for_new_seed()
        for line in lines:
            if line.arm in self._arms:
                self._arms[line.arm].read_line(line)
            if isinstance(line, TrainingEvent):
                self.note(line.describe())
        self._align_losses()

    def note(self, sentence: str) -> None:
        self._print_line(sentence)

    def _align_losses(self) -> None:
        """Shows the newest losses once all running arms have done the same step. Arms train in turns, so they are often
        in different steps.
        """
        running_arms = [
            arm_progress for arm_progress in self._arms.values() if arm_progress.steps and not arm_progress.ended
        ]
        if len({arm_progress.steps for arm_progress in running_arms}) == 1:
            self._common_steps = running_arms[0].steps
            for arm_progress in running_arms:
                arm_progress.loss = arm_progress.newest_loss

    @property
    def _arms_with_loss(self) -> list[ArmProgress]:
        """Returns the arms that already have a loss in this seed. An arm that is only trained in the first seed has no
        loss in later ones.
        """
        return [arm_progress for arm_progress in self._arms.values() if arm_progress.loss is not None]

    def _describe_position(self, number: int, step: int) -> str:
        """Returns a text such as 'seed 2/5, step 120/300, about 40 s left'."""
        request = self._training.request
        done_training_share = (number + step / request.steps) / request.seeds
        if self._done_at_start is None:
            # Start the clock only now, so that the estimate does not include the start of the worker.
            self._done_at_start, self._start = done_training_share, self._clock()
        time_left_words = ""
        if done_training_share < 1:
            time_share = (done_training_share - self._done_at_start) / (1 - self._done_at_start)
            time_left_words = describe_time_left(self._clock() - self._start, time_share)
        return f"seed {number + 1}/{request.seeds}, step {step}/{request.steps}{time_left_words}"


class TrainingLines(_ProgressObserver):
    """Shows progress in logs and pipes: prints a line once all arms have done a step with a validation."""

    def __init__(self, print_line: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(print_line, clock)
        self._last_printed: tuple[int, int] | None = None
        self._printed_at = self._start
        self._has_validated = False

    def trained(self, number: int, step: int, lines: Lines) -> None:
        super().trained(number, step, lines)
        position = self._describe_position(number, step)
        # Print a line after a validation, or if no line was printed for a long time.
        losses = ", ".join(
            f"{arm_progress.arm.name} {arm_progress.loss:.3f}"
            for arm_progress in self._arms_with_loss
            if not arm_progress.ended
        )
        self._has_validated |= any(isinstance(line, Validation) and line.step for line in lines)
        is_line_due = self._has_validated or self._clock() - self._printed_at >= _MAX_SILENT_SECONDS
        is_new_common_step = step == self._common_steps and self._last_printed != (number, step)
        if losses and is_new_common_step and is_line_due:
            self._last_printed, self._printed_at, self._has_validated = (number, step), self._clock(), False
            self._print_line(f"{position}: {losses}")


class TrainingBoard(_ProgressObserver):
    """Shows progress on a terminal. Messages appear above a board, which is updated in place."""

    def __init__(
        self,
        stream: TextIO,
        environ: Mapping[str, str],
        print_line: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(print_line, clock)
        self._block = LiveBlock(stream)
        self._color = not environ.get("NO_COLOR")
        self._shown_at = -REDRAW_SECONDS

    def working(self, arm: str, doing: str) -> None:
        self._block.show(f"{doing} of {arm}")

    def trained(self, number: int, step: int, lines: Lines) -> None:
        super().trained(number, step, lines)
        position = self._describe_position(number, self._common_steps or step)
        # A terminal that is redrawn after each turn would flicker.
        if self._arms_with_loss and self._clock() - self._shown_at >= REDRAW_SECONDS:
            self._shown_at = self._clock()
            page = render_arm_progress(position, self._arms_with_loss)
            self._block.show(render(page, self._block.num_columns, self._color))

    def note(self, sentence: str) -> None:
        self._block.close()
        super().note(sentence)
        self._shown_at = -REDRAW_SECONDS  # makes the next turn redraw the board

    def close(self) -> None:
        self._block.close()


@dataclass
class ArmProgress:
    """The progress of an arm in the current seed. `seconds` is the time of its last timed step, `alarms` the number of
    its alarms in all seeds, and `ended` the reason why it ended early. `newest_loss` is the loss of its last step.
    `loss` is its loss in the last step that all running arms have done.
    """

    arm: Arm
    loss: float | None = None
    held_out: float | None = None
    tokens: int = 0
    seconds: float = 0.0
    alarms: int = 0
    last_alarm_position: str = ""
    ended: str = ""
    steps: int = 0
    newest_loss: float | None = None

    def reset_for_new_seed(self) -> None:
        self.loss = None
        self.held_out = None
        self.steps = 0
        if not self.ended.startswith(_ARM_EXCLUDED_EVENT):  # an excluded arm stays excluded in later seeds
            self.ended = ""

    def read_line(self, line: StreamLine) -> None:
        match line:
            case StepRow():
                self.steps = line.step + 1
                self.newest_loss = line.loss
                self.tokens = line.tokens
                self.seconds = line.seconds or self.seconds
            case Validation(of="held-out"):
                self.held_out = line.loss
            case TrainingEvent(kind="alarm"):
                self.alarms += 1
                self.last_alarm_position = f"seed {line.seed}, step {line.step}"
            case TrainingEvent() if line.kind in (_ARM_EXCLUDED_EVENT, _ARM_STOPPED_EVENT):
                self.ended = f"{line.kind} in step {line.step}"

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.arm.native and self.seconds else None

    @property
    def health(self) -> str:
        """Returns the reason why the arm ended early, or otherwise a text on its alarms."""
        if self.ended or not self.alarms:
            return self.ended or "no alarm"
        return f"{many(self.alarms, 'alarm')}, last in {self.last_alarm_position}"


def render_arm_progress(position: str, arms: Sequence[ArmProgress]) -> Page:
    columns: list[Col[ArmProgress]] = [
        Col("arm", "arm.name"),
        Col("loss", "loss", show="{:.4f}".format),
        Col("held-out", "held_out", show="{:.4f}".format),
        Col("tokens/s", "tokens_per_second", show=units.count),
        Col("health", "health", tone=lambda arm: Tone.BAD if arm.ended or arm.alarms else Tone.GOOD),
    ]
    return Page(position, "", (Part("arms", "", (table("arms", "", columns, arms),)),))


@contextmanager
def observe_on_terminal() -> Iterator[TrainingObserver]:
    if not is_watched(sys.stderr, os.environ):
        yield TrainingLines(write_sentence_to_stderr)
        return
    with closing(TrainingBoard(sys.stderr, os.environ, write_sentence_to_stderr)) as observer:
        yield observer


# The page is written at most every 10 seconds, and writing it takes at most 2% of the time.
PAGE_INTERVAL_SECONDS = 10.0
_PAGE_WRITING_TIME_SHARE = 0.02
PrintLine = Callable[[str], None]


@contextmanager
def add_training_outputs(
    inner: TrainingObserver,
    store_or_stream: Path,
    live: Path | None,
    log: Sequence[LogTarget] = (),
    on_alarm: str = "",
) -> Iterator[TrainingObserver]:
    """Yields an observer that passes all progress on to `inner`. It also writes a page to `live`, logs scalars to the
    targets in `log`, and runs the command `on_alarm` for each alarm. `store_or_stream` is the store of the training, or
    the stream of a recorded loop.
    """
    # A failure of one output does not affect the training or the other outputs.
    output_observers: list[_OutputObserver] = []
    if live is not None:
        output_observers.append(LiveTrainingPage(live, store_or_stream, inner.note))
    if log:
        output_observers.append(LiveLog(log, store_or_stream, inner.note))
    if on_alarm:
        output_observers.append(AlarmCommand(on_alarm, store_or_stream, inner.note))
    with ExitStack() as stack:
        for observer in output_observers:
            stack.callback(observer.close)
        yield _ForwardingObserver(inner, output_observers) if output_observers else inner


class _OutputObserver(TrainingObserver):
    """Base class of outputs that are written during a training. `store_or_stream` is the store, or the stream of a
    recorded loop.
    """

    _training: Training | None = None

    def __init__(self, store_or_stream: Path, print_line: PrintLine) -> None:
        self._store_or_stream = store_or_stream
        self._print_line = print_line

    def begun(self, training: Training) -> None:
        self._training = training

    def _load_training(self) -> StoredTraining | None:
        """Returns the training with all lines that are stored by now; None if the training has not begun."""
        if self._training is None:
            return None
        if self._training.is_watched:
            return load_recorded_loops([[self._store_or_stream]])
        path = KIND.find(self._training.id, self._store_or_stream)
        return None if path is None else load_training(path)

    def close(self) -> None:
        """Finishes the output. Called once the training has ended, whether it succeeded or failed."""


class _ForwardingObserver(TrainingObserver):
    def __init__(self, first: TrainingObserver, further: Sequence[TrainingObserver]) -> None:
        self._observers = (first, *further)

    def working(self, arm: str, doing: str) -> None:
        self._observers[0].working(arm, doing)

    def note(self, sentence: str) -> None:
        self._observers[0].note(sentence)

    def begun(self, training: Training) -> None:
        for observer in self._observers:
            observer.begun(training)

    def trained(self, number: int, step: int, lines: Lines) -> None:
        for observer in self._observers:
            observer.trained(number, step, lines)


class LiveTrainingPage(_OutputObserver):
    """Writes an HTML report of the lines stored so far. A browser that shows the file reloads it until the training
    ends.
    """

    def __init__(
        self, file: Path, store_or_stream: Path, print_line: PrintLine, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(store_or_stream, print_line)
        self._file = file
        self._clock = clock
        self._next_write = -PAGE_INTERVAL_SECONDS
        self._last_failure = ""

    def trained(self, number: int, step: int, lines: Lines) -> None:
        if self._training is None or self._clock() < self._next_write:
            return
        start = self._clock()
        request = self._training.request
        position = f"seed {number + 1} of {request.seeds}, step {step} of {request.steps}"
        if self._training.is_watched:  # the number of steps of a loop is unknown
            position = f"step {step}"
        write_time = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self._write_page(
            f"Written during the training, in {position}, at {write_time}: figures cover what was stored until then."
        )
        # A page of a long training takes seconds to write, so it is written less often.
        self._next_write = self._clock() + max(
            PAGE_INTERVAL_SECONDS, (self._clock() - start) / _PAGE_WRITING_TIME_SHARE
        )

    def close(self) -> None:
        self._write_page("")

    def _write_page(self, state: str) -> None:
        try:
            stored_training = self._load_training()
            if stored_training is None:
                return
            # While the training runs, the page must not call it cut off.
            page = render_page(
                JudgedTraining(replace(stored_training, finished=stored_training.finished or bool(state)))
            )
            if state:
                progress_part = Part("live", "In progress", (Text(state, Tone.DOUBT),))
                page = replace(page, parts=(progress_part, *page.parts), refresh=round(3 * PAGE_INTERVAL_SECONDS))
            write_whole(self._file, html.render(page), sync=False)
        except Exception as error:  # noqa: BLE001 - a broken page must not end a training of days
            reason = f"--live {self._file} was not written ({error}); the training goes on"
            # Print a failure once, and not at every attempt.
            if reason != self._last_failure:
                self._print_line(reason)
            self._last_failure = reason


class LiveLog(_OutputObserver):
    """Logs the scalars of all arms as they arrive, and the summaries once the training is finished."""

    def __init__(self, targets: Sequence[LogTarget], store_or_stream: Path, print_line: PrintLine) -> None:
        super().__init__(store_or_stream, print_line)
        self._targets = targets
        self._logger: ScalarLogger | None = None

    def begun(self, training: Training) -> None:
        super().begun(training)
        self._logger = ScalarLogger(self._targets, make_log_source(training), self._print_line, "the training goes on")

    def trained(self, number: int, step: int, lines: Lines) -> None:
        if self._training is not None:
            self._log_scalars(list_scalars(self._training, lines))

    def close(self) -> None:
        if self._training is None or self._logger is None:
            return
        with contextlib.suppress(StoreError):
            stored_training = None if self._training.is_watched else self._load_training()
            if stored_training is not None and stored_training.finished:
                self._log_scalars(list_summary_scalars(JudgedTraining(stored_training)))
        self._logger.close()
        self._logger = None

    def _log_scalars(self, scalars: Iterable[LoggedScalar]) -> None:
        if self._logger is not None:
            for scalar in scalars:
                self._logger.log(*scalar)


class AlarmCommand(_OutputObserver):
    """Runs a command of the user's shell for each alarm, in parallel with the training."""

    def __init__(self, command: str, store_or_stream: Path, print_line: PrintLine) -> None:
        super().__init__(store_or_stream, print_line)
        self._command = command
        self._processes: list[subprocess.Popen[bytes]] = []

    def trained(self, number: int, step: int, lines: Lines) -> None:
        for line in lines:
            if isinstance(line, TrainingEvent) and line.kind == "alarm":
                self._run_command(line)
        for process in [process for process in self._processes if process.poll() is not None]:
            self._processes.remove(process)
            self._report_exit_code(process)

    def close(self) -> None:
        command_deadline = time.monotonic() + _COMMAND_WAIT_SECONDS
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, command_deadline - time.monotonic()))
                self._report_exit_code(process)

    def _run_command(self, alarm: TrainingEvent) -> None:
        is_watched = self._training is not None and self._training.is_watched
        facts = {"ALARM": alarm.describe(is_watched), "RULE": alarm.rule, "ARM": alarm.arm, "STEP": str(alarm.step)}
        environment = {**os.environ, **{f"FP8BENCH_{name}": value for name, value in facts.items()}}
        try:
            process = subprocess.Popen(self._command, shell=True, stdin=subprocess.DEVNULL, env=environment)
        except (OSError, ValueError) as error:
            self._print_line(f"--on-alarm {self._command!r} was not run ({error}); the training goes on")
            return
        self._processes.append(process)

    def _report_exit_code(self, process: subprocess.Popen[bytes]) -> None:
        if process.returncode:
            self._print_line(f"--on-alarm {self._command!r} ended with {process.returncode}; the training goes on")


# At the end of a training, commands that still run are given this many seconds to finish.
_COMMAND_WAIT_SECONDS = 10.0
