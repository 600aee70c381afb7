"""The matrix product: its shapes, its phases, its error."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8bench.model import Level, Request, Scalar
from fp8bench.nn.sizes import MODELS, OPERAND_ROLES, parse_model_products
from fp8bench.numerics import products
from fp8bench.numerics.distributions import apply_layout
from fp8bench.plan.make import make_plan
from fp8bench.profiler.allocations import AllocationStream, PhaseStart, find_memory_course
from fp8bench.protocols import Operand, Role, Setup, SilentPhases
from fp8bench.registry import precisions
from fp8bench.workloads.gemm import LARGEST_SIDE, Gemm, parse_gemm_sides, parse_layouts, parse_shape
from tests.counts import for_each
from tests.facts import B200
from tests.workloads.steps import CPU, H200, phases, small


def setup_for(precision: str = "bf16", seed: int = 0, **changes: Scalar) -> Setup:
    return small("gemm", precision, seed, **changes)


@for_each(
    ("text", "shape"),
    [
        ("512", "512x512x512"),
        ("1x2048x512", "1x2048x512"),
        ("007", "7x7x7"),
        ("llama3-8b", "llama3-8b"),
        ("hidden:64/ffn:128/heads:2", "hidden:64/ffn:128/heads:2"),
        (str(LARGEST_SIDE), f"{LARGEST_SIDE}x{LARGEST_SIDE}x{LARGEST_SIDE}"),
        ("sweep", "sweep"),
        ("sweep:nk", "sweep:nk"),
    ],
)
def test_shapes_that_can_be_meant(text: str, shape: str) -> None:
    assert parse_shape(text) == shape


@for_each(
    "text",
    [
        "sweep:",
        "sweep:x",
        "sweep:mm",
        "Sweep",
        "",
        "x",
        "1x2",
        "1x2x3x4",
        "0",
        "-1",
        "1.5",
        "1xx3",
        "²",
        "٣",
        str(LARGEST_SIDE + 1),
        "gpt3",
        "hidden:64/ffn:128/heads:x",
    ],
)
def test_shapes_that_cannot(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_shape(text)


def expand(shape: str, product: str = "auto", tokens: int = 512, operands: str = "cast") -> list[dict[str, Scalar]]:
    params: dict[str, Scalar] = {
        "shape": parse_shape(shape),
        "product": product,
        "tokens": tokens,
        "operands": operands,
    }
    return [dict(one) for one in Gemm().expand(params)]


def swept(shape: str, base: str = "128", factor: int = 2, **more: Scalar) -> list[dict[str, Scalar]]:
    params = {"shape": shape, "product": "auto", "operands": "auto", "tokens": 1, "base": parse_gemm_sides(base)}
    return [dict(one) for one in Gemm().expand({**params, "factor": factor, **more})]


def test_a_sweep_varies_one_side_at_a_time() -> None:
    sizes = [16, 32, 64, 128, 256, 512]
    cases = swept("sweep:m", product="forward", operands="cast")
    assert [(one["m"], one["n"], one["k"]) for one in cases] == [(size, 128, 128) for size in sizes]
    cases = swept("sweep:k", "32x64x16", 4, product="forward", operands="ready")
    assert [(one["m"], one["n"], one["k"]) for one in cases] == [(32, 64, 16), (32, 64, 64)]
    every = swept("sweep")
    assert len(every) == 3 * 6 * len(OPERAND_ROLES) * 2
    assert {(one["product"], one["operands"]) for one in every} == {
        (product, operands) for product in OPERAND_ROLES for operands in ("cast", "ready")
    }


def test_a_quick_sweep_has_fewer_sizes() -> None:
    asked = Request("gemm", axes=(("shape", ("sweep:m",)), ("product", ("forward",)), ("operands", ("cast",))))
    plain, quick = (make_plan(one, [CPU]) for one in (asked, replace(asked, quick=True)))
    given = make_plan(replace(asked, quick=True, axes=(*asked.axes, ("factor", ("8",)))), [CPU])
    sizes = [[dict(group.cases[0].case.params)["m"] for group in plan.groups] for plan in (plain, quick, given)]
    assert sizes == [[16 << power for power in range(8)], [16, 64, 256, 1024], [16, 128, 1024]]


@pytest.mark.parametrize("model", MODELS)
def test_a_model_is_three_products_a_layer(model: str) -> None:
    cases = expand(model, tokens=100)
    assert len(cases) == 3 * len(MODELS[model])
    for layer, (outputs, inputs) in MODELS[model].items():
        own = [case for case in cases if case["layer"] == f"{model}/{layer}"]
        assert [case["product"] for case in own] == list(OPERAND_ROLES)
        assert {(case["m"], case["n"], case["k"]) for case in own} == {
            (100, outputs, inputs),
            (100, inputs, outputs),
            (outputs, inputs, 100),
        }
        assert {Gemm().work(case).flops for case in own} == {2.0 * 100 * outputs * inputs}
    assert len(expand(model, "input-gradient")) == len(MODELS[model])


def test_the_shapes_of_models_are_those_of_their_papers() -> None:
    assert MODELS["gpt2"]["qkv"] == (3 * 768, 768)
    assert MODELS["llama3-8b"]["qkv"] == (4096 + 2 * 8 * 128, 4096)
    assert MODELS["llama3-70b"]["gate_up"] == (2 * 28672, 8192)
    assert MODELS["qwen3-32b"]["qkv"] == ((64 + 2 * 8) * 128, 5120) and MODELS["qwen3-32b"]["out"] == (5120, 8192)
    assert MODELS["qwen2.5-7b"]["qkv"] == (3584 + 2 * 4 * 128, 3584)
    assert MODELS["deepseek-v3"]["q_a_kv_a"] == (1536 + 512 + 64, 7168)
    assert MODELS["deepseek-v3"]["kv_b"] == (128 * (128 + 128), 512)


def test_sizes_give_the_products_of_the_model_that_they_describe() -> None:
    sizes = "hidden:4096/ffn:14336/heads:32/kv:8/tokens:100"
    described = expand(sizes)
    named = expand("llama3-8b", tokens=100)
    sides = [[(case["m"], case["n"], case["k"], case["product"]) for case in cases] for cases in (described, named)]
    assert sides[0] == sides[1] and described[0]["layer"] == f"{sizes}/qkv"
    assert parse_model_products("hidden:5120/ffn:25600/heads:64/kv:8/head:128").features == MODELS["qwen3-32b"]


@for_each(
    ("text", "words"),
    [
        ("hidden:64/ffn:128", "need heads:N"),
        ("hidden:64/ffn:128/heads:3", "3 heads do not divide hidden:64"),
        ("hidden:64/ffn:128/heads:2/layers:3", "'layers:3' is not a size: use each of hidden:N, ffn:N"),
        ("hidden:64/hidden:64/ffn:128/heads:2", "at most once"),
        ("hidden:0/ffn:128/heads:2", "from 1 to"),
        ("llama3", "sweep, hidden:4096/ffn:14336/heads:32/kv:8, or one of gpt2, .*; the nearest is 'llama3-8b'"),
        ("12x", "deepseek-v3$"),
    ],
)
def test_sizes_that_are_no_model_are_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_shape(text)


def test_a_model_may_be_asked_for_by_that_name() -> None:
    """`--set model=` adds to `--set shape=`, and neither brings the shapes that are measured without both."""
    asked = Request("gemm", axes=(("model", ("GPT2",)), ("shape", ("8",)), ("product", ("forward",))))
    layers = [dict(group.cases[0].case.params).get("layer") for group in make_plan(asked, [CPU]).groups]
    assert layers == [None, "gpt2/qkv", "gpt2/out", "gpt2/up", "gpt2/down"]


def test_operands_are_cast_in_every_step_or_once_before_it() -> None:
    assert phases(Gemm(), setup_for("fp8")) == ["cast", "gemm"]
    assert phases(Gemm(), setup_for("fp8", operands="ready")) == ["gemm"]
    assert phases(Gemm(), setup_for("fp32")) == ["gemm"]


@for_each("product", OPERAND_ROLES)
def test_each_product_casts_its_operands_by_their_roles(product: str) -> None:
    """Operands that a layer transposes are transposed here too, because recipes treat them differently."""
    setup = setup_for("fp8", product=product)
    seen: list[tuple[str, Role]] = []
    for how in ("cast", "cast_transpose"):
        plain = getattr(setup.arithmetic, how)

        def watch(tensor: torch.Tensor, role: Role, how=how, plain=plain) -> Operand:  # type: ignore[no-untyped-def]
            seen.append((how, role))
            return plain(tensor, role)  # type: ignore[no-any-return]

        setattr(setup.arithmetic, how, watch)
    Gemm().step(Gemm().prepare(setup), SilentPhases())
    turned = {"input-gradient": (Role.WEIGHT,), "weight-gradient": (Role.GRADIENT, Role.INPUT)}.get(product, ())
    assert seen == [("cast_transpose" if role in turned else "cast", role) for role in OPERAND_ROLES[product]]


@for_each(("precision", "low", "high"), [("fp32", 0, 1e-6), ("bf16", 1e-3, 1e-2), ("fp8", 1e-2, 0.1)])
def test_the_error_is_that_of_numpy_in_fp64(precision: str, low: float, high: float) -> None:
    setup = setup_for(precision, seed=5)
    found = Gemm().error(setup)["product_error"]
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randn(rows, 64, generator=generator) for rows in (24, 40))
    exact = a.numpy().astype(np.float64) @ b.numpy().astype(np.float64).T
    arithmetic = setup.arithmetic
    carried = [one.to(arithmetic.carrier) for one in (a, b)]
    product = arithmetic.product(
        arithmetic.cast(carried[0], Role.INPUT), arithmetic.cast(carried[1], Role.WEIGHT), arithmetic.carrier
    )
    wanted = np.linalg.norm(product.float().numpy().astype(np.float64) - exact) / np.linalg.norm(exact)
    assert found == pytest.approx(wanted, rel=1e-9)
    assert low <= found < high


def test_the_error_of_the_kernel_is_what_it_adds_to_the_casts() -> None:
    """In fp32 from fp32 sums; in bf16 and emulated fp8 also from rounding the result to bf16."""
    found = {precision: Gemm().error(setup_for(precision)) for precision in ("fp32", "bf16", "fp8")}
    assert found["fp32"]["kernel_error"] == found["fp32"]["product_error"] < 1e-6
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, 64, generator=generator).to(torch.bfloat16).double() for rows in (24, 40))
    exact = (a @ b.t()).numpy()
    rounded = exact.astype(ml_dtypes.bfloat16).astype(np.float64)
    wanted = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
    assert found["bf16"]["kernel_error"] == pytest.approx(wanted, rel=0.01)
    assert found["fp8"]["kernel_error"] == pytest.approx(wanted, rel=0.1)
    assert found["bf16"]["product_error"] > 1.5 * wanted and found["fp8"]["product_error"] > 10 * wanted


def test_the_error_of_a_large_product_is_that_of_some_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Gemm().error(setup_for("fp8", m=256))["product_error"]
    monkeypatch.setattr(products.choose_product_error_rows, "__defaults__", (2.0 * 40 * 64 * 16,))
    some = Gemm().error(setup_for("fp8", m=256))["product_error"]
    assert some != whole and some == pytest.approx(whole, rel=0.2)


@for_each(("m", "n", "k", "fits"), [(1, 16, 16, True), (16, 8, 16, False), (16, 16, 8, False)])
def test_a_native_product_that_does_not_fit_says_why(m: int, n: int, k: int, fits: bool) -> None:
    sizes = {"m": m, "n": n, "k": k}
    support = Gemm().support(sizes, precisions.get("fp8"), H200)
    assert support.level is (Level.NATIVE if fits else Level.REFUSED)
    assert fits or (f"K={k}" in support.reason and f"N={n}" in support.reason)
    assert Gemm().support(sizes, precisions.get("bf16"), H200).level is Level.NATIVE
    assert Gemm().support(sizes, precisions.get("fp8"), CPU).level is Level.EMULATED


def test_two_operands_are_never_held_in_fp32_at_once() -> None:
    stream = AllocationStream("cpu")
    stream.start()
    stream.note(PhaseStart("preparing"))
    Gemm().prepare(setup_for("bf16", m=512, n=512, k=512))
    found = find_memory_course(stream.stop() or [])
    elements = 512 * 512
    assert found is not None and 8 * elements <= found.peak < 9 * elements


LAYOUTS = ("transposed", "padded", "strided", "transposed/contiguous", "contiguous/strided", "padded/transposed")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operands_lie_as_their_layout_says(layout: str) -> None:
    gap = 64 + 64  # next to k
    strides = {"contiguous": (64, 1), "padded": (gap, 1), "strided": (128, 2)}
    words = layout.split("/") * (1 if "/" in layout else 2)
    state, plain = (Gemm().prepare(small("gemm", "fp32", layout=one)) for one in (layout, "contiguous"))
    for word, found, usual, rows in zip(words, (state.a, state.b), (plain.a, plain.b), (24, 40), strict=True):
        assert found.stride() == strides.get(word, (1, rows)) and torch.equal(found, usual)


@pytest.mark.parametrize("precision", ["fp8", "fp8-rowwise", "fp8-block", "mxfp8"])
def test_native_codes_are_row_by_row_whatever_they_are_cast_from(precision: str) -> None:
    arithmetic = precisions.get(precision).arithmetic(H200 if precision == "fp8-block" else B200)
    source = torch.randn(256, 384, generator=torch.Generator().manual_seed(3)).bfloat16()
    usual = arithmetic.cast(source, Role.INPUT)
    for layout in ("transposed", "padded", "strided"):
        found = arithmetic.cast(apply_layout(source, layout), Role.INPUT)
        assert found.data.is_contiguous() and found.data.stride() == usual.data.stride()
        assert torch.equal(found.data.view(torch.uint8), usual.data.view(torch.uint8))
        assert found.scale is not None and usual.scale is not None
        assert found.scale.stride() == usual.scale.stride()
        assert torch.equal(found.scale.reshape(-1).view(torch.uint8), usual.scale.reshape(-1).view(torch.uint8))


def test_a_layout_said_twice_is_said_once_and_the_usual_one_is_no_parameter() -> None:
    assert parse_layouts("strided/strided") == "strided" and parse_layouts("padded/strided") == "padded/strided"
    plan = make_plan(Request("gemm", ("fp32",), axes=(("shape", ("8",)), ("layout", ("contiguous", "strided")))), [CPU])
    assert [dict(group.cases[0].case.params).get("layout") for group in plan] == [None, "strided"]


@pytest.mark.parametrize(
    ("precision", "changes", "words"),
    [
        ("fp8", {"operands": "ready"}, "codes are written the way"),
        ("fp32", {"operands": "ready"}, ""),
        ("fp32", {"m": 1}, "operand a is a single row"),
        ("fp32", {"m": 1, "layout": "contiguous/transposed"}, ""),
        ("fp32", {"n": 1}, "operand b is a single row"),
        ("bf16", {"m": 1, "layout": "strided"}, ""),
        ("served:weights=int4", {}, "weights are stored row by row"),
        ("served:weights=int4", {"layout": "strided/contiguous"}, ""),
    ],
)
def test_layouts_that_would_change_nothing_are_refused(precision: str, changes: dict[str, Scalar], words: str) -> None:
    params = {"m": 24, "n": 40, "k": 64, "product": "forward", "operands": "cast", "layout": "transposed", **changes}
    found = Gemm().support(params, precisions.get(precision), CPU)
    assert (found.level is Level.REFUSED) == bool(words) and words in found.reason
