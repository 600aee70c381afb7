"""The formats' numbers against ml_dtypes' and numpy's."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import pytest

from fp8bench.formats.grids import E2M1, E4M3, E5M2, FORMATS, TF32, Format


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [(E4M3, ml_dtypes.float8_e4m3fn), (E5M2, ml_dtypes.float8_e5m2), (E2M1, ml_dtypes.float4_e2m1fn)],
    ids=lambda value: value.name if isinstance(value, Format) else "",
)
def test_limits_agree_with_ml_dtypes(fmt: Format, dtype: type) -> None:
    info = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    assert fmt.largest == float(info.max)
    assert fmt.smallest_normal == float(info.smallest_normal)
    assert fmt.smallest_subnormal == float(info.smallest_subnormal)
    assert fmt.mantissa_bits == info.nmant
    assert 1 + fmt.exponent_bits + fmt.mantissa_bits == info.bits


def test_tf32_has_the_exponents_of_float32() -> None:
    assert TF32.smallest_normal == 2.0**-126
    assert TF32.smallest_subnormal == 2.0**-136
    assert TF32.largest < 2.0**128


def test_names_lead_to_formats() -> None:
    assert all(FORMATS[name].name == name for name in FORMATS)


def test_grids_and_hardware_need_no_torch() -> None:
    code = "import sys, fp8bench.formats.grids, fp8bench.formats.hardware; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"
