"""Measures a duel: two interpreters or two revisions, in the same rounds."""

from __future__ import annotations

import contextlib
import math
import os
import random
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from fp8bench.errors import Fp8benchError, StoreError, UsageError, WorkerError
from fp8bench.features.duel.kind import DuelKind, DuelWriter, start_duel
from fp8bench.features.duel.partners import PROCESSES_PER_SIDE, DuelSideWorkers, HandshakeWorker, restart_workers
from fp8bench.features.duel.sides import EQUAL_SIDES_NOTE, DuelQuestion, open_duel_sides
from fp8bench.features.duel.values import (
    AFTER,
    BEFORE,
    CaseResult,
    CaseSession,
    Duel,
    DuelCutOff,
    DuelSide,
    NoCommonCases,
)
from fp8bench.features.duel.verdicts import MIN_ROUNDS
from fp8bench.jobs.observer import JobObserver, ReportProgress
from fp8bench.measure.arm import ArmFailed, CompilingFailed, MeasuredArm, QuantiserCompilation, raise_as_arm_failure
from fp8bench.measure.environment import command_line, gather
from fp8bench.measure.handle import Worker
from fp8bench.measure.interrupts import hold_back_interrupts, ignore_interrupts
from fp8bench.measure.limits import RequestTimeLimits
from fp8bench.measure.passes import CaseOutcome, Passes, ran_out_of_memory
from fp8bench.measure.rounds import MAX_DISCARD_STEP_SECONDS, RoundOrders
from fp8bench.model import Case, Environment, PlannedCase, Request, Timing
from fp8bench.model.raw import Settings
from fp8bench.model.stopping import CEILING_SECONDS, QUICK_ROUNDS, StoppingRule
from fp8bench.pipeline import divide_budget, now
from fp8bench.plan.resolve import resolve_request
from fp8bench.protocols import Observer, SilentObserver
from fp8bench.registry import workloads
from fp8bench.report.words.naming import join_words
from fp8bench.store.runs.run_file import check_store
from fp8bench.user_code import user_module

SESSIONS, _QUICK_SESSIONS = 4, 1
_DEFAULT_SESSION_SECONDS = 2.5
_MIN_SESSION_ROUNDS = 10
# A note for a duel whose sides run the same code. It is stored in the duel, and readers of stored duels recognize the
# note by this text.
NO_CODE_LOADED_NOTE = (
    "neither side has loaded any code of this repository, so that they differ by nothing but noise: --import MODULE "
    "names what uses it"
)


SideWorkersPair = tuple[DuelSideWorkers, DuelSideWorkers]


@dataclass
class DuelArm:
    """An arm, with the worker that holds only this arm."""

    side: str
    worker: Worker
    arm: MeasuredArm
    quantisers: QuantiserCompilation


