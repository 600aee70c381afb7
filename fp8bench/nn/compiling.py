"""Compiles a model with torch.compile: the whole model as one graph, or one graph that its blocks share."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.nn.gpt import GPT
from fp8bench.protocols import Phases, SilentPhases

ForwardPass = Callable[[Tensor, Tensor, Phases], Tensor]


def copy_function(function: Callable[..., Any]) -> FunctionType:
    """Copies a function together with its code object. torch stores compiled graphs by code object, for at most eight
    models. Without a copy, models would share or replace each other's graphs.
    """
    assert isinstance(function, FunctionType) and function.__closure__ is None  # the copy gets no closure
    code = function.__code__.replace()
    function_copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    function_copy.__kwdefaults__ = function.__kwdefaults__
    return function_copy


def compile_model(model: nn.Module, tokens: Tensor, targets: Tensor) -> ForwardPass:
    """Compiles the forward and backward pass of a model's loss by a first call with these tensors. Returns the
    compiled loss.

    A compiled graph has no phases, because parts of a step are fused and reordered in it. Raises an error if the
    model does not become one graph, or if torch.compile is switched off.
    """
    compiled_forward = torch.compile(
        MethodType(copy_function(type(model).forward), model), fullgraph=True, dynamic=False
    )
    return _compile_by_first_call(compiled_forward, model, tokens, targets, graphs=1)


def compile_blocks(model: GPT, tokens: Tensor, targets: Tensor) -> ForwardPass:
    """Compiles the blocks of a model by a first call with these tensors. Returns the model's loss function, whose
    embedding, head and loss run uncompiled.

    Equal blocks share one graph, so this takes a fraction of the time that the whole model takes. Blocks that calculate
    differently, like those of a precision map, have a graph each.
    """
    import torch._dynamo  # imports the compiler, which is slow

    block_forward = copy_function(type(model.blocks[0]).forward)
    for block in model.blocks:
        vars(block)["forward"] = torch.compile(MethodType(block_forward, block), fullgraph=True, dynamic=False)
    # Each block may need its own graph, and by default torch compiles a function only 8 times.
    with torch._dynamo.config.patch(recompile_limit=max(8, len(model.blocks))), warnings.catch_warnings():
        # The compiler reads `.grad` of all inputs. torch warns, because inputs of blocks are not leaf tensors.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        return _compile_by_first_call(model, model, tokens, targets, graphs=len(model.blocks))


def _compile_by_first_call(
    compiled_forward: ForwardPass, model: nn.Module, tokens: Tensor, targets: Tensor, graphs: int
) -> ForwardPass:
    """Compiles a forward pass by calling it and its backward pass once, and drops the gradients. Returns a forward pass
    that ignores its phase markers. Raises an error unless torch compiled at least one and at most `graphs` graphs.
    """
    from torch._dynamo.utils import counters

    silent_phases = SilentPhases()  # torch.compile can trace these markers, because they do nothing
    graph_count_before = counters["stats"]["unique_graphs"]
    compiled_forward(tokens, targets, silent_phases).backward()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        parameter.grad = None
    if not 1 <= counters["stats"]["unique_graphs"] - graph_count_before <= graphs:
        raise RuntimeError("torch.compile compiled no graph: is it switched off by TORCH_COMPILE_DISABLE?")

    def forward(tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        return compiled_forward(tokens, targets, silent_phases)

    return forward
