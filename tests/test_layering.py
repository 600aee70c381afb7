"""Which layer of a case obeys which key of a precision map."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8bench.layering import layers_of
from fp8bench.model import Case, DeviceFacts, Params
from fp8bench.protocols import Arithmetic, Layer, Operand, Role, Setup, key_of, keys_of
from fp8bench.registry import workloads

CPU = DeviceFacts("cpu", 0, "a processor", 16 << 30, "2.13.0")
UP = Layer("blocks.1.mlp.up", "mlp")
SMALL: Params = (("size", "nano"),)


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ((), None),
        (("attn", "head"), None),
        (("mlp",), "mlp"),
        (("mlp", "blocks"), "blocks"),
        (("blocks.1", "mlp", "blocks"), "blocks.1"),
        (("blocks.1.mlp", "blocks.1", "mlp"), "blocks.1.mlp"),
        (("blocks.1.mlp.up", "blocks.1.mlp", "mlp"), "blocks.1.mlp.up"),
        (("blocks.1.mlp.u", "blocks.10", "blocks.0", "locks.1"), None),
        (("up", "mlp.up"), None),
    ],
)
def test_the_longest_name_wins_over_the_kind(keys: tuple[str, ...], wanted: str | None) -> None:
    """Front parts end where a word does; what comes first in the map does not matter."""
    assert key_of(UP, keys) == wanted
    assert key_of(UP, keys[::-1]) == wanted


def test_the_keys_of_layers_are_kinds_names_and_front_parts() -> None:
    """And each of them is obeyed by some layer, where it stands alone."""
    layers = layers_of(workloads.get("transformer"), [SMALL])
    keys = list(keys_of(layers))
    assert keys[:5] == ["attn", "blocks", "blocks.0", "blocks.0.attn", "blocks.0.attn.qkv"]
    assert len(keys) == 3 + 1 + 2 * (1 + 2 + 4)
    assert all(any(key_of(layer, (key,)) for layer in layers) for key in keys)


WORDS = st.lists(st.sampled_from(["a", "b", "ab", "0", "1", "10"]), min_size=1, max_size=4).map(".".join)


@given(WORDS, st.sets(WORDS, max_size=6))
def test_a_key_fits_by_whole_words(name: str, keys: set[str]) -> None:
    """Against the definition by lists of words."""
    parts = name.split(".")
    fitting = [key for key in keys if key.split(".") == parts[: len(key.split("."))]]
    longest = max(fitting, key=lambda key: len(key.split(".")), default="kind" if "kind" in keys else None)
    assert key_of(Layer(name, "kind"), keys) == longest


class Named(Arithmetic):
    """Remembers which layer it was made for."""

    def __init__(self, mode: str, name: str = "") -> None:
        self.mode, self.name = mode, name

    def layer(self, name: str) -> Arithmetic:
        return Named(self.mode, name)

    def cast(self, tensor: object, role: Role) -> Operand:
        raise NotImplementedError

    def product(self, a: Operand, b: Operand, dtype: object) -> object:  # type: ignore[override]
        raise NotImplementedError


def test_each_layer_gets_an_arithmetic_of_its_own() -> None:
    """The case's, the one that its key has, or the high one where it stays high; made for that layer."""
    case = Case("transformer", SMALL, "fp8", "cpu")
    setup = Setup(case, CPU, 0, Named("own"), Named("high"), {"attn": Named("kind"), "blocks.1": Named("block")})
    choose = workloads.get("transformer").arithmetics(setup)
    wanted = {
        "blocks.0.attn.qkv": "kind", "blocks.0.mlp.up": "own", "blocks.1.attn.qkv": "block", "blocks.1.mlp.up": "block",
        "head": "high",
    }  # fmt: skip
    found = {name: choose(name) for name in wanted}
    assert {name: (one.mode, one.name) for name, one in found.items() if isinstance(one, Named)} == {
        name: (mode, name) for name, mode in wanted.items()
    }
    mapped = replace(setup, layers={"head": Named("low")})
    head = workloads.get("transformer").arithmetics(mapped)("head")
    assert isinstance(head, Named) and head.mode == "low"
