"""How a training may be cut for many GPUs, and formulas beside published trainings, as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8bench import units
from fp8bench.analysis.parallel.published import Held, outside
from fp8bench.analysis.parallel.ranking import Asked, Planned, Ruling, Say, memory_band, pace_band
from fp8bench.model.parallel import Checkpointing
from fp8bench.report.elements import Column, Field, Page, Part, Table, Text, Tone

_LEGEND = (
    "memory and tokens/s: of a GPU, by formulas, with the band in which they describe published trainings (--check)",
    "waits: the share of a step in which products wait for TP, CP, FSDP or DDP; idle: a pipeline's ends",
    "tight: it fits unless memory is at the upper end of its band",
    "what a GPU has: DDP: the whole model, some of the sequences; FSDP: the same, its weights and moments shared out",
    "TP: a part of each product; PP: some layers, VP: in that many stretches; CP: a part of each sequence",
)
# Shorter steps are made of launches.
_SHORT = 0.02
_FIGURES = {"memory": "GiB", "pace": "tokens/s", "flops": "TFLOP/s"}


def page_of(asked: Asked, plans: Sequence[Planned], rulings: Sequence[Ruling]) -> Page:
    """The best ways, and the matrix."""
    load = asked.load
    title = (
        f"{asked.model.name} ({units.count(asked.model.weights)} weights) on {asked.gpus} "
        f"GPU{'' if asked.gpus == 1 else 's'} of {units.size(asked.topology.memory)}: {asked.batch} sequences of "
        f"{load.sequence} tokens a step, {load.precision}, checkpointing {load.checkpointing}"
    )
    parts = [Part("ranking", "", (*map(Text, _remarks(asked, plans)), _ranking(asked, plans))),
             Part("matrix", "each kind of division by itself", (_matrix(rulings),))]  # fmt: skip
    return Page(title, "", tuple(parts), _LEGEND)


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
    columns = (
        Column("layout"), Column("micro-batches", number=True), Column("memory", number=True),
        Column("band", number=True), Column("fits"), Column("tokens/s", number=True), Column("band", number=True),
        Column("waits", number=True), Column("idle", number=True),
    )  # fmt: skip
    rows = []
    for one in plans:
        work = one.pace.work + one.pace.exposed
        waits = ((one.pace.tensor + one.pace.context) * (1 + one.pace.bubble) + one.pace.exposed) / work
        idle = (one.pace.work - one.pace.work / (1 + one.pace.bubble)) / work
        word = ("tight", Tone.DOUBT) if one.tight else ("yes", Tone.GOOD) if one.fits else ("no", Tone.BAD)
        rows.append((
            Field(one.layout.words), Field(str(one.load.micro_batches)), Field(units.size(one.memory.total)),
            Field(f"±{units.percent(memory_band(one.layout), 0)}"), Field(word[0], tone=word[1]),
            Field(units.count(one.tokens)), Field(f"±{units.percent(pace_band(asked.model, one.layout), 0)}"),
            Field(units.percent(waits, 0)), Field(units.percent(idle, 0)),
        ))  # fmt: skip
    return Table("ranking", "", columns, tuple(rows))


def _matrix(rulings: Sequence[Ruling]) -> Table:
    rows = tuple(
        (Field(one.kind), Field(one.say, tone=Tone.GOOD if one.say is Say.YES else Tone.PLAIN), Field(one.why))
        for one in rulings
    )
    return Table("matrix", "", (Column("kind"), Column("worth it"), Column("why", below=True)), rows)


def page_of_held(rows: Sequence[Held]) -> Page:
    """Every published figure beside the formula's."""
    columns = (
        Column("training"), Column("figure"), Column("published", number=True), Column("formula", number=True),
        Column("off", number=True), Column("band", number=True), Column("within"),
    )  # fmt: skip
    table = Table("held", "", columns, tuple(_held(one) for one in rows))
    out = sum(not one.inside for one in rows)
    words = f"{out} of {len(rows)} figures are out of their band." if out else "Every figure is within its band."
    legend = (
        "bands were set looking at these rows; '-': rates were chosen so that this figure comes out",
        "FLOPs: 6 a weight without the embedding, and the half of attention that is not masked",
    )
    sources = tuple(Text(one) for one in dict.fromkeys(row.row.source for row in rows))
    parts = (Part("held", "", (table,)), Part("sources", "sources", sources), Part("conclusion", "", (Text(words),)))
    return Page("formulas against published trainings", "", parts, legend)


def _held(one: Held) -> tuple[Field, ...]:
    digits = 0 if one.figure == "pace" else 1
    band = units.NONE if one.band is None else f"±{100 * one.band:g}%"
    word = ("yes", Tone.GOOD) if one.inside else ("no", Tone.BAD)
    return (
        Field(one.row.name), Field(f"{one.figure}, {_FIGURES[one.figure]}"), Field(f"{one.published:.{digits}f}"),
        Field(f"{one.found:.{digits}f}"), Field(f"{100 * one.error:+.1f}%"), Field(band),
        Field(word[0] if one.band is not None else units.NONE, tone=word[1]),
    )  # fmt: skip
