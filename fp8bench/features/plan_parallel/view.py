"""How a training may be cut for many GPUs; for terminals and programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8bench import units
from fp8bench.features.plan_parallel.formulas import Checkpointing
from fp8bench.features.plan_parallel.ranking import (
    Asked,
    Planned,
    Ruling,
    Say,
    held,
    memory_band,
    outside,
    pace_band,
    published,
    worst_errors,
)
from fp8bench.model.codec import encode
from fp8bench.report.columns import Col, table
from fp8bench.report.data.plain import csv_text, json_line
from fp8bench.report.elements import Field, Page, Part, Table, Text, Tone

_LEGEND = (
    "memory and tokens/s: of a GPU, by formulas, with the band in which they describe published trainings",
    "waits: the share of a step in which products wait for TP, CP, FSDP or DDP; idle: a pipeline's ends",
    "tight: it fits unless memory is at the upper end of its band",
    "what a GPU has: DDP: the whole model, some of the sequences; FSDP: the same, its weights and moments shared out",
    "TP: a part of each product; PP: some layers, VP: in that many stretches; CP: a part of each sequence",
)
# Shorter steps are made of launches.
_SHORT = 0.02


def page_of(asked: Asked, plans: Sequence[Planned], rulings: Sequence[Ruling]) -> Page:
    load = asked.load
    title = (
        f"{asked.model.name} ({units.count(asked.model.weights)} weights) on {asked.gpus} "
        f"GPU{'' if asked.gpus == 1 else 's'} of {units.size(asked.topology.memory)}: {asked.batch} sequences of "
        f"{load.sequence} tokens a step, {load.precision}, checkpointing {load.checkpointing}"
    )
    parts = [Part("ranking", "", (*map(Text, _remarks(asked, plans)), _ranking(asked, plans))),
             Part("matrix", "each kind of division by itself", (_matrix(rulings),)),
             Part("errors", "", (Text(_errors()),))]  # fmt: skip
    return Page(title, "", tuple(parts), _LEGEND)


def _errors() -> str:
    """What the formulas are worth, with every answer."""
    rows = tuple(held(published()))
    worst = (f"{name} by {units.percent(error)}" for name, error in worst_errors(rows).items())
    return f"Of {len(rows)} figures of published trainings these formulas are off by at most: {', '.join(worst)}."


def _remarks(asked: Asked, plans: Sequence[Planned]) -> Iterator[str]:
    if not plans[0].fits:
        level = "" if asked.load.checkpointing is Checkpointing.FULL else ", or --checkpointing full"
        yield f"No way fits: more GPUs, a smaller batch, shorter sequences{level}."
    if plans[0].pace.step < _SHORT:
        yield (
            f"A step takes {units.seconds(plans[0].pace.step)} by these formulas, which know no launches: in steps "
            f"below {units.seconds(_SHORT)} those decide, and the paces here mean nothing."
        )

    if what := outside(asked.model, asked.gpus, asked.load.sequence):
        yield f"No published training is like this: {'; '.join(what)}. Bands are a guess here."


def _ranking(asked: Asked, plans: Sequence[Planned]) -> Table:
    def fits(one: Planned) -> Field:
        word = ("tight", Tone.DOUBT) if one.tight else ("yes", Tone.GOOD) if one.fits else ("no", Tone.BAD)
        return Field(word[0], tone=word[1])

    cols: list[Col[Planned]] = [
        Col("layout", lambda one: one.layout.words),
        Col("micro-batches", lambda one: str(one.load.micro_batches), number=True),
        Col("memory", lambda one: units.size(one.memory.total), number=True),
        Col("band", lambda one: f"±{units.percent(memory_band(one.layout), 0)}", number=True),
        Col("fits", fits),
        Col("tokens/s", lambda one: units.count(one.tokens), number=True),
        Col("band", lambda one: f"±{units.percent(pace_band(asked.model, one.layout), 0)}", number=True),
        Col("waits", lambda one: units.percent(one.pace.waits, 0), number=True),
        Col("idle", lambda one: units.percent(one.pace.idle, 0), number=True),
    ]
    return table("ranking", "", cols, plans)


def _matrix(rulings: Sequence[Ruling]) -> Table:
    cols: list[Col[Ruling]] = [
        Col("kind", lambda one: one.kind),
        Col("worth it", lambda one: one.say, tone=lambda one: Tone.GOOD if one.say is Say.YES else Tone.PLAIN),
        Col("why", lambda one: one.why, below=True),
    ]
    return table("matrix", "", cols, rulings)


_LAYOUT = ("copies", "shards", "tensor", "pipeline", "context", "virtual")
_MEMORY = ("states", "gathered", "kept", "block", "logits")
_PACE = ("products", "tensor", "context", "shards", "copies")


def as_json(asked: Asked, plans: Sequence[Planned], rulings: Sequence[Ruling]) -> str:
    ways = [_row(asked, one) for one in plans]
    matrix = [encode(one) for one in rulings]
    beyond = outside(asked.model, asked.gpus, asked.load.sequence)
    return json_line({"asked": encode(asked), "outside": beyond, "ways": ways, "matrix": matrix})


def as_csv(asked: Asked, plans: Sequence[Planned]) -> str:
    rows = [_row(asked, one) for one in plans]
    return csv_text(tuple(rows[0]), rows)


def _row(asked: Asked, one: Planned) -> dict[str, object]:
    return {
        **{name: getattr(one.layout, name) for name in _LAYOUT},
        "micro_batches": one.load.micro_batches, "fits": one.fits, "tight": one.tight, "memory_bytes": one.memory.total,
        **{f"{name}_bytes": getattr(one.memory, name) for name in _MEMORY},
        "tokens_per_second": one.tokens, "step_seconds": one.pace.step, "bubble": one.pace.bubble,
        **{f"{name}_seconds": getattr(one.pace, name) for name in _PACE},
        "memory_band": memory_band(one.layout), "pace_band": pace_band(asked.model, one.layout),
    }  # fmt: skip
