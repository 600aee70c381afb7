"""Computes how long to wait for a worker's answer before the worker counts as hung."""

from __future__ import annotations

from dataclasses import dataclass

from fp8bench.model import Work

# Without a limit by the user, no request counts as hung before HANG_SECONDS. A slot may take HANG_STEPS times the
# expected time, if that is longer.
HANG_SECONDS = 60.0
HANG_STEPS = 20
# The lowest FLOPs and bytes per second of any useful device. They give the longest time that a step may take, before
# the step has been timed.
SLOWEST_FLOPS_PER_SECOND = 5e9
SLOWEST_BYTES_PER_SECOND = 50e6
# Ten times as long as it takes to compile one quantiser without a cache.
COMPILE_SECONDS = 300.0


@dataclass(frozen=True)
class RequestTimeLimits:
    """Time limits in seconds for the requests of a case. A `case_timeout` of the user replaces all of these limits, and
    only the time for compiling quantisers is added to it.
    """

    case_timeout: float | None = None

    def for_first_step(self, work: Work, further_steps: int = 0) -> float:
        """Returns the seconds to wait while a case is prepared and runs its first step: 60 s, or longer if a very slow
        device would need longer for the step's work. The time for compiling and for `further_steps` steps is added.
        """
        slowest_device_seconds = work.flops / SLOWEST_FLOPS_PER_SECOND + work.bytes / SLOWEST_BYTES_PER_SECOND
        return self._prefer_case_timeout(
            max(HANG_SECONDS, slowest_device_seconds) + work.setup_seconds + further_steps * slowest_device_seconds
        )

    def for_compiling(self, work: Work, count: int) -> float:
        """Returns the seconds to wait while `count` quantisers are compiled and a step runs for the first time. The
        user's limit applies only to the step.
        """
        return COMPILE_SECONDS * count + self.for_first_step(work)

    def for_slot(self, step_seconds: float, calls: int) -> float:
        """Returns the seconds to wait for a slot of `calls` steps whose duration is known. They are 20 times this
        duration, but at least 60 s.
        """
        return self._prefer_case_timeout(max(HANG_SECONDS, HANG_STEPS * step_seconds * calls))

    def for_untimed_pass(self, work: Work) -> float:
        """Returns the seconds to wait for an untimed pass. Such a pass may compute a reference in fp64, or run two
        steps and count their memory.
        """
        return self._prefer_case_timeout(4 * self.for_first_step(work))

    def _prefer_case_timeout(self, seconds: float) -> float:
        return seconds if self.case_timeout is None else self.case_timeout


DEFAULT_TIME_LIMITS = RequestTimeLimits()
