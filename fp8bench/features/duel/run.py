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
from fp8bench.features.duel.partners import PROCESSES, PartnerWorker, SideWorkers, refresh
from fp8bench.features.duel.sides import SAME, DuelQuestion, open_sides
from fp8bench.features.duel.values import (
    AFTER,
    BEFORE,
    CaseResult,
    Duel,
    DuelCutOff,
    DuelSide,
    NothingInCommon,
    Session,
)
from fp8bench.features.duel.verdicts import LEAST_ROUNDS
from fp8bench.jobs.observer import JobObserver, Tell
from fp8bench.measure.arm import ArmFailed, CompilingFailed, MeasuredArm, Quantisers, guarding
from fp8bench.measure.environment import command_line, gather
from fp8bench.measure.handle import Worker
from fp8bench.measure.interrupts import hold_back_interrupts, ignore_interrupts
from fp8bench.measure.limits import Limits
from fp8bench.measure.passes import CaseOutcome, Passes, ran_out_of_memory
from fp8bench.measure.rounds import WARMED_BELOW_SECONDS, Orders
from fp8bench.model import Case, Environment, PlannedCase, Request, Timing
from fp8bench.model.raw import Settings
from fp8bench.model.stopping import CEILING_SECONDS, QUICK_ROUNDS, StoppingRule
from fp8bench.pipeline import now, share_of
from fp8bench.plan.resolve import resolve
from fp8bench.protocols import Observer, SilentObserver
from fp8bench.registry import workloads
from fp8bench.report.words.naming import join_words
from fp8bench.store.runs.run_file import check_store
from fp8bench.user_code import user_module

SESSIONS, _QUICK_SESSIONS = 4, 1
_SESSION_SECONDS = 2.5
_LEAST_ROUNDS = 10
IDLE = (
    "neither side has loaded any code of this repository, so that they differ by nothing but noise: --import MODULE "
    "names what uses it"
)


Pair = tuple[SideWorkers, SideWorkers]


@dataclass
class DuelEntry:
    """An arm, and the worker that holds only this arm."""

    side: str
    worker: Worker
    arm: MeasuredArm
    quantisers: Quantisers


@dataclass
class DuelTurns:
    """The entries of both sides, equally many of each. Their order is drawn from the seed, so that neither side is
    always first."""

    entries: Sequence[DuelEntry]
    seed: int

    def measure(self, rule: StoppingRule, tell: Callable[[str], None]) -> Session:
        order, begun = random.Random(self.seed), time.monotonic()
        self._prepare(order, tell)
        tell("measuring")
        stopped = self._run(Orders(order), rule, begun if rule.whole else time.monotonic())
        for entry in self.entries:
            with guarding(entry.arm):
                entry.arm.check(entry.worker)
        return Session(self._timings(BEFORE), self._timings(AFTER), stopped)

    def _timings(self, side: str) -> tuple[Timing, ...]:
        return tuple(entry.arm.timing() for entry in self.entries if entry.side == side)

    def entry_of(self, arm: MeasuredArm) -> DuelEntry:
        return next(entry for entry in self.entries if entry.arm is arm)

    def release(self) -> ArmFailed | None:
        """Releases all states; returns a failure if an arm has left threads running."""
        culprit = None
        for entry in self.entries:
            try:
                failed = entry.arm.release(entry.worker)
            except WorkerError:
                entry.worker.restart()
                continue
            culprit = culprit or failed
        return culprit

    def _prepare(self, order: random.Random, tell: Callable[[str], None]) -> None:
        turn = [*self.entries]
        order.shuffle(turn)
        for entry in turn:
            tell(f"preparing side {entry.side} of")
            with guarding(entry.arm):
                entry.arm.prepare(entry.worker, entry.quantisers, lambda arm, doing: tell(doing))
        arms = [entry.arm for entry in self.entries]
        for arm in arms[1:]:
            arm.cut_like(arms[0])
        for arm in arms:
            # A minimum over more calls would be lower for that reason alone.
            arm.calls = min(measured_arm.calls for measured_arm in arms)
            # Another process has run before each slot, so caches are cold and the core may have changed.
            arm.discard = 1 if arm.step_seconds < WARMED_BELOW_SECONDS else 0

    def _run(self, orders: Orders[DuelEntry], rule: StoppingRule, start: float) -> str:
        rounds, ended = 0, ""
        while not ended:
            for place, entry in enumerate(orders.next(self.entries)):
                with guarding(entry.arm):
                    entry.arm.run(entry.worker, rounds, place)
            rounds += 1
            ended = rule.reason_to_end(rounds, time.monotonic() - start)
        return ended


