"""What looking for shares costs an operator, and how far they are from those of torch's profiler on the same step.

`python -m suites.shares` takes about half a minute: steps with and without the pass in turn, then the same step under
torch's profiler, whose self times are put into kinds by the same rules.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from fp8bench.model.step import Share, ShareKind
from fp8bench.profiler import recorded
from fp8bench.tape.profiled import profiled
from fp8bench.tape.timed_calls import OperatorTimes, shares_of
from suites.trials import options, say, seconds

# The most that an operator may take while it is looked at.
MOST_SECONDS = 30e-6
_STEPS = 9


def _blocks() -> tuple[nn.Module, torch.Tensor]:
    """A stack of blocks with attention."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(4, 128, 256)


def _convolutions() -> tuple[nn.Module, torch.Tensor]:
    parts = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(6)]
    return nn.Sequential(nn.Conv2d(3, 16, 1), *parts), torch.randn(8, 3, 32, 32)


def compared(made: Callable[[], tuple[nn.Module, torch.Tensor]]) -> tuple[float, dict[str, tuple[float, float]], int]:
    """Seconds that looking adds to an operator, shares by kind here and by torch's profiler, and how many operators."""
    torch.manual_seed(0)
    model, batch = made()
    optimizer = torch.optim.AdamW(model.parameters())
    mode = OperatorTimes([model], time.thread_time_ns)
    plain, looked, steps, theirs = [], [], [], []

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def look() -> None:
        with mode.watching() as calls:
            step()
        steps.append(calls)

    for _ in range(1 + _STEPS):
        plain.append(seconds(step))
        looked.append(seconds(look))
        theirs.append(profiled(recorded(step, "cpu")).parts)
    ours = shares_of(steps[1:], plain[1:]).parts
    shares = {kind.value: (_share(ours, kind), statistics.median(_share(parts, kind) for parts in theirs[1:]))
              for kind in ShareKind}  # fmt: skip
    cost = (min(looked[1:]) - min(plain[1:])) / len(steps[1])
    return cost, {name: both for name, both in shares.items() if any(both)}, len(steps[1])


def _share(parts: Sequence[Share], kind: ShareKind) -> float:
    return sum(part.seconds for part in parts if part.kind is kind) / sum(part.seconds for part in parts)


def main() -> int:
    """0 where the cost is kept and no kind's share is further off than asked."""
    most = options(__doc__, most=(0.05, "how far a share may be from that of torch's profiler")).most
    torch.set_num_threads(1)
    kept = True
    for name, made in (("blocks", _blocks), ("convolutions", _convolutions)):
        cost, shares, operators = compared(made)
        limit = f"at most {MOST_SECONDS * 1e6:.0f}"
        say(f"{name}: {operators} operators, {cost * 1e6:.1f} us each for looking ({limit})")
        for kind, (mine, other) in shares.items():
            say(f"  {kind:12} {mine:6.1%}   torch's profiler {other:6.1%}   apart {mine - other:+.1%}")
        kept &= cost <= MOST_SECONDS and all(abs(mine - other) <= most for mine, other in shares.values())
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
