"""A training on boards: curves over its steps, one of each arm in each seed, and what every arm came to.

TensorBoard gets `<training>/<arm>/seed-<number>` and, for what is said of all seeds, `<training>/<arm>`. Weights &
Biases gets a run for each arm and seed and one for the training, all of one group. Readings of single tensors are left
out: there are millions. The training's report has maps of them, and its CSV every one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from fp8bench.analysis.learning.curves import Key
from fp8bench.analysis.learning.summary import figures_of, summaries_of
from fp8bench.analysis.learning.verdicts import Verdicts
from fp8bench.files import safe
from fp8bench.model.codec import encode
from fp8bench.model.training import (
    WATCHED_SECONDS,
    KeptTraining,
    Line,
    StepFigure,
    StepRow,
    TrainingEvent,
    Validation,
)
from fp8bench.report.data.boards import attach, begun_at, sending, told_of, write_scalars
from fp8bench.report.words.learning import of_arm

# What says which row it is; times of steps are a speed, which is shown as one.
_NO_FIGURES = ("arm", "seed", "step", "tokens", "seconds")
# Values by tag, at each step.
Curve = dict[int, dict[str, float]]


def series_of(kept: KeptTraining) -> dict[Key, Curve]:
    """Every arm in every seed, in the order of steps. What is not finite is left out: a board has no place for it."""
    native = {arm.name for arm in kept.training.arms if arm.native}
    found: dict[Key, Curve] = defaultdict(lambda: defaultdict(dict))
    for line in kept.lines:
        if line.arm:  # else it happened to no arm
            own = found[line.arm, line.seed]
            for tag, value in _figures(line, line.arm in native):
                before = own[line.step].get(tag, 0.0) if isinstance(line, TrainingEvent) else 0.0
                if math.isfinite(value):
                    own[line.step][tag] = before + value
    return {
        key: {step: own[step] for step in sorted(own) if own[step]} for key, own in found.items() if any(own.values())
    }


def _figures(line: Line, native: bool) -> Iterator[tuple[str, float]]:
    match line:
        case StepRow():
            for field in fields(line):
                if field.name not in _NO_FIGURES:
                    yield f"training/{field.name}", float(getattr(line, field.name))
            if native and line.seconds > 0:
                yield "training/tokens_per_second", line.tokens / line.seconds
        case Validation():
            yield f"validation/{line.of}", line.loss
        case StepFigure():
            if native or line.name != WATCHED_SECONDS:
                yield f"{line.name}/{line.layer}" if line.layer else f"training/{line.name}", line.value
        case TrainingEvent():
            yield f"events/{line.kind}", 1.0


def summed_up(kept: KeptTraining, found: Verdicts) -> dict[str, dict[str, float]]:
    """What every arm came to: gaps as shares with their intervals, losses, speed."""
    return {
        one.arm.name: {
            name: value for name, value in figures_of(one, found).items() if value is not None and math.isfinite(value)
        }
        for one in summaries_of(kept, found)
    }


def write_training(kept: KeptTraining, found: Verdicts, folder: Path) -> tuple[Path, ...]:
    """TensorBoard's files. Raises StoreError with a sentence where one cannot be written."""
    training = kept.training
    at, own = begun_at(training.started), folder / safe(training.id)
    files = [
        write_scalars(own / safe(arm) / f"seed-{seed}", training.id, at, curve.items())
        for (arm, seed), curve in series_of(kept).items()
    ]
    for arm, figures in summed_up(kept, found).items():
        if figures:
            values = {f"summary/{name}": value for name, value in figures.items()}
            files.append(write_scalars(own / safe(arm), training.id, at, [(training.request.steps, values)]))
    return tuple(files)


def send_training(kept: KeptTraining, found: Verdicts, project: str, files: Iterable[Path]) -> None:
    """Runs of wandb in one group. It may raise anything: it is another program's network."""
    training = kept.training
    arms = {arm.name: arm for arm in training.arms}
    shared: dict[str, Any] = {"project": project, "group": f"fp8bench {training.id}"}
    about = {**told_of(training.environment), "command": training.command, "training": training.id}
    about |= {"device": f"{training.device.key}: {training.device.name}", "text": training.text.identity}
    asked = {"request": encode(training.request), "parameters": training.parameters}
    for (name, seed), curve in series_of(kept).items():
        config = {**about, **asked, "arm": encode(arms[name]), "seed": seed}
        with sending(**shared, name=f"{name} seed {seed}", job_type="arm", config=config) as sent:
            for step, values in curve.items():
                sent.log(values, step=step)
    words = {one.arm.name: of_arm(one, found) for one in summaries_of(kept, found)}
    config = {**about, **asked, "verdicts": words}
    with sending(**shared, name=f"training {training.id}", job_type="verdict", config=config) as sent:
        figures = summed_up(kept, found)
        sent.log({f"{arm}/{name}": value for arm, own in figures.items() for name, value in own.items()})
        attach(sent, training.id, "fp8bench-training", files)
