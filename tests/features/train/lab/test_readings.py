"""What a tensor says of itself and of its rounding: against definitions written out in numpy, over all recipes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8bench.features.train.lab import readings
from fp8bench.features.train.lab.readings import cast_of, figures_of, read, reading_of
from fp8bench.features.train.values import LayerReading
from fp8bench.formats.codes import decode
from fp8bench.formats.grids import FORMATS, Format
from fp8bench.formats.recipes import Scaling
from fp8bench.formats.scaled import quantise
from fp8bench.nn.arithmetics import RecipeArithmetic
from fp8bench.numerics.operands import OperatorWatch
from fp8bench.protocols import Arithmetic, Role
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.facts import CPU
from tests.formats.scaling_definitions import gaussian

MODES = (
    "fp32", "bf16", "fp16", "tf32", *(name for name in precisions.names() if name.startswith(("fp8", "mx", "nv"))),
    "mxfp8:scale=floor", "mxfp4:scale=floor", "fp8-delayed:margin=2",
)  # fmt: skip


def reading(arithmetic: Arithmetic, x: Tensor, role: Role, before: float | None = None) -> tuple[LayerReading, Tensor]:
    """The reading of a cast, and what it left."""
    operand = arithmetic.cast(x, role)
    (found,) = read([figures_of(x, cast_of(arithmetic, operand, x, role))])
    return reading_of("arm", 1, 2, "layer", role.value, found, before), arithmetic.restore(operand, torch.float32)


Array = NDArray[np.float64]


def factors(x: Tensor, fmt: Format, scaling: Scaling) -> Array:
    """What each element was times, from what is stored of the tensor."""
    stored = quantise(x.nan_to_num(0.0, 0.0, 0.0), fmt, scaling)
    assert stored.scales is not None
    steps = stored.scales if scaling.scale is None else decode(stored.scales, scaling.scale, checked=False)
    if stored.tensor_scale is not None:
        steps = steps * stored.tensor_scale
    rows, columns = scaling.rows or x.shape[0], scaling.columns or x.shape[1]
    wide = steps.reshape(-(-x.shape[0] // rows), -1).repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return wide[: x.shape[0], : x.shape[1]].double().numpy()


def check(arithmetic: Arithmetic, x: Tensor, role: Role) -> LayerReading:
    """Counts to the last one, sums to their rounding."""
    found, left = reading(arithmetic, x, role)
    a, b = x.double().numpy(), left.double().numpy()
    sound = np.isfinite(a)
    kept = sound & np.isfinite(b)
    exact, count = a[sound], a.size
    magnitudes = np.abs(exact)
    nonzero = magnitudes[magnitudes > 0]
    assert found.amax == magnitudes.max() and found.smallest == (nonzero.min() if nonzero.size else 0.0)
    scale = max(found.amax, 1e-300)
    assert found.mean / scale == pytest.approx(np.mean(exact / scale), rel=1e-5, abs=1e-7)
    assert found.deviation / scale == pytest.approx(np.std(exact / scale), rel=2e-5, abs=1e-7)
    assert found.zeros == np.count_nonzero(exact == 0) / count
    assert found.not_finite == np.count_nonzero(~kept) / count
    assert found.underflow == np.count_nonzero(sound & (a != 0) & (b == 0)) / count >= 0
    e = np.where(kept, b, 0.0) - np.where(kept, a, 0.0)
    signal, noise = ((np.where(kept, a, 0.0) / scale) ** 2).sum(), ((e / scale) ** 2).sum()
    if found.signal_to_noise is None:
        assert noise == 0
    else:
        assert found.signal_to_noise == pytest.approx(10 * np.log10(signal / noise) if noise else 200.0, abs=1e-3)
    return found


def spread_out(shape: tuple[int, int], seed: int = 0) -> Tensor:
    """Values over many octaves, with zeros, a row and a block of zeros, subnormal numbers, an uneven end."""
    x = gaussian(*shape, seed=seed) * torch.exp2(torch.arange(shape[1]) % 40 - 25.0)
    x[:, ::7] = 0
    x[3] = 0
    x[5, 32:64] = 0
    x[2, :3] = torch.tensor([1e-41, -1e-45, -0.0])
    return x


@for_each("mode", MODES)
def test_each_figure_is_its_definition(mode: str) -> None:
    """In each role, of float32 and of the carrier's own dtype."""
    arithmetic = precisions.get(mode).arithmetic(CPU).layer("layer")
    for role in Role:
        for x in (gaussian(40, 96), spread_out((40, 100)), spread_out((33, 70)).to(arithmetic.carrier)):
            found = check(arithmetic, x, role)
            if isinstance(arithmetic, RecipeArithmetic) and arithmetic.recipe.delayed is None:
                if arithmetic.treatments[role].scaling is None:
                    assert found.scale == found.least_scale == found.largest_scale == 1.0
                else:
                    check_scales(arithmetic, x, role, found)


