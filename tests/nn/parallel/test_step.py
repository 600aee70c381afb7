"""Limits of how far ranks may be from one rank, by what rounds in a case."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.batches import TokenLoader
from fp8bench.nn.gpt import GPT
from fp8bench.nn.parallel.division import UndividedModel
from fp8bench.nn.parallel.step import (
    ParallelState,
    RankDifference,
    WeightUpdate,
    compare_with_one_rank,
    find_difference_limits,
    make_parallel_state,
)
from fp8bench.nn.sizes import GPTConfig
from fp8bench.registry import precisions
from tests.facts import CPU

CONFIG = GPTConfig(256, 32, 1, 2, 2, 64, batch=2, sequence=8)


class Twice(UndividedModel):
    """Sums gradients where it should take their mean, which AdamW would hide."""

    def gradients(self) -> list[Tensor]:
        return [gradient * 2 for gradient in super().gradients()]


def state(folder: Path, kind: type[UndividedModel]) -> ParallelState:
    tokens = folder / "tokens"
    np.random.default_rng(0).integers(0, 256, 500).astype(np.uint16).tofile(tokens)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = GPT(CONFIG, lambda name: PlainArithmetic(torch.float32), torch.float32)
    loader = TokenLoader(str(tokens), 2, CONFIG.sequence, "cpu", 1, CONFIG.vocabulary)
    return make_parallel_state(kind(model, 1.0), loader, CPU, plain=True)


def test_the_same_model_agrees_bit_for_bit(tmp_path: Path) -> None:
    result = compare_with_one_rank(state(tmp_path, UndividedModel), state(tmp_path, UndividedModel), 2)
    assert set(result.figures().values()) == {0.0} and result.update.gain == 1.0


def test_sums_in_place_of_means_are_seen(tmp_path: Path) -> None:
    result = compare_with_one_rank(state(tmp_path, Twice), state(tmp_path, UndividedModel), 2)
    assert 0.9 < result.update.error < 1.1 and 1.9 < result.update.gain < 2.1 and result.weight > 0


def test_each_limit_is_held_and_named() -> None:
    """Noise shortens a gain by half its square."""
    limits = find_difference_limits([precisions.get("fp8")], "fp32")
    updates = {"a": WeightUpdate(1.0, 100.0, 100.0), "b": WeightUpdate(0.01, 1.0, 1.0)}
    assert limits.describe_exceeded_limit(RankDifference(0.0, 0.0, updates)) == ""
    small = updates | {"b": WeightUpdate(0.36, 1.0, 1.0)}
    for wrong, words in (
        (small, "of b's change from that on one rank is 0.6, but rounding explains at most 0.5"),
        ({"a": WeightUpdate(1.0, 100.0, 110.0)}, "gain 1.1 from 1 is 0.1, but rounding explains at most 0.08"),
        ({"a": WeightUpdate(25.0, 100.0, 100.0)}, "all weights' changes from those on one rank is 0.5,"),
        ({"a": WeightUpdate(math.nan, 1.0, 1.0)}, "nan"),
    ):
        assert words in limits.describe_exceeded_limit(RankDifference(0.0, 0.0, wrong))
    for known in (
        find_difference_limits([precisions.get(mode)], "") for mode in ("fp32", "bf16", "fp8", "mxfp8", "nvfp4")
    ):
        assert known.gain > 0.99 * known.update**2 / 2 and known.update <= known.max_weight_distance
