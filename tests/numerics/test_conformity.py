"""Explanations of differences: each kind planted, none for another order; precisions recognised by numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fp8bench.formats.grids import E4M3, E5M2, TF32, Format, Overflow
from fp8bench.formats.quantise import round_to
from fp8bench.formats.recipes import Accumulator, Scaling
from fp8bench.formats.scaled import values
from fp8bench.model import DeviceFacts, Level
from fp8bench.model.promises import Difference
from fp8bench.numerics.conformity import (
    ConformitySums,
    count_ulps_between,
    estimate_accumulator_bits,
    explain_cast_difference,
    explain_product_difference,
    find_nearest_precision,
    matches_14_bit_sums,
    matches_hopper_units,
)
from fp8bench.numerics.products import PROMOTION_LENGTH, short_product, sum_like_hopper_units
from fp8bench.protocols import Operand, Role
from fp8bench.registry import precisions
from fp8bench.worker.conformity import _ComparedPrecision
from tests.counts import for_each
from tests.facts import B200, CPU, H200, gpu

L4 = gpu("NVIDIA L4", (8, 9))
SIZE, LONG = 64, 512
Made = Callable[[Tensor, Tensor], Tensor]


def drawn(rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.exp2(torch.randint(-3, 4, (rows, 1), generator=generator))
    return values(x, E4M3, Scaling(1, 0))


def sums_of(a: Tensor, b: Tensor, dtype: torch.dtype = torch.float32, bits: int = 24) -> ConformitySums:
    return ConformitySums(a.double(), b.double(), dtype, bits)


def plain(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.t()


def backwards(a: Tensor, b: Tensor) -> Tensor:
    total = torch.zeros(len(a), len(b))
    for place in reversed(range(a.shape[1])):
        total += torch.outer(a[:, place], b[:, place])
    return total


def cut(a: Tensor, b: Tensor) -> Tensor:
    return ((a @ b.t()).view(torch.int32) & -(1 << 16)).view(torch.float32)


def blocks_exchanged(a: Tensor, b: Tensor) -> Tensor:
    return plain(a, b).view(4, -1, len(b)).flip(0).reshape(len(a), len(b))


def rows_for_columns(a: Tensor, b: Tensor) -> Tensor:
    own, other = a.abs().amax(1), b.abs().amax(1)
    return plain(a / own[:, None], b / other[:, None]) * other[:, None] * own


def block_scales(a: Tensor, b: Tensor) -> Tensor:
    wrong = a.clone()
    wrong[::2, 128:256] *= 2
    return plain(wrong, b)


def where_nine(one: Tensor, other: Tensor) -> Tensor:
    return torch.where(torch.arange(SIZE)[:, None] == 9, one, other)


@for_each("dtype", [torch.float32, torch.bfloat16])
@for_each(
    ("made", "difference", "words"),
    [
        (plain, Difference.ORDER, "within"),
        (backwards, Difference.ORDER, "within"),
        (lambda a, b: plain(a, b).t(), Difference.LAYOUT, "result is transposed"),
        (lambda a, b: plain(a[torch.randperm(SIZE)], b), Difference.LAYOUT, "rows are permuted"),
        (lambda a, b: plain(a, b).roll(16, 1), Difference.LAYOUT, "columns are permuted"),
        (blocks_exchanged, Difference.LAYOUT, "rows are permuted"),
        (
            lambda a, b: plain(a.view(SIZE, -1, 2).flip(-1).reshape(a.shape), b),
            Difference.LAYOUT,
            "neighbouring elements",
        ),
        (lambda a, b: 2 * plain(a, b), Difference.SCALE, "the tensor scaled by 2"),
        (lambda a, b: plain(a, b) * torch.linspace(1, 2, SIZE)[:, None], Difference.SCALE, "rows scaled by 1 to 2"),
        (lambda a, b: plain(a, b) * torch.linspace(1, 2, SIZE), Difference.SCALE, "columns scaled by 1 to 2"),
        (rows_for_columns, Difference.SCALE, "rows and columns scaled by"),
        (block_scales, Difference.SCALE, "blocks of 128 of the first operand scaled by"),
        (lambda a, b: short_product(a, b, Accumulator.SHORT), Difference.ACCUMULATION, "about 14 bits"),
        (lambda a, b: plain(a, where_nine(b.flip(1), b)), Difference.UNEXPLAINED, ""),
        (lambda a, b: plain(values(a, E5M2, Scaling(1, 0)), b), Difference.UNEXPLAINED, ""),
        (lambda a, b: plain(a, b) / 0, Difference.UNEXPLAINED, "NaN or infinite"),
    ],
)
def test_wrong_products_are_diagnosed(dtype: torch.dtype, made: Made, difference: Difference, words: str) -> None:
    a, b = drawn(SIZE, LONG), drawn(SIZE, LONG, 1)
    result = made(a, b).to(dtype)
    explained, why = explain_product_difference(result, sums_of(a, b, dtype))
    assert (explained, words in why) == (difference, True), why


def test_products_that_are_rounded_read_or_ended_otherwise() -> None:
    a, b = drawn(SIZE, LONG), drawn(SIZE, LONG, 1)
    sums = sums_of(a, b, torch.bfloat16)
    explained, why = explain_product_difference(cut(a, b).to(torch.bfloat16), sums)
    assert explained is Difference.ROUNDING and "truncated toward 0" in why
    noise = torch.randint(0, 1 << 16, (SIZE, SIZE), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    result = ((plain(a, b).view(torch.int32) + noise) & -(1 << 16)).view(torch.float32).to(torch.bfloat16)
    assert explain_product_difference(result, sums)[0] is Difference.ROUNDING
    c, d = drawn(SIZE, SIZE), drawn(SIZE, SIZE, 1)
    explained, why = explain_product_difference(c @ d, sums_of(c, d))
    assert explained is Difference.LAYOUT and "second operand is read transposed" in why
    large, ones = 1e3 * torch.ones(SIZE, SIZE), 1e3 * torch.ones(SIZE, SIZE)
    ones[0] = 1.0
    sums = sums_of(large, ones, torch.float16)
    assert explain_product_difference((large @ ones.t()).to(torch.float16), sums)[0] is Difference.OVERFLOW


@for_each("seed", range(5))
def test_orders_never_alarm(seed: int) -> None:
    a, b = drawn(SIZE, LONG, 2 * seed), drawn(SIZE, LONG, 2 * seed + 1)
    for ours, theirs in ((a, b), (a.abs(), b.abs())):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            result = backwards(ours, theirs).to(dtype)
            if result.isfinite().all():
                assert explain_product_difference(result, sums_of(ours, theirs, dtype))[0] is Difference.ORDER


def test_a_recipe_of_short_sums_takes_them() -> None:
    a, b = drawn(SIZE, LONG), drawn(SIZE, LONG, 1)
    result = short_product(a, b, Accumulator.SHORT)
    assert explain_product_difference(result, sums_of(a, b, bits=14))[0] is Difference.ORDER
    assert estimate_accumulator_bits(result.double(), sums_of(a, b)) == 14


def test_results_where_all_products_are_zero_are_sums_of_nothing() -> None:
    a, b = drawn(SIZE, LONG), drawn(SIZE, LONG, 1)
    a[0] = 0
    result = a @ b.t()
    result[0] = 8
    sums = sums_of(a, b)
    assert (
        estimate_accumulator_bits(result.double(), sums) == 24
        and explain_product_difference(result, sums)[0] is Difference.UNEXPLAINED
    )


def rounded(x: Tensor, fmt: Format = E4M3) -> Tensor:
    return values(x, fmt, Scaling(0, 0))


def cut_cast(x: Tensor) -> Tensor:
    scale = 448.0 / x.abs().max()
    scaled = x * scale
    stored = (scaled.view(torch.int32) & -(1 << 20)).view(torch.float32)
    small = (scaled * 512).trunc() / 512
    return rounded(torch.where(scaled.abs() < 2.0**-6, small, stored) / scale)


@for_each(
    ("made", "difference", "words"),
    [
        (lambda x: rounded(x).t().contiguous(), Difference.LAYOUT, "transposed"),
        (lambda x: rounded(x).roll(3, 0), Difference.LAYOUT, "rows are permuted"),
        (lambda x: 2 * rounded(x), Difference.SCALE, "the tensor scaled by 2"),
        (lambda x: rounded(x) * torch.exp2(torch.arange(128) % 3)[:, None], Difference.SCALE, "rows scaled by 1 to 4"),
        (cut_cast, Difference.ROUNDING, "truncated toward 0"),
        (lambda x: rounded(x, E5M2), Difference.UNEXPLAINED, "values have 2 mantissa bits, where e4m3fn has 3"),
        (torch.clone, Difference.UNEXPLAINED, ""),
    ],
)
def test_wrong_casts_are_diagnosed(made: Callable[[Tensor], Tensor], difference: Difference, words: str) -> None:
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
    explained, why = explain_cast_difference(made(x), rounded(x), x, E4M3)
    assert (explained, words in why) == (difference, True), why


def test_what_lies_beyond_may_become_nan_or_the_largest() -> None:
    """torch's cast of 1000 gives NaN, the hardware's 448."""
    x = torch.tensor([[1000.0, 1.0], [-1000.0, 2.0]])
    expected = torch.tensor([[448.0, 1.0], [-448.0, 2.0]])
    result = torch.tensor([[torch.nan, 1.0], [torch.nan, 2.0]])
    assert explain_cast_difference(result, expected, x, E4M3) == (
        Difference.OVERFLOW,
        "a value above the format's largest becomes nan, not 448",
    )


def test_steps_are_counted_across_zero() -> None:
    one = torch.tensor([1.0, -(2.0**-149), torch.nan, torch.nan])
    other = torch.tensor([1.0 + 2.0**-22, 2.0**-149, torch.nan, 1.0])
    assert count_ulps_between(one, other).tolist() == [2.0, 2.0, 0.0, float("inf")]


def test_a_device_that_computes_nothing_is_not_scaled_by_zero() -> None:
    a, b = drawn(SIZE, LONG), drawn(SIZE, LONG, 1)
    nothing = torch.zeros(SIZE, SIZE)
    assert explain_product_difference(nothing, sums_of(a, b)) == (
        Difference.UNEXPLAINED,
        "all results are 0",
    )
    wrong = sums_of(torch.full_like(a, torch.nan), b)
    assert explain_product_difference(nothing + 1, wrong) == (Difference.UNEXPLAINED, "operands have NaN or infinity")
    assert explain_cast_difference(nothing, rounded(a[:, :SIZE]), a[:, :SIZE], E4M3) == (
        Difference.UNEXPLAINED,
        "all values are 0",
    )


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


@for_each("dtype", [torch.bfloat16, torch.float32])
@for_each(("operands", "like"), [("fp8", ""), ("bf16", "bf16"), ("copies", "copies")])
def test_a_product_looks_like_what_it_was_made_of(operands: str, like: str, dtype: torch.dtype) -> None:
    a, b = (tensor.float() for tensor in guesses()[operands])
    assert find_nearest_precision((a @ b.t()).to(dtype), "fp8", guesses()) == like


def test_short_sums_and_what_is_no_number_accuse_nobody() -> None:
    a, b = fp8(*sources())
    assert find_nearest_precision(short_product(a, b, Accumulator.SHORT), "fp8", guesses()) == ""
    assert find_nearest_precision(torch.full((M, N), torch.nan), "fp8", guesses()) == ""


def test_powers_of_two_keep_copies_from_being_told() -> None:
    """If bfloat16 represents the operands exactly, numbers cannot show that copies were used."""
    low = tuple(round_to(item.float(), E4M3) for item in sources())
    same = {"fp8": (low[0], low[1]), "copies": (low[0].bfloat16(), low[1].bfloat16())}
    assert find_nearest_precision((low[0] @ low[1].t()).bfloat16(), "fp8", same) == ""


def test_tf32_that_is_not_switched_on() -> None:
    a, b = sources(torch.float32)
    low = tuple(round_to(item, TF32, overflow=Overflow.INFINITY) for item in (a, b))
    known = {"tf32": (low[0], low[1]), "fp32": (a, b), "bf16": (a.bfloat16(), b.bfloat16())}
    assert find_nearest_precision(a @ b.t(), "tf32", known) == "fp32"
    assert find_nearest_precision(low[0] @ low[1].t(), "tf32", known) == ""
    assert find_nearest_precision(a.bfloat16().float() @ b.bfloat16().float().t(), "fp32", known) == "bf16"


@for_each("seed", range(2))
@for_each("name", [name for name in precisions.names() if precisions.get(name).takes_backend])
def test_honest_products_never_alarm(name: str, seed: int) -> None:
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
            assert find_nearest_precision(product, name, known) == ""


def test_sums_as_short_as_units_may_have_are_not_taken_for_errors() -> None:
    """Sums of 14 bits and more are short sums; sums of 10 bits, a lost product and a wrong scale are errors."""
    a, b = (tensor.double() for tensor in fp8(*sources()))
    sums = ConformitySums(a, b, torch.float32)
    for bits, short in ((22, True), (14, True), (10, False)):
        assert matches_14_bit_sums(short_product(a.float(), b.float(), Accumulator.SHORT, bits), sums) is short
    lost = (a[:, 1:] @ b[:, 1:].t()).float()
    for wrong in (lost, torch.zeros(M, N), 1.05 * sums.product.float(), torch.full((M, N), torch.nan)):
        assert not matches_14_bit_sums(wrong, sums)


class _Summing:
    """torch's fp8 codes multiplied with sums of `bits` bits, or without the first product."""

    def __init__(self, bits: int, forgets: bool) -> None:
        self._native = precisions.get("fp8").native(CPU).layer("conform")  # type: ignore[attr-defined]
        self._bits, self._first = bits, int(forgets)

    def __getattr__(self, name: str) -> object:
        return getattr(self._native, name)

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        first, second = (self._native.restore(operand, torch.float32)[:, self._first :] for operand in (a, b))
        return short_product(first, second, Accumulator.SHORT, self._bits).to(dtype)


