"""A training for programs: all of it as JSON, its figures as CSV."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from fp8bench.analysis.learning.verdicts import Verdicts
from fp8bench.model.codec import SCHEMA, encode
from fp8bench.model.training import KeptTraining, Line, TrainingEvent
from fp8bench.report.data.plain import csv_text, json_line
from fp8bench.report.words.learning import verdict

COLUMNS = ("arm", "precision", "role", "seed", "step", "line", "of", "layer", "tensor", "figure", "value")
# What says which line it is, and is no figure of it.
_PLACES = ("arm", "seed", "step", "layer", "role", "of", "name")


def as_json(kept: KeptTraining, found: Verdicts) -> str:
    """The document on one line: the training, every line, and what is said of each arm."""
    said = {one.arm.name: {**encode(one), "words": verdict(one, found)} for one in found.arms if not one.arm.skip}
    bands = {name: encode(getattr(found, name)) for name in ("seed_band", "repeat_band")}
    document = {
        "schema": SCHEMA, "training": encode(kept.training), "finished": kept.finished, "verdicts": said, **bands,
        "lines": [{"line": type(line).__name__, **encode(line)} for line in kept.lines],
        "troubles": list(kept.troubles),
    }  # fmt: skip
    return json_line(document)


def as_csv(kept: KeptTraining) -> str:
    """A row a figure; numbers with all their digits."""
    return csv_text(COLUMNS, _rows(kept))


def _rows(kept: KeptTraining) -> Iterator[dict[str, Any]]:
    arms = {arm.name: arm for arm in kept.training.arms}
    for line in kept.lines:
        arm = arms.get(line.arm)
        place = {
            "arm": line.arm, "precision": arm.precision if arm else "", "role": arm.role.value if arm else "",
            "seed": line.seed, "step": line.step, "line": type(line).__name__,
            "of": getattr(line, "of", ""), "layer": getattr(line, "layer", ""), "tensor": _tensor(line),
        }  # fmt: skip
        for figure, value in _figures(line):
            yield place | {"figure": figure, "value": value}


def _tensor(line: Line) -> str:
    return str(getattr(line, "role", "") or getattr(line, "tensor", ""))


def _figures(line: Line) -> Iterator[tuple[str, Any]]:
    if isinstance(line, TrainingEvent):
        yield line.kind, line.words
        return
    named = str(getattr(line, "name", ""))
    for field in fields(line):
        value = getattr(line, field.name)
        if field.name not in _PLACES and value is not None:
            yield (named or field.name), value
