"""Programs that ranks run together. The same program runs in processes that communicate and in a simulation.

The program of one rank is a generator. It yields each exchange with other ranks, receives what they sent, and returns
its result. `simulate` runs the programs of all ranks in this process. `run_on_this_rank` runs one rank's program and
communicates with the other processes of a group. FP8 payloads are sent as bytes (uint8), which every backend of torch
accepts.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


@dataclass(frozen=True)
class RankExchange:
    """The data (`payload`) that a rank sends in an exchange. Each subclass defines what the ranks receive."""

    payload: Tensor

    def count_sent_bytes(self, size: int) -> float:
        """Returns the bytes that one of `size` ranks sends in the exchange. By default these are the bytes of
        `size` - 1 of the payload's `size` equal parts, which a rank sends when all parts go around a ring once.
        """
        return self.bytes * (size - 1) / size

    @property
    def bytes(self) -> int:
        return self.payload.numel() * self.payload.element_size()


class AllGather(RankExchange):
    """Every rank receives the payloads of all ranks, in rank order."""

    def count_sent_bytes(self, size: int) -> float:
        return self.bytes * (size - 1)


class AllToAll(RankExchange):
    """Row n of the payload goes to rank n. Every rank receives one row from each rank, in rank order."""


@dataclass(frozen=True)
class AllToAllRows(RankExchange):
    """Sends each rank a piece of the payload, in rank order. `sent_lengths` has the length of the piece for each rank,
    `received_lengths` the length of the piece from each rank.
    """

    rank: int
    sent_lengths: Sequence[int]
    received_lengths: Sequence[int]

    def count_sent_bytes(self, size: int) -> float:
        return (sum(self.sent_lengths) - self.sent_lengths[self.rank]) * self.payload.element_size()

    def split_payload(self) -> Sequence[Tensor]:
        return torch.split(self.payload, list(self.sent_lengths))


class ShiftToNextRank(RankExchange):
    """The payload goes to the next rank, and each rank receives the payload of the previous one."""

    def count_sent_bytes(self, size: int) -> float:
        return self.bytes


class MaximumOverRanks(RankExchange):
    """Every rank receives the maximum of the payloads over all ranks, element by element."""

    def count_sent_bytes(self, size: int) -> float:
        # In a ring the parts go around twice: first to compute the maxima, then to distribute them.
        return 2 * super().count_sent_bytes(size)


class BroadcastFromFirst(RankExchange):
    """Every rank receives the payload of rank 0."""


ExchangeProgram = Generator[RankExchange, Any, T]


@dataclass
class SentBytes:
    """The bytes that one of `size` ranks has sent to the others. For a maximum over ranks, the bytes of a ring are
    counted, although backends need not use a ring.
    """

    size: int
    bytes: float = field(default=0.0)

    def add(self, exchange: RankExchange) -> None:
        self.bytes += exchange.count_sent_bytes(self.size)


def simulate(programs: Sequence[ExchangeProgram[T]], counted: SentBytes | None = None) -> list[T]:
    """Runs the programs of all ranks in lockstep in this process, and returns their results. The bytes that rank 0
    sends are added to `counted`.
    """
    answers_by_rank: list[Any] = [None] * len(programs)
    while True:
        requests = []
        results = []
        for program, answer in zip(programs, answers_by_rank, strict=True):
            try:
                requests.append(program.send(answer))
            except StopIteration as end:
                results.append(end.value)
        if results:
            if requests:
                raise RuntimeError(f"{len(results)} of {len(programs)} ranks have ended while the others wait for them")
            return results
        if counted is not None:
            counted.add(requests[0])
        answers_by_rank = _answer_exchange_requests(requests)


def _answer_exchange_requests(requests: Sequence[RankExchange]) -> list[Any]:
    """Returns for each rank what it receives in the exchange that all ranks have requested."""
    rank_payloads = [request.payload for request in requests]
    ranks = range(len(requests))
    match requests[0]:
        case AllGather():
            return [rank_payloads for _ in ranks]
        case AllToAll():
            # Transpose the payloads: row n of each payload goes to rank n.
            return list(torch.stack(rank_payloads).unbind(1))
        case AllToAllRows():
            # All requests have this type. `isinstance` is for the type checker.
            rows_by_rank = [request.split_payload() for request in requests if isinstance(request, AllToAllRows)]
            return [list(received) for received in zip(*rows_by_rank, strict=True)]
        case ShiftToNextRank():
            return [rank_payloads[rank - 1] for rank in ranks]
        case BroadcastFromFirst():
            return [rank_payloads[0] for _ in ranks]
    # The only remaining exchange is MaximumOverRanks.
    return [torch.stack(rank_payloads).amax(0) for _ in ranks]


class AsyncOperation(Protocol):
    """An asynchronous operation of torch.distributed, with the method `wait`."""

    def wait(self) -> object: ...


@dataclass(frozen=True)
class PendingRankProgram(Generic[T]):
    """A rank's program whose first exchange of codes runs asynchronously. `wait` runs the rest of the program."""

    program: ExchangeProgram[T]
    operations: Sequence[AsyncOperation]
    answer: Any

    def wait(self) -> T:
        for operation in self.operations:
            operation.wait()
        return run_on_this_rank(self.program, answer=self.answer)