def compared_on(device: DeviceFacts, bits: int, forgets: bool, name: str = "fp8") -> _ComparedPrecision:
    precision = precisions.get(name)
    compared = _ComparedPrecision(
        precision, lambda: _Summing(bits, forgets), lambda: precision.arithmetic(CPU).layer("conform"), device, 0
    )  # type: ignore[arg-type, return-value]
    compared._device = "cpu"
    return compared


@for_each(
    ("device", "bits", "forgets", "kind"),
    [
        (L4, 16, False, Difference.SHORT_SUMS),
        (B200, 14, False, Difference.SHORT_SUMS),
        (H200, 16, False, Difference.ACCUMULATION),
        (L4, 24, True, Difference.UNEXPLAINED),
        (L4, 9, False, Difference.ACCUMULATION),
    ],
)
def test_units_that_nobody_knows_may_sum_as_short_as_hoppers(
    device: DeviceFacts, bits: int, forgets: bool, kind: Difference
) -> None:
    """So that no speed is withheld on an L4 or B200. Hopper's units are known and must match."""
    cases = compared_on(device, bits, forgets)._compare_product("forward", 128, 128, 1024)
    long_sums = [case.difference for case in cases]
    conforms = all(difference is not None and difference.conforms for difference in long_sums)
    assert kind in long_sums and conforms == (kind is Difference.SHORT_SUMS)


