"""Ranks as threads of one process, which exchange over a shared board, so that every exchange can be checked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fp8bench.nn.parallel.exchanges import RankGroup
from fp8bench.numerics.rank_programs import AllGather, AllToAll, AllToAllRows, ExchangeProgram, MaximumOverRanks

T = TypeVar("T")


class Board:
    """Where ranks put their contributions, and take those of all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=240)
        self._brought: list[Tensor] = [torch.empty(0)] * size

    def all_of(self, rank: int, x: Tensor) -> list[Tensor]:
        self._brought[rank] = x
        self._barrier.wait()
        result = list(self._brought)
        self._barrier.wait()
        return result

    def give_up(self) -> None:
        self._barrier.abort()


@dataclass
class Place:
    """A rank's place at a board, with the interface of a process group, and the bytes of rows that it has sent."""

    board: Board
    number: int
    sent: int = 0

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.board.size


class ThreadedGroup(RankGroup):
    """RankGroup over a board; counts the bytes of rows."""

    handle: Any
    is_silent = False

    def exchange_rows(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        place = self.handle
        others = sum(sent) - sent[self.rank]
        place.sent += others * x[:1].nelement() * x.element_size()
        with self.phase.communication:
            counts = place.board.all_of(place.number, torch.tensor(sent))
            rows = place.board.all_of(place.number, x.detach().clone())
        parts = [row.split(count.tolist())[self.rank] for row, count in zip(rows, counts, strict=True)]
        assert [len(part) for part in parts] == list(received)
        return torch.cat(parts)

    def add_over_ranks(self, x: Tensor) -> Tensor:
        return torch.stack(self._brought(x)).sum(0)

    def max_over_ranks(self, x: Tensor) -> Tensor:
        return torch.stack(self._brought(x)).amax(0)

    def gather_from_ranks(self, x: Tensor) -> list[Tensor]:
        return self._brought(x)

    def gather_stack(self, x: Tensor) -> Tensor:
        return torch.stack(self._brought(x))

    def reduce_own_part(self, parts: Tensor) -> Tensor:
        return torch.stack(self._brought(parts)).sum(0)[self.rank]

    def reduce_to_owners(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        for tensor, owner in zip(tensors, owners, strict=True):
            whole = torch.stack(self._brought(tensor)).sum(0)
            if owner == self.rank:
                tensor.copy_(whole)

    def broadcast_from_owners(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        for tensor, owner in zip(tensors, owners, strict=True):
            tensor.copy_(self._brought(tensor)[owner])

    def _brought(self, x: Tensor) -> list[Tensor]:
        with self.phase.communication:
            return [item.detach() for item in self.handle.board.all_of(self.handle.number, x.detach().clone())]


def on_board(place: Place, program: ExchangeProgram[T]) -> T:
    answer: Any = None
    while True:
        try:
            exchange = program.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result
        payloads = place.board.all_of(place.number, exchange.payload)
        if isinstance(exchange, AllToAllRows):
            to = place.board.all_of(place.number, torch.tensor(exchange.sent_lengths))
            answer = [own.split(some.tolist())[place.number] for own, some in zip(payloads, to, strict=True)]
        elif isinstance(exchange, AllToAll):
            answer = torch.stack([rows[place.number] for rows in payloads])
        else:
            assert isinstance(exchange, AllGather | MaximumOverRanks)
            answer = payloads if isinstance(exchange, AllGather) else torch.stack(payloads).amax(0)


def on_ranks(size: int, run: Callable[[Place], T]) -> list[T]:
    board = Board(size)

    def one(rank: int) -> T:
        try:
            torch.set_num_threads(1)
            return run(Place(board, rank))
        except BaseException:
            board.give_up()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
    failed = [error for future in futures if (error := future.exception()) is not None]
    for error in failed:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
