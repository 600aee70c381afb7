"""Agreement with one rank, by models that are planted in its place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.batches import TokenLoader
from fp8bench.nn.gpt import GPT
from fp8bench.nn.parallel.alone import AloneModel
from fp8bench.nn.parallel.step import ParallelState, agreement, begun
from fp8bench.nn.sizes import GPTConfig
from tests.facts import CPU

CONFIG = GPTConfig(256, 32, 1, 2, 2, 64, batch=2, sequence=8)


class Twice(AloneModel):
    """Adds gradients up where it should take their mean: AdamW would not see it."""

    def gradients(self) -> list[Tensor]:
        return [one * 2 for one in super().gradients()]


def state(folder: Path, kind: type[AloneModel]) -> ParallelState:
    tokens = folder / "tokens"
    np.random.default_rng(0).integers(0, 256, 500).astype(np.uint16).tofile(tokens)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = GPT(CONFIG, lambda name: PlainArithmetic(torch.float32), torch.float32)
    loader = TokenLoader(str(tokens), 2, CONFIG.sequence, "cpu", 1, CONFIG.vocabulary)
    return begun(kind(model, 1.0), loader, CPU, plain=True)


def test_the_same_model_agrees_bit_for_bit(tmp_path: Path) -> None:
    found = agreement(state(tmp_path, AloneModel), state(tmp_path, AloneModel), 2)
    assert set(found.figures().values()) == {0.0} and found.update.gain == 1.0


def test_sums_in_place_of_means_are_seen(tmp_path: Path) -> None:
    """Twice the gradients are twice the update, which is a distance of 1."""
    found = agreement(state(tmp_path, Twice), state(tmp_path, AloneModel), 2)
    assert 0.9 < found.update.error < 1.1 and 1.9 < found.update.gain < 2.1 and found.weight > 0