@dataclass
class DuelSessionArms:
    """The arms of both sides in one session. Both sides have the same number of arms. Their order is drawn from the
    seed, so that neither side always comes first.
    """

    entries: Sequence[DuelArm]
    seed: int

    def measure(self, rule: StoppingRule, tell: Callable[[str], None]) -> CaseSession:
        order_generator = random.Random(self.seed)
        start_seconds = time.monotonic()
        self._prepare_states(order_generator, tell)
        tell("measuring")
        stop_reason = self._run_rounds(
            RoundOrders(order_generator), rule, start_seconds if rule.whole else time.monotonic()
        )
        for entry in self.entries:
            with raise_as_arm_failure(entry.arm):
                entry.arm.check_states(entry.worker)
        return CaseSession(self._list_side_timings(BEFORE), self._list_side_timings(AFTER), stop_reason)

    def _list_side_timings(self, side: str) -> tuple[Timing, ...]:
        return tuple(entry.arm.timing() for entry in self.entries if entry.side == side)

    def find_duel_entry(self, arm: MeasuredArm) -> DuelArm:
        return next(entry for entry in self.entries if entry.arm is arm)

    def release(self) -> ArmFailed | None:
        """Releases the states of all arms. Returns a failure if an arm has left threads running."""
        failure = None
        for entry in self.entries:
            try:
                release_failure = entry.arm.release_states(entry.worker)
            except WorkerError:
                # A new process holds no states, so nothing is left to release.
                entry.worker.restart()
                continue
            failure = failure or release_failure
        return failure

    def _prepare_states(self, order: random.Random, tell: Callable[[str], None]) -> None:
        shuffled_duel_entries = [*self.entries]
        order.shuffle(shuffled_duel_entries)
        for entry in shuffled_duel_entries:
            tell(f"preparing side {entry.side} of")
            with raise_as_arm_failure(entry.arm):
                entry.arm.prepare(entry.worker, entry.quantisers, lambda arm, doing: tell(doing))
        arms = [entry.arm for entry in self.entries]
        for arm in arms[1:]:
            arm.match_cells(arms[0])
        for arm in arms:
            # All arms make equally many calls: a minimum over more calls would be lower for that reason alone.
            arm.calls = min(measured_arm.calls for measured_arm in arms)
            # Another process runs before each turn of this one, so caches are cold and the core may have changed.
            # Discard the first call of a turn if steps are short.
            arm.untimed_call_count = 1 if arm.step_seconds < MAX_DISCARD_STEP_SECONDS else 0

    def _run_rounds(self, orders: RoundOrders[DuelArm], rule: StoppingRule, start: float) -> str:
        rounds = 0
        end_reason = ""
        while not end_reason:
            for position, entry in enumerate(orders.draw_round_order(self.entries)):
                with raise_as_arm_failure(entry.arm):
                    entry.arm.run(entry.worker, rounds, position)
            rounds += 1
            end_reason = rule.reason_to_end(rounds, time.monotonic() - start)
        return end_reason


@dataclass
class DuelCaseProgress:
    """The progress of one case. `left_out` is the reason why it is not measured, or ''. `processes` is the number of
    processes per side that fit into memory, as far as known.
    """

    before: CaseOutcome
    after: CaseOutcome
    left_out: str = ""
    sessions: list[CaseSession] = field(default_factory=list)
    processes: int = PROCESSES_PER_SIDE

    @property
    def is_active(self) -> bool:
        return not (self.left_out or self.before.failure or self.after.failure)

    @property
    def result(self) -> CaseResult:
        record_before = self.before.make_record(True, self.left_out)
        record_after = self.after.make_record(False, self.left_out)
        return CaseResult(record_before, record_after, tuple(self.sessions))


def make_case_progress(case: str, pair: SideWorkersPair) -> DuelCaseProgress:
    side_a_outcome, side_b_outcome = (CaseOutcome(side.cases[case]) for side in pair)
    skip_reason = _explain_unequal_case(pair, (side_a_outcome.planned, side_b_outcome.planned))
    for outcome in (side_a_outcome, side_b_outcome):
        outcome.note(paired=not skip_reason)
    return DuelCaseProgress(side_a_outcome, side_b_outcome, skip_reason)


def _explain_unequal_case(pair: SideWorkersPair, planned_sides: tuple[PlannedCase, PlannedCase]) -> str:
    skip_reason_texts = [
        f"side {side.name}: {case.skip}" for side, case in zip(pair, planned_sides, strict=True) if case.skip
    ]
    if skip_reason_texts:
        return "; ".join(skip_reason_texts)
    suite = planned_sides[0].case.workload
    suite_versions = [side.versions.get(suite) for side in pair]
    sides_without_suite = [side.name for side, version in zip(pair, suite_versions, strict=True) if version is None]
    if sides_without_suite:
        return f"side {' and side '.join(sides_without_suite)} has no suite {suite!r}"
    if suite_versions[0] != suite_versions[1]:
        return (
            f"suite {suite} has version {suite_versions[0]} on side {BEFORE} and {suite_versions[1]} on side {AFTER}: "
            "what a step does has changed, so their times cannot be compared"
        )
    return ""


