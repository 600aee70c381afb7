"""Runs one case, or a phase of the case, for seconds, to measure its energy and its sustained speed.

A window is the time span of such a run. Windows use the tensors of the timed steps. Cases alternate in random order, so
that a device that heats up affects all of them alike. Each case runs for a while before its window, so that the window
has the clocks and power of this case. Idle power is measured before and after the windows, with the same states in
memory.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fp8bench.errors import WorkerError
from fp8bench.measure.arm import MeasuredArm
from fp8bench.measure.device_watch import Settler
from fp8bench.measure.handle import Worker
from fp8bench.measure.rounds import RoundOrders
from fp8bench.measure.sensors.energy import Energy, SourceKind
from fp8bench.measure.sensors.mean_power import MIN_SAMPLED_SECONDS
from fp8bench.measure.sensors.meter import MAX_WINDOW_SECONDS, Meter
from fp8bench.model import EnergyUse, EnergyWindow, Group, PhaseEnergy, Request, SustainedTurn
from fp8bench.model.raw import RawReplay
from fp8bench.model.readings import Reading, UnavailableReading
from fp8bench.model.request import PHASE_ENERGY
from fp8bench.model.stopping import SLOPE_FIT_SECONDS, DeviceSettling, is_run_brisk
from fp8bench.protocols.axes import CACHE, COLD, ROTATING

# The seconds that the worker runs for one request.
CHUNK_SECONDS = 0.25
_WARM_UP_SECONDS = 0.3
# The share of the device's memory that copies of a phase's inputs may take. The states of all cases are also in memory.
_PHASE_MEMORY_SHARE = 0.25
_COLD_CACHE_REASON = (
    "energy is not measured with a cold cache, which is flushed between steps: measure it with cache=hot"
)
# In a brisk run (one that takes about 10 s) a case has two windows. If their joules per step differ by more than this
# relative amount, which is more than clocks explain, a third window is measured.
_BRISK_WINDOWS, _MAX_BRISK_DIFFERENCE = 2, 0.02
_BRISK_CHUNK_SECONDS = 0.1
# In a brisk run, a case runs for this many seconds before its window. When cases change, an H200 at its power cap needs
# 0.17 s to reach the clock that the new case allows.
_BRISK_WARM_UP_SECONDS = 0.2
# The number of turns (long windows) of a case: by default, and with --quick or --budget. Fewer than three give no
# confidence interval.
_TURNS, _QUICK_TURNS = 4, 3


@dataclass(frozen=True)
class WindowRule:
    """Defines how many windows a case gets, and how long the power of an idle device is measured. An emulated case gets
    one window.

    With `sustained_turn_seconds`, a window lasts at least this long (then it is called a turn), and begins when the
    device has settled. Without `energy`, no energy is stored. With `phases`, each phase gets as many windows as the
    whole step. In a `brisk` run (about 10 s for each group) a window takes little more than a second, and idle power is
    measured once. Each case gets two windows, the second one in the opposite order of cases, and a third window if the
    two differ.
    """

    windows: int = 3
    idle_seconds: float = 3.0
    sustained_turn_seconds: float = 0.0
    energy: bool = True
    phases: bool = False
    brisk: bool = False

    @property
    def max_settling_seconds(self) -> float:
        return max(self.sustained_turn_seconds, 3 * SLOPE_FIT_SECONDS)

    @property
    def window_seconds(self) -> tuple[float, float]:
        if self.sustained_turn_seconds:
            return 1.5 * self.sustained_turn_seconds, self.max_settling_seconds + max(
                self.sustained_turn_seconds, MAX_WINDOW_SECONDS
            )
        if self.brisk:
            return _BRISK_WARM_UP_SECONDS + MIN_SAMPLED_SECONDS, _BRISK_WARM_UP_SECONDS + 2 * MIN_SAMPLED_SECONDS
        return _WARM_UP_SECONDS + MIN_SAMPLED_SECONDS, _WARM_UP_SECONDS + MAX_WINDOW_SECONDS


def make_window_rule(request: Request, groups: int) -> WindowRule | None:
    """Returns the rule for the windows of a run: how often and how long each case runs to measure energy or sustained
    speed. Returns None if the run measures neither. With --quick or --budget a case has fewer windows, because each
    must last for more than ten changes of the energy counter.
    """
    sustained_turn_seconds = request.sustained
    if not request.energy and sustained_turn_seconds is None:
        return None
    is_quick_or_budgeted = request.quick or request.budget is not None
    if (
        sustained_turn_seconds is None
        and request.energy_of != PHASE_ENERGY
        and is_run_brisk(request.brisk, request.budget, groups)
    ):
        return WindowRule(_BRISK_WINDOWS, 1.5, brisk=True)
    sustained_turn_count = 0 if sustained_turn_seconds is None else _QUICK_TURNS if is_quick_or_budgeted else _TURNS
    window_count = max(sustained_turn_count, 1 if is_quick_or_budgeted else 3)
    idle_seconds = 1.5 if is_quick_or_budgeted else 3.0
    return WindowRule(
        window_count, idle_seconds, sustained_turn_seconds or 0.0, request.energy, request.energy_of == PHASE_ENERGY
    )


def count_windows(group: Group, rule: WindowRule) -> int:
    """Returns the number of windows that a group needs. It is 0 if the group's cases run with a cold cache."""
    if CACHE.of(dict(group.cases[0].case.params)) == COLD:
        return 0
    runnable_cases = [planned for planned in group.cases if planned.runs]
    return sum(1 if planned.support.is_emulated else rule.windows for planned in runnable_cases)