@dataclass
class CaseProgress:
    """The progress of one case. `left_out` is why it is not measured, '' if it is. `processes` is how many per side are
    known to fit into memory."""

    before: CaseOutcome
    after: CaseOutcome
    left_out: str = ""
    sessions: list[Session] = field(default_factory=list)
    processes: int = PROCESSES

    @property
    def alive(self) -> bool:
        return not (self.left_out or self.before.failure or self.after.failure)

    @property
    def result(self) -> CaseResult:
        record_a, record_b = self.before.record(True, self.left_out), self.after.record(False, self.left_out)
        return CaseResult(record_a, record_b, tuple(self.sessions))


def begin_case(case: str, pair: Pair) -> CaseProgress:
    side_a, side_b = (CaseOutcome(side.cases[case]) for side in pair)
    left_out = _unfit(pair, (side_a.planned, side_b.planned))
    for outcome in (side_a, side_b):
        outcome.note(paired=not left_out)
    return CaseProgress(side_a, side_b, left_out)


def _unfit(pair: Pair, planned: tuple[PlannedCase, PlannedCase]) -> str:
    refused = [f"side {side.name}: {case.skip}" for side, case in zip(pair, planned, strict=True) if case.skip]
    if refused:
        return "; ".join(refused)
    suite = planned[0].case.workload
    versions = [side.versions.get(suite) for side in pair]
    missing = [side.name for side, version in zip(pair, versions, strict=True) if version is None]
    if missing:
        return f"side {' and side '.join(missing)} has no suite {suite!r}"
    if versions[0] != versions[1]:
        return (
            f"suite {suite} has version {versions[0]} on side {BEFORE} and {versions[1]} on side {AFTER}: what a step "
            "does has changed, so that their times do not compare"
        )
    return ""


@dataclass(frozen=True)
class CaseRunner:
    """Measures cases, and their errors and memory."""

    pair: Pair
    seed: int
    observer: Observer
    limits: Limits

    def measure(self, case: CaseProgress, number: int, rule: StoppingRule) -> None:
        """Measures one session of a case, with fewer processes per side if they do not all fit into memory."""
        seed = random.Random(f"{self.seed}:{number}:{case.before.planned.case.id}").getrandbits(32)
        while True:
            entries: list[DuelEntry] = []
            for side, outcome in zip(self.pair, (case.before, case.after), strict=True):
                entries += [self._entry(side, outcome.planned, place) for place in range(case.processes)]
            turns = DuelTurns(entries, seed)
            failed: ArmFailed | None = None
            session: Session | None = None
            try:
                session = turns.measure(rule, lambda doing: self.observer.working(case.before.planned.case, doing, 0.0))
            except ArmFailed as raised:
                failed = raised
            except CompilingFailed as raised:
                turns.entry_of(raised.arm).worker.restart()
                continue  # retry in a fresh worker, without compiling
            finally:
                left_over = turns.release()
            failed = failed or left_over
            if failed is not None and ran_out_of_memory(failed.cause) and case.processes > 1:
                case.processes -= 1
                continue
            if failed is not None:
                entry, full = turns.entry_of(failed.arm), ran_out_of_memory(failed.cause)
                if not full:
                    entry.worker.restart()
                outcome = case.before if entry.side == BEFORE else case.after
                outcome.fail("out of memory next to the opposite side" if full else str(failed.cause), failed.cause)
                if not full:
                    self._try_other(entry.side, case, seed)
            elif session is not None:
                case.sessions.append(session)
            return

    def _try_other(self, failed: str, case: CaseProgress, seed: int) -> None:
        """Tests whether the case fails on the other side, too: which side fails first is random."""
        side, outcome = (self.pair[1], case.after) if failed == BEFORE else (self.pair[0], case.before)
        entry = self._entry(side, outcome.planned, 0)
        turns = DuelTurns([entry], seed)
        try:
            turns.measure(StoppingRule(fixed=1, ceiling=CEILING_SECONDS, whole=True), lambda doing: None)
        except (ArmFailed, CompilingFailed) as raised:
            entry.worker.restart()
            if isinstance(raised, ArmFailed):
                outcome.fail(str(raised.cause), raised.cause)
        finally:
            turns.release()

    def check_values(self, case: CaseProgress) -> None:
        for side, outcome in zip(self.pair, (case.before, case.after), strict=True):
            passes = Passes(side.workers[0], side.facts, self.limits, self.observer)
            passes.errors([outcome])
            if not outcome.failure:
                passes.memory([outcome])

    def _entry(self, side: SideWorkers, planned: PlannedCase, place: int) -> DuelEntry:
        case = planned.case
        fused = workloads.get(case.workload).fused
        quantisers = side.quantisers if fused else Quantisers("the suite is about numbers, and compiles none")
        arm = MeasuredArm(case.id, planned, side.facts[case.device], self.limits)
        return DuelEntry(side.name, side.workers[place], arm, quantisers)


