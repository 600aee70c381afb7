"""The built-in models by architecture and size: their layers, which settings and precisions they allow, and how they
are built.

Imports no torch: the parent process plans trainings with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fp8bench.errors import UnknownName, UsageError
from fp8bench.features.train.request import CUT, PARAMETER_KINDS, WIRED, WIRES, TrainerSettings, parse_optimizer
from fp8bench.formats.hardware import emulated, native, refused
from fp8bench.formats.recipes import Recipe
from fp8bench.model import DeviceFacts, Level, Support
from fp8bench.model.words import UNTOUCHED
from fp8bench.nn.parallel.ways import uncuttable
from fp8bench.nn.shared_workloads import uncompilable
from fp8bench.nn.sizes import LINE, SIZES, GPTConfig, around, gpt_around
from fp8bench.protocols import Layer, Precision, key_of, keys_of
from fp8bench.registry import precisions

if TYPE_CHECKING:
    import torch

    from fp8bench.nn.gpt import LanguageModel
    from fp8bench.nn.linear import Choose

# The layers of each block and their kinds, in the order in which they are built.
_BLOCKS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "gpt": (("attn.qkv", "attn"), ("attn.out", "attn"), ("mlp.up", "mlp"), ("mlp.down", "mlp")),
    "mlp": (("up", "mlp"), ("down", "mlp")),
    "cnn": (("first", "conv"), ("second", "conv")),
    "moe": (("attn.qkv", "attn"), ("attn.out", "attn")),
}
EXPERTS = 8
_RATED = "kinds of layers (attn, mlp, conv), and beginnings of paths (blocks.0, blocks.0.attn.qkv)"
# The norms of each block, without the model's last one.
_NORMS: Mapping[str, tuple[str, ...]] = {
    "mlp": ("norms.{}",),
    "cnn": ("blocks.{}.norm_first", "blocks.{}.norm_second"),
}
# Every device with native low precision takes products whose sides are multiples of this.
_ROUND = 128


def config_of(settings: TrainerSettings, vocabulary: int) -> GPTConfig:
    """Returns the sizes of a model. Experts are half as wide as the mlp they replace: a token visits two."""
    if settings.model not in SIZES:
        raise UnknownName("model", settings.model, SIZES)
    size = SIZES[settings.model]
    # Products need round sides, so the vocabulary is padded.
    vocabulary_of_text = -(-vocabulary // _ROUND) * _ROUND
    return replace(
        size,
        vocabulary=max(vocabulary_of_text, size.vocabulary) if size.vocabulary > 256 else vocabulary_of_text,
        batch=settings.batch or size.batch,
        sequence=settings.sequence or size.sequence,
        experts=EXPERTS if settings.arch == "moe" else 0,
        hidden=size.hidden // 2 if settings.arch == "moe" else size.hidden,
        tied=size.tied and settings.arch in ("gpt", "moe"),
    )


def layers_of(arch: str, config: GPTConfig) -> tuple[Layer, ...]:
    """Returns the layers that take a precision, in the order in which they are built; the head stays in high
    precision."""
    parts = list(_BLOCKS[arch])
    if arch == "moe":
        for number in range(config.experts):
            parts += [(f"mlp.experts.{number}.up", "mlp"), (f"mlp.experts.{number}.down", "mlp")]
    layers = [Layer("window", "mlp")] if arch == "mlp" else []
    for block in range(config.layers):
        layers += [Layer(f"blocks.{block}.{name}", kind) for name, kind in parts]
    return (*layers, Layer("head", "head", high=True))


def around_of(arch: str, config: GPTConfig) -> tuple[Layer, ...]:
    if arch not in _NORMS:
        return gpt_around(config.layers)
    return around(norm.format(block) for block, norm in itertools.product(range(config.layers), _NORMS[arch]))


def check(settings: TrainerSettings) -> None:
    config, compiled = config_of(settings, 1), settings.compile == "yes"
    attends = settings.arch in ("gpt", "moe")
    reason = "batch norm would count a block twice" if settings.arch == "cnn" else "an mlp keeps few activations anyway"
    refusals = (
        (
            settings.arch == "cnn" and config.sequence % LINE > 0,
            (
                f"--arch cnn reads a text in lines of {LINE} tokens: --sequence {config.sequence} is no multiple "
                f"of {LINE}."
            ),
        ),
        (
            settings.attention != "auto" and (not attends or compiled),
            f"--attention {settings.attention} is for --arch gpt and moe without --compile yes: choose these, or auto.",
        ),
        (
            parse_optimizer(settings.optimizer)[0] == "adafactor" and settings.optimizer_states != "fp32",
            f"adafactor keeps means of rows and columns: leave --optimizer-states {settings.optimizer_states} out.",
        ),
        (
            compiled and settings.arch == "moe",
            "--compile yes does not work with --arch moe, whose experts get any number of tokens. Choose --compile no.",
        ),
        (
            settings.checkpointing != "no" and not attends,
            f"--checkpointing {settings.checkpointing} is for --arch gpt and moe: {reason}. Choose --checkpointing no.",
        ),
    )
    for wrong, message in refusals:
        if wrong:
            raise UsageError(message)
    names = {**dict.fromkeys(PARAMETER_KINDS), **keys_of(layers_of(settings.arch, config))}
    names |= {layer.name: None for layer in around_of(settings.arch, config) if layer.kind == "norm"}
    for name, _ in settings.rates:
        if name == "head" and config.tied:
            raise UsageError(f"--rates head: the head of {settings.model} is its embedding. Give a rate of embedding.")
        if name not in names:
            raise UnknownName("parameters of --rates", name, names, f"{', '.join(PARAMETER_KINDS)}; {_RATED}")


def check_effective(arms: Sequence[TrainerSettings]) -> None:
    """Raises UsageError for a --wire that no arm uses."""
    changed = [arm for arm in arms if arm.wire != WIRES[0]]
    if changed and not any(arm.parallel in WIRED for arm in changed):
        raise UsageError(
            f"--wire has no effect: it needs --parallel {' or '.join(WIRED)}, and that is {changed[0].parallel}. "
            f"Choose --parallel {WIRED[0]}, or leave --wire out."
        )


def _around(settings: TrainerSettings) -> list[str]:
    """Returns the precisions that the map gives to elementwise operations."""
    layers = around_of(settings.arch, config_of(settings, 1))
    keys = {key_of(layer, dict(settings.precision_map)) for layer in layers}
    return [mode for key, mode in settings.precision_map if key in keys]


def check_ranks(settings: TrainerSettings, ranks: int) -> None:
    chosen, cut, sharded = settings, settings.parallel in CUT, settings.parallel == "fsdp"
    parallel = f"--parallel {chosen.parallel}"
    batch, rounded = config_of(chosen, 1).batch, any(precisions.get(word).carried_by for word in _around(chosen))
    if not cut and batch % ranks:
        raise UsageError(f"{ranks} ranks cannot share a micro-batch of {batch} equally. Give a multiple as --batch.")
    refusals = (
        (
            cut and chosen.arch != "gpt",
            f"--arch {chosen.arch}",
            parallel,
            "it divides the heads and hidden features of gpt's blocks. Choose --arch gpt",
        ),
        (
            cut and chosen.gradients != "fp32",
            f"--gradients {chosen.gradients}",
            parallel,
            (
                "each rank would have its own scale for its part of a gradient. Choose --gradients fp32, "
                "or --parallel zero"
            ),
        ),
        (
            chosen.parallel == "sp" and chosen.dropout > 0,
            f"--dropout {chosen.dropout:g}",
            parallel,
            "ranks have different tokens, and would drop the same places in each. Choose --dropout 0",
        ),
        (
            rounded and chosen.parallel != "tp",
            "--precision-map",
            parallel,
            "operations around products would be rounded by a rank's own magnitudes. Leave it out",
        ),
        (chosen.arch == "cnn", "--arch cnn", "--ranks", "its batch norm would see only a rank's own part of a batch"),
        (
            chosen.gradients != "fp32" and chosen.parallel != "zero",
            f"--gradients {chosen.gradients}",
            parallel,
            "its ranks average float32 gradients. Choose --parallel zero, as MS-AMP's levels do",
        ),
        (
            chosen.compile == "yes",
            "--compile yes",
            "--ranks",
            "ranks send each other largest magnitudes between casts. Choose --compile no",
        ),
        (
            chosen.arch == "moe",
            "--arch moe",
            "--ranks",
            "experts cast on some ranks and not on others, so that ranks cannot share magnitudes. Choose --arch gpt",
        ),
        (
            cut and chosen.master == "bf16-stochastic",
            f"--master {chosen.master}",
            parallel,
            "weights that all ranks share would be rounded differently on each. Choose another master",
        ),
        (
            (cut or sharded) and parse_optimizer(chosen.optimizer)[0] == "adafactor",
            "--optimizer adafactor",
            parallel,
            "it needs means of a weight's rows and columns, and a rank has a part of them. Choose another one",
        ),
        (
            (cut or sharded) and chosen.updates == "fp8",
            "--updates fp8",
            parallel,
            "its scale needs the update of a whole weight, and a rank has a part of it. Choose bf16",
        ),
    )
    for wrong, option, conflict, reason in refusals:
        if wrong:
            raise UsageError(f"{option} does not go with {conflict}: {reason}.")
    config = config_of(chosen, 1)
    reason = uncuttable(config, ranks) if cut else ""
    if chosen.parallel == "sp" and config.sequence % ranks:
        reason = f"{config.sequence} tokens cannot be divided equally among {ranks} ranks: choose another --sequence"
    if reason:
        raise UsageError(f"{parallel} cannot cut {chosen.model} for --ranks {ranks}: {reason}, or fewer ranks.")


def support(settings: TrainerSettings, config: GPTConfig, precision: Precision, facts: DeviceFacts) -> Support:
    is_unconverted = settings.make and precision.name == UNTOUCHED
    support = native("the model as it came") if is_unconverted else _support_of(settings, precision, facts)
    if precision.whole_layers and precision.remembers and support.level is not Level.REFUSED:
        return refused(f"a checkpoint cannot store scales of {precision.mode}: choose backend=torch or emulated")
    cut = settings.parallel in CUT and facts.ranks > 1
    if cut and precision.whole_layers:
        return refused(f"--parallel {settings.parallel} cannot divide a library's layers, as of {precision.mode}")
    if settings.compile == "yes" and precision.remembers and support.level is not Level.REFUSED:
        return refused(
            f"{precision.mode} rounds by earlier casts, unseen by a compiled graph: choose --compile no, or a dtype "
            "without memory, like fp8"
        )
    if settings.make or support.level is not Level.NATIVE:
        return support
    rounded = bool(precision.carried_by) and precision.float32_products == "highest"
    if cut and (misfit := _misfit(config, facts.ranks, precision)):
        return refused(misfit)
    readers = 1 if cut else facts.ranks
    # Weight gradients are contracted over the tokens, in multiples that the device accepts.
    rows, along = config.batch // readers * config.sequence, precision.multiples[0]
    if settings.compile == "yes" and (reason := uncompilable(precision, config, rows)):
        return refused(reason)
    if settings.arch == "cnn" and rounded:
        recipe = getattr(precision, "recipe", None)
        if not (isinstance(recipe, Recipe) and recipe.hadamard):
            return emulated(f"torch has no convolution in {precision.name}: values rounded, convolved in fp32")
    counted = f"batch x sequence is {rows}" + " of each rank" * (readers > 1)
    if settings.arch == "cnn":  # a line and a position more than the text has
        rows = config.batch * (config.sequence // LINE + 1) * (LINE + 1)
        counted = f"with an image's line and column of zeros the batch has {rows}"
    if rows % along:
        return refused(
            f"native {precision.name} contracts weight gradients over the tokens, in multiples of {along}; {counted}: "
            "choose another --batch or --sequence"
        )
    return support


def _support_of(settings: TrainerSettings, precision: Precision, facts: DeviceFacts) -> Support:
    """Returns a precision's support; one with unit scaling has constants for some models only."""
    unlike = (
        (
            settings.make or (settings.arch != "gpt" and f"--arch {settings.arch}"),
            settings.attention != "auto" and f"--attention {settings.attention}",
            settings.parallel in ("tp", "fsdp") and f"--parallel {settings.parallel}",
            not settings.make and _around(settings) and "--precision-map for operations around products",
        )
        if precision.unit_scaled
        else ()
    )
    for option in filter(None, unlike):
        return refused(
            f"{precision.mode} casts without scales, in a model that is unit-scaled as a whole. It has constants for a "
            f"GPT only, without {option}: choose fp8, whose scales come from the tensors"
        )
    return precision.support(facts)


