"""Finds the decoder to plan: a published model, a size of the suite transformer, sizes in the command, or a user's
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fp8bench.errors import UnknownName, UsageError
from fp8bench.features.plan_parallel.formulas import DecoderModel
from fp8bench.features.plan_parallel.ranking import PUBLISHED_MODELS
from fp8bench.model.step import Holder
from fp8bench.nn.sizes import SIZES, GPTConfig

DEFAULT_SEQUENCE = 8192
# The models of FP8-LM (arXiv 2310.18313), trained with Megatron-LM: tied heads, and a padded vocabulary.
_DEFAULT_VOCABULARY = 50304
_FP8_LM_SIZES = {"gpt-7b": (32, 4096, 32), "gpt-13b": (40, 5120, 40), "gpt-175b": (96, 12288, 96)}
FP8_LM_MODELS = {
    name: DecoderModel(name, _DEFAULT_VOCABULARY, width, layers, heads, heads, 4 * width, gated=False, tied=True)
    for name, (layers, width, heads) in _FP8_LM_SIZES.items()
}


def _make_decoder_model(name: str, size: GPTConfig) -> DecoderModel:
    heads = size.heads, size.key_heads
    return DecoderModel(
        name, size.vocabulary, size.width, size.layers, *heads, size.hidden, size.is_llama_like, size.tied
    )


_DEFAULT_SEQUENCES = {**dict.fromkeys(FP8_LM_MODELS, 2048), **{name: size.sequence for name, size in SIZES.items()}}
_MODELS_BY_NAME = {
    **PUBLISHED_MODELS,
    **FP8_LM_MODELS,
    **{name: _make_decoder_model(name, size) for name, size in SIZES.items()},
}
MODEL_NAMES = tuple(_MODELS_BY_NAME)
MODEL_KEYS = ("layers", "width", "heads", "key-heads", "hidden", "vocabulary", "gated", "tied")
_SIZES_SYNTAX = "layers=32,width=4096,heads=32, then any of key-heads=, hidden=, vocabulary=, gated=yes, tied=yes"
_YES_NO = {"yes": True, "no": False}
_MAX_CONFIG_SIZE = 1 << 30


def default_sequence(model: DecoderModel) -> int:
    return _DEFAULT_SEQUENCES.get(model.name, DEFAULT_SEQUENCE)


def parse_model(text: str) -> DecoderModel:
    """Parses the name of a model, sizes like `layers=32,width=4096,heads=32`, or a user's model like
    `net.py:make,heads=32`.

    Raises UsageError for unknown names, and for missing or invalid sizes.
    """
    start, *parts = text.split(",")
    if text in _MODELS_BY_NAME:
        return _MODELS_BY_NAME[text]
    if "=" in start:
        return _make_model(text, _parse_fields(text, [start, *parts]))
    if ":" in start or start.endswith(".py"):
        return _make_model(text, _read_user_model_fields(start, _parse_fields(text, parts)))
    raise UnknownName("model", text, MODEL_NAMES)


def _parse_fields(text: str, parts: Sequence[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for part in parts:
        key, _, value = part.partition("=")
        is_boolean_key = key in ("gated", "tied")
        number = int(value) if value.isdecimal() and len(value) < 10 else 0
        if (
            key not in MODEL_KEYS
            or key in fields
            or (value not in _YES_NO if is_boolean_key else not 0 < number < _MAX_CONFIG_SIZE)
        ):
            raise UsageError(f"{text!r:.200}: {part!r:.80} cannot be read, or is given twice. Give {_SIZES_SYNTAX}.")
        fields[key] = _YES_NO[value] if is_boolean_key else number
    return fields


def _make_model(text: str, fields: dict[str, Any]) -> DecoderModel:
    if missing_keys := [key for key in MODEL_KEYS[:3] if key not in fields]:
        raise UsageError(f"{text!r:.200} lacks {', '.join(missing_keys)}. Give {_SIZES_SYNTAX}.")
    default_fields = {
        "key-heads": fields["heads"],
        "hidden": 4 * fields["width"],
        "vocabulary": _DEFAULT_VOCABULARY,
        "gated": False,
    }
    sizes = {key.replace("-", "_"): value for key, value in (default_fields | fields).items()}
    model = DecoderModel(text, **sizes)
    if model.width % model.heads or model.heads % model.key_heads:
        raise UsageError(
            f"{text!r:.200}: {model.heads} heads must divide the width ({model.width}), and {model.key_heads} "
            "key heads must divide the heads. Check heads= and key-heads=."
        )
    return model


def _read_user_model_fields(maker: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Adds the sizes of a user's model to `fields`, as seen in one step on a CPU. The number of heads must be given,
    because no layer shows it.
    """
    from fp8bench.jobs.profile import check_function_name, find_model_coverage  # this import is slow

    check_function_name(maker)
    if "heads" not in fields or fields.keys() - {"heads", "tied"}:
        raise UsageError(
            f"{maker}: its layers show all sizes except the number of heads. Write {maker},heads=N, and tied=yes "
            "if its head is the embedding's weights."
        )
    sizes = read_decoder_sizes(find_model_coverage(maker).holders)
    if sizes is None:
        raise UsageError(
            f"{maker}: its linear layers are not a head and equal blocks of attention and a feed-forward part, "
            f"by their names and shapes, as the formulas require. Give sizes: {_SIZES_SYNTAX}."
        )
    keys, width = sizes.pop("keys"), sizes["width"]
    # All heads have the same width, so the number of key heads follows from the width of all keys.
    return {**fields, **sizes, "key-heads": max(1, keys * fields["heads"] // width)}


def read_decoder_sizes(weight_holders: Sequence[Holder]) -> dict[str, Any] | None:
    """Derives the sizes of a decoder from its layers (`weight_holders`). The size `keys` is the width of all keys
    together. Returns None if the blocks of the decoder are not all equal.
    """
    shapes_by_part: dict[str, list[tuple[int, int]]] = {"head": [], "attn": [], "mlp": []}
    for weight_holder in weight_holders:
        block_name = "head" if weight_holder.kind == "head" else weight_holder.group
        shapes = {(product.n, product.k) for product in weight_holder.products if not product.backward}
        if block_name not in shapes_by_part or len(shapes) != 1:
            return None
        shapes_by_part[block_name] += shapes
    if len(shapes_by_part["head"]) != 1:
        return None
    ((vocabulary, width),) = shapes_by_part["head"]
    # Only the last product of a feed-forward part has inputs whose width differs from the residual stream's.
    hidden_widths = {inputs for _, inputs in shapes_by_part["mlp"]} - {width}
    layers = sum(inputs != width for _, inputs in shapes_by_part["mlp"])
    if len(hidden_widths) != 1:
        return None
    hidden_width = hidden_widths.pop()
    # The mean number of weights per block, divided by the width.
    attention = sum(n * k for n, k in shapes_by_part["attn"]) / layers / width
    feed_forward = sum(n * k for n, k in shapes_by_part["mlp"]) / layers / width
    # Attention has 2 width^2 weights for queries and outputs, and 2 width * keys for keys and values. A gated
    # feed-forward part has three matrices, any other has two.
    keys, products = attention / 2 - width, feed_forward / hidden_width
    if products not in (2, 3) or keys != int(keys) or not 0 < keys <= width:
        return None
    sizes = {"vocabulary": vocabulary, "width": width, "layers": layers, "hidden": hidden_width}
    return {**sizes, "gated": products == 3, "keys": int(keys)}
