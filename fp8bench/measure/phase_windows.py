"""Windows in which one phase of a step is done over and over by itself, so that a counter of energy can be read.

After the windows of whole steps, in the same states and under the same rules. Phases of all cases take turns in random
order. A phase that cannot be done by itself, or whose numbers are spoilt by it, has a reason instead.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fp8bench.errors import WorkerError
from fp8bench.measure.arm import Arm
from fp8bench.measure.handle import Worker
from fp8bench.measure.orders import Orders
from fp8bench.measure.sensors.mean_power import SHORTEST
from fp8bench.measure.sensors.meter import Meter
from fp8bench.measure.windows import CHUNK_SECONDS, kept_window
from fp8bench.model import EnergyWindow, PhaseEnergy
from fp8bench.model.raw import RawReplay
from fp8bench.model.readings import Unavailable
from fp8bench.protocols.axes import ROTATING

# What may be kept for a phase, of the device's memory: the states of all cases are still there.
_SHARE_OF_MEMORY = 0.25


@dataclass
class _Found:
    windows: list[EnergyWindow] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def of(self, phase: str) -> PhaseEnergy:
        return PhaseEnergy(phase, tuple(self.windows), "; ".join(dict.fromkeys(self.reasons)))


_Turn = tuple[Arm, str]


@dataclass(frozen=True)
class PhaseWindowPass:
    """Asks the worker to do phases, and the meter what they took: in so many windows each, in one of an emulation."""

    _meter: Meter
    _windows: int
    _seed: int
    _tell: Callable[[Arm, float], None]

    def measure(self, arms: Sequence[Arm], worker: Worker) -> dict[str, tuple[PhaseEnergy, ...]]:
        """Those of each arm's phases, by its key, in the order that its steps have them. A fault ends the pass."""
        found = {arm.key: {phase: _Found() for phase in dict.fromkeys(arm.timing().segments.phases)} for arm in arms}
        turns = self._turns(arms)
        for place, (arm, phase) in enumerate(turns):
            self._tell(arm, place / len(turns))
            if (one := found[arm.key][phase]).reasons:
                continue  # it would say the same again
            try:
                self._window(arm, phase, worker, one)
            except WorkerError as cause:
                worker.restart()
                for later, name in turns[place:]:
                    found[later.key][name].reasons.append(f"{phase} of {arm.planned.case.mode} ended this: {cause}")
                break
        return {key: tuple(one.of(phase) for phase, one in phases.items()) for key, phases in found.items()}

    def _turns(self, arms: Sequence[Arm]) -> list[_Turn]:
        turns: list[_Turn] = []
        orders: Orders[_Turn] = Orders(random.Random(self._seed))
        for number in range(self._windows):
            due = [arm for arm in arms if number == 0 or not arm.emulated]
            turns += orders.next([(arm, phase) for arm in due for phase in dict.fromkeys(arm.timing().segments.phases)])
        return turns

    def _window(self, arm: Arm, phase: str, worker: Worker, found: _Found) -> None:
        held = self._held(arm, phase, worker)
        if held.why:
            found.reasons.append(held.why)
            return
        times = max(1, round(CHUNK_SECONDS / max(held.seconds, 1e-7)))
        limit, chunks, seconds = arm.limits.slot(held.seconds, times), 0, 0.0
        with self._meter.window() as window:
            while not window.enough or (seconds < SHORTEST and not window.failed):
                seconds += worker.within(limit).loop_phase(arm.key, times)
                chunks += 1
        wrong = worker.within(limit).drop_phase(arm.key)
        energy = window.energy
        if wrong or isinstance(energy, Unavailable):
            found.reasons.append(wrong or str(energy))
        else:
            found.windows.append(kept_window(energy, times * chunks))

    def _held(self, arm: Arm, phase: str, worker: Worker) -> RawReplay:
        """The phase, done for a while by now; or why it is not."""
        static = arm.planned.case.static
        if arm.cache == ROTATING:
            return RawReplay(why="its states rotate, and a phase done again would find its own in the caches")
        if static is not None and static.refresh:
            return RawReplay(why="its scales are renewed every so many steps")
        most = round(_SHARE_OF_MEMORY * arm.facts.memory_bytes)
        held: RawReplay = worker.within(arm.limits.numbers(arm.planned.work)).hold_phase(arm.key, phase, most)
        return held
