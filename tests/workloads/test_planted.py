"""The slow-down that the self-test plants."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fp8bench.model import DeviceFacts, Scalar
from fp8bench.registry import workloads
from fp8bench.workloads import gemm
from fp8bench.workloads.planted import Planted, PlantedState
from tests.counts import for_each
from tests.workloads.steps import H200, SMALL, marks, setup_of

BASE: dict[str, Scalar] = {
    "base": "gemm",
    **{f"base.{name}": value for name, value in SMALL["gemm"].items()},
}


def prepared(extra: int) -> PlantedState:
    return Planted().prepare(setup_of("_planted", {**BASE, "extra": extra}, "fp32"))


def codes_of(state: PlantedState) -> list[str]:
    return marks(Planted(), state)


def test_it_is_hidden() -> None:
    assert "_planted" not in workloads.names() and "_planted" in workloads.names(hidden=True)


def test_the_other_workload_gets_its_own_parameters() -> None:
    state = prepared(0)
    assert isinstance(state.workload, gemm.Gemm) and isinstance(state.inner_state, gemm.GemmState)
    assert state.inner_state.a.shape == (24, 64) and state.inner_state.prepared_operands is None


@for_each("extra", [1, 7])
def test_so_many_tiny_calls_follow_each_step(extra: int) -> None:
    class Counting:
        asked = 0

        def is_contiguous(self) -> None:
            self.asked += 1

    state = prepared(extra)
    assert isinstance(state.tiny_tensor, torch.Tensor) and state.tiny_tensor.is_contiguous()
    state.tiny_tensor = tiny = Counting()  # type: ignore[assignment]
    for steps in (1, 2):
        assert codes_of(state) == [*codes_of(prepared(0)), "gemm", "unattributed"]
        assert tiny.asked == steps * extra


def test_with_none_the_step_is_the_other_workloads_own() -> None:
    state = prepared(0)
    assert codes_of(state) == ["unattributed", "gemm", "unattributed"]


def test_on_a_gpu_the_slow_down_is_the_device_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny host calls in parallel would not show, so the device is kept busy for as many cycles."""
    cycles: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", cycles.append)
    state = prepared(800)
    fewer = prepared(7)
    assert not state.on_device
    state.on_device = fewer.on_device = True
    for one in (state, fewer, prepared(0)):
        assert codes_of(one)[-1] == "unattributed"
    assert codes_of(state) == [*codes_of(prepared(0)), "gemm", "unattributed"]
    assert cycles == [80_000, 700, 80_000]


def test_it_is_the_device_s_facts_that_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = setup_of("_planted", {**BASE, "extra": 1}, "fp32")
    monkeypatch.setattr(DeviceFacts, "key", "cpu")
    assert Planted().prepare(replace(setup, facts=H200)).on_device
