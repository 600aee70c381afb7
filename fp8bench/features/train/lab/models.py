"""The built-in models by architecture and size: their layers, the settings and precisions that they allow, and how
they are built. This module does not import torch, because the parent process uses it to plan trainings.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fp8bench.errors import UnknownName, UsageError
from fp8bench.features.train.request import (
    PARALLELISMS_WITH_WIRE_FORMAT,
    PARAMETER_KINDS,
    TENSOR_CUTTING_METHODS,
    WIRE_FORMATS,
    TrainerSettings,
    parse_optimizer,
)
from fp8bench.formats.hardware import emulated, native, refused
from fp8bench.formats.recipes import Recipe
from fp8bench.model import DeviceFacts, Level, Support
from fp8bench.model.words import UNTOUCHED
from fp8bench.nn.parallel.ways import explain_uncuttable_model
from fp8bench.nn.shared_workloads import explain_uncompilable
from fp8bench.nn.sizes import LINE_TOKENS, SIZES, GPTConfig, around, make_gpt_surrounding_layers
from fp8bench.protocols import Layer, Precision, find_map_key, list_map_keys
from fp8bench.registry import precisions

if TYPE_CHECKING:
    import torch

    from fp8bench.nn.gpt import LanguageModel
    from fp8bench.nn.linear import ChooseArithmetic

# The layers of a block with their kinds, by architecture, in the order in which they are built.
_BLOCK_LAYERS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "gpt": (("attn.qkv", "attn"), ("attn.out", "attn"), ("mlp.up", "mlp"), ("mlp.down", "mlp")),
    "mlp": (("up", "mlp"), ("down", "mlp")),
    "cnn": (("first", "conv"), ("second", "conv")),
    "moe": (("attn.qkv", "attn"), ("attn.out", "attn")),
}
EXPERTS = 8
_RATE_NAMES = "kinds of layers (attn, mlp, conv), and beginnings of paths (blocks.0, blocks.0.attn.qkv)"
# The paths of a block's norm layers, by architecture. The last norm of a model is outside of its blocks.
_NORM_PATHS_BY_ARCH: Mapping[str, tuple[str, ...]] = {
    "mlp": ("norms.{}",),
    "cnn": ("blocks.{}.norm_first", "blocks.{}.norm_second"),
}
# Matrix products whose dimensions are multiples of 128 run on every device with native low precision.
_MATRIX_SIDE_MULTIPLE = 128


def make_config(settings: TrainerSettings, vocabulary: int) -> GPTConfig:
    """Returns the sizes of a model. In an moe, experts replace the mlps. Each token visits two experts, so an expert is
    half as wide as an mlp.
    """
    if settings.model not in SIZES:
        raise UnknownName("model", settings.model, SIZES)
    model_size_config = SIZES[settings.model]
    # Matrix products need dimensions that are multiples of 128, so the vocabulary is padded.
    padded_vocabulary = -(-vocabulary // _MATRIX_SIDE_MULTIPLE) * _MATRIX_SIDE_MULTIPLE
    return replace(
        model_size_config,
        vocabulary=max(padded_vocabulary, model_size_config.vocabulary)
        if model_size_config.vocabulary > 256
        else padded_vocabulary,
        batch=settings.batch or model_size_config.batch,
        sequence=settings.sequence or model_size_config.sequence,
        experts=EXPERTS if settings.arch == "moe" else 0,
        hidden=model_size_config.hidden // 2 if settings.arch == "moe" else model_size_config.hidden,
        tied=model_size_config.tied and settings.arch in ("gpt", "moe"),
    )


def list_layers(arch: str, config: GPTConfig) -> tuple[Layer, ...]:
    """Returns the layers that take a precision, in the order in which they are built. The head stays in high
    precision."""
    block_layers = list(_BLOCK_LAYERS[arch])
    if arch == "moe":
        for expert_number in range(config.experts):
            block_layers += [(f"mlp.experts.{expert_number}.up", "mlp"), (f"mlp.experts.{expert_number}.down", "mlp")]
    layers = [Layer("window", "mlp")] if arch == "mlp" else []
    for block in range(config.layers):
        layers += [Layer(f"blocks.{block}.{name}", kind) for name, kind in block_layers]
    return (*layers, Layer("head", "head", high=True))


def list_elementwise_layers(arch: str, config: GPTConfig) -> tuple[Layer, ...]:
    if arch not in _NORM_PATHS_BY_ARCH:
        return make_gpt_surrounding_layers(config.layers)
    return around(
        norm_path_template.format(block)
        for block, norm_path_template in itertools.product(range(config.layers), _NORM_PATHS_BY_ARCH[arch])
    )


def check_trainer_settings(settings: TrainerSettings) -> None:
    # 1. Reject options that do not work with the architecture or with each other.
    config = make_config(settings, 1)
    is_compiled = settings.compile == "yes"
    has_attention = settings.arch in ("gpt", "moe")
    checkpointing_reason = (
        "batch norm would count recomputed blocks twice"
        if settings.arch == "cnn"
        else "an mlp keeps few activations anyway"
    )
    refusal_rules = (
        (
            settings.arch == "cnn" and config.sequence % LINE_TOKENS > 0,
            (
                f"--arch cnn reads a text in lines of {LINE_TOKENS} tokens: --sequence {config.sequence} is not a "
                f"multiple of {LINE_TOKENS}."
            ),
        ),
        (
            settings.attention != "auto" and (not has_attention or is_compiled),
            f"--attention {settings.attention} is for --arch gpt and moe without --compile yes: choose these, or auto.",
        ),
        (
            parse_optimizer(settings.optimizer)[0] == "adafactor" and settings.optimizer_states != "fp32",
            f"adafactor keeps means of rows and columns: leave --optimizer-states {settings.optimizer_states} out.",
        ),
        (
            is_compiled and settings.arch == "moe",
            "--compile yes does not work with --arch moe, whose experts get any number of tokens. Choose --compile no.",
        ),
        (
            settings.checkpointing != "no" and not has_attention,
            (
                f"--checkpointing {settings.checkpointing} is for --arch gpt and moe: {checkpointing_reason}. "
                "Choose --checkpointing no."
            ),
        ),
    )
    for is_refused, message in refusal_rules:
        if is_refused:
            raise UsageError(message)
    # 2. Check the names in --rates, which may also name norm layers.
    names = {**dict.fromkeys(PARAMETER_KINDS), **list_map_keys(list_layers(settings.arch, config))}
    names |= {layer.name: None for layer in list_elementwise_layers(settings.arch, config) if layer.kind == "norm"}
    for name, _ in settings.rates:
        if name == "head" and config.tied:
            raise UsageError(
                f"--rates head: the head of {settings.model} is its embedding. Give a factor for embedding instead."
            )
        if name not in names:
            raise UnknownName("parameters of --rates", name, names, f"{', '.join(PARAMETER_KINDS)}; {_RATE_NAMES}")


def check_wire_has_effect(arms: Sequence[TrainerSettings]) -> None:
    """Raises UsageError if a --wire is set and no arm uses it."""
    arms_with_wire_format = [arm for arm in arms if arm.wire != WIRE_FORMATS[0]]
    if arms_with_wire_format and not any(
        arm.parallel in PARALLELISMS_WITH_WIRE_FORMAT for arm in arms_with_wire_format
    ):
        raise UsageError(
            f"--wire has no effect: it needs --parallel {' or '.join(PARALLELISMS_WITH_WIRE_FORMAT)}, and that is "
            f"{arms_with_wire_format[0].parallel}. "
            f"Choose --parallel {PARALLELISMS_WITH_WIRE_FORMAT[0]}, or leave --wire out."
        )


def _list_elementwise_precisions(settings: TrainerSettings) -> list[str]:
    """Returns the precisions that --precision-map gives to elementwise operations."""
    layers = list_elementwise_layers(settings.arch, make_config(settings, 1))
    keys = {find_map_key(layer, dict(settings.precision_map)) for layer in layers}
    return [mode for key, mode in settings.precision_map if key in keys]


def check_rank_count(settings: TrainerSettings, ranks: int) -> None:
    divides_blocks = settings.parallel in TENSOR_CUTTING_METHODS
    is_sharded = settings.parallel == "fsdp"
    parallelism = f"--parallel {settings.parallel}"
    config = make_config(settings, 1)
    has_elementwise_rounding = any(precisions.get(word).carried_by for word in _list_elementwise_precisions(settings))
    # Ranks that share a micro-batch read equal parts of it.
    if not divides_blocks and config.batch % ranks:
        raise UsageError(
            f"{ranks} ranks cannot share a micro-batch of {config.batch} equally. Give a multiple as --batch."
        )
    refusal_rules = (
        (
            divides_blocks and settings.arch != "gpt",
            f"--arch {settings.arch}",
            parallelism,
            "it divides the heads and hidden features of gpt's blocks. Choose --arch gpt",
        ),
        (
            divides_blocks and settings.gradients != "fp32",
            f"--gradients {settings.gradients}",
            parallelism,
            (
                "each rank would have its own scale for its part of a gradient. Choose --gradients fp32, "
                "or --parallel zero"
            ),
        ),
        (
            settings.parallel == "sp" and settings.dropout > 0,
            f"--dropout {settings.dropout:g}",
            parallelism,
            "ranks have different tokens, and would drop the same places in each. Choose --dropout 0",
        ),
        (
            has_elementwise_rounding and settings.parallel != "tp",
            "--precision-map",
            parallelism,
            "elementwise operations would be rounded with scales of each rank's own part. Leave it out",
        ),
        (settings.arch == "cnn", "--arch cnn", "--ranks", "its batch norm would see a rank's part of a batch only"),
        (
            settings.gradients != "fp32" and settings.parallel != "zero",
            f"--gradients {settings.gradients}",
            parallelism,
            "its ranks average float32 gradients. Choose --parallel zero, as MS-AMP's levels do",
        ),
        (
            settings.compile == "yes",
            "--compile yes",
            "--ranks",
            "ranks exchange largest magnitudes between casts. Choose --compile no",
        ),
        (
            settings.arch == "moe",
            "--arch moe",
            "--ranks",
            "experts cast on some ranks and not on others, so that ranks cannot share magnitudes. Choose --arch gpt",
        ),
        (
            divides_blocks and settings.master == "bf16-stochastic",
            f"--master {settings.master}",
            parallelism,
            "weights that all ranks share would be rounded differently on each. Choose another master",
        ),
        (
            (divides_blocks or is_sharded) and parse_optimizer(settings.optimizer)[0] == "adafactor",
            "--optimizer adafactor",
            parallelism,
            "it needs means of a weight's rows and columns, and a rank has a part of them. Choose another one",
        ),
        (
            (divides_blocks or is_sharded) and settings.updates == "fp8",
            "--updates fp8",
            parallelism,
            "its scale needs the update of a whole weight, and a rank has a part of it. Choose bf16",
        ),
    )
    for is_refused, option, conflict, reason in refusal_rules:
        if is_refused:
            raise UsageError(f"{option} does not go with {conflict}: {reason}.")
    reason = explain_uncuttable_model(config, ranks) if divides_blocks else ""
    if settings.parallel == "sp" and config.sequence % ranks:
        reason = f"{config.sequence} tokens cannot be divided equally among {ranks} ranks: choose another --sequence"
    if reason:
        raise UsageError(f"{parallelism} cannot cut {settings.model} for --ranks {ranks}: {reason}, or fewer ranks.")


def find_support(settings: TrainerSettings, config: GPTConfig, precision: Precision, facts: DeviceFacts) -> Support:
    is_model_unconverted = settings.make and precision.name == UNTOUCHED
    support = (
        native("the unchanged model") if is_model_unconverted else _find_precision_support(settings, precision, facts)
    )
    if precision.whole_layers and precision.remembers and support.level is not Level.REFUSED:
        return refused(f"a checkpoint cannot store scales of {precision.mode}: choose backend=torch or emulated")
    divides_blocks = settings.parallel in TENSOR_CUTTING_METHODS and facts.ranks > 1
    if divides_blocks and precision.whole_layers:
        return refused(f"--parallel {settings.parallel} cannot divide a library's layers, as of {precision.mode}")
    if settings.compile == "yes" and precision.remembers and support.level is not Level.REFUSED:
        return refused(
            f"{precision.mode} takes scales from earlier casts, which a compiled graph does not see: choose --compile "
            "no, or a precision without memory, like fp8"
        )
    if settings.make or support.level is not Level.NATIVE:
        return support
    multiplies_in_float32 = bool(precision.carried_by) and precision.float32_products == "highest"
    if divides_blocks and (misfit := _explain_misfit(config, facts.ranks, precision)):
        return refused(misfit)
    data_parallel_rank_count = 1 if divides_blocks else facts.ranks
    # A weight gradient is a matrix product over the tokens. Their number must be a multiple that the device accepts.
    rows = config.batch // data_parallel_rank_count * config.sequence
    multiple = precision.multiples[0]
    if settings.compile == "yes" and (reason := explain_uncompilable(precision, config, rows)):
        return refused(reason)
    if settings.arch == "cnn" and multiplies_in_float32:
        recipe = getattr(precision, "recipe", None)
        if not (isinstance(recipe, Recipe) and recipe.hadamard):
            return emulated(f"torch has no convolution in {precision.name}: values rounded, convolved in fp32")
    size_words = f"batch x sequence is {rows}" + " of each rank" * (data_parallel_rank_count > 1)
    if settings.arch == "cnn":  # each image is padded by one line and one column of zeros
        rows = config.batch * (config.sequence // LINE_TOKENS + 1) * (LINE_TOKENS + 1)
        size_words = f"with the line and the column of zeros that pad each image, the batch has {rows} positions"
    if rows % multiple:
        return refused(
            f"native {precision.name} contracts weight gradients over the tokens, in multiples of {multiple}; "
            f"{size_words}: "
            "choose another --batch or --sequence"
        )
    return support


def _find_precision_support(settings: TrainerSettings, precision: Precision, facts: DeviceFacts) -> Support:
    """Returns whether a precision is native, emulated or refused on a device. A precision that needs unit scaling is
    refused for models and options that do not support unit scaling.
    """
    conflicting_options = (
        (
            settings.make or (settings.arch != "gpt" and f"--arch {settings.arch}"),
            settings.attention != "auto" and f"--attention {settings.attention}",
            settings.parallel in ("tp", "fsdp") and f"--parallel {settings.parallel}",
            not settings.make
            and _list_elementwise_precisions(settings)
            and "--precision-map for operations around products",
        )
        if precision.unit_scaled
        else ()
    )
    for option in filter(None, conflicting_options):
        return refused(
            f"{precision.mode} casts without scales, so that the whole model must be unit-scaled. That is only "
            f"defined for a GPT without {option}: choose fp8, whose scales come from the tensors"
        )
    return precision.support(facts)


def _explain_misfit(config: GPTConfig, ranks: int, precision: Precision) -> str:
    """Returns the reason why native matrix products cannot compute a rank's part of a block; '' if they can. A rank
    computes an equal share of the block's features.
    """
    multiple = max(precision.multiples)
    feature_counts = config.width, config.key_heads * config.head_width, config.hidden
    wrong_feature_counts = sorted(
        {feature_count // ranks for feature_count in feature_counts if feature_count // ranks % multiple}
    )
    if not wrong_feature_counts:
        return ""
    sizes = " and ".join(map(str, wrong_feature_counts))
    return f"native {precision.name} needs sides in multiples of {multiple}, but a rank has {sizes} features of a block"


def build_model(
    settings: TrainerSettings, config: GPTConfig, choose: ChooseArithmetic, carrier: torch.dtype
) -> LanguageModel:
    """Returns the model, with float32 weights drawn by torch's default generator on its default device. `choose`
    returns the arithmetic of a layer by its name. `carrier` is the dtype of values between layers.
    """
    from fp8bench.nn.gpt import GPT
    from fp8bench.nn.text_models import TextCNN, WindowMLP
    from fp8bench.nn.whole_layers import wrap_model_forward

    if settings.arch in ("mlp", "cnn"):
        kind: type[WindowMLP | TextCNN] = WindowMLP if settings.arch == "mlp" else TextCNN
        model: LanguageModel = kind(config, choose, carrier, settings.dropout)
    else:
        model = GPT(config, choose, carrier, checkpointing=settings.checkpointing == "blocks", dropout=settings.dropout)
    wrap_model_forward(model)
    return model
