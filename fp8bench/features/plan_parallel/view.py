"""The page of `plan-parallel`: the layouts for one number of GPUs, or the best layouts for several; and the same as
values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial

from fp8bench import units
from fp8bench.features.plan_parallel.formulas import STATES, Checkpointing, memory_of
from fp8bench.features.plan_parallel.ranking import (
    HELD_OUT_WORDS,
    MEMORY_ERROR,
    UNCALIBRATED_WORDS,
    Answer,
    ParallelQuestion,
    Planned,
    Ruling,
    Say,
    memory_band,
    outside,
    pace_band,
    rulings,
)
from fp8bench.model.codec import encode
from fp8bench.nn.parallel.ways import ScaleTraffic, scale_traffic_of_cuts
from fp8bench.report.columns import Col, table
from fp8bench.report.data.plain import Rows
from fp8bench.report.elements import Field, Page, Part, Table, Text, Tone

_LEGEND = (
    "memory: of a GPU, by formulas; its band: how far off they are on the published trainings that they were fitted to",
    "tokens/s: of a GPU, by formulas; its band: the largest error on machines held out, '-' where none was",
    "waits: the share of a step in which products wait for TP, CP, FSDP or DDP; idle: a pipeline's ends",
    "tight: it fits unless memory is at the upper end of its band",
    "what a GPU has: DDP: the whole model, some of the sequences; FSDP: the same, its weights and moments shared out",
    "TP: a part of each product; PP: some layers, VP: in that many stretches; CP: a part of each sequence",
)
# Every answer states the accuracy of the formulas.
_ERRORS = (
    f"Pace, by leave-one-machine-out: {HELD_OUT_WORDS}. Without a training it was {UNCALIBRATED_WORDS}. Memory: "
    f"nothing was held out; on the 20 published figures that formulas were fitted to: off by {MEMORY_ERROR} at most."
)
# Seconds of a small message within a node: assumed, and printed as such.
_MESSAGE = 1e-5
# In shorter steps launch overhead dominates, which formulas leave out.
_SHORT = 0.02


def page_of(question: ParallelQuestion, plans: Sequence[Planned]) -> Page:
    load = question.load
    title = (
        f"{question.model.name} ({units.count(question.model.weights)} weights) on {question.gpus} "
        f"GPU{'' if question.gpus == 1 else 's'} of {units.size(question.topology.memory)}: {question.batch} sequences "
        f"of {load.sequence} tokens a step, {load.precision}, checkpointing {load.checkpointing}"
    )
    matrix = [Part("matrix", "each kind of division by itself", (_matrix(question),))] if question.gpus > 1 else []
    remarks = map(Text, _remarks(question, plans))
    plan_table = table("ranking", "", _WAYS, [(question, plan) for plan in plans])
    parts = [Part("ranking", "", (*remarks, plan_table)), *matrix, Part("errors", "", (Text(_ERRORS),))]
    return Page(title, "", tuple(parts), _LEGEND)


def _remarks(question: ParallelQuestion, plans: Sequence[Planned]) -> Iterator[str]:
    # Plans are sorted: if the first does not fit, none does.
    if not plans[0].fits:
        level = "" if question.load.checkpointing is Checkpointing.FULL else ", or --checkpointing full"
        yield f"No way fits: more GPUs, a smaller batch, shorter sequences{level}."
    if plans[0].pace.step < _SHORT:
        yield (
            f"A step takes {units.seconds(plans[0].pace.step)} by these formulas, which leave out launches: in steps "
            f"below {units.seconds(_SHORT)} those decide, and the paces here mean nothing."
        )
    yield from _remarks_of_rates(question)
    yield from _remarks_of_memory(question, plans[0])
    # State the size of what the formulas leave out.
    if count := _scale_traffic(question, plans[0]).messages:
        yield (
            f"Scales: with one for each whole tensor, a step of the first way waits for {count} messages of 4 bytes: "
            f"the largest magnitude over {plans[0].layout.tensor} GPUs before each cast of a tensor that TP cuts. "
            f"Paces leave that out: at {units.seconds(_MESSAGE)} each it is {units.seconds(count * _MESSAGE)} of "
            f"{units.seconds(plans[0].pace.step)}. Scales of rows and blocks need no messages."
        )
    # Bands come from published trainings, and only hold for similar ones.
    if beyond := outside(question.model, question.gpus, question.load.sequence):
        yield f"No published training is like this: {'; '.join(beyond)}. Bands are a guess here."


def _remarks_of_rates(question: ParallelQuestion) -> Iterator[str]:
    if question.by is None:
        yield (
            "No whole training has calibrated these rates: paces say which layout is faster, not how fast it is. By "
            f"ceilings of products they were {UNCALIBRATED_WORDS}. Give a measured training: --calibrate "
            "MODEL,LAYOUT,PACE."
        )
    else:
        yield (
            f"By {question.by.model.name} with {question.by.layout.words} at {question.by.pace:g} tokens/s of a GPU, "
            f"products reach {question.topology.bf16 / 1e12:.0f} TFLOP/s in bf16 and "
            f"{question.topology.fp8 / 1e12:.0f} in FP8."
        )


def _remarks_of_memory(question: ParallelQuestion, plan: Planned) -> Iterator[str]:
    if (states := question.load.kept_states) != STATES["fp32"]:
        wide = memory_of(question.model, plan.layout, replace(plan.load, states="fp32")).total
        yield (
            f"States take {states.total} bytes a weight instead of {STATES['fp32'].total}: the first way takes "
            f"{units.percent(1 - plan.memory.total / wide, 0)} less than with those in fp32 ({units.size(wide)}). "
            "FP8-LM reports 29%, 28% and 39% less for its GPT-7B, 13B and 175B on H100s, with --zero-1; these formulas "
            "give 32%, 36% and 43%, because they leave out 6 to 13 GiB that its trainings took besides."
        )
    if question.load.rlhf:
        memory = plan.memory
        models = ("actor", memory.states), ("critic", memory.critic), ("reference and reward", memory.frozen)
        sizes = ", ".join(f"{name} {units.size(size)}" for name, size in models)
        yield (
            f"RLHF: in the first way weights, gradients and moments take {sizes}; one model works at a time. tokens/s "
            "are of the actor's update alone, without rollouts and other models' passes. FP8-LM reports 62% less for "
            "states and 32% less for weights (LLaMA-7B); --states fp8-lm gives 62% and 50%, all copies in FP8. Only "
            "four small models were checked, by `fp8bench suite transformer --set models=rlhf`."
        )


def _scale_traffic(question: ParallelQuestion, plan: Planned) -> ScaleTraffic:
    """Returns a GPU's messages per step if TP cuts tensors that have a single scale; else none."""
    if plan.layout.tensor == 1 or plan.load.precision != "fp8" or question.recipe not in ("", "tensorwise"):
        return ScaleTraffic(0, 0.0)
    # Each stage waits only for its layers.
    blocks = -(-question.model.layers // plan.layout.pipeline)
    return scale_traffic_of_cuts(blocks * plan.load.micro_batches, plan.layout.tensor)


def _fits(line: Way) -> Field:
    _, plan = line
    word = ("tight", Tone.DOUBT) if plan.tight else ("yes", Tone.GOOD) if plan.fits else ("no", Tone.BAD)
    return Field(word[0], tone=word[1])


Way = tuple[ParallelQuestion, Planned]
_WAYS: tuple[Col[Way], ...] = (
    Col("layout", lambda row: row[1].layout.words),
    Col("micro-batches", lambda row: str(row[1].load.micro_batches), number=True),
    Col("memory", lambda row: units.size(row[1].memory.total), number=True),
    Col("band", lambda row: f"±{units.percent(memory_band(row[1].layout), 0)}", number=True),
    Col("fits", _fits),
    Col("tokens/s", lambda row: units.count(row[1].tokens), number=True),
    Col("band", lambda row: _band(*row), show=lambda band: f"±{units.percent(band, 0)}"),
    Col("waits", lambda row: units.percent(row[1].pace.waits, 0), number=True),
    Col("idle", lambda row: units.percent(row[1].pace.idle, 0), number=True),
)
_COUNTED: tuple[Col[Way], ...] = (
    Col("GPUs", lambda row: str(row[0].gpus), number=True),
    *_WAYS,
    Col("all together", lambda row: units.count(row[0].gpus * row[1].tokens), number=True),
    Col("checkpointing", lambda row: row[0].load.checkpointing),
)


def _band(question: ParallelQuestion, plan: Planned) -> float | None:
    return pace_band(question.by, question.model, plan.layout, plan.load, question.recipe)


def _matrix(question: ParallelQuestion) -> Table:
    cols: list[Col[Ruling]] = [
        Col("kind", lambda ruling: ruling.kind),
        Col(
            "worth it",
            lambda ruling: ruling.say,
            tone=lambda ruling: Tone.GOOD if ruling.say is Say.YES else Tone.PLAIN,
        ),
        Col("why", lambda ruling: ruling.why, below=True),
    ]
    return table("matrix", "", cols, rulings(question))


def page_of_counts(answers: Sequence[Answer]) -> Page:
    """Compares numbers of GPUs, each by its best layout, and lists worthwhile kinds of division."""
    asked = answers[0][0]
    title = (
        f"{asked.model.name} ({units.count(asked.model.weights)} weights) on GPUs of "
        f"{units.size(asked.topology.memory)}: sequences of {asked.load.sequence} tokens, {asked.load.precision}; "
        "tokens/s of one GPU, and of all together"
    )
    best = table("counts", "", _COUNTED, [(question, plans[0]) for question, plans in answers])
    cols: list[Col[Answer]] = [Col("GPUs", lambda answer: str(answer[0].gpus), number=True)]
    # The order of rulings is the same for all numbers of GPUs.
    for place, ruling in enumerate(rulings(asked)):
        cols.append(Col(ruling.kind, partial(_worth, place)))
    matrix = Part("matrix", "each kind of division by itself: is it worth it?", (table("matrix", "", cols, answers),))
    remarks = map(Text, _remarks_of_rates(asked))
    parts = (
        Part("counts", "the best way for each count", (*remarks, best)),
        matrix,
        Part("errors", "", (Text(_ERRORS),)),
    )
    return Page(title, "", parts, _LEGEND)


def _worth(place: int, answer: Answer) -> Field:
    say = rulings(answer[0])[place].say
    return Field(say, tone=Tone.GOOD if say is Say.YES else Tone.PLAIN)


def value_of(question: ParallelQuestion, plans: Sequence[Planned]) -> dict[str, object]:
    beyond, matrix = outside(question.model, question.gpus, question.load.sequence), encode(rulings(question))
    plan_rows = rows_of([(question, plans)])[1]
    return {"asked": encode(question), "outside": beyond, "ways": plan_rows, "matrix": matrix, "errors": _ERRORS}


def values_of(answers: Sequence[Answer]) -> dict[str, object]:
    return {"counts": [value_of(*answer) for answer in answers]}


def rows_of(answers: Sequence[Answer]) -> Rows:
    rows: list[dict[str, object]] = []
    for question, plans in answers:
        rows += (_row_of(question, plan) for plan in plans)
    return tuple(rows[0]), rows


def _row_of(question: ParallelQuestion, plan: Planned) -> dict[str, object]:
    pace = asdict(plan.pace)
    return {
        "gpus": question.gpus,
        **asdict(plan.layout),
        "micro_batches": plan.load.micro_batches,
        "fits": plan.fits,
        "tight": plan.tight,
        "checkpointing": plan.load.checkpointing,
        "memory_bytes": plan.memory.total,
        **{f"{name}_bytes": size for name, size in asdict(plan.memory).items()},
        "tokens_per_second": plan.tokens,
        "step_seconds": plan.pace.step,
        "bubble": pace.pop("bubble"),
        **{f"{name}_seconds": seconds for name, seconds in pace.items()},
        **{f"scale_{name}": number for name, number in _scale_traffic(question, plan)._asdict().items()},
        "memory_band": memory_band(plan.layout),
        "pace_band": _band(question, plan),
    }
