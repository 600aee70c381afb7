"""Recognising values on a format's grid under any scale, and watching the operands of products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fp8bench.formats.grids import E2M1, E2M3, E3M2, E4M3, E4M3FNUZ, E5M2, E8M0, FORMATS, Format
from fp8bench.formats.operators import values
from fp8bench.formats.recipes import ScaleRounding, Scaling
from fp8bench.numerics import operands
from fp8bench.numerics.operands import ProductWatch, has_format
from tests.counts import for_each

NARROW = (E4M3, E4M3FNUZ, E5M2, E3M2, E2M3, E2M1)
EXACT, POWER = ScaleRounding.EXACT, ScaleRounding.POWER_OF_TWO
SCALINGS = {
    "none": None,
    "tensor": Scaling(0, 0, rounding=EXACT),
    "tensor, power of two": Scaling(0, 0, rounding=POWER),
    "row": Scaling(1, 0, rounding=EXACT),
    "1x128": Scaling(1, 128, rounding=EXACT),
    "128x128": Scaling(128, 128, rounding=EXACT),
    "mx": Scaling(1, 32, E8M0, ScaleRounding.RCEIL),
    "nvfp4": Scaling(1, 16, E4M3, ScaleRounding.NEAREST),
}
MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "gaussian": lambda x: x,
    "relu": torch.relu,
    "gelu": F.gelu,
    "softmax": lambda x: x.softmax(-1),
}


def made(kind: str, columns: int) -> Tensor:
    return MADE[kind](torch.randn(64, columns, generator=torch.Generator().manual_seed(columns)))


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("fmt", NARROW, ids=lambda fmt: fmt.name)
def test_quantised_values_are_of_their_format(fmt: Format, scaling: str) -> None:
    if (scaling == "nvfp4" and fmt is not E2M1) or (scaling == "mx" and fmt is E4M3FNUZ):
        pytest.skip("no such recipe")
    for columns in (32, 128, 512):
        x = values(made("gaussian", columns), fmt, SCALINGS[scaling])
        assert has_format(x, fmt) and has_format(x.t(), fmt)
        assert has_format(x.t().contiguous().view(1, columns, 64), fmt)


@for_each("kind", MADE)
def test_values_that_nobody_rounded_are_of_no_format(kind: str) -> None:
    for columns in (5, 32, 128, 512):
        x = made(kind, columns)
        assert [fmt.name for fmt in NARROW if has_format(x, fmt) or has_format(x.bfloat16(), fmt)] == []


def test_rounded_values_in_a_wider_dtype_are_of_their_format() -> None:
    x = made("gaussian", 64)
    assert has_format(x.bfloat16().float(), FORMATS["bf16"]) and has_format(x.half().double(), FORMATS["fp16"])
    assert not has_format(x.bfloat16(), FORMATS["fp16"])
    assert not has_format(torch.full((8, 8), torch.nan), E4M3) and not has_format(torch.ones(4, dtype=torch.int8), E4M3)


def seen(run: Callable[[], object]) -> list[tuple[torch.dtype, ...]]:
    result: list[tuple[torch.dtype, ...]] = []

    def looks(operands: Sequence[Tensor]) -> None:
        result.append(tuple(tensor.dtype for tensor in operands))

    with ProductWatch(looks):
        run()
    return result


LOW, HIGH = torch.bfloat16, torch.float32


def test_products_are_seen_and_nothing_else() -> None:
    a, b, c = torch.randn(8, 8, dtype=LOW), torch.randn(8, 8, dtype=LOW), torch.randn(8, 8, dtype=LOW)
    assert seen(lambda: (a + b).softmax(-1).sum()) == []
    assert seen(lambda: a @ b) == [(LOW, LOW)]
    assert seen(lambda: torch.addmm(c, a, b)) == [(LOW, LOW)]
    assert seen(lambda: torch.einsum("ij,kj->ik", a, b)) == [(LOW, LOW)]
    assert seen(lambda: F.conv2d(torch.randn(1, 2, 8, 8), torch.randn(2, 2, 3, 3))) == [(HIGH, HIGH)]
    heads = torch.randn(1, 2, 8, 16, dtype=LOW)
    assert seen(lambda: F.scaled_dot_product_attention(heads, heads, heads))[0][:3] == (LOW,) * 3
    x, weight = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    y = x @ weight
    assert seen(lambda: y.sum().backward()) == [(HIGH, HIGH)] * 2
    for grad in (torch.no_grad, torch.inference_mode):  # for a layer in one piece
        with grad():
            layer = torch.nn.Linear(8, 8, dtype=LOW)
            assert seen(lambda: layer(torch.randn(2, 8, dtype=LOW)))[0] == (LOW, LOW)  # noqa: B023


def test_operators_are_counted() -> None:
    x = torch.randn(32, 32)
    with ProductWatch(lambda operands: None) as watch:
        (x @ x).relu()
    assert watch.operators == 2
    with ProductWatch(lambda operands: None) as watch:
        torch.ops.fp8bench.tensor(x, torch.empty_like(x), "e4m3fn", "saturate", 0, 0, "", "exact", None, None)
    assert watch.operators == 2


@for_each("backend", ["FLASH_ATTENTION", "MATH"])
@for_each("gradients", [True, False])
def test_the_kernel_of_attention_is_named(backend: str, gradients: bool) -> None:
    heads = torch.randn(1, 2, 8, 16, dtype=LOW, requires_grad=gradients)
    with sdpa_kernel(getattr(SDPBackend, backend)), ProductWatch(lambda operands: None) as watch:
        y = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        if gradients:
            y.sum().backward()
    assert list(watch.attention) == [backend.partition("_")[0].lower()]
    with ProductWatch(lambda operands: None) as watch:
        (torch.randn(8, 8) @ torch.randn(8, 8)).softmax(-1)
    assert not watch.attention
    # Kernels that CPUs lack, by torch's operator names.
    kernels = {
        "_scaled_dot_product_cudnn_attention": "cudnn",
        "_scaled_dot_product_efficient_attention": "efficient",
        "_scaled_dot_product_flash_attention_backward": "flash",
        "_safe_softmax": "math",
        "_softmax": "",
        "_flash_attention_forward": "",
        "mm": "",
    }
    assert {name: operands._find_attention_kernel(name) for name in kernels} == kernels
