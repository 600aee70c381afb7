"""Ranks all layouts of a training on GPUs: those that fit come first, the fastest at the top.

A prediction is shown with a band, which is the error of the formulas. For memory it is the error on the published
trainings that they were fitted to. For paces it is the error on held-out machines
(reports/plan_parallel/published.toml).

Products in a training are slower than alone, by an amount that differs between machines. So without a measured
training, predicted paces only order the layouts and have no band. One measured training calibrates the rates of bf16
and FP8 products. The rate of FP8 products is that of bf16 products times a ratio, which the FP8 recipe reached in
published trainings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from fp8bench import units
from fp8bench.errors import UsageError
from fp8bench.features.plan_parallel.formulas import (
    Checkpointing,
    DecoderModel,
    GpuMemory,
    ParallelLayout,
    PredictedStepTime,
    StepLoad,
    Topology,
    predict_memory,
    predict_pace,
    tokens_per_second,
)

# Products narrower than this utilize a GPU less than its rates suggest.
_NARROW_PRODUCT_WIDTH = 1024
# The FLOP rate of whole trainings in FP8, with casts, as a multiple of the rate in bf16: the median over published
# machines.
FP8_RATE_RATIOS = {"tensorwise": 1.38, "rowwise": 1.09, "mxfp8": 1.29}
DEFAULT_RECIPE = "tensorwise"
# The range of FLOP rates in which calibration searches, and the number of bisections of this range.
_MIN_RATE, _MAX_RATE, _HALVINGS = 1e9, 1e18, 60


class LayoutKind(StrEnum):
    """Kinds of layouts. Within one kind, the errors of predicted paces are similar."""

    DATA_PARALLEL = "DDP or FSDP"
    MODEL_PARALLEL = "TP or PP"
    CONTEXT_PARALLEL = "CP"
    NARROW_PRODUCTS = "TP on products narrower than 1024"


def layout_kind(model: DecoderModel, layout: ParallelLayout) -> LayoutKind:
    if layout.tensor > 1 and model.width / layout.tensor < _NARROW_PRODUCT_WIDTH:
        return LayoutKind.NARROW_PRODUCTS
    if layout.context > 1:
        return LayoutKind.CONTEXT_PARALLEL
    return LayoutKind.MODEL_PARALLEL if layout.tensor > 1 or layout.pipeline > 1 else LayoutKind.DATA_PARALLEL


# The largest error of a throughput predicted from another training on the same machine, by leave-one-out
# cross-validation over 8 machines. Keys are the layout kind of the measured training, the predicted layout kind, and
# whether their dtypes agree. For other keys there are too few machines.
HELD_OUT_ERRORS = {
    (LayoutKind.DATA_PARALLEL, LayoutKind.DATA_PARALLEL, True): 0.24,
    (LayoutKind.DATA_PARALLEL, LayoutKind.DATA_PARALLEL, False): 0.28,
    (LayoutKind.DATA_PARALLEL, LayoutKind.MODEL_PARALLEL, True): 0.20,
    (LayoutKind.DATA_PARALLEL, LayoutKind.CONTEXT_PARALLEL, True): 0.29,
    (LayoutKind.MODEL_PARALLEL, LayoutKind.DATA_PARALLEL, True): 0.26,
    (LayoutKind.CONTEXT_PARALLEL, LayoutKind.DATA_PARALLEL, True): 0.40,
}
HELD_OUT_TEXT = (
    "622 paces predicted from one training on the same machine, with each of 8 machines held out in turn, were off by "
    "11.1% (median); of 132 with kinds that other machines have, 88 were within the band of those (26 of 26 on seven "
    "machines, 62 of 106 on the one with long sequences)"
)
UNCALIBRATED_TEXT = "25% to 396% too fast in 44 published trainings (median 87%)"
# Only one machine has published trainings with this recipe, so the error on other machines is unknown.
_FP8_RECIPE_OF_ONE_MACHINE = "mxfp8"


@dataclass(frozen=True)
class MeasuredTraining:
    """A whole training that was measured on GPUs like those of the topology. `pace` is its number of tokens per
    second and GPU."""

    model: DecoderModel
    layout: ParallelLayout
    load: StepLoad
    pace: float


def calibrate_topology(topology: Topology, training: MeasuredTraining, recipe: str = DEFAULT_RECIPE) -> Topology:
    """Returns the topology with the rates of products for which the formulas predict the measured pace. Raises
    UsageError if such rates do not exist.
    """
    low_product_rate, high_product_rate = _MIN_RATE, _MAX_RATE
    for _ in range(_HALVINGS):
        # Rates span nine orders of magnitude, so halve the range of their logarithms.
        rate = math.sqrt(low_product_rate * high_product_rate)
        if predict_training_pace(set_product_rate(topology, rate, recipe), training) < training.pace:
            low_product_rate = rate
        else:
            high_product_rate = rate
    calibrated_topology = set_product_rate(topology, low_product_rate, recipe)
    # If the links alone are slower than the measured pace, the search ends at the highest rate.
    if not math.isclose(predict_training_pace(calibrated_topology, training), training.pace, rel_tol=1e-3):
        raise UsageError(
            f"--calibrate: {training.pace:g} tokens/s of a GPU is more than these links allow for "
            f"{training.layout.words}, however fast products are. Check the pace (of one GPU), and --topology."
        )
    return calibrated_topology


def set_product_rate(topology: Topology, bf16: float, recipe: str) -> Topology:
    return replace(topology, bf16=bf16, fp8=bf16 * FP8_RATE_RATIOS[recipe])


def predict_training_pace(topology: Topology, training: MeasuredTraining) -> float:
    pace = predict_pace(training.model, training.layout, training.load, topology)
    return tokens_per_second(training.layout, training.load, pace)


def pace_band(
    training: MeasuredTraining | None, model: DecoderModel, layout: ParallelLayout, load: StepLoad, recipe: str
) -> float | None:
    """Returns the relative error of a predicted pace; None if it is unknown. It is the largest error on held-out
    machines, for the same two kinds of layouts: that of the calibrating `training`, and that of the prediction.
    """
    if training is None:
        return None
    is_same_precision = training.load.precision == load.precision
    if recipe == _FP8_RECIPE_OF_ONE_MACHINE and not is_same_precision:
        return None
    return HELD_OUT_ERRORS.get(
        (layout_kind(training.model, training.layout), layout_kind(model, layout), is_same_precision)
    )


# A layout may use this share of a GPU's memory. The rest is for the driver and libraries.
USABLE_MEMORY_SHARE = 0.97
# With fewer tokens per GPU, attention kernels are less efficient than the formulas assume.
_MIN_SEQUENCE_PIECE_TOKENS = 4096
# From this length on, context parallelism is worth it.
_LONG_SEQUENCE = 32768
# Throughputs within this ratio count as equal. The layout with fewer kinds of parallelism then comes first.
_EQUAL_PACE_RATIO = 1.02
# Models with published trainings, the ranges of these trainings, and the error of the memory formulas on them.
PUBLISHED_MODELS = {
    model.name: model
    for model in (
        DecoderModel("llama3-8b", 128256, 4096, 32, 32, 8, 14336),
        DecoderModel("llama3-70b", 128256, 8192, 80, 64, 8, 28672),
        DecoderModel("llama3-405b", 128256, 16384, 126, 128, 8, 53248),
    )
}
PUBLISHED_GPUS, PUBLISHED_WEIGHTS, PUBLISHED_SEQUENCES = (8, 1024), (8030261248, 405853388800), (8192, 262144)
MEMORY_ERROR = "12.1%"


@dataclass(frozen=True)
class LayoutRankingQuestion:
    """A training whose layouts are ranked. `batch` is the number of sequences per step on all GPUs. `load` is the work
    of a step. Its numbers of local sequences and of micro-batches are set later, for each layout. `by` is the measured
    training that calibrated the topology's rates, if any.
    """

    model: DecoderModel
    gpus: int
    batch: int
    load: StepLoad
    topology: Topology
    by: MeasuredTraining | None = None
    recipe: str = DEFAULT_RECIPE


@dataclass(frozen=True)
class PlannedLayout:
    """One layout with its prediction. `tokens` is the number per second and GPU. A `tight` layout fits by the
    prediction, but not at the upper end of its memory band.
    """

    layout: ParallelLayout
    load: StepLoad
    memory: GpuMemory
    pace: PredictedStepTime
    tokens: float
    fits: bool
    tight: bool

    @property
    def kinds(self) -> int:
        """The number of kinds of parallelism that the layout uses."""
        layout = self.layout
        return sum(
            count > 1 for count in (layout.copies, layout.shards, layout.tensor, layout.pipeline, layout.context)
        )


def memory_band(layout: ParallelLayout) -> float:
    """Returns the relative error of the memory formulas, measured on published trainings with the same kind of
    layout.
    """
    return 0.05 if layout.tensor == layout.pipeline == 1 else 0.15


def rank_layouts(question: LayoutRankingQuestion) -> tuple[PlannedLayout, ...]:
    """Ranks all layouts that divide the training evenly. Layouts that fit into memory come first, the fastest at the
    top. Then come layouts that do not fit, by memory.
    """
    planned_layouts = [
        best for layout in list_layouts(question) if (best := _choose_micro_batches(question, layout)) is not None
    ]

    def sort_key(plan: PlannedLayout) -> tuple[float, ...]:
        if not plan.fits:
            return 1, plan.memory.total
        # Rounding the logarithm puts throughputs into classes that are 2% wide.
        return 0, -round(math.log(plan.tokens, _EQUAL_PACE_RATIO)), plan.kinds, plan.memory.total

    return tuple(sorted(planned_layouts, key=sort_key))


def list_layouts(question: LayoutRankingQuestion) -> Iterator[ParallelLayout]:
    """Yields all layouts that divide the training evenly.

    TP stays within a node, and divides the key heads. PP divides whole layers. CP divides the sequence. The remaining
    GPUs hold copies, or shards, or shards within a node and copies between nodes.
    """
    model, gpus = question.model, question.gpus
    # 1. Choose the number of GPUs that share each product.
    for tensor in _list_divisors(min(question.topology.node, gpus)):
        if gpus % tensor or model.key_heads % tensor:
            continue
        # 2. Divide the layers among stages. A GPU may have two smaller stages, which leaves it idle for less time.
        for pipeline in _list_divisors(gpus // tensor):
            stages_per_gpu_options = [
                stages_per_gpu
                for stages_per_gpu in (1, 2)
                if _makes_equal_stages(model.layers, pipeline, stages_per_gpu)
            ]
            # 3. Divide each sequence into pieces. Pieces that are too short have inefficient attention kernels.
            for context in _list_divisors(gpus // tensor // pipeline):
                ranks = gpus // tensor // pipeline // context
                sequence_piece_length = question.load.sequence / context
                has_short_context_pieces = context > 1 and sequence_piece_length < _MIN_SEQUENCE_PIECE_TOKENS
                if sequence_piece_length % tensor or question.batch % ranks or has_short_context_pieces:
                    continue
                # 4. Use the remaining GPUs for copies and shards of the weights.
                inner_layout = ParallelLayout(tensor=tensor, pipeline=pipeline, context=context)
                ranks_in_node = question.topology.node // (tensor * context)
                for shards in sorted(
                    {1, ranks, ranks_in_node if ranks_in_node > 1 and ranks % ranks_in_node == 0 else ranks}
                ):
                    for stages_per_gpu in stages_per_gpu_options:
                        yield replace(inner_layout, shards=shards, copies=ranks // shards, virtual=stages_per_gpu)


def _makes_equal_stages(layers: int, pipeline: int, stages_per_gpu: int) -> bool:
    """Returns whether all stages of a pipeline have the same number of layers. The embedding and the head may each
    count as one layer.
    """
    stage_count = pipeline * stages_per_gpu
    return stage_count == 1 or (pipeline > 1 and stage_count <= layers and -layers % stage_count <= 2)


def _list_divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _choose_micro_batches(question: LayoutRankingQuestion, layout: ParallelLayout) -> PlannedLayout | None:
    """Returns the fastest plan that fits, over all numbers of micro-batches. If no plan fits, returns the one with
    the most micro-batches.
    """
    local_sequences = question.batch * layout.gpus_per_sequence // question.gpus
    options = [_predict_plan(question, layout, local_sequences, count) for count in _list_divisors(local_sequences)]
    fitting_layouts = [option for option in options if option.fits]
    return max(fitting_layouts, key=lambda plan: plan.tokens) if fitting_layouts else options[-1]


def _predict_plan(
    question: LayoutRankingQuestion, layout: ParallelLayout, local_sequences: int, count: int
) -> PlannedLayout:
    load = replace(question.load, local=local_sequences, micro_batches=count)
    memory = predict_memory(question.model, layout, load)
    pace = predict_pace(question.model, layout, load, question.topology)
    usable_bytes = USABLE_MEMORY_SHARE * question.topology.memory
    fits_memory, tight = memory.total <= usable_bytes, memory.total * (1 + memory_band(layout)) > usable_bytes
    return PlannedLayout(
        layout, load, memory, pace, tokens_per_second(layout, load, pace), fits_memory, fits_memory and tight
    )


RankedLayouts = tuple[LayoutRankingQuestion, Sequence[PlannedLayout]]


class WorthwhileAnswer(StrEnum):
    """The answer to the question whether a kind of parallelism is worthwhile."""

    YES = "yes"
    NO = "no"


@dataclass(frozen=True)
class ParallelismVerdict:
    """Whether a kind of parallelism is worthwhile for this training, and why."""

    kind: str
    say: WorthwhileAnswer
    why: str


def judge_parallelism(question: LayoutRankingQuestion) -> tuple[ParallelismVerdict, ...]:
    """Judges by rules of thumb whether each kind of parallelism is worthwhile."""
    model, topology, load = question.model, question.topology, question.load
    usable_bytes, gpus = USABLE_MEMORY_SHARE * topology.memory, question.gpus
    # The smallest possible load per GPU: one sequence in one micro-batch.
    one_sequence_load = replace(load, local=1, micro_batches=1)
    replicated_bytes = predict_memory(model, ParallelLayout(copies=gpus), one_sequence_load).total
    sharded_bytes = predict_memory(model, ParallelLayout(shards=gpus), one_sequence_load).total
    tokens = question.batch * load.sequence / gpus
    is_batch_divisible = question.batch % gpus == 0
    batch_remark = (
        "" if is_batch_divisible else f"; but {question.batch} sequences cannot be divided evenly among {gpus} GPUs"
    )
    all_layouts = list(list_layouts(question))
    has_tensor_layouts = any(layout.tensor > 1 for layout in all_layouts)
    has_pipeline_layouts = any(layout.pipeline > 1 for layout in all_layouts)
    uneven_division_remark = f"; but {gpus} GPUs cannot divide this model evenly by it" if gpus > 1 else ""
    # With this many tokens per micro-batch and GPU, products take as long as FSDP's traffic.
    sent_bytes = (2 * load.gathered_state_bytes + load.state_bytes.gradient) * (gpus - 1) / gpus
    traffic_hiding_tokens = sent_bytes * topology.rate(load.precision) / (6 * topology.link(gpus))
    usable_memory_text = units.size(usable_bytes)
    division_rows = (
        (
            "DDP",
            replicated_bytes <= usable_bytes and is_batch_divisible,
            (
                f"{'a share of' if load.zero_one else 'all'} {load.state_bytes.total} bytes a weight and one sequence "
                f"take {units.size(replicated_bytes)} of {usable_memory_text} that a plan may use{batch_remark}"
            ),
        ),
        (
            "FSDP",
            gpus > 1 and sharded_bytes <= usable_bytes and tokens >= traffic_hiding_tokens and is_batch_divisible,
            (
                f"sharded over {gpus} GPUs it takes {units.size(sharded_bytes)} of {usable_memory_text}; a step has "
                f"{units.count(tokens)} tokens a GPU, and products hide FSDP's traffic if a micro-batch has "
                f"{units.count(traffic_hiding_tokens)} or more{batch_remark}"
            ),
        ),
        (
            "TP",
            has_tensor_layouts and (sharded_bytes > usable_bytes or question.batch < gpus),
            (
                "worth it where FSDP does not fit, or with fewer sequences than GPUs; only within the "
                f"{topology.node} GPUs of a node, because products wait for its traffic"
                f"{'' if has_tensor_layouts else uneven_division_remark}"
            ),
        ),
        (
            "PP",
            has_pipeline_layouts and gpus > topology.node and (tokens < traffic_hiding_tokens or question.batch < gpus),
            (
                "worth it between nodes where a GPU has too few tokens for FSDP, or with fewer sequences than "
                "GPUs; with at least 4 micro-batches per stage, because stages are idle at both ends of a step"
                f"{'' if has_pipeline_layouts else uneven_division_remark}"
            ),
        ),
        (
            "CP",
            load.sequence >= _LONG_SEQUENCE,
            f"worth it for sequences from {_LONG_SEQUENCE} tokens on; these have {load.sequence}",
        ),
        ("EP", False, "worth it for experts; this model has none"),
    )
    return tuple(
        ParallelismVerdict(kind, WorthwhileAnswer.YES if is_worthwhile else WorthwhileAnswer.NO, reason)
        for kind, is_worthwhile, reason in division_rows
    )


def rank_with_least_checkpointing(
    question: LayoutRankingQuestion,
) -> tuple[LayoutRankingQuestion, tuple[PlannedLayout, ...]]:
    """Ranks the layouts with the least checkpointing at which one of them fits into memory. If none fits, ranks them
    with full checkpointing.
    """
    for level in Checkpointing:
        candidate_question = replace(question, load=replace(question.load, checkpointing=level))
        planned_layouts = rank_layouts(candidate_question)
        if planned_layouts and planned_layouts[0].fits:
            break
    return candidate_question, planned_layouts


def describe_unpublished_sizes(model: DecoderModel, gpus: int, sequence: int) -> tuple[str, ...]:
    """Describes which sizes lie outside the range of all published trainings. Outside this range, the error bands of
    predictions are only a guess."""
    sizes = []
    for name, value, (low, high) in (
        ("GPUs", gpus, PUBLISHED_GPUS),
        ("weights", model.weights, PUBLISHED_WEIGHTS),
        ("tokens a sequence", sequence, PUBLISHED_SEQUENCES),
    ):
        show = units.count if name == "weights" else str
        if not low <= value <= high:
            sizes.append(f"{show(value)} {name} (published: {show(low)} to {show(high)})")
    return tuple(sizes)
