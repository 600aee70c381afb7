"""Native casts: codes and scales against ml_dtypes and numpy, compiled against eager, and who sees one operator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from fp8bench.formats import operators, vector_width
from fp8bench.formats.code_kernels import CodesKernel
from fp8bench.formats.codes import CODE_DTYPES
from fp8bench.formats.compiling import CombinedKernel
from fp8bench.formats.grids import E4M3, E5M2, FP16, Format
from fp8bench.formats.native_codes import (
    cast_codes_with_transpose,
    codes,
    compute_current_scale,
    delayed_scale,
    row_codes,
    row_codes_both,
    square_codes,
    transpose_codes,
)
from fp8bench.formats.recipes import Amax, DelayedScaling, ScaleRounding, Scaling
from fp8bench.formats.scale_layouts import store_by_columns, store_square_scales
from fp8bench.formats.scaled import largest_magnitude, quantise
from tests.counts import for_each, sampled
from tests.formats.test_operators import AWKWARD, BF16, F16, F32, Operators, assert_fused, counted

EXACT, POWER_OF_TWO = ScaleRounding.EXACT, ScaleRounding.POWER_OF_TWO
NUMPY = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2, FP16: np.float16}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Cast(NamedTuple):
    """A cast to test; by row, or with one scale."""

    fmt: Format
    source: torch.dtype
    rounding: ScaleRounding
    by_row: bool = False

    def __str__(self) -> str:
        return f"{self.fmt.name} {str(self.source).removeprefix('torch.')} {self.rounding}{' row' * self.by_row}"


CASTS = [
    Cast(E4M3, BF16, EXACT),
    Cast(E5M2, F32, POWER_OF_TWO),
    Cast(E4M3, F16, EXACT),
    Cast(FP16, F32, EXACT),
    Cast(E4M3, BF16, POWER_OF_TWO, by_row=True),
    Cast(E5M2, F32, EXACT, by_row=True),
]
DELAYED = [DelayedScaling(4), DelayedScaling(3, Amax.MOST_RECENT, margin=2), DelayedScaling(1024, interval=3)]


def pieces(source: torch.dtype) -> Iterator[Tensor]:
    """Matrices of many sizes and strides: multiples of 16 and not, transposed, slices, one row, one column."""
    x, tame = AWKWARD.to(source), AWKWARD[8:41, :250].to(source)
    yield from (x, x[192:208], x.t(), tame, tame.t(), x[:, 3:200], x[:64:2, ::3], x[:1], x[:, :1], x[:16, :16].t())
    yield from (torch.zeros(16, 32, dtype=source), torch.full((7, 5), float("nan"), dtype=source), x[5:7])


def cast(x: Tensor, how: Cast) -> list[Tensor]:
    """All outputs of the operators for a matrix."""
    if how.by_row:
        return [*row_codes(x, how.fmt, how.rounding), *row_codes(x.t(), how.fmt, how.rounding)]
    scale, inverse = compute_current_scale(largest_magnitude(x), how.fmt, how.rounding)
    both = cast_codes_with_transpose(x, how.fmt, scale)
    turned = transpose_codes(both[0]) if both[0].element_size() == 1 else both[1]
    return [scale, inverse, *both, codes(x, how.fmt, scale), codes(x, how.fmt), turned]


BLOCKS = [(E4M3, BF16, POWER_OF_TWO), (E4M3, F32, EXACT)]


def in_blocks(x: Tensor, fmt: Format, rounding: ScaleRounding) -> list[Tensor]:
    """All outputs of the operators for a matrix in blocks of 128."""
    pairs = [row_codes(x, fmt, rounding, 128), row_codes(x.t(), fmt, rounding, 128)]
    pairs += [*square_codes(x, fmt, rounding), *square_codes(x, fmt, rounding, both=True)]
    return [one for pair in pairs for one in pair]


def in_blocks_stored(x: Tensor, fmt: Format, rounding: ScaleRounding) -> list[Tensor]:
    """The same from stored tensors, laid out afterwards."""
    result = []
    for one, side in ((x, 1), (x.t(), 1), (x, 128), (x, 128), (x.t(), 128)):
        stored = quantise(one, fmt, Scaling(side, 128, rounding=rounding))
        assert stored.scales is not None
        scales = store_by_columns(stored.scales) if side == 1 else store_square_scales(stored.scales)
        result += [stored.codes.view(CODE_DTYPES[fmt.name]), scales]
    return result


def scales_by_definition(x: np.ndarray, how: Cast) -> np.ndarray:
    """Scales of a matrix, per row or as a whole, in float32 operation by operation."""
    amax = np.abs(x).max(axis=1, keepdims=True) if how.by_row else np.abs(x).max()
    usable = np.isfinite(amax) & (amax > 0)
    with np.errstate(all="ignore"):
        scale = np.where(usable, np.minimum(np.float32(how.fmt.largest) / amax, np.float32(2.0**126)), np.float32(1))
    if how.rounding is POWER_OF_TWO:
        scale = np.ldexp(np.float32(0.5), np.frexp(scale)[1])
    return np.asarray(scale, np.float32)


def codes_by_definition(x: np.ndarray, scale: np.ndarray | float, fmt: Format) -> np.ndarray:
    """Codes by ml_dtypes' rounding of unsaturated values."""
    with np.errstate(all="ignore"):
        return np.clip(x * np.float32(scale), -fmt.largest, fmt.largest).astype(NUMPY[fmt])


