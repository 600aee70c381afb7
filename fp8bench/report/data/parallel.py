"""Ways to cut a training, and formulas beside published figures, for programs."""

from __future__ import annotations

from collections.abc import Sequence

from fp8bench.analysis.parallel.published import Held, outside
from fp8bench.analysis.parallel.ranking import Asked, Planned, Ruling, memory_band, pace_band
from fp8bench.model.codec import encode
from fp8bench.report.data.plain import csv_text, json_line

_LAYOUT = ("copies", "shards", "tensor", "pipeline", "context", "virtual")
_MEMORY = ("states", "gathered", "kept", "block", "logits")
_PACE = ("products", "tensor", "context", "shards", "copies")
_COLUMNS = (
    *_LAYOUT, "micro_batches", "fits", "tight", "memory_bytes", *(f"{name}_bytes" for name in _MEMORY),
    "tokens_per_second", "step_seconds", "bubble", *(f"{name}_seconds" for name in _PACE),
    "memory_band", "pace_band",
)  # fmt: skip


def as_json(asked: Asked, plans: Sequence[Planned], rulings: Sequence[Ruling]) -> str:
    """What was asked, every way with its bands, and the matrix."""
    ways = [_row(asked, one) for one in plans]
    matrix = [encode(one) for one in rulings]
    beyond = outside(asked.model, asked.gpus, asked.load.sequence)
    return json_line({"asked": encode(asked), "outside": beyond, "ways": ways, "matrix": matrix})


def as_csv(asked: Asked, plans: Sequence[Planned]) -> str:
    """A row a way."""
    return csv_text(_COLUMNS, [_row(asked, one) for one in plans])


def _row(asked: Asked, one: Planned) -> dict[str, object]:
    return {
        **{name: getattr(one.layout, name) for name in _LAYOUT},
        "micro_batches": one.load.micro_batches, "fits": one.fits, "tight": one.tight, "memory_bytes": one.memory.total,
        **{f"{name}_bytes": getattr(one.memory, name) for name in _MEMORY},
        "tokens_per_second": one.tokens, "step_seconds": one.pace.step, "bubble": one.pace.bubble,
        **{f"{name}_seconds": getattr(one.pace, name) for name in _PACE},
        "memory_band": memory_band(one.layout), "pace_band": pace_band(asked.model, one.layout),
    }  # fmt: skip


def held_as_json(rows: Sequence[Held]) -> str:
    """Every figure with its source."""
    return json_line({"rows": [_held(one) for one in rows]})


def held_as_csv(rows: Sequence[Held]) -> str:
    """A row a figure."""
    return csv_text(("name", "source", "figure", "published", "formula", "error", "band", "inside"), map(_held, rows))


def _held(one: Held) -> dict[str, object]:
    return {
        "name": one.row.name, "source": one.row.source, "figure": one.figure, "published": one.published,
        "formula": one.found, "error": one.error, "band": one.band, "inside": one.inside,
    }  # fmt: skip
