"""Casts and products of every precision on a CPU, native FP8 included; global switches are restored."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from fp8bench.formats.grids import E2M1, E2M3, E3M2, E4M3, E5M2, E5M2FNUZ, FP16, TF32, Format
from fp8bench.formats.quantise import round_to
from fp8bench.formats.recipes import (
    BLOCK_POWER_OF_TWO,
    MX,
    NVFP4,
    NVFP4_SQUARE,
    ROW,
    ROW_POWER_OF_TWO,
    SQUARE_POWER_OF_TWO,
    TENSOR,
    TENSOR_POWER_OF_TWO,
    ScaleRounding,
    Scaling,
)
from fp8bench.formats.scaled import values
from fp8bench.model import DeviceFacts, Level
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.shared_precisions import RecipePrecision
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.protocols import Arithmetic, Role, float32_products
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.facts import CPU, H200
from tests.formats.scaling_definitions import gaussian

CARRIERS = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    **dict.fromkeys(
        ("fp8", "fp8-delayed", "fp8-rowwise", "fp8-block", "fp8-e4m3", "fp8-e5m2", "mxfp8", "mxfp6", "nvfp4", "mxfp4",
         "custom", "fp8-unit"),
        torch.bfloat16,
    ),
}  # fmt: skip
# Upper bounds on the error of a Gaussian product; each error is also above half its bound.
ERRORS = {
    "fp16": 5e-4,
    "tf32": 5e-4,
    "bf16": 4e-3,
    "fp8": 0.042,
    "fp8-delayed": 0.042,
    "fp8-rowwise": 0.042,
    "fp8-block": 0.042,
    "fp8-e4m3": 0.042,
    "fp8-e5m2": 0.084,
    "mxfp8": 0.042,
    "mxfp6": 0.084,
    "nvfp4": 0.15,
    "mxfp4": 0.19,
    "custom": 0.042,
    "fp8-unit": 0.042,
}


def on_cpu(name: str) -> Arithmetic:
    return precisions.get(name).arithmetic(CPU)


@for_each("name", CARRIERS)
def test_error_of_a_product_is_the_format_s(name: str) -> None:
    arithmetic = on_cpu(name)
    a, b = gaussian(128, 256), gaussian(96, 256, seed=1)
    with precisions.get(name).scope():
        result = arithmetic.product(arithmetic.cast(a, Role.INPUT), arithmetic.cast(b, Role.WEIGHT), arithmetic.carrier)
    assert result.shape == (128, 96) and result.dtype == CARRIERS[name]
    error = relative_frobenius(result, a.double() @ b.double().t())
    if name == "fp32":
        assert error < 1e-6
    else:
        assert ERRORS[name] / 2 < error < ERRORS[name]


@for_each("name", CARRIERS)
def test_turning_is_casting_the_transposed_source(name: str) -> None:
    arithmetic = on_cpu(name)
    source = gaussian(48, 80) * torch.logspace(-4, 4, 48)[:, None]
    operand = arithmetic.cast(source, Role.WEIGHT)
    turned = arithmetic.turn(operand, source, Role.WEIGHT)
    assert turned.data.shape == (80, 48)
    assert torch.equal(turned.data, on_cpu(name).cast(source.t(), Role.WEIGHT).data)
    by_blocks = name in ("fp8-rowwise", "fp8-block", "mxfp8", "mxfp6", "nvfp4", "mxfp4")
    assert arithmetic.keeps_source == by_blocks
    # Squares of weights stay squares.
    if by_blocks and name not in ("fp8-block", "nvfp4"):
        assert not torch.equal(turned.data, operand.data.t())


def test_only_fp32_casts_nothing() -> None:
    assert [name for name in CARRIERS if not on_cpu(name).casts] == ["fp32"]
    native_tf32 = precisions.get("tf32").arithmetic(H200)
    assert isinstance(native_tf32, PlainArithmetic)
    assert not native_tf32.casts
    source = gaussian(3, 4)
    assert on_cpu("fp32").cast(source, Role.INPUT).data.data_ptr() == source.data_ptr()


# Formats and scalings of inputs, weights and gradients; a single one applies to all three.
Treated = tuple[Format, Scaling | None]
CASTS_OPTION: dict[str, Treated | tuple[Treated, Treated, Treated]] = {
    "tf32": (TF32, None),
    "fp8": ((E4M3, TENSOR), (E4M3, TENSOR), (E5M2, TENSOR)),
    "fp8-unit": ((E4M3, None), (E4M3, None), (E5M2, None)),
    "fp8:formats=e4m3:scale=pow2": (E4M3, TENSOR_POWER_OF_TWO),
    "fp8-e4m3": (E4M3, TENSOR),
    "fp8-e5m2": (E5M2, TENSOR),
    "fp8-rowwise": (E4M3, ROW_POWER_OF_TWO),
    "fp8-rowwise:formats=hybrid:scale=exact": ((E4M3, ROW), (E4M3, ROW), (E5M2, ROW)),
    "fp8-block": ((E4M3, BLOCK_POWER_OF_TWO), (E4M3, SQUARE_POWER_OF_TWO), (E4M3, BLOCK_POWER_OF_TWO)),
    "mxfp8": (E4M3, MX),
    "mxfp8:formats=hybrid": ((E4M3, MX), (E4M3, MX), (E5M2, MX)),
    "mxfp6": (E3M2, MX),
    "mxfp6:formats=hybrid": ((E2M3, MX), (E2M3, MX), (E3M2, MX)),
    "mxfp4:scale=floor": (E2M1, Scaling(1, 32, MX.scale, ScaleRounding.FLOOR)),
    "nvfp4:stochastic=off": ((E2M1, NVFP4), (E2M1, NVFP4_SQUARE), (E2M1, NVFP4)),
    "nvfp4:stochastic=off:weights=1d:scale=up": (E2M1, Scaling(1, 16, E4M3, ScaleRounding.UP)),
    "custom": (E4M3, TENSOR),
    "custom:format=e3m2:scaling=row": (E3M2, ROW),
    "custom:input=fp16:weight=e5m2fnuz:scaling=none": ((FP16, None), (E5M2FNUZ, None), (E4M3, None)),
}


@for_each("mode", CASTS_OPTION)
def test_each_role_is_rounded_with_its_own_format_and_scaling(mode: str) -> None:
    source, arithmetic = gaussian(130, 200) * torch.logspace(-3, 3, 130)[:, None], on_cpu(mode)
    given = CASTS_OPTION[mode]
    by_role = (given, given, given) if len(given) == 2 else given
    for role, (fmt, scaling) in zip(Role, by_role, strict=True):
        assert torch.equal(arithmetic.cast(source, role).data, values(source, fmt, scaling))
        assert torch.equal(arithmetic.cast_without_scale(source, role).data, round_to(source, fmt))


def test_native_modes_state_cuda_s_multiples_and_fp16_its_loss_scale() -> None:
    """Scaled products need multiples of 16; blocks of 32 and codes of four bits need 32."""
    for name in CARRIERS:
        precision = precisions.get(name)
        expected = (16, 16) if isinstance(precision, RecipePrecision) else (1, 1)
        assert precision.multiples == ((32, 16) if name in ("mxfp8", "nvfp4") else expected)
        assert precision.loss_scale == (1024.0 if name == "fp16" else 1.0)


@for_each("facts", [CPU, H200])
@for_each("name", CARRIERS)
def test_carrier_does_not_depend_on_the_device(name: str, facts: DeviceFacts) -> None:
    precision = precisions.get(name)
    assert precision.support(facts).level is not Level.REFUSED
    assert precision.arithmetic(facts).carrier == CARRIERS[name]


@for_each("name", precisions.names())
@for_each("before", ["highest", "high", "medium"])
def test_scope_sets_and_restores(name: str, before: str) -> None:
    with float32_products(before):
        with suppress(RuntimeError), precisions.get(name).scope():
            assert torch.get_float32_matmul_precision() == ("high" if name == "tf32" else "highest")
            raise RuntimeError("inside")
        assert torch.get_float32_matmul_precision() == before


def test_tf32_scope_leaves_products_on_a_cpu_alone() -> None:
    arithmetic, results = on_cpu("tf32"), []
    a, b = arithmetic.cast(gaussian(96, 300), Role.INPUT), arithmetic.cast(gaussian(64, 300, seed=1), Role.WEIGHT)
    for name in ("fp32", "tf32"):
        with precisions.get(name).scope():
            results.append(arithmetic.product(a, b, torch.float32))
    assert torch.equal(*results)


@for_each("before", [True, False])
@for_each("name", ["tf32", "fp32", "fp8"])
def test_scope_tells_convolutions_too(name: str, before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise cuDNN's separate switch would let fp32 convolutions run in TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", before)
    with precisions.get(name).scope():
        assert torch.backends.cudnn.allow_tf32 is (name == "tf32")
    assert torch.backends.cudnn.allow_tf32 is before
