"""What looking for shares costs an operator, and how far they are from those of torch's profiler on the same step.

`python -m suites.shares` takes about half a minute: steps with and without the pass in turn, then the same step under
torch's profiler, whose self times are put into kinds by the same rules.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

# The most that an operator may take while it is looked at.
MOST_SECONDS = 30e-6
_STEPS = 9


def _step(kind: str) -> tuple[object, Callable[[], None]]:
    """A small model, and a training step of it: a stack of blocks with attention, or convolutions."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    if kind == "blocks":
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
        model: nn.Module = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        batch = torch.randn(4, 128, 256)
    else:
        parts = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(6)]
        model = nn.Sequential(nn.Conv2d(3, 16, 1), *parts)
        batch = torch.randn(8, 3, 32, 32)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def compared(kind: str) -> tuple[float, dict[str, tuple[float, float]], int]:
    """Seconds that looking adds to an operator, shares by kind here and by torch's profiler, and how many operators."""
    from fp8bench.model.step import ShareKind
    from fp8bench.profiler import recorded
    from fp8bench.tape.profiled import profiled
    from fp8bench.tape.timed_calls import OperatorTimes, shares_of

    model, step = _step(kind)
    mode = OperatorTimes([model], time.thread_time_ns)  # type: ignore[list-item]

    def look() -> list[object]:
        with mode.watching() as calls:
            step()
        return calls  # type: ignore[return-value]

    step(), look()
    plain, looked, steps, theirs = [], [], [], []
    for _ in range(_STEPS):
        begun = time.thread_time()
        step()
        plain.append(time.thread_time() - begun)
        begun = time.thread_time()
        steps.append(look())
        looked.append(time.thread_time() - begun)
        theirs.append(profiled(recorded(step, "cpu")).parts)
    ours = shares_of(steps, plain)  # type: ignore[arg-type]
    own = sum(part.seconds for part in ours.parts)
    found = {}
    for one in ShareKind:
        mine = sum(part.seconds for part in ours.parts if part.kind is one) / own
        other = statistics.median(
            sum(part.seconds for part in parts if part.kind is one) / sum(part.seconds for part in parts)
            for parts in theirs
        )
        if mine or other:
            found[one.value] = mine, other
    return (min(looked) - min(plain)) / len(steps[0]), found, len(steps[0])


def main() -> int:
    """0 where the cost is kept and no kind's share is further off than asked."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=float, default=0.05, help="how far a share may be from torch's profiler's")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    kept = True
    for kind in ("blocks", "convolutions"):
        cost, shares, operators = compared(kind)
        most = f"{MOST_SECONDS * 1e6:.0f}"
        sys.stdout.write(f"{kind}: {operators} operators, {cost * 1e6:.1f} us each for looking (at most {most})\n")
        for name, (mine, other) in shares.items():
            apart = f"apart {mine - other:+.1%}"
            sys.stdout.write(f"  {name:12} {mine:6.1%}   torch's profiler {other:6.1%}   {apart}\n")
        kept &= cost <= MOST_SECONDS and all(abs(mine - other) <= wanted.most for mine, other in shares.values())
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
