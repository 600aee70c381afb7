"""Rounds over the arms of a group, until the question is answered; and replays of their steps.

A round runs every arm's slot once, in an order that is random and balanced. The reference is entered twice, with
separate tensors, so that every group carries its A/A control. An arm leaves when its question is answered; emulated
arms get a few fixed rounds, since their time is not a speed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from fp8bench.errors import WorkerError
from fp8bench.measure.arm import ArmFailed, MeasuredArm, Quantisers, Tell, guarding
from fp8bench.measure.handle import Worker
from fp8bench.measure.slots import by_phase_totals, filling_of
from fp8bench.model import CELL_PHASES, UNATTRIBUTED, Fresh, Replays, Segments, SlotSample, Timing
from fp8bench.model.stopping import EMULATED_ROUNDS, LEAST_CANDIDATES, StoppingRule
from fp8bench.protocols.axes import ROTATING
from fp8bench.registry import workloads

T = TypeVar("T")


class Orders(Generic[T]):
    """Orders of rounds, in blocks of as many rounds as there are arms: within a block each arm is in every place once.

    When the set of arms changes, the rest of a block is dropped and a new one begins. So a leaving arm puts nobody more
    than one round out of balance.
    """

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._arms: list[T] = []
        self._left: list[list[int]] = []

    def next(self, arms: Sequence[T]) -> list[T]:
        if not arms:  # all have failed, or no phase could be held
            return []
        if not self._left or self._arms != list(arms):
            self._arms = list(arms)
            self._left = self._block(len(arms))
        return [arms[place] for place in self._left.pop()]

    def _block(self, count: int) -> list[list[int]]:
        """Williams' square with names dealt out at random, its rows in random order.

        Each row is a zigzag (0, 1, -1, 2, -2, ...) from another start. Its steps are all different, so with an even
        number of arms each follows each other one exactly once. With an odd number no square does that, and the
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


# Refilling a cache of some megabytes takes a fraction of a millisecond: in longer steps that does not show.
WARMED_BELOW_SECONDS = 100e-3

# Whether the timings of a candidate, the reference and the control answer the candidate's question.
Judge = Callable[[Timing, Timing, Timing | None], bool]
# Index of the candidate that is fastest relative to the reference and its control; None where none is faster.
Choose = Callable[[Sequence[Timing], Timing, Timing | None], int | None]


