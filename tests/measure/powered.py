"""A device with a power and a counter of energy on a virtual clock, and a worker whose steps take both."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from fp8bench.measure.sensors.energy import THREAD_NAME, Source, SourceKind
from fp8bench.measure.sensors.meter import Meter
from fp8bench.measure.sensors.nvml import AbsentDevice
from fp8bench.model import CELL_PHASES
from fp8bench.model.raw import RawReplay
from fp8bench.model.readings import NoReading
from tests.fakes import FakeWorker, Script
from tests.measure.sensors.nvml.library import State
from tests.measure.sensors.virtual import VirtualClock

IDLE = 80.0
WATTS = {"fp32": 400.0, "bf16": 200.0, "fp8": 300.0}
# One phase, in any precision.
PHASE_WATTS = {"gemm": 600.0, "cast": 80.0}
TICK = 0.1


class Power:
    """A device that takes `watts`, which whoever runs on it sets; its counter changes every tick."""

    def __init__(self) -> None:
        self.state = State()
        self.clock = VirtualClock(self.state)
        self.watts = IDLE
        self.broken = ""
        self._joules = self._shown = self._since = 0.0
        self._next = TICK
        self._passing = threading.Lock()  # the sampler reads while the workload's thread writes

    def set(self, watts: float) -> None:
        with self._passing:
            self._pass()
            self.watts = watts

    def read(self) -> float:
        if self.broken:
            raise NoReading(self.broken)
        with self._passing:
            self._pass()
            return self._shown

    def _pass(self) -> None:
        now = self.clock.now()
        while self._next <= now:
            self._shown = self._joules + self.watts * (self._next - self._since)
            self._next += TICK
        self._joules += self.watts * (now - self._since)
        self._since = now

    def meter(self) -> Meter:
        return Meter((Source(SourceKind.COUNTER, self.read),), AbsentDevice("nothing to say"), "", self.clock)


class Runner(FakeWorker):
    """A runner whose steps take virtual time and their mode's power; `sampled` counts slots with a running sampler."""

    def __init__(self, power: Power, scripts: Mapping[str, Script], capacity: int = 1000) -> None:
        super().__init__(scripts, capacity)
        self.power = power
        self.sampled = 0
        self.phase = self.spoilt = ""

    def _slot(self, *arguments: object) -> object:  # type: ignore[override]
        self.sampled += sampling()
        return super()._slot(*arguments)  # type: ignore[arg-type]

    def _loop(self, key: str, steps: int) -> float:
        label = self._labels[key]
        self.log.append(("loop", label, steps))
        self._strike("loop", label)
        return self._runs(WATTS[label], steps * sum(self._script(label).step(0)[1]) / 1e9)

    def _hold_phase(self, key: str, phase: str, most_bytes: int) -> RawReplay:
        label = self._labels[key]
        self.log.append(("hold", label, phase))
        self._strike("hold", label)
        if phase not in PHASE_WATTS:
            return RawReplay(why=f"nobody does {phase} by itself")
        self.phase = phase
        return RawReplay(self._phase_seconds(label), 1, most_bytes)

    def _loop_phase(self, key: str, times: int) -> float:
        label = self._labels[key]
        self.log.append(("phase", label, times))
        return self._runs(PHASE_WATTS[self.phase], times * self._phase_seconds(label))

    def _drop_phase(self, key: str) -> str:
        return self.spoilt if self.phase == "cast" else ""

    def _phase_seconds(self, label: str) -> float:
        codes, times = self._script(label).step(0)
        return sum(time for code, time in zip(codes, times, strict=True) if CELL_PHASES[code] == self.phase) / 1e9

    def _runs(self, watts: float, seconds: float) -> float:
        start = self.power.clock.now()
        end = start + seconds
        self.power.set(watts)
        if sampling():
            self.power.clock.wait(lambda: self.power.clock.now() >= end)
        else:  # without a sampler nothing else advances the clock
            self.power.state.now_ns = round(end * 1e9)
        self.power.set(IDLE)
        return end - start


def sampling() -> bool:
    """Whether a sampler's thread is alive."""
    return any(thread.name == THREAD_NAME for thread in threading.enumerate())
