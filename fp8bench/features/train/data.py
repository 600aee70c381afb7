"""A training as JSON, as CSV, and as scalars for boards.

A board has a series for each arm and seed, and one for each arm with its figures over all seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from fp8bench.features.train.frame import Row, frame_of
from fp8bench.features.train.values import Arm, StreamLine, Training
from fp8bench.features.train.verdicts.summary import ArmSummary, JudgedTraining, figures_of
from fp8bench.features.train.verdicts.verdicts import TrainingVerdicts
from fp8bench.features.train.view import bands_of, notes_of
from fp8bench.features.train.words import describe_arm, verdict
from fp8bench.model.codec import SCHEMA, encode
from fp8bench.model.file_names import safe
from fp8bench.report.data.loggers import LoggedScalar, LogSource, begun_at, config_of
from fp8bench.report.data.plain import Rows

COLUMNS = ("arm", "precision", "role", "seed", "step", "line", "of", "layer", "tensor", "figure", "value")


def value_of(judged: JudgedTraining) -> dict[str, Any]:
    training, verdicts = judged.kept, judged.verdicts
    # An untrained arm has a reason instead of a verdict.
    trained = [arm for arm in verdicts.arms if not arm.arm.skip]
    arms = {summary.arm.name: encode(row_of(summary, verdicts)) for summary in judged.summaries}
    return {
        "schema": SCHEMA,
        "training": encode(training.training),
        "finished": training.finished,
        "arms": arms,
        "verdicts": {arm.arm.name: {**encode(arm), "words": verdict(arm, verdicts)} for arm in trained},
        "scores": encode(judged.scores),
        "repeat_band": encode(verdicts.repeat_band),
        "bands": list(bands_of(verdicts)),
        "notes": list(notes_of(judged)),
        "lines": [{"line": type(line).__name__, **encode(line)} for line in training.lines],
        "troubles": list(training.troubles),
    }


def row_of(summary: ArmSummary, verdicts: TrainingVerdicts) -> dict[str, Any]:
    """Returns the figures of an arm as in the table, by name; None for unknown ones."""
    judged = summary.verdict.judged if summary.verdict and not summary.arm.skip else None
    learned, matters = (judged.learned.value, judged.matters) if judged else (None, None)
    facts = {"verdict": learned, "matters": matters and matters.value, "words": describe_arm(summary, verdicts)}
    return {**figures_of(summary, verdicts), **facts}


def rows_of(judged: JudgedTraining) -> Rows:
    """Returns a row for each figure of an arm over all seeds, then the frame; with full precision."""
    return COLUMNS, _rows(judged)


def _rows(judged: JudgedTraining) -> Iterator[dict[str, Any] | tuple[Any, ...]]:
    arms = {arm.name: _describe(arm) for arm in judged.training.arms}
    for summary in judged.summaries:
        for figure, value in row_of(summary, judged.verdicts).items():
            if value is not None:
                yield {**arms[summary.arm.name], "line": "Summary", "figure": figure, "value": value}
    for kind, sentences in (("band", bands_of(judged.verdicts)), ("note", notes_of(judged))):
        for sentence in sentences:
            yield {"line": "Summary", "figure": kind, "value": sentence}
    for row in frame_of((), judged.kept.lines):  # without rates, which readers can compute from seconds and tokens
        arm = arms.get(row.arm, {"arm": row.arm, "precision": "", "role": ""})
        yield (*arm.values(), *row[1:])


def _describe(arm: Arm) -> dict[str, str]:
    return {"arm": arm.name, "precision": arm.precision, "role": arm.role.value}


def source_of(training: Training) -> LogSource:
    name = safe(training.id)
    if training.is_watched:
        return LogSource(training.id, f"loop {training.id}", begun_at(training.started), {}, folder=name)
    config = {
        **config_of(training.environment),
        "command": training.command,
        "request": encode(training.request),
        "parameters": training.parameters,
        "device": f"{training.device.key}: {training.device.name}",
        "text": training.text.identity,
    }
    return LogSource(training.id, f"training {training.id}", begun_at(training.started), config, folder=name)


def scalars_of(training: Training, lines: Iterable[StreamLine]) -> Iterator[LoggedScalar]:
    """Yields curves of every arm in every seed, including magnitudes and scales of layers' tensors."""
    for row in frame_of(training.arms, lines):
        tag = _tag_of(row)
        if tag and row.arm:  # otherwise it belongs to no arm
            value = 1.0 if row.line == "TrainingEvent" else float(row.value)
            yield LoggedScalar(f"{safe(row.arm)} seed {row.seed}/{tag}", row.step, value)


def _tag_of(row: Row) -> str:
    """Returns the name of a figure's curve on a board; '' if it has none."""
    match row.line, row.figure:
        case "StepRow", "tokens" | "seconds":
            return ""  # covered by the speed
        case "StepRow", figure:
            return f"training/{figure}"
        case "StepFigure", figure:
            return f"{figure}/{row.layer}" if row.layer else f"training/{figure}"
        case "Validation", "loss":
            return f"validation/{row.of}"
        case "LayerReading", "amax" | "scale":
            return f"{row.figure}/{row.layer}/{row.tensor}"
        case "TrainingEvent", kind:
            return f"events/{kind}"
    return ""


def summary_scalars(judged: JudgedTraining) -> Iterator[LoggedScalar]:
    for summary in judged.summaries:
        for figure, value in figures_of(summary, judged.verdicts).items():
            if value is not None:
                yield LoggedScalar(f"{safe(summary.arm.name)}/summary/{figure}", judged.request.steps, value)
