"""Defines each low-precision format. Does not use torch.

The grid of a format is the set of its values. From its smallest normal number to its largest value these are sign *
2^e * (1 + m / 2^mantissa_bits). Below the smallest normal number there are evenly spaced subnormals.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Overflow(StrEnum):
    """The treatment of a value that is too large: one that would round to more than the format's largest value if
    exponents were unlimited. SATURATE gives the largest value, for infinities too, like satfinite conversions of
    hardware.
    """

    SATURATE = "saturate"
    INFINITY = "infinity"
    NAN = "nan"


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    `largest` is the largest finite value. It is not always the one that the exponent bits suggest: the last code of
    e4m3fn is NaN, and e2m1 has neither NaN nor infinity. `signed` is whether numbers have a sign, and
    `signed_zero` whether zero has one. In fnuz formats the code of -0 is the only NaN. Without `zeros` the format has
    neither zero nor subnormals. e8m0 is such a format and has only powers of two.
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
        """The number of bits in a code, sign included."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal number."""
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
        """The smallest subnormal number. In a format without subnormals, the smallest normal number."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def overflows(self) -> tuple[Overflow, ...]:
        """The possible treatments of values that are too large: SATURATE, and also INFINITY if the format has infinity,
        or else NAN if it has NaN.
        """
        overflow_treatments = [Overflow.SATURATE]
        if self.has_infinity:
            overflow_treatments.append(Overflow.INFINITY)
        elif self.has_nan:
            overflow_treatments.append(Overflow.NAN)
        return tuple(overflow_treatments)


# The OCP 8-bit formats, as on NVIDIA's GPUs. 'fn' means finite: all codes except NaN are numbers.
E4M3 = Format("e4m3fn", 4, 3, bias=7, largest=448.0, has_nan=True)
E5M2 = Format("e5m2", 5, 2, bias=15, largest=57344.0, has_infinity=True, has_nan=True)
# The formats of AMD's MI300. 'uz' means an unsigned zero.
E4M3FNUZ = Format("e4m3fnuz", 4, 3, bias=8, largest=240.0, has_nan=True, signed_zero=False)
E5M2FNUZ = Format("e5m2fnuz", 5, 2, bias=16, largest=57344.0, has_nan=True, signed_zero=False)
# The OCP formats of 6 and 4 bits, in which every code is a number.
E3M2 = Format("e3m2", 3, 2, bias=3, largest=28.0)
E2M3 = Format("e2m3", 2, 3, bias=1, largest=7.5)
E2M1 = Format("e2m1", 2, 1, bias=1, largest=6.0)
# The format of MX scales: powers of two from 2^-127 (code 0) to 2^127 (code 254), and a NaN (code 255).
E8M0 = Format("e8m0", 8, 0, bias=127, largest=2.0**127, has_nan=True, signed=False, signed_zero=False, zeros=False)
FP16 = Format("fp16", 5, 10, bias=15, largest=65504.0, has_infinity=True, has_nan=True)
BF16 = Format("bf16", 8, 7, bias=127, largest=(2 - 2.0**-7) * 2.0**127, has_infinity=True, has_nan=True)
# The part of a float32 that a TF32 tensor core reads: the exponent and ten bits of the mantissa.
TF32 = Format("tf32", 8, 10, bias=127, largest=(2 - 2.0**-10) * 2.0**127, has_infinity=True, has_nan=True)

FORMATS: dict[str, Format] = {
    fmt.name: fmt for fmt in (E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E3M2, E2M3, E2M1, E8M0, BF16, FP16, TF32)
}
# The range of a run's data is compared with the ranges of these formats. They are sorted from the largest range to
# the smallest.
COMPARED_FORMATS = (BF16, FP16, E5M2, E4M3, E2M1)
