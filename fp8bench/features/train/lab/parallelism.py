"""Several ranks that train one model: how they divide a batch or the model, and which data they exchange. `zero` and
`sp` can send FP8.

Gradients are averaged after the last micro-batch, not during backward as in torch's DDP. DDP regroups gradients after
its first step, so that a resumed training would add them up in a different order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.features.train.lab.low_precision import Gradients, NamedParameters, TensorSequence, get_gradient_or_zeros
from fp8bench.features.train.request import TrainerSettings
from fp8bench.model import DeviceFacts
from fp8bench.nn.gpt import GPT, LanguageModel
from fp8bench.nn.moments import split_into_buckets
from fp8bench.nn.parallel.exchanges import (
    FP8Group,
    RankGroup,
    RankOwnedTensors,
    exchange_tensors,
    gather_tokens,
    scatter_tokens,
)
from fp8bench.nn.parallel.group_scales import list_divided_roles, use_group_scales
from fp8bench.nn.parallel.tensor_parallel import split_blocks_over_ranks
from fp8bench.nn.parallel.ways import find_weight_cut
from fp8bench.nn.sizes import GPTConfig
from fp8bench.protocols import Arithmetic, Phases, Role, SilentPhases

# At most this many gradient values are sent in one message.
_MAX_MESSAGE_ELEMENTS = 1 << 24
# At most this many values of sharded weights or gradients are sent in one message. Smaller messages save memory here,
# because a full gradient is freed once it is sent.
_MAX_SHARD_MESSAGE_ELEMENTS = 1 << 22
_DIGEST_CHUNK_ELEMENTS = 1 << 20

T = TypeVar("T")


class SingleRank:
    """A training on one rank. Classes for several ranks override its methods. A batch is divided into `part_count`
    parts, and this rank reads the part number `part_number`.
    """

    part_count = 1
    part_number = rank = 0

    def share_scales_across_ranks(self, layer: str, arithmetic: Arithmetic) -> Arithmetic:
        """Returns a layer's arithmetic, with scales that depend on the largest magnitudes on all ranks."""
        return arithmetic

    def cut_model_for_rank(self, model: LanguageModel) -> None:
        """Reduces a model to the part that this rank computes."""

    def divide_parameters(self, parameters: NamedParameters) -> NamedParameters:
        """Returns the part of each parameter that this rank stores and updates."""
        return parameters

    @contextmanager
    def materialise(self, phase: Phases) -> Iterator[None]:
        """Puts the weights into the model's parameters inside the `with` block, which is a step or a validation."""
        yield

    def load_weights(self, phase: Phases) -> None:
        """Puts updated weights into the model's parameters. Called inside the `with` block of `materialise`."""

    def average_loss(self, loss: Tensor) -> Tensor:
        """Returns the mean of a loss over all ranks."""
        return loss

    def average_gradients(self, gradients: Gradients, phase: Phases) -> None:
        """Averages gradients over all ranks, in place."""

    def join_norms(self, norms: TensorSequence) -> list[Tensor]:
        """Returns the norms of complete parameters, given the norms of this rank's parts in the same order."""
        return list(norms)

    def select_stored_values(self, values: Sequence[T]) -> list[T]:
        """Returns the values of those parameters that this rank stores. `values` has a value for every parameter."""
        return list(values)

    def list_shared_parameters(self, parameters: NamedParameters) -> list[nn.Parameter]:
        """Returns the parameters that must be equal on all ranks."""
        return list(parameters.values())


