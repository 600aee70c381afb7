"""Which layers a workload has, and which words of a precision map they answer to."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple


class Layer(NamedTuple):
    """A layer whose products run in an arithmetic of its own.

    `name` is a path of words with points between ('blocks.0.attn.qkv'); `kind` is what alike layers have in common
    ('attn'). `high` ones stay in high precision unless a map says otherwise.
    """

    name: str
    kind: str
    high: bool = False


def keys_of(layers: Iterable[Layer]) -> dict[str, None]:
    """Every key that a precision map may have for these layers: kinds, front parts of names, names."""
    found: dict[str, None] = {}
    for layer in layers:
        words = layer.name.split(".")
        found.update(dict.fromkeys((layer.kind, *(".".join(words[:count]) for count in range(1, len(words) + 1)))))
    return found


def key_of(layer: Layer, keys: Collection[str]) -> str | None:
    """The key that a layer obeys: the longest that is its name or the front part of it, else its kind, else none."""
    fitting = [key for key in keys if layer.name == key or layer.name.startswith(f"{key}.")]
    if fitting:
        return max(fitting, key=len)
    return layer.kind if layer.kind in keys else None
