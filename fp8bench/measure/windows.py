"""Windows in which one case, or a phase of it, runs over and over, to measure its energy and sustained speed. The
states are those that were timed. Cases alternate in random order, so that a device that warms up warms up for all of
them; before each window a case runs for a while, so that clocks and power are those of this case. Idle power is
measured before and after, with the same states in memory."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fp8bench.errors import WorkerError
from fp8bench.measure.arm import MeasuredArm
from fp8bench.measure.device_watch import Settler
from fp8bench.measure.handle import Worker
from fp8bench.measure.rounds import Orders
from fp8bench.measure.sensors.energy import Energy, SourceKind
from fp8bench.measure.sensors.mean_power import SHORTEST
from fp8bench.measure.sensors.meter import CAP, Meter
from fp8bench.model import EnergyUse, EnergyWindow, Group, PhaseEnergy, Request, SustainedTurn
from fp8bench.model.raw import RawReplay
from fp8bench.model.readings import Reading, Unavailable
from fp8bench.model.request import PHASE_ENERGY
from fp8bench.model.stopping import STRETCH, Settling, is_brisk
from fp8bench.protocols.axes import CACHE, COLD, ROTATING

# How long one request keeps the worker busy.
CHUNK_SECONDS = 0.25
_WARM_SECONDS = 0.3
# The share of the device's memory that a phase may keep: the states of all cases are still there.
_SHARE_OF_MEMORY = 0.25
_FLUSHED = "energy is not measured with a cold cache, which is flushed between steps: measure it with cache=hot"
# A third brisk window is measured where two differ by this share in joules a step, as far as clocks change alone.
_BRISK_WINDOWS, _BRISK_APART = 2, 0.02
_BRISK_CHUNK_SECONDS = 0.1
# An H200 at its power cap has the next case's clock after 0.17 s.
_BRISK_WARM_SECONDS = 0.2
# Fewer turns have no interval.
_TURNS, _TURNS_QUICK = 4, 3


@dataclass(frozen=True)
class WindowRule:
    """How many windows a case gets (an emulated one gets one: its energy is a cost), and how long each idle window is.

    With `turn_seconds` windows are turns: at least that long, and begun when the device has settled. Without `energy`
    no energy is noted. With `phases` each phase has as many windows. `brisk` windows take little more than a second:
    two a case, the second ones in the opposite order, and a third where these differ; idle power once a run.
    """

    windows: int = 3
    idle_seconds: float = 3.0
    turn_seconds: float = 0.0
    energy: bool = True
    phases: bool = False
    brisk: bool = False

    @property
    def settling_seconds(self) -> float:
        return max(self.turn_seconds, 3 * STRETCH)

    @property
    def window_seconds(self) -> tuple[float, float]:
        if self.turn_seconds:
            return 1.5 * self.turn_seconds, self.settling_seconds + max(self.turn_seconds, CAP)
        if self.brisk:
            return _BRISK_WARM_SECONDS + SHORTEST, _BRISK_WARM_SECONDS + 2 * SHORTEST
        return _WARM_SECONDS + SHORTEST, _WARM_SECONDS + CAP


def window_rule_for(request: Request, groups: int) -> WindowRule | None:
    """Returns the rule of a run with that many groups: fewer windows with --quick or --budget, because each takes more
    than ten changes of the counter; None without windows."""
    sustained = request.sustained
    if not request.energy and sustained is None:
        return None
    hurried = request.quick or request.budget is not None
    if sustained is None and request.energy_of != PHASE_ENERGY and is_brisk(request.brisk, request.budget, groups):
        return WindowRule(_BRISK_WINDOWS, 1.5, brisk=True)
    turns = 0 if sustained is None else _TURNS_QUICK if hurried else _TURNS
    windows, idle_seconds = max(turns, 1 if hurried else 3), 1.5 if hurried else 3.0
    return WindowRule(windows, idle_seconds, sustained or 0.0, request.energy, request.energy_of == PHASE_ENERGY)


def windows_of(group: Group, rule: WindowRule) -> int:
    """How many windows a group has; none with a cold cache."""
    if CACHE.of(dict(group.cases[0].case.params)) == COLD:
        return 0
    running = [planned for planned in group.cases if planned.runs]
    return sum(1 if planned.support.is_emulated else rule.windows for planned in running)


@dataclass
class WindowResult:
    """The results of an arm's windows, or of those of one of its phases."""

    windows: list[EnergyWindow] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    turns: list[SustainedTurn] = field(default_factory=list)
    use: EnergyUse = field(default_factory=lambda: EnergyUse(SourceKind.NONE))

    @property
    def why(self) -> str:
        return "; ".join(dict.fromkeys(self.reasons))

    @property
    def is_apart(self) -> bool:
        """Whether two windows differ by enough to need a third."""
        joules = [window.joules / window.steps for window in self.windows]
        return len(joules) == _BRISK_WINDOWS and max(joules) > (1 + _BRISK_APART) * min(joules)

    def conclude(self, source: str, idle_before: Energy | Unavailable, idle_after: Energy | Unavailable) -> EnergyUse:
        self.reasons += [
            f"idle power: {unavailable.reason}"
            for unavailable in (idle_before, idle_after)
            if isinstance(unavailable, Unavailable)
        ]
        watts_before, watts_after = (
            energy.watts if isinstance(energy, Energy) else None for energy in (idle_before, idle_after)
        )
        return EnergyUse(source, tuple(self.windows), watts_before, watts_after, self.why)


