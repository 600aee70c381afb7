"""Layers by their sizes against the layers that models are built of."""

from __future__ import annotations

from dataclasses import replace

import torch

from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.gpt import GPT
from fp8bench.nn.linear import Linear
from fp8bench.nn.sizes import SIZES, features_of, of_config, usual_tokens
from tests.counts import for_each


@for_each("modern", [False, True])
def test_a_trained_models_layers_are_those_that_it_is_built_of(modern: bool) -> None:
    config = replace(SIZES["nano"], modern=modern, key_heads=2 if modern else 4, layers=1)
    plain = PlainArithmetic(torch.float32)
    model = GPT(config, lambda name: plain, torch.float32)
    built = {
        name.rpartition(".")[2]: one.weight.shape for name, one in model.named_modules() if isinstance(one, Linear)
    }

    assert {name: torch.Size(sides) for name, sides in of_config(config).items()} == built


@for_each("name", SIZES)
def test_layers_hold_the_weights_that_flops_are_counted_from(name: str) -> None:
    config = SIZES[name]
    *block, head = features_of(name).values()

    assert sum(outputs * inputs for outputs, inputs in block) == config.block_weights
    assert head == (config.vocabulary, config.width)
    assert usual_tokens(name) == config.batch * config.sequence
