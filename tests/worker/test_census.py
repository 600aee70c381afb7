"""Every public name of torch that could be a switch is watched, or left out for a reason that somebody gave."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fp8bench.user_code.switches import NotInUse, Unset, now, plain, put_back
from fp8bench.worker import torch_state, torch_switches
from fp8bench.worker.switches import switches
from tests.counts import for_each
from tests.worker.census import TABLE, census, decided, versions

HERE = ".".join(torch.__version__.split(".")[:2])
WATCHED = "watched"
ON_A_GPU = "watched where there is a GPU"


def test_the_torch_at_hand_has_no_name_that_nobody_has_decided_on() -> None:
    assert HERE in versions(), f"read torch {HERE} with python -m tests.worker.census, and decide on what is new"
    names, known = census(Path(torch.__file__).parent), decided(HERE)
    assert names - known.keys() == set(), f"decide on these in {TABLE.name}"
    assert known.keys() - names == set(), f"torch {HERE} has these no longer: say so in {TABLE.name}"
    # What the interpreter sees, too: C has functions of which no file speaks.
    assert {f"torch.{name}" for name in dir(torch) if name.startswith("set_")} <= known.keys()


@for_each("version", versions())
def test_what_the_table_calls_watched_is_watched(version: str) -> None:
    known, later = decided(version), versions().index(version) > versions().index(HERE)
    if later:
        known = {name: heading for name, heading in known.items() if name in decided(HERE)}
    watched = {name for switch in switches() for name in switch.names}
    table = {name for name, heading in known.items() if heading == WATCHED}
    assert table - watched == set()
    assert {name for name in watched if name in known} - table == set()
    assert watched - known.keys() <= {name for other in versions() for name in decided(other)}
    headings = set(decided(version).values())  # what is left out has a reason
    assert {WATCHED, ON_A_GPU} < headings and all(len(heading.split()) > 1 for heading in headings - {WATCHED})


def test_those_of_gpus_are_watched_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    of_gpus = list(torch_switches._of_gpus())
    table = {name for name, heading in decided(HERE).items() if heading == ON_A_GPU}
    assert {name for switch in of_gpus for name in switch.names} == table
    if not torch.cuda.is_initialized():
        assert all(switch.read() is (NotInUse if switch.usual is Unset else switch.usual) for switch in of_gpus)


def test_a_gpu_that_comes_into_use_within_a_step_has_changed_no_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own optimizers ask for a GPU's stream, whatever their parameters lie on.

    In a worker that nobody had asked for devices every step on the CPU failed by what cuFFT's plans were at.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "cufft_plan_cache", SimpleNamespace(max_size=4096))
    plans = [one for one in torch_switches._of_gpus() if one.name == "cuFFT's plans"]
    used = [False]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used[0])
    before = now(plans)
    assert [plain(value) for value in before] == [None]
    used[0] = True
    assert put_back(plans, before) == []
    before = now(plans)
    torch.backends.cuda.cufft_plan_cache.max_size = 7
    assert put_back(plans, before) == ["cuFFT's plans at 7 (it was 4096)"]
    assert torch.backends.cuda.cufft_plan_cache.max_size == 4096


def test_a_torch_that_does_not_say_whether_it_pools_memory_pools_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 on a GPU: every case failed of it."""
    name = "_cuda_cudaCachingAllocator_is_enabled"
    monkeypatch.setattr(torch._C, name, lambda: False, raising=False)
    assert torch_state.pools_memory() is False
    monkeypatch.delattr(torch._C, name)
    assert torch_state.pools_memory() is True
