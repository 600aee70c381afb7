"""A training for programs: as JSON, as CSV, as curves for TensorBoard and Weights & Biases, and as pandas frames.

TensorBoard gets `<training>/<arm>/seed-<number>`, and `<training>/<arm>` for figures over all seeds. Weights & Biases
gets a run for each arm and seed and one for the training, in one group. Readings of single tensors are left out, as
there may be millions: the report draws them by layer, and the CSV has all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8bench.analysis.energy import energy_samples
from fp8bench.features.train.values import (
    WATCHED_SECONDS,
    Arm,
    ArmCost,
    KeptTraining,
    LayerReading,
    StepFigure,
    StepRow,
    StreamLine,
    TrainingEvent,
    Validation,
)
from fp8bench.features.train.verdicts.curves import Key
from fp8bench.features.train.verdicts.summary import ArmSummary, JudgedTraining, figures_of
from fp8bench.features.train.verdicts.verdicts import TrainingVerdicts
from fp8bench.features.train.view import bands_of, notes_of
from fp8bench.features.train.words import of_arm, verdict
from fp8bench.files import safe
from fp8bench.model.codec import SCHEMA, encode
from fp8bench.model.specs import DEVICE_PEAK_MEMORY
from fp8bench.report.data.boards import attach, begun_at, sending, told_of, write_scalars
from fp8bench.report.data.plain import Rows, cell, frame

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("arm", "precision", "role", "seed", "step", "line", "of", "layer", "tensor", "figure", "value")
# Fields that identify a line and are not figures.
_PLACES = ("arm", "seed", "step", "layer", "role", "of", "name")
_NAMES: Mapping[type, tuple[str, ...]] = {
    kind: tuple(field.name for field in fields(kind) if field.name not in _PLACES)
    for kind in (StepRow, LayerReading, StepFigure, Validation)
}


def value_of(judged: JudgedTraining) -> dict[str, Any]:
    kept, verdicts = judged.kept, judged.verdicts
    trained = [arm for arm in verdicts.arms if not arm.arm.skip]
    arms = {summary.arm.name: encode(row_of(summary, verdicts)) for summary in judged.summaries}
    return {
        "schema": SCHEMA, "training": encode(kept.training), "finished": kept.finished, "arms": arms,
        "verdicts": {arm.arm.name: {**encode(arm), "words": verdict(arm, verdicts)} for arm in trained},
        "scores": encode(judged.scores), "repeat_band": encode(verdicts.repeat_band),
        "bands": list(bands_of(verdicts)),
        "notes": list(notes_of(judged)),
        "lines": [{"line": type(line).__name__, **encode(line)} for line in kept.lines],
        "troubles": list(kept.troubles),
    }  # fmt: skip


def row_of(summary: ArmSummary, verdicts: TrainingVerdicts) -> dict[str, Any]:
    """The figures of an arm as in the table, by name; None for what is unknown."""
    learned = summary.verdict.judged.learned.value if summary.verdict and not summary.arm.skip else None
    return {**figures_of(summary, verdicts), "verdict": learned, "words": of_arm(summary, verdicts)}


def rows_of(judged: JudgedTraining) -> Rows:
    """A row for each figure of an arm, then one for each figure of every line; numbers have all their digits."""
    return COLUMNS, chain(_summaries(judged), _rows(judged.kept))


def _summaries(judged: JudgedTraining) -> Iterator[dict[str, Any]]:
    for summary in judged.summaries:
        for figure, value in row_of(summary, judged.verdicts).items():
            if value is not None:
                yield {**_arm(summary.arm), "line": "Summary", "figure": figure, "value": value}
    for kind, sentences in (("band", bands_of(judged.verdicts)), ("note", notes_of(judged))):
        yield from ({"line": "Summary", "figure": kind, "value": sentence} for sentence in sentences)


def _rows(kept: KeptTraining) -> Iterator[tuple[Any, ...]]:
    arms = {arm.name: tuple(map(cell, _arm(arm).values())) for arm in kept.training.arms}
    for line in kept.lines:
        of, layer, role, tensor = (getattr(line, name, "") for name in ("of", "layer", "role", "tensor"))
        where = map(cell, (of, layer, str(role or tensor)))
        own = arms.get(line.arm, (cell(line.arm), "", ""))
        place = (*own, line.seed, line.step, type(line).__name__, *where)
        for figure, value in _figures(line):
            yield (*place, figure, value)


def _arm(arm: Arm) -> dict[str, Any]:
    return {"arm": arm.name, "precision": arm.precision, "role": arm.role.value}


def _figures(line: StreamLine) -> Iterator[tuple[str, Any]]:
    if isinstance(line, TrainingEvent):
        yield line.kind, cell(line.words)
        return
    if isinstance(line, ArmCost):
        yield from costs_of(line)
        return
    named = cell(getattr(line, "name", ""))
    for name in _NAMES[type(line)]:
        value = getattr(line, name)
        if value is not None:
            yield named or name, value


def costs_of(cost: ArmCost) -> Iterator[tuple[str, Any]]:
    for name, size in cost.kept:
        yield f"kept {name}", size
    if cost.memory is not None:
        yield "peak_memory", cost.memory.peak
        if cost.memory.on_device is not None:
            yield DEVICE_PEAK_MEMORY, cost.memory.on_device
        if cost.memory.off_device:
            yield f"{DEVICE_PEAK_MEMORY} why", cell(cost.memory.off_device)
        for name, size in cost.memory.roles:
            yield f"peak_memory {name}", size
    if cost.energy is not None:
        yield from (("joules_per_step", joules) for joules in energy_samples(cost.energy))
        yield "energy_source", cost.energy.source
        if cost.energy.why:
            yield "energy why", cost.energy.why
    if cost.why:
        yield "why", cell(cost.why)


# Fields that identify a row; the time of a step is shown as a speed instead.
_NO_FIGURES = ("arm", "seed", "step", "tokens", "seconds")
# Values by tag, at each step.
Curve = dict[int, dict[str, float]]


def series_of(kept: KeptTraining) -> dict[Key, Curve]:
    """Curves of every arm in every seed, by step. Values that are not finite are left out."""
    native = {arm.name for arm in kept.training.arms if arm.native}
    unordered: dict[Key, Curve] = defaultdict(lambda: defaultdict(dict))
    for line in kept.lines:
        if line.arm:  # else it happened to no arm
            own = unordered[line.arm, line.seed]
            for tag, value in _scalars(line, line.arm in native):
                before = own[line.step].get(tag, 0.0) if isinstance(line, TrainingEvent) else 0.0
                if math.isfinite(value):
                    own[line.step][tag] = before + value
    curves = {key: {step: own[step] for step in sorted(own) if own[step]} for key, own in unordered.items()}
    return {key: curve for key, curve in curves.items() if curve}


def _scalars(line: StreamLine, native: bool) -> Iterator[tuple[str, float]]:
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
        case LayerReading():
            yield f"amax/{line.layer}/{line.role}", line.amax
            yield f"scale/{line.layer}/{line.role}", line.scale
        case TrainingEvent():
            yield f"events/{line.kind}", 1.0


def summed_up(judged: JudgedTraining) -> dict[str, dict[str, float]]:
    figures = {summary.arm.name: figures_of(summary, judged.verdicts) for summary in judged.summaries}
    return {
        arm: {name: value for name, value in own.items() if value is not None and math.isfinite(value)}
        for arm, own in figures.items()
    }


def write_training(judged: JudgedTraining, folder: Path) -> tuple[Path, ...]:
    training = judged.training
    at, own = begun_at(training.started), folder / safe(training.id)
    files = [
        write_scalars(own / safe(arm) / f"seed-{seed}", training.id, at, curve.items())
        for (arm, seed), curve in series_of(judged.kept).items()
    ]
    for arm, figures in summed_up(judged).items():
        if figures:
            values = {f"summary/{name}": value for name, value in figures.items()}
            files.append(write_scalars(own / safe(arm), training.id, at, [(training.request.steps, values)]))
    return tuple(files)


def send_training(judged: JudgedTraining, project: str, files: Iterable[Path]) -> None:
    """Send runs to wandb, in one group. It may raise anything, since another program's network is involved."""
    training = judged.training
    arms = {arm.name: arm for arm in training.arms}
    shared: dict[str, Any] = {"project": project, "group": f"fp8bench {training.id}"}
    config_of_all = {**told_of(training.environment), "command": training.command, "training": training.id}
    config_of_all |= {"device": f"{training.device.key}: {training.device.name}", "text": training.text.identity}
    request_config = {"request": encode(training.request), "parameters": training.parameters}
    for (name, seed), curve in series_of(judged.kept).items():
        config = {**config_of_all, **request_config, "arm": encode(arms[name]), "seed": seed}
        with sending(**shared, name=f"{name} seed {seed}", job_type="arm", config=config) as sent:
            for step, values in curve.items():
                sent.log(values, step=step)
    words = {summary.arm.name: of_arm(summary, judged.verdicts) for summary in judged.summaries}
    config = {**config_of_all, **request_config, "verdicts": words}
    with sending(**shared, name=f"training {training.id}", job_type="verdict", config=config) as sent:
        figures = summed_up(judged)
        sent.log({f"{arm}/{name}": value for arm, own in figures.items() for name, value in own.items()})
        attach(sent, training.id, "fp8bench-training", files)


