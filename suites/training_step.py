"""What a step of a training is made of: `python -m suites.training_step --rounds 15`.

Processor time of one thread, so that other work on the machine counts little; steps of the precisions take turns.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from fp8bench.features.train.lab.lab import Lab
from fp8bench.features.train.lab.optimizer import AdamW, Gradients
from fp8bench.features.train.lab.trainer import Trainer
from fp8bench.features.train.request import TrainerSettings
from fp8bench.features.train.texts import prepare_text
from fp8bench.features.train.values import Arm, SeedTask
from fp8bench.model.raw import Settings
from fp8bench.nn.moments import Bucket

STEPS = 5
# A part of a step by the method that does it. AdamW.step is the update and the norms of what it changed.
PARTS: tuple[tuple[str, type, Callable[..., Any]], ...] = (
    ("copies of what casts remember", Trainer, Trainer._remembered),
    ("forward and backward", Trainer, Trainer._losses),
    ("norm of gradients", Gradients, Gradients.norms),
    ("update and its norms", AdamW, AdamW.step),
    ("AdamW itself", Bucket, Bucket.update),
)


def timed(spent: dict[str, float], part: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    def outer(*arguments: Any) -> Any:
        began = time.thread_time()
        try:
            return inner(*arguments)
        finally:
            spent[part] += time.thread_time() - began

    return outer


def measured(lab: Lab, modes: Sequence[str], rounds: int) -> dict[str, list[dict[str, float]]]:
    """Milliseconds of a step by part, round by round, the first left out."""
    spent: dict[str, float] = defaultdict(float)
    for part, owner, method in PARTS:
        setattr(owner, method.__name__, timed(spent, part, method))
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    for _ in range(rounds + 1):
        for mode in modes:
            spent.clear()
            began = time.thread_time()
            lab.advance(mode, STEPS)
            spent["all"] = time.thread_time() - began
            found[mode].append({part: seconds / STEPS * 1e3 for part, seconds in spent.items()})
    return {mode: several[1:] for mode, several in found.items()}


def told(mode: str, rounds: Sequence[dict[str, float]]) -> str:
    low, middle, high = statistics.quantiles([one["all"] for one in rounds], n=4)
    parts = {part: statistics.median(one[part] for one in rounds) for part, _, _ in PARTS}
    rest = 1 - (parts["forward and backward"] + parts["AdamW itself"]) / middle
    lines = [f"{mode}: {middle:.1f} ms a step, quartiles {low:.1f} and {high:.1f}"]
    lines += [f"  {part}: {value:.2f} ms" for part, value in parts.items()]
    return "\n".join([*lines, f"  neither forward, backward nor AdamW: {rest:.1%}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtypes", default="bf16,fp8,fp8-delayed")
    given = parser.parse_args()
    modes = given.dtypes.split(",")
    with TemporaryDirectory() as folder:
        lab = Lab(Settings())
        facts = lab.probe()[0]
        text = prepare_text(None, None, "bytes", Path(folder), 96)
        arms = tuple(Arm(mode, mode) for mode in modes)
        endless = 1 << 30
        lab.begin(SeedTask(0, arms, TrainerSettings(), endless, endless, text, facts))
        lab.advance(modes[0], 1)  # step 0 is watched
        rounds = measured(lab, modes, given.rounds)
    load = os.getloadavg()[0]
    lines = [f"nano, {given.rounds} rounds of {STEPS} steps, processor time of one thread; load {load:.1f}"]
    lines.append(f"{facts.name}, Python {platform.python_version()}, torch {torch.__version__}")
    sys.stdout.write("\n".join([*lines, *(told(*one) for one in rounds.items())]) + "\n")


if __name__ == "__main__":
    main()
