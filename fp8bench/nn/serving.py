"""The states of the suites prefill and decode: a served model of a case, and a step of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fp8bench.model import MemoryRole
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.decoder import DTYPES, Decoder, KeptWeight, OwnWeight, drawn_weights, kept_weight
from fp8bench.nn.mixture import load_figures
from fp8bench.nn.own_decoder import OwnDecoder, made
from fp8bench.nn.served import OWN, Arm, served_shapes
from fp8bench.nn.sizes import SERVED_SIZES, GPTConfig, gpt_around
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.protocols import Layer, Phases, Setup, SilentPhases
from fp8bench.protocols.workload import key_of


@dataclass
class ServedState:
    """A model, the tokens of a step and the position of their first; `logits` are where a step leaves them."""

    model: Decoder | OwnDecoder
    tokens: Tensor
    at: int
    logits: Tensor

    def step(self, phase: Phases) -> None:
        # What a model of one's own does between its products is nobody's.
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


def served_state(setup: Setup, arm: Arm, layers: tuple[Layer, ...], new: int, named: Named) -> ServedState:
    """Of a case: `new` tokens at the end of its context, behind a cache that is filled here, untimed, from the seed."""
    params, device = dict(setup.case.params), setup.facts.key
    size, batch, context = str(params["size"]), int(params["batch"]), int(params["context"])
    with torch.no_grad():
        if size in SERVED_SIZES:
            model: Decoder | OwnDecoder = _decoder(setup, arm, layers, SERVED_SIZES[size], (batch, context))
        else:
            own, _ = made(named(size), size, setup.seed, setup.facts)
            model = OwnDecoder(size, own, arm, (batch, context), device)
        generator = torch.Generator(device).manual_seed(setup.seed)
        model.fill(context - new, generator)
        model.calibrates = new == context
        if params.get("static") == "no" and isinstance(model, Decoder):
            for heads in (heads for pair in model.cache for heads in pair):
                heads.grown = heads.codes
    tokens = torch.randint(model.vocabulary, (batch, new), generator=generator, device=device)
    logits = torch.zeros(batch, model.vocabulary, dtype=model.carrier, device=device)
    return ServedState(model, tokens, context - new, logits)


def _decoder(
    setup: Setup, arm: Arm, layers: tuple[Layer, ...], config: GPTConfig, sizes: tuple[int, int]
) -> Decoder:  # fmt: skip
    if not config.modern:
        config = replace(config, sequence=sizes[1])
    named = {layer.name: layer for layer in layers}
    formats = arm.weights_of(config.layers)

    def keep(name: str, weight: Tensor) -> KeptWeight:
        layer = named[name]
        kept = OWN if layer.high else formats[int(name.split(".")[1])]
        if kept in (OWN, *DTYPES) or key_of(layer, setup.layers) is not None:
            plain = kept in DTYPES and kept != arm.carrier
            return OwnWeight(weight, PlainArithmetic(DTYPES[kept]) if plain else setup.layer(layer))
        return kept_weight(weight, kept, arm.low_inputs)

    weights = drawn_weights(served_shapes(config), setup.seed, setup.facts.key)
    around = setup.around(gpt_around(config.layers))
    return Decoder(config, weights, keep, arm.kv_of(config.layers), DTYPES[arm.carrier], sizes, around)


def logits_error(
    setup: Setup, arm: Arm, layers: tuple[Layer, ...], new: int, named: Named
) -> dict[str, float]:  # fmt: skip
    """Of a step's logits, against those of the same weights, cache and tokens in fp64 throughout; and which experts it
    read, where there are any."""
    exact = replace(setup, arithmetic=PlainArithmetic(torch.float64), high=PlainArithmetic(torch.float64), layers={})
    states = served_state(setup, arm, layers, new, named), served_state(exact, Arm("fp64"), layers, new, named)
    for state in states:
        state.step(SilentPhases())
    errors, model = {"logits_error": relative_frobenius(states[0].logits, states[1].logits)}, states[0].model
    if not isinstance(model, Decoder) or not model.loads:
        return errors
    return {**errors, **load_figures([*model.loads.values()], 0), "expert_bytes": float(model.expert_bytes())}
