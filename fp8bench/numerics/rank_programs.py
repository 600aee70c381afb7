"""What ranks do together, as programs that say what they exchange: the same code for processes and for a simulation.

A program of one rank is a generator. It yields what it wants exchanged and is sent what the others gave; what it
returns is its result. `simulated` runs the programs of all ranks in this process, `on_this_rank` runs one of them in a
process group. Payloads of FP8 travel as bytes (uint8), which every backend of torch takes.
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
    """What a rank brings. It hands a share of that to the network for others."""

    payload: Tensor

    def sent(self, size: int) -> float:
        """Bytes that go round once: all ranks but the last send a part of them on."""
        return self.bytes * (size - 1) / size

    @property
    def bytes(self) -> int:
        return self.payload.numel() * self.payload.element_size()


class AllGather(Exchange):
    """Everybody gets everybody's, by rank."""

    def sent(self, size: int) -> float:
        return self.bytes * (size - 1)


class AllToAll(Exchange):
    """The n-th row goes to rank n; everybody gets a row from each, by rank."""


@dataclass(frozen=True)
class Handed(Exchange):
    """So many numbers of it to each rank, which lie behind each other; so many come from each, by rank."""

    rank: int
    to: Sequence[int]
    given: Sequence[int]

    def sent(self, size: int) -> float:
        return (sum(self.to) - self.to[self.rank]) * self.payload.element_size()


class Shift(Exchange):
    """To the next rank; what the one before gave comes."""

    def sent(self, size: int) -> float:
        return self.bytes


class Largest(Exchange):
    """The largest over all ranks, element by element."""

    def sent(self, size: int) -> float:
        return 2 * super().sent(size)


class FromFirst(Exchange):
    """Rank 0's, to everybody."""


Program = Generator[Exchange, Any, T]


@dataclass
class Counted:
    """The bytes that a rank has handed to the network for others: those of the tensors that were really sent.

    Of a maximum those that a ring sends, which torch's backends need not take.
    """

    size: int
    bytes: float = field(default=0.0)

    def add(self, exchange: Exchange) -> None:
        self.bytes += exchange.sent(self.size)


def simulated(programs: Sequence[Program[T]], counted: Counted | None = None) -> list[T]:
    """The results of all ranks, which exchange in lockstep; what rank 0 sends is counted."""
    answers: list[Any] = [None] * len(programs)
    while True:
        asked, results = [], []
        for program, answer in zip(programs, answers, strict=True):
            try:
                asked.append(program.send(answer))
            except StopIteration as end:
                results.append(end.value)
        if results:
            if asked:
                raise RuntimeError(f"{len(results)} of {len(programs)} ranks have ended, and the others wait for them")
            return results
        if counted is not None:
            counted.add(asked[0])
        answers = _exchanged(asked)


def _exchanged(asked: Sequence[Exchange]) -> list[Any]:
    size, payloads = len(asked), [exchange.payload for exchange in asked]
    match asked[0]:
        case AllGather():
            return [payloads] * size
        case AllToAll():
            return [torch.stack([rows[rank] for rows in payloads]) for rank in range(size)]
        case Handed():
            parts = [torch.split(handed.payload, list(handed.to)) for handed in asked if isinstance(handed, Handed)]
            return [[own[rank] for own in parts] for rank in range(size)]
        case Shift():
            return [payloads[rank - 1] for rank in range(size)]
        case FromFirst():
            return [payloads[0]] * size
    return [torch.stack(payloads).amax(0)] * size


class Waits(Protocol):
    """Something that goes on by itself, until it is waited for."""

    def wait(self) -> object: ...


@dataclass(frozen=True)
class BegunExchange(Generic[T]):
    """A program whose first exchange of codes goes on by itself; what comes after it waits for that."""

    program: Program[T]
    sent: Sequence[Waits]
    answer: Any

    def wait(self) -> T:
        for waits in self.sent:
            waits.wait()
        return on_this_rank(self.program, answer=self.answer)


def begun(program: Program[T]) -> BegunExchange[T]:
    """Up to the first exchange of codes, which is not waited for: the largest magnitudes of ranks come before it."""
    answer = None
    while True:
        exchange = program.send(answer)
        alone = not isinstance(exchange, Largest)
        sent, answer = _asked(exchange, None, alone)
        if alone:
            return BegunExchange(program, sent, answer)


def on_this_rank(
    program: Program[T],
    counted: Counted | None = None,
    around: AbstractContextManager[object] | None = None,
    group: ProcessGroup | None = None,
    answer: Any = None,
) -> T:
    """The result of this process's rank in a group, or among all; `around` is entered for each exchange. `answer` is
    that to the exchange which the program waits for, None where it has not begun."""
    around = around or nullcontext()
    while True:
        try:
            exchange = program.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result
        if counted is not None:
            counted.add(exchange)
        with around:
            sent, answer = _asked(exchange, group, False)
            for waits in sent:
                waits.wait()


def _asked(exchange: Exchange, group: ProcessGroup | None, alone: bool) -> tuple[Sequence[Waits], Any]:
    """What to wait for before the answer may be read: nothing where torch has waited itself (not `alone`)."""
    import torch.distributed as dist

    rank, size, payload = dist.get_rank(group), dist.get_world_size(group), exchange.payload
    match exchange:
        case AllGather():
            gathered = [torch.empty_like(payload) for _ in range(size)]
            return _sent(dist.all_gather(gathered, payload.contiguous(), group, alone)), gathered
        case AllToAll():
            received = torch.empty_like(payload)
            return _sent(dist.all_to_all_single(received, payload.contiguous(), group=group, async_op=alone)), received
        case Handed(to=to, given=given):
            received = payload.new_empty(sum(given))
            work = dist.all_to_all_single(received, payload.contiguous(), list(given), list(to), group, alone)
            return _sent(work), torch.split(received, list(given))
        case Shift():
            received = torch.empty_like(payload)
            both = [
                dist.P2POp(dist.isend, payload.contiguous(), group=group, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),
            ]
            return dist.batch_isend_irecv(both), received
    whole = payload.clone()
    if isinstance(exchange, FromFirst):
        return _sent(dist.broadcast(whole, group=group, group_src=0, async_op=alone)), whole
    return _sent(dist.all_reduce(whole, dist.ReduceOp.MAX, group, alone)), whole


def _sent(work: Waits | None) -> Sequence[Waits]:
    return () if work is None else (work,)
