"""How the lines of several ranks become one stream, by values."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from fp8bench.errors import RanksDisagree
from fp8bench.features.train.lab.rank_lab import MERGE_BY_METHOD
from fp8bench.features.train.lab.readings import (
    TensorCast,
    make_layer_reading,
    measure_tensor_figures,
    move_figures_to_host,
)
from fp8bench.features.train.values import (
    ArmCost,
    LayerReading,
    RankTrainingLines,
    StepFigure,
    StepRow,
    StreamLine,
    TrainingEvent,
    Validation,
)
from fp8bench.formats.grids import E4M3
from fp8bench.formats.recipes import Scaling
from fp8bench.measure.ranks.answers import merge_answers as merged_with
from fp8bench.model import MemoryUse
from tests.counts import for_each

merge_answers = partial(merged_with, more_merges=MERGE_BY_METHOD)

ROW = StepRow("fp8", 0, 3, 2.5, 1e-3, 0.7, 0.0, 10.0, 1e-3, 1.0, 64, 0.5)


def said(*lines: StreamLine, weights: int = 1) -> RankTrainingLines:
    return RankTrainingLines(lines, (("the weights", weights),))


def one(*ranks: StreamLine) -> Any:
    (line,) = merge_answers("advance", [said(line) for line in ranks])
    return line


def test_a_step_is_that_of_all_ranks_and_takes_as_long_as_the_slowest() -> None:
    assert one(ROW, replace(ROW, seconds=0.75)) == replace(ROW, seconds=0.75)


@for_each(
    ("other", "why"),
    [
        (
            said(replace(ROW, loss=2.5000000000000004)),
            r"in step 3 of fp8 loss is 2\.5 on rank 0 and 2\.5000000000000004",
        ),
        (said(replace(ROW, skipped=True)), "skipped is False on rank 0 and True on rank 1"),
        (said(ROW, weights=2), "the weights of rank 1 differ from those of rank 0"),
        (said(ROW, ROW), "rank 1 sent 2 lines for the same steps, and rank 0 1"),
    ],
)
def test_what_must_be_the_same_is_compared(other: RankTrainingLines, why: str) -> None:
    with pytest.raises(RanksDisagree, match=why):
        merge_answers("advance", [said(ROW), other])


def test_a_reading_is_that_of_all_parts_together() -> None:
    """As for one tensor with that scale; if scales differ, the smallest and the largest are given."""
    torch.manual_seed(0)
    parts = [torch.randn(64, 32), 3 * torch.randn(64, 32) + 1]
    scale = torch.tensor(100.0)

    def reading(x: torch.Tensor) -> LayerReading:
        left = (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale
        (figures,) = move_figures_to_host([measure_tensor_figures(x, TensorCast(E4M3, Scaling(0, 0), scale, left))])
        return make_layer_reading("fp8", 0, 3, "a", "input", figures, 90.0)

    both = one(*map(reading, parts))
    whole = reading(torch.cat(parts))
    for name in ("amax", "smallest", "scale", "least_scale", "largest_scale", "lag", "drift"):
        assert getattr(both, name) == getattr(whole, name), name
    for name in ("mean", "deviation", "underflow", "saturated", "zeros", "not_finite", "signal_to_noise"):
        assert getattr(both, name) == pytest.approx(getattr(whole, name), rel=1e-5), name
    assert whole.saturated > 0 and one(whole, whole, whole) == whole
    low = replace(whole, scale=2.0, least_scale=2.0, largest_scale=2.0, drift=None)
    apart = one(low, replace(low, scale=8.0, least_scale=8.0, largest_scale=8.0, drift=2.0))
    assert (apart.least_scale, apart.scale, apart.largest_scale, apart.drift) == (2.0, 4.0, 8.0, 2.0)


def test_memory_is_that_of_the_rank_that_takes_most_with_that_of_each() -> None:
    costs = [ArmCost("fp8", 0, memory=MemoryUse(peak)) for peak in (10, 30)]
    most = merge_answers("measure_memory", costs)
    assert most.memory.peak == 30 and [use.peak for use in most.memory.ranks] == [10, 30]
    silent = ArmCost("fp8", 0, why="nobody counts its memory")
    assert merge_answers("measure_memory", [costs[0], silent]) == silent


def test_further_figures_looks_and_events() -> None:
    """Maxima of maxima, otherwise means; an event that only one rank can locate is that rank's."""
    for name, value in (("output_amax", 2.0), ("gain", 1.5)):
        figure = StepFigure("fp8", 0, 3, name, 1.0, "a")
        assert one(figure, replace(figure, value=2.0)) == replace(figure, value=value)
    look = Validation("fp8", 0, 3, "held-out", 2.0, 64)
    assert merge_answers("validate", [(look,), (replace(look, loss=3.0),)]) == (replace(look, loss=2.5),)
    event = TrainingEvent("fp8", 0, 3, "not-finite", "the loss is nan")
    placed = replace(event, words="the input of a", layer="a")
    assert one(event, event) == event and one(event, placed) == replace(placed, words="on rank 1 of 2: the input of a")
