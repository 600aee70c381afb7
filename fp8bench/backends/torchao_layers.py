"""torchao: its float8 training, converted layer by layer."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

from fp8bench.errors import BackendMissing
from fp8bench.formats.hardware import emulated, native
from fp8bench.model import DeviceFacts, Level, Support
from fp8bench.nn.shared_precisions import RecipePrecision, wrong_pairing
from fp8bench.protocols import Arithmetic, Backend, Precision
from fp8bench.registry import backends

if TYPE_CHECKING:
    from torch import nn

# Modes that are recipes of torchao's, by its names for them.
RECIPES = {
    "fp8": "tensorwise",
    "fp8-rowwise": "rowwise",
    "fp8-rowwise:weight-gradient=bf16": "rowwise_with_gw_hp",
}


@backends.register("torchao")
class Torchao(Backend):
    """convert_to_float8_training on each linear layer, whose weight stays float32 and fp8bench's own."""

    name = "torchao"
    summary = "torchao's float8 layers (tensorwise, rowwise, rowwise_with_gw_hp), native or in its own emulation"
    package = "torchao"
    install = "torchao"
    least = "0.13"
    whole_layers = True

    def support(self, precision: Precision, facts: DeviceFacts) -> Support:
        assert isinstance(precision, RecipePrecision)
        recipe = RECIPES.get(precision.plain_mode)
        if recipe is None:
            return wrong_pairing(self.name, precision, RECIPES)
        own = precision.own_support(facts)
        if own.level is Level.NATIVE:
            return native(f"torchao's recipe {recipe}, on torch's scaled product")
        if own.level is Level.EMULATED:
            return emulated(f"torchao's own emulation of its recipe {recipe}: {own.reason.partition(':')[0]}")
        return own

    def imported(self) -> None:
        logging.disable(logging.WARNING)  # it warns of kernels that were built for other versions of Python and torch
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import torchao.float8  # noqa: F401
        except (ImportError, RuntimeError, OSError, AttributeError) as error:
            raise BackendMissing(self.name, error) from error
        finally:
            logging.disable(logging.NOTSET)

    def arithmetic(self, precision: Precision, facts: DeviceFacts) -> Arithmetic:
        self.imported()
        import torch
        from torch import nn
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        from fp8bench.nn.whole_layers import WholeLayer, WholeLayers

        assert isinstance(precision, RecipePrecision)
        named = Float8LinearConfig.from_recipe_name(RECIPES[precision.plain_mode])
        config = replace(named, emulate=self.support(precision, facts).level is Level.EMULATED)

        def layer(weight: nn.Parameter) -> WholeLayer:
            outputs, inputs = weight.shape
            # Without memory it draws no random numbers: those of fp8bench's own weights stay as they are.
            plain = nn.Linear(inputs, outputs, bias=False, device="meta")
            plain.weight = weight
            return WholeLayer(convert_to_float8_training(plain, config=config))

        return WholeLayers(self.name, torch.bfloat16, layer)
