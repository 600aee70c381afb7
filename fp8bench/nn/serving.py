"""The states of the suites prefill and decode: a served model, the tokens of a step, and its logits' error."""

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
from fp8bench.nn.experts import load_figures
from fp8bench.nn.kept import (
    DTYPES,
    KeptWeight,
    OwnWeight,
    draw_weights,
    kept_weight,
)
from fp8bench.nn.own_decoder import OwnDecoder, make_model
from fp8bench.nn.served import OWN, ServedArm, served_shapes
from fp8bench.nn.sizes import SERVED_SIZES, GPTConfig, gpt_around
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.protocols import Layer, Phases, Setup, SilentPhases
from fp8bench.protocols.workload import key_of


@dataclass
class ServedState:
    """A model, the tokens of a step and the position of their first; a step leaves its output in `logits`."""

    model: Decoder | OwnDecoder
    tokens: Tensor
    at: int
    logits: Tensor

    def step(self, phase: Phases) -> None:
        # A user's own model may do anything between products, so that time has no phase.
        with phase.elementwise if isinstance(self.model, Decoder) else nullcontext(), torch.no_grad():
            self.logits.copy_(self.model.forward(self.tokens, self.at, phase)[:, -1])

    def memory_roles(self) -> dict[MemoryRole, object]:
        weights, cache = self.model.weights_and_cache()
        return {
            MemoryRole.WEIGHTS: weights,
            MemoryRole.ACTIVATIONS: (cache, self.logits),
            MemoryRole.DATA: self.tokens,
        }


Named = Callable[[str], Callable[[], Any]]


def served_state(setup: Setup, arm: ServedArm, layers: tuple[Layer, ...], new: int, named: Named) -> ServedState:
    params = setup.params
    device = setup.facts.key
    size = str(params["size"])
    batch = int(params["batch"])
    context = int(params["context"])
    with torch.no_grad():
        # 1. Build the decoder: one of ours by its size, or one around a model of the user's.
        if size in SERVED_SIZES:
            model: Decoder | OwnDecoder = _decoder(setup, arm, layers, SERVED_SIZES[size], (batch, context))
        else:
            users, _ = make_model(named(size), size, setup.seed, setup.facts)
            model = OwnDecoder(size, users, arm, (batch, context), device)
        # 2. Fill the cache up to the new tokens, with values that depend on the seed alone.
        generator = torch.Generator(device).manual_seed(setup.seed)
        model.fill(context - new, generator)
        model.calibrates = new == context
        # Without a static cache each step gets tensors that grow by its tokens.
        if params.get("static") == "no" and isinstance(model, Decoder):
            for cache in model.cache:
                cache.keys.grown = cache.keys.codes
                cache.values.grown = cache.values.codes
    # 3. The new tokens, and memory for their logits.
    tokens = torch.randint(model.vocabulary, (batch, new), generator=generator, device=device)
    logits = torch.zeros(batch, model.vocabulary, dtype=model.carrier, device=device)
    state = ServedState(model, tokens, context - new, logits)
    if isinstance(model, OwnDecoder):
        state.step(SilentPhases())  # so that ids which it masks have been -inf from the start
    return state


def _decoder(
    setup: Setup, arm: ServedArm, layers: tuple[Layer, ...], config: GPTConfig, sizes: tuple[int, int]
) -> Decoder:
    if not config.modern:
        config = replace(config, sequence=sizes[1])
    named = {layer.name: layer for layer in layers}

    def keep(name: str, weight: Tensor) -> KeptWeight:
        layer = named[name]
        # High-precision layers keep their own weights, and so do those that the map names.
        weight_format = OWN if layer.high else arm.weight_format
        if weight_format in (OWN, *DTYPES) or key_of(layer, setup.layers) is not None:
            plain = weight_format in DTYPES and weight_format != arm.carrier
            return OwnWeight(weight, PlainArithmetic(DTYPES[weight_format]) if plain else setup.layer(layer))
        return kept_weight(weight, weight_format, arm.low_inputs)

    weights = draw_weights(served_shapes(config), setup.seed, setup.facts.key)
    around = setup.around(gpt_around(config.layers))
    return Decoder(config, weights, keep, arm.kv_format, DTYPES[arm.carrier], sizes, around)


def logits_error(setup: Setup, arm: ServedArm, layers: tuple[Layer, ...], new: int, named: Named) -> dict[str, float]:
    """The error of a step's logits against the same weights, cache and tokens in fp64; with experts, their load too."""
    exact = replace(setup, arithmetic=PlainArithmetic(torch.float64), high=PlainArithmetic(torch.float64), layers={})
    states = served_state(setup, arm, layers, new, named), served_state(exact, ServedArm("fp64"), layers, new, named)
    for state in states:
        state.step(SilentPhases())
    logits, exact_logits = (state.logits for state in states)
    comparable = exact_logits.isfinite() | (logits != exact_logits)
    errors = {"logits_error": relative_frobenius(logits[comparable], exact_logits[comparable])}
    model = states[0].model
    if not isinstance(model, Decoder) or not model.loads:
        return errors
    return {**errors, **load_figures([*model.loads.values()], 0), "expert_bytes": float(model.expert_bytes())}
