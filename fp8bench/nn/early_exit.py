"""Feed-forward blocks with early exits: a row leaves as soon as a classifier head is confident about it. So the
amount of work depends on the data and on the precision.

After each block a fixed fraction of the rows leaves. Either thresholds of confidence decide which rows leave, or a
schedule that ignores the data. The thresholds are chosen so that this fraction leaves in the exact pass.
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
from fp8bench.nn.linear import ChooseArithmetic, number_layer_parts
from fp8bench.nn.parts import FeedForward
from fp8bench.numerics.products import to_dtype
from fp8bench.protocols import Phases, SilentPhases

# With this scale of the head's weights, the largest probability of 64 classes is between 0.05 and 0.6.
_HEAD_WEIGHT_SCALE = 2.0


class EarlyExitRule(NamedTuple):
    """Decides which rows leave after each block but the last. Only one of the two fields is set. After block i a row
    stays if its confidence is below `confidence_thresholds[i]`, or if `staying_rows[i]` has its position.
    """

    confidence_thresholds: tuple[float, ...] = ()
    staying_rows: tuple[Tensor, ...] = ()


class EarlyExit(nn.Module):
    """Residual feed-forward blocks that share one classifier head. Without `exit_rule` every row runs through every
    block.
    """

    exit_rule: EarlyExitRule | None = None

    def __init__(self, width: int, hidden: int, depth: int, classes: int, choose: ChooseArithmetic) -> None:
        super().__init__()
        arithmetic_choosers = number_layer_parts(choose, "blocks", depth)
        self.blocks = nn.ModuleList(
            FeedForward(width, hidden, False, 1.0, choose_in_block) for choose_in_block in arithmetic_choosers
        )
        self.head = nn.Parameter(_HEAD_WEIGHT_SCALE * torch.randn(classes, width) * width**-0.5)

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        last_logits = x.new_zeros(len(x), len(self.head))
        for rows, logits in self.iterate_blocks(x, phase):
            last_logits.index_copy_(0, rows, logits)
        return last_logits

    def iterate_blocks(self, x: Tensor, phase: Phases) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields two things for each block: the indices of the rows that it gets, and their logits after it."""
        rows = torch.arange(len(x), device=x.device)
        for number, block in enumerate(self.blocks):
            x = x + to_dtype(block(_apply_rms_norm(x), phase), x.dtype)
            with phase.gemm:
                logits = _apply_rms_norm(x) @ to_dtype(self.head, x.dtype).t()
            yield rows, logits
            if self.exit_rule is None or number == len(self.blocks) - 1:
                continue
            # Rows that exit here skip the later blocks. Confidences are computed even with `staying_rows`, so that the
            # step does the same work as with thresholds. With thresholds the host waits for the number of staying rows.
            exit_confidences = compute_max_probability(logits)
            active_exit_rule = self.exit_rule
            remaining_row_indices = (
                active_exit_rule.staying_rows[number]
                if active_exit_rule.staying_rows
                else (exit_confidences < active_exit_rule.confidence_thresholds[number]).nonzero().squeeze(-1)
            )
            x = x[remaining_row_indices]
            rows = rows[remaining_row_indices]
            if not len(rows):
                return

    def count_blocks(self, x: Tensor) -> Tensor:
        block_count_by_row = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        with torch.no_grad():
            for rows, _ in self.iterate_blocks(x, SilentPhases()):
                block_count_by_row[rows] += 1
        return block_count_by_row


def _apply_rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def compute_max_probability(logits: Tensor) -> Tensor:
    wide_logits = logits if logits.dtype is torch.float64 else logits.float()
    return wide_logits.softmax(-1).amax(-1)


def make_scheduled_exit_rule(rows: Sequence[int], seed: int, device: torch.device) -> EarlyExitRule:
    """Returns an exit rule with a schedule: after each block, a random choice of rows stays. `rows` has the number of
    rows that each block gets.
    """
    generator: torch.Generator = torch.Generator("cpu").manual_seed(seed)
    remaining_row_indices = []
    for count, remaining in itertools.pairwise(rows):
        row_indices = torch.randperm(count, generator=generator)[:remaining].sort().values
        remaining_row_indices.append(row_indices.to(device))
    return EarlyExitRule(staying_rows=tuple(remaining_row_indices))


def make_threshold_exit_rule(exact: EarlyExit, x: Tensor, rows: Sequence[int]) -> EarlyExitRule:
    """Returns an exit rule with thresholds of confidence. In the exact pass, these thresholds leave `rows[i]` rows for
    block i.
    """
    confidence_thresholds: list[float] = []
    remaining_row_indices = torch.arange(len(x), device=x.device)
    with torch.no_grad():
        for count, (row_indices, logits) in zip(rows[1:], exact.iterate_blocks(x, SilentPhases()), strict=False):
            # 1. `exact` runs every row through every block. So drop the rows that earlier thresholds would let leave.
            exit_confidences = compute_max_probability(logits[torch.isin(row_indices, remaining_row_indices)])
            sorted_confidences = exit_confidences.sort().values
            if count and not sorted_confidences[count - 1] < sorted_confidences[count]:
                raise UsageError(
                    "several rows have the same confidence, so that no threshold lets the requested fraction leave: "
                    "choose exits=held, or another width"
                )
            # 2. Put the threshold half-way between two confidences, so that rounding does not move a row across it.
            confidence_thresholds.append(
                float(sorted_confidences[count - 1] + sorted_confidences[count]) / 2 if count else 0.0
            )
            remaining_row_indices = remaining_row_indices[exit_confidences < confidence_thresholds[-1]]
    # 3. A block that no row reaches needs a threshold too.
    unreached_block_count = len(exact.blocks) - 1 - len(confidence_thresholds)
    return EarlyExitRule((*confidence_thresholds, *[math.inf] * unreached_block_count))
