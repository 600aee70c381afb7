"""Models that a plan divides: published ones, sizes of the suite transformer, custom sizes, and users' makers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fp8bench.errors import UnknownName, UsageError
from fp8bench.features.plan_parallel.formulas import DecoderModel
from fp8bench.features.plan_parallel.ranking import MODELS
from fp8bench.model.step import Holder
from fp8bench.nn.sizes import SIZES, GPTConfig

DEFAULT_SEQUENCE = 8192
# As trained in FP8-LM (arXiv 2310.18313) with Megatron-LM: tied heads, and a padded vocabulary.
_VOCABULARY = 50304
_FP8_LM = {"gpt-7b": (32, 4096, 32), "gpt-13b": (40, 5120, 40), "gpt-175b": (96, 12288, 96)}
FP8_LM_MODELS = {
    name: DecoderModel(name, _VOCABULARY, width, layers, heads, heads, 4 * width, gated=False, tied=True)
    for name, (layers, width, heads) in _FP8_LM.items()
}


def _of_size(name: str, size: GPTConfig) -> DecoderModel:
    heads = size.heads, size.key_heads
    return DecoderModel(name, size.vocabulary, size.width, size.layers, *heads, size.hidden, size.modern, size.tied)


_SEQUENCES = {**dict.fromkeys(FP8_LM_MODELS, 2048), **{name: size.sequence for name, size in SIZES.items()}}
_KNOWN = {
    **MODELS,
    **FP8_LM_MODELS,
    **{name: _of_size(name, size) for name, size in SIZES.items()},
}
NAMES = tuple(_KNOWN)
KEYS = ("layers", "width", "heads", "key-heads", "hidden", "vocabulary", "gated", "tied")
_FORM = "layers=32,width=4096,heads=32, then what differs: key-heads=, hidden=, vocabulary=, gated=yes, tied=yes"
_SWITCHES = {"yes": True, "no": False}
_MOST = 1 << 30


def usual_sequence(model: DecoderModel) -> int:
    return _SEQUENCES.get(model.name, DEFAULT_SEQUENCE)


def parse_model(text: str) -> DecoderModel:
    """Reads a name, sizes like `layers=32,width=4096,heads=32`, or a maker like `net.py:make,heads=32`.

    Raises UsageError.
    """
    first, *words = text.split(",")
    if text in _KNOWN:
        return _KNOWN[text]
    if "=" in first:
        return _model(text, _fields(text, [first, *words]))
    if ":" in first or first.endswith(".py"):
        return _model(text, _fields_of_maker(first, _fields(text, words)))
    raise UnknownName("model", text, NAMES)


def _fields(text: str, words: Sequence[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for word in words:
        key, _, value = word.partition("=")
        switch = key in ("gated", "tied")
        number = int(value) if value.isdecimal() and len(value) < 10 else 0
        if key not in KEYS or key in fields or (value not in _SWITCHES if switch else not 0 < number < _MOST):
            raise UsageError(f"{text!r:.200}: {word!r:.80} cannot be read, or is given twice. Give {_FORM}.")
        fields[key] = _SWITCHES[value] if switch else number
    return fields


def _model(text: str, fields: dict[str, Any]) -> DecoderModel:
    if missing := [key for key in KEYS[:3] if key not in fields]:
        raise UsageError(f"{text!r:.200} lacks {', '.join(missing)}. Give {_FORM}.")
    usual = {"key-heads": fields["heads"], "hidden": 4 * fields["width"], "vocabulary": _VOCABULARY, "gated": False}
    sizes = {key.replace("-", "_"): value for key, value in (usual | fields).items()}
    model = DecoderModel(text, **sizes)
    if model.width % model.heads or model.heads % model.key_heads:
        raise UsageError(
            f"{text!r:.200}: {model.heads} heads must divide the width ({model.width}), and {model.key_heads} "
            "heads of keys those. Check heads= and key-heads=."
        )
    return model


def _fields_of_maker(maker: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Adds the sizes that one step of the maker's model on a CPU shows. The number of heads is not visible in any
    product."""
    from fp8bench.jobs.profile import coverage_of, function_named  # heavy

    function_named(maker)
    if "heads" not in fields or fields.keys() - {"heads", "tied"}:
        raise UsageError(
            f"{maker}: its layers show all sizes except the number of heads. Write {maker},heads=N, and tied=yes "
            "if its head is the embedding's weights."
        )
    sizes = sizes_of(coverage_of(maker).holders)
    if sizes is None:
        raise UsageError(
            f"{maker}: its linear layers are not a head and equal blocks of attention and a feed-forward part, "
            f"by their names and shapes, and the formulas cover no others. Give sizes: {_FORM}."
        )
    keys, width = sizes.pop("keys"), sizes["width"]
    return {**fields, **sizes, "key-heads": max(1, keys * fields["heads"] // width)}


def sizes_of(holders: Sequence[Holder]) -> dict[str, Any] | None:
    """Returns sizes with the width of all `keys`; None if it is not a decoder of equal blocks."""
    sides: dict[str, list[tuple[int, int]]] = {"head": [], "attn": [], "mlp": []}
    for holder in holders:
        part = "head" if holder.kind == "head" else holder.group
        shapes = {(product.n, product.k) for product in holder.products if not product.backward}
        if part not in sides or len(shapes) != 1:
            return None
        sides[part] += shapes
    if len(sides["head"]) != 1:
        return None
    ((vocabulary, width),) = sides["head"]
    # Only the last product of a feed-forward part differs in input width from the residual stream.
    hidden = {inputs for _, inputs in sides["mlp"]} - {width}
    layers = sum(inputs != width for _, inputs in sides["mlp"])
    if len(hidden) != 1:
        return None
    wide = hidden.pop()
    attention = sum(n * k for n, k in sides["attn"]) / layers / width
    feed_forward = sum(n * k for n, k in sides["mlp"]) / layers / width
    keys, products = attention / 2 - width, feed_forward / wide
    if products not in (2, 3) or keys != int(keys) or not 0 < keys <= width:
        return None
    sizes = {"vocabulary": vocabulary, "width": width, "layers": layers, "hidden": wide}
    return {**sizes, "gated": products == 3, "keys": int(keys)}
