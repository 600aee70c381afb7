"""One case from plan to records, and what a fault costs: the case, on the side where it happened."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from fp8bench.dueling.corner import PROCESSES, Corner
from fp8bench.dueling.duel import AFTER, BEFORE, Bout, Sitting
from fp8bench.dueling.ring import Entry, EntryFailed, Ring
from fp8bench.errors import WorkerFault
from fp8bench.measure.limits import Limits
from fp8bench.measure.outcome import Outcome, exhausted
from fp8bench.measure.passes import Passes
from fp8bench.measure.quantisers import Quantisers
from fp8bench.measure.rounds import Arm, CompilingFailed
from fp8bench.measure.stopping import StoppingRule
from fp8bench.model import PlannedCase, Record, Status
from fp8bench.protocols import Observer
from fp8bench.registry import workloads


@dataclass
class Contest:
    """What one case has come to so far. `left_out` says why it is not measured, '' if it is.

    `processes` is how many a side memory has admitted so far.
    """

    before: Outcome
    after: Outcome
    left_out: str = ""
    sittings: list[Sitting] = field(default_factory=list)
    processes: int = PROCESSES

    @property
    def alive(self) -> bool:
        """Whether there is more to measure."""
        return not (self.left_out or self.before.failure or self.after.failure)

    @property
    def bout(self) -> Bout:
        """As far as it has come, frozen."""
        before, after = self._record(self.before, BEFORE), self._record(self.after, AFTER)
        return Bout(before, after, tuple(self.sittings))

    def _record(self, outcome: Outcome, side: str) -> Record:
        planned = outcome.planned
        status = Status.SKIPPED if self.left_out else Status.FAILED if outcome.failure else Status.OK
        return Record(
            planned.case, planned.support, status, planned.work, side == BEFORE, self.left_out or outcome.failure,
            outcome.detail, measurements=tuple(outcome.measurements), paired=not self.left_out,
        )  # fmt: skip


def contest(case: str, corners: tuple[Corner, Corner]) -> Contest:
    """A case that is about to be measured, or the reason why it is not."""
    before, after = (Outcome(corner.cases[case]) for corner in corners)
    return Contest(before, after, _unfit(corners, (before.planned, after.planned)))


def _unfit(corners: tuple[Corner, Corner], planned: tuple[PlannedCase, PlannedCase]) -> str:
    """Why a case is not measured on both sides; '' if it is."""
    refused = [f"side {corner.name}: {one.skip}" for corner, one in zip(corners, planned, strict=True) if one.skip]
    if refused:
        return "; ".join(refused)
    suite = planned[0].case.workload
    versions = [corner.versions.get(suite) for corner in corners]
    missing = [corner.name for corner, version in zip(corners, versions, strict=True) if version is None]
    if missing:
        return f"side {' and side '.join(missing)} has no suite {suite!r}"
    if versions[0] != versions[1]:
        return (
            f"suite {suite} has version {versions[0]} on side {BEFORE} and {versions[1]} on side {AFTER}: what a step "
            "does has changed, so that their times do not compare"
        )
    return ""


class Referee:
    """Has cases sit, and looks at their values."""

    def __init__(self, corners: tuple[Corner, Corner], seed: int, observer: Observer, limits: Limits) -> None:
        self._corners = corners
        self._seed = seed
        self._observer = observer
        self._limits = limits

    def sit(self, one: Contest, number: int, rule: StoppingRule) -> None:
        """One sitting of a case. With fewer processes a side where memory does not admit all."""
        seed = random.Random(f"{self._seed}:{number}:{one.before.planned.case.id}").getrandbits(32)
        while True:
            ring = self._ring(one, seed)
            failed: EntryFailed | None = None
            sitting: Sitting | None = None
            try:
                sitting = ring.sit(rule, lambda doing: self._observer.working(one.before.planned.case, doing, 0.0))
            except EntryFailed as raised:
                failed = raised
            except CompilingFailed as raised:
                self._restart(ring, raised)
                continue  # in a fresh worker, and without compiling
            finally:
                left_over = ring.release()
            failed = failed or left_over
            if failed is not None and exhausted(failed.cause) and one.processes > 1:
                one.processes -= 1
                continue
            if failed is not None:
                _fail(one, failed)
            elif sitting is not None:
                one.sittings.append(sitting)
            return

    def look(self, one: Contest) -> None:
        """Errors and memory on both sides: values that are the same whenever the same code runs."""
        for corner, outcome in zip(self._corners, (one.before, one.after), strict=True):
            passes = Passes(corner.workers[0], corner.facts, self._limits, self._observer)
            passes.errors([outcome])
            if not outcome.failure:
                passes.memory([outcome])

    def _ring(self, one: Contest, seed: int) -> Ring:
        before, after = (
            [self._entry(corner, outcome.planned, place) for place in range(one.processes)]
            for corner, outcome in zip(self._corners, (one.before, one.after), strict=True)
        )
        return Ring(before, after, seed)

    def _entry(self, corner: Corner, planned: PlannedCase, place: int) -> Entry:
        case = planned.case
        fused = workloads.get(case.workload).fused
        quantisers = corner.quantisers if fused else Quantisers("the suite is about numbers, and compiles none")
        arm = Arm(case.id, planned, corner.facts[case.device], self._limits)
        return Entry(corner.name, corner.workers[place], arm, quantisers)

    def _restart(self, ring: Ring, failed: CompilingFailed) -> None:
        for entry in ring.entries:
            if entry.arm is failed.arm:
                entry.worker.restart()


def _fail(one: Contest, failed: EntryFailed) -> None:
    outcome = one.before if failed.entry.side == BEFORE else one.after
    cause = failed.cause
    if not exhausted(cause):
        failed.entry.worker.restart()
    outcome.failure = "out of memory beside the other side" if exhausted(cause) else str(cause)
    outcome.detail = cause.trace if isinstance(cause, WorkerFault) else ""
