"""A case that is ready to be timed: its state, the clock that its steps write into, and slots of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fp8bench.model.raw import RawSlot, RawStep, StateCheck
from fp8bench.model.readings import Read, Reading, grown
from fp8bench.protocols import Arithmetic, Device, Precision, ScaleBook, SilentPhases, Stamper, Workload
from fp8bench.worker import fusing
from fp8bench.worker.beside import Beside
from fp8bench.worker.checked_results import wrong_of
from fp8bench.worker.clock import PhaseClock
from fp8bench.worker.finite import FiniteState
from fp8bench.worker.host_counters import counters
from fp8bench.worker.second_clock import agreeing
from fp8bench.worker.step_guards import apart, silent_step
from fp8bench.worker.switches import collected_by_hand, unchanged, under


@dataclass
class Prepared:
    """`started` is what preparing it has left running."""

    workload: Workload
    precision: Precision
    device: Device
    index: int
    state: Any
    clock: PhaseClock
    stamper: Stamper
    started: Beside
    scales: ScaleBook | None
    finite: FiniteState
    arithmetics: tuple[Arithmetic, ...] = ()

    @property
    def begin(self) -> Callable[[], None]:
        """What comes before a timed step: nothing of it is timed but the clock's own start."""
        book, clock = self.scales, self.clock
        if book is None:
            return clock.begin

        def begin() -> None:
            book.begin_step()
            clock.begin()

        return begin

    @property
    def _clocks(self) -> dict[str, Callable[[], float]]:
        """Those of the host that time a slot, in nanoseconds."""
        own = {"time.perf_counter": lambda: time.perf_counter() * 1e9}
        return {**own, "the clock of phases": self.clock.now} if self.device.kind == "cpu" else own

    def slot(self, calls: int, discard: int) -> RawSlot:
        """Run `discard` calls and then `calls` timed ones, back to back."""
        clock, begin, timed, state = self.clock, self.begin, self.workload.step, self.state
        marks = []
        eager, fused = fusing.calls()
        with under(self.precision), collected_by_hand(), unchanged(), silent_step(), agreeing(self._clocks):
            before = counters()  # ahead of the discarded calls: reading it leaves caches cold
            for _ in range(discard):
                begin()
                timed(state, clock)
                clock.end()
            self.device.synchronise(self.index)
            cpu, thread, wall = time.process_time(), time.thread_time(), time.perf_counter()
            for _ in range(calls):
                begin()
                timed(state, clock)
                marks.append(clock.end())
            host = time.perf_counter() - wall
            self.device.synchronise(self.index)
            wall, thread, cpu = (
                time.perf_counter() - wall, time.thread_time() - thread, time.process_time() - cpu,
            )  # fmt: skip
            counted = grown(before, counters())
        steps = tuple(RawStep(tuple(codes), tuple(self.stamper.intervals_ns(stamps))) for codes, stamps in marks)
        self.stamper.recycle()
        eager_now, fused_now = fusing.calls()
        fused_now.subtract(fused)
        preemptions = _known(counted["preemptions"])
        return RawSlot(
            steps, wall, cpu, host / calls, eager_now - eager, fused_now.total(), thread,
            None if preemptions is None else int(preemptions), _known(counted["steal"]),
            self._waited(_known(counted["waited"]), wall - thread),
            tuple(bits for bits, count in sorted(fused_now.items()) if bits and count),
        )  # fmt: skip

    def _waited(self, counted: float | None, off_core: float) -> float | None:
        """How long the timed calls waited for a core: counted over the discarded calls too, it is no more than the time
        that the timed ones were on none. A device of its own does not wait for one."""
        return None if counted is None or self.device.kind != "cpu" else max(0.0, min(counted, off_core))

    def check(self) -> StateCheck:
        """What the steps have left, as the workload sees it, and whether it is finite."""
        with unchanged(), apart():
            wrong = wrong_of(self.workload.check(self.state))
            lost = self.finite.lost(self.state)
        if self.workload.may_diverge:
            return StateCheck(wrong, lost.share)
        return StateCheck(wrong or str(lost))

    def loop(self, steps: int) -> float:
        """Run so many steps back to back and wait for them; the seconds of all. No clock runs within them."""
        silent = SilentPhases()
        with under(self.precision), unchanged(), silent_step():
            start = time.perf_counter()
            for _ in range(steps):
                if self.scales is not None:
                    self.scales.begin_step()
                self.workload.step(self.state, silent)
            self.device.synchronise(self.index)
            return time.perf_counter() - start


def _known(read: Read) -> float | None:
    return read.number if isinstance(read, Reading) else None