@for_each("name", ["fp8", "fp8-e5m2"])
def test_casts_are_also_compared_above_the_range_of_a_format(name: str) -> None:
    compared, compared_values = compared_on(H200, 24, False, name), []
    compared._compare_cast = lambda words, role, x, how: compared_values.append((words, compared._formats[role], x))  # type: ignore[method-assign]
    list(compared.compare_casts())
    above = [x.abs().max() > fmt.largest for words, fmt, x in compared_values if "beyond its range" in words]
    assert above and all(above)


def test_units_are_told_by_their_bits_alone() -> None:
    codes = tuple(values(drawn(16, 256, seed), E4M3, None).clamp(-8, 8) for seed in (0, 1))
    scales = torch.rand(2, 16, 2, generator=torch.Generator().manual_seed(2)) + 0.5
    ways = {
        "tensor": tuple(scale[:1, :1].expand(16, 256) for scale in scales),
        "rows": tuple(scale[:, :1].expand(16, 256) for scale in scales),
        "blocks": tuple(scale.repeat_interleave(PROMOTION_LENGTH, 1) for scale in scales),
    }
    for way, (down, across) in ways.items():
        total = torch.zeros(16, 16)
        for start in range(0, 256, PROMOTION_LENGTH):
            part = slice(start, start + PROMOTION_LENGTH)
            sums = sum_like_hopper_units(codes[0][:, part], codes[1][:, part]).float()
            total += sums * down[:, start, None] * across[:, start]
        for dtype in (torch.float32, torch.bfloat16):
            assert matches_hopper_units(total.to(dtype), codes, (down, across), promoted=True), way
        one = total.clone()
        one[3, 5] *= 1 + 2.0**-12
        whole = (codes[0] * down) @ (codes[1] * across).t()
        assert not any(matches_hopper_units(result, codes, (down, across), promoted=True) for result in (one, whole)), (
            way
        )
        assert not matches_hopper_units(total, codes, (down, across), promoted=False), way
