"""One case on both sides: every entry is in memory at once, in a process of its own, and they take turns."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from fp8bench.errors import WorkerError
from fp8bench.measure.arm import Arm, ArmFailed, guarding
from fp8bench.measure.handle import Worker
from fp8bench.measure.orders import Orders
from fp8bench.measure.quantisers import Quantisers
from fp8bench.measure.rounds import WARMED_BELOW_SECONDS
from fp8bench.model.duel import Session
from fp8bench.model.stopping import StoppingRule


@dataclass
class Entry:
    """An arm and the worker it lives in, which holds no other arm."""

    side: str
    worker: Worker
    arm: Arm
    quantisers: Quantisers


# Told what is being done.
Tell = Callable[[str], None]


@dataclass
class Turns:
    """The entries of both sides, as many of each. Their order is drawn from the seed, so that no side is the first."""

    before: list[Entry]
    after: list[Entry]
    seed: int

    @property
    def entries(self) -> list[Entry]:
        return [*self.before, *self.after]

    def measure(self, rule: StoppingRule, tell: Tell) -> Session:
        """Prepare all, run rounds, check what the steps have left; what was measured."""
        order, begun = random.Random(self.seed), time.monotonic()
        self._prepare(order, tell)
        tell("measuring")
        stopped = self._run(Orders(order), rule, begun if rule.whole else time.monotonic())
        for entry in self.entries:
            with guarding(entry.arm):
                entry.arm.check(entry.worker)
        before, after = (tuple(entry.arm.timing() for entry in side) for side in (self.before, self.after))
        return Session(before, after, stopped)

    def entry_of(self, arm: Arm) -> Entry:
        return next(entry for entry in self.entries if entry.arm is arm)

    def release(self) -> ArmFailed | None:
        """Give all states back; the first arm that leaves threads running has failed."""
        culprit = None
        for entry in self.entries:
            try:
                failed = entry.arm.release(entry.worker)
            except WorkerError:
                entry.worker.restart()
                continue
            culprit = culprit or failed
        return culprit

    def _prepare(self, order: random.Random, tell: Tell) -> None:
        """Prepare all arms, then have them agree on what must be the same for a fair comparison."""
        turn = self.entries
        order.shuffle(turn)
        for entry in turn:
            tell(f"preparing side {entry.side} of")
            with guarding(entry.arm):
                entry.arm.prepare(entry.worker, entry.quantisers, lambda arm, doing: tell(doing))
        arms = [entry.arm for entry in self.entries]
        for arm in arms[1:]:
            arm.cut_like(arms[0])
        for arm in arms:
            # A minimum over more calls is lower for that alone.
            arm.calls = min(one.calls for one in arms)
            # Another process has run before each slot, so that caches are cold and the processor may be another.
            arm.discard = 1 if arm.step_seconds < WARMED_BELOW_SECONDS else 0

    def _run(self, orders: Orders[Entry], rule: StoppingRule, start: float) -> str:
        """Rounds in random, balanced orders until the rule says stop; returns why it did."""
        rounds, why = 0, ""
        while not why:
            for place, entry in enumerate(orders.next(self.entries)):
                with guarding(entry.arm):
                    entry.arm.run(entry.worker, rounds, place)
            rounds += 1
            why = rule.ended(rounds, time.monotonic() - start)
        return why
