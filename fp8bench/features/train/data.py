"""A training for programs: as JSON, as CSV, and as scalars for boards.

A board has a series for each arm and seed, and one for each arm with its figures over all seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import chain
from typing import Any

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
    Training,
    TrainingEvent,
    Validation,
)
from fp8bench.features.train.verdicts.summary import ArmSummary, JudgedTraining, figures_of
from fp8bench.features.train.verdicts.verdicts import TrainingVerdicts
from fp8bench.features.train.view import bands_of, notes_of
from fp8bench.features.train.words import of_arm, verdict
from fp8bench.model.codec import SCHEMA, encode
from fp8bench.model.file_names import safe
from fp8bench.model.specs import DEVICE_PEAK_MEMORY
from fp8bench.report.data.loggers import LoggedScalar, LogSource, begun_at, config_of
from fp8bench.report.data.plain import Rows

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
        "schema": SCHEMA,
        "training": encode(kept.training),
        "finished": kept.finished,
        "arms": arms,
        "verdicts": {arm.arm.name: {**encode(arm), "words": verdict(arm, verdicts)} for arm in trained},
        "scores": encode(judged.scores),
        "repeat_band": encode(verdicts.repeat_band),
        "bands": list(bands_of(verdicts)),
        "notes": list(notes_of(judged)),
        "lines": [{"line": type(line).__name__, **encode(line)} for line in kept.lines],
        "troubles": list(kept.troubles),
    }


def row_of(summary: ArmSummary, verdicts: TrainingVerdicts) -> dict[str, Any]:
    """The figures of an arm as in the table, by name; None for what is unknown."""
    judged = summary.verdict.judged if summary.verdict and not summary.arm.skip else None
    learned, matters = (judged.learned.value, judged.matters) if judged else (None, None)
    facts = {"verdict": learned, "matters": matters and matters.value, "words": of_arm(summary, verdicts)}
    return {**figures_of(summary, verdicts), **facts}


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
    arms = {arm.name: tuple(_arm(arm).values()) for arm in kept.training.arms}
    for line in kept.lines:
        of, layer, role, tensor = (getattr(line, name, "") for name in ("of", "layer", "role", "tensor"))
        own = arms.get(line.arm, (line.arm, "", ""))
        place = (*own, line.seed, line.step, type(line).__name__, of, layer, str(role or tensor))
        for figure, value in _figures(line):
            yield (*place, figure, value)


def _arm(arm: Arm) -> dict[str, Any]:
    return {"arm": arm.name, "precision": arm.precision, "role": arm.role.value}


def _figures(line: StreamLine) -> Iterator[tuple[str, Any]]:
    if isinstance(line, TrainingEvent):
        yield line.kind, line.words
        return
    if isinstance(line, ArmCost):
        yield from costs_of(line)
        return
    named = getattr(line, "name", "")
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
            yield f"{DEVICE_PEAK_MEMORY} why", cost.memory.off_device
        for name, size in cost.memory.roles:
            yield f"peak_memory {name}", size
    if cost.energy is not None:
        yield from (("joules_per_step", joules) for joules in energy_samples(cost.energy))
        yield "energy_source", cost.energy.source
        if cost.energy.why:
            yield "energy why", cost.energy.why
    if cost.why:
        yield "why", cost.why


# Fields that identify a row; the time of a step is shown as a speed instead.
_NO_FIGURES = ("arm", "seed", "step", "tokens", "seconds")


def source_of(training: Training) -> LogSource:
    config = {
        **config_of(training.environment),
        "command": training.command,
        "request": encode(training.request),
        "parameters": training.parameters,
        "device": f"{training.device.key}: {training.device.name}",
        "text": training.text.identity,
    }
    name = safe(training.id)
    return LogSource(training.id, f"training {training.id}", begun_at(training.started), config, folder=name)


def scalars_of(training: Training, lines: Iterable[StreamLine]) -> Iterator[LoggedScalar]:
    """Yields curves of every arm in every seed. Readings of a layer's tensors are among them."""
    native = {arm.name for arm in training.arms if arm.native}
    for line in lines:
        if line.arm:  # else it happened to no arm
            series = f"{safe(line.arm)} seed {line.seed}"
            for tag, value in _scalars(line, line.arm in native):
                yield LoggedScalar(f"{series}/{tag}", line.step, value)


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


def summary_scalars(judged: JudgedTraining) -> Iterator[LoggedScalar]:
    for summary in judged.summaries:
        for figure, value in figures_of(summary, judged.verdicts).items():
            if value is not None:
                yield LoggedScalar(f"{safe(summary.arm.name)}/summary/{figure}", judged.training.request.steps, value)