def check_scales(arithmetic: RecipeArithmetic, x: Tensor, role: Role, found: LayerReading) -> None:
    """Over the blocks that are not zero, whose scale left something."""
    one = arithmetic.treatments[role]
    assert one.scaling is not None
    steps, a = factors(x.float(), one.fmt, one.scaling), np.abs(x.double().numpy())
    beyond = np.where(steps > 0, a / np.where(steps > 0, steps, 1) / one.fmt.largest, 0.0)
    assert found.saturated == np.count_nonzero(beyond > 1 + 2.0**-21) / a.size
    assert found.lag == pytest.approx(max(np.log2(beyond.max()), 0.0 if beyond.max() > 1 else -math.inf), abs=1e-6)
    rows, columns = one.scaling.rows or a.shape[0], one.scaling.columns or a.shape[1]
    used = [
        1 / steps[i, j]
        for i in range(0, a.shape[0], rows)
        for j in range(0, a.shape[1], columns)
        if a[i : i + rows, j : j + columns].any() and steps[i, j] > 0
    ]
    assert (found.least_scale, found.largest_scale) == pytest.approx((min(used), max(used)), rel=1e-7)
    assert math.log2(found.scale) == pytest.approx(np.mean(np.log2(used)), abs=1e-6)


@for_each("mode", ["bf16", "fp16", "fp8", "fp8-delayed", "fp8-rowwise", "mxfp8", "nvfp4"])
@for_each("bad", [math.inf, math.nan])
def test_what_is_not_finite_is_counted_and_stands_nowhere_else(mode: str, bad: float) -> None:
    """The others say what they would say without it; a block that is lost with it is counted, too."""
    arithmetic = precisions.get(mode).arithmetic(CPU).layer("layer")
    x = spread_out((24, 64))
    x[1, 1] = bad
    found = check(arithmetic, x, Role.INPUT)
    assert found.not_finite >= 1 / x.numel() and math.isfinite(found.amax)


def test_nothing_at_all() -> None:
    """Of zeros, of nothing, and of what is never finite."""
    arithmetic = precisions.get("fp8").arithmetic(CPU)
    zeros = check(arithmetic, torch.zeros(4, 8), Role.INPUT)
    assert (zeros.zeros, zeros.amax, zeros.smallest, zeros.lag, zeros.signal_to_noise) == (1, 0, 0, None, None)
    assert zeros.underflow == zeros.saturated == 0 and zeros.scale == 1
    (found,) = read([figures_of(torch.zeros(0, 8))])
    assert reading_of("arm", 0, 0, "", "input", found, None).zeros == 0
    (found,) = read([figures_of(torch.full((2, 2), math.nan))])
    lost = reading_of("arm", 0, 0, "", "input", found, None)
    assert lost.not_finite == 1 and lost.amax == lost.smallest == 0 and math.isnan(lost.mean)


@for_each("size", [1e-30, 1e-20, 3e19, 1e37])
def test_squares_neither_overflow_nor_vanish(size: float) -> None:
    """Of numbers whose squares float32 does not have."""
    found = check(precisions.get("bf16").arithmetic(CPU), gaussian(8, 64) * size, Role.WEIGHT)
    assert found.deviation == pytest.approx(size, rel=0.2) and found.signal_to_noise is not None


def test_a_spread_that_is_small_beside_the_mean_keeps_its_digits() -> None:
    """As of the weights of a norm, which are all near 1."""
    check(precisions.get("fp32").arithmetic(CPU), 1000 + gaussian(64, 64), Role.WEIGHT)


