"""Shows the layouts for one number of GPUs, or the best layouts for several, as a page, as JSON and as rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial

from fp8bench import units
from fp8bench.features.plan_parallel.formulas import STATE_BYTES, Checkpointing, predict_memory
from fp8bench.features.plan_parallel.ranking import (
    HELD_OUT_TEXT,
    MEMORY_ERROR,
    UNCALIBRATED_TEXT,
    LayoutRankingQuestion,
    ParallelismVerdict,
    PlannedLayout,
    RankedLayouts,
    WorthwhileAnswer,
    describe_unpublished_sizes,
    judge_parallelism,
    memory_band,
    pace_band,
)
from fp8bench.model.codec import encode
from fp8bench.nn.parallel.ways import ScaleTraffic, count_scale_traffic
from fp8bench.report.columns import Col, table
from fp8bench.report.data.plain import PlainRows
from fp8bench.report.elements import Field, Page, Part, Table, Text, Tone

_LEGEND = (
    "memory: of one GPU, by formulas; band: their error on the published trainings that they were fitted to",
    "tokens/s: of one GPU, by formulas; band: the largest error on held-out machines, '-' if none was held out",
    "waits: share of a step in which products wait for TP, CP, FSDP or DDP; idle: share in which a pipeline is idle",
    "tight: the layout fits unless its memory is at the upper end of the band",
    "what a GPU has. DDP: the whole model and some sequences; FSDP: a shard of weights and moments, some sequences",
    "TP: a part of each product; PP: some of the layers, VP: in that many stages; CP: a part of each sequence",
)
# Every page states how accurate the formulas are.
_ACCURACY_TEXT = (
    f"Pace, by leave-one-machine-out: {HELD_OUT_TEXT}. Without calibration it was {UNCALIBRATED_TEXT}. Memory: "
    f"off by {MEMORY_ERROR} at most on the 20 published figures that the formulas were fitted to; none was held out."
)
# The assumed latency of a small message within a node, in seconds. The page shows it.
_MESSAGE_SECONDS = 1e-5
# In steps shorter than this, the overhead of launches dominates. The formulas leave out this overhead.
_SHORT_STEP_SECONDS = 0.02


def render_page(question: LayoutRankingQuestion, plans: Sequence[PlannedLayout]) -> Page:
    step_load = question.load
    title = (
        f"{question.model.name} ({units.count(question.model.weights)} weights) on {question.gpus} "
        f"GPU{'' if question.gpus == 1 else 's'} of {units.size(question.topology.memory)}: {question.batch} sequences "
        f"of {step_load.sequence} tokens a step, {step_load.precision}, checkpointing {step_load.checkpointing}"
    )
    remarks = map(Text, _list_remarks(question, plans))
    plan_table = table("ranking", "", _make_plan_columns(question), plans)
    parts = [Part("ranking", "", (*remarks, plan_table))]
    if question.gpus > 1:
        parts.append(Part("matrix", "each kind of parallelism by itself", (_parallelism_table(question),)))
    parts.append(Part("errors", "", (Text(_ACCURACY_TEXT),)))
    return Page(title, "", tuple(parts), _LEGEND)


def _list_remarks(question: LayoutRankingQuestion, plans: Sequence[PlannedLayout]) -> Iterator[str]:
    best_plan = plans[0]
    # Layouts that fit come first: if the first does not fit, no layout fits.
    if not best_plan.fits:
        full_checkpointing_hint = (
            "" if question.load.checkpointing is Checkpointing.FULL else ", or --checkpointing full"
        )
        yield f"No layout fits. Try more GPUs, a smaller batch, shorter sequences{full_checkpointing_hint}."
    if best_plan.pace.step < _SHORT_STEP_SECONDS:
        yield (
            f"A step takes {units.seconds(best_plan.pace.step)} by these formulas, which leave out launches. In steps "
            f"below {units.seconds(_SHORT_STEP_SECONDS)} launches dominate, and the paces here mean nothing."
        )
    yield from _remark_on_calibration(question)
    yield from _remark_on_memory(question, best_plan)
    # GPUs exchange scales by messages. The formulas leave them out, so estimate their time here.
    if count := _count_scale_traffic(question, best_plan).messages:
        yield (
            f"Scales: with one scale per tensor, a step of the first layout waits for {count} messages of 4 bytes: "
            f"the largest magnitude over {best_plan.layout.tensor} GPUs before each cast of a tensor that TP divides. "
            "Paces leave these messages out: "
            f"at {units.seconds(_MESSAGE_SECONDS)} each they take {units.seconds(count * _MESSAGE_SECONDS)} of "
            f"{units.seconds(best_plan.pace.step)}. Scales of rows and blocks need no messages."
        )
    # Bands come from published trainings, and hold only for similar trainings.
    if unpublished_sizes := describe_unpublished_sizes(question.model, question.gpus, question.load.sequence):
        yield f"No published training is like this: {'; '.join(unpublished_sizes)}. Bands are a guess here."


def _remark_on_calibration(question: LayoutRankingQuestion) -> Iterator[str]:
    if question.by is None:
        yield (
            "No whole training has calibrated these rates: paces show which layout is faster, not how fast it is. By "
            f"ceilings of products they were {UNCALIBRATED_TEXT}. Give a measured training: --calibrate "
            "MODEL,LAYOUT,PACE."
        )
    else:
        yield (
            f"By {question.by.model.name} with {question.by.layout.words} at "
            f"{question.by.pace:g} tokens/s of a GPU, products reach "
            f"{question.topology.bf16 / 1e12:.0f} TFLOP/s in bf16 and {question.topology.fp8 / 1e12:.0f} in FP8."
        )


def _remark_on_memory(question: LayoutRankingQuestion, plan: PlannedLayout) -> Iterator[str]:
    # 1. Compare the memory of states with that of fp32 states, and with the savings that FP8-LM reports.
    if (states := question.load.state_bytes) != STATE_BYTES["fp32"]:
        fp32_bytes = predict_memory(question.model, plan.layout, replace(plan.load, states="fp32")).total
        yield (
            f"States take {states.total} bytes a weight instead of {STATE_BYTES['fp32'].total}: the first layout takes "
            f"{units.percent(1 - plan.memory.total / fp32_bytes, 0)} less memory than with fp32 states "
            f"({units.size(fp32_bytes)}). "
            "FP8-LM reports 29%, 28% and 39% less for its GPT-7B, 13B and 175B on H100s, with --zero-1; these formulas "
            "give 32%, 36% and 43%, because they leave out 6 to 13 GiB of other memory in those trainings."
        )
    # 2. List the memory of the four models that RLHF trains or runs.
    if question.load.rlhf:
        predicted_memory = plan.memory
        models_and_bytes = (
            ("actor", predicted_memory.states),
            ("critic", predicted_memory.critic),
            ("reference and reward", predicted_memory.frozen),
        )
        sizes = ", ".join(f"{name} {units.size(size)}" for name, size in models_and_bytes)
        yield (
            f"RLHF: in the first layout weights, gradients and moments take {sizes}; one model runs at a time."
            " tokens/s are of the actor's update alone, without rollouts and passes of other models. FP8-LM reports "
            "62% less for states and 32% less for weights (LLaMA-7B); --states fp8-lm gives 62% and 50%, with all "
            "copies in FP8. Only four small models were checked, by `fp8bench suite transformer --set models=rlhf`."
        )


def _count_scale_traffic(question: LayoutRankingQuestion, plan: PlannedLayout) -> ScaleTraffic:
    """Returns how many scales each GPU exchanges per step, in messages and bytes. Only FP8 with one scale per tensor
    exchanges any, because GPUs that share a tensor have to agree on its scale.
    """
    if plan.layout.tensor == 1 or plan.load.precision != "fp8" or question.recipe not in ("", "tensorwise"):
        return ScaleTraffic(0, 0.0)
    # A pipeline stage does not wait for the scales of other stages, so count only the layers of one stage.
    blocks = -(-question.model.layers // plan.layout.pipeline)
    return count_scale_traffic(blocks * plan.load.micro_batches, plan.layout.tensor)


def _show_whether_it_fits(plan: PlannedLayout) -> Field:
    # `plan.fits` is also True for a tight layout, so check `tight` first.
    if plan.tight:
        return Field("tight", tone=Tone.DOUBT)
    return Field("yes", tone=Tone.GOOD) if plan.fits else Field("no", tone=Tone.BAD)


def _make_plan_columns(question: LayoutRankingQuestion) -> list[Col[PlannedLayout]]:
    return [
        Col("layout", "layout.words"),
        Col("micro-batches", lambda plan: str(plan.load.micro_batches), number=True),
        Col("memory", lambda plan: units.size(plan.memory.total), number=True),
        Col("band", lambda plan: f"±{units.percent(memory_band(plan.layout), 0)}", number=True),
        Col("fits", _show_whether_it_fits),
        Col("tokens/s", lambda plan: units.count(plan.tokens), number=True),
        Col("band", partial(_find_pace_error_band, question), show=lambda band: f"±{units.percent(band, 0)}"),
        Col("waits", lambda plan: units.percent(plan.pace.communication_wait_share, 0), number=True),
        Col("idle", lambda plan: units.percent(plan.pace.idle_share, 0), number=True),
    ]


def _find_pace_error_band(question: LayoutRankingQuestion, plan: PlannedLayout) -> float | None:
    return pace_band(question.by, question.model, plan.layout, plan.load, question.recipe)


def _parallelism_table(question: LayoutRankingQuestion) -> Table:
    cols: list[Col[ParallelismVerdict]] = [
        Col("kind", "kind"),
        Col("worth it", _show_worthwhile),
        Col("why", "why", below=True),
    ]
    return table("matrix", "", cols, judge_parallelism(question))


def render_gpu_counts_page(answers: Sequence[RankedLayouts]) -> Page:
    """Shows the best layout for each number of GPUs, and which kinds of parallelism are worthwhile."""
    first_question = answers[0][0]
    model, load = first_question.model, first_question.load
    title = (
        f"{model.name} ({units.count(model.weights)} weights) on GPUs of "
        f"{units.size(first_question.topology.memory)}: sequences of {load.sequence} tokens, {load.precision}; "
        "tokens/s of one GPU, and of all together"
    )
    # Columns need the model, recipe and measured training, which are the same for every number of GPUs.
    columns: list[Col[PlannedLayout]] = [
        Col("GPUs", lambda plan: str(plan.layout.gpus), number=True),
        *_make_plan_columns(first_question),
        Col("all together", lambda plan: units.count(plan.layout.gpus * plan.tokens), number=True),
        Col("checkpointing", "load.checkpointing"),
    ]
    best_plans = table("counts", "", columns, [plans[0] for _, plans in answers])
    # `judge_parallelism` returns its verdicts in the same order for every number of GPUs.
    verdicts = {str(question.gpus): judge_parallelism(question) for question, _ in answers}

    def show_verdict(index: int, gpus: str) -> Field:
        return _show_worthwhile(verdicts[gpus][index])

    cols: list[Col[str]] = [Col("GPUs", str, number=True)]
    for index, verdict in enumerate(judge_parallelism(first_question)):
        cols.append(Col(verdict.kind, partial(show_verdict, index)))
    matrix = Part(
        "matrix", "each kind of parallelism by itself: is it worth it?", (table("matrix", "", cols, verdicts),)
    )
    remarks = map(Text, _remark_on_calibration(first_question))
    page_parts = (
        Part("counts", "the best layout for each count", (*remarks, best_plans)),
        matrix,
        Part("errors", "", (Text(_ACCURACY_TEXT),)),
    )
    return Page(title, "", page_parts, _LEGEND)


def _show_worthwhile(verdict: ParallelismVerdict) -> Field:
    return Field(verdict.say, tone=Tone.GOOD if verdict.say is WorthwhileAnswer.YES else Tone.PLAIN)


def encode_plans(question: LayoutRankingQuestion, plans: Sequence[PlannedLayout]) -> dict[str, object]:
    return {
        "asked": encode(question),
        "outside": describe_unpublished_sizes(question.model, question.gpus, question.load.sequence),
        "ways": table_rows([(question, plans)])[1],
        "matrix": encode(judge_parallelism(question)),
        "errors": _ACCURACY_TEXT,
    }


def encode_plan_answers(answers: Sequence[RankedLayouts]) -> dict[str, object]:
    return {"counts": [encode_plans(*answer) for answer in answers]}


def table_rows(answers: Sequence[RankedLayouts]) -> PlainRows:
    rows: list[dict[str, object]] = []
    for question, plans in answers:
        rows += (_make_table_row(question, layout_plan) for layout_plan in plans)
    return tuple(rows[0]), rows


def _make_table_row(question: LayoutRankingQuestion, plan: PlannedLayout) -> dict[str, object]:
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
        **{f"scale_{name}": number for name, number in _count_scale_traffic(question, plan)._asdict().items()},
        "memory_band": memory_band(plan.layout),
        "pace_band": _find_pace_error_band(question, plan),
    }
