"""The slow-down that the self-test plants."""

from __future__ import annotations

import pytest
import torch

from fp8bench.devices.cpu import HostStamper
from fp8bench.model import CELL_PHASES, Case, DeviceFacts
from fp8bench.protocols import Setup
from fp8bench.registry import precisions, workloads
from fp8bench.worker.clock import PhaseClock
from fp8bench.workloads import gemm
from fp8bench.workloads.planted import Planted, PlantedState

CPU = DeviceFacts("cpu", 0, "a processor", 16 << 30, "2.13.0")
BASE = (
    ("base", "gemm"),
    ("base.m", 8),
    ("base.n", 8),
    ("base.k", 8),
    ("base.product", "forward"),
    ("base.operands", "cast"),
)


def prepared(extra: int) -> PlantedState:
    case = Case("_planted", (*BASE, ("extra", extra)), "fp32", "cpu")
    arithmetic = precisions.get("fp32").arithmetic(CPU)
    return Planted().prepare(Setup(case, CPU, 0, arithmetic, arithmetic, {}))


def codes_of(state: PlantedState) -> list[str]:
    clock = PhaseClock(HostStamper())
    clock.begin()
    Planted().step(state, clock)
    return [CELL_PHASES[code] for code in clock.end()[0]]


def test_it_is_hidden() -> None:
    """Nobody chooses it from a list."""
    assert "_planted" not in workloads.names() and "_planted" in workloads.names(hidden=True)


def test_the_other_workload_gets_its_own_parameters() -> None:
    """Names without their prefix, and nothing else."""
    state = prepared(0)
    assert isinstance(state.workload, gemm.Gemm) and isinstance(state.inner, gemm.GemmState)
    assert state.inner.a.shape == (8, 8) and state.inner.ready is None


@pytest.mark.parametrize("extra", [1, 7])
def test_so_many_tiny_calls_follow_each_step(extra: int) -> None:
    """In a phase, so that the slow-down is seen in the cells."""

    class Counting:
        asked = 0

        def is_contiguous(self) -> None:
            self.asked += 1

    state = prepared(extra)
    assert isinstance(state.tiny, torch.Tensor) and state.tiny.is_contiguous()
    state.tiny = tiny = Counting()  # type: ignore[assignment]
    for steps in (1, 2):
        assert codes_of(state) == [*codes_of(prepared(0)), "gemm", "unattributed"]
        assert tiny.asked == steps * extra


def test_with_none_the_step_is_the_other_workloads_own() -> None:
    """An identical candidate must be identical."""
    state = prepared(0)
    assert codes_of(state) == ["unattributed", "gemm", "unattributed"]