# An arm, and a phase of its step or '' for the whole step.
Turn = tuple[MeasuredArm, str]


@dataclass(frozen=True)
class WindowPass:
    """Has the worker run arms, and reads the meter."""

    _meter: Meter
    _rule: WindowRule
    _seed: int
    _tell: Callable[[MeasuredArm, float], None]
    _clock: Callable[[], float] = time.monotonic

    def measure(self, arms: Sequence[MeasuredArm], worker: Worker) -> dict[str, WindowResult]:
        """Returns the result of each arm by its key. A case that fails here keeps its time and gets a reason."""
        results = {arm.key: WindowResult() for arm in arms}
        metered = self._meter.kind is not SourceKind.NONE
        if not metered and not self._rule.turn_seconds:
            for of_arm in results.values():
                of_arm.use = EnergyUse(SourceKind.NONE, why=self._meter.why)
            return results
        source = self._meter.kind.value
        # A flushed cache would be part of what is metered.
        for arm in arms:
            if arm.cache == COLD:
                results[arm.key].use = EnergyUse(source, why=_FLUSHED)
        arms = [arm for arm in arms if arm.cache != COLD]
        if not arms:
            return results
        # Idle power is metered on both sides of the windows, because it drifts as a device warms up.
        idle_before = self._idle() if metered else None
        by_turn = {(arm.key, ""): results[arm.key] for arm in arms}
        self._in_turns([(arm, "") for arm in arms], by_turn, worker, self._window, "{mode} ended the windows: {cause}")
        idle_after = self._idle() if metered else None
        # An unmetered run still has its sustained turns.
        for of_arm in (results[arm.key] for arm in arms):
            if idle_before is None or idle_after is None:
                of_arm.use = EnergyUse(SourceKind.NONE, why=self._meter.why)
            else:
                of_arm.use = replace(
                    of_arm.conclude(source, idle_before, idle_after), power_limits=self._meter.power_limits()
                )
        return results

    def _idle(self) -> Energy | Unavailable:
        if self._rule.brisk:
            return self._meter.idle_once(self._rule.idle_seconds)
        return self._meter.idle(self._rule.idle_seconds)

    def phases(self, arms: Sequence[MeasuredArm], worker: Worker) -> dict[str, tuple[PhaseEnergy, ...]]:
        """The energy of each arm's phases, by its key, in the order of its step; after the windows of whole steps.

        A phase that cannot run by itself, or whose numbers that spoils, has a reason instead.
        """
        turns = [(arm, phase) for arm in arms for phase in dict.fromkeys(arm.timing().segments.phases)]
        results = {(arm.key, phase): WindowResult() for arm, phase in turns}
        self._in_turns(turns, results, worker, self._phase_window, "{phase} of {mode} ended this: {cause}")
        energies: dict[str, tuple[PhaseEnergy, ...]] = {arm.key: () for arm in arms}
        for (key, phase), result in results.items():
            energies[key] += (PhaseEnergy(phase, tuple(result.windows), result.why),)
        return energies

    def _in_turns(
        self,
        every: Sequence[Turn],
        results: Mapping[tuple[str, str], WindowResult],
        worker: Worker,
        window: Callable[[MeasuredArm, str, Worker, WindowResult], None],
        ended: str,
    ) -> None:
        """Gives each turn its windows in balanced random orders, an emulation one only. A fault ends all that are
        left."""
        # Emulated arms get one window: their energy is of the emulation and only fills its row.
        turns: list[Turn] = []
        orders: Orders[Turn] = Orders(random.Random(self._seed))
        for number in range(self._rule.windows):
            if number == 1 and self._rule.brisk:
                turns += [turn for turn in reversed(turns) if not turn[0].is_emulated]
            else:
                turns += orders.next([turn for turn in every if number == 0 or not turn[0].is_emulated])
        if self._take(turns, results, worker, window, ended) and self._rule.brisk:
            thirds = [turn for turn in every if results[turn[0].key, turn[1]].is_apart]
            self._take(orders.next(thirds), results, worker, window, ended)

    def _take(
        self,
        turns: Sequence[Turn],
        results: Mapping[tuple[str, str], WindowResult],
        worker: Worker,
        window: Callable[[MeasuredArm, str, Worker, WindowResult], None],
        ended: str,
    ) -> bool:
        """Returns whether all turns were taken: after a fault no states are left to run."""
        for place, (arm, phase) in enumerate(turns):
            self._tell(arm, place / len(turns))
            try:
                window(arm, phase, worker, results[arm.key, phase])
            except WorkerError as cause:
                # All states may have been lost: only the finished windows count.
                worker.restart()
                why = ended.format(mode=arm.planned.case.mode, phase=phase, cause=cause)
                for left, name in turns[place:]:
                    results[left.key, name].reasons.append(why)
                return False
        return True

    def _window(self, arm: MeasuredArm, phase: str, worker: Worker, result: WindowResult) -> None:
        turn_seconds = 0.0 if arm.is_emulated else self._rule.turn_seconds
        chunk_seconds = _BRISK_CHUNK_SECONDS if self._rule.brisk else CHUNK_SECONDS
        steps = max(1, round(chunk_seconds / arm.step_seconds))
        limit = arm.limits.slot(arm.step_seconds, steps)
        settling = self._settle(arm, worker, turn_seconds)
        seconds: list[float] = []
        with self._meter.window(every_tick=self._rule.brisk) as window:
            while not window.enough or sum(seconds) < turn_seconds:
                seconds.append(worker.within(limit).loop(arm.key, steps))
        clock = self._meter.device.glance().get("sm_clock") if turn_seconds else None
        done = steps * len(seconds)
        # Long loops may diverge; what is wrong at the end spoils the window.
        wrong = worker.within(arm.limits.numbers(arm.planned.work)).check(arm.key).wrong
        energy = window.energy
        if wrong:
            result.reasons.append(f"after {done} more steps: {wrong}")
            return
        if isinstance(energy, Unavailable):
            result.reasons.append(energy.reason)
        else:
            result.windows.append(_kept_window(energy, done))
        if turn_seconds:
            watts = energy.watts if isinstance(energy, Energy) else None
            hertz = clock.number if isinstance(clock, Reading) else None
            result.turns.append(SustainedTurn(steps, tuple(seconds), settling, hertz, watts))

    def _phase_window(self, arm: MeasuredArm, phase: str, worker: Worker, result: WindowResult) -> None:
        if result.reasons:
            return
        replay = _replayable(arm, phase, worker)
        if replay.why:
            result.reasons.append(replay.why)
            return
        times = max(1, round(CHUNK_SECONDS / max(replay.seconds, 1e-7)))
        limit, chunks, seconds = arm.limits.slot(replay.seconds, times), 0, 0.0
        with self._meter.window() as window:
            while not window.enough or (seconds < SHORTEST and not window.has_failed):
                seconds += worker.within(limit).loop_phase(arm.key, times)
                chunks += 1
        wrong = worker.within(limit).drop_phase(arm.key)
        energy = window.energy
        if wrong or isinstance(energy, Unavailable):
            result.reasons.append(wrong or str(energy))
        else:
            result.windows.append(_kept_window(energy, times * chunks))

    def _settle(self, arm: MeasuredArm, worker: Worker, turn_seconds: float) -> Settling | None:
        """Runs the case ahead of its window: until the device has settled before a turn, else for half a turn."""
        if turn_seconds:
            settler = Settler(self._meter.device, self._rule.settling_seconds, self._clock)
            if (settling := settler.settle(arm, worker)) is not None:
                return settling
        warm_seconds = _BRISK_WARM_SECONDS if self._rule.brisk else _WARM_SECONDS
        ahead = max(1, round(max(warm_seconds, turn_seconds / 2) / arm.step_seconds))
        worker.within(arm.limits.slot(arm.step_seconds, ahead)).loop(arm.key, ahead)
        return None


def _replayable(arm: MeasuredArm, phase: str, worker: Worker) -> RawReplay:
    static = arm.planned.case.static
    if arm.cache == ROTATING:
        return RawReplay(why="its states rotate, and a phase done again would find its own in the caches")
    if static is not None and static.refresh:
        return RawReplay(why="its scales are renewed every so many steps")
    most = round(_SHARE_OF_MEMORY * arm.facts.memory_bytes)
    replay: RawReplay = worker.within(arm.limits.numbers(arm.planned.work)).hold_phase(arm.key, phase, most)
    return replay


def _kept_window(energy: Energy, steps: int) -> EnergyWindow:
    watched = {name: read.number for name, read in energy.watched.items() if isinstance(read, Reading)}
    throttle, stretch = watched.get("throttle"), energy.stretch
    return EnergyWindow(
        steps,
        energy.seconds,
        energy.joules,
        stretch.intervals,
        stretch.uncertainty,
        watched.get("sm_clock"),
        watched.get("temperature"),
        None if throttle is None else int(throttle),
    )