class MultiRankTraining(SingleRank):
    """A group of several ranks that train one model."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self.rank = group.rank

    def _largest_over_ranks(self, amax: Tensor) -> Tensor:
        """Returns the maximum of `amax` over all ranks. If it is NaN on any rank, returns infinity, because a maximum
        may ignore NaN.
        """
        return self._group.max_over_ranks(torch.where(amax.isnan(), torch.inf, amax))


class DataParallel(MultiRankTraining):
    """Every rank has all of the model, and reads an equal part of every micro-batch."""

    def __init__(self, group: RankGroup) -> None:
        super().__init__(group)
        self.part_count = group.size
        self.part_number = group.rank

    def share_scales_across_ranks(self, layer: str, arithmetic: Arithmetic) -> Arithmetic:
        return use_group_scales(arithmetic, Role, self._largest_over_ranks)

    def average_loss(self, loss: Tensor) -> Tensor:
        return self._group.add_over_ranks(loss) / self.part_count

    def average_gradients(self, gradients: Gradients, phase: Phases) -> None:
        # All ranks take part in every exchange, even a rank whose experts had no tokens.
        filled_gradients = gradients.fill_missing_gradients()
        with phase.communication:
            for bucket in split_into_buckets([tensor.numel() for tensor in filled_gradients], _MAX_MESSAGE_ELEMENTS):
                tensors = filled_gradients[bucket]
                joined_gradients = torch.cat([tensor.reshape(-1) for tensor in tensors])
                dist.all_reduce(joined_gradients, group=self._group.handle)
                mean_gradients = torch.split(joined_gradients / self.part_count, [tensor.numel() for tensor in tensors])
                torch._foreach_copy_(
                    tensors, [new.view_as(old) for new, old in zip(mean_gradients, tensors, strict=True)]
                )


def digest_tensor_bits(tensors: Iterable[Tensor]) -> int:
    """Returns a digest of 63 bits that depends on every bit of float32 tensors and on the position of each value."""
    total = position = 0
    for tensor in tensors:
        for chunk in torch.split(tensor.detach().reshape(-1), _DIGEST_CHUNK_ELEMENTS):
            positions = torch.arange(position, position + len(chunk), device=chunk.device)
            # With an odd factor, a changed value always changes the sum modulo 2^63.
            total += int(((2 * positions + 1) * chunk.view(torch.int32)).sum())
            position += len(chunk)
    return total & ((1 << 63) - 1)


class FullySharded(DataParallel):
    """Every rank reads an equal part of every micro-batch, and stores and updates an equal number of rows of each
    weight, padded with rows of zeros if necessary. Full weights exist only during a step. Unlike torch's fully_shard,
    this class does not divide modules or use DTensors. So a step casts every weight only once, and checkpoints and
    AdamW's kernels work on ordinary tensors.
    """

    def divide_parameters(self, parameters: NamedParameters) -> NamedParameters:
        self._full_weights = list(parameters.values())
        self._weight_bytes = [weight.untyped_storage().nbytes() for weight in self._full_weights]
        self._stored = [
            nn.Parameter(self._view_rows_by_rank(weight.detach())[self.part_number].clone())
            for weight in self._full_weights
        ]
        self._buckets = list(
            split_into_buckets(
                [parameter.numel() * self.part_count for parameter in self._stored], _MAX_SHARD_MESSAGE_ELEMENTS
            )
        )
        self._free_weights()
        return dict(zip(parameters, self._stored, strict=True))

    def _view_rows_by_rank(self, tensor: Tensor) -> Tensor:
        """Returns a view of a tensor's rows by rank: (ranks, rows per rank, ...). The tensor is padded with zeros."""
        rows = -(-len(tensor) // self.part_count)
        if padding_rows := rows * self.part_count - len(tensor):
            tensor = F.pad(tensor, [0, 0] * (tensor.ndim - 1) + [0, padding_rows])
        return tensor.view(self.part_count, rows, *tensor.shape[1:])

    @contextmanager
    def materialise(self, phase: Phases) -> Iterator[None]:
        with phase.communication:
            for weight, size in zip(self._full_weights, self._weight_bytes, strict=True):
                weight.untyped_storage().resize_(size)
        try:
            self.load_weights(phase)
            yield
        finally:
            self._free_weights()

    def _free_weights(self) -> None:
        for weight in self._full_weights:
            weight.grad = None
            # The model refers to this tensor, so free its memory but keep the tensor.
            weight.untyped_storage().resize_(0)

    def load_weights(self, phase: Phases) -> None:
        with phase.communication:
            for bucket in self._buckets:
                stored_rows = [parameter.detach().reshape(-1) for parameter in self._stored[bucket]]
                weight_pieces = torch.split(
                    self._group.gather_stack(torch.cat(stored_rows)), list(map(len, stored_rows)), 1
                )
                for weight, rows in zip(self._full_weights[bucket], weight_pieces, strict=True):
                    weight.detach().copy_(rows.reshape(-1, *weight.shape[1:])[: len(weight)])

    def average_gradients(self, gradients: Gradients, phase: Phases) -> None:
        """Gives each rank the mean gradient of the rows that it stores, and frees the gradients of full parameters."""
        with phase.communication:
            for bucket in self._buckets:
                gradient_rows_by_rank = torch.cat(
                    [
                        self._view_rows_by_rank(get_gradient_or_zeros(parameter)).flatten(1)
                        for parameter in self._full_weights[bucket]
                    ],
                    1,
                )
                for parameter in self._full_weights[bucket]:
                    parameter.grad = None
                stored_parameters = self._stored[bucket]
                mean_gradient_rows = self._group.reduce_own_part(gradient_rows_by_rank) / self.part_count
                for parameter, piece in zip(
                    stored_parameters,
                    torch.split(mean_gradient_rows, [parameter.numel() for parameter in stored_parameters]),
                    strict=True,
                ):
                    parameter.grad = piece.view_as(parameter)

    def join_norms(self, norms: TensorSequence) -> list[Tensor]:
        squared_norm_sums = self._group.add_over_ranks(torch.stack(list(norms)).to(torch.float64).square())
        return list(squared_norm_sums.sqrt().to(torch.float32))


class TensorParallel(MultiRankTraining):
    """Each rank has some heads and hidden features of every block, and reads complete batches. Between the parts of a
    block, all ranks have bit-identical values. So a wrong sum on one rank is detected.
    """

    def __init__(self, group: RankGroup, config: GPTConfig) -> None:
        super().__init__(group)
        self._config = config

    def share_scales_across_ranks(self, layer: str, arithmetic: Arithmetic) -> Arithmetic:
        """Makes the scales of tensors that are divided among ranks depend on all ranks. All other tensors, and
        therefore their scales, are equal on all ranks.
        """
        cut_dimension = find_weight_cut(f"{layer}.weight", self._config)
        roles = (
            list_divided_roles(cut_dimension) if cut_dimension is not None else tuple(Role) if ".core." in layer else ()
        )
        return use_group_scales(arithmetic, roles, self._largest_over_ranks) if roles else arithmetic

    def cut_model_for_rank(self, model: LanguageModel) -> None:
        """Reduces the model to this rank's share of every block."""
        assert isinstance(model, GPT)
        split_blocks_over_ranks(model, self._config, self._group)

    def divide_parameters(self, parameters: NamedParameters) -> NamedParameters:
        self._is_cut = torch.tensor([find_weight_cut(name, self._config) is not None for name in parameters])
        return parameters

    @contextmanager
    def materialise(self, phase: Phases) -> Iterator[None]:
        self._group.phase = phase
        try:
            yield
        finally:
            self._group.phase = SilentPhases()

    def join_norms(self, norms: TensorSequence) -> list[Tensor]:
        """Returns the norms of complete parameters from the norms of the ranks' parts. A parameter that is complete
        on all ranks counts once.
        """
        local_norms = torch.stack(list(norms))
        norms_over_ranks = self._group.add_over_ranks(local_norms.to(torch.float64).square()).sqrt().to(torch.float32)
        return list(
            torch.where(
                # `norms` may have several norms of every parameter.
                self._is_cut.to(local_norms.device).repeat(len(local_norms) // len(self._is_cut)),
                norms_over_ranks,
                local_norms,
            )
        )

    def list_shared_parameters(self, parameters: NamedParameters) -> list[nn.Parameter]:
        return [parameter for parameter, cut in zip(parameters.values(), self._is_cut.tolist(), strict=True) if not cut]


class ZeroTensors(FullySharded):
    """Every rank reads an equal part of every micro-batch, but stores and updates only some of the weights, each of
    them complete, as in FP8-LM. Ranks send gradients to the owner of a weight, and the owner sends the updated weight
    to all ranks, both in the format `wire`. All ranks, including the owner, compute with the weight as sent.
    """

    def __init__(self, group: RankGroup, wire: str) -> None:
        super().__init__(group)
        self._wire = wire

    def divide_parameters(self, parameters: NamedParameters) -> NamedParameters:
        self._full_weights = list(parameters.values())
        if len(self._full_weights) < self.part_count:
            raise UsageError(
                f"--parallel zero: {len(self._full_weights)} weights are too few for {self.part_count} ranks. Give "
                "fewer --ranks."
            )
        self._weight_bytes = [weight.untyped_storage().nbytes() for weight in self._full_weights]
        self._owned_tensors = RankOwnedTensors(
            self._group, [weight.numel() for weight in self._full_weights], self._wire
        )
        self._stored = [
            nn.Parameter(weight.detach().clone()) for weight in self.select_stored_values(self._full_weights)
        ]
        self._free_weights()
        return dict(zip(self.select_stored_values(list(parameters)), self._stored, strict=True))

    def select_stored_values(self, values: Sequence[T]) -> list[T]:
        return self._owned_tensors.select_items_of_own_rank(values)

    def load_weights(self, phase: Phases) -> None:
        self._owned_tensors.send_updated_tensors(
            [parameter.detach() for parameter in self._stored],
            [weight.detach() for weight in self._full_weights],
            phase,
        )

    def average_gradients(self, gradients: Gradients, phase: Phases) -> None:
        mean_gradients = self._owned_tensors.average_gradients(
            [get_gradient_or_zeros(weight) for weight in self._full_weights], phase
        )
        for weight in self._full_weights:
            weight.grad = None
        for parameter, mean in zip(self._stored, mean_gradients, strict=True):
            parameter.grad = mean
        # These gradients did not come from a backward, which would have stored them.
        gradients.store_gradients()

    def join_norms(self, norms: TensorSequence) -> list[Tensor]:
        """Returns the norms of all weights, collected from the ranks that store them. `norms` has one or several norms
        of each weight that this rank stores: the first norm of every weight, then the second norms.
        """
        squared_norms = torch.stack(list(norms)).to(torch.float64).square().view(-1, len(self._stored))
        all_squared_norms = squared_norms.new_zeros(len(squared_norms), len(self._full_weights))
        all_squared_norms[:, self.select_stored_values(range(len(self._full_weights)))] = squared_norms
        return list(self._group.add_over_ranks(all_squared_norms).sqrt().to(torch.float32).flatten())


class BF16Group(RankGroup):
    """Sends numbers of more than 16 bits as bfloat16. Returns the received numbers in the dtype of the numbers that
    were sent.
    """

    def gather_stack(self, x: Tensor) -> Tensor:
        return super().gather_stack(_cast_to_16_bits(x)).to(x.dtype)

    def reduce_own_part(self, parts: Tensor) -> Tensor:
        return super().reduce_own_part(_cast_to_16_bits(parts)).to(parts.dtype)


def _cast_to_16_bits(x: Tensor) -> Tensor:
    return x if x.dtype.itemsize == 2 else x.to(torch.bfloat16)


GROUPS_BY_WIRE: dict[str, type[RankGroup]] = {"fp32": RankGroup, "bf16": BF16Group, "fp8": FP8Group}


class SequenceParallel(TensorParallel):
    """Tensor parallelism in which each rank has only its own tokens between the parts of blocks. Activations are
    divided before the first block and gathered after the last.
    """

    def __init__(self, group: RankGroup, config: GPTConfig, wire: str) -> None:
        super().__init__(group, config)
        self.token_group = GROUPS_BY_WIRE[wire](group.handle)

    def cut_model_for_rank(self, model: LanguageModel) -> None:
        assert isinstance(model, GPT)
        token_group = self.token_group

        def divide_tokens(x: Tensor) -> Tensor:
            return token_group.take_token_share(x).contiguous()

        split_blocks_over_ranks(model, self._config, token_group, gather_tokens, scatter_tokens)
        model.blocks[0].register_forward_pre_hook(
            lambda _, inputs: (exchange_tensors(inputs[0], divide_tokens, token_group.gather_tokens), *inputs[1:])
        )
        model.norm.register_forward_pre_hook(
            lambda _, inputs: (exchange_tensors(inputs[0], token_group.gather_tokens, divide_tokens),)
        )

    def divide_parameters(self, parameters: NamedParameters) -> NamedParameters:
        """Returns this rank's part of the parameters. Norm layers inside blocks see only this rank's tokens, so their
        gradients are summed over ranks.
        """
        block_parameters = {name: parameter for name, parameter in parameters.items() if name.startswith("blocks.")}
        self._summed_parameters = [
            parameter for name, parameter in block_parameters.items() if find_weight_cut(name, self._config) is None
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
        gradients.fill_missing_gradients()
        self._group.sum_gradients(
            [parameter.grad for parameter in self._summed_parameters if parameter.grad is not None]
        )


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
