"""Native FP8 on a CPU, where torch has its kernels too, against emulation of the same recipe; MI300's fnuz formats.

And one FP8 product for all experts against the emulation of one for each.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fp8bench.formats.grids import E4M3FNUZ, E5M2FNUZ
from fp8bench.formats.scaled import quantise, values
from fp8bench.model import DeviceFacts
from fp8bench.nn.arithmetics import RecipeArithmetic, ScaledArithmetic
from fp8bench.nn.experts import Experts
from fp8bench.nn.linear import Linear
from fp8bench.nn.whole_layers import CachedWeights
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.protocols import Arithmetic, Role, SilentPhases
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.facts import B200, CPU, H200, MI300X
from tests.formats.scaling_definitions import gaussian
from tests.nn.grouped_kernel import GroupedKernel
from tests.nn.layers import given, linear, outcome

MODES = (
    "fp8",
    "fp8:scale=pow2",
    "fp8:formats=e4m3",
    "fp8:weight-gradient=bf16",
    "fp8-e4m3",
    "fp8-delayed:history=2",
    "fp8-delayed:margin=2:weight-gradient=bf16",
    "fp8-rowwise",
    "fp8-rowwise:formats=hybrid:scale=exact",
    "fp8-rowwise:weight-gradient=bf16",
    "fp8-unit",
    "fp8-unit:weight-gradient=bf16",
)
# torch 2.11 has the operator, but no CPU kernel for it.
NEEDS_PRODUCTS = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"),
    reason="this torch has no scaled products on a processor; 2.13 has",
)


def pair(mode: str) -> tuple[ScaledArithmetic, RecipeArithmetic]:
    native, emulated = (precisions.get(mode).arithmetic(facts) for facts in (H200, CPU))
    assert isinstance(native, ScaledArithmetic) and type(emulated) is RecipeArithmetic
    return native, emulated


@for_each("role", list(Role))
@for_each("mode", MODES)
def test_codes_are_the_emulated_values(mode: str, role: Role) -> None:
    native, emulated = pair(mode)
    source = gaussian(48, 64) * torch.logspace(-3, 3, 48)[:, None]
    for tensor in (source, source.t(), 8 * source.to(torch.bfloat16), torch.zeros(16, 32)):
        operand, theirs = native.cast(tensor, role), emulated.cast(tensor, role)
        assert operand.scale is not None and operand.data.is_contiguous() and operand.data.element_size() == 1
        assert torch.equal(native.restore(operand, torch.float32), theirs.data)
        ours, expected = native.turn(operand, tensor, role), emulated.turn(theirs, tensor, role)
        assert torch.equal(native.restore(ours, torch.float32), expected.data.float())
        assert ours.scale is None or ours.data.is_contiguous()
        assert torch.equal(
            native.cast_without_scale(tensor, role).data.float(), emulated.cast_without_scale(tensor, role).data
        )


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        *((mode, torch.bfloat16) for mode in ("bf16", "fp8:weight-gradient=bf16")),
        *(pytest.param(mode, torch.bfloat16, marks=NEEDS_PRODUCTS) for mode in ("fp8", "fp8-rowwise")),
        *((mode, torch.float32) for mode in ("fp32", "mxfp8", "fp8:accumulator=short")),
    ],
)
def test_a_product_in_its_own_dtype_is_not_converted(mode: str, dtype: torch.dtype) -> None:
    """In torch 2.11's compiled graphs such a conversion leaves zero gradients."""

    class Conversions(TorchFunctionMode):
        unchanged: ClassVar[list[Tensor]] = []

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if function is Tensor.to and result is args[0]:
                self.unchanged.append(result)
            return result

    arithmetic = precisions.get(mode).arithmetic(H200)
    sources = ((gaussian(48, 32), Role.GRADIENT), (gaussian(48, 64), Role.INPUT))
    operands = [arithmetic.turn(arithmetic.cast(item, role), item, role) for item, role in sources]
    with Conversions() as seen:
        actual = arithmetic.product(operands[0], operands[1], dtype)
    assert actual.dtype == dtype and not any(actual is call for call in seen.unchanged)


