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
from fp8bench.nn.linear import ChooseArithmetic, number_parts
from fp8bench.nn.parts import FeedForward
from fp8bench.numerics.products import to_dtype
from fp8bench.protocols import Phases, SilentPhases

# Scales the head's weights so that the largest probability of 64 classes is between 0.05 and 0.6.
_HEAD_SCALE = 2.0


class ExitRule(NamedTuple):
    """The rule by which rows leave after each block but the last. Only one of the two fields is set.
    `confidence_thresholds` are confidences below which a row stays. `staying_rows` has the positions of the rows that
    stay.
    """

    confidence_thresholds: tuple[float, ...] = ()
    staying_rows: tuple[Tensor, ...] = ()


class EarlyExit(nn.Module):
    """Residual feed-forward blocks that share one classifier head. Without `exit_rule` every row runs through every
    block.
    """

    exit_rule: ExitRule | None = None

    def __init__(self, width: int, hidden: int, depth: int, classes: int, choose: ChooseArithmetic) -> None:
        super().__init__()
        choose_by_block = number_parts(choose, "blocks", depth)
        self.blocks = nn.ModuleList(
            FeedForward(width, hidden, False, 1.0, choose_in_block) for choose_in_block in choose_by_block
        )
        self.head = nn.Parameter(_HEAD_SCALE * torch.randn(classes, width) * width**-0.5)

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        last_logits = x.new_zeros(len(x), len(self.head))
        for rows, logits in self.iterate_blocks(x, phase):
            last_logits.index_copy_(0, rows, logits)
        return last_logits

    def iterate_blocks(self, x: Tensor, phase: Phases) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields two things for each block: the indices of the rows that it gets, and their logits after it."""
        rows = torch.arange(len(x), device=x.device)
        for number, block in enumerate(self.blocks):
            x = x + to_dtype(block(_normalise_rows(x), phase), x.dtype)
            with phase.gemm:
                logits = _normalise_rows(x) @ to_dtype(self.head, x.dtype).t()
            yield rows, logits
            if self.exit_rule is None or number == len(self.blocks) - 1:
                continue
            # Rows that exit here skip the later blocks. Confidences are computed even with `staying_rows`, so that the
            # step does the same work as with thresholds. With thresholds the host waits for the number of staying rows.
            confidences = compute_confidence(logits)
            active_exit_rule = self.exit_rule
            staying_row_indices = (
                active_exit_rule.staying_rows[number]
                if active_exit_rule.staying_rows
                else (confidences < active_exit_rule.confidence_thresholds[number]).nonzero().squeeze(-1)
            )
            x = x[staying_row_indices]
            rows = rows[staying_row_indices]
            if not len(rows):
                return

    def count_blocks(self, x: Tensor) -> Tensor:
        block_count_by_row = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        with torch.no_grad():
            for rows, _ in self.iterate_blocks(x, SilentPhases()):
                block_count_by_row[rows] += 1
        return block_count_by_row


def _normalise_rows(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def compute_confidence(logits: Tensor) -> Tensor:
    wide_logits = logits if logits.dtype is torch.float64 else logits.float()
    return wide_logits.softmax(-1).amax(-1)


def make_scheduled_exits(rows: Sequence[int], seed: int, device: torch.device) -> ExitRule:
    """Returns an exit rule with a schedule: after each block, a random choice of rows stays. `rows` has the number of
    rows that each block gets.
    """
    generator: torch.Generator = torch.Generator("cpu").manual_seed(seed)
    staying_row_indices = []
    for count, remaining in itertools.pairwise(rows):
        row_indices = torch.randperm(count, generator=generator)[:remaining].sort().values
        staying_row_indices.append(row_indices.to(device))
    return ExitRule(staying_rows=tuple(staying_row_indices))


def find_threshold_exits(exact: EarlyExit, x: Tensor, rows: Sequence[int]) -> ExitRule:
    """Returns an exit rule with thresholds of confidence. In the exact pass, these thresholds leave `rows[i]` rows for
    block i.
    """
    confidence_thresholds: list[float] = []
    staying_row_indices = torch.arange(len(x), device=x.device)
    with torch.no_grad():
        for count, (row_indices, logits) in zip(rows[1:], exact.iterate_blocks(x, SilentPhases()), strict=False):
            # 1. No row leaves `exact` early. So select the rows that stay under all earlier thresholds.
            confidences = compute_confidence(logits[torch.isin(row_indices, staying_row_indices)])
            sorted_confidences = confidences.sort().values
            if count and not sorted_confidences[count - 1] < sorted_confidences[count]:
                raise UsageError(
                    "several rows have the same confidence, so that no threshold lets the requested fraction leave: "
                    "choose exits=held, or another width"
                )
            # 2. Put the threshold half-way between two confidences, so that rounding does not move a row across it.
            confidence_thresholds.append(
                float(sorted_confidences[count - 1] + sorted_confidences[count]) / 2 if count else 0.0
            )
            staying_row_indices = staying_row_indices[confidences < confidence_thresholds[-1]]
    # 3. Each block needs a threshold, even if all rows leave before it.
    unreached_blocks = len(exact.blocks) - 1 - len(confidence_thresholds)
    return ExitRule((*confidence_thresholds, *[math.inf] * unreached_blocks))
