"""Trains the small model that `fp8bench infer` ships, on this Python's own sources, and writes its weights.

    python -m suites.inference_fixture fp8bench/features/infer/nano-python.bin

The file has all parameters in bf16, in the order of the model's own list. The text that quality is read on is left out.
"""

from __future__ import annotations

import math
import sys
import sysconfig
from pathlib import Path

import torch

from fp8bench.features.infer.job import HELD_OUT
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.gpt import GPT
from fp8bench.nn.sizes import NANO_PYTHON
from fp8bench.protocols import SilentPhases

STEPS, BATCH, RATE, WARM = 1000, 8, 4e-3, 60


def tokens_of(folder: Path) -> torch.Tensor:
    """Reads all sources of the standard library but those held out, in ASCII codes."""
    paths = [path for path in sorted(folder.glob("*.py")) if path.name not in HELD_OUT]
    text = "".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)
    return torch.tensor(list(text.encode("ascii", errors="replace")), dtype=torch.int64)


def trained(tokens: torch.Tensor) -> GPT:
    torch.manual_seed(0)
    plain = PlainArithmetic(torch.float32)
    model = GPT(NANO_PYTHON, lambda name: plain, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    length = NANO_PYTHON.sequence
    for step in range(STEPS):
        share = min(1.0, (step + 1) / WARM) * (0.5 + 0.5 * math.cos(math.pi * step / STEPS))
        optimizer.param_groups[0]["lr"] = RATE * max(share, 0.02)
        starts = torch.randint(len(tokens) - length - 1, (BATCH,)).tolist()
        batch = torch.stack([tokens[start : start + length + 1] for start in starts])
        loss = model(batch[:, :-1], batch[:, 1:], SilentPhases())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def main() -> None:
    model = trained(tokens_of(Path(sysconfig.get_paths()["stdlib"])))
    weights = [parameter.detach().to(torch.bfloat16).view(torch.int16).flatten() for parameter in model.parameters()]
    Path(sys.argv[1]).write_bytes(torch.cat(weights).numpy().astype("<i2").tobytes())


if __name__ == "__main__":
    main()
