"""Statistics of values: the largest magnitude, and how much is outside each format's range."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fp8bench.formats.grids import RANGES, Format
from fp8bench.model import TensorStatistics


@dataclass
class Tally:
    """Counts over many tensors of one kind and role."""

    count: int = 0
    amax: float = 0.0
    above: dict[str, int] = field(default_factory=lambda: dict.fromkeys((fmt.name for fmt in RANGES), 0))
    below: dict[str, int] = field(default_factory=lambda: dict.fromkeys((fmt.name for fmt in RANGES), 0))

    def add(self, x: Tensor) -> None:
        if x.numel() == 0:
            return
        magnitudes = x.detach().abs()
        self.count += x.numel()
        self.amax = max(self.amax, float(magnitudes.amax()))
        for fmt in RANGES:
            above, below = outside(magnitudes, fmt)
            self.above[fmt.name] += above
            self.below[fmt.name] += below


def outside(magnitudes: Tensor, fmt: Format) -> tuple[int, int]:
    """Returns the numbers of magnitudes above the format's largest value, and of non-zero ones that round to zero in
    it. Half of the smallest subnormal is a tie, which rounds to zero, the even neighbour."""
    above = torch.count_nonzero(magnitudes > fmt.largest)
    vanishing = (magnitudes > 0) & (magnitudes <= fmt.smallest_subnormal / 2)
    return int(above), int(torch.count_nonzero(vanishing))


def statistics_of(tensors: Iterable[tuple[str, str, Tensor]]) -> tuple[TensorStatistics, ...]:
    ledger = Ledger()
    for kind, role, tensor in tensors:
        ledger.add(kind, role, tensor)
    return ledger.statistics()


@dataclass
class Ledger:
    """Tallies by kind and role, in order of first appearance."""

    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)

    def add(self, kind: str, role: str, x: Tensor) -> None:
        self.tallies.setdefault((kind, role), Tally()).add(x)

    def statistics(self) -> tuple[TensorStatistics, ...]:
        statistics = []
        for (kind, role), tally in self.tallies.items():
            count = max(tally.count, 1)
            outside = tuple((fmt.name, tally.above[fmt.name] / count, tally.below[fmt.name] / count) for fmt in RANGES)
            statistics.append(TensorStatistics(kind, role, tally.count, tally.amax, outside))
        return tuple(statistics)
