"""Converts the lines of a training's stream to plain JSON and back. The kind of a line is its key."""

from __future__ import annotations

from typing import Any, cast

from fp8bench.features.train.values import (
    ArmCost,
    LayerReading,
    StepFigure,
    StepRow,
    StreamLine,
    TrainingEvent,
    Validation,
)
from fp8bench.model.codec import decode, encode
from fp8bench.store.kept_lines import LineContent

# Names of the kinds of lines in the stream.
LINE_TYPE_BY_KIND: dict[str, type] = {
    "step": StepRow,
    "reading": LayerReading,
    "figure": StepFigure,
    "validation": Validation,
    "event": TrainingEvent,
    "cost": ArmCost,
}
_NAME_BY_LINE_KIND = {kind: name for name, kind in LINE_TYPE_BY_KIND.items()}


def line_to_json(line: StreamLine) -> dict[str, Any]:
    return {_NAME_BY_LINE_KIND[type(line)]: encode(line)}


def is_stream_line_content(content: object) -> bool:
    return isinstance(content, dict) and len(content) == 1 and content.keys() <= LINE_TYPE_BY_KIND.keys()


def line_from_json(content: LineContent) -> StreamLine:
    ((name, value),) = content.items()
    return cast(StreamLine, decode(LINE_TYPE_BY_KIND[name], value))
