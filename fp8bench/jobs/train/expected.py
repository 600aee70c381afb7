"""How long a training would take, by the steps of trainings of the same model that are kept."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from fp8bench.errors import StoreError
from fp8bench.jobs.train.arms import arms_of_seed
from fp8bench.model import DeviceFacts
from fp8bench.model.training import Arm, StepRow, TrainingRequest
from fp8bench.store.trainings import load_head, load_training, training_files

_LOOKED_AT = 20
# What makes a step as long as it is, beside the precision.
_SAME = ("model", "arch", "batch", "sequence", "micro_batches", "checkpointing", "compile", "parallel")


def expected_seconds(
    request: TrainingRequest, arms: Sequence[Arm], device: DeviceFacts, store: Path
) -> tuple[float, list[str]]:
    """The seconds of all steps of arms whose precision was trained here before, and the names of the others."""
    known = _known(request, device, store)
    seconds, unknown = 0.0, []
    for number in range(request.seeds):
        for arm in arms_of_seed(arms, number):
            if arm.precision in known:
                seconds += request.steps * known[arm.precision]
            elif arm.name not in unknown:
                unknown.append(arm.name)
    return seconds, unknown


def _known(request: TrainingRequest, device: DeviceFacts, store: Path) -> dict[str, float]:
    """The median step by precision, of the newest trainings of this model on this device that have it."""
    known: dict[str, float] = {}
    for path in training_files(store)[:_LOOKED_AT]:
        with contextlib.suppress(StoreError):
            head = load_head(path)
            asked = request.threads, request.ranks
            if (head.device.name, head.request.threads, head.request.ranks) != (device.name, *asked) or any(
                getattr(head.request.settings, name) != getattr(request.settings, name) for name in _SAME
            ):
                continue
            modes = {arm.name: arm.precision for arm in head.arms}
            seconds: dict[str, list[float]] = {}
            for row in load_training(path).of(StepRow):
                if row.seconds > 0 and modes.get(row.arm, "") not in known:
                    seconds.setdefault(modes[row.arm], []).append(row.seconds)
            known |= {mode: median(times) for mode, times in seconds.items()}
    return known