@dataclass(frozen=True)
class DuelCaseRunner:
    """Measures the times, errors and memory of each case on both sides of a duel."""

    side_pair: SideWorkersPair
    seed: int
    observer: Observer
    limits: RequestTimeLimits

    def measure(self, case: DuelCaseProgress, number: int, rule: StoppingRule) -> None:
        """Measures session `number` of a case until `rule` ends it. If not all processes fit into memory, uses fewer of
        them on each side."""
        planned_case = case.before.planned.case
        seed = random.Random(f"{self.seed}:{number}:{planned_case.id}").getrandbits(32)
        while True:
            entries = []
            for side, outcome in zip(self.side_pair, (case.before, case.after), strict=True):
                entries += [self._make_duel_entry(side, outcome.planned, place) for place in range(case.processes)]
            duel_session_arms = DuelSessionArms(entries, seed)
            failure: ArmFailed | None = None
            try:
                session = duel_session_arms.measure(rule, lambda doing: self.observer.working(planned_case, doing, 0.0))
            except ArmFailed as raised:
                failure = raised
            except CompilingFailed as raised:
                duel_session_arms.find_duel_entry(raised.arm).worker.restart()
                continue  # retry in a new worker, without compiling
            finally:
                release_failure = duel_session_arms.release()
            failure = failure or release_failure
            if failure is None:
                case.sessions.append(session)
                return
            is_out_of_memory = ran_out_of_memory(failure.cause)
            if is_out_of_memory and case.processes > 1:
                case.processes -= 1
                continue
            duel_entry = duel_session_arms.find_duel_entry(failure.arm)
            outcome = case.before if duel_entry.side == BEFORE else case.after
            if is_out_of_memory:
                outcome.fail_case("out of memory next to the other side", failure.cause)
            else:
                duel_entry.worker.restart()
                outcome.fail_case(str(failure.cause), failure.cause)
                self._try_case_on_other_side(duel_entry.side, case, seed)
            return

    def _try_case_on_other_side(self, failed_side: str, case: DuelCaseProgress, seed: int) -> None:
        """Tests whether a failed case also fails on the other side, so that chance does not decide which side is
        reported as failing.
        """
        side, outcome = (self.side_pair[1], case.after) if failed_side == BEFORE else (self.side_pair[0], case.before)
        duel_entry = self._make_duel_entry(side, outcome.planned, 0)
        duel_session_arms = DuelSessionArms([duel_entry], seed)
        try:
            duel_session_arms.measure(StoppingRule(fixed=1, ceiling=CEILING_SECONDS, whole=True), lambda doing: None)
        except (ArmFailed, CompilingFailed) as raised:
            duel_entry.worker.restart()
            if isinstance(raised, ArmFailed):
                outcome.fail_case(str(raised.cause), raised.cause)
        finally:
            duel_session_arms.release()

    def measure_errors_and_memory(self, case: DuelCaseProgress) -> None:
        for side, outcome in zip(self.side_pair, (case.before, case.after), strict=True):
            untimed_passes = Passes(side.workers[0], side.facts, self.limits, self.observer)
            untimed_passes.measure_errors([outcome])
            if not outcome.failure:
                untimed_passes.measure_memory([outcome])

    def _make_duel_entry(self, side: DuelSideWorkers, planned_case: PlannedCase, process: int) -> DuelArm:
        case = planned_case.case
        may_compile = workloads.get(case.workload).fused
        side_quantisers = (
            side.quantisers if may_compile else QuantiserCompilation("this suite does not compile emulated casts")
        )
        arm = MeasuredArm(case.id, planned_case, side.facts[case.device], self.limits)
        return DuelArm(side.name, side.workers[process], arm, side_quantisers)


def count_default_sessions(request: Request) -> int:
    """Returns the default number of sessions of a duel."""
    return _QUICK_SESSIONS if request.quick else SESSIONS


