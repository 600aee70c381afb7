"""A model through torch.compile: as one graph, or an exception that says why not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType, MethodType

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fp8bench.protocols import Phases

Forward = Callable[[Tensor, Tensor, Phases], Tensor]


class UnmarkedPhases:
    """Phases that mark nothing, by the one context manager that torch.compile can look into."""

    data_load: AbstractContextManager[None] = nullcontext()
    cast: AbstractContextManager[None] = nullcontext()
    gemm: AbstractContextManager[None] = nullcontext()
    attention: AbstractContextManager[None] = nullcontext()
    accumulate: AbstractContextManager[None] = nullcontext()
    optimizer_step: AbstractContextManager[None] = nullcontext()
    elementwise: AbstractContextManager[None] = nullcontext()


def compiled(model: nn.Module, tokens: Tensor, targets: Tensor) -> Forward:
    """The model's loss as a compiled function, forward and backward compiled by a first call for tensors like these.

    Inside a compiled graph the parts of a step are fused and reordered, so it is given no phases. Its code object is
    its own: torch keeps compiled graphs by code object, for at most eight models, and without a word shares or
    replaces them.
    """
    method = type(model).forward
    assert isinstance(method, FunctionType) and method.__closure__ is None
    own = FunctionType(method.__code__.replace(), method.__globals__, method.__name__, method.__defaults__)
    graph = torch.compile(MethodType(own, model), fullgraph=True, dynamic=False)
    unmarked = UnmarkedPhases()
    before = counters["stats"]["unique_graphs"]
    graph(tokens, targets, unmarked).backward()
    for parameter in model.parameters():
        parameter.grad = None
    if counters["stats"]["unique_graphs"] != before + 1:
        raise RuntimeError("torch.compile compiled nothing: is it switched off by TORCH_COMPILE_DISABLE?")

    def forward(tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        loss: Tensor = graph(tokens, targets, unmarked)
        return loss

    return forward
