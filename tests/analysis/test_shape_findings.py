"""Products, modes and devices put together; and the lint against what the suites refuse themselves."""

from __future__ import annotations

import itertools

import pytest

from fp8bench.errors import UsageError
from fp8bench.features.lint_shapes.job import USUAL_MODES, examine, modes_of, shapes_of_model
from fp8bench.features.lint_shapes.view import Finding, LinearShape, Outcome, homeless
from fp8bench.formats.hardware import A100, B200, CLASSES, CPU, H100, L40S, MI300X, MI350X, RTX5090, DeviceClass
from fp8bench.model import DeviceFacts, Level, Scalar
from fp8bench.nn.shared_precisions import RecipePrecision
from fp8bench.nn.sizes import PRODUCTS
from fp8bench.registry import precisions, workloads

FACTS = {
    A100: DeviceFacts("cuda", 0, "A100", 80 << 30, "2.13.0", (8, 0), "13.0"),
    L40S: DeviceFacts("cuda", 0, "L40S", 48 << 30, "2.13.0", (8, 9), "13.0"),
    H100: DeviceFacts("cuda", 0, "H100", 80 << 30, "2.13.0", (9, 0), "13.0"),
    B200: DeviceFacts("cuda", 0, "B200", 180 << 30, "2.13.0", (10, 0), "13.0"),
    RTX5090: DeviceFacts("cuda", 0, "RTX 5090", 32 << 30, "2.13.0", (12, 0), "13.0"),
    MI300X: DeviceFacts("cuda", 0, "MI300X", 192 << 30, "2.13.0", (9, 4), None, "7.0", "gfx942"),
    MI350X: DeviceFacts("cuda", 0, "MI350X", 288 << 30, "2.13.0", (9, 5), None, "7.0", "gfx950"),
    CPU: DeviceFacts("cpu", 0, "a processor", 16 << 30, "2.13.0"),
}
SIDES = (1, 16, 17, 24, 32, 48, 50257, 4096)


def lint(shape: LinearShape, mode: str, device: DeviceClass, kind: str = "forward") -> Finding:
    (found,) = examine([shape], [kind], modes_of([mode], [device]), [device])
    return found


def scaled_modes() -> list[str]:
    """Every mode that is a recipe, as it is by default."""
    return [name for name in precisions.names() if isinstance(precisions.get(name), RecipePrecision)]


def test_every_class_has_facts_to_ask_the_suites_with() -> None:
    """A new class gets its line above."""
    assert set(FACTS) == set(CLASSES)


@pytest.mark.parametrize("device", CLASSES, ids=lambda one: one.name)
@pytest.mark.parametrize("mode", scaled_modes())
def test_what_a_suite_takes_natively_the_lint_takes_and_the_other_way_round(mode: str, device: DeviceClass) -> None:
    """The suite gemm refuses by `Precision.multiples`, the lint by its own rules: where both speak they agree."""
    precision, facts = precisions.get(mode), FACTS[device]
    if precision.support(facts).level is not Level.NATIVE:
        return
    gemm = workloads.get("gemm")
    for m, n, k in itertools.product(SIDES, repeat=3):
        found = lint(LinearShape("", m, n, k), mode, device)
        support = gemm.support({"m": m, "n": n, "k": k, "product": "forward", "operands": "cast"}, precision, facts)

        assert found.torch.outcome in (Outcome.FITS, Outcome.PAD)
        assert (found.torch.outcome is Outcome.FITS) == (support.level is Level.NATIVE), (m, n, k)


def test_some_mode_is_native_somewhere_so_that_the_agreement_is_tested() -> None:
    """And where fp8bench has a mode natively, the lint finds the product in all three of its forms."""
    pairs = [
        (mode, device) for mode in scaled_modes() for device in CLASSES
        if precisions.get(mode).support(FACTS[device]).level is Level.NATIVE
    ]  # fmt: skip
    assert ("fp8", H100) in pairs
    for mode, device in pairs:
        for kind in PRODUCTS:
            assert lint(LinearShape("", 64, 64, 64), mode, device, kind).torch.outcome is Outcome.FITS, (mode, device)


