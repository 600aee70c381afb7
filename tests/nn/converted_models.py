"""Small models for conversions, and a full inventory of a model to compare before and after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.conversion import Conversion
from fp8bench.protocols import Arithmetic, Layer

FP32 = PlainArithmetic(torch.float32)


def everything_in(model: nn.Module) -> dict[str, Any]:
    """Everything that a conversion could change: attributes in order, parameters with their bits, hooks, classes."""
    modules = {
        path: (
            type(module),
            list(vars(module)),
            {name: id(value) for name, value in vars(module).items()},
            module.training,
        )
        for path, module in model.named_modules(remove_duplicate=False)
    }
    inside = {
        path: {name: list(value.items()) for name, value in vars(module).items() if "hooks" in name}
        for path, module in model.named_modules()
    }
    tensors = {
        name: (
            id(parameter),
            parameter.data_ptr(),
            parameter._version,
            parameter.requires_grad,
            parameter.detach().clone().tolist(),
        )
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    return {"modules": modules, "hooks": inside, "tensors": tensors, "state": list(model.state_dict())}


def always(arithmetic: Arithmetic) -> Callable[[Layer], Arithmetic]:
    return lambda layer: arithmetic


def converted(model: nn.Module, arithmetic: Arithmetic = FP32, **options: Any) -> Conversion:
    return Conversion(model, always(arithmetic), **options)


def outcome(model: nn.Module, x: Tensor, pull: Tensor | None = None) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = model(x)
    pull = torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).to(y.dtype) if pull is None else pull
    return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], pull)]


class Experts(nn.Module):
    """A stack of experts, multiplied in one of the usual ways."""

    def __init__(self, way: str, experts: int = 3, inputs: int = 16, outputs: int = 32) -> None:
        super().__init__()
        self.way = way
        transposed = way in ("bmm", "grouped", "matmul")
        sides = (inputs, outputs) if transposed else (outputs, inputs)
        self.stack = nn.Parameter(torch.randn(experts, *sides) / 4)
        self.position = nn.Parameter(torch.zeros(2, 3, inputs))

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "linear":
            return torch.stack([F.linear(part, self.stack[index]) for index, part in enumerate(x)])
        if self.way == "chosen":  # a matrix for each row of the first expert's
            chosen = self.stack[torch.zeros(x.shape[1], dtype=torch.long)]
            first = torch.bmm(chosen, x[0].unsqueeze(-1)).squeeze(-1)
            return torch.stack([first, *(F.linear(part, self.stack[at + 1]) for at, part in enumerate(x[1:]))])
        if self.way == "left":
            return (self.stack @ x.mT).mT
        if self.way == "einsum":
            return torch.einsum("emk,enk->emn", x, self.stack)
        if self.way == "grouped":
            ends = torch.arange(1, len(x) + 1, dtype=torch.int32) * x.shape[1]
            return F.grouped_mm(x.flatten(0, 1), self.stack, offs=ends).view(*x.shape[:2], -1)
        return torch.bmm(x, self.stack) if self.way == "bmm" else x @ self.stack


def sequential(*layers: nn.Module | Sequence[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*layers)  # type: ignore[arg-type]
