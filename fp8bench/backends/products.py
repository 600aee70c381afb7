"""Backends that multiply with fp8bench's own rounding, with torch's scaled products, or with torchao's layers."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

from fp8bench.errors import BackendMissing
from fp8bench.formats.hardware import emulated, is_amd, is_nvidia, native, refused, unknown_kind
from fp8bench.model import DeviceFacts, Support
from fp8bench.nn.shared_precisions import RecipePrecision, native_arithmetic, recipe_of, wrong_pairing
from fp8bench.protocols import Arithmetic, Backend, Precision
from fp8bench.registry import backends

if TYPE_CHECKING:
    from torch import nn


@backends.register("emulated")
class EmulatedProducts(Backend):
    """Emulation, which every device can do, even one with units for the format."""

    name = "emulated"
    summary = "values rounded by fp8bench, products in fp32: any recipe, any shape, and no speed"

    def support(self, precision: Precision, facts: DeviceFacts) -> Support:
        if facts.accelerated and not (is_nvidia(facts) or is_amd(facts)):
            return unknown_kind(facts, precision.name)
        return emulated("backend=emulated: values rounded, products in fp32")

    def arithmetic(self, precision: Precision, facts: DeviceFacts) -> Arithmetic:
        from fp8bench.nn.arithmetics import RecipeArithmetic

        return RecipeArithmetic(recipe_of(precision))


@backends.register("torch")
class TorchProducts(Backend):
    """torch's scaled products. Unlike `auto` it does not fall back to emulation."""

    name = "torch"
    summary = "torch's scaled products alone: refused where there are none"

    def support(self, precision: Precision, facts: DeviceFacts) -> Support:
        assert isinstance(precision, RecipePrecision)
        support = precision.own_support(facts)
        if not support.is_emulated:
            return support
        return refused(f"torch multiplies no such thing here ({support.reason}): choose backend=emulated, or auto")

    def arithmetic(self, precision: Precision, facts: DeviceFacts) -> Arithmetic:
        return native_arithmetic(recipe_of(precision), facts)


# Modes that are recipes of torchao, by its names for them.
RECIPES = {
    "fp8": "tensorwise",
    "fp8-rowwise": "rowwise",
    "fp8-rowwise:weight-gradient=bf16": "rowwise_with_gw_hp",
}


@backends.register("torchao")
class Torchao(Backend):
    """torchao's convert_to_float8_training on each linear layer; weights stay fp8bench's own float32 ones."""

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
        support = precision.own_support(facts)
        if support.is_native:
            return native(f"torchao's recipe {recipe}, on torch's scaled product")
        if support.is_emulated:
            return emulated(f"torchao's own emulation of its recipe {recipe}: {support.reason.partition(':')[0]}")
        return support

    def imported(self) -> None:
        logging.disable(logging.WARNING)  # torchao warns of kernels built for other versions of Python and torch
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
        config = replace(named, emulate=self.support(precision, facts).is_emulated)

        def layer(weight: nn.Parameter) -> WholeLayer:
            outputs, inputs = weight.shape
            # On meta it draws no random numbers, so that those of fp8bench's own weights stay the same.
            plain = nn.Linear(inputs, outputs, bias=False, device="meta")
            plain.weight = weight
            return WholeLayer(convert_to_float8_training(plain, config=config))

        return WholeLayers(self.name, torch.bfloat16, layer)
