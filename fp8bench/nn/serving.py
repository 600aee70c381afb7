"""The state of a case of the suites prefill and decode: a served model and the tokens of a step. Also measures the
error of a step's logits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fp8bench.model import MemoryRole
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.decoder import Decoder
from fp8bench.nn.experts import summarise_load
from fp8bench.nn.served import OWN, ServedArm, list_weight_shapes
from fp8bench.nn.sizes import SERVED_SIZES, GPTConfig, make_gpt_surrounding_layers
from fp8bench.nn.storage import (
    DTYPES,
    PrecastWeight,
    StoredWeight,
    draw_weights,
    store_weight,
)
from fp8bench.nn.user_decoder import UserDecoder, make_model
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.protocols import Layer, Phases, Setup, SilentPhases
from fp8bench.protocols.workload import find_map_key


@dataclass
class ServedState:
    """A served model, the tokens of a step and the position of the first token. A step writes its
    output to `logits`.
    """

    model: Decoder | UserDecoder
    tokens: Tensor
    at: int
    logits: Tensor

    def step(self, phase: Phases) -> None:
        # A user's model may do anything between its products, so this time gets no phase.
        with phase.elementwise if isinstance(self.model, Decoder) else nullcontext(), torch.no_grad():
            self.logits.copy_(self.model.forward(self.tokens, self.at, phase)[:, -1])

    def memory_roles(self) -> dict[MemoryRole, object]:
        weights, cache = self.model.list_weights_and_cache()
        return {
            MemoryRole.WEIGHTS: weights,
            MemoryRole.ACTIVATIONS: (cache, self.logits),
            MemoryRole.DATA: self.tokens,
        }


FindModelMaker = Callable[[str], Callable[[], Any]]


def make_served_state(
    setup: Setup, arm: ServedArm, layers: tuple[Layer, ...], new: int, find_maker: FindModelMaker
) -> ServedState:
    params = setup.params
    device = setup.facts.key
    size = str(params["size"])
    batch = int(params["batch"])
    context = int(params["context"])
    with torch.no_grad():
        # 1. Build the decoder, by its size or around a user's model.
        if size in SERVED_SIZES:
            model: Decoder | UserDecoder = _make_decoder(setup, arm, layers, SERVED_SIZES[size], (batch, context))
        else:
            user_model, _ = make_model(find_maker(size), size, setup.seed, setup.facts)
            model = UserDecoder(size, user_model, arm, (batch, context), device)
        # 2. Fill the cache up to the new tokens, with values that depend only on the seed.
        generator = torch.Generator(device).manual_seed(setup.seed)
        model.fill_cache(context - new, generator)
        # If the cache is empty, its scales must come from the prompt.
        model.calibrates = new == context
        # If the cache is not static, each step concatenates its tokens to new tensors.
        if params.get("static") == "no" and isinstance(model, Decoder):
            for cache in model.cache:
                cache.keys.dynamic_cache_tensor = cache.keys.codes
                cache.values.dynamic_cache_tensor = cache.values.codes
    # 3. Draw the new tokens, and allocate memory for their logits.
    tokens = torch.randint(model.vocabulary, (batch, new), generator=generator, device=device)
    logits = torch.zeros(batch, model.vocabulary, dtype=model.carrier, device=device)
    state = ServedState(model, tokens, context - new, logits)
    if isinstance(model, UserDecoder):
        state.step(SilentPhases())  # run a step, so that `logits` has -inf for the ids that the model masks
    return state


def _make_decoder(
    setup: Setup, arm: ServedArm, layers: tuple[Layer, ...], config: GPTConfig, sizes: tuple[int, int]
) -> Decoder:
    # Without rotary positions the model has a table of positions, which needs a row for each position of the context.
    if not config.is_llama_like:
        config = replace(config, sequence=sizes[1])
    layers_by_name = {layer.name: layer for layer in layers}

    def store(name: str, weight: Tensor) -> StoredWeight:
        layer = layers_by_name[name]
        # Layers that stay in high precision, and layers that the map names, use their own arithmetic.
        weight_format = OWN if layer.high else arm.weight_format
        if weight_format in (OWN, *DTYPES) or find_map_key(layer, setup.layers) is not None:
            uses_plain_product = weight_format in DTYPES and weight_format != arm.carrier
            return PrecastWeight(
                weight, PlainArithmetic(DTYPES[weight_format]) if uses_plain_product else setup.layer(layer)
            )
        return store_weight(weight, weight_format, arm.low_inputs)

    weights = draw_weights(list_weight_shapes(config), setup.seed, setup.facts.key)
    around = setup.around(make_gpt_surrounding_layers(config.layers))
    return Decoder(config, weights, store, arm.kv_format, DTYPES[arm.carrier], sizes, around)


def measure_logits_error(
    setup: Setup, arm: ServedArm, layers: tuple[Layer, ...], new: int, find_maker: FindModelMaker
) -> dict[str, float]:
    """Returns the error of a step's logits, compared with fp64 for the same weights, cache and tokens. For a model with
    experts, also returns how tokens are distributed among them.
    """
    exact_setup = replace(
        setup, arithmetic=PlainArithmetic(torch.float64), high=PlainArithmetic(torch.float64), layers={}
    )
    states = (
        make_served_state(setup, arm, layers, new, find_maker),
        make_served_state(exact_setup, ServedArm("fp64"), layers, new, find_maker),
    )
    for state in states:
        state.step(SilentPhases())
    logits, exact_logits = (state.logits for state in states)
    # Leave out logits that are the same infinity in both models, because their difference would be NaN.
    is_comparable = exact_logits.isfinite() | (logits != exact_logits)
    errors = {"logits_error": relative_frobenius(logits[is_comparable], exact_logits[is_comparable])}
    model = states[0].model
    if not isinstance(model, Decoder) or not model.loads:
        return errors
    return {**errors, **summarise_load([*model.loads.values()], 0), "expert_bytes": float(model.expert_bytes())}
