"""One group from plan to records: who is measured together, what a fault costs, and the passes after the timing.

A case that fails becomes a record and drops out; the others go on. If the worker itself is lost, the group starts again
in a fresh one without the culprit. If the cases do not fit into memory together, each is measured with the reference
alone, and by itself (label `unpaired`) if even that does not fit.
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
from fp8bench.measure.arm import ArmFailed, CompilingFailed, MeasuredArm, Quantisers, guarding
from fp8bench.measure.capacity import CapacityPass, CapacityRule
from fp8bench.measure.ceilings import ceiling_of
from fp8bench.measure.device_watch import Settler, Watch
from fp8bench.measure.handle import CountingWorker, Worker
from fp8bench.measure.limits import HANG_SECONDS, USUAL, Limits
from fp8bench.measure.passes import OUT_OF_MEMORY, CaseOutcome, Passes, TraceFolder, ran_out_of_memory
from fp8bench.measure.rounds import Choose, Judge, ReplayPass, RoundSession
from fp8bench.measure.sensors.driver import Looks
from fp8bench.measure.sensors.meter import Meter
from fp8bench.measure.windows import WindowPass, WindowRule
from fp8bench.model import Ceilings, DeviceFacts, Group, Measurement, PlannedCase, Record
from fp8bench.model.stopping import Settling, StoppingRule
from fp8bench.protocols import Observer, SilentObserver
from fp8bench.registry import precisions, workloads

# Two workers measure side by side if this many times the memory of one fits into the machine.
_MOST_OF_MEMORY = 4
# The same for the least memory of a small case: workers hold it several times, one of them in fp64.
_MOST_OF_SMALL = 64
_Answers = TypeVar("_Answers")


@dataclass(frozen=True, kw_only=True)
class Method:
    """How a group is measured: when to stop, how long a request may take, and which untimed passes run.

    `ceilings` are keyed by device. `warm_up_seconds` limits how long a device may take to settle; 0 skips the wait.
    `lost` maps a device that no longer answers to the reason, and is shared by all groups. `tapes` and `shares` run in
    a worker that times nothing, unless `tapes_apart` is false. `looks_again` checks steps again after they were timed,
    and measures whether their memory grows. A `brisk` group takes about 10 s on a GPU: what needs a profiler is asked
    of the worker that times nothing, so that no worker has to start again, and `errors` of the run's cases so far are
    not measured twice.
    """

    rule: StoppingRule
    judge: Judge
    seed: int
    limits: Limits = USUAL
    quantisers: Quantisers | None = None
    windows: WindowRule | None = None
    capacity: CapacityRule | None = None
    traces: TraceFolder | None = None
    ceilings: Mapping[str, Ceilings] = field(default_factory=dict)
    warm_up_seconds: float = 0.0
    choose: Choose | None = None
    tapes: bool = False
    tapes_apart: bool = True
    looks_again: bool = True
    shares: bool = False
    brisk: bool = False
    errors: dict[str, tuple[Measurement, ...]] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)


@dataclass
class GroupMeasurement:
    """The state of measuring one group; `run` does all of it.

    `_other` is the worker in which nothing is timed any more; `_second` is one that waits while steps are timed. It
    measures errors while the first worker prepares, and memory while that does other passes.
    """

    _group: Group
    _facts: Mapping[str, DeviceFacts]
    _worker: Worker
    _observer: Observer
    _method: Method
    _meter: Meter | None = None
    _other: Worker | None = None
    _counting: CountingWorker | None = None
    _second: Worker | None = None

    def __post_init__(self) -> None:
        # The order of rounds depends on the group, but not on its place in the run.
        self._seed = random.Random(f"{self._method.seed}:{self._group.setting}").getrandbits(32)
        self._start = time.monotonic()
        self._outcomes = [CaseOutcome(planned) for planned in self._group.cases]
        # Numerical errors that are known before a case is asked for them, by `numbers_key`.
        self._errors = self._method.errors if self._method.brisk else dict[str, tuple[Measurement, ...]]()

    def run(self) -> tuple[Record, ...]:
        """Measures, then runs the passes; returns records in the order of the plan."""
        # 1. Time the sessions. A fault starts all over, because the states that are left may be damaged.
        self._leave_out_lost()
        self._try_products()
        while self._time_sessions() == "again":
            for outcome in self._outcomes:
                outcome.forget()
        led = self._reference()
        # 2. The tape's worker starts now, when it no longer disturbs what is timed.
        if self._other is not None and (self._method.tapes_apart or self._method.shares):
            with suppress(WorkerError):  # whoever asks it first hears why
                self._other.begin()  # nothing is timed any more
        passes = Passes(self._worker, self._facts, self._method.limits, self._observer)
        # 3. Ask everything else about each case, memory in the second worker if there is one.
        with self._memory_by_second_worker() as measured:
            self._ask_about_cases(passes, led, measured is None)
        if measured is not None:
            self._take_memory(passes, measured)
        # 4. The second worker is free again; what follows may need as much memory as there is.
        if self._other is self._second:
            self._record_operators(passes)
        if self._method.capacity is not None:
            limits, rule = self._method.limits, self._method.capacity
            searching = CapacityPass(self._worker, self._facts, limits, self._observer, rule)
            searching.search([case_outcome for case_outcome in self._outcomes if case_outcome.may_fit])
        if self._counting is not None:
            counting = Passes(self._counting, self._facts, self._method.limits, self._observer)
            counting.counters(self._alive(), self._counting.why)
        reference = self._reference()
        for case_outcome in self._alive():
            case_outcome.note(
                ceiling=ceiling_of(case_outcome.planned, self._method.ceilings.get(case_outcome.planned.case.device))
            )
        return tuple(
            case_outcome.record(case_outcome is reference, case_outcome.planned.skip) for case_outcome in self._outcomes
        )

    def _ask_about_cases(self, passes: Passes, led: CaseOutcome | None, with_memory: bool) -> None:
        """Asks the first worker, and the one that times nothing; `led` is the reference of the rounds."""
        # 1. Errors come first: a case that fails there is not asked anything else.
        untimed = self._untimed_passes() or passes
        passes.errors(self._alive(), self._errors)
        reference = self._reference()
        # A reference that failed leaves its candidates without a pair.
        if reference is not led:
            self._unpair()
        if reference is not None:
            passes.ask("statistics", [reference])
        # 2. Memory comes last of those that a profiler's remains may disturb.
        passes.ask("products", self._alive())
        untimed.effects(self._alive())
        passes.transfers(self._alive())
        examined = [outcome for outcome in self._alive() if workloads.get(outcome.planned.case.workload).examined]
        passes.ask("coverage", examined)
        if with_memory:
            untimed.memory(self._alive(), self._meter, self._method.looks_again)
        # 3. Traces and operators run the most foreign code around a step.
        if self._method.traces is not None:
            passes.traces(self._alive(), self._method.traces)
        if self._other is not self._second:
            self._record_operators(passes)

    def _record_operators(self, passes: Passes) -> None:
        """Records tapes and shares last: observing operators may leave a process slower."""
        method = self._method
        if self._other is not None and (method.tapes or method.shares):
            untimed = self._untimed_passes() or Passes(self._other, self._facts, method.limits, self._observer)
            untimed.ask("tape", self._alive() if method.tapes and method.tapes_apart else ())
            untimed.shares(self._alive() if method.shares else ())
            untimed.leave_gpus(self._alive())
        if method.tapes and not method.tapes_apart:
            passes.ask("tape", [outcome for outcome in self._alive() if not outcome.planned.work.setup_seconds])

    @contextmanager
    def _memory_by_second_worker(self) -> Iterator[dict[str, CaseOutcome] | None]:
        """Measures memory in the second worker during the body; yields outcomes by case, complete at its end.

        Yields None on a machine that cannot hold both workers easily: if memory runs out, the kernel may end either.
        """
        measured: dict[str, CaseOutcome] = {}
        peak, least = self._worker.peak_bytes, min(facts.memory_bytes for facts in self._facts.values())
        if self._second is None or peak is None or _MOST_OF_MEMORY * peak > least:
            yield None
            return
        # A step that torch compiles would be compiled once more there.
        waiting = [outcome for outcome in self._alive() if not outcome.planned.work.setup_seconds]
        with self._asking_second_worker(partial(self._measure_memory, self._second), waiting, measured):
            yield measured

    @contextmanager
    def _errors_by_second_worker(self) -> Iterator[None]:
        """Measures errors in the second worker during the body, in which the first one prepares and times nothing.

        Only of cases that are known to be small: nobody knows yet what the first worker will hold.
        """
        small = [CaseOutcome(outcome.planned) for outcome in self._alive() if self._is_small(outcome.planned)]
        if self._second is None or self._errors or not small:
            yield
            return
        passes = Passes(self._second, self._facts, self._method.limits, SilentObserver(), True)
        with self._asking_second_worker(passes.errors, small, self._errors):
            yield

    def _is_small(self, planned: PlannedCase) -> bool:
        least, static = planned.work.least_memory, planned.case.static
        known = least > 0 and static is None and not planned.work.setup_seconds
        return known and _MOST_OF_SMALL * least < self._facts[planned.case.device].memory_bytes

    @contextmanager
    def _asking_second_worker(
        self, ask: Callable[[list[CaseOutcome], _Answers], object], waiting: list[CaseOutcome], answers: _Answers
    ) -> Iterator[None]:
        """Asks the second worker about the waiting cases during the body. If that raises, the request in progress and
        the worker end."""
        assert self._second is not None
        with ThreadPoolExecutor(1) as threads:
            asking = threads.submit(ask, waiting, answers)
            try:
                yield
            except BaseException:
                waiting.clear()
                self._second.restart()
                raise
            asking.result()

    def _take_memory(self, passes: Passes, measured: Mapping[str, CaseOutcome]) -> None:
        """Notes what the second worker has measured; asks the first one about cases that it could not measure."""
        missing = []
        for outcome in self._alive():
            if (other := measured.get(outcome.planned.case.id)) is None:
                missing.append(outcome)
            else:
                outcome.take_memory(other)
        passes.memory(missing, self._meter, self._method.looks_again)

    def _measure_memory(self, worker: Worker, waiting: list[CaseOutcome], measured: dict[str, CaseOutcome]) -> None:
        """Measures the memory of the waiting cases, with compiled quantisers if these were timed with them."""
        passes = Passes(worker, self._facts, self._method.limits, SilentObserver(), True)
        while waiting:
            timed = waiting.pop(0)
            case, timing = timed.planned.case, timed.draft.timing
            try:
                if timing is not None and timing.fused:
                    arm = MeasuredArm(case.id, timed.planned, self._facts[case.device], self._method.limits)
                    arm.prepare(worker, Quantisers())
                    arm.release(worker)
            except (WorkerError, CompilingFailed):
                return  # the first worker has them
            # Its own outcome, because the first worker's passes write into the other meanwhile.
            measured[case.id] = CaseOutcome(timed.planned)
            passes.memory([measured[case.id]], self._meter, self._method.looks_again)

    def _untimed_passes(self) -> Passes | None:
        """Returns the passes by the worker that times nothing, or None where the timing worker does them.

        On a processor nobody restarts a worker after a profiler, so that starting another one would only cost time.
        """
        accelerated = any(self._facts[outcome.planned.case.device].accelerated for outcome in self._outcomes)
        if self._apart is None or not accelerated:
            return None
        return Passes(self._apart, self._facts, self._method.limits, self._observer, True)

    @property
    def _apart(self) -> Worker | None:
        """The second process of a brisk group, None elsewhere."""
        return self._other if self._method.brisk and self._other is not self._worker else None

    def _try_products(self) -> None:
        for outcome in filter(_has_native_products, self._alive()):
            case, limits = outcome.planned.case, self._method.limits
            try:
                wrong = self._worker.within(limits.first(outcome.planned.work)).trial(case, self._facts[case.device])
            except WorkerError as cause:
                outcome.fail(f"its products could not be tried: {cause}", cause)
                self._worker.restart()
                continue
            if wrong:
                outcome.refuse(wrong)

    def _unpair(self) -> None:
        """Where the first reference failed by its numbers, the next one shared no rounds with others."""
        if all(outcome.draft.paired and outcome.draft.paired_with is None for outcome in self._outcomes):
            return
        for outcome in self._outcomes:
            outcome.note(paired=False, paired_with=None, control=None, fresh=None)

    def _alive(self) -> list[CaseOutcome]:
        return [outcome for outcome in self._outcomes if outcome.planned.runs and not outcome.failure]

    def _reference(self) -> CaseOutcome | None:
        planned = self._outcomes[self._group.reference]
        alive = self._alive()
        if planned in alive or not alive:
            return planned if planned in alive else None
        native = [outcome for outcome in alive if outcome.planned.support.is_native]
        return min(native or alive, key=lambda case_outcome: precisions.get(case_outcome.planned.case.precision).rank)

    def _time_sessions(self) -> str:
        """Times all sessions; returns 'again' if a fault means that the group must start over."""
        reference = self._reference()
        if reference is None:
            return "done"
        candidates = [outcome for outcome in self._alive() if outcome is not reference]
        # Sessions that do not fit in memory together are split and put in front of the queue.
        waiting: list[tuple[CaseOutcome | None, bool, list[CaseOutcome]]] = [(reference, True, candidates)]
        while waiting:
            leader, with_control, candidates = waiting.pop(0)
            session = self._session(leader, with_control, candidates)
            failed: ArmFailed | None = None
            try:
                self._measure_session(session, len(waiting) + 1)
            except ArmFailed as raised:
                failed = raised
            except CompilingFailed:
                return "again"  # in a fresh worker, and without compiling
            finally:
                left_over = self._release(session)
            failed = failed or left_over
            if failed is None:
                continue
            # Only memory is worth another try: the same arms fit in smaller sessions.
            smaller = (
                self._smaller_sessions(leader, with_control, candidates) if ran_out_of_memory(failed.cause) else []
            )
            if not smaller:
                self._fail(failed)
                return "again"
            waiting[:0] = smaller
        return "done"

    def _session(self, leader: CaseOutcome | None, with_control: bool, candidates: list[CaseOutcome]) -> RoundSession:
        def arm(outcome: CaseOutcome, suffix: str = "") -> MeasuredArm:
            case = outcome.planned.case
            return MeasuredArm(case.id + suffix, outcome.planned, self._facts[case.device], self._method.limits)

        control = leader and with_control and leader.planned.support.is_native
        return RoundSession(
            arm(leader) if leader else None,
            arm(leader, "'") if leader and control else None,
            list(map(arm, candidates)),
        )

    def _outcome_of(self, arm: MeasuredArm) -> CaseOutcome:
        return next(outcome for outcome in self._outcomes if outcome.planned is arm.planned)

    def _teller(self, doing: str) -> Callable[[MeasuredArm, float], None]:
        return lambda arm, share: self._observer.working(arm.planned.case, doing, share)

    def _measure_session(self, session: RoundSession, sessions: int) -> None:
        # 1. Build and size all arms.
        for arm in session.arms:
            doing = "finding scales" if arm.planned.case.static else "preparing"
            self._observer.working(arm.planned.case, doing, 0.0)
        method = self._method
        with self._errors_by_second_worker():
            session.prepare(
                self._worker, method.quantisers, lambda arm, doing: self._observer.working(arm.planned.case, doing, 0.0)
            )
        # 2. Time rounds until the rule ends them.
        watch = self._watch(session)
        after_slot = watch.look if watch else None
        stopped = session.run(
            self._worker,
            method.rule.after(time.monotonic() - self._start, sessions),
            method.judge,
            self._seed,
            self._teller("measuring"),
            after=after_slot,
        )
        # 3. Time the fastest again: a figure chosen for being the best is too good.
        chosen = None
        if method.choose is not None:
            tell = self._teller("timing the fastest again")
            chosen = session.fastest_again(method.choose, self._worker, method.rule, self._seed + 1, tell, after_slot)
        if watch:
            watch.end()
        self._check_work(session)  # before any code of the suite is called that is not called in rounds
        session.check(self._worker)
        pairing = {}
        # 4. Note what was timed.
        if (leader := session.reference) is not None:
            reference, control = leader.timing(), session.control.timing() if session.control else None
            if self._outcome_of(leader).draft.timing is None:
                self._outcome_of(leader).note(**leader.record_fields(), control=control, stopped=stopped)
            else:  # a separate session: its reference samples belong to this comparison
                pairing = {"paired_with": reference, "control": control}
        for arm in session.candidates:
            self._outcome_of(arm).note(**arm.record_fields(), stopped=stopped, paired=leader is not None, **pairing)
        if chosen is not None:
            self._outcome_of(chosen[0]).note(fresh=chosen[1])
        # 5. Energy windows and replays follow, where they cannot disturb what is timed.
        self._note_watch_and_energy(session, watch)
        self._replay(session)

    def _check_work(self, session: RoundSession) -> None:
        """Checks whether timed steps do the work that others do; the time of an emulated case is not a speed."""
        for arm in session.arms if self._method.tapes and self._method.looks_again else ():
            if arm is not session.control and not arm.is_emulated:
                with guarding(arm):
                    self._outcome_of(arm).note(**arm.work_fields(self._worker))

    def _replay(self, session: RoundSession) -> None:
        """Times steps without their launches, last of all, because that spoils the states."""
        arms = [arm for arm in session.arms if arm is not session.control]
        due = [arm for arm in arms if arm.queues and self._outcome_of(arm).draft.replays is None]
        replays = ReplayPass(self._seed, self._teller("replaying steps")).measure(due, self._worker)
        for arm in due:
            self._outcome_of(arm).note(replays=replays[arm.key])

    def _warm_up(self, first: MeasuredArm, device: Looks) -> Settling | None:
        """Runs the reference until its device has settled. An emulated reference is not warmed up, because its time is
        not a speed."""
        if first.is_emulated or not self._method.warm_up_seconds:
            return None
        self._observer.working(first.planned.case, "warming up", 0.0)
        with guarding(first):
            settler = Settler(device, self._method.warm_up_seconds, brisk=self._method.brisk)
            return settler.settle(first, self._worker)

    def _watch(self, session: RoundSession) -> Watch | None:
        """Warms the device up, and returns what looks at it between slots; None for a processor without sensors."""
        if self._meter is None or not session.arms:
            return None
        device = self._meter.device
        if device.silent and not session.arms[0].facts.accelerated:
            return None
        idle_workers = int(self._apart is not None and self._apart.pid is not None)
        return Watch(device, self._warm_up(session.arms[0], device), pid=self._worker.pid, idle_workers=idle_workers)

    def _note_watch_and_energy(self, session: RoundSession, watch: Watch | None) -> None:
        # The control repeats the reference, so its energy would be counted twice.
        measured = [(self._outcome_of(arm), arm) for arm in session.arms if arm is not session.control]
        for outcome, arm in measured:
            if watch and not outcome.draft.watch:
                outcome.note(watch=watch.summarise(arm))
        rule = self._method.windows
        if self._meter is None or rule is None:
            return
        due = [(outcome, arm) for outcome, arm in measured if not (outcome.draft.energy or outcome.draft.sustained)]
        doing = "running for seconds" if rule.turn_seconds else "measuring energy"
        windows = WindowPass(self._meter, rule, self._seed, self._teller(doing))
        results = windows.measure([arm for _, arm in due], self._worker)
        for outcome, arm in due:
            outcome.note(energy=results[arm.key].use if rule.energy else None, sustained=tuple(results[arm.key].turns))
        # Phases are metered only where whole steps could be.
        if rule.phases:
            due = [(outcome, arm) for outcome, arm in due if results[arm.key].windows]
            phases = WindowPass(self._meter, rule, self._seed + 2, self._teller("measuring energy of phases"))
            parts, limits = phases.phases([arm for _, arm in due], self._worker), self._meter.power_limits()
            for outcome, arm in due:
                if outcome.draft.energy is not None:
                    outcome.note(energy=replace(outcome.draft.energy, phases=parts[arm.key], power_limits=limits))

    def _smaller_sessions(
        self, leader: CaseOutcome | None, with_control: bool, candidates: list[CaseOutcome]
    ) -> list[tuple[CaseOutcome | None, bool, list[CaseOutcome]]]:
        if leader is None:
            return []
        if len(candidates) > 1:
            return [(leader, with_control, [candidate]) for candidate in candidates]
        if with_control:
            return [(leader, False, candidates)]
        if candidates:
            return [(leader, False, [])] * (leader.draft.timing is None) + [(None, False, candidates)]
        return []

    def _fail(self, failed: ArmFailed) -> None:
        cause = failed.cause
        if not ran_out_of_memory(cause):
            self._worker.restart()  # after an error on a GPU nothing in that process works any more
        self._outcome_of(failed.arm).fail(OUT_OF_MEMORY if ran_out_of_memory(cause) else str(cause), cause)
        if not ran_out_of_memory(cause) and failed.arm.facts.accelerated:
            self._check_device(failed.arm)

    def _check_device(self, arm: MeasuredArm) -> None:
        """A device that does not answer a fresh worker either would fail every later case, each after a worker's
        start."""
        try:
            self._worker.within(HANG_SECONDS).answers(arm.facts)
        except WorkerError as cause:
            if not ran_out_of_memory(cause):
                self._worker.restart()
                device = arm.planned.case.device
                self._method.lost[device] = f"{device} does not answer a fresh process either: {cause}"
                self._leave_out_lost()

    def _leave_out_lost(self) -> None:
        for outcome in self._alive():
            outcome.failure = self._method.lost.get(outcome.planned.case.device, "")

    def _release(self, session: RoundSession) -> ArmFailed | None:
        try:
            return session.release(self._worker)
        except WorkerError:
            self._worker.restart()
            return None


def _has_native_products(outcome: CaseOutcome) -> bool:
    case, native = outcome.planned.case, outcome.planned.support.is_native
    mapped = (name for _, name in case.precision_map)
    chosen = [precisions.get(word) for word in (case.precision, *mapped)]
    return any(precision.whole_layers or (native and precision.takes_backend) for precision in chosen)
