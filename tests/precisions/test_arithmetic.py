"""Casts and products of every precision on a CPU, native FP8 included: torch has its kernels there, too."""

from __future__ import annotations

import pytest
import torch

from fp8bench.formats.grids import E4M3, E5M2, TF32
from fp8bench.formats.quantise import round_to
from fp8bench.formats.scaling import mx_values, nvfp4_values, per_tensor_values
from fp8bench.model import DeviceFacts, Level
from fp8bench.nn.arithmetics import EmulatedArithmetic, PlainArithmetic, ScaledArithmetic
from fp8bench.numerics.errors import relative_frobenius
from fp8bench.protocols import Arithmetic, Operand, Role
from fp8bench.registry import precisions

CPU = DeviceFacts("cpu", 0, "a processor", 16 << 30, "2.13.0+cpu")
H200 = DeviceFacts("cuda", 0, "H200", 141 << 30, "2.13.0", (9, 0), cuda="13.0")
CARRIERS = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
    "mxfp8": torch.bfloat16,
    "nvfp4": torch.bfloat16,
    "mxfp4": torch.bfloat16,
}
# Upper bounds on the error of a Gaussian product; every one is also held to be above half of it.
ERRORS = {"fp16": 5e-4, "tf32": 5e-4, "bf16": 4e-3, "fp8": 0.042, "mxfp8": 0.042, "nvfp4": 0.15, "mxfp4": 0.19}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def on_cpu(name: str) -> Arithmetic:
    return precisions.get(name).arithmetic(CPU)


