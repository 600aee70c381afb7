"""The definition of each low-precision format. Knows no torch.

A format's grid is every value sign * 2^e * (1 + m / 2^mantissa_bits) between its smallest normal and its largest, with
evenly spaced subnormals below.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Overflow(StrEnum):
    """The result of a value that would round beyond the largest if exponents had no upper end.

    SATURATE gives the largest one, for infinities too (as the hardware's satfinite conversions do).
    """

    SATURATE = "saturate"
    INFINITY = "infinity"
    NAN = "nan"


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    `largest` is the largest finite value, which is not always the one that the exponent bits suggest: e4m3fn's last
    code is NaN, e2m1 has neither NaN nor infinity. `signed` is about numbers, `signed_zero` about zero: fnuz formats
    have one zero, and -0's code is their only NaN. Without `zeros` a format has neither zero nor subnormals: e8m0 has
    powers of two only.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float
    has_infinity: bool = False
    has_nan: bool = False
    signed: bool = True
    signed_zero: bool = True
    zeros: bool = True

    @property
    def bits(self) -> int:
        """Bits of a code, sign included."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number, and of the spacing of the subnormals."""
        return 1 - self.bias if self.zeros else -self.bias

    @property
    def max_exponent(self) -> int:
        exponent, value = 0, self.largest
        while value >= 2:
            exponent, value = exponent + 1, value / 2
        return exponent

    @property
    def smallest_normal(self) -> float:
        return 2.0**self.min_exponent

    @property
    def smallest_subnormal(self) -> float:
        """The smallest subnormal; in a format without subnormals the smallest normal."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def overflows(self) -> tuple[Overflow, ...]:
        """The ways of overflowing that the format has codes for."""
        overflows = [Overflow.SATURATE]
        if self.has_infinity:
            overflows.append(Overflow.INFINITY)
        elif self.has_nan:
            overflows.append(Overflow.NAN)
        return tuple(overflows)


# The OCP 8-bit formats, as on NVIDIA; "fn" is finite: all codes but NaN's are numbers.
E4M3 = Format("e4m3fn", 4, 3, bias=7, largest=448.0, has_nan=True)
E5M2 = Format("e5m2", 5, 2, bias=15, largest=57344.0, has_infinity=True, has_nan=True)
# AMD's MI300: "uz" is an unsigned zero.
E4M3FNUZ = Format("e4m3fnuz", 4, 3, bias=8, largest=240.0, has_nan=True, signed_zero=False)
E5M2FNUZ = Format("e5m2fnuz", 5, 2, bias=16, largest=57344.0, has_nan=True, signed_zero=False)
# The OCP 6- and 4-bit formats: every code is a number.
E3M2 = Format("e3m2", 3, 2, bias=3, largest=28.0)
E2M3 = Format("e2m3", 2, 3, bias=1, largest=7.5)
E2M1 = Format("e2m1", 2, 1, bias=1, largest=6.0)
# The scale of the MX formats: the powers of two from 2^-127 (code 0) to 2^127 (code 254), and a NaN (code 255).
E8M0 = Format("e8m0", 8, 0, bias=127, largest=2.0**127, has_nan=True, signed=False, signed_zero=False, zeros=False)
FP16 = Format("fp16", 5, 10, bias=15, largest=65504.0, has_infinity=True, has_nan=True)
BF16 = Format("bf16", 8, 7, bias=127, largest=(2 - 2.0**-7) * 2.0**127, has_infinity=True, has_nan=True)
# The part of a float32 that a TF32 tensor core reads: the exponent, and ten bits of the mantissa.
TF32 = Format("tf32", 8, 10, bias=127, largest=(2 - 2.0**-10) * 2.0**127, has_infinity=True, has_nan=True)

FORMATS: dict[str, Format] = {
    fmt.name: fmt for fmt in (E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E3M2, E2M3, E2M1, E8M0, BF16, FP16, TF32)
}
# Formats whose range a run's data are compared with, widest first.
RANGES = (BF16, FP16, E5M2, E4M3, E2M1)

E8M0_LARGEST_CODE = 254
