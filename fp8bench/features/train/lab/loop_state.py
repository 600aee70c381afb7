"""Figures of the state of a loop between steps: parameters without a gradient, layers in eval mode, zeroed moments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fp8bench.features.train.lab.low_precision import NamedParameters
from fp8bench.features.train.lab.readings import FigureValue

_DROPOUT_LAYERS = (nn.modules.dropout._DropoutNd,)
_MODE_DEPENDENT_LAYERS = (*_DROPOUT_LAYERS, nn.modules.batchnorm._BatchNorm)


class LoopState:
    """Compares a module and the state of its optimizer with earlier steps."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._steps_without_gradient: dict[int, int] = {}
        self._initially_in_eval: set[str] | None = None
        # Identity and version counter of each state tensor (moment) of the optimizer's first parameter, after the last
        # update.
        self._moment_marks: list[tuple[int, int]] = []

    def begin_update(self, optimizer: Optimizer, without_gradient: Sequence[Tensor]) -> bool:
        """Counts steps without a gradient for each parameter. Returns whether moments were zeroed since the last
        update."""
        counts = self._steps_without_gradient
        self._steps_without_gradient = {
            id(parameter): counts.get(id(parameter), 0) + 1 for parameter in without_gradient
        }
        optimizer_moments = _list_moments_of_first_parameter(optimizer)
        # Reading moments waits for the device. So only those moments are read that were changed outside of a step.
        # Before the first update there are no marks, so `zip` finds nothing.
        changed_optimizer_moments = [
            moment
            for moment, mark in zip(optimizer_moments, self._moment_marks, strict=False)
            if _get_id_and_version(moment) != mark
        ]
        return any(not moment.any() for moment in changed_optimizer_moments)

    def end_update(self, optimizer: Optimizer) -> None:
        self._moment_marks = list(map(_get_id_and_version, _list_moments_of_first_parameter(optimizer)))

    def list_figures(self, parameters: NamedParameters) -> dict[tuple[str, str], FigureValue]:
        """Returns figures by name and path. `steps_without_gradient` counts the steps in a row in which a parameter had
        no gradient. `parts_in_eval` is the number of dropouts and batch norms that the loop has switched to eval mode.
        Its path is that of the first of these layers.
        """
        figures: dict[tuple[str, str], FigureValue] = {}
        for name, parameter in parameters.items():
            steps = self._steps_without_gradient.get(id(parameter), 0)
            if steps:
                figures["steps_without_gradient", name.removesuffix(".weight")] = float(steps)
        switched_layers = self._list_layers_switched_to_eval()
        if switched_layers:
            figures["parts_in_eval", switched_layers[0]] = float(len(switched_layers))
        return figures

    def _list_layers_switched_to_eval(self) -> list[str]:
        layers_in_eval = {
            path: module
            for path, module in self._module.named_modules()
            if not module.training and isinstance(module, _MODE_DEPENDENT_LAYERS) and getattr(module, "p", True)
        }
        if self._initially_in_eval is None:
            # Fine-tuning freezes batch norms, or parts of a model with their dropout, from the first step on.
            has_frozen_parameters = any(not parameter.requires_grad for parameter in self._module.parameters())
            allowed_layer_types = (
                _MODE_DEPENDENT_LAYERS if has_frozen_parameters else (nn.modules.batchnorm._BatchNorm,)
            )
            self._initially_in_eval = {
                path for path, module in layers_in_eval.items() if isinstance(module, allowed_layer_types)
            }
        return [path for path in layers_in_eval if path not in self._initially_in_eval]


def _get_id_and_version(tensor: Tensor) -> tuple[int, int]:
    return id(tensor), tensor._version


def _list_moments_of_first_parameter(optimizer: Optimizer) -> list[Tensor]:
    state: dict[str, Any] = next(iter(optimizer.state.values()), {})
    return [value for value in state.values() if isinstance(value, Tensor) and value.is_floating_point()]