def _misfit(config: GPTConfig, ranks: int, precision: Precision) -> str:
    """Returns why native products cannot take a rank's share of a block's features; '' if they can."""
    most = max(precision.multiples)
    features = config.width, config.key_heads * config.head_width, config.hidden
    wrong = sorted({feature // ranks for feature in features if feature // ranks % most})
    if not wrong:
        return ""
    sides = " and ".join(map(str, wrong))
    return f"native {precision.name} takes sides in multiples of {most}, and a rank has {sides} features of a block"


def built(settings: TrainerSettings, config: GPTConfig, choose: Choose, carrier: torch.dtype) -> LanguageModel:
    """Returns the model, with weights drawn in float32 by torch's current generator on its current device."""
    from fp8bench.nn.gpt import GPT
    from fp8bench.nn.text_models import TextCNN, WindowMLP
    from fp8bench.nn.whole_layers import surround

    if settings.arch in ("mlp", "cnn"):
        kind: type[WindowMLP | TextCNN] = WindowMLP if settings.arch == "mlp" else TextCNN
        model: LanguageModel = kind(config, choose, carrier, settings.dropout)
    else:
        model = GPT(config, choose, carrier, checkpointing=settings.checkpointing == "blocks", dropout=settings.dropout)
    surround(model)
    return model
