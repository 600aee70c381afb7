"""Chooses how ranks train together, and defines the two kinds of parallelism that can send FP8. In `zero`, each
weight is stored by one rank. In `sp`, ranks divide activations by tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.features.train.lab.low_precision import Gradients, Parameters, Tensors, gradient_or_zeros
from fp8bench.features.train.lab.parallelism import DataParallel, FullySharded, SingleRank, T, TensorParallel
from fp8bench.features.train.request import TrainerSettings
from fp8bench.model import DeviceFacts
from fp8bench.nn.gpt import GPT, LanguageModel
from fp8bench.nn.parallel.exchanges import FP8Group, OwnedTensors, RankGroup, exchange, gather, scatter
from fp8bench.nn.parallel.tensor_parallel import share_blocks
from fp8bench.nn.parallel.ways import find_cut
from fp8bench.nn.sizes import GPTConfig
from fp8bench.protocols import Phases, SilentPhases


def make_parallelism(settings: TrainerSettings, config: GPTConfig, facts: DeviceFacts) -> SingleRank:
    if facts.ranks == 1:
        return SingleRank()
    assert dist.group.WORLD is not None
    group = RankGroup(dist.group.WORLD)
    match settings.parallel:
        case "tp":
            return TensorParallel(group, config)
        case "sp":
            return SequenceParallel(group, config, settings.wire)
        case "zero":
            return ZeroTensors(group, settings.wire)
        case "fsdp":
            return FullySharded(group)
    return DataParallel(group)


class ZeroTensors(FullySharded):
    """Every rank reads an equal part of every micro-batch, but stores and updates only some of the weights, each of
    them complete, as in FP8-LM. Ranks send gradients to the owner of a weight, and the owner sends the weight back,
    both in the format `wire`. All ranks, including the owner, compute with the weight as it arrives.
    """

    def __init__(self, group: RankGroup, wire: str) -> None:
        super().__init__(group)
        self._wire = wire

    def divide_parameters(self, parameters: Parameters) -> Parameters:
        self._full_weights = list(parameters.values())
        if len(self._full_weights) < self.part_count:
            raise UsageError(
                f"--parallel zero: {len(self._full_weights)} weights are too few for {self.part_count} ranks. Give "
                "fewer --ranks."
            )
        self._weight_bytes = [weight.untyped_storage().nbytes() for weight in self._full_weights]
        self._owned_tensors = OwnedTensors(self._group, [weight.numel() for weight in self._full_weights], self._wire)
        self._stored = [
            nn.Parameter(weight.detach().clone()) for weight in self.select_stored_values(self._full_weights)
        ]
        self._free_weights()
        return dict(zip(self.select_stored_values(list(parameters)), self._stored, strict=True))

    def select_stored_values(self, values: Sequence[T]) -> list[T]:
        return self._owned_tensors.select_own_items(values)

    def load_weights(self, phase: Phases) -> None:
        self._owned_tensors.distribute(
            [parameter.detach() for parameter in self._stored],
            [weight.detach() for weight in self._full_weights],
            phase,
        )

    def average_gradients(self, gradients: Gradients, phase: Phases) -> None:
        means = self._owned_tensors.average([gradient_or_zeros(weight) for weight in self._full_weights], phase)
        for weight in self._full_weights:
            weight.grad = None
        for parameter, mean in zip(self._stored, means, strict=True):
            parameter.grad = mean
        gradients.store_gradients()

    def join_norms(self, norms: Tensors) -> list[Tensor]:
        """Returns each norm from the rank that owns the weight. `norms` may have several figures per parameter: all
        parameters' first figure, then all parameters' second one.
        """
        squares = torch.stack(list(norms)).to(torch.float64).square().view(-1, len(self._stored))
        all_squares = squares.new_zeros(len(squares), len(self._full_weights))
        all_squares[:, self.select_stored_values(range(len(self._full_weights)))] = squares
        return list(self._group.add_over_ranks(all_squares).sqrt().to(torch.float32).flatten())


class BF16Group(RankGroup):
    """Sends each number in at most 16 bits. Returns the received numbers in the dtype of the given ones."""

    def all_parts(self, x: Tensor) -> Tensor:
        return super().all_parts(_to_16_bits(x)).to(x.dtype)

    def own_part(self, parts: Tensor) -> Tensor:
        return super().own_part(_to_16_bits(parts)).to(parts.dtype)


def _to_16_bits(x: Tensor) -> Tensor:
    return x if x.dtype.itemsize == 2 else x.to(torch.bfloat16)


GROUPS_BY_WIRE: dict[str, type[RankGroup]] = {"fp32": RankGroup, "bf16": BF16Group, "fp8": FP8Group}


class SequenceParallel(TensorParallel):
    """Tensor parallelism in which each rank has only its own tokens between the parts of blocks. Activations are
    divided before the first block and gathered after the last.
    """

    def __init__(self, group: RankGroup, config: GPTConfig, wire: str) -> None:
        super().__init__(group, config)
        self.token_group = GROUPS_BY_WIRE[wire](group.handle)

    def cut_model(self, model: LanguageModel) -> None:
        assert isinstance(model, GPT)
        token_group = self.token_group

        def divide_tokens(x: Tensor) -> Tensor:
            return token_group.take_share(x).contiguous()

        share_blocks(model, self._config, token_group, gather, scatter)
        model.blocks[0].register_forward_pre_hook(
            lambda _, inputs: (exchange(inputs[0], divide_tokens, token_group.gather), *inputs[1:])
        )
        model.norm.register_forward_pre_hook(
            lambda _, inputs: (exchange(inputs[0], token_group.gather, divide_tokens),)
        )

    def divide_parameters(self, parameters: Parameters) -> Parameters:
        """Returns this rank's part of the parameters. Norms inside blocks see only this rank's tokens, so their
        gradients are summed over ranks.
        """
        block_parameters = {name: parameter for name, parameter in parameters.items() if name.startswith("blocks.")}
        self._summed_parameters = [
            parameter for name, parameter in block_parameters.items() if find_cut(name, self._config) is None
        ]
        return super().divide_parameters(parameters)

    @contextmanager
    def materialise(self, phase: Phases) -> Iterator[None]:
        self.token_group.phase = phase
        try:
            with super().materialise(phase):
                yield
        finally:
            self.token_group.phase = SilentPhases()

    def average_gradients(self, gradients: Gradients, phase: Phases) -> None:
        gradients.fill_missing()
        self._group.sum_gradients(
            [parameter.grad for parameter in self._summed_parameters if parameter.grad is not None]
        )
