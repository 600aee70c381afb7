"""Precision maps that say which layers are low, in as few words as one would write."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fp8bench.protocols import Layer, key_of

PrecisionMap = tuple[tuple[str, str], ...]


def map_of(layers: Sequence[Layer], low: Collection[str], modes: tuple[str, str], high: str) -> PrecisionMap:
    """The map for a case in the first of the modes, the low one, that leaves just the layers named low in it.

    All others take the second one, the reference; `high` is what layers that stay high have without a map.
    """
    wanted = {layer.name: modes[0] if layer.name in low else modes[1] for layer in layers}
    usual = {layer.name: high if layer.high else modes[0] for layer in layers}
    return shortened(layers, wanted, usual)


def shortened(layers: Sequence[Layer], wanted: Mapping[str, str], usual: Mapping[str, str]) -> PrecisionMap:
    """A map by kinds and front parts of names where they say the same as names; nothing for what is usual."""
    found: dict[str, str] = {}
    for kind in dict.fromkeys(layer.kind for layer in layers):
        _enter(found, kind, [layer.name for layer in layers if layer.kind == kind], wanted, usual)
    for front in _fronts(layers):
        inside = [layer.name for layer in layers if layer.name == front or layer.name.startswith(f"{front}.")]
        if not all(_said(layers, found, usual)[name] == wanted[name] for name in inside):
            _enter(found, front, inside, wanted, usual)
    # A layer's name may be another one's kind: what it says there is mended by that one's name.
    while wrong := [name for name, mode in _said(layers, found, usual).items() if mode != wanted[name]]:
        found.update({name: wanted[name] for name in wrong})
    return tuple(found.items())


def _enter(
    found: dict[str, str], key: str, names: Sequence[str], wanted: Mapping[str, str], usual: Mapping[str, str]
) -> None:
    """Take a key where all its layers want the same, and something else than they have anyway."""
    modes = {wanted[name] for name in names}
    if len(modes) == 1 and any(wanted[name] != usual[name] for name in names):
        found[key] = modes.pop()


def _fronts(layers: Sequence[Layer]) -> list[str]:
    """Front parts of names that several layers share, the shortest first."""
    counts: dict[str, int] = {}
    for layer in layers:
        words = layer.name.split(".")
        for length in range(1, len(words)):
            front = ".".join(words[:length])
            counts[front] = counts.get(front, 0) + 1
    shared = [front for front, count in counts.items() if count > 1]
    return sorted(shared, key=lambda front: front.count("."))


def _said(layers: Sequence[Layer], found: Mapping[str, str], usual: Mapping[str, str]) -> dict[str, str]:
    """What every layer has under a map."""
    keys = {layer.name: key_of(layer, found) for layer in layers}
    return {name: usual[name] if key is None else found[key] for name, key in keys.items()}


def as_words(precision_map: PrecisionMap) -> str:
    """As --precision-map takes it."""
    return ",".join(f"{key}={mode}" for key, mode in precision_map)
