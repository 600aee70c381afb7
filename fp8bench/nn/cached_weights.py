"""Weights that are cast once for several passes: by the micro-batches of a step, as Transformer Engine does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fp8bench.nn.linear import Linear
from fp8bench.nn.tensor_scales import largest_magnitudes
from fp8bench.protocols import Phases, Role


class CachedWeights:
    """The linear layers of a model whose weights a cast changes. Other weights are multiplied as they are."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [one for one in model.modules() if isinstance(one, Linear) and one.arithmetic.casts]

    @contextmanager
    def cast(self, phase: Phases) -> Iterator[None]:
        """Cast every weight, in both orientations; until the end layers multiply by these operands.

        Weights may not change before the end, and what was cast is gone then: nothing is left that could be old.
        """
        try:
            if self._layers:
                with phase.cast, torch.no_grad():
                    self._cast()
            yield
        finally:
            for layer in self._layers:
                layer.operands = None

    def _cast(self) -> None:
        taking = [layer for layer in self._layers if layer.arithmetic.takes_amax]
        amaxes = dict(zip(taking, largest_magnitudes([one.weight for one in taking]), strict=True))
        for layer in self._layers:
            arithmetic, weight = layer.arithmetic, layer.weight
            operand, turned = arithmetic.cast_both(weight, Role.WEIGHT, amaxes.get(layer))
            layer.operands = operand, turned or arithmetic.turn(operand, weight, Role.WEIGHT)
