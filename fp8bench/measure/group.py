"""Measures one group of cases: times them in rounds, runs the untimed passes, and returns their records.

A case that fails gets a failed record, and the other cases go on. If the worker is lost, the group starts again without
the case that ended it. If memory is too small for all cases together, each case is measured with the reference only. A
case for which even this needs too much memory is measured alone (label `unpaired`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from fp8bench.errors import WorkerError
from fp8bench.measure.arm import ArmFailed, CompilingFailed, MeasuredArm, QuantiserCompilation, raise_as_arm_failure
from fp8bench.measure.capacity import CapacityPass, CapacitySearchRule
from fp8bench.measure.ceilings import derive_ceiling
from fp8bench.measure.device_watch import SessionWatch, Settler
from fp8bench.measure.handle import CountingWorker, Worker
from fp8bench.measure.limits import DEFAULT_TIME_LIMITS, HANG_SECONDS, RequestTimeLimits
from fp8bench.measure.passes import OUT_OF_MEMORY, CaseOutcome, Passes, TraceFolder, ran_out_of_memory
from fp8bench.measure.rounds import ChooseFastest, IsComparisonDecided, RoundSession, StepReplayPass
from fp8bench.measure.sensors.meter import Meter
from fp8bench.measure.sensors.nvml import DeviceReader
from fp8bench.measure.windows import WindowPass, WindowRule
from fp8bench.model import Ceilings, DeviceFacts, Group, Measurement, PlannedCase, Record
from fp8bench.model.stopping import DeviceSettling, StoppingRule
from fp8bench.protocols import Observer, SilentObserver
from fp8bench.registry import precisions, workloads

# Two workers may measure at the same time if the machine has this many times the memory that one worker needs.
_TWO_WORKERS_MEMORY_FACTOR = 4
# A case is small if its device has more than this many times the lower bound of a state's memory.
_SMALL_CASE_MEMORY_FACTOR = 64
_Answers = TypeVar("_Answers")
# A session is a set of arms that are timed in the same rounds. Its plan: the reference (or None), whether there is a
# control arm, and the candidates.
_SessionPlan = tuple[CaseOutcome | None, bool, list[CaseOutcome]]


@dataclass(frozen=True, kw_only=True)
class MeasurementMethod:
    """Defines how a group is measured: when rounds stop, how long a request may take, and which untimed passes run.

    `judge` decides whether a case needs no more rounds. `choose_fastest` finds the fastest case, which is then timed
    again. `quantisers` holds whether emulated casts are compiled. `windows` plans windows: runs of seconds after the
    timing, which measure energy or sustained speed. Each of these three may be None, which skips it. `ceilings` are
    keyed by device. `warm_up_seconds` limits how long a device may take to settle; 0 skips the warm-up. `lost_devices`
    maps each device that no longer answers to the reason, for all groups.

    `tapes` records a step's operators, and `shares` measures the parts of its time, both in the untimed worker (see
    GroupMeasurement). Without `tapes_apart`, tapes are recorded in the timing worker. `checks_late_steps` turns on two
    checks after the timing: whether the timed steps did work, and whether their memory grows.

    A `brisk` group takes about 10 s on a GPU. There, the untimed worker also measures memory and the effects of steps,
    so that the timing worker need not restart. `known_errors` has the numerical errors that brisk groups share.
    """

    rule: StoppingRule
    judge: IsComparisonDecided
    seed: int
    limits: RequestTimeLimits = DEFAULT_TIME_LIMITS
    quantisers: QuantiserCompilation | None = None
    windows: WindowRule | None = None
    capacity: CapacitySearchRule | None = None
    trace_folder: TraceFolder | None = None
    ceilings: Mapping[str, Ceilings] = field(default_factory=dict)
    warm_up_seconds: float = 0.0
    choose_fastest: ChooseFastest | None = None
    tapes: bool = False
    tapes_apart: bool = True
    checks_late_steps: bool = True
    shares: bool = False
    brisk: bool = False
    known_errors: dict[str, tuple[Measurement, ...]] = field(default_factory=dict)
    lost_devices: dict[str, str] = field(default_factory=dict)


@dataclass
class GroupMeasurement:
    """Measures one group by `run`.

    `_worker` times steps. `_untimed_worker` records operators, which would disturb later timings in its process. It may
    be `_second_worker`, and in the last group `_worker`. `_second_worker` measures errors while `_worker` prepares
    cases, is idle during the timing, and then measures memory. `_counting_worker` counts memory allocations.
    """

    _measured_group: Group
    _facts: Mapping[str, DeviceFacts]
    _worker: Worker
    _observer: Observer
    _method: MeasurementMethod
    _device_meter: Meter | None = None
    _untimed_worker: Worker | None = None
    _counting_worker: CountingWorker | None = None
    _second_worker: Worker | None = None

    def __post_init__(self) -> None:
        # The random seed depends on the group's setting (the values of its axes), and not on its place in the run.
        self._seed = random.Random(f"{self._method.seed}:{self._measured_group.setting}").getrandbits(32)
        self._start = time.monotonic()
        self._outcomes = [CaseOutcome(planned) for planned in self._measured_group.cases]
        # The numerical errors that are known already, by `make_numbers_key`: cases with equal keys have equal errors.
        # They come from the second worker, and in a brisk run also from earlier groups.
        self._errors = self._method.known_errors if self._method.brisk else dict[str, tuple[Measurement, ...]]()

    def run(self) -> tuple[Record, ...]:
        """Times the group's cases, runs the untimed passes, and returns the records in the order of the plan."""
        # 1. Refuse cases with wrong products, and time the sessions. After a fault, discard the drafts (unfinished
        # records) and time all sessions again, because the remaining states may be damaged.
        self._fail_cases_of_lost_devices()
        self._make_passes(self._worker).check_products(self._list_usable())
        while self._time_sessions() == "again":
            for outcome in self._outcomes:
                outcome.reset_draft_record()
        timed_reference_outcome = self._find_reference()
        # 2. Start the untimed worker only now: an earlier start would have disturbed the timing. If it records neither
        # tapes (`tapes_apart`) nor shares, only a brisk group uses it.
        if self._untimed_worker is not None and (self._method.tapes_apart or self._method.shares):
            with suppress(WorkerError):  # if the worker cannot start, its first request reports why
                self._untimed_worker.begin()
        worker_passes = self._make_passes(self._worker)
        # 3. Run the untimed passes of each case. If there is a second worker, it measures memory.
        with self._measuring_memory_in_second_worker() as memory_outcomes:
            self._run_untimed_passes(worker_passes, timed_reference_outcome, with_memory=memory_outcomes is None)
        if memory_outcomes is not None:
            self._store_memory_figures(worker_passes, memory_outcomes)
        # 4. Run passes that need an idle second worker: recording operators in it, or searching the largest batch.
        if self._untimed_worker is self._second_worker:
            self._record_operators(worker_passes)
        if (rule := self._method.capacity) is not None:  # the search may need all memory
            capacity_pass = CapacityPass(self._worker, self._facts, self._method.limits, self._observer, rule)
            capacity_pass.find_largest_batches([outcome for outcome in self._outcomes if outcome.may_fit_memory])
        # `_counting_worker.why` is the reason if that worker cannot count allocator calls.
        if self._counting_worker is not None:
            self._make_passes(self._counting_worker).count_allocations(self._list_usable(), self._counting_worker.why)
        reference = self._find_reference()
        for outcome in self._list_usable():
            ceilings = self._method.ceilings.get(outcome.planned.case.device)
            outcome.note(ceiling=derive_ceiling(outcome.planned, ceilings))
        return tuple(outcome.make_record(outcome is reference) for outcome in self._outcomes)

    def _run_untimed_passes(self, passes: Passes, timed_reference: CaseOutcome | None, with_memory: bool) -> None:
        """Runs the passes that follow the timing. The reference of the timing, `timed_reference`, may fail here."""
        # 1. Measure numerical errors first. A case that fails here skips the other passes.
        untimed_passes = self._select_untimed_passes() or passes
        passes.measure_errors(self._list_usable(), self._errors)
        reference = self._find_reference()
        # If the reference has failed, the other cases have nothing to be compared with.
        if reference is not timed_reference:
            self._mark_unpaired_outcomes()
        # Compute the statistics of the data once, because all precisions use the same data.
        if reference is not None:
            passes.ask("statistics", [reference])
        # 2. Observe the products of an untimed step and what it changes, and measure transfers and coverage. Measure
        # memory last of these passes, because torch's profiler could disturb the passes after it.
        passes.ask("products", self._list_usable())
        untimed_passes.check_step_effects(self._list_usable())
        passes.measure_transfers(self._list_usable())
        # Coverage is how much of a user's model is converted. Only a worker knows such a model's layers (`examined`).
        examined = [outcome for outcome in self._list_usable() if workloads.get(outcome.planned.case.workload).examined]
        passes.ask("coverage", examined)
        if with_memory:
            untimed_passes.measure_memory(self._list_usable(), self._device_meter, self._method.checks_late_steps)
        # 3. Record traces and operators at the end, because these tools run code around every operation of a step.
        if self._method.trace_folder is not None:
            passes.record_step_traces(self._list_usable(), self._method.trace_folder)
        if self._untimed_worker is not self._second_worker:
            self._record_operators(passes)

    def _record_operators(self, passes: Passes) -> None:
        """Records each step's operators, and the shares of its time. Runs last, because recording slows the process."""
        method = self._method
        if self._untimed_worker is not None and (method.tapes or method.shares):
            untimed_passes = self._select_untimed_passes() or self._make_passes(self._untimed_worker)
            untimed_passes.ask("tape", self._list_usable() if method.tapes and method.tapes_apart else ())
            untimed_passes.measure_step_shares(self._list_usable() if method.shares else ())
            # Restart a worker that used a GPU (not in a brisk group), so that it frees the memory for later cases.
            untimed_passes.release_gpu_memory(self._list_usable())
        # Skip cases that take long to prepare, for example to compile: recording operators prepares a case again.
        if method.tapes and not method.tapes_apart:
            passes.ask("tape", [outcome for outcome in self._list_usable() if not outcome.planned.work.setup_seconds])

    @contextmanager
    def _measuring_memory_in_second_worker(self) -> Iterator[dict[str, CaseOutcome] | None]:
        """Measures memory in the second worker while the `with` block runs. Yields outcomes by case id, which are
        complete after the `with` block. Yields None if the machine has too little memory for two workers.
        """
        results: dict[str, CaseOutcome] = {}
        peak_bytes, device_bytes = self._worker.peak_bytes, min(facts.memory_bytes for facts in self._facts.values())
        if self._second_worker is None or peak_bytes is None or _TWO_WORKERS_MEMORY_FACTOR * peak_bytes > device_bytes:
            yield None
            return
        # Leave out cases whose step torch compiles, because the second worker would have to compile it again.
        waiting = [outcome for outcome in self._list_usable() if not outcome.planned.work.setup_seconds]
        with self._running_in_second_worker(partial(self._measure_memory, self._second_worker), waiting, results):
            yield results

    @contextmanager
    def _measuring_errors_in_second_worker(self) -> Iterator[None]:
        """While the `with` block runs, the second worker measures numerical errors of small cases."""
        small_cases = [outcome.planned for outcome in self._list_usable() if self._is_small_case(outcome.planned)]
        # Skip this if numerical errors are known already, from an earlier session or from earlier groups.
        if self._second_worker is None or self._errors or not small_cases:
            yield
            return
        measure_errors = self._make_passes(self._second_worker, SilentObserver(), is_untimed=True).measure_errors
        with self._running_in_second_worker(measure_errors, list(map(CaseOutcome, small_cases)), self._errors):
            yield

    def _is_small_case(self, planned: PlannedCase) -> bool:
        """Returns whether a case needs little memory (False if unknown), and neither static scales nor compilation."""
        least_bytes, static_scales = planned.work.least_memory, planned.case.static
        needs_preparation = static_scales is not None or planned.work.setup_seconds > 0
        is_size_small = 0 < _SMALL_CASE_MEMORY_FACTOR * least_bytes < self._facts[planned.case.device].memory_bytes
        return is_size_small and not needs_preparation

    @contextmanager
    def _running_in_second_worker(
        self, run_pass: Callable[[list[CaseOutcome], _Answers], object], waiting: list[CaseOutcome], answers: _Answers
    ) -> Iterator[None]:
        """Calls `run_pass` in the second worker during the `with` block. Restarts that worker if the block raises."""
        assert self._second_worker is not None
        with ThreadPoolExecutor(1) as threads:
            pass_future = threads.submit(run_pass, waiting, answers)
            try:
                yield
            except BaseException:
                waiting.clear()  # the pass ends when this list is empty
                self._second_worker.restart()
                raise
            pass_future.result()

    def _store_memory_figures(self, passes: Passes, measured: Mapping[str, CaseOutcome]) -> None:
        """Stores the memory figures that the second worker measured. The first worker measures the remaining cases."""
        unmeasured = [outcome for outcome in self._list_usable() if outcome.planned.case.id not in measured]
        for outcome in self._list_usable():
            if outcome.planned.case.id in measured:
                outcome.copy_memory_figures(measured[outcome.planned.case.id])
        passes.measure_memory(unmeasured, self._device_meter, self._method.checks_late_steps)

    def _measure_memory(self, worker: Worker, waiting: list[CaseOutcome], results: dict[str, CaseOutcome]) -> None:
        """Measures the memory of the waiting cases, with compiled quantisers if a case was timed with them."""
        worker_passes = self._make_passes(worker, SilentObserver(), is_untimed=True)
        while waiting:
            timed_outcome = waiting.pop(0)
            case, timing = timed_outcome.planned.case, timed_outcome.draft.timing
            try:
                # Prepare an arm only to compile its quantisers, which stay compiled in the worker.
                if timing is not None and timing.fused:
                    arm = MeasuredArm(case.id, timed_outcome.planned, self._facts[case.device], self._method.limits)
                    arm.prepare(worker, QuantiserCompilation())
                    arm.release_states(worker)
            except (WorkerError, CompilingFailed):
                return  # the first worker measures the cases that are still waiting
            # Use a separate outcome, because passes of the first worker write into the case's outcome at the same time.
            results[case.id] = CaseOutcome(timed_outcome.planned)
            worker_passes.measure_memory([results[case.id]], self._device_meter, self._method.checks_late_steps)

    def _make_passes(self, worker: Worker, observer: Observer | None = None, *, is_untimed: bool = False) -> Passes:
        return Passes(worker, self._facts, self._method.limits, observer or self._observer, is_untimed)

    def _select_untimed_passes(self) -> Passes | None:
        """Returns the passes for `_brisk_untimed_worker`; None if the timing worker runs all passes."""
        is_accelerated = any(self._facts[outcome.planned.case.device].accelerated for outcome in self._outcomes)
        if self._brisk_untimed_worker is None or not is_accelerated:
            return None
        return self._make_passes(self._brisk_untimed_worker, is_untimed=True)

    @property
    def _brisk_untimed_worker(self) -> Worker | None:
        """The untimed worker of a brisk group. None for other groups, or if this worker times steps too."""
        return self._untimed_worker if self._method.brisk and self._untimed_worker is not self._worker else None

    def _mark_unpaired_outcomes(self) -> None:
        """Marks all outcomes as unpaired, unless all were timed in the rounds of the reference (no `paired_with`)."""
        if all(outcome.draft.paired and outcome.draft.paired_with is None for outcome in self._outcomes):
            return
        for outcome in self._outcomes:
            outcome.note(paired=False, paired_with=None, control=None, fresh=None)  # fresh: the fastest, timed again

    def _list_usable(self) -> list[CaseOutcome]:
        return [outcome for outcome in self._outcomes if outcome.planned.runs and not outcome.failure]

    def _find_reference(self) -> CaseOutcome | None:
        planned_reference_outcome = self._outcomes[self._measured_group.reference]
        remaining = self._list_usable()
        if planned_reference_outcome in remaining:
            return planned_reference_outcome
        reference_candidates = [outcome for outcome in remaining if outcome.planned.support.is_native] or remaining
        # The highest precision has the lowest `rank`.
        return min(reference_candidates, key=lambda one: precisions.get(one.planned.case.precision).rank, default=None)

    def _time_sessions(self) -> str:
        """Times all sessions. Returns 'again' if a fault forces the group to start over, else 'done'."""
        reference = self._find_reference()
        if reference is None:
            return "done"
        candidates = [outcome for outcome in self._list_usable() if outcome is not reference]
        # A session that does not fit in memory is split into smaller sessions, which are timed next.
        pending_session_plans: list[_SessionPlan] = [(reference, True, candidates)]
        while pending_session_plans:
            session_plan = pending_session_plans.pop(0)
            session = self._make_session(session_plan)
            failure: ArmFailed | None = None
            try:
                self._time_round_session(session, len(pending_session_plans) + 1)
            except ArmFailed as arm_failure:
                failure = arm_failure
            except CompilingFailed:
                return "again"  # the failure was stored in `_method.quantisers`, so the next try compiles none
            finally:
                release_failure = self._release_session(session)
            failure = failure or release_failure
            if failure is None:
                continue
            # Time the session again only if memory ran out, because the same arms may fit in smaller sessions.
            smaller_session_plans = self._split_session_plan(session_plan) if ran_out_of_memory(failure.cause) else []
            if not smaller_session_plans:
                self._record_arm_failure(failure)
                return "again"
            pending_session_plans[:0] = smaller_session_plans
        return "done"

    def _make_session(self, session_plan: _SessionPlan) -> RoundSession:
        def make_arm(outcome: CaseOutcome, suffix: str = "") -> MeasuredArm:
            case = outcome.planned.case
            return MeasuredArm(case.id + suffix, outcome.planned, self._facts[case.device], self._method.limits)

        base, with_control, candidates = session_plan
        reference = make_arm(base) if base else None
        control = make_arm(base, "'") if base and with_control and base.planned.support.is_native else None
        return RoundSession(reference, control, list(map(make_arm, candidates)))

    def _find_outcome(self, arm: MeasuredArm) -> CaseOutcome:
        return next(outcome for outcome in self._outcomes if outcome.planned is arm.planned)

    def _make_progress_callback(self, activity: str) -> Callable[[MeasuredArm, float], None]:
        return lambda arm, share: self._observer.working(arm.planned.case, activity, share)

    def _time_round_session(self, session: RoundSession, session_count: int) -> None:
        # 1. Build the states of all arms, and choose how many calls a slot has.
        report = self._observer.working
        for arm in session.arms:
            activity_text = "finding scales" if arm.planned.case.static else "preparing"
            report(arm.planned.case, activity_text, 0.0)
        method = self._method
        with self._measuring_errors_in_second_worker():
            session.prepare(self._worker, method.quantisers, lambda arm, text: report(arm.planned.case, text, 0.0))
        # 2. Time rounds until the stopping rule ends them. Remaining sessions share the group's time, if it is limited.
        device_watch = self._start_session_watch(session)
        read_state = device_watch.read_state_after_slot if device_watch else None
        round_rule = method.rule.after(time.monotonic() - self._start, session_count)
        report_progress = self._make_progress_callback("measuring")
        end_reason = session.run(self._worker, round_rule, method.judge, self._seed, report_progress, after=read_state)
        # 3. Time the fastest candidate again, because the fastest of several noisy timings is biased.
        fastest = None
        if method.choose_fastest is not None:
            report_progress = self._make_progress_callback("timing the fastest again")
            fastest = session.time_fastest_again(
                method.choose_fastest, self._worker, method.rule, self._seed + 1, report_progress, read_state
            )
        if device_watch:
            device_watch.finish()
        # Examine late steps before any other call, which could reveal to the suite's code that the timing is over.
        self._check_late_step_work(session)
        session.check_states(self._worker)  # raises ArmFailed, for example if the steps have produced NaN
        # 4. Store the timings.
        paired_timing_fields = {}
        if (base_arm := session.reference) is not None:
            reference_timing = base_arm.timing()
            control = session.control.timing() if session.control else None
            if self._find_outcome(base_arm).draft.timing is None:
                self._find_outcome(base_arm).note(**base_arm.record_fields(), control=control, stopped=end_reason)
            else:  # the reference has a timing already, so store this one only with the candidates
                paired_timing_fields = {"paired_with": reference_timing, "control": control}
        for arm in session.candidates:
            case_record_fields = {**arm.record_fields(), **paired_timing_fields}
            self._find_outcome(arm).note(**case_record_fields, stopped=end_reason, paired=base_arm is not None)
        if fastest is not None:
            self._find_outcome(fastest[0]).note(fresh=fastest[1])
        # 5. Measure energy and replays of captured steps last, so that they cannot disturb the timing.
        self._store_watch_and_energy(session, device_watch)
        self._measure_replays(session)

    def _check_late_step_work(self, session: RoundSession) -> None:
        """Examines steps after the timing, to find out whether timed steps did their work. Skips emulated cases."""
        arms_with_late_steps = session.arms if self._method.tapes and self._method.checks_late_steps else []
        for arm in arms_with_late_steps:
            if arm is not session.control and not arm.is_emulated:
                with raise_as_arm_failure(arm):
                    self._find_outcome(arm).note(**arm.examine_late_steps(self._worker))

    def _measure_replays(self, session: RoundSession) -> None:
        """Times replays of captured steps (CUDA graphs). Runs last, because a capture may damage an arm's state."""
        arms = [arm for arm in session.arms if arm is not session.control]
        # Only steps that are queued on an accelerator, without emulation, are captured.
        pending_arms = [arm for arm in arms if arm.has_device_queue and self._find_outcome(arm).draft.replays is None]
        replay_pass = StepReplayPass(self._seed, self._make_progress_callback("replaying steps"))
        replays_by_arm_key = replay_pass.measure(pending_arms, self._worker)
        for arm in pending_arms:
            self._find_outcome(arm).note(replays=replays_by_arm_key[arm.key])

    def _warm_up_device(self, first: MeasuredArm, device: DeviceReader) -> DeviceSettling | None:
        """Runs the reference until its device has settled. Returns None if it is emulated, or without a warm-up."""
        if first.is_emulated or not self._method.warm_up_seconds:
            return None
        self._observer.working(first.planned.case, "warming up", 0.0)
        with raise_as_arm_failure(first):
            device_settler = Settler(device, self._method.warm_up_seconds, settles_clock_only=self._method.brisk)
            return device_settler.warm_up_device(first, self._worker)

    def _start_session_watch(self, session: RoundSession) -> SessionWatch | None:
        """Warms the device up, and returns the watch that reads its state between slots. None if no watch is needed."""
        if self._device_meter is None or not session.arms:
            return None
        device = self._device_meter.device
        # A GPU is watched even without sensors, so that its records state why the readings are missing.
        if device.has_no_sensors and not session.arms[0].facts.accelerated:
            return None
        idle_worker, warm_up = self._brisk_untimed_worker, self._warm_up_device(session.arms[0], device)
        has_idle_worker_process = idle_worker is not None and idle_worker.pid is not None
        return SessionWatch(device, warm_up, pid=self._worker.pid, idle_workers=int(has_idle_worker_process))

    def _store_watch_and_energy(self, session: RoundSession, watch: SessionWatch | None) -> None:
        # Leave out the control, because it repeats the reference.
        measured = [(self._find_outcome(arm), arm) for arm in session.arms if arm is not session.control]
        for outcome, arm in measured:
            if watch and not outcome.draft.watch:
                outcome.note(watch=watch.summarise_arm(arm))
        rule = self._method.windows
        if self._device_meter is None or rule is None:
            return
        # Leave out arms for which an earlier session stored energy, or the speed in long windows (`sustained`).
        pending = [(outcome, arm) for outcome, arm in measured if not (outcome.draft.energy or outcome.draft.sustained)]
        # With `sustained_turn_seconds`, an arm runs steps for at least that long in each window.
        activity_text = "running for seconds" if rule.sustained_turn_seconds else "measuring energy"
        window_pass = WindowPass(self._device_meter, rule, self._seed, self._make_progress_callback(activity_text))
        results = window_pass.measure([arm for _, arm in pending], self._worker)
        for outcome, arm in pending:
            result = results[arm.key]
            outcome.note(energy=result.energy_use if rule.energy else None, sustained=tuple(result.turns))
        # Measure the energy of phases only for arms whose whole steps have windows.
        if rule.phases:
            pending = [(outcome, arm) for outcome, arm in pending if results[arm.key].windows]
            report_progress = self._make_progress_callback("measuring energy of phases")
            phase_energy_pass = WindowPass(self._device_meter, rule, self._seed + 2, report_progress)
            phase_energies = phase_energy_pass.measure_phases([arm for _, arm in pending], self._worker)
            power_limits = self._device_meter.read_power_limits()
            for outcome, arm in pending:
                if (energy_use := outcome.draft.energy) is not None:
                    outcome.note(energy=replace(energy_use, phases=phase_energies[arm.key], power_limits=power_limits))

    def _split_session_plan(self, session_plan: _SessionPlan) -> list[_SessionPlan]:
        """Returns smaller sessions that replace a session that does not fit in memory, or [] if it cannot be split."""
        reference, with_control, candidates = session_plan
        if reference is None or not (candidates or with_control):
            return []
        if len(candidates) > 1:
            return [(reference, with_control, [candidate]) for candidate in candidates]
        if with_control:
            return [(reference, False, candidates)]
        # Time reference and candidate in two sessions. The reference may have a timing from an earlier session.
        reference_session_plans: list[_SessionPlan] = [(reference, False, [])] if reference.draft.timing is None else []
        return [*reference_session_plans, (None, False, candidates)]

    def _record_arm_failure(self, failure: ArmFailed) -> None:
        cause, lacked_memory = failure.cause, ran_out_of_memory(failure.cause)
        if not lacked_memory:
            self._worker.restart()  # after an error on a GPU, no further request of the process works
        self._find_outcome(failure.arm).fail_case(OUT_OF_MEMORY if lacked_memory else str(cause), cause)
        if not lacked_memory and failure.arm.facts.accelerated:
            self._check_device(failure.arm)

    def _check_device(self, arm: MeasuredArm) -> None:
        """Marks a device as lost if even a new worker cannot use it. All later cases on it would fail."""
        try:
            self._worker.with_time_limit(HANG_SECONDS).answers(arm.facts)  # raises if the device does not work
        except WorkerError as cause:
            if not ran_out_of_memory(cause):
                self._worker.restart()
                device = arm.planned.case.device
                self._method.lost_devices[device] = f"{device} does not answer a fresh process either: {cause}"
                self._fail_cases_of_lost_devices()

    def _fail_cases_of_lost_devices(self) -> None:
        for outcome in self._list_usable():
            outcome.failure = self._method.lost_devices.get(outcome.planned.case.device, "")

    def _release_session(self, session: RoundSession) -> ArmFailed | None:
        try:
            return session.release_states(self._worker)
        except WorkerError:
            self._worker.restart()
            return None