@dataclass
class RoundSession:
    """Arms that are in memory together and take turns.

    `reference` and `control` are None where memory did not admit them.
    """

    reference: MeasuredArm | None
    control: MeasuredArm | None
    candidates: list[MeasuredArm]

    @property
    def arms(self) -> list[MeasuredArm]:
        return [arm for arm in (self.reference, self.control, *self.candidates) if arm is not None]

    def prepare(self, worker: Worker, quantisers: Quantisers | None = None, tell: Tell | None = None) -> None:
        """Prepares all arms, then makes them agree on what must be the same for a fair comparison."""
        for arm in self.arms:
            with guarding(arm):
                arm.prepare(worker, quantisers, tell)
        for arm in self.arms:
            with guarding(arm):
                arm.prepare_more(worker)
        leader = self.arms[0]
        for arm in self.arms[1:]:
            arm.cut_like(leader)
        # One arm's first call after its neighbour is cold and another's warm second call is not comparable: where any
        # arm repeats within a slot, all those drop a call for which a cold cache counts.
        if any(arm.calls > 1 for arm in self.arms if not arm.is_emulated):
            for arm in self.arms:
                if arm.step_seconds < WARMED_BELOW_SECONDS:
                    arm.discard = 1

    def check(self, worker: Worker) -> None:
        for arm in self.arms:
            with guarding(arm):
                arm.check(worker)

    def release(self, worker: Worker) -> ArmFailed | None:
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
        """Runs rounds until every candidate is decided or the rule ends them; returns why it ended.

        `after` is called with the arm after each slot.
        """
        orders: Orders[MeasuredArm] = Orders(random.Random(seed))
        start = clock()
        rounds, emulating = 0, 0.0
        undecided = self._questions()
        # A round times every open arm once, so that drift hits all of them alike.
        while True:
            turn = self._arms_in_round(rounds, undecided, rule)
            if not turn:
                return f"answered after {rounds} rounds"
            for place, arm in enumerate(orders.next(turn)):
                tick(arm, self._share(rounds, clock() - start - emulating, rule))
                with guarding(arm):
                    arm.run(worker, rounds, place)
                # Emulated steps are slow and answer nothing about time; the rule discounts them.
                if arm.is_emulated:
                    emulating += arm.slots[-1].wall_seconds
                if after is not None:
                    after(arm)
            rounds += 1
            # Looking after every round would find a difference by chance sooner or later; the rule spaces the looks.
            if rule.looks(rounds):
                undecided = [arm for arm in undecided if not self._is_decided(arm, judge)]
            reason = rule.reason_to_end(rounds, clock() - start, emulating)
            if reason:
                return reason

    def fastest_again(
        self,
        choose: Choose,
        worker: Worker,
        rule: StoppingRule,
        seed: int,
        tick: Callable[[MeasuredArm, float], None],
        after: Callable[[MeasuredArm], None] | None,
    ) -> tuple[MeasuredArm, Fresh] | None:
        """Times the chosen arm again, with the reference and its control, for as many rounds as before.

        A figure that was chosen for being the best is too good: of equal candidates noise picks the winner. Rounds
        after the choice are not biased by it.
        """
        candidates = [arm for arm in self.candidates if not arm.is_emulated]
        reference, control = self.reference, self.control
        if reference is None or reference.is_emulated or len(candidates) < LEAST_CANDIDATES:
            return None
        chosen = choose(
            [arm.timing() for arm in candidates], reference.timing(), control.timing() if control is not None else None
        )
        if chosen is None:
            return None
        winner = candidates[chosen]
        # Fresh samples only: those that led to the choice are biased by it.
        reference, repeated = replace(reference, slots=[]), replace(winner, slots=[])
        control = replace(control, slots=[]) if control is not None else None
        fixed = StoppingRule(fixed=len(winner.slots), ceiling=rule.ceiling)
        RoundSession(reference, control, [repeated]).run(worker, fixed, lambda *timings: False, seed, tick, after=after)
        repeated_control = control.timing() if control is not None else None
        return winner, Fresh(repeated.timing(), reference.timing(), repeated_control, len(candidates))

    def _questions(self) -> list[MeasuredArm]:
        """The arms whose comparison with the reference is open: native candidates, else the control. None without a
        native reference."""
        if self.reference is None or self.reference.is_emulated:
            return []
        native = [arm for arm in self.candidates if not arm.is_emulated]
        return native or [arm for arm in (self.control,) if arm is not None]

    def _arms_in_round(self, rounds: int, undecided: Sequence[MeasuredArm], rule: StoppingRule) -> list[MeasuredArm]:
        emulated = [arm for arm in self.arms if arm.is_emulated and rounds < EMULATED_ROUNDS]
        timed = [arm for arm in self.arms if not arm.is_emulated]
        if rule.fixed is not None:
            return timed + emulated
        if undecided:
            return [arm for arm in timed if arm in (self.reference, self.control) or arm in undecided] + emulated
        # Without a question (alone in memory, or with an emulated reference) a native arm gets a fixed number.
        alone = not self._questions() and rounds < 2 * rule.least
        return (timed if alone else []) + emulated

    def _is_decided(self, arm: MeasuredArm, judge: Judge) -> bool:
        if self.reference is None:
            return False
        control = self.control.timing() if self.control is not None and arm is not self.control else None
        return judge(arm.timing(), self.reference.timing(), control)

    @staticmethod
    def _share(rounds: int, seconds: float, rule: StoppingRule) -> float:
        if rule.fixed is not None:
            return rounds / rule.fixed
        return min(1.0, seconds / rule.budget, rounds / rule.least) if rule.budget > 0 else 1.0


REPLAY_ROUNDS = 10
# The host takes 10 to 20 us to launch a whole step.
_LAUNCH_SECONDS = 20e-6
# The first replay of a slot finds the neighbour's data in caches.
_REPLAY_DISCARD = 1


