"""Blocks that rows leave as soon as a head is sure of them: what runs depends on the data, and on the precision.

Of the rows that reach a block a given share leaves behind it: in the exact pass, whose thresholds belong to the data
and to no precision, and by a schedule that is made ahead, whatever the data.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.nn.gpt import FeedForward
from fp8bench.nn.linear import Choose
from fp8bench.numerics.products import in_dtype
from fp8bench.protocols import Phases, SilentPhases

# Of the largest probability of 64 classes: between 0.05 and 0.6.
_SHARPNESS = 2.0


class Exits(NamedTuple):
    """Behind each block but the last: how sure a head must be, or which rows stay, by a schedule. One of the two."""

    thresholds: tuple[float, ...] = ()
    staying: tuple[Tensor, ...] = ()


class EarlyExit(nn.Module):
    """Feed-forward blocks with a residual, and a head for all of them. Without `exits` every row takes every block."""

    exits: Exits | None = None

    def __init__(self, width: int, hidden: int, depth: int, classes: int, choose: Choose) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            FeedForward(width, hidden, False, 1.0, lambda kind, number=number: choose(f"blocks.{number}.{kind}"))  # type: ignore[misc]
            for number in range(depth)
        )
        self.head = nn.Parameter(_SHARPNESS * torch.randn(classes, width) * width**-0.5)

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        """The logits of each row where it left."""
        every = x.new_zeros(len(x), len(self.head))
        for rows, logits in self.walk(x, phase):
            every.index_copy_(0, rows, logits)
        return every

    def walk(self, x: Tensor, phase: Phases) -> Iterator[tuple[Tensor, Tensor]]:
        """Behind each block: which rows were in it, and their logits."""
        rows = torch.arange(len(x), device=x.device)
        for number, block in enumerate(self.blocks):
            x = x + in_dtype(block(_normed(x), phase), x.dtype)
            with phase.gemm:
                logits = _normed(x) @ in_dtype(self.head, x.dtype).t()
            yield rows, logits
            if self.exits is None or number == len(self.blocks) - 1:
                continue
            stays = self._staying(self.exits, number, logits)
            x, rows = x[stays], rows[stays]
            if not len(rows):
                return

    def _staying(self, exits: Exits, number: int, logits: Tensor) -> Tensor:
        """How sure the head is, is looked at either way: a scheduled step does the same work. Where rows choose their
        own way the host has to wait for how many are left."""
        sure = sureness(logits)
        return exits.staying[number] if exits.staying else (sure < exits.thresholds[number]).nonzero().squeeze(-1)

    def depths(self, x: Tensor) -> Tensor:
        """The blocks that each row takes."""
        depths = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        with torch.no_grad():
            for rows, _ in self.walk(x, SilentPhases()):
                depths[rows] += 1
        return depths


def _normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def sureness(logits: Tensor) -> Tensor:
    """The largest probability, at the least in fp32."""
    wide = logits if logits.dtype is torch.float64 else logits.float()
    return wide.softmax(-1).amax(-1)


def scheduled_exits(rows: Sequence[int], seed: int, device: torch.device) -> Exits:
    """Of the rows of each block as many stay as the next one has, drawn from the seed."""
    generator: torch.Generator = torch.Generator("cpu").manual_seed(seed)
    pairs = itertools.pairwise(rows)
    drawn = (torch.randperm(before, generator=generator)[:after].sort().values for before, after in pairs)
    return Exits(staying=tuple(tensor.to(device) for tensor in drawn))


def own_exits(exact: EarlyExit, x: Tensor, rows: Sequence[int]) -> Exits:
    """The thresholds at which so many rows stay in the exact pass."""
    thresholds: list[float] = []
    here = torch.arange(len(x), device=x.device)
    with torch.no_grad():
        for stays, (at, logits) in zip(rows[1:], exact.walk(x, SilentPhases()), strict=False):
            sure = sureness(logits[torch.isin(at, here)])
            ordered = sure.sort().values
            # Half-way between two rows: no rounding of either moves it to the other side.
            thresholds.append(float(ordered[stays - 1] + ordered[stays]) / 2 if stays else 0.0)
            here = here[sure < thresholds[-1]]
    return Exits((*thresholds, *[math.inf] * (len(exact.blocks) - 1 - len(thresholds))))
