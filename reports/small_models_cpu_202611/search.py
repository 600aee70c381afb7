"""Looks for a model that trains in seconds and in which recipes differ: python search.py [STEPS] [SEEDS]."""

from __future__ import annotations

import functools
import math
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8bench
from fp8bench.features.train.values import StepRow

DTYPES = ("bf16", "fp8", "mxfp8", "nvfp4")
TEXT = b"".join(path.read_bytes() for path in sorted(Path(fp8bench.__file__).parent.glob("analysis/*.py")))


class Block(nn.Module):
    """Attention and two products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, tokens, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        result: Tensor = x + self.down(F.gelu(self.up(self.second(x))))
        return result


class Decoder(nn.Module):
    """`outlier` multiplies two channels of the input of every product, as in large models."""

    def __init__(self, width: int, layers: int, outlier: float) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(256, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256)
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, nn.RMSNorm):
                    module.weight[:2] *= outlier

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.table(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def draw(number: int, seed: int) -> tuple[Tensor, Tensor]:
    data = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()
    starts = torch.randint(len(data) - 65, (8,), generator=torch.Generator().manual_seed(1_000_003 * seed + number))
    text = torch.stack([data[start : start + 65] for start in starts])
    return text[:, :-1], text[:, 1:]


def make(width: int, layers: int, outlier: float, rate: float) -> dict[str, Any]:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=rate)

    return {"model": Decoder(width, layers, outlier), "batches": draw, "optimizer": optimizer}


def main(steps: int = 300, seeds: int = 2) -> None:
    torch.set_num_threads(1)
    for width, layers, outlier, rate in (
        (64, 2, 1.0, 2e-3),
        (64, 2, 30.0, 2e-3),
        (64, 2, 300.0, 2e-3),
        (32, 4, 30.0, 4e-3),
    ):
        maker = functools.partial(make, width, layers, outlier, rate)
        maker.__module__, maker.__qualname__ = "__main__", "make"  # type: ignore[attr-defined]
        done = fp8bench.train(
            make=maker,
            dtypes=DTYPES,
            steps=steps,
            seeds=seeds,
            bands=("none",),
            stride=1000,
            keep=10_000,
            progress=False,
        )
        losses: dict[tuple[str, int], list[float]] = {}
        for row in done.of(StepRow):
            losses.setdefault((row.arm, row.seed), []).append(row.loss)
        third = steps // 3
        means = {key: fmean(values[-third:]) for key, values in losses.items()}
        gaps = {}
        for dtype in DTYPES[1:]:
            gaps[dtype] = [100 * (means[dtype, seed] / means["bf16", seed] - 1) for seed in range(seeds)]
        words = ", ".join(f"{dtype} {' '.join(f'{gap:+.2f}%' for gap in values)}" for dtype, values in gaps.items())
        loss = fmean(value for (dtype, _), value in means.items() if dtype == "bf16")
        model = f"width {width}, {layers} blocks, outliers x{outlier:g}, rate {rate:g}"
        sys.stdout.write(f"{model}: {words}; bf16 ends at {loss:.3f} of {math.log(256):.3f}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
