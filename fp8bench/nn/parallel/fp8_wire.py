"""What ranks send each other as codes of FP8, which are added up in float32; and what looks at it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from fp8bench.nn.parallel.exchanges import Group
from fp8bench.nn.parallel.witness import first_of_all
from fp8bench.numerics.fp8_reduce import POST, TWOSHOT, AutoScale, mean_in_fp8, transported
from fp8bench.numerics.rank_programs import Program, on_this_rank, simulated
from fp8bench.protocols import Phases

# What a rank does with its values, by its number.
OfRank = Callable[[Tensor, int], Program[Tensor]]


class FP8Wire:
    """Exchanges of float32 vectors by programs of numerics/fp8_reduce.py, over a group."""

    def __init__(self, group: dist.ProcessGroup, way: str = TWOSHOT) -> None:
        self.group, self.way = group, way
        self._rank, self._size = group.rank(), group.size()
        self._witness: WireWitness | None = None

    def mean(self, values: Tensor, phase: Phases) -> Tensor:
        """Of everybody's."""
        return self._sent(self.mean_of, values, phase)

    def part_of_mean(self, values: Tensor, phase: Phases) -> Tensor:
        """This rank's part of it, of as many as there are ranks."""
        return self._sent(self._part_of, values, phase)

    def joined(self, part: Tensor, phase: Phases) -> Tensor:
        """Everybody's parts, by rank, with a scale each."""
        return self._sent(self._joined_of, part, phase)

    def watched(self) -> WireWitness:
        """What looks from now on at all that this rank gets."""
        self._witness = WireWitness(self.group)
        return self._witness

    def mean_of(self, values: Tensor, rank: int) -> Program[Tensor]:
        padded = torch.nn.functional.pad(values, (0, -values.numel() % self._size))
        found = yield from mean_in_fp8(self.way, padded, POST, rank, self._size, AutoScale())
        return found.values[: values.numel()]

    def _part_of(self, values: Tensor, rank: int) -> Program[Tensor]:
        found = yield from mean_in_fp8(TWOSHOT, values, POST, rank, self._size, AutoScale(), whole=False)
        return found.values

    def _joined_of(self, part: Tensor, rank: int) -> Program[Tensor]:
        found = yield from transported(part)
        return found.values

    def _sent(self, program: OfRank, own: Tensor, phase: Phases) -> Tensor:
        with phase.cast:
            got = self._result(program(own, self._rank), phase)
        if self._witness is not None:
            self._witness.look(own, got, program)
        return got

    def _result(self, program: Program[Tensor], phase: Phases) -> Tensor:
        return on_this_rank(program, None, phase.communication, self.group)


class FP8Group(Group):
    """A group that adds up, gathers and scatters in FP8, and hands back what it was given in."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.wire = FP8Wire(self.handle)

    def added(self, x: Tensor) -> Tensor:
        return (self.wire.mean(_flat(x), self.phase) * self.size).view(x.shape).to(x.dtype)

    def all_parts(self, x: Tensor) -> Tensor:
        return self.wire.joined(_flat(x), self.phase).view(self.size, *x.shape).to(x.dtype)

    def own_part(self, parts: Tensor) -> Tensor:
        return (self.wire.part_of_mean(_flat(parts), self.phase) * self.size).view(parts.shape[1:]).to(parts.dtype)


class WireWitness:
    """Holds what a rank got against what one process comes to of all ranks' values, by the same program, bit for
    bit."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._wrong = group, ""

    def look(self, own: Tensor, got: Tensor, program: OfRank) -> None:
        """All ranks look at every exchange: they ask each other."""
        everybody = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(everybody, own, group=self._group)
        wanted = simulated([program(one, rank) for rank, one in enumerate(everybody)])[self._group.rank()]
        wrong = int((got != wanted).sum())
        if wrong and not self._wrong:
            self._wrong = f"has got {wrong:,} of {got.numel():,} numbers in FP8 that are not those of all ranks' values"

    def mistake(self) -> str:
        return first_of_all(self._wrong, self._group)


def _flat(x: Tensor) -> Tensor:
    return x.to(torch.float32).flatten()
