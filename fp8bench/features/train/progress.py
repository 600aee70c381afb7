"""What is seen of a training while it goes on: a board on a terminal, in a log a line at each look at held-out text."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TextIO

from fp8bench import units
from fp8bench.cli.progress import REDRAW_SECONDS, LiveBlock, is_watched, time_left
from fp8bench.cli.streams import complain
from fp8bench.features.train.values import (
    Arm,
    StepRow,
    StreamLine,
    Training,
    TrainingEvent,
    TrainingObserver,
    Validation,
)
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Field, Page, Part, Tone
from fp8bench.report.terminal.layout import render
from fp8bench.report.words.naming import many

_OUT, _STOPPED = "out", "stopped"


class _Watching(TrainingObserver):
    def __init__(self, say: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._say = say
        self._clock = clock
        self._begun = clock()
        self._done_before: float | None = None
        self._number = 0
        self._arms: dict[str, ArmNow] = {}

    def begun(self, training: Training) -> None:
        self._training, self._begun = training, self._clock()
        self._arms = {arm.name: ArmNow(arm) for arm in training.arms if not arm.skip}

    def trained(self, number: int, step: int, lines: Sequence[StreamLine]) -> None:
        if number != self._number:
            self._number = number
            for name, now in self._arms.items():
                ended = now.ended if now.ended.startswith(_OUT) else ""
                self._arms[name] = replace(now, parts=_NO_PARTS, loss=None, held_out=None, ended=ended)
        for line in lines:
            if line.arm in self._arms:
                self._arms[line.arm] = _with(self._arms[line.arm], line, self._training.request.steps)
            if isinstance(line, TrainingEvent):
                who = f", {line.arm}" if line.arm else ""
                self.note(f"seed {line.seed}, step {line.step}{who}: {line.words}")

    def note(self, sentence: str) -> None:
        self._say(sentence)

    @property
    def _shown(self) -> list[ArmNow]:
        """The arms of this seed: one that is in the first seed alone has no loss in another."""
        return [now for now in self._arms.values() if now.loss is not None]

    def _where(self, number: int, step: int) -> str:
        """'seed 2/5, step 120/300, about 40 s left'."""
        request = self._training.request
        done = (number * request.steps + step) / (request.seeds * request.steps)
        if self._done_before is None:
            self._done_before = done  # of a training that was gone on with
        left = ""
        if done < 1:
            left = time_left(self._clock() - self._begun, (done - self._done_before) / (1 - self._done_before))
        return f"seed {number + 1}/{request.seeds}, step {step}/{request.steps}{left}"


def _with(now: ArmNow, line: StreamLine, steps: int) -> ArmNow:
    match line:
        case StepRow():
            place = line.step * min(PARTS, steps) // steps
            total, count = now.parts[place]
            parts = (*now.parts[:place], (total + line.loss, count + 1), *now.parts[place + 1 :])
            return replace(now, parts=parts, loss=line.loss, tokens=line.tokens, seconds=line.seconds or now.seconds)
        case Validation(of="held-out"):
            return replace(now, held_out=line.loss)
        case TrainingEvent(kind="alarm"):
            return replace(now, alarms=now.alarms + 1, last_alarm=f"seed {line.seed}, step {line.step}")
        case TrainingEvent() if line.kind in (_OUT, _STOPPED):
            return replace(now, ended=f"{line.kind} in step {line.step}")
    return now


class TrainingLines(_Watching):
    """For logs and pipes: a line when the held-out text was looked at."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(say, clock)
        self._told: tuple[int, int] | None = None

    def trained(self, number: int, step: int, lines: Sequence[StreamLine]) -> None:
        super().trained(number, step, lines)
        where = self._where(number, step)
        losses = ", ".join(f"{now.arm.name} {now.loss:.3f}" for now in self._shown)
        if losses and self._told != (number, step) and any(isinstance(line, Validation) for line in lines):
            self._told = number, step
            self._say(f"{where}: {losses}")


