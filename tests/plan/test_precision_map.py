"""Which layer of a case obeys which key of a precision map, and which cases take their scales from data."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8bench.errors import UsageError
from fp8bench.model import Case, Params, Plan, Request, StaticScales
from fp8bench.plan.checked_workload import merge_layers
from fp8bench.plan.make import check_request, make_plan
from fp8bench.protocols import Arithmetic, Layer, Operand, Role, Setup, find_map_key, list_map_keys
from fp8bench.registry import workloads
from tests.counts import for_each
from tests.facts import CPU
from tests.plans import cases_of

UP = Layer("blocks.1.mlp.up", "mlp")
SMALL: Params = (("size", "nano"),)


@for_each(
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
    assert find_map_key(UP, keys) == wanted
    assert find_map_key(UP, keys[::-1]) == wanted


def test_the_keys_of_layers_are_kinds_names_and_front_parts() -> None:
    layers = merge_layers(workloads.get("transformer"), [SMALL])
    keys = list(list_map_keys(layers))
    assert keys[:5] == ["attn", "blocks", "blocks.0", "blocks.0.attn", "blocks.0.attn.qkv"]
    # The head is also called output; embedding (embed), residual, logits and norms have only their names and kinds.
    assert len(keys) == 3 + 1 + 2 * (1 + 2 + 4) + 1 + 2 + 1 + 1 + 1 + 2 * 2
    assert find_map_key(Layer("blocks.0.norm_attn", "norm", product=False), ("blocks.0", "blocks")) is None
    for key in keys:
        assert any(find_map_key(layer, (key,)) for layer in layers), key


WORDS = st.lists(st.sampled_from(["a", "b", "ab", "0", "1", "10"]), min_size=1, max_size=4).map(".".join)


@given(WORDS, st.sets(WORDS, max_size=6))
def test_a_key_fits_by_whole_words(name: str, keys: set[str]) -> None:
    parts = name.split(".")
    fitting = [key for key in keys if key.split(".") == parts[: len(key.split("."))]]
    longest = max(fitting, key=lambda key: len(key.split(".")), default="kind" if "kind" in keys else None)
    assert find_map_key(Layer(name, "kind"), keys) == longest


class Named(Arithmetic):
    """Remembers which layer it was made for."""

    def __init__(self, mode: str, name: str = "") -> None:
        self.mode = mode
        self.name = name

    def layer(self, name: str) -> Arithmetic:
        return Named(self.mode, name)

    def cast(self, tensor: object, role: Role) -> Operand:
        raise NotImplementedError

    def product(self, a: Operand, b: Operand, dtype: object) -> object:  # type: ignore[override]
        raise NotImplementedError


def test_each_layer_gets_an_arithmetic_of_its_own() -> None:
    case = Case("transformer", SMALL, "fp8", "cpu")
    setup = Setup(case, CPU, 0, Named("own"), Named("high"), {"attn": Named("kind"), "blocks.1": Named("block")})
    choose = workloads.get("transformer").arithmetics(setup)
    wanted = {
        "blocks.0.attn.qkv": "kind",
        "blocks.0.mlp.up": "own",
        "blocks.1.attn.qkv": "block",
        "blocks.1.mlp.up": "block",
        "head": "high",
    }
    found = {name: choose(name) for name in wanted}
    assert {name: (one.mode, one.name) for name, one in found.items() if isinstance(one, Named)} == {
        name: (mode, name) for name, mode in wanted.items()
    }
    mapped = replace(setup, layers={"head": Named("low")})
    head = workloads.get("transformer").arithmetics(mapped)("head")
    assert isinstance(head, Named) and head.mode == "low"


def static_plan(suite: str, *dtypes: str, **request: object) -> Plan:
    return make_plan(Request(suite, dtypes, **{"static_scales": 8, **request}), (CPU,), compares=False)  # type: ignore[arg-type]


def test_scales_from_data_are_for_cases_with_one_scale_a_tensor() -> None:
    plan = static_plan("transformer", "bf16", "fp8", "mxfp8", "fp8-delayed", refresh_scales=100, saturation_bound=0.1)
    modes = [planned.case.mode for planned in plan.groups[0].cases]
    rule = "static=8:refresh=100:bound=0.001"
    assert modes == ["bf16", f"fp8+{rule}", "mxfp8", f"fp8-delayed+{rule}"]
    assert plan.groups[0].cases[1].case.static == StaticScales(8, 100, 0.001)
    assert plan.notes == (
        "--static-scales has no effect on mxfp8, which has no float32 scale per tensor",
        f"static scales replace delayed scaling in {modes[3].partition('+')[0]}",
    )


def test_one_layer_with_such_scales_is_enough() -> None:
    plan = static_plan("mlp", "fp32", "bf16", precision_map=(("up", "fp8"),))
    assert [one.case.mode for one in plan.groups[0].cases] == ["fp32", "bf16{up=fp8}+static=8"]
    with pytest.raises(UsageError, match="have no effect"):
        static_plan("mlp", "fp32", "fp8", precision_map=(("up", "bf16"), ("down", "mxfp8")))


def test_suites_without_layers_are_named_among_those_that_have_some() -> None:
    plan = static_plan("mlp,gemm", "fp32", "fp8")
    assert plan.notes == ("--static-scales has no effect on suite gemm, which has no layers with scales",)
    assert {planned.case.workload for planned in cases_of(plan) if planned.case.static} == {"mlp"}
    with pytest.raises(UsageError, match=r"Add a precision with such scales \(.*fp8.*\), or leave the option out"):
        static_plan("gemm", "fp8")


def test_scales_cannot_be_renewed_in_a_compiled_graph() -> None:
    compiled = (("compile", ("yes",)),)
    for request, skipped in (({}, False), ({"refresh_scales": 5}, True), ({"saturation_bound": 1.0}, True)):
        case = static_plan("transformer", "fp32", "fp8", axes=compiled, **request).groups[0].cases[1]
        assert case.skip.startswith("scales cannot be renewed in a compiled graph") is skipped


@for_each("options", [{"refresh_scales": 3}, {"saturation_bound": 0.5}], ids=str)
def test_what_renews_scales_needs_some(options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=r"Add --static-scales N, or omit --(refresh-scales|saturation-bound)"):
        check_request(Request("mlp", **options))  # type: ignore[arg-type]
