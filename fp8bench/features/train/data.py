"""Converts a training to JSON, to CSV, and to scalars for boards.

A board gets one series for each figure of an arm in a seed, and one for each figure of an arm over all seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from fp8bench.features.train.frame import LongTableRow, list_rows
from fp8bench.features.train.values import StreamLine, Training
from fp8bench.features.train.verdicts.summary import ArmSummary, JudgedTraining, list_figures
from fp8bench.features.train.verdicts.verdicts import TrainingVerdicts
from fp8bench.features.train.view import list_training_notes
from fp8bench.features.train.words import describe_arm, describe_chance, describe_verdict
from fp8bench.model.codec import SCHEMA, encode
from fp8bench.model.file_names import make_safe_file_name
from fp8bench.report.data.loggers import LoggedScalar, LogSource, seconds_since_1970, select_logged_facts
from fp8bench.report.data.plain import PlainRows

CSV_COLUMNS = ("arm", "precision", "role", "seed", "step", "line", "of", "layer", "tensor", "figure", "value")


def training_to_json(judged: JudgedTraining) -> dict[str, Any]:
    stored_training = judged.stored
    verdicts = judged.verdicts
    # An arm that is not trained has a reason instead of a verdict.
    trained_arms = [arm for arm in verdicts.arms if not arm.arm.skip]
    arms = {summary.arm.name: encode(list_arm_figures(summary, verdicts)) for summary in judged.summaries}
    return {
        "schema": SCHEMA,
        "training": encode(stored_training.training),
        "finished": stored_training.finished,
        "arms": arms,
        "verdicts": {arm.arm.name: {**encode(arm), "words": describe_verdict(arm, verdicts)} for arm in trained_arms},
        "scores": encode(judged.scores),
        "repeat_band": encode(verdicts.repeat_band),
        "bands": list(describe_chance(verdicts)),
        "notes": list(list_training_notes(judged)),
        "lines": [{"line": type(line).__name__, **encode(line)} for line in stored_training.lines],
        "troubles": list(stored_training.troubles),
    }


def list_arm_figures(summary: ArmSummary, verdicts: TrainingVerdicts) -> dict[str, Any]:
    """Returns the figures of an arm by name, as the table shows them. An unknown figure is None."""
    judged_arm = summary.verdict.judged if summary.verdict and not summary.arm.skip else None
    learning_verdict, matters = (judged_arm.learned.value, judged_arm.matters) if judged_arm else (None, None)
    facts = {
        "verdict": learning_verdict,
        "matters": matters and matters.value,
        "words": describe_arm(summary, verdicts),
    }
    return {**list_figures(summary, verdicts), **facts}


def list_csv_rows(judged: JudgedTraining) -> PlainRows:
    """Returns the CSV's columns and rows in full precision. The figures of each arm over all seeds come first, then
    those of each line of the stream.
    """
    return CSV_COLUMNS, _yield_csv_rows(judged)


def _yield_csv_rows(judged: JudgedTraining) -> Iterator[dict[str, Any] | tuple[Any, ...]]:
    arms = {
        arm.name: {"arm": arm.name, "precision": arm.precision, "role": arm.role.value} for arm in judged.training.arms
    }
    for summary in judged.summaries:
        for figure, value in list_arm_figures(summary, judged.verdicts).items():
            if value is not None:
                yield {**arms[summary.arm.name], "line": "Summary", "figure": figure, "value": value}
    for kind, sentences in (("band", describe_chance(judged.verdicts)), ("note", list_training_notes(judged))):
        for sentence in sentences:
            yield {"line": "Summary", "figure": kind, "value": sentence}
    # Rows with speeds are left out, because they can be computed from seconds and tokens.
    for row in list_rows((), judged.stored.lines):
        arm = arms.get(row.arm, {"arm": row.arm, "precision": "", "role": ""})
        yield (*arm.values(), *row[1:])


def make_log_source(training: Training) -> LogSource:
    name = make_safe_file_name(training.id)
    if training.is_watched:
        return LogSource(training.id, f"loop {training.id}", seconds_since_1970(training.started), {}, folder=name)
    config = {
        **select_logged_facts(training.environment),
        "command": training.command,
        "request": encode(training.request),
        "parameters": training.parameters,
        "device": f"{training.device.key}: {training.device.name}",
        "text": training.text.identity,
    }
    return LogSource(training.id, f"training {training.id}", seconds_since_1970(training.started), config, folder=name)


def list_scalars(training: Training, lines: Iterable[StreamLine]) -> Iterator[LoggedScalar]:
    """Yields the curves of every arm in every seed. Among them are the largest magnitudes and the scales of layers'
    tensors.
    """
    for row in list_rows(training.arms, lines):
        tag = _find_curve_name(row)
        if tag and row.arm:  # a figure without an arm has no curve
            value = 1.0 if row.line == "TrainingEvent" else float(row.value)
            yield LoggedScalar(f"{make_safe_file_name(row.arm)} seed {row.seed}/{tag}", row.step, value)


def _find_curve_name(row: LongTableRow) -> str:
    """Returns the name of a figure's curve in TensorBoard or wandb; '' if the figure has no curve."""
    match row.line, row.figure:
        case "StepRow", "tokens" | "seconds":
            return ""  # their ratio, the throughput, has a curve
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


def list_summary_scalars(judged: JudgedTraining) -> Iterator[LoggedScalar]:
    for summary in judged.summaries:
        for figure, value in list_figures(summary, judged.verdicts).items():
            if value is not None:
                yield LoggedScalar(
                    f"{make_safe_file_name(summary.arm.name)}/summary/{figure}", judged.request.steps, value
                )