@NEEDS_PRODUCTS
@for_each("mode", MODES)
def test_layers_are_the_emulated_ones(mode: str) -> None:
    outcomes = []
    for facts in (H200, CPU):
        layer, result = linear(precisions.get(mode).arithmetic(facts).layer("one")), []
        for step in range(2):
            result += outcome(layer, gaussian(48, 64, seed=step) * 3.0**step, gaussian(48, 32, seed=9))
        outcomes.append(result)
    for native, emulated in zip(*outcomes, strict=True):
        assert relative_frobenius(native, emulated) < 6e-3


@for_each("mode", ["fp8", "fp8-e4m3", "fp8-rowwise"])
def test_cuda_is_given_what_it_wants(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, object]] = []

    def spy(a: Tensor, b: Tensor, *others: Any) -> Tensor:
        (scale_a,), _, _, (scale_b,), _, _, _, output, _, fast = others
        row = (a.shape[0], 1), (1, b.shape[1])
        fits = (scale_a.shape, scale_b.shape) == (row if "rowwise" in mode else ((), ()))
        layout = a.stride(1) == 1 and b.stride(0) == 1
        seen.append({"layout": layout, "scales": fits, "output_dtype": output, "use_fast_accum": fast})
        return torch.empty(a.shape[0], b.shape[1], dtype=torch.bfloat16)

    monkeypatch.setattr(torch.ops.aten._scaled_mm_v2, "default", spy)
    layer = Linear(32, 16, precisions.get(mode).arithmetic(H200))
    layer(gaussian(48, 32).requires_grad_(), SilentPhases()).sum().backward()
    assert [call["use_fast_accum"] for call in seen] == [True, False, False]
    assert all(call["layout"] and call["scales"] and call["output_dtype"] == torch.bfloat16 for call in seen)


@NEEDS_PRODUCTS
def test_a_weight_gradient_left_in_bf16_is_bf16_s() -> None:
    for facts in (CPU, H200):
        (_, plain_x, plain_w), (_, mixed_x, mixed_w), (_, low_x, low_w) = (
            outcome(linear(precisions.get(mode).arithmetic(facts)), gaussian(48, 64).bfloat16(), gaussian(48, 32))
            for mode in ("bf16", "fp8-rowwise:weight-gradient=bf16", "fp8-rowwise")
        )
        assert torch.equal(mixed_w, plain_w) and not torch.equal(low_w, plain_w)
        assert torch.equal(mixed_x, low_x) and not torch.equal(mixed_x, plain_x)


@NEEDS_PRODUCTS
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does
@for_each("mode", ["fp8", "fp8-rowwise", "fp8:weight-gradient=bf16"])
def test_a_compiled_layer_has_the_same_gradients(mode: str) -> None:
    """A compiler that loses gradients leaves zeros, without an error."""
    layer, silent = Linear(32, 16, precisions.get(mode).arithmetic(H200)), SilentPhases()
    compiled = torch.compile(lambda x: layer(x, silent).float().square().sum(), backend="aot_eager", fullgraph=True)
    result = []
    for step in (compiled, lambda x: layer(x, silent).float().square().sum()):
        x = gaussian(48, 32).requires_grad_()
        layer.zero_grad()
        step(x).backward()
        result.append([x.grad, *(parameter.grad for parameter in layer.parameters())])
    for ours, theirs in zip(*result, strict=True):
        assert ours is not None and theirs is not None and bool(ours.any()) and torch.equal(ours, theirs)


FNUZ_MODES = ("fp8", "fp8:scale=pow2", "fp8-e4m3", "fp8-e5m2", "fp8-rowwise", "fp8-rowwise:formats=hybrid")


def fnuz(mode: str) -> ScaledArithmetic:
    made = precisions.get(mode).arithmetic(MI300X)
    assert isinstance(made, ScaledArithmetic)
    return made