# Columns with repeated words: as categories they take a byte or two a row, as text fifty.
_REPEATED = ("arm", "layer", "role", "of", "name", "kind", "tensor")


def _frame(kind: type[StreamLine], words: str, *more: str) -> cached_property[pd.DataFrame]:
    """A frame of the lines of a kind: their fields, and `more` that is computed from them."""

    def made(frames: TrainingFrames) -> pd.DataFrame:
        import pandas as pd

        lines, names = frames.training.of(kind), [*(field.name for field in fields(kind)), *more]
        columns = {name: [getattr(line, name) for line in lines] for name in names}
        return pd.DataFrame(columns).astype({name: "category" for name in _REPEATED if name in columns})

    made.__doc__ = words
    return cached_property(made)


@dataclass(frozen=True)
class TrainingFrames:
    """A training and its lines as pandas frames, one for each kind of line, made on first access; docs/outputs.md has
    their columns."""

    training: KeptTraining

    @frame
    def arms(self) -> Rows:
        """A row for each arm."""
        judged, request = JudgedTraining(self.training), self.training.training.request
        shared = {"ranks": request.ranks or 1, "parallel": request.settings.parallel}
        rows = []
        for own in judged.summaries:
            wire = own.arm.taken(request.settings).wire
            rows.append({**_arm(own.arm), **shared, "wire": wire, **row_of(own, judged.verdicts)})
        return list(dict.fromkeys(chain(*rows))), rows

    steps = _frame(StepRow, "A row for each step of an arm in a seed.")
    readings = _frame(LayerReading, "A row for each tensor of a layer in a watched step.")
    figures = _frame(StepFigure, "A row for each further figure of a watched step.")
    events = _frame(TrainingEvent, "A row for each event.")
    validations = _frame(
        Validation, "A row for each validation, with perplexities.", "perplexity", "perplexity_by_byte"
    )

    @frame
    def costs(self) -> Rows:
        """What each arm takes alone, a row for each figure: bytes, joules of a step, batches and reasons."""
        figures = ((cost.arm, *figure) for cost in self.training.of(ArmCost) for figure in costs_of(cost))
        return ("arm", "figure", "value"), figures