@pytest.mark.parametrize("name", CARRIERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shapes_dtypes_and_carrier(name: str, dtype: torch.dtype) -> None:
    arithmetic = on_cpu(name)
    assert arithmetic.carrier == CARRIERS[name]
    a = arithmetic.cast(normal(24, 40).to(arithmetic.carrier), Role.INPUT)
    b = arithmetic.cast(normal(16, 40, seed=1), Role.WEIGHT)
    result = arithmetic.product(a, b, dtype)
    assert result.shape == (24, 16)
    assert result.dtype == dtype


@pytest.mark.parametrize("name", CARRIERS)
def test_error_of_a_product_is_the_format_s(name: str) -> None:
    arithmetic = on_cpu(name)
    a, b = normal(128, 256), normal(96, 256, seed=1)
    with precisions.get(name).scope():
        result = arithmetic.product(arithmetic.cast(a, Role.INPUT), arithmetic.cast(b, Role.WEIGHT), arithmetic.carrier)
    error = relative_frobenius(result, a.double() @ b.double().t())
    if name == "fp32":
        assert error < 1e-6
    else:
        assert ERRORS[name] / 2 < error < ERRORS[name]


@pytest.mark.parametrize("name", CARRIERS)
def test_turning_is_casting_the_transposed_source(name: str) -> None:
    arithmetic = on_cpu(name)
    source = normal(48, 80) * torch.logspace(-4, 4, 48)[:, None]
    operand = arithmetic.cast(source, Role.WEIGHT)
    turned = arithmetic.turn(operand, source, Role.WEIGHT)
    assert turned.data.shape == (80, 48)
    assert torch.equal(turned.data, arithmetic.cast(source.t(), Role.WEIGHT).data)
    assert arithmetic.keeps_source == (name in ("mxfp8", "nvfp4", "mxfp4"))
    if arithmetic.keeps_source:
        assert not torch.equal(turned.data, operand.data.t())


def test_only_fp32_casts_nothing() -> None:
    assert [name for name in CARRIERS if not on_cpu(name).casts] == ["fp32"]
    native_tf32 = precisions.get("tf32").arithmetic(H200)
    assert isinstance(native_tf32, PlainArithmetic)
    assert not native_tf32.casts
    source = normal(3, 4)
    assert on_cpu("fp32").cast(source, Role.INPUT).data.data_ptr() == source.data_ptr()


def test_each_precision_rounds_with_its_own_format() -> None:
    source = normal(32, 64)
    expected = {
        "tf32": round_to(source, TF32),
        "fp8": per_tensor_values(source, E4M3),
        "mxfp8": mx_values(source, E4M3),
        "nvfp4": nvfp4_values(source),
    }
    for name, values in expected.items():
        assert torch.equal(on_cpu(name).cast(source, Role.INPUT).data, values)
    assert torch.equal(on_cpu("fp8").cast(source, Role.GRADIENT).data, per_tensor_values(source, E5M2))


@pytest.mark.parametrize("name", CARRIERS)
def test_zeros_stay_zeros(name: str) -> None:
    arithmetic = on_cpu(name)
    zeros = arithmetic.cast(torch.zeros(16, 32), Role.INPUT)
    result = arithmetic.product(zeros, arithmetic.cast(normal(16, 32), Role.WEIGHT), torch.float32)
    assert torch.equal(result, torch.zeros(16, 16))


def native_fp8() -> ScaledArithmetic:
    arithmetic = precisions.get("fp8").arithmetic(H200)
    assert isinstance(arithmetic, ScaledArithmetic)
    return arithmetic


@pytest.mark.parametrize("role", list(Role))
def test_native_fp8_codes_are_the_emulated_values(role: Role) -> None:
    native, emulated, source = native_fp8(), on_cpu("fp8"), normal(48, 64)
    assert isinstance(emulated, EmulatedArithmetic)
    for tensor in (source, source.t(), source.to(torch.bfloat16)):
        operand = native.cast(tensor, role)
        assert operand.scale is not None
        assert operand.data.is_contiguous()
        assert torch.equal(operand.data.float() * operand.scale, emulated.cast(tensor, role).data)


@pytest.mark.parametrize("roles", [(Role.INPUT, Role.WEIGHT), (Role.GRADIENT, Role.WEIGHT)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_native_fp8_product_is_the_emulated_one(roles: tuple[Role, Role], dtype: torch.dtype, tolerance: float) -> None:
    native, emulated = native_fp8(), on_cpu("fp8")
    a, b = normal(48, 64), normal(32, 64, seed=1)
    ours = native.product(native.cast(a, roles[0]), native.cast(b, roles[1]), dtype)
    theirs = emulated.product(emulated.cast(a, roles[0]), emulated.cast(b, roles[1]), dtype)
    assert ours.dtype == dtype
    assert relative_frobenius(ours, theirs) < tolerance


def test_native_fp8_turns_codes_without_rounding_again() -> None:
    native, source = native_fp8(), normal(48, 64)
    operand = native.cast(source, Role.INPUT)
    turned = native.turn(operand, source, Role.INPUT)
    assert turned.scale is operand.scale
    assert turned.data.is_contiguous()
    assert torch.equal(turned.data.float(), operand.data.float().t())


def test_native_fp8_refuses_what_cuda_cannot() -> None:
    native = native_fp8()
    gradient = native.cast(normal(16, 32), Role.GRADIENT)
    with pytest.raises(ValueError, match="two E5M2"):
        native.product(gradient, gradient, torch.float32)
    with pytest.raises(ValueError, match="scales"):
        native.product(gradient, Operand(native.cast(normal(16, 32), Role.WEIGHT).data), torch.float32)


@pytest.mark.parametrize("forward", [True, False])
def test_native_fp8_accumulates_fast_only_forward(forward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}

    def spy(a: torch.Tensor, b: torch.Tensor, *scales: object, **options: object) -> torch.Tensor:
        seen.update(options, column_major=b.stride(0) == 1, row_major=a.stride(1) == 1)
        return torch.empty(0)

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", spy)
    native = native_fp8()
    a = native.cast(normal(16, 32), Role.INPUT if forward else Role.GRADIENT)
    native.product(a, native.cast(normal(16, 32), Role.WEIGHT), torch.bfloat16)
    assert seen["use_fast_accum"] is forward
    assert seen["column_major"] and seen["row_major"]


def test_fp8_states_cuda_s_multiples_and_fp16_its_loss_scale() -> None:
    assert precisions.get("fp8").multiples == (16, 16)
    assert {name: precisions.get(name).loss_scale for name in CARRIERS if name != "fp16"} == dict.fromkeys(
        (name for name in CARRIERS if name != "fp16"), 1.0
    )
    assert precisions.get("fp16").loss_scale == 1024.0


@pytest.mark.parametrize("facts", [CPU, H200], ids=lambda facts: facts.key)
@pytest.mark.parametrize("name", CARRIERS)
def test_carrier_does_not_depend_on_the_device(name: str, facts: DeviceFacts) -> None:
    precision = precisions.get(name)
    assert precision.support(facts).level is not Level.REFUSED
    assert precision.arithmetic(facts).carrier == CARRIERS[name]
