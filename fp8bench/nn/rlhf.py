"""The four models of RLHF in memory at once. Actor and critic are trained. The reference and the reward model only
run forward.

All models have the same size. The reference starts with the actor's weights and the reward model with different
weights. Reference and reward model are stored in a format, like a served model. No text is generated and no policy
loss is computed. In a step the reference and the reward model score every token of the batches, and then actor and
critic train on these batches.
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
from fp8bench.nn.parts import cross_entropy
from fp8bench.nn.served import list_weight_shapes
from fp8bench.nn.sizes import GPTConfig
from fp8bench.nn.storage import DTYPES, PrecastWeight, StoredWeight, draw_weights, store_weight
from fp8bench.nn.training_step import Loader, TrainingState
from fp8bench.protocols import Phases, SilentPhases


@dataclass(eq=False)
class SharedBatchLoader:
    """Reads `batch_count` batches from a loader, and hands the same batches to several trainings, one after the
    other.
    """

    loader: Loader
    batch_count: int
    batches: list[tuple[Any, Tensor]] = field(default_factory=list)
    repeating_batches: Iterator[tuple[Any, Tensor]] = field(default_factory=lambda: iter(()))

    def read(self, phase: Phases) -> list[tuple[Any, Tensor]]:
        with phase.data_load:
            self.batches = [self.loader.next() for _ in range(self.batch_count)]
            self.repeating_batches = cycle(self.batches)
        return self.batches

    def next(self) -> tuple[Any, Tensor]:
        return next(self.repeating_batches)

    def preload_batches(self, batches: int) -> None:
        self.loader.preload_batches(batches)


@dataclass
class RlhfModels:
    """The state of an RLHF step. `scores` are the log-probabilities that reference and reward model gave to the
    tokens of the last step, with one row for each micro-batch.
    """

    actor: TrainingState
    critic: TrainingState
    frozen_models: dict[str, Decoder]
    loader: SharedBatchLoader
    micro_batches: int
    scores: dict[str, list[Tensor]]

    def step(self, phase: Phases) -> None:
        batches = self.loader.read(phase)
        for name, model in self.frozen_models.items():
            with phase.elementwise, torch.no_grad():
                # A generator, which computes the logits of a batch only when its scores are computed.
                logits = (model.forward(tokens, 0, phase, every=True) for tokens, _ in batches)
                self.scores[name] = [
                    -cross_entropy(tensor, targets, "none")
                    for tensor, (_, targets) in zip(logits, batches, strict=True)
                ]
        self.actor.step(phase)
        self.critic.step(phase)

    def losses(self, steps: int) -> list[float]:
        """Returns the actor's losses."""
        self.loader.read(SilentPhases())
        return self.actor.losses(steps)

    def memory_roles(self) -> dict[MemoryRole, object]:
        weights, caches = zip(*(model.list_weights_and_cache() for model in self.frozen_models.values()), strict=True)
        return {MemoryRole.WEIGHTS: weights, MemoryRole.ACTIVATIONS: (caches, self.scores)}

    def figures(self) -> dict[str, float]:
        """Returns the bytes of each model between two steps: weights, gradients and moments of a trained model, or
        weights and scales of any other model.
        """
        trained_bytes_by_model = {
            "actor": _count_trained_bytes(self.actor),
            "critic": _count_trained_bytes(self.critic),
        }
        frozen_bytes_by_model = {name: model.weight_bytes() for name, model in self.frozen_models.items()}
        return {f"{name}_bytes": float(size) for name, size in (trained_bytes_by_model | frozen_bytes_by_model).items()}


def _count_trained_bytes(state: TrainingState) -> int:
    tensors = [*state.parameters, *state.gradient_buffers]
    for moments in state.optimizer.state.values():
        # A tensor without dimensions is a step count, which is left out.
        tensors += [tensor for tensor in moments.values() if isinstance(tensor, Tensor) and tensor.dim()]
    return sum(tensor.nbytes for tensor in tensors)


def make_frozen_models(actor: GPT, config: GPTConfig, batch: int, weight_format: str, seed: int) -> dict[str, Decoder]:
    carrier = DTYPES.get(weight_format, torch.bfloat16)
    initial_weights = {name: parameter.detach() for name, parameter in actor.named_parameters()}
    draw_reward_weight = draw_weights(
        list_weight_shapes(config), seed + 1, str(next(iter(initial_weights.values())).device)
    )

    def store(name: str, weight: Tensor) -> StoredWeight:
        # As in served models, the format applies only to blocks, so the head keeps the carrier dtype.
        if weight_format in DTYPES or name == "head":
            return PrecastWeight(weight, PlainArithmetic(carrier))
        return store_weight(weight, weight_format, False)

    def make_decoder(weight: Callable[[str], Tensor]) -> Decoder:
        kv = "fp32" if carrier is torch.float32 else "bf16"
        return Decoder(config, weight, store, kv, carrier, (batch, config.sequence))

    # The reference starts with the actor's weights, the reward model with different ones.
    with torch.no_grad():
        return {
            "reference": make_decoder(lambda name: initial_weights[name].clone()),
            "reward": make_decoder(draw_reward_weight),
        }
