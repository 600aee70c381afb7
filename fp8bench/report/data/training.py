"""A training for programs: all of it as JSON, its figures as CSV, and what every arm came to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from fp8bench.analysis.energy import energy_samples
from fp8bench.analysis.learning.summary import ArmSummary, figures_of, summaries_of
from fp8bench.analysis.learning.verdicts import Verdicts
from fp8bench.analysis.metric import why_no_larger
from fp8bench.model.codec import SCHEMA, encode
from fp8bench.model.training import (
    Arm,
    ArmCost,
    KeptTraining,
    LayerReading,
    Line,
    StepFigure,
    StepRow,
    TrainingEvent,
    Validation,
)
from fp8bench.report.data.plain import cell, csv_text, json_line, more_csv
from fp8bench.report.terminal.training import bands_of, notes_of
from fp8bench.report.words.learning import of_arm, verdict

COLUMNS = ("arm", "precision", "role", "seed", "step", "line", "of", "layer", "tensor", "figure", "value")
# What says which line it is, and is no figure of it.
_PLACES = ("arm", "seed", "step", "layer", "role", "of", "name")
_NAMES: Mapping[type, tuple[str, ...]] = {
    kind: tuple(field.name for field in fields(kind) if field.name not in _PLACES)
    for kind in (StepRow, LayerReading, StepFigure, Validation)
}


def as_json(kept: KeptTraining, found: Verdicts) -> str:
    """The document on one line: the training, every line, and what is said of each arm."""
    said = {one.arm.name: {**encode(one), "words": verdict(one, found)} for one in found.arms if not one.arm.skip}
    bands = {name: encode(getattr(found, name)) for name in ("seed_band", "repeat_band")}
    arms = {one.arm.name: encode(row_of(one, found)) for one in summaries_of(kept, found)}
    document = {
        "schema": SCHEMA, "training": encode(kept.training), "finished": kept.finished, "arms": arms,
        "verdicts": said, **bands, "bands": list(bands_of(found)), "notes": list(notes_of(kept, found)),
        "lines": [{"line": type(line).__name__, **encode(line)} for line in kept.lines],
        "troubles": list(kept.troubles),
    }  # fmt: skip
    return json_line(document)


def row_of(summary: ArmSummary, found: Verdicts) -> dict[str, Any]:
    """What an arm came to, as the table says it, by names; None for what is not known."""
    said = summary.said
    verdict = said.judged.learned.value if said and not summary.arm.skip else None
    return {**figures_of(summary, found), "verdict": verdict, "words": of_arm(summary, found)}


def as_csv(kept: KeptTraining, found: Verdicts) -> str:
    """What every arm came to, a row a figure, and then a row a figure of every line; numbers with all their digits."""
    return csv_text(COLUMNS, _summaries(kept, found)) + more_csv(_rows(kept))


def _summaries(kept: KeptTraining, found: Verdicts) -> Iterator[dict[str, Any]]:
    for summary in summaries_of(kept, found):
        for figure, value in row_of(summary, found).items():
            if value is not None:
                yield {**_arm(summary.arm), "line": "Summary", "figure": figure, "value": value}
    for kind, sentences in (("band", bands_of(found)), ("note", notes_of(kept, found))):
        yield from ({"line": "Summary", "figure": kind, "value": sentence} for sentence in sentences)


def _rows(kept: KeptTraining) -> Iterator[tuple[Any, ...]]:
    """A row a figure of every line, in the order of the columns."""
    arms = {arm.name: tuple(map(cell, _arm(arm).values())) for arm in kept.training.arms}
    for line in kept.lines:
        where = (getattr(line, "of", ""), getattr(line, "layer", ""), _tensor(line))
        place = (
            *arms.get(line.arm, (cell(line.arm), "", "")), line.seed, line.step, type(line).__name__,
            *map(cell, where),
        )  # fmt: skip
        for figure, value in _figures(line):
            yield (*place, figure, value)


def _arm(arm: Arm) -> dict[str, Any]:
    return {"arm": arm.name, "precision": arm.precision, "role": arm.role.value}


def _tensor(line: Line) -> str:
    return str(getattr(line, "role", "") or getattr(line, "tensor", ""))


def _figures(line: Line) -> Iterator[tuple[str, Any]]:
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
    """Bytes, by what they are for; what is not there has its reason."""
    for name, size in cost.kept:
        yield f"kept {name}", size
    if cost.memory is not None:
        yield "peak_memory", cost.memory.peak
        for name, size in cost.memory.roles:
            yield f"peak_memory {name}", size
    if cost.energy is not None:
        yield from (("joules_per_step", joules) for joules in energy_samples(cost.energy))
        yield "energy_source", cost.energy.source
        if cost.energy.why:
            yield "energy why", cost.energy.why
    if cost.capacity is not None:
        yield "largest_batch", "" if cost.capacity.batch is None else cost.capacity.batch
        yield "largest_batch why_no_larger", why_no_larger(cost.capacity)
    if cost.why:
        yield "why", cell(cost.why)