@dataclass
class WindowResults:
    """The windows of an arm, or of one phase of an arm, and the reasons why other windows are missing."""

    windows: list[EnergyWindow] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    turns: list[SustainedTurn] = field(default_factory=list)
    energy_use: EnergyUse = field(default_factory=lambda: EnergyUse(SourceKind.NONE))

    @property
    def why(self) -> str:
        return "; ".join(dict.fromkeys(self.reasons))

    @property
    def needs_third_window(self) -> bool:
        """Returns whether a case needs a third window. A brisk run (about 10 s for each group) measures two windows of
        a case, and a third one if their joules per step differ too much.
        """
        joules = [window.joules / window.steps for window in self.windows]
        return len(joules) == _BRISK_WINDOWS and max(joules) > (1 + _MAX_BRISK_DIFFERENCE) * min(joules)

    def make_energy_use(
        self, source: str, idle_energy_before: Energy | UnavailableReading, idle_after: Energy | UnavailableReading
    ) -> EnergyUse:
        idle_watts: list[float | None] = []
        for idle in (idle_energy_before, idle_after):
            if isinstance(idle, UnavailableReading):
                self.reasons.append(f"idle power: {idle.reason}")
            idle_watts.append(idle.watts if isinstance(idle, Energy) else None)
        watts_before, watts_after = idle_watts
        return EnergyUse(source, tuple(self.windows), watts_before, watts_after, self.why)


# An arm and one of its phases; '' is the whole step.
ArmAndPhase = tuple[MeasuredArm, str]


