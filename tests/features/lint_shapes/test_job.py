"""Files of shapes, as lines or CSV, and nonsense in them.

Then products, modes and devices put together; and the lint against what the suites refuse themselves.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8bench.errors import UsageError
from fp8bench.features.lint_shapes.job import (
    MOST_SHAPES,
    USUAL_MODES,
    LinearShape,
    ShapeFinding,
    ShapeOutcome,
    judge_all,
    modes_of,
    shapes_of_file,
    shapes_of_model,
)
from fp8bench.formats.hardware import A100, B200, CLASSES, CPU, H100, L40S, MI300X, MI350X, RTX5090, DeviceClass
from fp8bench.model import DeviceFacts, Level, Scalar
from fp8bench.nn.shared_precisions import RecipePrecision
from fp8bench.nn.sizes import PRODUCTS
from fp8bench.registry import precisions, workloads
from tests.counts import for_each

WANTED = [LinearShape("out", 8192, 4096, 1024), LinearShape("17x33x48", 17, 33, 48)]


def file_of(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


BOTH = [LinearShape("a", 1, 2, 3, "fp32", True), LinearShape("b", 1, 2, 3)]


@for_each(
    ("name", "text", "shapes"),
    [
        ("a.txt", "# tokens, features out, in\n8192x4096x1024 out\n\n 17X33x48   # no name\n", WANTED),
        ("a", "\ufeff8192*4096*1024 out\n17x33x48", WANTED),
        ("a.csv", "m,n,k,name\n8192,4096,1024,out\n\n17,33,48,\n", WANTED),
        ("a.CSV", 'name, K ,n,m\n"out",1024,4096,8192\n,48,33,17\n', WANTED),
        ("b.csv", "m,n,k,name,output,layout\n1,2,3,a,fp32,row\n1,2,3,b,,\n", BOTH),
        ("c.txt", "1x2x3 \x1b[31mred", [LinearShape("[31mred", 1, 2, 3)]),  # nothing that a terminal obeys
    ],
)
def test_lines_and_csv_say_the_same(tmp_path: Path, name: str, text: str, shapes: list[LinearShape]) -> None:
    assert shapes_of_file(file_of(tmp_path, name, text)) == shapes


@for_each(
    ("name", "text", "said"),
    [
        ("a.txt", "8x8x8\n12x3 short\n", "a.txt:2: '12x3' is no shape"),
        ("a.txt", "0x3x4", "a.txt:1: M is '0'"),
        ("a.txt", "1x-3x4", "a.txt:1: N is '-3'"),
        ("a.txt", "1x2x4.5", "a.txt:1: K is '4.5'"),
        ("a.txt", "1x2x99999999999", "a.txt:1: K is '99999999999'"),
        ("a.txt", "1x2x²", "a.txt:1: K is"),
        ("a.txt", "\n# nothing\n", "has no shape in it"),
        ("a.txt", b"\xff\xfe", "no text in UTF-8"),
        ("a.csv", "m,n\n1,2\n", "a.csv:1: there is no column k"),
        ("a.csv", "m,n,k,m\n1,2,3,4\n", "a.csv:1: a column stands there twice"),
        ("a.csv", "m,n,k,nmae\n1,2,3,4\n", "a.csv:1: unknown column 'nmae'. Did you mean 'name'"),
        ("a.csv", "m,n,k\n\n1,2,x\n", "a.csv:3: K is 'x'"),
        ("a.csv", "m,n,k\n1,2\n", "a.csv:2: K is ''"),
        ("a.csv", "m,n,k\n1,2,3,4\n", "a.csv:2: 4 cells under 3 columns"),
        ("a.csv", 'm,n,k\n1,2,"3\n', "this is no CSV"),
        ("a.csv", "m,n,k,output\n1,2,3,fp8\n", "a.csv:2: unknown output 'fp8'"),
        ("a.csv", "m,n,k,layout\n1,2,3,rows\n", "a.csv:2: unknown layout of the second operand 'rows'"),
    ],
)
def test_nonsense_gets_its_place_and_a_sentence(tmp_path: Path, name: str, text: str | bytes, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        shapes_of_file(file_of(tmp_path, name, text))
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_files_that_cannot_be_read_or_have_too_many(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.txt", tmp_path):
        with pytest.raises(UsageError, match="cannot be read"):
            shapes_of_file(path)
    path = file_of(tmp_path, "a.txt", "1x1x1\n" * (MOST_SHAPES + 1))
    with pytest.raises(UsageError, match=f"a.txt:{MOST_SHAPES + 1}: more than"):
        shapes_of_file(path)


@given(st.sampled_from(["a.txt", "a.csv"]), st.text(max_size=60) | st.binary(max_size=60).map(repr))
def test_any_text_is_shapes_or_a_sentence(tmp_path_factory: pytest.TempPathFactory, name: str, text: str) -> None:
    path = file_of(tmp_path_factory.mktemp("shapes"), name, text.encode("utf-8", "surrogatepass"))
    try:
        found = shapes_of_file(path)
    except UsageError:
        return
    assert found and all(min(shape.tokens, shape.outputs, shape.inputs) >= 1 for shape in found)


def test_models_have_their_layers_and_their_tokens() -> None:
    gpt2 = shapes_of_model("gpt2", None)
    assert [shape.name for shape in gpt2] == ["qkv", "out", "up", "down", "head"] and gpt2[-1].outputs == 50257
    for model, asked, tokens in (("gpt2", None, 8192), ("nano", None, 192), ("nano", 7, 7)):
        assert {shape.tokens for shape in shapes_of_model(model, asked)} == {tokens}


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
SIDES = (16, 17, 24, 32, 48, 50257)


def lint(shape: LinearShape, mode: str, device: DeviceClass, kind: str = "forward") -> ShapeFinding:
    (found,) = judge_all([shape], [kind], modes_of([mode], [device]), [device])
    return found


def scaled_modes() -> list[str]:
    """Every mode that is a recipe, as it is by default."""
    return [name for name in precisions.names() if isinstance(precisions.get(name), RecipePrecision)]


@for_each("device", CLASSES, ids=lambda one: one.name)
@for_each("mode", scaled_modes())
def test_what_a_suite_takes_natively_the_lint_takes_and_the_other_way_round(mode: str, device: DeviceClass) -> None:
    """The suite gemm refuses by `Precision.multiples`, the lint by its own rules: where both speak they agree."""
    precision, facts = precisions.get(mode), FACTS[device]
    if precision.support(facts).level is not Level.NATIVE:
        return
    gemm = workloads.get("gemm")
    for m, n, k in itertools.product(SIDES, repeat=3):
        found = lint(LinearShape("", m, n, k), mode, device)
        support = gemm.support({"m": m, "n": n, "k": k, "product": "forward", "operands": "cast"}, precision, facts)
        assert found.torch.outcome in (ShapeOutcome.FITS, ShapeOutcome.PAD)
        assert (found.torch.outcome is ShapeOutcome.FITS) == (support.level is Level.NATIVE), (m, n, k)


def test_what_fp8bench_has_natively_has_all_three_products() -> None:
    """Some mode is native somewhere, so that the agreement is tested; a new class gets its line above."""
    assert set(FACTS) == set(CLASSES)
    pairs = [
        (mode, device) for mode in scaled_modes() for device in CLASSES
        if precisions.get(mode).support(FACTS[device]).level is Level.NATIVE
    ]  # fmt: skip
    assert ("fp8", H100) in pairs
    for (mode, device), kind in itertools.product(pairs, PRODUCTS):
        outcome = lint(LinearShape("", 64, 64, 64), mode, device, kind).torch.outcome
        assert outcome is ShapeOutcome.FITS, (mode, device, kind)


@for_each("tokens", [24, 32])
def test_the_mlp_suite_agrees_on_a_whole_block(tokens: int) -> None:
    """It is refused as soon as one of its six products is."""
    precision, mlp = precisions.get("fp8"), workloads.get("mlp")
    for width, hidden in itertools.product((16, 24, 64), repeat=2):
        params: dict[str, Scalar] = {"tokens": tokens, "width": width, "hidden": hidden}
        params |= {"gated": "no", "pass": "training"}
        shapes = [LinearShape("up", tokens, hidden, width), LinearShape("down", tokens, width, hidden)]
        found = judge_all(shapes, tuple(PRODUCTS), modes_of(["fp8"], [H100]), [H100])
        fits = all(finding.torch.outcome is ShapeOutcome.FITS for finding in found)
        assert fits == (mlp.support(params, precision, FACTS[H100]).level is Level.NATIVE)


def test_each_product_contracts_over_another_side() -> None:
    """An odd vocabulary spoils the forward product by N and the input gradient by K; odd tokens the weight gradient."""
    head = LinearShape("head", 8192, 50257, 768)
    by_kind = {kind: lint(head, "fp8", H100, kind) for kind in PRODUCTS}
    assert by_kind["forward"].torch.padded == (8192, 50272, 768)
    assert by_kind["input-gradient"].torch.padded == (8192, 768, 50272)
    assert by_kind["weight-gradient"].torch.outcome is ShapeOutcome.FITS
    odd = lint(LinearShape("out", 100, 768, 768), "fp8", H100, "weight-gradient")
    assert odd.torch.padded == (768, 768, 112)


def test_what_padding_costs_by_hand() -> None:
    """FLOPs as the volumes are; bytes of codes, scales and a bf16 output."""
    judgement = lint(LinearShape("", 16, 20, 40), "mxfp8", B200).torch
    assert judgement.padded == (16, 32, 64)
    assert judgement.more_flops == pytest.approx(16 * 32 * 64 / (16 * 20 * 40) - 1)
    before = (16 + 20) * 40 + (16 + 20) * 2 + 2 * 16 * 20
    after = (16 + 32) * 64 + (16 + 32) * 2 + 2 * 16 * 32
    assert judgement.more_bytes == pytest.approx(after / before - 1)


def test_a_padded_product_fits() -> None:
    for mode, device in itertools.product(scaled_modes(), CLASSES):
        for m, n, k in itertools.product((1, 17, 50257), repeat=3):
            found = lint(LinearShape("", m, n, k), mode, device)
            for judgement, again in ((found.torch, "torch"), (found.te, "te")):
                if judgement is not None and judgement.padded is not None:
                    padded = lint(LinearShape("", *judgement.padded), mode, device)
                    assert getattr(padded, again).outcome is ShapeOutcome.FITS, (mode, device, judgement.padded)


def test_options_of_modes_count() -> None:
    """E5M2 everywhere has no product on NVIDIA; a weight gradient left in bf16 is none of these products."""
    shape = LinearShape("", 64, 64, 64)
    assert lint(shape, "fp8:formats=e5m2", H100).torch.outcome is ShapeOutcome.REFUSED
    assert lint(shape, "fp8-e5m2", MI350X).torch.outcome is ShapeOutcome.FITS
    modes = modes_of(["fp8:weight-gradient=bf16"], [H100])
    assert [finding.kind for finding in judge_all([shape], tuple(PRODUCTS), modes, [H100])] == [
        "forward",
        "input-gradient",
    ]


def test_without_modes_those_are_taken_that_a_device_has() -> None:
    """All usual ones where none has any; a mode that scales nothing is refused with those that do."""
    assert [mode.mode for mode in modes_of([], [H100])] == ["fp8", "fp8-rowwise", "fp8-block"]
    assert [mode.mode for mode in modes_of([], [CPU])] == list(USUAL_MODES)
    assert "mxfp6" not in [mode.mode for mode in modes_of([], CLASSES)]
    assert [mode.mode for mode in modes_of(["fp4", "nvfp4"], [CPU])] == ["nvfp4"]
    with pytest.raises(UsageError, match="bf16 scales nothing"):
        modes_of(["bf16"], [H100])
