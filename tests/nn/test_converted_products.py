"""Results of converted layers: torch's bits where nothing is rounded, the right roundings elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.conversion import LayerProducts
from fp8bench.nn.holders import StackedWeightWatch
from fp8bench.nn.linear import linear
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.protocols import Arithmetic, Phases, SilentPhases
from tests.counts import for_each
from tests.nn.converted_models import FP32, Experts, converted, outcome, sequential
from tests.nn.layers import arithmetic_of
from tests.tapes import tape_in_phases


def both(model: nn.Module, x: Tensor, by: Arithmetic, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    plain = outcome(model, x)
    with converted(model, by, **options):
        return plain, outcome(model, x)


def assert_same_bits(one: list[Tensor], other: list[Tensor]) -> None:
    assert [tensor.dtype for tensor in one] == [tensor.dtype for tensor in other]
    assert all(map(torch.equal, one, other))


@for_each("dtype", [torch.float32, torch.bfloat16])
@for_each("bias", [True, False])
@for_each("shape", [(2, 16, 48), (5, 48), (1, 48), (48,), (0, 48)])
def test_without_rounding_products_have_torchs_bits(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    """torch starts a sum with the bias, fp8bench ends with it, so the output's last bit may differ."""
    model, x = sequential(nn.Linear(48, 80, bias=bias)).to(dtype), torch.randn(shape).to(dtype)
    plain, ours = both(model, x, PlainArithmetic(dtype))
    assert_same_bits(plain[bias:], ours[bias:])
    torch.testing.assert_close(ours[0], plain[0], rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)


@for_each("name", ["fp8", "mxfp8", "nvfp4", "fp8-rowwise", "bf16"])
def test_products_are_those_of_our_linear_layer(name: str) -> None:
    model, x = sequential(nn.Linear(64, 32, bias=False)), torch.randn(32, 64)
    pull = torch.randn(32, 32)
    with converted(model, arithmetic_of(name)):
        ours = outcome(model, x, pull)
    weight, x = model[0].weight, x.requires_grad_()
    y = linear(x, weight, arithmetic_of(name), SilentPhases()).to(torch.float32)
    assert_same_bits(ours, [y.detach(), *torch.autograd.grad(y, [x, weight], pull)])


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    scale = torch.finfo(dtype).max / tensor.abs().max().float()
    return (tensor.float() * scale).to(dtype).double() / scale.double()


@for_each(
    "options",
    [
        {},
        {"stride": 2},
        {"stride": (2, 1), "padding": (0, 2), "dilation": (1, 2)},
        {"kernel_size": (1, 1)},
        {"kernel_size": (7, 5), "stride": 3, "padding": 3},
        {"kernel_size": 8, "stride": 8},
        {"groups": 2, "padding": 1},
        {"groups": 8, "padding": 1, "bias": False},
        {"padding": "same", "dilation": 2, "kernel_size": (2, 3)},
        {"padding": "valid"},
        {"padding": 1, "padding_mode": "circular"},
        {"padding": (2, 1), "padding_mode": "reflect", "stride": 2},
    ],
)
@for_each("by", ["fp32", "explicit"])
def test_any_convolution(options: dict[str, Any], by: str) -> None:
    chosen = {"kernel_size": 3, **options}
    model, x = sequential(nn.Conv2d(8, 16, **chosen)), torch.randn(2, 8, 17, 18)
    own = PlainArithmetic(torch.float32)
    own.explicit = by == "explicit"
    with converted(model, own):
        ours = outcome(model, x)
    exact = outcome(model.double(), x.double())
    for left, right in zip(ours, exact, strict=True):
        assert left.shape == right.shape and left.dtype == torch.float32
        assert relative_frobenius(left, right) < 1e-6
    assert ours[0].stride() == exact[0].stride()


@for_each("groups", [1, 2])
def test_a_convolution_rounds_each_operand_along_its_contraction(groups: int) -> None:
    model = sequential(nn.Conv2d(32, 32, 3, stride=2, padding=1, groups=groups, bias=False))
    x, pull = torch.randn(2, 32, 8, 8), torch.randn(2, 32, 4, 4)
    with converted(model, arithmetic_of("fp8")):
        y, x_gradient, w_gradient = outcome(model, x, pull)

    def by_group(tensor: Tensor, dtype: torch.dtype, dim: int) -> Tensor:
        return torch.cat([rounded(part, dtype) for part in tensor.chunk(groups, dim)], dim)

    a = by_group(x.bfloat16(), torch.float8_e4m3fn, 1).requires_grad_()
    w = by_group(model[0].weight.detach(), torch.float8_e4m3fn, 0).requires_grad_()
    exact = F.conv2d(a, w, stride=2, padding=1, groups=groups)
    gradients = torch.autograd.grad(exact, [a, w], by_group(pull.bfloat16(), torch.float8_e5m2, 1))
    for own, other in zip((y, x_gradient, w_gradient), (exact.detach(), *gradients), strict=True):
        assert relative_frobenius(own, other) < 2**-8


