"""A model through torch.compile, as one graph forward and one backward."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.protocols import Phases, SilentPhases

Forward = Callable[[Tensor, Tensor, Phases], Tensor]


def copy_function(function: Callable[..., Any]) -> FunctionType:
    """Copies a function with its code object: torch keeps graphs by that, for at most eight models, and silently shares
    or replaces them."""
    assert isinstance(function, FunctionType) and function.__closure__ is None
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__)


def compile_model(model: nn.Module, tokens: Tensor, targets: Tensor) -> Forward:
    """The model's loss, compiled forward and backward by a first call with tensors like these.

    A compiled graph gets no phases: the parts of a step are fused and reordered inside. Raises where the model does
    not become one graph, or torch.compile is switched off.
    """
    from torch._dynamo.utils import counters  # imports the compiler, so not at the top

    # 1. Make the graph of a copy of its forward pass.
    graph = torch.compile(MethodType(copy_function(type(model).forward), model), fullgraph=True, dynamic=False)

    # 2. Compile by one pass, and leave no gradients of it.
    unmarked = SilentPhases()  # torch.compile can trace its null contexts
    graphs = counters["stats"]["unique_graphs"]
    graph(tokens, targets, unmarked).backward()
    for parameter in model.parameters():
        parameter.grad = None
    if counters["stats"]["unique_graphs"] != graphs + 1:
        raise RuntimeError("torch.compile compiled nothing: is it switched off by TORCH_COMPILE_DISABLE?")

    def forward(tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        return graph(tokens, targets, unmarked)

    return forward