class TrainingBoard(_Watching):
    """For who watches: a board that stays where it is, below the sentences that are said meanwhile."""

    def __init__(
        self, stream: TextIO, environ: Mapping[str, str], say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        super().__init__(say, clock)
        self._block = LiveBlock(stream)
        self._color = not environ.get("NO_COLOR")
        self._bars = self._block.can_show(BARS)
        self._shown_at = -REDRAW_SECONDS

    def working(self, arm: str, doing: str) -> None:
        self._block.show(f"{doing} of {arm}")

    def trained(self, number: int, step: int, lines: Sequence[StreamLine]) -> None:
        super().trained(number, step, lines)
        where = self._where(number, step)
        if self._shown and self._clock() - self._shown_at >= REDRAW_SECONDS:
            self._shown_at = self._clock()
            page = board_of(where, self._shown, self._bars)
            self._block.show(render(page, self._block.room, self._color))

    def note(self, sentence: str) -> None:
        self._block.close()
        super().note(sentence)
        self._shown_at = -REDRAW_SECONDS  # the board comes back at once

    def close(self) -> None:
        self._block.close()


# Losses are drawn in so many bars of eight heights, each the mean of its part of all steps.
PARTS = 24
_NO_PARTS = ((0.0, 0),) * PARTS
BARS, _NOT_FINITE, _NOT_YET = "▁▂▃▄▅▆▇█", "x", " "


@dataclass(frozen=True)
class ArmNow:
    """An arm in the seed that is being trained: its last loss, and the sum and number of those in each part.

    `seconds` are those of the last step that was timed, 0 before there is one. `alarms` are of all seeds, `last_alarm`
    says where the last one was, and `ended` how the arm came to an early end.
    """

    arm: Arm
    parts: tuple[tuple[float, int], ...] = _NO_PARTS
    loss: float | None = None
    held_out: float | None = None
    tokens: int = 0
    seconds: float = 0.0
    alarms: int = 0
    last_alarm: str = ""
    ended: str = ""

    @property
    def means(self) -> tuple[float | None, ...]:
        """Of the losses in each part; None where no step has been yet."""
        return tuple(total / count if count else None for total, count in self.parts)


def board_of(where: str, arms: Sequence[ArmNow], drawn: bool) -> Page:
    """Rows of arms. With `drawn` their losses are bars on one scale for all of them."""
    finite = [mean for now in arms for mean in now.means if mean is not None and math.isfinite(mean)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    cols: list[Col[ArmNow]] = [
        Col("arm", lambda now: now.arm.name),
        Col("loss", lambda now: now.loss, number=True, show=lambda loss: f"{loss:.4f}"),
        Col("held-out", lambda now: now.held_out, number=True, show=lambda loss: f"{loss:.4f}"),
        Col("tokens/s", lambda now: now.tokens / now.seconds if now.arm.native and now.seconds else None, number=True,
            show=units.count),
        Col("health", _health),
        Col("losses so far", lambda now: "".join(_bar(mean, low, high) for mean in now.means), when=drawn),
    ]  # fmt: skip
    return Page(where, "", (Part("arms", "", (table("arms", "", cols, arms),)),))


def _health(now: ArmNow) -> Field:
    if now.ended:
        return Field(now.ended, tone=Tone.BAD)
    if not now.alarms:
        return Field("no alarm", tone=Tone.GOOD)
    return Field(f"{many(now.alarms, 'alarm')}, last in {now.last_alarm}", tone=Tone.BAD)


def _bar(mean: float | None, low: float, high: float) -> str:
    if mean is None:
        return _NOT_YET
    if not math.isfinite(mean):
        return _NOT_FINITE
    return BARS[round((len(BARS) - 1) * (mean - low) / (high - low))] if high > low else BARS[0]


@contextmanager
def on_terminal() -> Iterator[TrainingObserver]:
    if not is_watched(sys.stderr, os.environ):
        yield TrainingLines(complain)
        return
    with closing(TrainingBoard(sys.stderr, os.environ, complain)) as observer:
        yield observer
