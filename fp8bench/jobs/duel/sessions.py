"""One case from plan to records, and what a fault costs: the case, on the side where it happened."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from fp8bench.jobs.duel.side_workers import PROCESSES, SideWorkers
from fp8bench.jobs.duel.turns import Entry, Turns
from fp8bench.measure.arm import Arm, ArmFailed, CompilingFailed
from fp8bench.measure.limits import Limits
from fp8bench.measure.passes import CaseOutcome, Passes, exhausted
from fp8bench.measure.quantisers import Quantisers
from fp8bench.model import PlannedCase
from fp8bench.model.duel import AFTER, BEFORE, CaseResult, Session
from fp8bench.model.stopping import StoppingRule
from fp8bench.protocols import Observer
from fp8bench.registry import workloads


@dataclass
class CaseProgress:
    """What one case has come to so far. `left_out` says why it is not measured, '' if it is.

    `processes` is how many a side memory has admitted so far.
    """

    before: CaseOutcome
    after: CaseOutcome
    left_out: str = ""
    sessions: list[Session] = field(default_factory=list)
    processes: int = PROCESSES

    @property
    def alive(self) -> bool:
        """Whether there is more to measure."""
        return not (self.left_out or self.before.failure or self.after.failure)

    @property
    def result(self) -> CaseResult:
        """As far as it has come, frozen."""
        before, after = self.before.record(True, self.left_out), self.after.record(False, self.left_out)
        return CaseResult(before, after, tuple(self.sessions))


def begin_case(case: str, pair: tuple[SideWorkers, SideWorkers]) -> CaseProgress:
    """A case that is about to be measured, or the reason why it is not."""
    before, after = (CaseOutcome(side.cases[case]) for side in pair)
    left_out = _unfit(pair, (before.planned, after.planned))
    for outcome in (before, after):
        outcome.note(paired=not left_out)
    return CaseProgress(before, after, left_out)


def _unfit(pair: tuple[SideWorkers, SideWorkers], planned: tuple[PlannedCase, PlannedCase]) -> str:
    """Why a case is not measured on both sides; '' if it is."""
    refused = [f"side {side.name}: {one.skip}" for side, one in zip(pair, planned, strict=True) if one.skip]
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
    """Measures cases, and looks at their values."""

    pair: tuple[SideWorkers, SideWorkers]
    seed: int
    observer: Observer
    limits: Limits

    def measure(self, one: CaseProgress, number: int, rule: StoppingRule) -> None:
        """One session of a case. With fewer processes a side where memory does not admit all."""
        seed = random.Random(f"{self.seed}:{number}:{one.before.planned.case.id}").getrandbits(32)
        while True:
            turns = self._turns(one, seed)
            failed: ArmFailed | None = None
            session: Session | None = None
            try:
                session = turns.measure(rule, lambda doing: self.observer.working(one.before.planned.case, doing, 0.0))
            except ArmFailed as raised:
                failed = raised
            except CompilingFailed as raised:
                turns.entry_of(raised.arm).worker.restart()
                continue  # in a fresh worker, and without compiling
            finally:
                left_over = turns.release()
            failed = failed or left_over
            if failed is not None and exhausted(failed.cause) and one.processes > 1:
                one.processes -= 1
                continue
            if failed is not None:
                entry, full = turns.entry_of(failed.arm), exhausted(failed.cause)
                if not full:
                    entry.worker.restart()
                outcome = one.before if entry.side == BEFORE else one.after
                outcome.fail("out of memory beside the other side" if full else str(failed.cause), failed.cause)
            elif session is not None:
                one.sessions.append(session)
            return

    def check_values(self, one: CaseProgress) -> None:
        """Errors and memory on both sides: values that are the same whenever the same code runs."""
        for side, outcome in zip(self.pair, (one.before, one.after), strict=True):
            passes = Passes(side.workers[0], side.facts, self.limits, self.observer)
            passes.errors([outcome])
            if not outcome.failure:
                passes.memory([outcome])

    def _turns(self, one: CaseProgress, seed: int) -> Turns:
        before, after = (
            [self._entry(side, outcome.planned, place) for place in range(one.processes)]
            for side, outcome in zip(self.pair, (one.before, one.after), strict=True)
        )
        return Turns(before, after, seed)

    def _entry(self, side: SideWorkers, planned: PlannedCase, place: int) -> Entry:
        case = planned.case
        fused = workloads.get(case.workload).fused
        quantisers = side.quantisers if fused else Quantisers("the suite is about numbers, and compiles none")
        arm = Arm(case.id, planned, side.facts[case.device], self.limits)
        return Entry(side.name, side.workers[place], arm, quantisers)
