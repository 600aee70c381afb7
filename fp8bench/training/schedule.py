"""The rate of each step, by kind of parameter, and which parameters decay."""

from __future__ import annotations

import math

from fp8bench.model.training import TrainerSettings


def share_of_rate(settings: TrainerSettings, step: int, steps: int) -> float:
    """The share of the full rate in a step, which counts from 0: it rises in a line, then falls along a cosine."""
    rising = round(settings.warmup * steps)
    if step < rising:
        return (step + 1) / rising
    gone = (step - rising) / max(1, steps - 1 - rising)
    return settings.floor + (1 - settings.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, gone)))


def kind_of(name: str, dimensions: int) -> str:
    """What a parameter is, as `rates` names it: 'embedding', 'norm' (whatever has one dimension), 'head' or 'layer'."""
    first = name.partition(".")[0]
    if first in ("embedding", "positions", "head"):
        return "head" if first == "head" else "embedding"
    return "norm" if dimensions < 2 else "layer"


def decays(dimensions: int) -> bool:
    """Whether weight decay shrinks a parameter: matrices, and neither norms nor biases."""
    return dimensions > 1