@for_each("role", list(Role))
@for_each("mode", FNUZ_MODES)
def test_fnuz_codes_are_those_of_the_devices_own_formats(mode: str, role: Role) -> None:
    made = fnuz(mode)
    treatment = made.treatments[role]
    assert treatment.fmt in (E4M3FNUZ, E5M2FNUZ)
    source = gaussian(48, 64) * torch.logspace(-3, 3, 48)[:, None]
    for tensor in (source, -source, torch.zeros(16, 32), source.to(torch.bfloat16)):
        operand = made.cast(tensor, role)
        stored = quantise(tensor, treatment.fmt, treatment.scaling)
        assert torch.equal(operand.data.view(torch.uint8), stored.codes)
        assert torch.equal(made.restore(operand, torch.float32), values(tensor, treatment.fmt, treatment.scaling))


GROUPED = (
    *(("fp8-rowwise" + options, H200) for options in ("", ":scale=exact", ":weight-gradient=bf16")),
    *(("mxfp8" + options, B200) for options in ("", ":weight-gradient=bf16")),
)


def experts(arithmetic: Arithmetic, gated: bool, hidden: int = 48) -> Experts:
    torch.manual_seed(1)
    block = Experts(4, 32, hidden, gated, 1.0, lambda name: arithmetic)
    with torch.no_grad():
        block.router.mul_(20)
        block.router[2] = -9 * block.router.sum(0)  # no token chooses it
    return block


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(("mode", "gpu"), GROUPED)
def test_outputs_and_gradients_are_those_of_one_product_for_each(
    mode: str, gpu: DeviceFacts, cached: bool, grouped_kernel: GroupedKernel
) -> None:
    result = []
    for facts in (gpu, CPU):
        block = experts(precisions.get(mode).arithmetic(facts), gated=cached, hidden=160)
        x = (given(200, 32).abs() * torch.logspace(-2, 2, 200)[:, None]).to(torch.bfloat16).requires_grad_()
        with CachedWeights(block).cast(SilentPhases()) if cached else nullcontext():
            y = block(x, SilentPhases())
            (y * given(200, 32, seed=5)).sum().backward()
        result.append([y, x.grad, *(parameter.grad for parameter in block.parameters())])
    products = 2 if "gradient" in mode else 3  # the bf16 weight gradient is torch's product
    assert grouped_kernel.calls == 2 * products
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*result, strict=True))
    y, of_x, router, *of_weights = (
        tensor is not None and float(tensor.detach().abs().max()) > 0 for tensor in result[0]
    )
    assert y and of_x and router and of_weights.count(True) >= 4 and of_weights.count(False) >= 2


def test_sides_that_do_not_fit_are_multiplied_one_by_one(grouped_kernel: GroupedKernel) -> None:
    for mode, hidden in (("fp8-rowwise", 40), ("bf16", 48)):
        block = experts(precisions.get(mode).arithmetic(H200), gated=False, hidden=hidden)
        assert block._are_groupable() is (mode == "bf16")
    assert grouped_kernel.calls == 0


@for_each(
    ("mode", "facts", "groups"),
    [
        ("fp8-rowwise", H200, 16),
        ("fp8-rowwise", B200, 16),
        ("fp8-rowwise", replace(B200, capability=(10, 3)), 16),
        ("fp8-rowwise", replace(H200, capability=(8, 9)), 0),
        ("fp8-rowwise", replace(H200, capability=(12, 0)), 0),
        ("fp8-rowwise", MI300X, 0),
        ("fp8-rowwise", CPU, 0),
        ("fp8-rowwise:formats=hybrid", H200, 0),
        ("fp8-e4m3", H200, 0),
        ("mxfp8", B200, 32),
        ("mxfp8", replace(B200, capability=(10, 3)), 0),
        ("mxfp8", H200, 0),
        ("mxfp8:formats=hybrid", B200, 0),
        ("mxfp4", B200, 0),
        ("nvfp4", B200, 0),
        ("bf16", CPU, 8),
        ("fp16", H200, 0),
    ],
)
def test_what_is_grouped(mode: str, facts: DeviceFacts, groups: int) -> None:
    """As torch 2.13 and 2.11 for CUDA answered on a stub runtime: neither E5M2 nor one scale per tensor."""
    assert precisions.get(mode).arithmetic(facts).groups == groups