def sessions_of(request: Request) -> int:
    """Returns the default number of sessions of a duel."""
    return _QUICK_SESSIONS if request.quick else SESSIONS


def run_duel(
    question: DuelQuestion, request: Request, store: Path, observer: JobObserver, only: Collection[str] = ()
) -> Duel:
    """Measures both sides, and stores the results. `only` are ids of cases to measure; empty means all."""
    # 1. Reject invalid requests before code is copied or built.
    if request.ranks is not None:
        raise UsageError(
            f"a side of a duel is one process, but this asks for {request.ranks} ranks. Leave --ranks out."
        )
    resolved = resolve(request, os.environ)
    check_store(store)
    corpus = resolved.corpus(store)
    start = time.monotonic()
    sessions = question.sessions or sessions_of(request)
    # 2. Open both sides with their processes; these end, and folders are removed, whatever fails.
    with ExitStack() as stack:
        *starts, notes = stack.enter_context(open_sides(question, request.imports))
        sides = []
        for ready in starts:
            settings = Settings(request.threads, request.seed, ready.imports, corpus.path if corpus else None)
            workers = [PartnerWorker(settings, ready) for _ in range(PROCESSES)]
            quantisers = Quantisers(resolved.switches.why_eager)
            sides.append(stack.enter_context(closing(SideWorkers(ready, workers, quantisers))))
        # 3. Ask each side which cases its code has.
        identity, names = corpus.identity if corpus else None, [suite.name for suite in resolved.suites]
        with observer.counting() as tell:
            for number, ready_side in enumerate(sides):
                tell(number, len(sides), "sides", "starting workers")
                ready_side.meet(request, names, identity)
        # 4. Only cases of both sides can be compared.
        side_a, side_b = sides
        cases = tuple(name for name in side_a.cases if name in side_b.cases)
        if not cases:
            raise NothingInCommon(
                f"the sides have no case in common: A would measure {next(iter(side_a.cases))}, and B "
                f"{next(iter(side_b.cases))}. Name --devices that both have."
            )
        selected = tuple(name for name in cases if not only or name in only)
        if not selected:
            raise UsageError(f"the sides would not measure {next(iter(only))}, which was asked for.")
        # 5. Write the duel's header, and what is not compared.
        begun = Duel(
            secrets.token_hex(4),
            now(),
            command_line(),
            request,
            _describe_side(side_a, request),
            _describe_side(side_b, request),
            selected,
            sessions,
        )
        remarks: list[str] = [*notes]
        for side, opponent in ((side_a, side_b), (side_b, side_a)):
            if lacking := [name for name in side.cases if name not in opponent.cases]:
                remarks.append(f"only side {side.name} has {join_words(lacking, 2)}: not compared")
        return _measure_sessions((side_a, side_b), begun, remarks, store, observer, start)


def _measure_sessions(
    pair: Pair, begun: Duel, notes: Sequence[str], store: Path, observer: JobObserver, start: float
) -> Duel:
    writer = start_duel(begun, store)
    begun = replace(begun, path=str(writer.path))
    cases = [begin_case(case, pair) for case in begun.cases]
    try:
        _check_origins(pair)
        if pair[1].start.commit:  # warn early if the sides cannot differ, as far as known by now
            for note in (*(note for note in notes if note == SAME), *_idle_notes(pair)):
                observer.note(f"{note}. Ctrl-C ends the duel")
        for note in notes:
            writer.note(note)
        with observer.counting() as tell:
            _sessions(pair, begun, cases, writer, SessionProgress(tell, len(cases) * begun.sessions), start)
        for note in _idle_notes(pair):
            writer.note(note)
        writer.finish("finished")
    except KeyboardInterrupt:
        with ignore_interrupts():
            with contextlib.suppress(StoreError):  # a duel without an end line is unfinished, too
                writer.finish("interrupted")
            observer.note(f"interrupted; what was finished is kept in {writer.path}")
    except Fp8benchError as error:
        results = tuple(case.result for case in cases if case.sessions)
        if results:  # measured before the store or a side was lost
            raise DuelCutOff(error, replace(begun, results=results, troubles=(str(error),))) from None
        writer.path.unlink(missing_ok=True)
        raise
    finally:
        writer.close()
    with ignore_interrupts():
        return DuelKind().load(writer.path)