def run_duel(
    question: DuelQuestion, request: Request, store: Path, observer: JobObserver, only_cases: Collection[str] = ()
) -> Duel:
    """Measures both sides and stores the duel. `only_cases` are the ids of the cases to measure; by default all."""
    # 1. Reject invalid requests before code is copied or built.
    if request.ranks is not None:
        raise UsageError(f"a side of a duel is one process, but --ranks asks for {request.ranks}. Omit --ranks.")
    resolved_request = resolve_request(request, os.environ)
    check_store(store)
    corpus = resolved_request.corpus(store)
    start = time.monotonic()
    sessions = question.sessions or count_default_sessions(request)
    # 2. Open both sides; step 3 starts their first processes. If anything fails, processes end and folders are removed.
    with ExitStack() as stack:
        *starts, notes = stack.enter_context(open_duel_sides(question, request.imports))
        sides = []
        for side_start in starts:
            settings = Settings(request.threads, request.seed, side_start.imports, corpus.path if corpus else None)
            workers = [HandshakeWorker(settings, side_start) for _ in range(PROCESSES_PER_SIDE)]
            quantisers = QuantiserCompilation(resolved_request.switches.why_eager)
            sides.append(stack.enter_context(closing(DuelSideWorkers(side_start, workers, quantisers))))
        # 3. Ask each side which cases its code has.
        corpus_identity = corpus.identity if corpus else None
        names = [suite.name for suite in resolved_request.suites]
        with observer.counting() as tell:
            for side_number, ready_side in enumerate(sides):
                tell(side_number, len(sides), "sides", "starting workers")
                ready_side.plan_cases(request, names, corpus_identity)
        # 4. Keep the cases that both sides have.
        side_a, side_b = sides
        cases = tuple(name for name in side_a.cases if name in side_b.cases)
        if not cases:
            raise NoCommonCases(
                f"the sides have no case in common: A would measure {next(iter(side_a.cases))}, but B "
                f"{next(iter(side_b.cases))}. Give --devices that both sides have."
            )
        selected_cases = tuple(name for name in cases if not only_cases or name in only_cases)
        if not selected_cases:
            raise UsageError(f"the sides do not have the requested case {next(iter(only_cases))}.")
        # 5. Collect the header of the duel, and notes about cases that are not compared.
        duel = Duel(
            secrets.token_hex(4),
            now(),
            command_line(),
            request,
            _describe_duel_side(side_a, request),
            _describe_duel_side(side_b, request),
            selected_cases,
            sessions,
        )
        remarks: list[str] = [*notes]
        for side, opponent in ((side_a, side_b), (side_b, side_a)):
            if missing_cases := [name for name in side.cases if name not in opponent.cases]:
                remarks.append(f"only side {side.name} has {join_words(missing_cases, 2)}: not compared")
        return _measure_sessions((side_a, side_b), duel, remarks, store, observer, start)


def _measure_sessions(
    pair: SideWorkersPair, duel: Duel, notes: Sequence[str], store: Path, observer: JobObserver, start: float
) -> Duel:
    writer = start_duel(duel, store)
    duel = replace(duel, path=str(writer.path))
    cases = [make_case_progress(case, pair) for case in duel.cases]
    try:
        _check_loaded_revision(pair)
        if pair[1].start.commit:  # warn early that both sides may run the same code
            for note in (*(note for note in notes if note == EQUAL_SIDES_NOTE), *_note_unused_working_tree(pair)):
                observer.note(f"{note}. Ctrl-C ends the duel")
        for note in notes:
            writer.note(note)
        with observer.counting() as tell:
            _measure_all_sessions(pair, duel, cases, writer, SessionProgress(tell, len(cases) * duel.sessions), start)
        for note in _note_unused_working_tree(pair):
            writer.note(note)
        writer.finish("finished")
    except KeyboardInterrupt:
        with ignore_interrupts():
            with contextlib.suppress(StoreError):  # a duel file without its last line counts as unfinished
                writer.finish("interrupted")
            observer.note(f"interrupted; finished sessions are stored in {writer.path}")
    except Fp8benchError as error:
        results = tuple(case.result for case in cases if case.sessions)
        if results:  # keep the results that were measured before the error
            raise DuelCutOff(error, replace(duel, results=results, troubles=(str(error),))) from None
        # A duel without any result is not kept.
        writer.path.unlink(missing_ok=True)
        raise
    finally:
        writer.close()
    with ignore_interrupts():
        return DuelKind().load(writer.path)


class SessionProgress(SilentObserver):
    """Reports how many sessions of all cases are finished."""

    def __init__(self, tell: ReportProgress, total: int) -> None:
        self._tell = tell
        self._total = total
        self.done = 0

    def show_activity(self, activity: str) -> None:
        self._tell(self.done, self._total, "sessions of cases", activity)

    def working(self, case: Case, doing: str, finished_share: float) -> None:
        self.show_activity(f"{doing} {case.id}")


