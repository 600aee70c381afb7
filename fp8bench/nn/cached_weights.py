"""Weights that are cast once for several passes: by the micro-batches of a step, as Transformer Engine does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from fp8bench.nn.linear import Linear
from fp8bench.nn.tensor_scales import largest_magnitudes
from fp8bench.nn.whole_layers import WholeLayers
from fp8bench.protocols import Phases, Role


class CachedWeights:
    """The linear layers of a model whose weights a cast changes. Other weights are multiplied as they are.

    Layers of another library are told which pass is a step's first, and cast their weights by themselves.
    """

    def __init__(self, model: nn.Module) -> None:
        linear = [one for one in model.modules() if isinstance(one, Linear)]
        self._layers = [one for one in linear if one.arithmetic.casts]
        self._whole = [one.arithmetic for one in linear if isinstance(one.arithmetic, WholeLayers)]

    @contextmanager
    def cast(self, phase: Phases) -> Iterator[None]:
        """Cast every weight, in both orientations; until the end layers multiply by these operands.

        Weights may not change before the end, and what was cast is gone then: nothing is left that could be old.
        """
        with ExitStack() as steps:
            for whole in self._whole:
                steps.enter_context(whole.step())
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
