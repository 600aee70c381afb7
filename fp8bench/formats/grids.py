"""What a low-precision number is: one definition of each format. Nothing here knows torch.

A format's grid is every value sign * 2^e * (1 + m / 2^mantissa_bits) between its smallest normal and its largest,
with evenly spaced subnormals below.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    `largest` is the largest finite value, which is not always the one the exponent bits suggest: E4M3 gives its
    last code to NaN, E2M1 has neither NaN nor infinity. `saturates` says what fp8bench makes of larger values:
    the largest one, infinities included (as the hardware's satfinite conversions do), or else infinity.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float
    has_infinity: bool
    has_nan: bool
    saturates: bool = True

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number, and of the spacing of the subnormals."""
        return 1 - self.bias

    @property
    def smallest_normal(self) -> float:
        return 2.0**self.min_exponent

    @property
    def smallest_subnormal(self) -> float:
        return 2.0 ** (self.min_exponent - self.mantissa_bits)


# The OCP 8-bit formats, as NVIDIA has them ("e4m3fn"). AMD's MI300 has others of the same names ("fnuz").
E4M3 = Format("e4m3", exponent_bits=4, mantissa_bits=3, bias=7, largest=448.0, has_infinity=False, has_nan=True)
E5M2 = Format("e5m2", exponent_bits=5, mantissa_bits=2, bias=15, largest=57344.0, has_infinity=True, has_nan=True)
# The OCP 4-bit format: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
E2M1 = Format("e2m1", exponent_bits=2, mantissa_bits=1, bias=1, largest=6.0, has_infinity=False, has_nan=False)
# IEEE half precision and bfloat16, which torch itself rounds to: here for their range.
FP16 = Format(
    "fp16",
    exponent_bits=5,
    mantissa_bits=10,
    bias=15,
    largest=65504.0,
    has_infinity=True,
    has_nan=True,
    saturates=False,
)
BF16 = Format(
    "bf16",
    exponent_bits=8,
    mantissa_bits=7,
    bias=127,
    largest=(2 - 2.0**-7) * 2.0**127,
    has_infinity=True,
    has_nan=True,
    saturates=False,
)
# What a TF32 tensor core keeps of a float32: all of the exponent, ten bits of the mantissa. A stand-in for float32,
# so it overflows as float32 does.
TF32 = Format(
    "tf32",
    exponent_bits=8,
    mantissa_bits=10,
    bias=127,
    largest=(2 - 2.0**-10) * 2.0**127,
    has_infinity=True,
    has_nan=True,
    saturates=False,
)

FORMATS: dict[str, Format] = {fmt.name: fmt for fmt in (E4M3, E5M2, E2M1, TF32)}
# The formats whose range the data of a run are held against, widest first.
RANGES = (BF16, FP16, E5M2, E4M3, E2M1)

# E8M0, the scale of the MX formats, is no Format: it has neither sign, mantissa nor zero, only the powers of two
# from 2^-127 to 2^127 (code + bias) and a NaN (code 255).
E8M0_BIAS = 127
E8M0_LARGEST_CODE = 254