WAYS = ("linear", "chosen", "left", "bmm", "matmul", "grouped")


@for_each("way", WAYS)
def test_experts_in_fp32_are_torchs(way: str) -> None:
    torch.manual_seed(0)
    model, x = Experts(way), torch.randn(3, 8, 16)

    def run() -> list[Tensor]:
        given = x.clone().requires_grad_()
        y = model(given)
        return [y, *torch.autograd.grad(y.square().sum(), [given, model.stack])]

    plain = run()
    with converted(model) as conversion:
        ours = run()
    assert "stack" in [holder.parameter for holder in conversion.converted_weights]
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


@for_each("way", WAYS)
def test_experts_in_fp8_are_so_many_linear_layers(way: str) -> None:
    torch.manual_seed(0)
    model, x = Experts(way), torch.randn(3, 8, 16)
    by = arithmetic_of("fp8")
    with converted(model, by), torch.no_grad():
        ours = model(x)
    transposed = model.stack.shape[1] == 16
    with torch.no_grad():
        stack = model.stack.mT if transposed else model.stack
        exact = torch.stack([linear(part, own, by, SilentPhases()) for part, own in zip(x, stack, strict=True)])
        if way == "chosen":  # each row has a separate weight, and so a separate scale
            exact[0] = torch.cat([linear(row[None], stack[0], by, SilentPhases()) for row in x[0]])
    assert torch.equal(ours, exact.float())
    assert not torch.equal(ours, model(x))


def test_rows_behind_the_last_group_are_zeros() -> None:
    stack, x = nn.Parameter(torch.randn(3, 16, 32)), torch.randn(8, 16)
    products = LayerProducts(FP32, SilentPhases)
    with StackedWeightWatch({"stack": stack}, {"stack": products}):
        y = F.grouped_mm(x, stack, offs=torch.tensor([2, 2, 5], dtype=torch.int32))
    assert torch.equal(y[5:], torch.zeros(3, 32))
    torch.testing.assert_close(y[:2], x[:2] @ stack[0])
    torch.testing.assert_close(y[2:5], x[2:5] @ stack[2])


@for_each("way", ["grouped", "bmm", "matmul", "left"])
def test_an_arithmetic_with_one_product_for_all_experts_makes_one(way: str) -> None:
    torch.manual_seed(0)
    model, x = Experts(way).bfloat16(), torch.randn(3, 40, 16, dtype=torch.bfloat16, requires_grad=True)
    plain = torch.autograd.grad(model(x).square().sum(), [x, model.stack])
    with converted(model, arithmetic_of("bf16")) as conversion:

        def step(phase: Phases) -> list[Tensor]:
            conversion.phase = phase
            return list(torch.autograd.grad(model(x).square().sum(), [x, model.stack]))

        ours = step(SilentPhases())
        tape = tape_in_phases(step)
    assert sum(operator.calls for operator in tape.operators if operator.operator == "_grouped_mm") == 3
    for left, right in zip(ours, plain, strict=True):
        assert left.shape == right.shape and relative_frobenius(left, right) < 2**-7


MAKERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: sequential(nn.Linear(32, 32)), (4, 32)),
    "conv2d": (lambda: sequential(nn.Conv2d(16, 16, 3)), (2, 16, 6, 6)),
    "experts": (lambda: sequential(Experts("bmm", 3, 16, 16)), (3, 8, 16)),
}


@for_each("kind", MAKERS)
def test_under_autocast_a_layer_gives_what_torchs_would(kind: str) -> None:
    make, shape = MAKERS[kind]
    model, x = make(), torch.randn(shape)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = model(x)
        with converted(model):
            ours = model(x)
    assert plain.dtype == ours.dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(ours, model(x).bfloat16()) or relative_frobenius(ours, model(x)) < 2**-8


@for_each("dtype", [torch.bfloat16, torch.float64, torch.float16])
@for_each("kind", MAKERS)
def test_a_model_of_another_dtype_gets_its_own_back(kind: str, dtype: torch.dtype) -> None:
    make, shape = MAKERS[kind]
    model = make().to(dtype)
    with converted(model, arithmetic_of("fp8")):
        x = torch.randn(shape).to(dtype).requires_grad_()
        y = model(x)
        y.float().square().mean().backward()
    assert y.dtype == dtype
    result = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert result and all(tensor.dtype == dtype and tensor.isfinite().all() for tensor in result)
