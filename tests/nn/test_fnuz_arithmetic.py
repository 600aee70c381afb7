"""FP8 as MI300 has it, whose formats are fnuz: on a CPU, where torch has its kernels too."""

from __future__ import annotations

import torch

from fp8bench.formats.grids import E4M3FNUZ, E5M2FNUZ
from fp8bench.formats.scaled import quantise, values
from fp8bench.nn.arithmetics import ScaledArithmetic
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.protocols import Role
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.facts import MI300X
from tests.formats.scaling_definitions import gaussian
from tests.nn.test_scaled_arithmetic import NEEDS_PRODUCTS

MODES = ("fp8", "fp8:scale=pow2", "fp8-e4m3", "fp8-e5m2", "fp8-rowwise", "fp8-rowwise:formats=hybrid")


def arithmetic(mode: str) -> ScaledArithmetic:
    made = precisions.get(mode).arithmetic(MI300X)
    assert isinstance(made, ScaledArithmetic)
    return made


@for_each("role", list(Role))
@for_each("mode", MODES)
def test_codes_are_those_of_the_devices_own_formats(mode: str, role: Role) -> None:
    """Bit for bit what the format's definition makes of them, scale included."""
    made = arithmetic(mode)
    treatment = made.treatments[role]
    assert treatment.fmt in (E4M3FNUZ, E5M2FNUZ)
    source = gaussian(48, 64) * torch.logspace(-3, 3, 48)[:, None]
    for tensor in (source, -source, torch.zeros(16, 32), source.to(torch.bfloat16)):
        operand = made.cast(tensor, role)
        stored = quantise(tensor, treatment.fmt, treatment.scaling)
        assert torch.equal(operand.data.view(torch.uint8), stored.codes)
        assert torch.equal(made.restore(operand, torch.float32), values(tensor, treatment.fmt, treatment.scaling))


@NEEDS_PRODUCTS
@for_each("mode", MODES)
def test_products_are_those_of_the_codes(mode: str) -> None:
    made = arithmetic(mode)
    a, b = made.cast(gaussian(48, 64), Role.GRADIENT), made.cast(gaussian(32, 64, seed=1), Role.WEIGHT)
    exact = made.restore(a, torch.float64) @ made.restore(b, torch.float64).t()
    assert relative_frobenius(made.product(a, b, torch.bfloat16), exact) < 4e-3
