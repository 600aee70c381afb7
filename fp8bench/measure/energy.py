"""Windows in which one case runs over and over, so that a counter of energy can be read: a pass of its own.

The states are those that were timed, still in memory beside each other. Cases take turns in random order, so that a
device that warms up warms up for all of them; before each window a case runs for a while, so that clocks and power are
its own. Idle power is measured before and after, with the same states in memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fp8bench.errors import WorkerError
from fp8bench.measure.handle import Worker
from fp8bench.measure.orders import Orders
from fp8bench.measure.rounds import Arm
from fp8bench.measure.sensors.energy import Energy
from fp8bench.measure.sensors.mean_power import SHORTEST
from fp8bench.measure.sensors.meter import CAP, Meter
from fp8bench.measure.sensors.sampler_thread import SourceKind
from fp8bench.model import EnergyUse, EnergyWindow, Group, Level
from fp8bench.model.readings import Reading, Unavailable

# So many steps are asked for at a time that the worker is away for about as long.
_CHUNK_SECONDS = 0.25
_WARM_SECONDS = 0.3
# What a window takes at least and at most, its warming up included.
WINDOW_SECONDS = (_WARM_SECONDS + SHORTEST, _WARM_SECONDS + CAP)


@dataclass(frozen=True)
class EnergyRule:
    """How many windows a case gets (an emulated one a single one: its energy is a cost), and seconds of each idling."""

    windows: int = 3
    idle_seconds: float = 3.0


def energy_rule_for(quick: bool, budget: float | None) -> EnergyRule:
    """Fewer windows where the user is in a hurry: each of them takes more than ten changes of the counter."""
    return EnergyRule() if budget is None and not quick else EnergyRule(1, 1.5)


def windows_of(group: Group, rule: EnergyRule) -> int:
    """How many windows a group has: one where a case is emulated, whose energy is a cost and nothing to compare."""
    running = [planned for planned in group.cases if planned.runs]
    return sum(1 if planned.support.level is Level.EMULATED else rule.windows for planned in running)


@dataclass
class _Found:
    """What one arm has come to so far."""

    windows: list[EnergyWindow] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def use(self, source: str, before: Energy | Unavailable, after: Energy | Unavailable) -> EnergyUse:
        idles = [f"idle power: {one.reason}" for one in (before, after) if isinstance(one, Unavailable)]
        why = "; ".join(dict.fromkeys([*self.reasons, *idles]))
        idle_before, idle_after = (one.watts if isinstance(one, Energy) else None for one in (before, after))
        return EnergyUse(source, tuple(self.windows), idle_before, idle_after, why)


@dataclass(frozen=True)
class EnergyPass:
    """Asks the worker to run, and the meter what it took."""

    _meter: Meter
    _rule: EnergyRule
    _seed: int
    _tell: Callable[[Arm, float], None]

    def measure(self, arms: Sequence[Arm], worker: Worker) -> dict[str, EnergyUse]:
        """The energy of each arm, by its key. A case that fails here keeps its time: only its energy has a reason."""
        if self._meter.kind is SourceKind.NONE:
            return {arm.key: EnergyUse(SourceKind.NONE, why=self._meter.why) for arm in arms}
        source = self._meter.kind.value
        found = {arm.key: _Found() for arm in arms}
        before = self._meter.idle(self._rule.idle_seconds)
        turns = self._turns(arms)
        for place, arm in enumerate(turns):
            self._tell(arm, place / len(turns))
            try:
                self._window(arm, worker, found[arm.key])
            except WorkerError as cause:
                # Whatever it was, the states of all may be gone: the windows that are there have to do.
                worker.restart()
                for one in turns[place:]:
                    found[one.key].reasons.append(f"{arm.planned.case.mode} ended the windows: {cause}")
                break
        after = self._meter.idle(self._rule.idle_seconds)
        return {key: one.use(source, before, after) for key, one in found.items()}

    def _turns(self, arms: Sequence[Arm]) -> list[Arm]:
        """Every arm once a round of windows, in orders that are random and balanced."""
        turns: list[Arm] = []
        orders: Orders[Arm] = Orders(random.Random(self._seed))
        for number in range(self._rule.windows):
            turns += orders.next([arm for arm in arms if number == 0 or not arm.emulated])
        return turns

    def _window(self, arm: Arm, worker: Worker, found: _Found) -> None:
        """One window of one arm, after it has run for a while; what is no longer finite does not count."""
        steps = max(1, round(_CHUNK_SECONDS / arm.step_seconds))
        limit = arm.limits.slot(arm.step_seconds, steps)
        worker.within(limit).loop(arm.key, max(1, round(_WARM_SECONDS / arm.step_seconds)))
        done = 0
        with self._meter.window() as window:
            while not window.enough:
                worker.within(limit).loop(arm.key, steps)
                done += steps
        wrong = worker.within(arm.limits.numbers(arm.planned.work)).check(arm.key).wrong
        energy = window.energy
        if isinstance(energy, Unavailable):
            found.reasons.append(energy.reason)
        elif wrong:
            found.reasons.append(f"after {done} more steps: {wrong}")
        else:
            found.windows.append(_kept(energy, done))


def _kept(energy: Energy, steps: int) -> EnergyWindow:
    watched = {name: read.number for name, read in energy.watched.items() if isinstance(read, Reading)}
    throttle, stretch = watched.get("throttle"), energy.stretch
    return EnergyWindow(
        steps, energy.seconds, energy.joules, stretch.intervals, stretch.uncertainty, watched.get("sm_clock"),
        watched.get("temperature"), None if throttle is None else int(throttle),
    )  # fmt: skip
