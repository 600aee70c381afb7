"""Loops of one's own side by side, from their streams alone: the same verdicts as the rules say of the same losses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

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
    with fp8bench.watch(model, optimizer, path, name=name, health=False) as watched:
        for _ in range(steps):
            x = torch.randn(64, 8)
            y = torch.where(torch.rand(64, generator=own) < worse, 0, (x @ true).argmax(1))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(noise * torch.randn(weight.shape, generator=own))
        with torch.no_grad():
            x = torch.randn(256, 8)
            y = torch.where(torch.rand(256, generator=own) < worse, 0, (x @ true).argmax(1))
            watched.held_out(F.cross_entropy(model(x), y))
    return path


def loops(folder: Path, name: str, **how: float) -> Sequence[Path]:
    """One a seed."""
    return [loop(folder / f"{name}-{seed}.jsonl", seed, name=name, **how) for seed in range(SEEDS)]  # type: ignore[arg-type]


def learned(found: object) -> dict[str, Learned]:
    assert isinstance(found, TrainingVerdicts)
    return {said.arm.name: said.judged.learned for said in found.arms}


def test_planted_differences_are_found_and_nothing_else(tmp_path: Path) -> None:
    """A loop with a fifth of its labels wrong is worse; one with noise of a rounding is as good; a copy is told to be
    one; and a loop that does not come to its end has no verdict."""
    reference = loops(tmp_path, "plain")
    others = [
        loops(tmp_path, "wrong labels", worse=0.2), loops(tmp_path, "rounding", noise=1e-6), loops(tmp_path, "copy"),
        loops(tmp_path, "short", steps=STEPS - 1),
    ]  # fmt: skip
    found = fp8bench.compare_streams(reference, *others)
    assert learned(found.found) == {
        "wrong labels": Learned.WORSE, "rounding": Learned.WITHIN_NOISE, "copy": Learned.WITHIN_NOISE,
        "short": Learned.INCONCLUSIVE,
    }  # fmt: skip
    printed = " ".join(str(found).split())
    assert "rounding learns as plain does: a loss more than" in printed and "does this arm take effect?" in printed
    assert "seeds 0, 1, 2, 3 and 4 do not count: not finished" in printed
    assert [row[0] for row in found.as_rows()[1]] == ["plain", "wrong labels", "rounding", "copy", "short"]


def test_one_seed_and_no_held_out_loss_are_said(tmp_path: Path) -> None:
    """Two streams are compared; names that are alike give way to those of files."""
    one, other = (loop(tmp_path / f"{name}.jsonl", 0, name="own") for name in ("before", "after"))
    for path in (one, other):
        path.write_text("".join(line for line in path.read_text().splitlines(True) if '"validation"' not in line))
    printed = " ".join(str(fp8bench.compare_streams(one, other)).split())
    assert "whether after learns as before does is open" in printed and "no loop told a held-out loss" in printed


def test_what_is_no_stream_is_refused(tmp_path: Path) -> None:
    """Each in a sentence; a last line that was cut off is left out."""
    good = loop(tmp_path / "good.jsonl", 0, name="good", steps=12)
    text, empty = tmp_path / "text.jsonl", tmp_path / "empty.jsonl"
    text.write_text("no stream\n")
    empty.write_text("")
    for wrong, words in (
        ((good,), "was given one stream"), ((good, text), "line 1 of .* none of a stream"),
        ((good, empty), "has no row of a step"), ((good, [good, good]), "1 and 2 seeds do not pair"),
        ((good, []), "a list of streams is empty"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=words):
            fp8bench.compare_streams(*wrong)
    with pytest.raises(RunNotFound, match="cannot be read"):
        fp8bench.compare_streams(good, tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match="margin is a percentage"):
        fp8bench.compare_streams(good, good, margin=100)
    cut = tmp_path / "cut.jsonl"
    cut.write_text(good.read_text()[:-20])
    assert json.loads(good.read_text().splitlines()[-1])
    assert "good" in str(fp8bench.compare_streams(good, cut))
