"""One case from plan to records, and what a fault costs: the case, on the side where it happened."""

from __future__ import annotations

import random
import time

from fp8bench.dueling.corner import PROCESSES, Corner
from fp8bench.dueling.duel import BEFORE, Bout
from fp8bench.dueling.ring import Entry, EntryFailed, Judge, Ring, Tell, timings
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


class BoutMeasurement:
    """The state of measuring one case; `run` is the whole of it."""

    def __init__(
        self,
        case: str,
        corners: tuple[Corner, Corner],
        rule: StoppingRule,
        judge: Judge,
        seed: int,
        observer: Observer,
        limits: Limits,
    ) -> None:
        self._corners = corners
        self._planned = [corner.cases[case] for corner in corners]
        self._rule = rule
        self._judge = judge
        self._seed = random.Random(f"{seed}:{case}").getrandbits(32)
        self._observer = observer
        self._limits = limits
        self._begun = time.monotonic()
        self._outcomes = [Outcome(planned) for planned in self._planned]

    def run(self) -> Bout:
        """Measure on both sides at once, then look at numbers and memory on each."""
        why = self._unfit()
        if why:
            before, after = (self._left_out(planned, why) for planned in self._planned)
            return Bout(before, after)
        for processes in range(PROCESSES, 0, -1):
            if self._time(processes):
                break
        for corner, outcome in zip(self._corners, self._outcomes, strict=True):
            if not outcome.failure:
                passes = Passes(corner.workers[0], corner.facts, self._limits, self._observer)
                passes.errors([outcome])
                if not outcome.failure:
                    passes.memory([outcome])
        before, after = (
            self._record(outcome, side) for side, outcome in zip(self._corners, self._outcomes, strict=True)
        )
        return Bout(before, after)

    def _unfit(self) -> str:
        """Why the case is not measured on both sides; '' if it is."""
        refused = [
            f"side {corner.name}: {planned.skip}"
            for corner, planned in zip(self._corners, self._planned, strict=True)
            if planned.skip
        ]
        if refused:
            return "; ".join(refused)
        suite = self._planned[0].case.workload
        versions = [corner.versions.get(suite) for corner in self._corners]
        missing = [corner.name for corner, version in zip(self._corners, versions, strict=True) if version is None]
        if missing:
            return f"side {' and side '.join(missing)} has no suite {suite!r}"
        if versions[0] != versions[1]:
            return (
                f"suite {suite} has version {versions[0]} on side A and {versions[1]} on side B: what a step does has "
                "changed, so that their times do not compare"
            )
        return ""

    def _time(self, processes: int) -> bool:
        """One sitting with so many processes a side; False where memory did not admit them and fewer may do."""
        while True:
            ring = self._ring(processes)
            failed: EntryFailed | None = None
            try:
                self._sit(ring)
            except EntryFailed as raised:
                failed = raised
            except CompilingFailed as raised:
                self._restart(ring, raised.arm)
                continue  # in a fresh worker, and without compiling
            finally:
                left_over = ring.release()
            failed = failed or left_over
            if failed is not None and exhausted(failed.cause) and processes > 1:
                return False
            if failed is not None:
                self._fail(failed)
            return True

    def _ring(self, processes: int) -> Ring:
        before, after = (
            [self._entry(corner, planned, place) for place in range(processes)]
            for corner, planned in zip(self._corners, self._planned, strict=True)
        )
        return Ring(before, after)

    def _entry(self, corner: Corner, planned: PlannedCase, place: int) -> Entry:
        case = planned.case
        fused = workloads.get(case.workload).fused
        quantisers = corner.quantisers if fused else Quantisers("the suite is about numbers, and compiles none")
        arm = Arm(case.id, planned, corner.facts[case.device], self._limits)
        return Entry(corner.name, corner.workers[place], arm, quantisers)

    def _sit(self, ring: Ring) -> None:
        tell: Tell = lambda doing, share: self._observer.working(self._planned[0].case, doing, share)  # noqa: E731
        try:
            ring.prepare(tell)
            stopped = ring.run(self._rule.after(time.monotonic() - self._begun), self._judge, self._seed, tell)
            ring.check()
        finally:  # what a side gave before the other one failed is there to be looked at
            self._keep(ring)
        for outcome in self._outcomes:
            outcome.stopped = stopped

    def _keep(self, ring: Ring) -> None:
        for outcome, entries in zip(self._outcomes, (ring.before, ring.after), strict=True):
            first, *others = timings(entries)
            outcome.timing = first if first.slots else None
            outcome.control = others[0] if others and others[0].slots else None
            outcome.scales = entries[0].arm.scales

    def _restart(self, ring: Ring, arm: Arm) -> None:
        for entry in ring.entries:
            if entry.arm is arm:
                entry.worker.restart()

    def _fail(self, failed: EntryFailed) -> None:
        outcome = self._outcomes[0 if failed.entry.side == BEFORE else 1]
        cause = failed.cause
        if not exhausted(cause):
            failed.entry.worker.restart()
        outcome.failure = "out of memory beside the other side" if exhausted(cause) else str(cause)
        outcome.detail = cause.trace if isinstance(cause, WorkerFault) else ""

    def _record(self, outcome: Outcome, corner: Corner) -> Record:
        planned = outcome.planned
        fine = not outcome.failure
        return Record(
            planned.case, planned.support, Status.OK if fine else Status.FAILED, planned.work,
            corner is self._corners[0], outcome.failure, outcome.detail, outcome.timing if fine else None,
            outcome.control if fine else None, None, self._both_alive(), tuple(outcome.measurements), outcome.stopped,
            scales=outcome.scales if fine else (),
        )  # fmt: skip

    def _both_alive(self) -> bool:
        return not any(outcome.failure for outcome in self._outcomes)

    def _left_out(self, planned: PlannedCase, why: str) -> Record:
        is_reference = planned is self._planned[0]
        return Record(planned.case, planned.support, Status.SKIPPED, planned.work, is_reference, why, paired=False)
