"""A worker whose steps take scripted times."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from fp8bench.measure.handle import Worker
from fp8bench.model import CELL_PHASES, Case, DeviceFacts
from fp8bench.model.raw import RawSlot, RawStep
from tests.facts import CPU

GEMM = CELL_PHASES.index("gemm")


class Scripted(Worker):
    """Answers slots with steps of the nanoseconds that a function gives for a key and its case; noise only adds."""

    def __init__(
        self, nanoseconds: Callable[[str, Case], float], codes: tuple[int, ...] = (GEMM,), noise: float = 0.002
    ) -> None:
        self._nanoseconds, self._codes, self._noise = nanoseconds, codes, noise
        self._random = random.Random(1)
        self.held: dict[str, Case] = {}
        self.prepared: list[Case] = []

    def ask(self, limit: float, name: str, *arguments: Any) -> Any:
        if name == "prepare":
            self.held[arguments[0]] = arguments[1]
            self.prepared.append(arguments[1])
        if name == "release":
            del self.held[arguments[0]]
            return ()
        if name != "slot":
            return None
        key, calls, *_ = arguments
        bare = self._nanoseconds(key.partition(" #")[0], self.held[key]) / len(self._codes)
        steps = [
            RawStep(self._codes, (round(bare * (1 + self._noise * self._random.random() ** 2)),) * len(self._codes))
            for _ in range(calls)
        ]
        seconds = sum(sum(step.intervals_ns) for step in steps) / 1e9
        return RawSlot(tuple(steps), seconds, seconds, seconds / calls)

    def probe(self) -> tuple[DeviceFacts, ...]:
        return (CPU,)

    def close(self) -> None:
        """Nothing is open."""

    def restart(self) -> None:
        """Nothing has ended."""
