"""Exchanges between the ranks of a group inside a model, in forward and backward, in the phase communication. FP8
exchanges send codes and sum them in float32.

Backward runs the reverse of each exchange. If forward copies a tensor to all ranks, backward sums their gradients. If
forward sums tensors, each rank gets the whole gradient in backward. If forward gathers tokens, backward scatters their
gradients, and the other way round.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fp8bench.numerics.collectives import (
    POST_SCALING,
    TWOSHOT,
    AutoScale,
    RankTensors,
    average_tensors,
    compute_fp8_mean,
    find_newest_function,
    gather_parts,
    gather_tensors,
)
from fp8bench.numerics.rank_programs import ExchangeProgram, run_on_this_rank, simulate
from fp8bench.protocols import Phases, SilentPhases

_TOKEN_DIMENSION = 1
ExchangeTensor = Callable[[Tensor], Tensor]


def is_silent(group: dist.ProcessGroup) -> bool:
    """Returns whether the group sends nothing. Exchanges then work as if all ranks had equal values."""
    return str(dist.get_backend(group)) == "fake"


@dataclass
class RankGroup:
    """The ranks that share the blocks of a model. `phase` has the phase markers of the running step."""

    handle: dist.ProcessGroup
    phase: Phases = field(default_factory=SilentPhases)

    def __post_init__(self) -> None:
        self.rank, self.size = self.handle.rank(), self.handle.size()

    @property
    def is_silent(self) -> bool:
        return is_silent(self.handle)

    def add_over_ranks(self, x: Tensor) -> Tensor:
        with self.phase.communication:
            # Copy x, because all_reduce overwrites its argument.
            sum_over_ranks = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(sum_over_ranks, group=self.handle)
            return sum_over_ranks

    def max_over_ranks(self, x: Tensor) -> Tensor:
        with self.phase.communication:
            maximum_over_ranks = x.clone()
            dist.all_reduce(maximum_over_ranks, dist.ReduceOp.MAX, group=self.handle)
            return maximum_over_ranks

    def gather_from_ranks(self, x: Tensor) -> list[Tensor]:
        if self.is_silent:
            return [x] * self.size
        with self.phase.communication:
            parts = [torch.empty_like(x) for _ in range(self.size)]
            dist.all_gather(parts, x, group=self.handle)
            return parts

    def gather_tokens(self, x: Tensor) -> Tensor:
        return self.gather_stack(x).movedim(0, _TOKEN_DIMENSION).flatten(_TOKEN_DIMENSION, _TOKEN_DIMENSION + 1)

    def scatter_tokens(self, x: Tensor) -> Tensor:
        return self.reduce_own_part(torch.stack(x.chunk(self.size, _TOKEN_DIMENSION)))

    def gather_stack(self, x: Tensor) -> Tensor:
        with self.phase.communication:
            parts = x.new_empty(self.size, *x.shape)
            gather_function = find_newest_function("all_gather_single", "all_gather_into_tensor")
            gather_function(parts, x.contiguous()[None], group=self.handle)
            return parts

    def reduce_own_part(self, parts: Tensor) -> Tensor:
        with self.phase.communication:
            reduced_rank_part = parts.new_empty(1, *parts.shape[1:])
            find_newest_function("reduce_scatter_single", "reduce_scatter_tensor")(
                reduced_rank_part, parts, group=self.handle
            )
            return reduced_rank_part[0]

    def exchange_rows(self, x: Tensor, sent_counts: Sequence[int], received_counts: Sequence[int]) -> Tensor:
        """Sends `sent_counts[r]` rows of x to each rank r. Returns the rows that the ranks have sent to this rank,
        `received_counts[r]` of them from rank r.
        """
        with self.phase.communication:
            # Zeros, because a silent group receives nothing.
            rows = x.new_zeros(sum(received_counts), *x.shape[1:])
            if not self.is_silent:
                dist.all_to_all_single(
                    rows, x.contiguous(), list(received_counts), list(sent_counts), group=self.handle
                )
            return rows

    def reduce_to_owners(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Sums each tensor in place on the rank that owns it. On other ranks its numbers are undefined afterwards."""
        with self.phase.communication:
            tensors_and_owners = zip(tensors, owners, strict=True)
            _wait_for_all(
                dist.reduce(tensor, group=self.handle, group_dst=owner_rank, async_op=True)
                for tensor, owner_rank in tensors_and_owners
            )

    def broadcast_from_owners(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        with self.phase.communication:
            tensors_and_owners = zip(tensors, owners, strict=True)
            _wait_for_all(
                dist.broadcast(tensor, group=self.handle, group_src=owner_rank, async_op=True)
                for tensor, owner_rank in tensors_and_owners
            )

    def sum_gradients(self, gradients: Sequence[Tensor]) -> None:
        flat_gradients = [gradient.view(-1) for gradient in gradients]
        gradient_sums = self.add_over_ranks(torch.cat(flat_gradients))
        torch._foreach_copy_(
            flat_gradients, list(torch.split(gradient_sums, [tensor.numel() for tensor in flat_gradients]))
        )

    def take_token_share(self, x: Tensor) -> Tensor:
        return x.chunk(self.size, _TOKEN_DIMENSION)[self.rank]


def _wait_for_all(operations: Iterable[dist.Work | None]) -> None:
    """Starts all operations between ranks before it waits for the first one."""
    for operation in list(operations):
        if operation is not None:
            operation.wait()


class _ExchangeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_exchange: ExchangeTensor, backward_exchange: ExchangeTensor) -> Tensor:
        ctx.backward_exchange = backward_exchange
        return forward_exchange(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.backward_exchange(gradients[0]), None, None


def exchange_tensors(x: Tensor, forward: ExchangeTensor, backward: ExchangeTensor) -> Tensor:
    return _ExchangeFunction.apply(x, forward, backward)  # type: ignore[no-untyped-call]


def copy_to_ranks(x: Tensor, group: RankGroup) -> Tensor:
    return exchange_tensors(x, lambda y: y.view_as(y), group.add_over_ranks)


def add_over_ranks(x: Tensor, group: RankGroup) -> Tensor:
    return exchange_tensors(x, group.add_over_ranks, lambda gradient: gradient)


def gather_tokens(x: Tensor, group: RankGroup) -> Tensor:
    return exchange_tensors(x, group.gather_tokens, group.scatter_tokens)


def scatter_tokens(x: Tensor, group: RankGroup) -> Tensor:
    return exchange_tensors(x, group.scatter_tokens, group.gather_tokens)


def gather_rank_answers(answer: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns the answers of all ranks of a group, in the order of ranks. Answers are sent as JSON, because torch
    would unpickle any object. So tuples become lists.
    """
    encoded_answer = json.dumps(answer).encode()
    rank_count = dist.get_world_size(group)
    # Exchange the lengths first, because all_gather needs equal lengths. JSON ignores the spaces that pad an answer.
    lengths = list(torch.zeros(rank_count, 1, dtype=torch.int64))
    dist.all_gather(lengths, torch.tensor([len(encoded_answer)]), group)
    longest_length = max(map(int, lengths))
    encoded_answers = list(torch.zeros(rank_count, longest_length, dtype=torch.uint8))
    dist.all_gather(
        encoded_answers, torch.frombuffer(bytearray(encoded_answer.ljust(longest_length)), dtype=torch.uint8), group
    )
    return [json.loads(bytes(codes.tolist())) for codes in encoded_answers]


def find_first_rank_fault(fault: str, group: dist.ProcessGroup) -> str:
    for rank, rank_fault in enumerate(gather_rank_answers(fault, group)):
        if rank_fault:
            return f"rank {rank} {rank_fault}"
    return ""


# A function that makes the program of one rank in an exchange, from the rank's values and its number.
RankProgram = Callable[[Tensor, int], ExchangeProgram[Tensor]]


class FP8Wire:
    """Exchanges float32 vectors in FP8 over a group, by the algorithms of numerics/collectives.py."""

    def __init__(self, group: dist.ProcessGroup, algorithm: str = TWOSHOT) -> None:
        self.group = group
        self.algorithm = algorithm
        self._rank = group.rank()
        self._size = group.size()
        self._witness: FP8ExchangeWitness | None = None

    def watch(self) -> FP8ExchangeWitness:
        self._witness = FP8ExchangeWitness(self.group)
        return self._witness

    def average_over_ranks(self, values: Tensor, rank: int) -> ExchangeProgram[Tensor]:
        # The length must be a multiple of the number of ranks.
        padded_values = torch.nn.functional.pad(values, (0, -values.numel() % self._size))
        mean = yield from compute_fp8_mean(self.algorithm, padded_values, POST_SCALING, rank, self._size, AutoScale())
        return mean.values[: values.numel()]

    def average_rank_part(self, values: Tensor, rank: int) -> ExchangeProgram[Tensor]:
        mean = yield from compute_fp8_mean(
            TWOSHOT, values, POST_SCALING, rank, self._size, AutoScale(), whole_vector=False
        )
        return mean.values

    def join_parts(self, part: Tensor, rank: int) -> ExchangeProgram[Tensor]:
        joined_vector = yield from gather_parts(part)
        return joined_vector.values

    def send(self, program: RankProgram, values: Tensor, phase: Phases) -> Tensor:
        """Runs the exchange `program` with this rank's `values` and those of all other ranks. Returns what this rank
        receives.
        """
        with phase.cast:
            received_values = self._run_program(program(values, self._rank), phase)
        if self._witness is not None:
            self._witness.verify_exchange_result(values, received_values, program)
        return received_values

    def _run_program(self, program: ExchangeProgram[Tensor], phase: Phases) -> Tensor:
        return run_on_this_rank(program, None, phase.communication, self.group)


class FP8Group(RankGroup):
    """A group of ranks that sums, gathers and scatters tensors in FP8. Results have the dtype of their inputs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.wire = FP8Wire(self.handle)

    def add_over_ranks(self, x: Tensor) -> Tensor:
        # The exchange returns the mean over ranks, not the sum.
        return (self._send_in_fp8(self.wire.average_over_ranks, x) * self.size).view(x.shape).to(x.dtype)

    def gather_stack(self, x: Tensor) -> Tensor:
        return self._send_in_fp8(self.wire.join_parts, x).view(self.size, *x.shape).to(x.dtype)

    def reduce_own_part(self, parts: Tensor) -> Tensor:
        return (self._send_in_fp8(self.wire.average_rank_part, parts) * self.size).view(parts.shape[1:]).to(parts.dtype)

    def _send_in_fp8(self, program: RankProgram, x: Tensor) -> Tensor:
        return self.wire.send(program, x.to(torch.float32).flatten(), self.phase)


class FP8ExchangeWitness:
    """Checks FP8 exchanges. One process computes the exchange from the values of all ranks, and its result must equal
    this rank's result bit for bit.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._fault = ""

    def verify_exchange_result(self, values: Tensor, received_values: Tensor, program: RankProgram) -> None:
        """Simulates an exchange from the `values` of all ranks, and stores a fault if this rank's `received_values`
        differ from the simulation. All ranks must call this method for every exchange.
        """
        # Vectors of different ranks may differ in length. Pad them, because all_gather needs equal lengths.
        lengths = gather_rank_answers(len(values), self._group)
        padded_values = torch.nn.functional.pad(values, (0, max(lengths) - len(values)))
        padded_values_of_ranks = RankGroup(self._group).gather_from_ranks(padded_values)
        values_of_ranks = [tensor[:length] for tensor, length in zip(padded_values_of_ranks, lengths, strict=True)]
        expected_result = simulate([program(tensor, rank) for rank, tensor in enumerate(values_of_ranks)])[
            self._group.rank()
        ]
        wrong_value_count = int((received_values != expected_result).sum())
        if wrong_value_count and not self._fault:
            numbers = f"{wrong_value_count:,} of {received_values.numel():,} FP8 numbers"
            self._fault = f"has received {numbers} that do not follow from all ranks' values"

    def find_fault(self) -> str:
        return find_first_rank_fault(self._fault, self._group)


T = TypeVar("T")


class RankOwnedTensors:
    """Tensors that are distributed over ranks: one rank owns each tensor. `sizes` are their numbers of elements, and
    `wire` is the format in which they are sent.
    """

    def __init__(self, group: RankGroup, sizes: Sequence[int], wire: str) -> None:
        self._group = group
        self.owners = assign_owner_ranks(sizes, group.size)
        self.fp8 = FP8Wire(group.handle) if wire == "fp8" else None
        self.sent_dtype = torch.bfloat16 if wire == "bf16" else torch.float32
        sizes_by_owner = [self.select_items_of(owner_rank, sizes) for owner_rank in range(group.size)]
        self._tensors_by_rank = [RankTensors(items, max(map(len, sizes_by_owner))) for items in sizes_by_owner]

    def select_items_of(self, owner: int, items: Sequence[T]) -> list[T]:
        return [item for item, item_owner in zip(items, self.owners, strict=True) if item_owner == owner]

    def select_items_of_own_rank(self, items: Sequence[T]) -> list[T]:
        return self.select_items_of(self._group.rank, items)

    def average_gradients(self, gradients: Sequence[Tensor], phase: Phases) -> list[Tensor]:
        """Returns the mean over all ranks of each tensor that this rank owns. `gradients` may be overwritten."""
        if self.fp8 is not None:
            gradients_by_owner = [
                _flatten_tensors(self.select_items_of(owner_rank, gradients)) for owner_rank in range(self._group.size)
            ]
            mean = partial(average_tensors, tensors_by_rank=self._tensors_by_rank)
            return _split_row_like(
                self.fp8.send(mean, torch.cat(gradients_by_owner), phase), self.select_items_of_own_rank(gradients)
            )
        self._group.phase = phase
        with phase.cast:
            sent_gradients = [gradient.to(self.sent_dtype) for gradient in gradients]  # no copy if the dtypes are equal
        self._group.reduce_to_owners(sent_gradients, self.owners)
        averaged_gradients = [tensor.to(torch.float32) for tensor in self.select_items_of_own_rank(sent_gradients)]
        torch._foreach_div_(averaged_gradients, self._group.size)
        return averaged_gradients

    def send_updated_tensors(self, owned: Sequence[Tensor], all_tensors: Sequence[Tensor], phase: Phases) -> None:
        """Sends this rank's tensors `owned` to all ranks, and copies the tensors of all owners into `all_tensors`.
        The copies are rounded to the format of the wire, on the owner too.
        """
        if self.fp8 is not None:
            gathered_rank_values = self.fp8.send(
                partial(gather_tensors, tensors_by_rank=self._tensors_by_rank), _flatten_tensors(owned), phase
            )
            for owner_rank, row in enumerate(
                torch.split(gathered_rank_values, [rank_tensors.num_elements for rank_tensors in self._tensors_by_rank])
            ):
                tensors_of_owner_rank = self.select_items_of(owner_rank, all_tensors)
                torch._foreach_copy_(tensors_of_owner_rank, _split_row_like(row, tensors_of_owner_rank))
            return
        self._group.phase = phase
        with phase.cast:
            tensors_to_send = [tensor.to(self.sent_dtype) for tensor in self.list_newest_tensors(owned, all_tensors)]
        self._group.broadcast_from_owners(tensors_to_send, self.owners)
        # A tensor that was sent without conversion is already in place.
        changed_weight_pairs = [
            (weight, tensor)
            for weight, tensor in zip(all_tensors, tensors_to_send, strict=True)
            if weight is not tensor
        ]
        if changed_weight_pairs:
            torch._foreach_copy_(
                [weight for weight, _ in changed_weight_pairs], [tensor for _, tensor in changed_weight_pairs]
            )

    def list_newest_tensors(self, owned: Sequence[Tensor], all_tensors: Sequence[Tensor]) -> list[Tensor]:
        own_tensor_iterator = iter(owned)
        return [
            next(own_tensor_iterator) if owner_rank == self._group.rank else weight
            for owner_rank, weight in zip(self.owners, all_tensors, strict=True)
        ]


def assign_owner_ranks(elements: Sequence[int], ranks: int) -> list[int]:
    """Returns the rank that owns each tensor. Tensors are assigned from the largest to the smallest, each to the rank
    that has the fewest elements at that time.
    """
    element_counts_by_rank = [0] * ranks
    owner_by_tensor = [0] * len(elements)
    for index in sorted(range(len(elements)), key=lambda number: (-elements[number], number)):
        owner_by_tensor[index] = element_counts_by_rank.index(min(element_counts_by_rank))
        element_counts_by_rank[owner_by_tensor[index]] += elements[index]
    return owner_by_tensor


def _flatten_tensors(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _split_row_like(row: Tensor, templates: Sequence[Tensor]) -> list[Tensor]:
    sizes = [tensor.numel() for tensor in templates]
    return [piece.view_as(tensor) for piece, tensor in zip(torch.split(row, sizes), templates, strict=True)]