@for_each("piece", [1 << 26, 1000], ids=["whole", "in pieces"])
def test_what_a_gpu_does_gives_the_same(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There everything is counted, because nobody waits to see whether it has to be."""
    arithmetic = precisions.get("fp8").arithmetic(CPU)
    tensors = [gaussian(40, 96), spread_out((40, 100)), gaussian(40, 96).bfloat16(), 100 + gaussian(33, 7)]
    tensors.append(tensors[1].index_fill(1, torch.tensor([3]), math.inf))
    quick = [reading(arithmetic, x, Role.GRADIENT)[0] for x in tensors]
    monkeypatch.setattr(readings, "waits_for", lambda x: False)
    monkeypatch.setattr(readings, "_PIECE", piece)
    for x, before in zip(tensors, quick, strict=True):
        found, _ = reading(arithmetic, x, Role.GRADIENT)
        for name in ("amax", "smallest", "zeros", "underflow", "saturated", "not_finite", "scale"):
            assert getattr(found, name) == getattr(before, name), name
        assert found.deviation == pytest.approx(before.deviation, rel=1e-6)
        assert found.mean == pytest.approx(before.mean, rel=1e-5, abs=1e-6 * found.amax)
        assert found.signal_to_noise == pytest.approx(before.signal_to_noise, abs=1e-4)
    huge, _ = reading(arithmetic, gaussian(4, 8) * 1e25, Role.GRADIENT)
    assert math.isnan(huge.deviation) and huge.signal_to_noise is None, "float32 has no squares of these"


# Scales of rows or blocks, which are found anew.
CURRENT = ("fp8-rowwise", "fp8-block", "mxfp8", "nvfp4")


class _Waits(OperatorWatch):
    """Raises where a number is read, which on a GPU would wait for it; counts what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select"), f"{name} waits for the device"
        self.operators += name not in ("view", "detach", "reshape", "_unsafe_view", "as_strided", "expand", "select")
        return func(*args, **(kwargs or {}))


@for_each("mode", ["bf16", "fp16", "fp8", "fp8-delayed", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4"])
def test_on_a_gpu_nothing_waits_until_all_is_read(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no tensor takes more kernels than some dozens."""
    monkeypatch.setattr(readings, "waits_for", lambda x: False)
    arithmetic = precisions.get(mode).arithmetic(CPU).layer("layer")
    for role, x in ((Role.WEIGHT, gaussian(32, 256)), (Role.GRADIENT, spread_out((32, 256)).to(arithmetic.carrier))):
        cast = cast_of(arithmetic, arithmetic.cast(x, role), x, role)
        with _Waits() as seen:
            found = figures_of(x, cast)
        assert 15 < seen.operators < (95 if mode in CURRENT else 40) and read([found])[0]["count"] == x.numel()


def test_delayed_scales_say_lag_and_drift() -> None:
    """The scale is that of the cast before: what has grown fourfold since is two octaves beyond the largest."""
    arithmetic = precisions.get("fp8-delayed:history=1").arithmetic(CPU).layer("layer")
    x = gaussian(16, 64)
    arithmetic.cast(x, Role.INPUT)
    second, _ = reading(arithmetic, 4 * x, Role.INPUT)
    assert second.scale == pytest.approx(FORMATS["e4m3fn"].largest / float(x.abs().max()), rel=1e-6)
    assert second.lag == pytest.approx(2, abs=1e-5)
    assert second.saturated == float((4 * x.abs() > x.abs().max()).sum()) / x.numel() > 0
    third, _ = reading(arithmetic, 4 * x, Role.INPUT, before=second.scale)
    assert third.drift == pytest.approx(2) and third.lag == pytest.approx(0, abs=1e-5) and third.saturated == 0


def test_a_current_scale_never_lags() -> None:
    arithmetic = precisions.get("fp8").arithmetic(CPU)
    found = [reading(arithmetic, gaussian(1, 7, seed=seed) * 0.1 * seed, Role.INPUT)[0] for seed in range(1, 200)]
    assert all(one.lag is not None and -1e-5 < one.lag <= 0 and one.saturated == 0 for one in found)
