"""A suite whose operators tell a simulated device their power: the true energy of each phase is watts times seconds.

It runs with the library of tests/measure/sensors/nvml/, whose state FP8BENCH_TEST_NVML names. Watts apply for the
modelled time on the clock instead of the real time, so that load has no effect.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8bench.suites import Axis, Phases, Setup, Work, Workload, one_of, workloads
from tests.measure.sensors.nvml.library import CHANGES, STATE, State

# Seconds and watts of each phase: the cast is 1% of the step.
TRUTH = {"gemm": (9.8e-3, 600.0), "cast": (2e-4, 80.0), "elementwise": (6e-3, 250.0), "optimizer_step": (4e-3, 410.0)}
IDLE = 0.5


class Teller:
    """Says what the device takes, through the memory that the library maps."""

    def __init__(self) -> None:
        with Path(os.environ[STATE]).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.state = State.from_buffer(self._map)
        self._at, self._joules, self._watts = 0, 0.0, self.state.device[0].low

    def take(self, watts: float, seconds: float) -> None:
        """Draws these watts for these seconds, then idle power; returns afterwards."""
        start = time.monotonic_ns()
        end = start + round(seconds * 1e9)
        self._change(start, watts)
        self._change(end, IDLE)
        while time.monotonic_ns() < end:
            pass

    def _change(self, at: int, watts: float) -> None:
        self._joules += self._watts * (at - self._at) / 1e9
        self._at, self._watts = at, watts
        one = self.state.change[self.state.changes % CHANGES]
        one.at_ns, one.joules, one.watts = at, self._joules, watts
        self.state.changes += 1


teller = Teller()
stepping: list[bool] = []


@contextmanager
def step_in_progress() -> Iterator[None]:
    stepping.append(True)
    try:
        yield
    finally:
        stepping.pop()


@torch.library.custom_op("told::burn", mutates_args=())
def burn(x: Tensor, watts: float, seconds: float) -> Tensor:
    """Draws these watts for these seconds."""
    teller.take(watts, seconds)
    return x + 1


@torch.library.custom_op("told::pretend", mutates_args=())
def pretend(x: Tensor, watts: float, seconds: float) -> Tensor:
    """Takes a third as long when called by anything but the step."""
    teller.take(watts if stepping else watts / 3, seconds)
    return x + 1


@torch.library.custom_op("told::lower", mutates_args=())
def lower(x: Tensor, watts: float, seconds: float) -> Tensor:
    """Lowers the power limit for good when called."""
    teller.state.device[0].enforced_cap_mw = 500_000
    teller.take(watts, seconds)
    return x + 1


@workloads.register("told")
class Told(Workload):
    """Four phases of known power; `how` changes the product."""

    name = "told"
    summary = "phases of known power"
    dtypes = ("fp32",)

    def axes(self, facts: Any) -> tuple[Axis, ...]:
        hows = ("burn", "pretend", "hidden", "lower", "sparse")
        return (Axis("how", "what its product is", ("burn",), one_of(*hows)),)

    def work(self, params: Any) -> Work:
        return Work(flops=1e9, tokens=128)

    def prepare(self, setup: Setup) -> dict[str, Any]:
        return {"how": setup.case.param("how"), "x": torch.ones(16), "sparse": torch.eye(4).to_sparse()}

    def step(self, state: dict[str, Any], phase: Phases) -> None:
        x, how = state["x"], state["how"]
        with step_in_progress():
            with phase.cast:
                x = burn(x, *_told("cast"))
            with phase.gemm:
                product = {"pretend": pretend, "lower": lower}.get(how, burn)
                watts, seconds = _told("gemm")
                if how == "hidden":  # half of it outside of operators
                    seconds /= 2
                    teller.take(watts, seconds)
                x = product(x, watts, seconds)
                if how == "sparse":
                    torch.mm(state["sparse"], torch.ones(4, 4))
            with phase.elementwise:
                x = burn(x, *_told("elementwise"))
            with phase.optimizer_step:
                burn(x, *_told("optimizer_step"))


def _told(name: str) -> tuple[float, float]:
    seconds, watts = TRUTH[name]
    return watts, seconds