@pytest.mark.parametrize("tokens", [24, 32])
def test_the_mlp_suite_agrees_on_a_whole_block(tokens: int) -> None:
    """It is refused as soon as one of its six products is."""
    precision, mlp = precisions.get("fp8"), workloads.get("mlp")
    for width, hidden in itertools.product((16, 24, 64), repeat=2):
        params: dict[str, Scalar] = {
            "tokens": tokens,
            "width": width,
            "hidden": hidden,
            "gated": "no",
            "pass": "training",
        }
        shapes = [LinearShape("up", tokens, hidden, width), LinearShape("down", tokens, width, hidden)]
        found = examine(shapes, tuple(PRODUCTS), modes_of(["fp8"], [H100]), [H100])
        fits = all(one.torch.outcome is Outcome.FITS for one in found)

        assert fits == (mlp.support(params, precision, FACTS[H100]).level is Level.NATIVE)


def test_each_product_contracts_over_another_side() -> None:
    """An odd vocabulary spoils the forward product by N and the input gradient by K; odd tokens the weight gradient."""
    head = LinearShape("head", 8192, 50257, 768)
    by_kind = {kind: lint(head, "fp8", H100, kind) for kind in PRODUCTS}

    assert by_kind["forward"].torch.padded == (8192, 50272, 768)
    assert by_kind["input-gradient"].torch.padded == (8192, 768, 50272)
    assert by_kind["weight-gradient"].torch.outcome is Outcome.FITS
    odd = lint(LinearShape("out", 100, 768, 768), "fp8", H100, "weight-gradient")
    assert odd.torch.padded == (768, 768, 112)


def test_what_padding_costs_by_hand() -> None:
    """FLOPs as the volumes are; bytes of codes, scales and a bf16 output."""
    one = lint(LinearShape("", 16, 20, 40), "mxfp8", B200).torch

    assert one.padded == (16, 32, 64)
    assert one.more_flops == pytest.approx(16 * 32 * 64 / (16 * 20 * 40) - 1)
    before = (16 + 20) * 40 + (16 + 20) * 2 + 2 * 16 * 20
    after = (16 + 32) * 64 + (16 + 32) * 2 + 2 * 16 * 32
    assert one.more_bytes == pytest.approx(after / before - 1)


def test_a_padded_product_fits() -> None:
    """Padding once is enough, for torch and for Transformer Engine."""
    for mode, device in itertools.product(scaled_modes(), CLASSES):
        for m, n, k in itertools.product((1, 17, 50257), repeat=3):
            found = lint(LinearShape("", m, n, k), mode, device)
            for judgement, again in ((found.torch, "torch"), (found.te, "te")):
                if judgement is not None and judgement.padded is not None:
                    padded = lint(LinearShape("", *judgement.padded), mode, device)
                    assert getattr(padded, again).outcome is Outcome.FITS, (mode, device, judgement.padded)


def test_options_of_modes_count() -> None:
    """E5M2 everywhere has no product on NVIDIA; a weight gradient left in bf16 is none of these products."""
    shape = LinearShape("", 64, 64, 64)
    assert lint(shape, "fp8:formats=e5m2", H100).torch.outcome is Outcome.REFUSED
    assert lint(shape, "fp8-e5m2", MI350X).torch.outcome is Outcome.FITS
    modes = modes_of(["fp8:weight-gradient=bf16"], [H100])
    assert [one.kind for one in examine([shape], tuple(PRODUCTS), modes, [H100])] == ["forward", "input-gradient"]


def test_without_modes_those_are_taken_that_a_device_has() -> None:
    """All usual ones where none has any; a mode that scales nothing is refused with those that do."""
    assert [one.mode for one in modes_of([], [H100])] == ["fp8", "fp8-rowwise", "fp8-block"]
    assert [one.mode for one in modes_of([], [CPU])] == list(USUAL_MODES)
    assert "mxfp6" not in [one.mode for one in modes_of([], CLASSES)]
    assert [one.mode for one in modes_of(["fp4", "nvfp4"], [CPU])] == ["nvfp4"]
    with pytest.raises(UsageError, match="bf16 scales nothing"):
        modes_of(["bf16"], [H100])


def test_homeless_products_fit_nowhere() -> None:
    """One device that takes a product as it is will do."""
    shapes = shapes_of_model("llama3-8b", None)
    kinds = tuple(PRODUCTS)
    assert not homeless(examine(shapes, kinds, modes_of(["fp8-block"], [H100]), [H100, B200]))
    lost = homeless(examine(shapes, kinds, modes_of(["fp8-block"], [B200]), [B200]))
    assert len(lost) == 3 * len(shapes)
