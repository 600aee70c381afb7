"""A suite of which rank 1 fails in its fourth step, in every way a rank can."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

from fp8bench.suites import Axis, Work, Workload, one_of, workloads

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fp8bench.suites import DeviceFacts, Phases, Scalar, Setup

FOREVER = 1000.0
LEFT = ["sleep", f"{FOREVER:g}"]
AT = 4


def raise_it(state: dict[str, Any]) -> None:
    raise ValueError("boom")


def exhaust(state: dict[str, Any]) -> None:
    raise MemoryError("no more")


def send_too_much(state: dict[str, Any]) -> None:
    state["sums"] = state["sums"].repeat(2, 1)


def leave_somebody() -> None:
    """Starts a process in a separate session, outside the rank's process group."""
    subprocess.Popen(LEFT, start_new_session=True)


def end_rank(state: dict[str, Any]) -> None:
    leave_somebody()
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_end(state: dict[str, Any]) -> None:
    leave_somebody()
    time.sleep(FOREVER)


def end_launcher(state: dict[str, Any]) -> None:
    leave_somebody()
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(FOREVER)


FAULTS: Mapping[str, Callable[[dict[str, Any]], object]] = {
    "exit": lambda state: os._exit(7),
    "SIGKILL": end_rank,
    "raise": raise_it,
    "memory": exhaust,
    "SIGSEGV": lambda state: ctypes.string_at(0),
    "hang": wait_for_end,
    "clean-exit": lambda state: os._exit(0),
    "size": send_too_much,
    "launcher": end_launcher,
    "sums": lambda state: None,
    "none": lambda state: None,
}


@workloads.register("failing_ranks")
class FailingRanks(Workload):
    """Products that every rank makes, and their sum."""

    name = "failing_ranks"
    summary = "ranks that fail"
    dtypes = ("fp32",)

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        return (Axis("fault", "what happens to rank 1", ("none",), one_of(*FAULTS)),)

    def work(self, params: Mapping[str, Scalar]) -> Work:
        return Work(flops=2 * 64**3)

    def prepare(self, setup: Setup) -> dict[str, Any]:
        import torch

        return {"steps": 0, "fault": str(setup.case.param("fault")), "sums": torch.ones(64, 64)}

    def error(self, setup: Setup) -> dict[str, float]:
        import torch.distributed as dist

        return {"sum": float(dist.get_rank())} if setup.case.param("fault") == "sums" else {}

    def step(self, state: dict[str, Any], phase: Phases) -> None:
        import torch
        import torch.distributed as dist

        state["steps"] += 1
        with phase.gemm:
            if state["steps"] == AT and dist.get_rank() == 1:
                FAULTS[state["fault"]](state)
            torch.mm(torch.ones(64, 64), torch.ones(64, 64))
        with phase.communication:
            dist.all_reduce(state["sums"].fill_(1.0))
