"""Steps replayed as one launch each: the device's time without the host's launches. A pass of its own, after all else.

Cases take turns as in rounds. The states are those that were timed, and nothing else needs them afterwards: what a
capture that failed leaves in them spoils nothing. What is no longer finite after replays has no such time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fp8bench.errors import WorkerError
from fp8bench.measure.arm import MeasuredArm
from fp8bench.measure.handle import Worker
from fp8bench.measure.rounds import Orders
from fp8bench.measure.slots import filling_of
from fp8bench.model import UNATTRIBUTED, Replays, Segments, SlotSample, Timing
from fp8bench.protocols.axes import ROTATING
from fp8bench.registry import workloads

ROUNDS = 10
# What the host takes to launch a whole step: 10 to 20 us.
_LAUNCH_SECONDS = 20e-6
# The first replay of a slot finds the neighbour's data in caches.
_DISCARD = 1


@dataclass(frozen=True)
class ReplayPass:
    """Asks the worker to capture a step of each case and to replay it; who cannot be captured has a reason."""

    _seed: int
    _tell: Callable[[MeasuredArm, float], None]

    def measure(self, arms: Sequence[MeasuredArm], worker: Worker) -> dict[str, Replays]:
        whys = {arm.key: self._capture(arm, worker) for arm in arms}
        able = [arm for arm in arms if not whys[arm.key]]
        slots: dict[str, list[SlotSample]] = {arm.key: [] for arm in able}
        orders: Orders[MeasuredArm] = Orders(random.Random(self._seed))
        for number in range(ROUNDS if able else 0):
            for place, arm in enumerate(orders.next(able)):
                self._tell(arm, number / ROUNDS)
                try:
                    slots[arm.key].append(_slot(arm, worker, number, place))
                except WorkerError as cause:
                    worker.restart()
                    ended = f"{arm.planned.case.mode} ended the replays: {cause}"
                    return {key: Replays(why=why or ended) for key, why in whys.items()}
        checked = {arm.key: self._checked(arm, worker, slots[arm.key]) for arm in able}
        if len(able) < len(arms):
            worker.restart()  # nobody knows what a capture that failed leaves in a process
        return {arm.key: checked.get(arm.key) or Replays(why=whys[arm.key]) for arm in arms}

    def _capture(self, arm: MeasuredArm, worker: Worker) -> str:
        """Why its step cannot be replayed; '' where it can."""
        self._tell(arm, 0.0)
        static = arm.planned.case.static
        if arm.cache == ROTATING:
            return "its states rotate, and each would need a replay of its own"
        if static is not None and static.refresh:
            return "its scales are renewed every so many steps, which the host counts"
        try:
            return str(worker.within(arm.limits.first(arm.planned.work)).capture(arm.key))
        except WorkerError as cause:
            worker.restart()
            return f"capturing a step failed: {cause}"

    def _checked(self, arm: MeasuredArm, worker: Worker, slots: Sequence[SlotSample]) -> Replays:
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
    limit = arm.limits.slot(arm.step_seconds, arm.calls + _DISCARD)
    # A host that loads in between may fall behind: then each call has its own filling.
    filling = filling_of(_LAUNCH_SECONDS, 1 if _loads(arm) else arm.calls)
    raw = worker.within(limit).replay(arm.key, arm.calls, _DISCARD, filling)
    calls = tuple((sum(step.intervals_ns),) for step in raw.steps)
    return SlotSample(number, calls, raw.wall_seconds, raw.cpu_seconds, raw.host_seconds, place=place)