def _measure_all_sessions(
    pair: SideWorkersPair,
    duel: Duel,
    cases: Sequence[DuelCaseProgress],
    writer: DuelWriter,
    progress: SessionProgress,
    start: float,
) -> None:
    request = duel.request
    sessions = duel.sessions
    runner = DuelCaseRunner(pair, request.seed, progress, RequestTimeLimits(request.case_timeout))
    for session_number in range(sessions):
        progress.show_activity("starting workers")
        worker_restart_start = time.monotonic()
        restart_workers(pair, request.seed, session_number)
        # Reserve time for the restarts of later sessions. The first session only starts half of the workers, because
        # the others already run, so its time is doubled.
        remaining_restart_seconds = (
            (time.monotonic() - worker_restart_start) * (1 if session_number else 2) * (sessions - 1 - session_number)
        )
        for position, case in enumerate(cases):
            progress.done = session_number * len(cases) + position
            is_case_active = case.is_active
            remaining_case_sessions = (sessions - session_number) * len(cases) - position
            if is_case_active:
                session_seconds = divide_budget(
                    request.budget, start - remaining_restart_seconds, remaining_case_sessions
                )
                runner.measure(case, session_number, _choose_stopping_rule(request, session_seconds))
            if case.is_active and session_number == 0:
                _check_loaded_revision(pair)  # check again: the case may have imported more code of the user
                runner.measure_errors_and_memory(case)
            with hold_back_interrupts():  # an interrupt must not separate a case from its session
                # The first session writes the case, and later ones add their samples. A case that fails later is
                # written again.
                if session_number == 0 or (is_case_active and not case.is_active):
                    writer.write_result(case.result)
                elif is_case_active:
                    writer.write_session(case.result.after.case.id, case.sessions[-1])


def _choose_stopping_rule(request: Request, session_seconds: float | None) -> StoppingRule:
    session_limit_seconds = math.inf if session_seconds is None else session_seconds
    if request.rounds is not None:
        return StoppingRule(fixed=request.rounds, ceiling=session_limit_seconds, whole=True)
    if request.quick:
        return StoppingRule(fixed=QUICK_ROUNDS, ceiling=min(session_limit_seconds, CEILING_SECONDS), whole=True)
    if session_seconds is not None:
        return StoppingRule(least=MIN_ROUNDS, budget=session_seconds, ceiling=session_seconds, whole=True)
    return StoppingRule(least=_MIN_SESSION_ROUNDS, budget=_DEFAULT_SESSION_SECONDS, ceiling=CEILING_SECONDS)


def _describe_duel_side(side: DuelSideWorkers, request: Request) -> DuelSide:
    """Returns the description of a side. Its environment has the facts that its worker reported. Facts of this process
    fill the gaps."""
    worker = side.workers[0]
    start = side.start
    # This process computes the digests of imports from the files of this working tree. The digests are not valid for
    # a side with other files.
    imports = request.imports if start.imports == request.imports else ()
    environment_here = gather(
        worker.software(), str(worker.handshake["fp8bench"]), request.threads, imports, folder=start.working_tree
    )
    environment = Environment({**environment_here.facts, **worker.handshake})
    return DuelSide(start.name, start.title, start.python, start.commit, environment, side.devices)


def _note_unused_working_tree(pair: SideWorkersPair) -> list[str]:
    working_tree = pair[1].start.working_tree
    if working_tree is None:
        return []
    modules = set(pair[1].workers[0].modules_under(working_tree))
    return [] if modules - _find_shared_modules(pair[0].start.imports) else [NO_CODE_LOADED_NOTE]


def _check_loaded_revision(pair: SideWorkersPair) -> None:
    """Raises UsageError if side A has loaded code of this working tree instead of its revision."""
    side_a, side_b = (side.start for side in pair)
    if side_a.working_tree is None or side_b.working_tree is None:
        return
    worker = pair[0].workers[0]
    misloaded_modules = (
        set(worker.modules_under(side_b.working_tree))
        - set(worker.modules_under(side_a.working_tree))
        - _find_shared_modules(side_a.imports)
    )
    if misloaded_modules:
        raise UsageError(
            f"side A has loaded {', '.join(sorted(misloaded_modules)[:5])} from this tree instead of {side_a.title}: "
            "installed packages take precedence over PYTHONPATH. Uninstall the package, or install it "
            "with `pip install -e`."
        )


def _find_shared_modules(imports: Sequence[str]) -> set[str]:
    return {user_module(name) for name in imports if name.endswith(".py")}
