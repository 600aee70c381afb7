"""Compiles a model with torch.compile, as one graph for forward and one for backward."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.protocols import Phases, SilentPhases

Forward = Callable[[Tensor, Tensor, Phases], Tensor]


def copy_function(function: Callable[..., Any]) -> FunctionType:
    """Copies a function together with its code object. torch stores compiled graphs by code object, for at most eight
    models. Without a copy, models would share or replace each other's graphs.
    """
    assert isinstance(function, FunctionType) and function.__closure__ is None
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__)


def compile_model(model: nn.Module, tokens: Tensor, targets: Tensor) -> Forward:
    """Compiles the forward and backward pass of a model's loss by a first call with these tensors. Returns the
    compiled loss.

    A compiled graph has no phases, because parts of a step are fused and reordered in it. Raises an error if the
    model does not become one graph, or if torch.compile is switched off.
    """
    from torch._dynamo.utils import counters  # imports the compiler, which is slow

    # 1. Make a graph of a copy of the model's forward pass.
    compiled_forward = torch.compile(
        MethodType(copy_function(type(model).forward), model), fullgraph=True, dynamic=False
    )

    # 2. Compile by running it once, and drop that run's gradients.
    silent_phases = SilentPhases()  # torch.compile can trace these markers, because they do nothing
    graphs_before = counters["stats"]["unique_graphs"]
    compiled_forward(tokens, targets, silent_phases).backward()
    for parameter in model.parameters():
        parameter.grad = None
    if counters["stats"]["unique_graphs"] != graphs_before + 1:
        raise RuntimeError("torch.compile compiled no graph: is it switched off by TORCH_COMPILE_DISABLE?")

    def forward(tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        return compiled_forward(tokens, targets, silent_phases)

    return forward
