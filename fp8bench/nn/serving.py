"""The states of the suites prefill and decode: a served model of a case, and a step of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp8bench.model import MemoryRole
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.decoder import DTYPES, Decoder, KeptWeight, OwnWeight, drawn_weights, kept_weight
from fp8bench.nn.served import OWN, Arm, served_shapes
from fp8bench.nn.sizes import SERVED_SIZES
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.protocols import Layer, Phases, Setup, SilentPhases
from fp8bench.protocols.workload import key_of


@dataclass
class ServedState:
    """A model, the tokens of a step and the position of their first; `logits` are where a step leaves them."""

    model: Decoder
    tokens: Tensor
    at: int
    logits: Tensor

    def step(self, phase: Phases) -> None:
        with phase.elementwise, torch.no_grad():
            self.logits.copy_(self.model.forward(self.tokens, self.at, phase)[:, -1])

    def memory_roles(self) -> dict[MemoryRole, object]:
        model = self.model
        return {
            MemoryRole.WEIGHTS: (model.embedding, model.positions, model.norms, model.layers),
            MemoryRole.ACTIVATIONS: (model.cache, self.logits),
            MemoryRole.DATA: self.tokens,
        }


def served_state(setup: Setup, arm: Arm, layers: tuple[Layer, ...], new: int) -> ServedState:
    """Of a case: `new` tokens at the end of its context, behind a cache that is filled here, untimed, from the seed."""
    params = dict(setup.case.params)
    config, batch, context = SERVED_SIZES[str(params["size"])], int(params["batch"]), int(params["context"])
    if not config.modern:
        config = replace(config, sequence=context)
    named = {layer.name: layer for layer in layers}
    formats = arm.weights_of(config.layers)

    def keep(name: str, weight: Tensor) -> KeptWeight:
        layer = named[name]
        kept = OWN if layer.high else formats[int(name.split(".")[1])]
        if kept in (OWN, *DTYPES) or key_of(layer, setup.layers) is not None:
            plain = kept in DTYPES and kept != arm.carrier
            return OwnWeight(weight, PlainArithmetic(DTYPES[kept]) if plain else setup.layer(layer))
        return kept_weight(weight, kept, arm.low_inputs)

    device, carrier = setup.facts.key, DTYPES[arm.carrier]
    with torch.no_grad():
        weights = drawn_weights(served_shapes(config), setup.seed, device)
        model = Decoder(config, weights, keep, arm.kv_of(config.layers), carrier, (batch, context))
        generator = torch.Generator(device).manual_seed(setup.seed)
        model.fill(context - new, generator)
        model.calibrates = new == context
    tokens = torch.randint(config.vocabulary, (batch, new), generator=generator, device=device)
    return ServedState(
        model, tokens, context - new, torch.zeros(batch, config.vocabulary, dtype=carrier, device=device)
    )


def logits_error(setup: Setup, arm: Arm, layers: tuple[Layer, ...], new: int) -> dict[str, float]:
    """Of a step's logits, against those of the same weights, cache and tokens in fp64 throughout."""
    exact = replace(setup, arithmetic=PlainArithmetic(torch.float64), high=PlainArithmetic(torch.float64), layers={})
    states = served_state(setup, arm, layers, new), served_state(exact, Arm("fp64"), layers, new)
    for state in states:
        state.step(SilentPhases())
    return {"logits_error": relative_frobenius(states[0].logits, states[1].logits)}
