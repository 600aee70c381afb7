"""What several ranks say of a training, as one, by values."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from fp8bench.errors import RanksDisagree
from fp8bench.features.train.lab.readings import TensorCast, figures_of, read, reading_of
from fp8bench.features.train.ranks_merge import MERGES
from fp8bench.features.train.values import (
    ArmCost,
    LayerReading,
    RankLines,
    StepFigure,
    StepRow,
    StreamLine,
    TrainingEvent,
    Validation,
)
from fp8bench.formats.grids import E4M3
from fp8bench.formats.recipes import Scaling
from fp8bench.measure.ranks.merge import merged as merged_with
from fp8bench.model import MemoryUse

merged = partial(merged_with, more=MERGES)

ROW = StepRow("fp8", 0, 3, 2.5, 1e-3, 0.7, 0.0, 10.0, 1e-3, 1.0, 64, 0.5)


def said(*lines: StreamLine, weights: int = 1, own: int = 0, whole: int = 0, shares: int = 2) -> RankLines:
    return RankLines(lines, (("the weights", weights),), ((3, own, whole),), shares)


def test_a_step_is_that_of_all_ranks_and_takes_as_long_as_the_slowest() -> None:
    rows = [said(ROW), said(replace(ROW, seconds=0.75))]
    assert merged("advance", rows) == (replace(ROW, seconds=0.75),)
    for other, why in (
        (
            said(replace(ROW, loss=2.5000000000000004)),
            r"in step 3 of fp8 loss is 2\.5 on rank 0 and 2\.5000000000000004",
        ),
        (said(replace(ROW, skipped=True)), "skipped is False on rank 0 and True on rank 1"),
        (replace(said(ROW), faults=("lost its rows",)), "in a slice rank 1 lost its rows"),
        (said(ROW, weights=2), "after a slice the weights of rank 1 are not those of rank 0"),
        (said(ROW, ROW), "rank 0 and rank 1 do not say the same kinds of things"),
        (said(ROW, whole=9), "in step 3 rank 1 reads another text, or of another seed, than rank 0"),
        (said(ROW, own=1), "in step 3 what the ranks have read is not the batch, each sequence once"),
    ):
        with pytest.raises(RanksDisagree, match=why):
            merged("advance", [said(ROW), other])


def test_parts_of_a_batch_come_to_the_batch_however_often_it_is_read() -> None:
    """Two shares of two ranks; the whole on each of two ranks, of which none reads a share."""
    assert merged("advance", [said(ROW, own=4, whole=9), said(ROW, own=5, whole=9)])
    assert merged("advance", [said(ROW, own=9, whole=9, shares=1)] * 2)
    with pytest.raises(RanksDisagree):
        merged("advance", [said(ROW, own=4, whole=9, shares=1)] * 2)
    large = (1 << 63) - 1
    assert merged("advance", [said(ROW, own=large, whole=3), said(ROW, own=4, whole=3)])


def test_a_reading_is_that_of_all_parts_together() -> None:
    """As if the parts were one tensor with that scale."""
    torch.manual_seed(0)
    parts = [torch.randn(64, 32), 3 * torch.randn(64, 32) + 1]
    scale = torch.tensor(100.0)

    def reading(x: torch.Tensor) -> LayerReading:
        left = (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale
        cast = TensorCast(E4M3, Scaling(0, 0), scale, left)
        (found,) = read([figures_of(x, cast)])
        return reading_of("fp8", 0, 3, "a", "input", found, 90.0)

    (found,) = merged("advance", [said(reading(one)) for one in parts])
    whole = reading(torch.cat(parts))
    for name in ("amax", "smallest", "scale", "least_scale", "largest_scale", "lag", "drift"):
        assert getattr(found, name) == getattr(whole, name), name
    for name in ("mean", "deviation", "underflow", "saturated", "zeros", "not_finite", "signal_to_noise"):
        assert getattr(found, name) == pytest.approx(getattr(whole, name), rel=1e-5), name
    assert whole.saturated > 0 and merged("advance", [said(whole)] * 3) == (whole,)


def test_scales_of_ranks_are_told_from_the_least_to_the_largest() -> None:
    one = LayerReading("fp8", 0, 3, "a", "input", 1.0, 0.1, 0.0, 0.5, 0.0, 2.0, 2.0, 2.0, drift=None)
    (found,) = merged(
        "advance", [said(one), said(replace(one, scale=8.0, least_scale=8.0, largest_scale=8.0, drift=2.0))]
    )
    assert (found.least_scale, found.scale, found.largest_scale, found.drift) == (2.0, 4.0, 8.0, 2.0)


def test_memory_is_that_of_the_rank_that_takes_most_with_that_of_each() -> None:
    costs = [ArmCost("fp8", 0, memory=MemoryUse(peak)) for peak in (10, 30)]
    found = merged("alone", costs)
    assert found.memory.peak == 30 and [one.peak for one in found.memory.ranks] == [10, 30]
    silent = ArmCost("fp8", 0, why="nobody counts its memory")
    assert merged("alone", [costs[0], silent]) == silent


def test_further_figures_looks_and_events() -> None:
    """The largest of what is a largest, else the mean; an event that one rank alone can place is that rank's."""
    figures = [StepFigure("fp8", 0, 3, name, 1.0, "a") for name in ("output_amax", "gradient_snr")]
    found = merged("advance", [said(*figures), said(*(replace(one, value=2.0) for one in figures))])
    assert [one.value for one in found] == [2.0, 1.5]
    look = Validation("fp8", 0, 3, "held-out", 2.0, 64, 64)
    assert merged("validate", [(look,), (replace(look, loss=3.0),)]) == (replace(look, loss=2.5),)
    event = TrainingEvent("fp8", 0, 3, "not-finite", "the loss is nan")
    placed = replace(event, words="the input of a", layer="a")
    assert merged("advance", [said(event), said(event)]) == (event,)
    assert merged("advance", [said(event), said(placed)]) == (replace(placed, words="on rank 1 of 2: the input of a"),)
