"""torchao's float8 layers in the places of a GPT's own, as the ways that divide weights know them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear

from fp8bench.nn.gpt import GPT
from fp8bench.nn.linear import Linear, region
from fp8bench.protocols import Phases


class PhasedFloat8Linear(Float8Linear):  # type: ignore[misc]
    """torchao's layer under the phase of products: its casts are within, where no phase can be opened for them."""

    carrier: torch.dtype

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        return region(phase.gemm, super().forward, x.to(self.carrier))


def take_layers(model: GPT, emulated: bool, in_codes: bool) -> None:
    """Replace the layers of all blocks, whose weights they take; `in_codes` says that FSDP gathers codes of them."""
    named = Float8LinearConfig.from_recipe_name("tensorwise")
    config = replace(named, emulate=emulated, enable_fsdp_float8_all_gather=in_codes)
    for path, layer in list(model.blocks.named_modules()):
        if isinstance(layer, Linear):
            owner, _, name = path.rpartition(".")
            setattr(model.blocks.get_submodule(owner), name, _converted(layer, config))


def _converted(layer: Linear, config: Float8LinearConfig) -> PhasedFloat8Linear:
    outputs, inputs = layer.weight.shape
    # Without memory it draws no random numbers.
    plain = nn.Linear(inputs, outputs, bias=False, device="meta")
    plain.weight = layer.weight
    found: PhasedFloat8Linear = PhasedFloat8Linear.from_float(plain, config)
    found.carrier = layer.arithmetic.carrier
    return found
