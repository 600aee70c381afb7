"""Maps in few words, which say the same as the name of every layer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fp8bench.protocols import Layer, key_of
from fp8bench.registry import workloads
from fp8bench.sensitivity.maps import as_words, map_of, shortened

LAYERS = workloads.get("transformer").layers({"size": "nano"})
NAMES = [layer.name for layer in LAYERS]
MODES = "fp8", "bf16"


def but(*gone: str) -> str:
    """The map of all layers but those, as words."""
    left = [name for name in NAMES if not any(name == one or name.startswith(f"{one}.") for one in gone)]
    return as_words(map_of(LAYERS, left, MODES, "bf16"))


def test_maps_are_as_short_as_one_would_write_them() -> None:
    """The head stays high unless it is said to be low; whole kinds and whole blocks have one word."""
    assert but() == "head=fp8"
    assert but("head") == ""
    assert but("blocks.0.mlp.up") == "head=fp8,blocks.0.mlp.up=bf16"
    assert but("blocks.0.mlp", "blocks.1.mlp", "head") == "mlp=bf16"
    assert but("blocks.1", "head") == "blocks.1=bf16"
    assert but("blocks.1.attn", "head") == "blocks.1.attn=bf16"
    assert but(*NAMES) == "attn=bf16,mlp=bf16"


def test_another_reference_is_named_for_the_head_too() -> None:
    """What stays high without a map has fp8's carrier, and not the reference."""
    assert as_words(map_of(LAYERS, NAMES[:-1], ("fp8", "fp32"), "bf16")) == "head=fp32"
    assert as_words(map_of(LAYERS, NAMES, ("fp8", "fp32"), "bf16")) == "head=fp8"


def said(layer: Layer, keys: dict[str, str], usual: dict[str, str]) -> str:
    key = key_of(layer, keys)
    return usual[layer.name] if key is None else keys[key]


@given(st.lists(st.booleans(), min_size=len(NAMES), max_size=len(NAMES)), st.sampled_from(["bf16", "fp32"]))
def test_a_short_map_says_what_every_name_would(choice: list[bool], reference: str) -> None:
    """For every set of layers of the model."""
    low = {name for name, chosen in zip(NAMES, choice, strict=True) if chosen}
    usual = {layer.name: "bf16" if layer.high else "fp8" for layer in LAYERS}
    keys = dict(map_of(LAYERS, low, ("fp8", reference), "bf16"))
    assert {layer.name: said(layer, keys, usual) for layer in LAYERS} == {
        name: "fp8" if name in low else reference for name in NAMES
    }


PARTS = st.lists(st.sampled_from(["a", "b", "ab", "0", "1"]), min_size=1, max_size=3).map(".".join)
WILD = st.lists(st.tuples(PARTS, st.sampled_from(["a", "k", "0"]), st.booleans()), min_size=1, max_size=8).map(
    lambda found: [Layer(*one) for one in {one[0]: one for one in found}.values()]
)


@given(WILD, st.data())
def test_wild_names_and_kinds_are_no_trouble(layers: list[Layer], data: st.DataObject) -> None:
    """Kinds called like names, layers inside of layers, three precisions."""
    modes = st.sampled_from(["x", "y", "z"])
    wanted, usual = ({layer.name: data.draw(modes) for layer in layers} for _ in range(2))
    keys = dict(shortened(layers, wanted, usual))
    assert {layer.name: said(layer, keys, usual) for layer in layers} == wanted