def same(one: Tensor, other: Tensor) -> bool:
    """Equal in every bit, except NaN payloads."""
    if one.shape != other.shape or one.dtype != other.dtype or not one.is_contiguous():
        return False
    number = ~(one.float().isnan() & other.float().isnan())
    bits = BITS[one.element_size()]
    return torch.equal(one.view(bits)[number], other.contiguous().view(bits)[number])


@for_each("how", CASTS)
def test_codes_and_scales_are_those_of_the_definition(how: Cast) -> None:
    for x in pieces(how.source):
        given = x.float().numpy()
        if how.by_row:
            result, inverse, turned, of_columns = cast(x, how)
            assert np.array_equal(inverse.numpy(), 1 / scales_by_definition(given, how))
            assert np.array_equal(of_columns.numpy(), 1 / scales_by_definition(given.T, how))
            expected = [codes_by_definition(one, scales_by_definition(one, how), how.fmt) for one in (given, given.T)]
            got = [result, turned]
        else:
            scale, inverse, *got = cast(x, how)
            defined = scales_by_definition(given, how)
            assert scale.numpy() == defined and inverse.numpy() == 1 / defined
            straight = codes_by_definition(given, defined, how.fmt)
            expected = [straight, straight.T, straight, codes_by_definition(given, 1.0, how.fmt), straight.T]
        for mine, theirs in zip(got, expected, strict=True):
            bits = torch.from_numpy(np.ascontiguousarray(theirs).view(np.uint8)).view(CODE_DTYPES[how.fmt.name])
            assert same(mine, bits), (x.shape, x.stride())


