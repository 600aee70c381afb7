"""Loops of one's own side by side, from their streams alone: the same verdicts as the rules say of the same losses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fp8bench
from fp8bench.errors import RunNotFound, UsageError
from fp8bench.features.train.verdicts.curves import Learned
from fp8bench.features.train.verdicts.verdicts import TrainingVerdicts

STEPS, SEEDS = 60, 5


def loop(path: Path, seed: int, *, name: str, noise: float = 0.0, steps: int = STEPS, worse: float = 0.0) -> Path:
    """A small classifier in a loop as everybody writes it; `noise` is put on its weights in each step, and `worse` of
    its labels are wrong in what it is trained on and looked at with."""
    torch.manual_seed(seed)
    model, true = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    own = torch.Generator().manual_seed(seed + 1000)

    def loss(count: int) -> torch.Tensor:
        x = torch.randn(count, 8)
        y = torch.where(torch.rand(count, generator=own) < worse, 0, (x @ true).argmax(1))
        return F.cross_entropy(model(x), y)

    with fp8bench.watch(model, optimizer, path, name=name, health=False) as watched:
        for _ in range(steps):
            optimizer.zero_grad()
            loss(64).backward()
            optimizer.step()
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(noise * torch.randn(weight.shape, generator=own))
        with torch.no_grad():
            watched.held_out(loss(256))
    return path


def test_planted_differences_are_found_and_nothing_else(tmp_path: Path) -> None:
    """A loop with a fifth of its labels wrong is worse; one with noise of a rounding is as good; a copy is told to be
    one; and a loop that does not come to its end has no verdict."""

    def seeds(name: str, **how: Any) -> Sequence[Path]:
        return [loop(tmp_path / f"{name}-{seed}.jsonl", seed, name=name, **how) for seed in range(SEEDS)]

    compared = fp8bench.compare_streams(
        seeds("plain"), seeds("wrong", worse=0.2), seeds("rounding", noise=1e-6), seeds("copy"),
        seeds("short", steps=STEPS - 1),
    )  # fmt: skip
    verdicts = compared.found
    assert isinstance(verdicts, TrainingVerdicts)
    learned = {"wrong": Learned.WORSE, "rounding": Learned.WITHIN_NOISE, "copy": Learned.WITHIN_NOISE,
               "short": Learned.INCONCLUSIVE}  # fmt: skip
    assert {said.arm.name: said.judged.learned for said in verdicts.arms} == learned
    printed = " ".join(str(compared).split())
    assert "does this arm take effect?" in printed and "seeds 0, 1, 2, 3 and 4 do not count" in printed
    assert [row[0] for row in compared.as_rows()[1]] == ["plain", *learned]


def test_what_is_no_stream_is_refused(tmp_path: Path) -> None:
    """Each in a sentence; one that was cut off, or told no held-out loss, is compared."""
    good = loop(tmp_path / "good.jsonl", 0, name="own", steps=12)
    unseen = "".join(line for line in good.read_text().splitlines(True) if '"validation"' not in line)
    texts = {"text": "no stream\n", "empty": "", "unseen": unseen, "cut": unseen[:-20]}
    paths = {name: tmp_path / f"{name}.jsonl" for name in (*texts, "none")}
    for name, content in texts.items():
        paths[name].write_text(content)
    refused: list[tuple[tuple[Any, ...], str]] = [
        ((good,), "one stream"), ((good, paths["text"]), "line 1 of .* none of a stream"),
        ((good, paths["empty"]), "no row"), ((good, [good, good]), "1 and 2 seeds"), ((good, []), "empty"),
    ]  # fmt: skip
    for streams, words in refused:
        with pytest.raises(UsageError, match=words):
            fp8bench.compare_streams(*streams)
    with pytest.raises(RunNotFound, match="cannot be read"):
        fp8bench.compare_streams(good, paths["none"])
    with pytest.raises(UsageError, match="margin"):
        fp8bench.compare_streams(good, good, margin=100)
    printed = " ".join(str(fp8bench.compare_streams(paths["unseen"], paths["cut"])).split())
    assert "whether cut learns as unseen does is open" in printed and "told a held-out loss" in printed
