"""One case on both sides: every entry is in memory at once, in a process of its own, and they take turns.

Each side enters twice where memory admits it. What its two processes differ by is what processes differ by, and no
difference between the sides.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from fp8bench.errors import WorkerError, WorkerFault
from fp8bench.measure.handle import Worker
from fp8bench.measure.quantisers import Quantisers
from fp8bench.measure.rounds import WARMED_BELOW_SECONDS, Arm
from fp8bench.measure.stopping import StoppingRule
from fp8bench.model import Timing


class Judge(Protocol):
    """Says whether the question is answered by what there is so far."""

    def __call__(self, before: Sequence[Timing], after: Sequence[Timing]) -> bool: ...


@dataclass
class Entry:
    """An arm and the worker it lives in, which holds no other arm."""

    side: str
    worker: Worker
    arm: Arm
    quantisers: Quantisers


class EntryFailed(Exception):
    """An entry could not be prepared or run; `cause` is its worker's error."""

    def __init__(self, entry: Entry, cause: WorkerError) -> None:
        super().__init__(str(cause))
        self.entry = entry
        self.cause = cause


# Told what is being done, and the share of the time that has gone.
Tell = Callable[[str, float], None]


@dataclass
class Ring:
    """The entries of both sides, the first of each being the one whose record it is."""

    before: list[Entry]
    after: list[Entry]

    @property
    def entries(self) -> list[Entry]:
        return [*self.before, *self.after]

    def prepare(self, tell: Tell) -> None:
        """Prepare all arms, then have them agree on what must be the same for a fair comparison."""
        for entry in self.entries:
            tell(f"preparing side {entry.side} of", 0.0)
            with guarding(entry):
                entry.arm.prepare(entry.worker, entry.quantisers, lambda arm, doing: tell(doing, 0.0))
        arms = [entry.arm for entry in self.entries]
        for arm in arms[1:]:
            arm.cut_like(arms[0])
        for arm in arms:
            # A minimum over more calls is lower for that alone.
            arm.calls = min(one.calls for one in arms)
            # Another process has run before each slot, so that caches are cold and the processor may be another.
            arm.discard = 1 if arm.step_seconds < WARMED_BELOW_SECONDS else 0

    def run(self, rule: StoppingRule, judge: Judge, seed: int, tell: Tell) -> str:
        """Rounds in random order until the question is answered or the rule says stop; returns why it ended."""
        order, start, rounds = random.Random(seed), time.monotonic(), 0
        turn = self.entries
        while True:
            order.shuffle(turn)
            for entry in turn:
                tell("measuring", _share(rounds, time.monotonic() - start, rule))
                with guarding(entry):
                    entry.arm.run(entry.worker, rounds)
            rounds += 1
            if rule.looks(rounds) and judge(timings(self.before), timings(self.after)):
                return f"answered after {rounds} rounds"
            why = rule.ended(rounds, time.monotonic() - start)
            if why:
                return why

    def check(self) -> None:
        """Raise if the steps have spoilt a state."""
        for entry in self.entries:
            with guarding(entry):
                entry.arm.check(entry.worker)

    def release(self) -> EntryFailed | None:
        """Give all states back; returns the first entry that leaves threads running."""
        culprit = None
        for entry in self.entries:
            try:
                left = entry.worker.release(entry.arm.key)
            except WorkerError:
                entry.worker.restart()
                continue
            if left:
                names = ", ".join(left[:5])
                why = f"{len(left)} started while preparing still run after the state was given back ({names})"
                culprit = culprit or EntryFailed(entry, WorkerFault("ThreadsLeft", why))
        return culprit


def timings(entries: Sequence[Entry]) -> list[Timing]:
    """What the entries of a side have given so far."""
    return [entry.arm.timing() for entry in entries]


@contextmanager
def guarding(entry: Entry) -> Iterator[None]:
    """A worker's error, with the entry it struck."""
    try:
        yield
    except WorkerError as error:
        raise EntryFailed(entry, error) from error


def _share(rounds: int, seconds: float, rule: StoppingRule) -> float:
    if rule.fixed is not None:
        return rounds / rule.fixed
    return min(1.0, seconds / rule.budget) if rule.budget > 0 else 1.0
