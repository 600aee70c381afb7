"""How long to wait for a worker before it counts as hung."""

from __future__ import annotations

from dataclasses import dataclass

from fp8bench.model import Work

HANG_SECONDS = 60.0
HANG_STEPS = 20
# Slower than any useful device: for steps that nobody has timed yet.
SLOWEST_FLOPS = 5e9
SLOWEST_BYTES = 50e6
# Ten times what a cold compile of one quantiser takes.
COMPILE_SECONDS = 300.0


@dataclass(frozen=True)
class Limits:
    """Seconds for the requests of a case; `case_timeout`, if the user gave one, is the limit of each of them."""

    case_timeout: float | None = None

    def first(self, work: Work, further_steps: int = 0) -> float:
        """Limit for preparing and for a first step: 60 s, or its work on a very slow device, and compiling.
        `further_steps` add the time of their work."""
        slowest = work.flops / SLOWEST_FLOPS + work.bytes / SLOWEST_BYTES
        return self._or_case_timeout(max(HANG_SECONDS, slowest) + work.setup_seconds + further_steps * slowest)

    def compiling(self, work: Work, count: int) -> float:
        """For compiling `count` quantisers, and a step that nobody has timed. The user's limit does not count for
        compiling."""
        return COMPILE_SECONDS * count + self.first(work)

    def slot(self, step_seconds: float, calls: int) -> float:
        """For a slot of calls whose time is known: 60 s, or 20 times that."""
        return self._or_case_timeout(max(HANG_SECONDS, HANG_STEPS * step_seconds * calls))

    def numbers(self, work: Work) -> float:
        """For the passes after the timing: a reference in fp64 may run, or two steps while their memory is counted."""
        return self._or_case_timeout(4 * self.first(work))

    def _or_case_timeout(self, seconds: float) -> float:
        return seconds if self.case_timeout is None else self.case_timeout


USUAL = Limits()
