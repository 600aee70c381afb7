"""The models that an optimizer trains are found only by its parameters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fp8bench.features.train.lab.script_loops import ScriptLoopWatch, find_module, find_scaler


class Inner(nn.Module):
    """A table and layers in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    """A model with a head tied to the table, so that the inner model holds all parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Inner(), nn.Linear(4, 4, bias=False)
        self.head.weight = self.inner.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x))  # type: ignore[no-any-return]


class LightningModule(nn.Module):
    """Stands for Lightning's, whose forward a training does not call."""


class System(LightningModule):
    """Holds what it trains."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def sgd(parameters: Sequence[torch.Tensor] | object) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters), lr=0.1)  # type: ignore[call-overload]


def test_the_outermost_module_is_found() -> None:
    model = Model()
    assert find_module(sgd(model.parameters())) is model, "the tied head is inside"
    model = Model()
    # Adapters of the layers: a list of layers is never called.
    assert find_module(sgd([layer.bias for layer in model.inner.layers])) is model
    wrapped = torch.compile(Model(), backend="eager")
    assert find_module(sgd(wrapped.parameters())) is wrapped
    model = Model()
    system = System(model)
    assert find_module(sgd(system.parameters())) is model
    assert find_module(sgd([torch.zeros(2, requires_grad=True)])) is None


def test_modules_of_other_optimizers_stay_outside() -> None:
    pair = nn.ModuleDict({"generator": Inner(), "critic": Inner()})
    optimizers = [sgd(part.parameters()) for part in pair.values()]
    assert [find_module(optimizer) for optimizer in optimizers] == list(pair.values())
    model = Model()
    matrices = sgd([layer.weight for layer in model.inner.layers])
    biases = sgd([layer.bias for layer in model.inner.layers])
    # Both train the list of layers; the called module contains it.
    assert find_module(matrices) is find_module(biases) is model.inner


def test_a_scaler_is_found_by_its_optimizer() -> None:
    model = nn.Linear(2, 2)
    used, other = sgd(model.parameters()), sgd(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2)).sum()).backward()
    scaler.step(used)
    assert find_scaler(used) is scaler and find_scaler(other) is None


def test_an_optimizer_inside_another_has_no_stream(tmp_path: Path) -> None:
    """As in ZeroRedundancyOptimizer, which calls the step of an optimizer of its shard."""
    said: list[str] = []
    model = nn.Linear(2, 2)
    outer, inner = sgd(model.parameters()), sgd([model.weight])
    loops = ScriptLoopWatch(tmp_path / "s.jsonl", tmp_path, {"stride": 1}, said.append)
    for optimizer in (outer, inner, outer):
        loops.watch_optimizer(optimizer)
    loops.close()
    assert len(said) == 1 and "Linear by SGD" in said[0] and [path.name for path in tmp_path.iterdir()] == ["s.jsonl"]


def test_a_second_phase_with_another_optimizer_has_its_own_stream(tmp_path: Path) -> None:
    """The new optimizer of the same parameters takes over; the first stream ends with the rows that it has."""
    said: list[str] = []
    model = nn.Linear(2, 2)
    loops = ScriptLoopWatch(tmp_path / "s.jsonl", tmp_path, {"stride": 1}, said.append)
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: loops.watch_optimizer(optimizer))
    for optimizer, steps in ((sgd(model.parameters()), 5), (torch.optim.Adam(model.parameters()), 4)):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 2)).square().mean().backward()
            optimizer.step()
    handle.remove()
    loops.close()
    assert len(said) == 2 and "Linear by Adam" in said[1]
    rows = [(tmp_path / name).read_text().count('{"step":{') for name in ("s.jsonl", "s.2.jsonl")]
    assert rows == [4, 3], "each begins with its second step"


def test_a_closure_that_began_before_watching_is_no_mistake(tmp_path: Path) -> None:
    """Lightning calls an optimizer with a closure, and accumulates gradients before it."""
    model = nn.Linear(2, 2)
    optimizer = sgd(model.parameters())
    loops = ScriptLoopWatch(tmp_path / "s.jsonl", tmp_path, {"stride": 1}, lambda line: None)
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: loops.watch_optimizer(optimizer))

    losses: list[float] = []

    def run_batch() -> torch.Tensor:
        loss = model(torch.randn(4, 2)).square().mean() / 2
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        return loss

    for _ in range(4):
        optimizer.zero_grad()
        run_batch()
        optimizer.step(run_batch)  # type: ignore[arg-type]
    handle.remove()
    loops.close()
    stream = (tmp_path / "s.jsonl").read_text()
    rows = [json.loads(line)["step"] for line in stream.splitlines() if line.startswith('{"step"')]
    assert [row["loss"] for row in rows] == pytest.approx([sum(losses[at : at + 2]) for at in (2, 4, 6)])
    assert "gradients_left" not in stream and '"alarm"' not in stream
