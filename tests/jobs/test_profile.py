"""Profiles of live models: the worker that runs them, and that models are unchanged afterwards."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8bench
from fp8bench.errors import UsageError
from fp8bench.model import Case, Label
from fp8bench.protocols import SilentObserver
from fp8bench.workloads.model import LOADED_MODELS, MODEL_MAKERS_IN_PROCESS

HOW: dict[str, Any] = {"dtypes": ["mxfp4"], "rounds": 1, "energy": False}


class Tied(nn.Module):
    """Two layers of one weight, a batch norm, a hook, something frozen and something in the other mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.norm.eval()
        self.calls = 0
        self.register_forward_hook(lambda module, given, result: None)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        self.calls += 1
        x = nn.functional.dropout(x, 0.1)
        return {"hidden": self.second(self.norm(torch.relu(self.first(x)))) * scale}


def loss(output: dict[str, Tensor]) -> Tensor:
    return output["hidden"].abs().mean()


def everything(model: nn.Module) -> list[Any]:
    """Everything about the model that could change, with identities where they matter."""
    state: list[Any] = [torch.get_rng_state().tolist(), torch.is_grad_enabled(), torch.get_num_threads()]
    for name, module in model.named_modules():
        own = {key: id(value) for key, value in vars(module).items()}
        hooks = {key: list(value.items()) for key, value in vars(module).items() if key.endswith("_hooks")}
        state.append((name, type(module), module.training, own, hooks))
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        grad = None if tensor.grad is None else tensor.grad.tolist()
        state.append((name, id(tensor), tensor.requires_grad, tensor._version, grad, tensor.tolist()))
    return [copy.deepcopy(part) if isinstance(part, list) else part for part in state]


@pytest.fixture
def model() -> Tied:
    return Tied()


class Interrupting(SilentObserver):
    """Raises KeyboardInterrupt as soon as something is done."""

    def __init__(self, doing: str) -> None:
        self.doing = doing

    def working(self, case: Case, doing: str, share: float) -> None:
        if doing == self.doing:
            raise KeyboardInterrupt


def test_one_that_cannot_be_sent_is_measured_here_and_left_as_it_was(
    model: Tied, store: Path, short_slots: None
) -> None:
    """Its hook is a lambda, which cannot be pickled."""
    batch = {"x": torch.randn(4, 16), "scale": 2.0}
    before = everything(model)
    run = fp8bench.profile(model, batch, loss=loss, **HOW)
    assert everything(model) == before
    assert run.ok and not run.request.isolation and "cannot be sent to a worker process" in run.notes[0]
    assert all(Label.IN_PROCESS in finding.labels for finding in fp8bench.findings(run).values())
    assert not MODEL_MAKERS_IN_PROCESS and not LOADED_MODELS


@pytest.mark.parametrize(
    "doing",
    [
        "measuring",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("preparing", "checking numbers", "measuring memory")),
    ],
)
def test_ctrl_c_leaves_it_as_it_was(doing: str, model: Tied, store: Path, short_slots: None) -> None:
    batch = (torch.randn(4, 16),)
    before = everything(model)
    run = fp8bench.profile(model, batch, loss=loss, observer=Interrupting(doing), **HOW)
    assert everything(model) == before and not run.finished and not MODEL_MAKERS_IN_PROCESS and not LOADED_MODELS


def test_an_exception_leaves_it_as_it_was(model: Tied, store: Path) -> None:
    batch = torch.randn(4, 8)
    before = everything(model)
    with pytest.raises(UsageError, match="its model fails in forward"):
        fp8bench.profile(model, batch, loss=loss, **HOW)
    assert everything(model) == before and not MODEL_MAKERS_IN_PROCESS and not LOADED_MODELS


@pytest.mark.slow
def test_one_that_can_be_sent_goes_to_a_process_of_its_own(store: Path, short_slots: None) -> None:
    run = fp8bench.profile(nn.Sequential(nn.Linear(16, 16)), torch.randn(4, 16), **HOW)
    assert run.ok and run.request.isolation and not run.notes and not MODEL_MAKERS_IN_PROCESS
    assert dict(run.records[0].case.params)["make"] == "Sequential"
    assert not any(Label.IN_PROCESS in finding.labels for finding in fp8bench.findings(run).values())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((nn.Linear(2, 2),), "a model with a batch"),
        (("module:make", torch.ones(2)), "takes 'module:function' alone"),
        ((nn.Linear(2, 2), torch.ones(2), 3), "returns (Linear, Tensor, int)"),
    ],
)
def test_what_is_no_model_with_a_batch_is_refused(arguments: tuple[Any, ...], sentence: str, store: Path) -> None:
    *given, last = (*arguments, None) if len(arguments) < 3 else arguments
    with pytest.raises(UsageError) as refused:
        fp8bench.profile(*given, loss=last, isolation=False, dtypes=["bf16"])  # type: ignore[arg-type]
    assert sentence in str(refused.value)


def test_options_that_no_profile_has_are_named(store: Path) -> None:
    with pytest.raises(UsageError, match="unknown argument of profile 'static_scales'"):
        fp8bench.profile("module:make", static_scales=3)
