"""Layers by their sizes against the layers that models are built of."""

from __future__ import annotations

import pytest

from fp8bench.nn.layer_sizes import HEADS, MODELS, PRODUCTS, features_of, models, sides_of, usual_tokens
from fp8bench.nn.sizes import SIZES


@pytest.mark.parametrize("name", SIZES)
def test_layers_hold_the_weights_that_flops_are_counted_from(name: str) -> None:
    """Grouped heads and gates included."""
    config = SIZES[name]
    *block, head = features_of(name).values()

    assert sum(outputs * inputs for outputs, inputs in block) == config.block_weights
    assert head == (config.vocabulary, config.width)
    assert usual_tokens(name) == config.batch * config.sequence


@pytest.mark.parametrize("name", MODELS)
def test_heads_end_the_named_models(name: str) -> None:
    """Their width is that of the layers below."""
    assert list(features_of(name))[-1] == "head" and name in models()
    assert HEADS[name][1] in {inputs for _, inputs in MODELS[name].values()}


def test_the_three_products_multiply_the_same_three_sides() -> None:
    """Each contracts over another one: features in, features out, tokens."""
    found = {product: sides_of(product, 5, 7, 11) for product in PRODUCTS}

    assert found == {"forward": (5, 7, 11), "input-gradient": (5, 11, 7), "weight-gradient": (7, 11, 5)}
