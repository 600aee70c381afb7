"""What FP8 and MX modes make of a tensor, against numpy and ml_dtypes: the values they have had from the beginning."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

from fp8bench.protocols import Role
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.facts import CPU

Floats = npt.NDArray[np.float32]
LARGEST = {ml_dtypes.float8_e4m3fn: 448.0, ml_dtypes.float8_e5m2: 57344.0, ml_dtypes.float4_e2m1fn: 6.0}
MX_BLOCK = 32


def rounded(x: Floats, dtype: type) -> Floats:
    """To nearest even, what is too large to the largest."""
    return np.clip(x, -LARGEST[dtype], LARGEST[dtype]).astype(dtype).astype(np.float32)


def by_tensor(x: Floats, dtype: type) -> Floats:
    """One float32 scale, the largest of the format over the largest magnitude; and its inverse, to give values back."""
    scale = np.float32(LARGEST[dtype]) / np.abs(x).max()
    return rounded(x * scale, dtype) * (np.float32(1) / scale)


def by_mx(x: Floats, dtype: type) -> Floats:
    """Blocks of 32 along the rows, scaled by the power of two at or above the quotient, in float64 throughout."""
    missing = -x.shape[1] % MX_BLOCK
    blocks = np.pad(x.astype(np.float64), ((0, 0), (0, missing))).reshape(len(x), -1, MX_BLOCK)
    amax = np.abs(blocks).max(-1, keepdims=True)
    mantissa, exponent = np.frexp(np.where(amax == 0, 2.0**-300, amax) / LARGEST[dtype])
    power = np.clip(exponent - (mantissa == 0.5), -127, 127)
    left = rounded((blocks * 2.0**-power).astype(np.float32), dtype).astype(np.float64) * 2.0**power
    return left.reshape(len(x), -1)[:, : x.shape[1]].astype(np.float32)


def tensors() -> list[Floats]:
    """Gaussian ones of many magnitudes, with outliers, with rows octaves apart, with zeros, of odd widths."""
    random = np.random.default_rng(3)
    found = []
    for width in (64, 96, 37):
        x = random.standard_normal((40, width)).astype(np.float32)
        outliers = np.where(random.random(x.shape) < 0.01, np.float32(1000), np.float32(1))
        rows = (2.0 ** random.integers(-20, 20, (40, 1))).astype(np.float32)
        found += [x, x * np.float32(3e-9), x * outliers, x * rows, x * (random.random(x.shape) < 0.2)]
    return [one.astype(np.float32) for one in found]


@for_each(
    ("mode", "role", "dtype", "how"),
    [
        ("fp8", Role.INPUT, ml_dtypes.float8_e4m3fn, by_tensor),
        ("fp8", Role.WEIGHT, ml_dtypes.float8_e4m3fn, by_tensor),
        ("fp8", Role.GRADIENT, ml_dtypes.float8_e5m2, by_tensor),
        ("mxfp8", Role.INPUT, ml_dtypes.float8_e4m3fn, by_mx),
        ("mxfp8", Role.GRADIENT, ml_dtypes.float8_e4m3fn, by_mx),
        ("mxfp4", Role.WEIGHT, ml_dtypes.float4_e2m1fn, by_mx),
    ],
)
def test_values_are_numpy_s(mode: str, role: Role, dtype: type, how: object) -> None:
    """Bit for bit, from float32 and from bfloat16, and turned."""
    assert callable(how)
    arithmetic = precisions.get(mode).arithmetic(CPU)
    for x in tensors():
        source = torch.from_numpy(x)
        for tensor in (source, source.bfloat16(), source.t()):
            wanted = how(tensor.float().numpy(), dtype)
            assert np.array_equal(arithmetic.cast(tensor, role).data.numpy(), wanted)
