"""In which precision a product was computed: planted fallbacks, and honest products of every precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8bench.formats.grids import E4M3, TF32, Overflow
from fp8bench.formats.quantise import round_to
from fp8bench.formats.recipes import Accumulator
from fp8bench.formats.scaled import values
from fp8bench.formats.scalings import Scaling
from fp8bench.model import Level
from fp8bench.numerics.conformity import fingerprint, looks_like
from fp8bench.numerics.products import short_product
from fp8bench.protocols import Role
from fp8bench.registry import precisions
from tests.facts import CPU

M, N, K = 128, 256, 512


def sources(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, K, generator=generator).to(dtype) for rows in (M, N))
    return a, b


def fp8(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return values(a, E4M3, Scaling(0, 0)), values(b, E4M3, Scaling(0, 0))


def guesses() -> dict[str, tuple[Tensor, Tensor]]:
    low = fp8(*sources())
    return {"fp8": low, "bf16": sources(), "copies": (low[0].bfloat16(), low[1].bfloat16())}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("operands", "like"), [("fp8", ""), ("bf16", "bf16"), ("copies", "copies")])
def test_a_product_looks_like_what_it_was_made_of(operands: str, like: str, dtype: torch.dtype) -> None:
    """By a bfloat16 result too, whose own rounding is as large as that of copies in bfloat16."""
    a, b = (one.float() for one in guesses()[operands])
    product = (a @ b.t()).to(dtype)
    assert looks_like(product, "fp8", guesses()) == like
    assert fingerprint(product, guesses()).operands == operands


def test_sums_and_results_have_their_bits() -> None:
    a, b = fp8(*sources())
    plain = a @ b.t()
    assert (fingerprint(plain, guesses()).sum_bits, fingerprint(plain, guesses()).result_bits) == (24, 24)
    found = fingerprint(short_product(a, b, Accumulator.SHORT), guesses())
    assert (found.operands, found.sum_bits) == ("fp8", 14) and looks_like(plain, "fp8", guesses()) == ""
    assert fingerprint(plain.bfloat16(), guesses()).result_bits == 8
    assert fingerprint(plain.half(), guesses()).result_bits == 11


def test_powers_of_two_keep_copies_from_being_told() -> None:
    """What bfloat16 holds exactly is the same product: numbers alone cannot tell, and nobody is accused."""
    low = tuple(round_to(one.float(), E4M3) for one in sources())
    same = {"fp8": (low[0], low[1]), "copies": (low[0].bfloat16(), low[1].bfloat16())}
    assert looks_like((low[0] @ low[1].t()).bfloat16(), "fp8", same) == ""


def test_tf32_that_is_not_switched_on() -> None:
    """Of float32 tensors: rounded as they are read, or not."""
    a, b = sources(torch.float32)
    low = tuple(round_to(one, TF32, overflow=Overflow.INFINITY) for one in (a, b))
    known = {"tf32": (low[0], low[1]), "fp32": (a, b), "bf16": (a.bfloat16(), b.bfloat16())}
    assert looks_like(a @ b.t(), "tf32", known) == "fp32"
    assert looks_like(low[0] @ low[1].t(), "tf32", known) == ""
    assert looks_like(a.bfloat16().float() @ b.bfloat16().float().t(), "fp32", known) == "bf16"


def test_what_is_no_number_accuses_nobody() -> None:
    assert looks_like(torch.full((M, N), torch.nan), "fp8", guesses()) == ""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [name for name in precisions.names() if precisions.get(name).takes_backend])
def test_honest_products_never_alarm(name: str, seed: int) -> None:
    """Of every recipe, emulated and by torch's kernels where there are some, forward and backward."""
    precision = precisions.get(name)
    assert precision.support(CPU).level is Level.EMULATED
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(rows, K, generator=generator).bfloat16() for rows in (M, N))
    makers = [precision.arithmetic(CPU), precision.native(CPU)]  # type: ignore[attr-defined]
    for role in (Role.WEIGHT, Role.GRADIENT):
        emulated = makers[0].layer("honest")
        promised = emulated.cast(a, Role.INPUT).data, emulated.cast(b, role).data
        known = {name: promised, "bf16": (a, b)}
        for maker in makers:
            layer = maker.layer("honest")
            try:
                product = layer.product(layer.cast(a, Role.INPUT), layer.cast(b, role), torch.bfloat16)
            except (ValueError, RuntimeError, NotImplementedError, KeyError):  # torch has no such kernel here
                assert maker is not makers[0]
                continue
            assert looks_like(product, name, known) == ""