class SessionProgress(SilentObserver):
    """Reports the number of finished sessions of all cases."""

    def __init__(self, tell: Tell, total: int) -> None:
        self._tell, self._total, self.done = tell, total, 0

    def doing(self, words: str) -> None:
        self._tell(self.done, self._total, "sessions of cases", words)

    def working(self, case: Case, doing: str, share: float) -> None:
        self.doing(f"{doing} {case.id}")


def _sessions(
    pair: Pair, duel: Duel, cases: Sequence[CaseProgress], writer: DuelWriter, progress: SessionProgress, start: float
) -> None:
    request, sessions = duel.request, duel.sessions
    runner = CaseRunner(pair, request.seed, progress, Limits(request.case_timeout))
    for number in range(sessions):
        progress.doing("starting workers")
        began = time.monotonic()
        refresh(pair, request.seed, number)
        # Half of the workers were running before the first session. Later starts count against the budget.
        starting = (time.monotonic() - began) * (1 if number else 2) * (sessions - 1 - number)
        for place, case in enumerate(cases):
            progress.done = number * len(cases) + place
            alive, remaining = case.alive, (sessions - number) * len(cases) - place
            if alive:
                runner.measure(case, number, _rule(request, share_of(request.budget, start - starting, remaining)))
            if case.alive and number == 0:
                _check_origins(pair)  # more of the user's code may have been imported by now
                runner.check_values(case)
            with hold_back_interrupts():  # either the whole case is written, or one more session
                if number == 0 or (alive and not case.alive):
                    writer.result(case.result)
                elif alive:
                    writer.session(case.result.after.case.id, case.sessions[-1])


def _rule(request: Request, share: float | None) -> StoppingRule:
    most = math.inf if share is None else share
    if request.rounds is not None:
        return StoppingRule(fixed=request.rounds, ceiling=most, whole=True)
    if request.quick:
        return StoppingRule(fixed=QUICK_ROUNDS, ceiling=min(most, CEILING_SECONDS), whole=True)
    if share is not None:
        return StoppingRule(least=LEAST_ROUNDS, budget=share, ceiling=share, whole=True)
    return StoppingRule(least=_LEAST_ROUNDS, budget=_SESSION_SECONDS, ceiling=CEILING_SECONDS)


def _describe_side(side: SideWorkers, request: Request) -> DuelSide:
    """Returns a side with its environment: this process's, overridden by its worker's report."""
    worker, start = side.workers[0], side.start
    # Digests of imports are computed in this process, from this tree's files.
    imports = request.imports if start.imports == request.imports else ()
    environment_here = gather(
        worker.software(), str(worker.handshake["fp8bench"]), request.threads, imports, folder=start.tree
    )
    environment = Environment({**environment_here.facts, **worker.handshake})
    return DuelSide(start.name, start.title, start.python, start.commit, environment, side.devices)


def _idle_notes(pair: Pair) -> list[str]:
    tree = pair[1].start.tree
    is_idle = tree is not None and not set(pair[1].workers[0].modules_under(tree)) - _shared_modules(
        pair[0].start.imports
    )
    return [IDLE] if is_idle else []


def _check_origins(pair: Pair) -> None:
    """Raises UsageError if side A has loaded code of this tree instead of the revision."""
    side_a, side_b = (side.start for side in pair)
    if side_a.tree is None or side_b.tree is None:
        return
    first = pair[0].workers[0]
    alien = (
        set(first.modules_under(side_b.tree)) - set(first.modules_under(side_a.tree)) - _shared_modules(side_a.imports)
    )
    if alien:
        raise UsageError(
            f"side A has loaded {', '.join(sorted(alien)[:5])} from this tree and not from that of {side_a.title}: "
            "what is installed there wins over PYTHONPATH. Uninstall the package, or install it with `pip install -e`."
        )


def _shared_modules(imports: Sequence[str]) -> set[str]:
    return {user_module(name) for name in imports if name.endswith(".py")}
