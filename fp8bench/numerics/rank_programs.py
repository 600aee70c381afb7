"""Programs of ranks that declare their exchanges: the same code for processes and for a simulation.

The program of one rank is a generator. It yields each exchange, is sent the answer, and returns its result. `simulated`
runs the programs of all ranks in this process, `on_this_rank` runs one of them in a process group. FP8 payloads are
sent as bytes (uint8), which every backend of torch accepts.
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
class Exchange:
    """A rank's payload, and how much of it the rank sends to others."""

    payload: Tensor

    def sent(self, size: int) -> float:
        """Returns the bytes of one round of a ring, in which all ranks but the last pass on a part."""
        return self.bytes * (size - 1) / size

    @property
    def bytes(self) -> int:
        return self.payload.numel() * self.payload.element_size()


class AllGather(Exchange):
    """Every rank gets all payloads, in their order."""

    def sent(self, size: int) -> float:
        return self.bytes * (size - 1)


class AllToAll(Exchange):
    """Row n goes to rank n; every rank gets one row from each, in their order."""


@dataclass(frozen=True)
class RowsToRanks(Exchange):
    """Rows of different sizes: `to` counts the adjacent numbers for each rank, `given` those that come from each, in
    order."""

    rank: int
    to: Sequence[int]
    given: Sequence[int]

    def sent(self, size: int) -> float:
        return (sum(self.to) - self.to[self.rank]) * self.payload.element_size()

    def split(self) -> Sequence[Tensor]:
        return torch.split(self.payload, list(self.to))


class Shift(Exchange):
    """The payload goes to the next rank; the answer is that of the previous rank."""

    def sent(self, size: int) -> float:
        return self.bytes


class Largest(Exchange):
    """The maximum over all ranks, element by element."""

    def sent(self, size: int) -> float:
        return 2 * super().sent(size)


class FromFirst(Exchange):
    """Rank 0's payload, for all ranks."""


Program = Generator[Exchange, Any, T]


@dataclass
class Counted:
    """The bytes that a rank has sent to others; for a maximum, what a ring would send, which backends need not use."""

    size: int
    bytes: float = field(default=0.0)

    def add(self, exchange: Exchange) -> None:
        self.bytes += exchange.sent(self.size)


def simulate(programs: Sequence[Program[T]], counted: Counted | None = None) -> list[T]:
    """Returns the results of all ranks, run in lockstep; `counted` counts what rank 0 sends."""
    answers: list[Any] = [None] * len(programs)
    while True:
        requests = []
        results = []
        for program, answer in zip(programs, answers, strict=True):
            try:
                requests.append(program.send(answer))
            except StopIteration as end:
                results.append(end.value)
        if results:
            if requests:
                raise RuntimeError(f"{len(results)} of {len(programs)} ranks have ended, and the others wait for them")
            return results
        if counted is not None:
            counted.add(requests[0])
        answers = _answers(requests)


def _answers(requests: Sequence[Exchange]) -> list[Any]:
    """Returns what each rank receives."""
    payloads = [request.payload for request in requests]
    ranks = range(len(requests))
    match requests[0]:
        case AllGather():
            return [payloads for _ in ranks]
        case AllToAll():
            return list(torch.stack(payloads).unbind(1))
        case RowsToRanks():
            parts = [request.split() for request in requests if isinstance(request, RowsToRanks)]
            return [list(received) for received in zip(*parts, strict=True)]
        case Shift():
            return [payloads[rank - 1] for rank in ranks]
        case FromFirst():
            return [payloads[0] for _ in ranks]
    return [torch.stack(payloads).amax(0) for _ in ranks]


class Waits(Protocol):
    """Something that runs asynchronously until it is waited for."""

    def wait(self) -> object: ...


@dataclass(frozen=True)
class BegunExchange(Generic[T]):
    """A program whose first exchange of codes has been started; the rest runs when it is waited for."""

    program: Program[T]
    sent: Sequence[Waits]
    answer: Any

    def wait(self) -> T:
        for waits in self.sent:
            waits.wait()
        return on_this_rank(self.program, answer=self.answer)


def start(program: Program[T]) -> BegunExchange[T]:
    answer = None
    while True:
        exchange = program.send(answer)
        alone = not isinstance(exchange, Largest)
        sent, answer = _start_exchange(exchange, None, alone)
        if alone:
            return BegunExchange(program, sent, answer)


def on_this_rank(
    program: Program[T],
    counted: Counted | None = None,
    around: AbstractContextManager[object] | None = None,
    group: ProcessGroup | None = None,
    answer: Any = None,
) -> T:
    """Returns the result of this process's rank in a group, by default all ranks; `around` is entered for each
    exchange. For a program that has begun, `answer` is the answer to its last exchange."""
    around = around or nullcontext()
    while True:
        try:
            exchange = program.send(answer)
        except StopIteration as end:
            return end.value
        if counted is not None:
            counted.add(exchange)
        with around:
            sent, answer = _start_exchange(exchange, group, False)
            for waits in sent:
                waits.wait()


def _start_exchange(exchange: Exchange, group: ProcessGroup | None, alone: bool) -> tuple[Sequence[Waits], Any]:
    """Starts an exchange; returns what to wait for, and the answer. If not `alone`, torch waits itself."""
    import torch.distributed as dist

    rank = dist.get_rank(group)
    size = dist.get_world_size(group)
    payload = exchange.payload
    sent = payload.contiguous()
    work: Waits | None
    answer: Any
    match exchange:
        case AllGather():
            answer = [torch.empty_like(payload) for _ in range(size)]
            work = dist.all_gather(answer, sent, group, alone)
        case AllToAll():
            answer = torch.empty_like(payload)
            work = dist.all_to_all_single(answer, sent, group=group, async_op=alone)
        case RowsToRanks(to=to, given=given):
            received = payload.new_empty(sum(given))
            work = dist.all_to_all_single(received, sent, list(given), list(to), group, alone)
            answer = torch.split(received, list(given))
        case Shift():
            answer = torch.empty_like(payload)
            both = [
                dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, answer, group=group, group_peer=(rank - 1) % size),
            ]
            return dist.batch_isend_irecv(both), answer
        case FromFirst():
            answer = payload.clone()
            work = dist.broadcast(answer, group=group, group_src=0, async_op=alone)
        case _:
            answer = payload.clone()
            work = dist.all_reduce(answer, dist.ReduceOp.MAX, group, alone)
    return () if work is None else (work,), answer