def all_same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(same(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("how", sampled(CASTS[:1], CASTS), ids=str)
def test_compiled_is_eager_bit_by_bit(how: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_fused(monkeypatch, lambda x: cast(x, how), [*pieces(how.source)], all_same)


def same_blocks(found: list[Tensor], wanted: list[Tensor]) -> bool:
    """Scales are also where a product reads them; padding is zero."""
    pairs = [*zip(found, wanted, strict=True)]
    data = all(same(*pair) for pair in pairs[::2])
    return data and all(torch.equal(*pair) and pair[0].stride() == pair[1].stride() for pair in pairs[1::2])


@for_each(("fmt", "source", "rounding"), BLOCKS)
def test_blocks_are_stored_ones(fmt: Format, source: torch.dtype, rounding: ScaleRounding) -> None:
    """Stored ones are compared with definitions in test_scaled.py."""
    for x in pieces(source):
        assert same_blocks(in_blocks(x, fmt, rounding), in_blocks_stored(x, fmt, rounding)), (x.shape, x.stride())


@pytest.mark.slow
def test_compiled_blocks_are_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    fmt, source, rounding = BLOCKS[0]
    many = [*pieces(source), AWKWARD.repeat(2, 2)[:256, :384].to(source)]
    assert_fused(monkeypatch, lambda x: in_blocks(x, fmt, rounding), many, same_blocks)


def both_ways(x: Tensor) -> list[Tensor]:
    """Row-wise and in blocks of 128."""
    pairs = [*row_codes_both(x, E4M3, POWER_OF_TWO), *row_codes_both(x, E4M3, EXACT, 128)]
    return [one for pair in pairs for one in pair]


def one_way_each(x: Tensor) -> list[Tensor]:
    casts = [(one, *how) for how in ((POWER_OF_TWO, 0), (EXACT, 128)) for one in (x, x.t())]
    pairs = [row_codes(one, E4M3, rounding, block) for one, rounding, block in casts]
    return [one for pair in pairs for one in pair]


def test_both_ways_are_each_by_itself() -> None:
    for x in pieces(BF16):
        assert same_blocks(both_ways(x), one_way_each(x)), (x.shape, x.stride())


@pytest.mark.nightly
def test_compiled_both_ways_are_each_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    x = AWKWARD.to(BF16)
    assert_fused(monkeypatch, both_ways, [x, x[192:208], x[8:41, :250], x.repeat(2, 2)[:256, :384]], same_blocks)
    assert any(isinstance(one, CombinedKernel) for one in operators.KERNELS._ready)


def course(delayed: DelayedScaling, fmt: Format, device: str = "cpu") -> list[list[Tensor]]:
    """Outputs and states of thirty casts with growing and shrinking magnitudes, zeros and non-finite values."""
    history, casts = torch.zeros(delayed.history, device=device), torch.zeros((), dtype=torch.int32, device=device)
    scale, result = torch.ones((), device=device), []
    for step in range(30):
        amax = torch.tensor({5: 0.0, 9: float("inf"), 13: float("nan")}.get(step, 3.0 ** (step % 7) * 1e-3))
        used, inverse = delayed_scale(amax.to(device), history, casts, scale, fmt, delayed)
        result.append([one.clone().cpu() for one in (used, inverse, history, casts, scale)])
    return result


@pytest.mark.slow
@pytest.mark.parametrize("delayed", sampled(DELAYED[:1], DELAYED), ids=str)
def test_compiled_delayed_scales_are_the_eager_ones(delayed: DelayedScaling, monkeypatch: pytest.MonkeyPatch) -> None:
    """State included; eager ones are compared with a definition in tests/nn/test_tensor_scales.py."""
    monkeypatch.setattr(operators, "KERNELS", operators.Kernels())
    monkeypatch.setattr(vector_width, "vector_widths", lambda device: ())
    eager = course(delayed, E4M3)
    operators.KERNELS.compile(*operators.KERNELS.wanted)
    compiled = course(delayed, E4M3)
    assert counted()[:2] == (30, 30)
    assert all(torch.equal(*pair) for steps in zip(eager, compiled, strict=True) for pair in zip(*steps, strict=True))
    assert len({float(step[0]) for step in eager}) > 3 and int(eager[-1][3]) == 30


@for_each("device", ["cpu", "meta"])
def test_a_call_is_one_operator_under_a_dispatch_mode(device: str) -> None:
    x, blocks = torch.zeros(32, 48, device=device), torch.zeros(512, 512, device=device)
    amax, history, casts = torch.ones((), device=device), torch.zeros(4, device=device), torch.zeros((), device=device)
    with Operators() as seen:
        scale, _ = compute_current_scale(amax, E4M3, EXACT)
        transpose_codes(codes(x, E4M3, scale))
        cast_codes_with_transpose(x.t(), E5M2, scale)
        row_codes(x.t(), E4M3, EXACT)
        delayed_scale(amax, history, casts.int(), scale, E4M3, DelayedScaling(4))
        row_codes(blocks, E4M3, EXACT, 128)
        square_codes(blocks.t(), E4M3, EXACT, both=True)
    allowed = ("empty", "detach", "aten.t.", "view", "_to_copy", "as_strided", "slice", "alias")
    assert [name for name in seen.names if not any(word in name for word in allowed)] == [
        f"fp8bench.{name}.default"
        for name in (
            "scale",
            "codes",
            "codes",
            "codes",
            "row_codes",
            "delayed_scale",
            "row_codes",
            "square_scales",
            "codes",
        )
    ]


@pytest.mark.slow
def test_in_a_graph_that_is_compiled_casts_are_plain_operations() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def step(x: Tensor) -> list[Tensor]:
        return [*cast(x, CASTS[0]), *cast(x, CASTS[4]), *in_blocks(x, E4M3, EXACT)]

    x = AWKWARD[:48, :64].bfloat16()
    result = torch.compile(step, backend=backend, fullgraph=True)(x)
    torch.compiler.reset()
    assert all(same(one.contiguous(), other.contiguous()) for one, other in zip(result, step(x), strict=True))
    assert not any("fp8bench" in str(node.target) for graph in graphs for node in graph.graph.nodes)


@for_each(("straight", "turned", "scaled"), [(True, False, False), (False, True, True), (True, True, True)])
def test_sizes_of_every_argument_of_a_kernel_are_free(straight: bool, turned: bool, scaled: bool) -> None:
    kernel = CodesKernel(E4M3, F32, "cpu", 16, straight, turned, scaled, has_scale_per_square=scaled)
    free = dict(zip(kernel.examples(), kernel.free(), strict=True))
    assert len(free) == 1 + straight + turned + scaled and set(free.values()) == {(0, 2)}