@dataclass(frozen=True)
class ReplayPass:
    """Has the worker capture a step of each case and replay it: one launch a step, the device's time without the host's
    launches.

    It runs last of all, because a failed capture may spoil the states. Cases take turns as in rounds.
    """

    _seed: int
    _tell: Callable[[MeasuredArm, float], None]

    def measure(self, arms: Sequence[MeasuredArm], worker: Worker) -> dict[str, Replays]:
        # A step that cannot be captured gets its reason; the others share the rounds.
        whys = {arm.key: self._capture(arm, worker) for arm in arms}
        able = [arm for arm in arms if not whys[arm.key]]
        slots: dict[str, list[SlotSample]] = {arm.key: [] for arm in able}
        orders: Orders[MeasuredArm] = Orders(random.Random(self._seed))
        for number in range(REPLAY_ROUNDS if able else 0):
            for place, arm in enumerate(orders.next(able)):
                self._tell(arm, number / REPLAY_ROUNDS)
                try:
                    slots[arm.key].append(_slot(arm, worker, number, place))
                # The captures are lost with the worker, so no arm can go on.
                except WorkerError as cause:
                    worker.restart()
                    ended = f"{arm.planned.case.mode} ended the replays: {cause}"
                    return {key: Replays(why=why or ended) for key, why in whys.items()}
        # A replay that computes something else must not be reported as fast.
        checked = {arm.key: self._check_replays(arm, worker, slots[arm.key]) for arm in able}
        # Marks need a second capture, whose failure costs phases alone.
        failed = len(able) < len(arms)
        for arm in able:
            if checked[arm.key].timing is not None:
                try:
                    checked[arm.key] = replace(checked[arm.key], phases=self._phases(arm, worker))
                except WorkerError:
                    failed = True
                    break
        if failed:
            worker.restart()  # nobody knows what a capture that failed leaves in a process
        return {arm.key: checked.get(arm.key) or Replays(why=whys[arm.key]) for arm in arms}

    def _capture(self, arm: MeasuredArm, worker: Worker) -> str:
        self._tell(arm, 0.0)
        static = arm.planned.case.static
        if arm.cache == ROTATING and _loads(arm):
            return f"its states rotate, and {_loads(arm)} would have to be loaded between the steps of a replay"
        if static is not None and static.refresh:
            return "its scales are renewed every so many steps, which the host counts"
        try:
            return str(worker.within(arm.limits.first(arm.planned.work)).capture(arm.key))
        except WorkerError as cause:
            worker.restart()
            return f"capturing a step failed: {cause}"

    def _phases(self, arm: MeasuredArm, worker: Worker) -> tuple[tuple[str, float], ...]:
        """Returns the seconds by phase of a replay with marks; () where a device has none, or states rotate."""
        step = None
        if arm.cache != ROTATING:
            step = worker.within(arm.limits.first(arm.planned.work)).replay_phases(arm.key)
        if step is None:
            return ()
        totals = zip(CELL_PHASES, by_phase_totals(step.codes, step.intervals_ns), strict=True)
        return tuple((phase, nanoseconds * 1e-9) for phase, nanoseconds in totals if nanoseconds)

    def _check_replays(self, arm: MeasuredArm, worker: Worker, slots: Sequence[SlotSample]) -> Replays:
        try:
            wrong = worker.within(arm.limits.numbers(arm.planned.work)).check(arm.key).wrong
        except WorkerError as cause:
            wrong = str(cause)
        if wrong:
            return Replays(why=f"after replays: {wrong}")
        return Replays(Timing(Segments((UNATTRIBUTED,), (0,)), tuple(slots)), loaded=_loads(arm))


def _loads(arm: MeasuredArm) -> str:
    return workloads.get(arm.planned.case.workload).loads


def _slot(arm: MeasuredArm, worker: Worker, number: int, place: int) -> SlotSample:
    limit = arm.limits.slot(arm.step_seconds, arm.calls + _REPLAY_DISCARD)
    # A host that loads data in between may fall behind: then each call has its own filling.
    filling = filling_of(_LAUNCH_SECONDS, 1 if _loads(arm) else arm.calls)
    raw = worker.within(limit).replay(arm.key, arm.calls, _REPLAY_DISCARD, filling)
    calls = tuple((sum(step.intervals_ns),) for step in raw.steps)
    return SlotSample(number, calls, raw.wall_seconds, raw.cpu_seconds, raw.host_seconds, place=place)