@dataclass(frozen=True)
class WindowPass:
    """Runs arms for seconds at a time (windows) in the worker, and reads the energy meter of each window."""

    _device_meter: Meter
    _window_rule: WindowRule
    _random_seed: int
    _report_progress: Callable[[MeasuredArm, float], None]
    _clock: Callable[[], float] = time.monotonic

    def measure(self, arms: Sequence[MeasuredArm], worker: Worker) -> dict[str, WindowResults]:
        """Returns the energy and sustained speed of each arm by the arm's key. If an arm fails here, its result has the
        reason.
        """
        results = {arm.key: WindowResults() for arm in arms}
        has_energy_source = self._device_meter.kind is not SourceKind.NONE
        if not has_energy_source and not self._window_rule.sustained_turn_seconds:
            for result in results.values():
                result.energy_use = EnergyUse(SourceKind.NONE, why=self._device_meter.why)
            return results
        source = self._device_meter.kind.value
        # With a cold cache, a window would include the energy of flushing the cache between steps.
        for arm in arms:
            if arm.cache_mode == COLD:
                results[arm.key].energy_use = EnergyUse(source, why=_COLD_CACHE_REASON)
        arms = [arm for arm in arms if arm.cache_mode != COLD]
        if not arms:
            return results
        # Idle power drifts as a device warms up, so it is measured before and after the windows.
        idle_energy_before_first_window = self._measure_idle() if has_energy_source else None
        results_by_arm_and_phase = {(arm.key, ""): results[arm.key] for arm in arms}
        self._run_all_windows([(arm, "") for arm in arms], results_by_arm_and_phase, worker)
        idle_energy_after_last_window = self._measure_idle() if has_energy_source else None
        # Without an energy source, store only the speed in long windows.
        for result in (results[arm.key] for arm in arms):
            if idle_energy_before_first_window is None or idle_energy_after_last_window is None:
                result.energy_use = EnergyUse(SourceKind.NONE, why=self._device_meter.why)
            else:
                result.energy_use = replace(
                    result.make_energy_use(source, idle_energy_before_first_window, idle_energy_after_last_window),
                    power_limits=self._device_meter.read_power_limits(),
                )
        return results

    def _measure_idle(self) -> Energy | UnavailableReading:
        if self._window_rule.brisk:
            return self._device_meter.measure_idle_energy_once(self._window_rule.idle_seconds)
        return self._device_meter.measure_idle(self._window_rule.idle_seconds)

    def measure_phases(self, arms: Sequence[MeasuredArm], worker: Worker) -> dict[str, tuple[PhaseEnergy, ...]]:
        """Measures the energy of each phase of the arms. Returns the energies by the arm's key, with phases in the
        order of the step.

        If a phase cannot run alone, or if repeating it gives wrong numbers, its energy is replaced by this reason.
        """
        arms_and_phases = [(arm, phase) for arm in arms for phase in dict.fromkeys(arm.timing().segments.phases)]
        results = {(arm.key, phase): WindowResults() for arm, phase in arms_and_phases}
        self._run_all_windows(arms_and_phases, results, worker)
        energies_by_arm: dict[str, tuple[PhaseEnergy, ...]] = {arm.key: () for arm in arms}
        for (key, phase), result in results.items():
            energies_by_arm[key] += (PhaseEnergy(phase, tuple(result.windows), result.why),)
        return energies_by_arm

    def _run_all_windows(
        self, arms_and_phases: Sequence[ArmAndPhase], results: Mapping[tuple[str, str], WindowResults], worker: Worker
    ) -> None:
        """Runs all windows of the arms or phases, in random and balanced orders. After an error of the worker, each
        remaining window is missing for this reason.
        """
        # 1. Order the windows. Emulated arms get one, because their energy is shown, but never compared.
        arms_and_phases_in_order: list[ArmAndPhase] = []
        window_orders: RoundOrders[ArmAndPhase] = RoundOrders(random.Random(self._random_seed))
        for round_number in range(self._window_rule.windows):
            # The opposite order lets a steady drift affect the mean of all arms alike.
            if round_number == 1 and self._window_rule.brisk:
                arms_and_phases_in_order += [
                    arm_and_phase
                    for arm_and_phase in reversed(arms_and_phases_in_order)
                    if not arm_and_phase[0].is_emulated
                ]
            else:
                arms_and_phases_in_order += window_orders.draw_round_order(
                    [
                        arm_and_phase
                        for arm_and_phase in arms_and_phases
                        if round_number == 0 or not arm_and_phase[0].is_emulated
                    ]
                )
        # 2. Run them. In a brisk run, add a third window where the first two differ.
        if self._run_window_sequence(arms_and_phases_in_order, results, worker) and self._window_rule.brisk:
            third_window_pairs = [
                arm_and_phase
                for arm_and_phase in arms_and_phases
                if results[arm_and_phase[0].key, arm_and_phase[1]].needs_third_window
            ]
            self._run_window_sequence(window_orders.draw_round_order(third_window_pairs), results, worker)

    def _run_window_sequence(
        self, windows_in_order: Sequence[ArmAndPhase], results: Mapping[tuple[str, str], WindowResults], worker: Worker
    ) -> bool:
        """Runs one window for each pair of arm and phase, in this order. Returns False after an error, which destroys
        the states of all arms.
        """
        for position, (arm, phase) in enumerate(windows_in_order):
            self._report_progress(arm, position / len(windows_in_order))
            result = results[arm.key, phase]
            try:
                if phase:
                    self._measure_phase_window(arm, phase, worker, result)
                else:
                    self._measure_window(arm, worker, result)
            except WorkerError as cause:
                # Finished windows remain. The other windows get the fault as the reason why they are missing, because
                # all states may be lost.
                worker.restart()
                failed_window_text = (
                    f"an error in {phase} of {arm.planned.case.mode}" if phase else arm.planned.case.mode
                )
                reason = f"{failed_window_text} ended the windows: {cause}"
                for missed_arm, missed_phase in windows_in_order[position:]:
                    results[missed_arm.key, missed_phase].reasons.append(reason)
                return False
        return True

    def _measure_window(self, arm: MeasuredArm, worker: Worker, result: WindowResults) -> None:
        sustained_turn_seconds = 0.0 if arm.is_emulated else self._window_rule.sustained_turn_seconds
        chunk_seconds = _BRISK_CHUNK_SECONDS if self._window_rule.brisk else CHUNK_SECONDS
        steps = max(1, round(chunk_seconds / arm.step_seconds))
        time_limit = arm.limits.for_slot(arm.step_seconds, steps)
        warm_up_readings = self._warm_up_before_window(arm, worker, sustained_turn_seconds)
        loop_seconds: list[float] = []
        with self._device_meter.window(every_tick=self._window_rule.brisk) as window:
            while not window.is_enough or sum(loop_seconds) < sustained_turn_seconds:
                loop_seconds.append(worker.with_time_limit(time_limit).loop(arm.key, steps))
        clock_reading = (
            self._device_meter.device.read_changing_state().get("sm_clock") if sustained_turn_seconds else None
        )
        window_step_count = steps * len(loop_seconds)
        # A long loop may make values of the state infinite. If a check finds this, the window's energy is not used.
        state_fault = worker.with_time_limit(arm.limits.for_untimed_pass(arm.planned.work)).check(arm.key).wrong
        energy = window.energy
        if state_fault:
            result.reasons.append(f"after {window_step_count} more steps: {state_fault}")
            return
        if isinstance(energy, UnavailableReading):
            result.reasons.append(energy.reason)
        else:
            result.windows.append(_convert_to_energy_window(energy, window_step_count))
        if sustained_turn_seconds:
            watts = energy.watts if isinstance(energy, Energy) else None
            clock_hertz = clock_reading.number if isinstance(clock_reading, Reading) else None
            result.turns.append(SustainedTurn(steps, tuple(loop_seconds), warm_up_readings, clock_hertz, watts))

    def _measure_phase_window(self, arm: MeasuredArm, phase: str, worker: Worker, result: WindowResults) -> None:
        if result.reasons:  # a phase that failed is not tried again
            return
        phase_replay = _prepare_phase_replay(arm, phase, worker)
        if phase_replay.why:
            result.reasons.append(phase_replay.why)
            return
        # The inner maximum avoids a division by 0: a phase may be too short to time.
        phase_repetitions = max(1, round(CHUNK_SECONDS / max(phase_replay.seconds, 1e-7)))
        time_limit, chunk_count, seconds = arm.limits.for_slot(phase_replay.seconds, phase_repetitions), 0, 0.0
        with self._device_meter.window() as window:
            while not window.is_enough or (seconds < MIN_SAMPLED_SECONDS and not window.has_failed):
                seconds += worker.with_time_limit(time_limit).loop_phase(arm.key, phase_repetitions)
                chunk_count += 1
        # Repeating a phase may make its numbers infinite. Then its energy is not used.
        lost_values_text = worker.with_time_limit(time_limit).drop_phase(arm.key)
        energy = window.energy
        if lost_values_text:
            result.reasons.append(lost_values_text)
        elif isinstance(energy, UnavailableReading):
            result.reasons.append(energy.reason)
        else:
            result.windows.append(_convert_to_energy_window(energy, phase_repetitions * chunk_count))

    def _warm_up_before_window(self, arm: MeasuredArm, worker: Worker, turn_seconds: float) -> DeviceSettling | None:
        """Runs the case before its window, so that the window has the clocks and power of this case. Before a turn (a
        long window), the case runs until the device has settled, or for half a turn if the device reports neither clock
        nor temperature. Before other windows, the case runs for a fixed time.
        """
        if turn_seconds:
            device_settler = Settler(self._device_meter.device, self._window_rule.max_settling_seconds, self._clock)
            if (settling_readings := device_settler.warm_up_device(arm, worker)) is not None:
                return settling_readings
        warm_up_seconds = _BRISK_WARM_UP_SECONDS if self._window_rule.brisk else _WARM_UP_SECONDS
        warm_up_steps = max(1, round(max(warm_up_seconds, turn_seconds / 2) / arm.step_seconds))
        worker.with_time_limit(arm.limits.for_slot(arm.step_seconds, warm_up_steps)).loop(arm.key, warm_up_steps)
        return None


def _prepare_phase_replay(arm: MeasuredArm, phase: str, worker: Worker) -> RawReplay:
    static_scales = arm.planned.case.static
    if arm.cache_mode == ROTATING:
        return RawReplay(why="its states rotate, and a repeated phase would find its data in the caches")
    if static_scales is not None and static_scales.refresh:
        return RawReplay(why="its scales are renewed after a number of steps, and a phase alone counts no steps")
    max_bytes = round(_PHASE_MEMORY_SHARE * arm.facts.memory_bytes)
    return worker.with_time_limit(arm.limits.for_untimed_pass(arm.planned.work)).hold_phase(arm.key, phase, max_bytes)


def _convert_to_energy_window(energy: Energy, steps: int) -> EnergyWindow:
    device_state_values = {name: read.number for name, read in energy.watched.items() if isinstance(read, Reading)}
    throttle, stretch = device_state_values.get("throttle"), energy.measured_stretch
    return EnergyWindow(
        steps,
        energy.seconds,
        energy.joules,
        stretch.intervals,
        stretch.uncertainty,
        device_state_values.get("sm_clock"),
        device_state_values.get("temperature"),
        None if throttle is None else int(throttle),
    )
