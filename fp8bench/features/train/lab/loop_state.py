"""Figures of what a loop leaves between steps: parameters without a gradient, parts in eval mode, zeroed moments."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fp8bench.features.train.lab.loop_figures import parameters_of
from fp8bench.features.train.lab.low_precision import Parameters
from fp8bench.features.train.lab.readings import Number

_DROPOUTS = (nn.modules.dropout._DropoutNd,)
_PARTS = (*_DROPOUTS, nn.modules.batchnorm._BatchNorm)


class LoopState:
    """Compares a module and the state of its optimizer with what they were."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._absent: dict[int, int] = {}
        self._first_in_eval: set[str] | None = None
        # Identity and version of the moments of one parameter after the last update.
        self._marks: list[tuple[int, int]] = []

    def update_begins(self, optimizer: Optimizer) -> bool:
        """Counts parameters without a gradient; returns whether moments were zeroed since the last update."""
        for parameter in parameters_of(optimizer):
            if parameter.grad is None:
                self._absent[id(parameter)] = self._absent.get(id(parameter), 0) + 1
            elif self._absent:
                self._absent.pop(id(parameter), None)
        moments = _first_moments(optimizer)
        # Only a tensor that was written outside of a step is read, which waits for its device.
        written = [moment for moment, mark in zip(moments, self._marks, strict=False) if _mark(moment) != mark]
        return any(not moment.any() for moment in written)

    def end_update(self, optimizer: Optimizer) -> None:
        self._marks = list(map(_mark, _first_moments(optimizer)))

    def figures(self, parameters: Parameters) -> dict[tuple[str, str], Number]:
        """Returns in how many steps in a row parameters had no gradient, and how many dropouts and batch norms were
        switched to eval mode, under the path of the first."""
        figures: dict[tuple[str, str], Number] = {}
        for name, parameter in parameters.items():
            steps = self._absent.get(id(parameter), 0)
            if steps:
                figures["steps_without_gradient", name.removesuffix(".weight")] = float(steps)
        switched = self._find_switched_parts()
        if switched:
            figures["parts_in_eval", switched[0]] = float(len(switched))
        return figures

    def _find_switched_parts(self) -> list[str]:
        parts = {
            path: module
            for path, module in self._module.named_modules()
            if not module.training and isinstance(module, _PARTS) and getattr(module, "p", True)
        }
        if self._first_in_eval is None:
            # Fine-tuning freezes batch norms, or whole parts with their dropout, from the start.
            frozen = any(not parameter.requires_grad for parameter in self._module.parameters())
            kinds = _PARTS if frozen else (nn.modules.batchnorm._BatchNorm,)
            self._first_in_eval = {path for path, module in parts.items() if isinstance(module, kinds)}
        return [path for path in parts if path not in self._first_in_eval]


def _mark(tensor: Tensor) -> tuple[int, int]:
    return id(tensor), tensor._version


def _first_moments(optimizer: Optimizer) -> list[Tensor]:
    state: dict[str, Any] = next(iter(optimizer.state.values()), {})
    return [value for value in state.values() if isinstance(value, Tensor) and value.is_floating_point()]
