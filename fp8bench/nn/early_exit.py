"""Feed-forward blocks that rows leave once a head is confident: the work depends on the data, and on the precision.

A fixed share of the rows leaves behind each block: either by thresholds that give this share in the exact pass,
whatever the precision, or by a schedule made ahead, whatever the data.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.nn.linear import Choose, prefix_names
from fp8bench.nn.parts import FeedForward
from fp8bench.numerics.products import in_dtype
from fp8bench.protocols import Phases, SilentPhases

# Scales the head so that the largest probability of 64 classes is from 0.05 to 0.6.
_SHARPNESS = 2.0


class Exits(NamedTuple):
    """The rule behind each block but the last. Either `thresholds`: rows stay below that confidence; or `staying`: the
    places of the rows that stay."""

    thresholds: tuple[float, ...] = ()
    staying: tuple[Tensor, ...] = ()


class EarlyExit(nn.Module):
    """Residual feed-forward blocks with one head for all. Without `exits` every row takes every block."""

    exits: Exits | None = None

    def __init__(self, width: int, hidden: int, depth: int, classes: int, choose: Choose) -> None:
        super().__init__()
        scopes = [prefix_names(choose, f"blocks.{number}") for number in range(depth)]
        self.blocks = nn.ModuleList(FeedForward(width, hidden, False, 1.0, scope) for scope in scopes)
        self.head = nn.Parameter(_SHARPNESS * torch.randn(classes, width) * width**-0.5)

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        last_logits = x.new_zeros(len(x), len(self.head))
        for rows, logits in self.walk(x, phase):
            last_logits.index_copy_(0, rows, logits)
        return last_logits

    def walk(self, x: Tensor, phase: Phases) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the rows in each block, and their logits behind it."""
        rows = torch.arange(len(x), device=x.device)
        for number, block in enumerate(self.blocks):
            x = x + in_dtype(block(_normalise(x), phase), x.dtype)
            with phase.gemm:
                logits = _normalise(x) @ in_dtype(self.head, x.dtype).t()
            yield rows, logits
            if self.exits is None or number == len(self.blocks) - 1:
                continue
            # Rows that leave here cost nothing in the blocks that follow.
            # A schedule computes the confidence too, so that the step does the same work. With thresholds the host
            # waits for the number of remaining rows.
            sure = confidence(logits)
            exits = self.exits
            stays = exits.staying[number] if exits.staying else (sure < exits.thresholds[number]).nonzero().squeeze(-1)
            x = x[stays]
            rows = rows[stays]
            if not len(rows):
                return

    def depths(self, x: Tensor) -> Tensor:
        depths = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        with torch.no_grad():
            for rows, _ in self.walk(x, SilentPhases()):
                depths[rows] += 1
        return depths


def _normalise(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def confidence(logits: Tensor) -> Tensor:
    wide = logits if logits.dtype is torch.float64 else logits.float()
    return wide.softmax(-1).amax(-1)


def scheduled_exits(rows: Sequence[int], seed: int, device: torch.device) -> Exits:
    """Exits by schedule: as many rows stay behind a block as the next one has, drawn from the seed."""
    generator: torch.Generator = torch.Generator("cpu").manual_seed(seed)
    staying = []
    for count, remaining in itertools.pairwise(rows):
        places = torch.randperm(count, generator=generator)[:remaining].sort().values
        staying.append(places.to(device))
    return Exits(staying=tuple(staying))


def threshold_exits(exact: EarlyExit, x: Tensor, rows: Sequence[int]) -> Exits:
    """Exits by thresholds, with which the given numbers of rows stay in the exact pass."""
    thresholds: list[float] = []
    staying = torch.arange(len(x), device=x.device)
    with torch.no_grad():
        for count, (row_numbers, logits) in zip(rows[1:], exact.walk(x, SilentPhases()), strict=False):
            # 1. The exact pass walks all rows: look at those below all thresholds up to here.
            sure = confidence(logits[torch.isin(row_numbers, staying)])
            ordered = sure.sort().values
            if count and not ordered[count - 1] < ordered[count]:
                raise UsageError(
                    "rows are equally sure, so that no threshold lets the asked share of them leave: "
                    "choose exits=held, or another width"
                )
            # 2. A threshold half-way between two rows, so that rounding either does not move it across.
            thresholds.append(float(ordered[count - 1] + ordered[count]) / 2 if count else 0.0)
            staying = staying[sure < thresholds[-1]]
    # 3. Behind blocks that no row reaches nothing may stay out.
    unreached = len(exact.blocks) - 1 - len(thresholds)
    return Exits((*thresholds, *[math.inf] * unreached))
