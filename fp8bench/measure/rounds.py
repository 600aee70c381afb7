"""The referee: rounds over the arms of a group, until the question is answered.

A round runs every arm's slot once, in an order that is random and balanced. The reference is entered twice, with
tensors of its own, so that every group carries its A/A control. An arm leaves when its question is answered; emulated
arms get a few fixed rounds, since their time is no speed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from fp8bench.measure.arm import ArmFailed, MeasuredArm, Quantisers, Tell, guarding
from fp8bench.measure.handle import Worker
from fp8bench.model import Fresh, Timing
from fp8bench.model.stopping import EMULATED_ROUNDS, LEAST_CANDIDATES, StoppingRule

T = TypeVar("T")


class Orders(Generic[T]):
    """The orders of rounds, by blocks: of so many rounds as there are arms, each arm is in every place once.

    A block ends where other arms take turns than before: those who stay begin a block of their own, so that what one
    that leaves had left over puts nobody more than one round out of balance.
    """

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._arms: list[T] = []
        self._left: list[list[int]] = []

    def next(self, arms: Sequence[T]) -> list[T]:
        if not arms:  # all have failed, or none has a phase of its own
            return []
        if not self._left or self._arms != list(arms):
            self._arms = list(arms)
            self._left = self._block(len(arms))
        return [arms[place] for place in self._left.pop()]

    def _block(self, count: int) -> list[list[int]]:
        """Williams' square with names dealt out at random, its rows in random order.

        Each row is a zigzag (0, 1, -1, 2, -2, ...) from another start. Its steps are all different, so that with an
        even number of arms each follows each other one exactly once. With an odd number no square does that, and the
        mirrored rows, as a second block, make it twice each.
        """
        names = list(range(count))
        self._draw.shuffle(names)
        zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
        rows = [[names[(start + step) % count] for step in zigzag] for start in range(count)]
        mirrored = [row[::-1] for row in rows] if count % 2 else []
        for block in (rows, mirrored):
            self._draw.shuffle(block)
        return [*mirrored, *rows]


# Refilling a cache of some megabytes takes a fraction of a millisecond: of longer steps it is below the band.
WARMED_BELOW_SECONDS = 100e-3

# Says whether a candidate's question is answered by what it, the reference and the control have given so far.
Judge = Callable[[Timing, Timing, Timing | None], bool]
# Which of these timings is fastest beside the reference's and its control's; None where none is faster.
Choose = Callable[[Sequence[Timing], Timing, Timing | None], int | None]


@dataclass
class RoundSession:
    """Arms that are in memory together and take turns.

    `reference` and `control` are None where memory did not admit them; candidates are judged against the reference.
    """

    reference: MeasuredArm | None
    control: MeasuredArm | None
    candidates: list[MeasuredArm]

    @property
    def arms(self) -> list[MeasuredArm]:
        return [arm for arm in (self.reference, self.control, *self.candidates) if arm is not None]

    def prepare(self, worker: Worker, quantisers: Quantisers | None = None, tell: Tell | None = None) -> None:
        """Prepare all arms, then have them agree on what must be the same for a fair comparison."""
        for arm in self.arms:
            with guarding(arm):
                arm.prepare(worker, quantisers, tell)
        for arm in self.arms:
            with guarding(arm):
                arm.prepare_more(worker)
        lead = self.arms[0]
        for arm in self.arms[1:]:
            arm.cut_like(lead)
        # One arm's first call after its neighbour is cold and another's warm second call is not comparable: where any
        # arm repeats within a slot, all those drop a call for which a cold cache counts.
        if any(arm.calls > 1 for arm in self.arms if not arm.emulated):
            for arm in self.arms:
                if arm.step_seconds < WARMED_BELOW_SECONDS:
                    arm.discard = 1

    def check(self, worker: Worker) -> None:
        for arm in self.arms:
            with guarding(arm):
                arm.check(worker)

    def release(self, worker: Worker) -> ArmFailed | None:
        """Give all states back; the first arm that leaves threads running has failed."""
        culprits = [failed for arm in self.arms if (failed := arm.release(worker))]
        return culprits[0] if culprits else None

    def run(
        self,
        worker: Worker,
        rule: StoppingRule,
        judge: Judge,
        seed: int,
        tick: Callable[[MeasuredArm, float], None],
        clock: Callable[[], float] = time.monotonic,
        after: Callable[[MeasuredArm], None] | None = None,
    ) -> str:
        """Rounds until every candidate is decided or the rule says stop; returns why it ended.

        `after` is told of each slot when it is over, by its arm.
        """
        orders: Orders[MeasuredArm] = Orders(random.Random(seed))
        start = clock()
        rounds = 0
        undecided = self._questions()
        while True:
            turn = self._turn(rounds, undecided, rule)
            if not turn:
                return f"answered after {rounds} rounds"
            for place, arm in enumerate(orders.next(turn)):
                tick(arm, self._share(rounds, clock() - start, rule))
                with guarding(arm):
                    arm.run(worker, rounds, place)
                if after is not None:
                    after(arm)
            rounds += 1
            if rule.looks(rounds):
                undecided = [arm for arm in undecided if not self._decided(arm, judge)]
            why = rule.ended(rounds, clock() - start)
            if why:
                return why

    def fastest_again(
        self,
        choose: Choose,
        worker: Worker,
        rule: StoppingRule,
        seed: int,
        tick: Callable[[MeasuredArm, float], None],
        after: Callable[[MeasuredArm], None] | None,
    ) -> tuple[MeasuredArm, Fresh] | None:
        """The arm that was chosen, with as many rounds of it, the reference and its control as it had before.

        A figure that was chosen for being the best is too good: of equal candidates the one that noise favoured is
        chosen, and its own samples say so. Rounds after the choice do not know of it.
        """
        candidates = [arm for arm in self.candidates if not arm.emulated]
        lead, control = self.reference, self.control
        if lead is None or lead.emulated or len(candidates) < LEAST_CANDIDATES:
            return None
        chosen = choose(
            [arm.timing() for arm in candidates], lead.timing(), control.timing() if control is not None else None
        )
        if chosen is None:
            return None
        winner = candidates[chosen]
        lead, again = replace(lead, slots=[]), replace(winner, slots=[])
        control = replace(control, slots=[]) if control is not None else None
        fixed = StoppingRule(fixed=len(winner.slots), ceiling=rule.ceiling)
        RoundSession(lead, control, [again]).run(worker, fixed, lambda *timings: False, seed, tick, after=after)
        beside = control.timing() if control is not None else None
        return winner, Fresh(again.timing(), lead.timing(), beside, len(candidates))

    def _questions(self) -> list[MeasuredArm]:
        """The arms whose comparison with the reference is open: native candidates, else the control.

        None without a reference, or with an emulated one: its time is no speed.
        """
        if self.reference is None or self.reference.emulated:
            return []
        native = [arm for arm in self.candidates if not arm.emulated]
        return native or [arm for arm in (self.control,) if arm is not None]

    def _turn(self, rounds: int, undecided: Sequence[MeasuredArm], rule: StoppingRule) -> list[MeasuredArm]:
        """The arms of the next round; empty when there is nothing left to ask."""
        emulated = [arm for arm in self.arms if arm.emulated and rounds < EMULATED_ROUNDS]
        timed = [arm for arm in self.arms if not arm.emulated]
        if rule.fixed is not None:
            return timed + emulated
        if undecided:
            return [arm for arm in timed if arm in (self.reference, self.control) or arm in undecided] + emulated
        # Without a question (alone in memory, or beside an emulated reference) a native arm gets a fixed number.
        alone = not self._questions() and rounds < 2 * rule.least
        return (timed if alone else []) + emulated

    def _decided(self, arm: MeasuredArm, judge: Judge) -> bool:
        if self.reference is None:
            return False
        control = self.control.timing() if self.control is not None and arm is not self.control else None
        return judge(arm.timing(), self.reference.timing(), control)

    @staticmethod
    def _share(rounds: int, seconds: float, rule: StoppingRule) -> float:
        if rule.fixed is not None:
            return rounds / rule.fixed
        return min(1.0, seconds / rule.budget) if rule.budget > 0 else 1.0
