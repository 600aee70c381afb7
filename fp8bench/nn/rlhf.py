"""RLHF's four models in memory at once: actor and critic train, reference and reward model only run forward.

All have the same size. The reference starts with the actor's weights, the reward model with others; both are kept in a
format like a served model's. No text is generated and no policy loss computed: in a step the frozen models score every
token of the batches, and the other two train on these batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from fp8bench.model import MemoryRole
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.decoder import Decoder
from fp8bench.nn.gpt import GPT
from fp8bench.nn.kept import DTYPES, KeptWeight, OwnWeight, draw_weights, kept_weight
from fp8bench.nn.parts import cross_entropy
from fp8bench.nn.served import served_shapes
from fp8bench.nn.sizes import GPTConfig
from fp8bench.nn.training_step import Loader, TrainingState
from fp8bench.protocols import Phases, SilentPhases


@dataclass(eq=False)
class ReadBatches:
    """Hands the `count` batches of the last `read` to several trainings, in turn."""

    loader: Loader
    count: int
    batches: list[tuple[Any, Tensor]] = field(default_factory=list)
    turns: Iterator[tuple[Any, Tensor]] = field(default_factory=lambda: iter(()))

    def read(self, phase: Phases) -> list[tuple[Any, Tensor]]:
        with phase.data_load:
            self.batches = [self.loader.next() for _ in range(self.count)]
            self.turns = cycle(self.batches)
        return self.batches

    def next(self) -> tuple[Any, Tensor]:
        return next(self.turns)

    def load_ahead(self, batches: int) -> None:
        self.loader.load_ahead(batches)


@dataclass
class FourModels:
    """`scores` are the frozen models' log-probabilities of the last step's tokens, a row for each micro-batch."""

    actor: TrainingState
    critic: TrainingState
    frozen: dict[str, Decoder]
    loader: ReadBatches
    micro_batches: int
    scores: dict[str, list[Tensor]]

    def step(self, phase: Phases) -> None:
        batches = self.loader.read(phase)
        for name, model in self.frozen.items():
            with phase.elementwise, torch.no_grad():
                logits = (model.forward(tokens, 0, phase, every=True) for tokens, _ in batches)
                self.scores[name] = [
                    -cross_entropy(tensor, targets, "none")
                    for tensor, (_, targets) in zip(logits, batches, strict=True)
                ]
        self.actor.step(phase)
        self.critic.step(phase)

    def losses(self, steps: int) -> list[float]:
        """Losses of the actor."""
        self.loader.read(SilentPhases())
        return self.actor.losses(steps)

    def memory_roles(self) -> dict[MemoryRole, object]:
        weights, caches = zip(*(model.weights_and_cache() for model in self.frozen.values()), strict=True)
        return {MemoryRole.WEIGHTS: weights, MemoryRole.ACTIVATIONS: (caches, self.scores)}

    def figures(self) -> dict[str, float]:
        """Bytes between two steps: trained models have weights, gradients, moments; frozen ones weights and scales."""
        trained = {"actor": _trained_bytes(self.actor), "critic": _trained_bytes(self.critic)}
        frozen = {name: model.weight_bytes() for name, model in self.frozen.items()}
        return {f"{name}_bytes": float(size) for name, size in (trained | frozen).items()}


def _trained_bytes(state: TrainingState) -> int:
    tensors = [*state.parameters, *state.buffers]
    for moments in state.optimizer.state.values():
        # A step count has no dimension.
        tensors += [tensor for tensor in moments.values() if isinstance(tensor, Tensor) and tensor.dim()]
    return sum(tensor.nbytes for tensor in tensors)


def frozen_models(actor: GPT, config: GPTConfig, batch: int, weight_format: str, seed: int) -> dict[str, Decoder]:
    carrier = DTYPES.get(weight_format, torch.bfloat16)
    initial = {name: parameter.detach() for name, parameter in actor.named_parameters()}
    reward = draw_weights(served_shapes(config), seed + 1, str(next(iter(initial.values())).device))

    def keep(name: str, weight: Tensor) -> KeptWeight:
        if weight_format in DTYPES or name == "head":
            return OwnWeight(weight, PlainArithmetic(carrier))
        return kept_weight(weight, weight_format, False)

    def model(weight: Callable[[str], Tensor]) -> Decoder:
        kv = "fp32" if carrier is torch.float32 else "bf16"
        return Decoder(config, weight, keep, kv, carrier, (batch, config.sequence))

    # The reference begins with the actor's weights, the reward model with different ones.
    with torch.no_grad():
        return {"reference": model(lambda name: initial[name].clone()), "reward": model(reward)}
