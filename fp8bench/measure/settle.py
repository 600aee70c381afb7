"""Runs a case until the device's clock and temperature stand still: before the first round, and before a long turn.

The first rounds of a device that has idled are at a clock that it does not keep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fp8bench.measure.arm import MeasuredArm
from fp8bench.measure.handle import Worker
from fp8bench.measure.sensors.host import CLOCK
from fp8bench.measure.sensors.looks import Looks
from fp8bench.model.readings import Reading
from fp8bench.model.run import is_on
from fp8bench.model.stopping import ClockLook, Settling, slopes

# Between two looks. A look takes the driver up to milliseconds, in which the device idles.
_CHUNK_SECONDS = 0.15
VARIABLE = "FP8BENCH_WARM_UP"
WARM_UP_SECONDS = 30.0
WARM_UP_SECONDS_QUICK = 5.0


def warm_up_limit(quick: bool, budget: float | None, environment: Mapping[str, str]) -> float:
    """Less where the user is in a hurry, and none where the variable says off."""
    if not is_on(VARIABLE, environment, "on", "off", "to begin without warming up"):
        return 0.0
    return WARM_UP_SECONDS if budget is None and not quick else WARM_UP_SECONDS_QUICK


@dataclass(frozen=True)
class Settler:
    """Asks a worker to run, and a device how it is."""

    device: Looks
    limit: float
    clock: Callable[[], float] = time.monotonic

    def settle(self, arm: MeasuredArm, worker: Worker) -> Settling | None:
        """None where the device tells neither its clock nor its temperature: nobody could say when it is enough."""
        start = self.clock()
        looks = [self._look(start)]
        if looks[0].clock is None and looks[0].temperature is None:
            return None
        steps = max(1, round(_CHUNK_SECONDS / arm.step_seconds))
        settled = False
        while not settled and looks[-1].at < self.limit:
            worker.within(arm.limits.slot(arm.step_seconds, steps)).loop(arm.key, steps)
            looks.append(self._look(start))
            settled = slopes(looks).flat
        return Settling(tuple(looks), settled, self.limit)

    def _look(self, start: float) -> ClockLook:
        seen = {name: read.number for name, read in self.device.glance().items() if isinstance(read, Reading)}
        clock = seen.get("sm_clock", seen.get(CLOCK))
        return ClockLook(self.clock() - start, clock, seen.get("temperature"))
