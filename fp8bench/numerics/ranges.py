"""Statistics of tensors: the largest magnitude, and how many values are outside each format's range."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fp8bench.formats.grids import COMPARED_FORMATS, Format
from fp8bench.model import TensorStatistics


@dataclass
class Tally:
    """Statistics of all tensors of one kind and role: the number of values, the largest magnitude, and for each format
    the numbers of values above and below its range.
    """

    count: int = 0
    amax: float = 0.0
    overflow_counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys((fmt.name for fmt in COMPARED_FORMATS), 0)
    )
    vanishing_counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys((fmt.name for fmt in COMPARED_FORMATS), 0)
    )

    def add(self, x: Tensor) -> None:
        if x.numel() == 0:
            return
        magnitudes = x.detach().abs()
        self.count += x.numel()
        self.amax = max(self.amax, float(magnitudes.amax()))
        for fmt in COMPARED_FORMATS:
            overflow_count, vanishing_count = count_out_of_range(magnitudes, fmt)
            self.overflow_counts[fmt.name] += overflow_count
            self.vanishing_counts[fmt.name] += vanishing_count


def count_out_of_range(magnitudes: Tensor, fmt: Format) -> tuple[int, int]:
    """Returns how many magnitudes exceed the format's largest value, and how many magnitudes above zero round to
    zero.

    Half of the smallest subnormal number is a tie, so it rounds to its even neighbour, zero.
    """
    overflow_count = torch.count_nonzero(magnitudes > fmt.largest)
    vanishing_mask = (magnitudes > 0) & (magnitudes <= fmt.smallest_subnormal / 2)
    return int(overflow_count), int(torch.count_nonzero(vanishing_mask))


def compute_statistics(tensors: Iterable[tuple[str, str, Tensor]]) -> tuple[TensorStatistics, ...]:
    value_range_ledger = TallyLedger()
    for kind, role, tensor in tensors:
        value_range_ledger.add(kind, role, tensor)
    return value_range_ledger.statistics()


@dataclass
class TallyLedger:
    """Collects statistics of tensors. Tensors of the same kind and role share a `Tally`, and tallies are in order of
    their first tensor.
    """

    tally_by_kind_and_role: dict[tuple[str, str], Tally] = field(default_factory=dict)

    def add(self, kind: str, role: str, x: Tensor) -> None:
        self.tally_by_kind_and_role.setdefault((kind, role), Tally()).add(x)

    def statistics(self) -> tuple[TensorStatistics, ...]:
        statistics = []
        for (kind, role), tally in self.tally_by_kind_and_role.items():
            # A tally of empty tensors has no values to divide by.
            count = max(tally.count, 1)
            format_outside_shares = tuple(
                (fmt.name, tally.overflow_counts[fmt.name] / count, tally.vanishing_counts[fmt.name] / count)
                for fmt in COMPARED_FORMATS
            )
            statistics.append(TensorStatistics(kind, role, tally.count, tally.amax, format_outside_shares))
        return tuple(statistics)