def start_program(program: ExchangeProgram[T]) -> PendingRankProgram[T]:
    """Runs a program up to its first exchange of codes, and starts this exchange without waiting for it. Earlier
    exchanges of maxima are waited for, because codes depend on the maxima.
    """
    answer = None
    while True:
        next_exchange = program.send(answer)
        is_asynchronous = not isinstance(next_exchange, MaximumOverRanks)
        operations, answer = _start_rank_exchange(next_exchange, None, is_asynchronous)
        if is_asynchronous:
            return PendingRankProgram(program, operations, answer)


def run_on_this_rank(
    program: ExchangeProgram[T],
    counted: SentBytes | None = None,
    marker: AbstractContextManager[object] | None = None,
    group: ProcessGroup | None = None,
    answer: Any = None,
) -> T:
    """Runs the program of this process's rank and returns its result. It communicates with the ranks of `group`, by
    default with all ranks.

    Each exchange runs inside `marker`, and its bytes are added to `counted`. If the program was already started,
    `answer` is what this rank received in its last exchange.
    """
    marker = marker or nullcontext()
    while True:
        try:
            next_exchange = program.send(answer)
        except StopIteration as end:
            return end.value
        if counted is not None:
            counted.add(next_exchange)
        with marker:
            operations, answer = _start_rank_exchange(next_exchange, group, False)
            for operation in operations:
                operation.wait()


def _start_rank_exchange(
    exchange: RankExchange, group: ProcessGroup | None, asynchronous: bool
) -> tuple[Sequence[AsyncOperation], Any]:
    """Starts an exchange. Returns the operations to wait for, and the tensors that will hold what this rank
    receives.
    """
    import torch.distributed as dist

    rank = dist.get_rank(group)
    size = dist.get_world_size(group)
    payload = exchange.payload
    contiguous_payload = payload.contiguous()
    pending_collective: AsyncOperation | None
    answer: Any
    match exchange:
        case AllGather():
            answer = [torch.empty_like(payload) for _ in range(size)]
            pending_collective = dist.all_gather(answer, contiguous_payload, group, asynchronous)
        case AllToAll():
            answer = torch.empty_like(payload)
            pending_collective = dist.all_to_all_single(answer, contiguous_payload, group=group, async_op=asynchronous)
        case AllToAllRows(sent_lengths=sent_lengths, received_lengths=received_lengths):
            received_payload = payload.new_empty(sum(received_lengths))
            pending_collective = dist.all_to_all_single(
                received_payload, contiguous_payload, list(received_lengths), list(sent_lengths), group, asynchronous
            )
            answer = torch.split(received_payload, list(received_lengths))
        case ShiftToNextRank():
            answer = torch.empty_like(payload)
            send_receive_operations = [
                dist.P2POp(dist.isend, contiguous_payload, group=group, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, answer, group=group, group_peer=(rank - 1) % size),
            ]
            return dist.batch_isend_irecv(send_receive_operations), answer
        case BroadcastFromFirst():
            answer = payload.clone()
            pending_collective = dist.broadcast(answer, group=group, group_src=0, async_op=asynchronous)
        case _:  # MaximumOverRanks
            answer = payload.clone()
            pending_collective = dist.all_reduce(answer, dist.ReduceOp.MAX, group, asynchronous)
    return () if pending_collective is None else (pending_collective,), answer
