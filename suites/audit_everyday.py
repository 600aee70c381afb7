"""Kernels as people write them every day: twelve that do not lie, and sixty that differ from one of them by one bug.

An `Operand` and a product are made of a few steps, each a function; a row names the bug and replaces a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8bench.model.promises import Signature
from fp8bench.user_code.named import signed
from suites.audit_lies import Kernel

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
Step = Callable[[Tensor], Tensor]
_LARGEST, _LEAST = 448.0, 1e-30


def _same(x: Tensor) -> Tensor:
    return x


def _whole_amax(x: Tensor) -> Tensor:
    return x.abs().amax()


def _rows_amax(x: Tensor) -> Tensor:
    return x.abs().amax(1, keepdim=True)


def _over_448(amax: Tensor) -> Tensor:
    return amax.clamp(min=_LEAST) / _LARGEST


def _exponent(amax: Tensor) -> Tensor:
    """The power of two from which nothing is beyond the largest."""
    mantissa, exponent = torch.frexp(amax.clamp(min=_LEAST) / _LARGEST)
    return torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).to(exponent.dtype))


def _saturated(scaled: Tensor) -> Tensor:
    return _codes(scaled).float()


def _codes(scaled: Tensor) -> Tensor:
    return scaled.clamp(-_LARGEST, _LARGEST).to(E4M3)


def _rounded_by(whole: Step) -> Step:
    """To e4m3's numbers, so many whole steps of them from zero."""

    def cast(scaled: Tensor) -> Tensor:
        steps = torch.exp2(scaled.abs().clamp(min=2.0**-6).log2().floor() - 3)
        return (whole(scaled.abs() / steps) * steps * scaled.sign()).clamp(-_LARGEST, _LARGEST)

    return cast


_away = _rounded_by(lambda steps: (steps + 0.5).floor())


def _no_subnormals(scaled: Tensor) -> Tensor:
    elements = _saturated(scaled)
    return torch.where(elements.abs() < 2.0**-6, 0.0, elements)


@dataclass(frozen=True)
class Operand:
    """Read, scaled and cast; `shown` is what decodes, made of the scale that encoded."""

    read: Step = _same
    amax: Step = _whole_amax
    scale: Step = _over_448
    cast: Step = _saturated
    shown: Step = _same

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.read(x).float()
        scale = self.scale(self.amax(x))
        return self.cast(x / scale), self.shown(scale)


def _float32(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.t()


def _bf16(sums: Tensor) -> Tensor:
    return sums.to(BF16)


PLAIN = Operand()


def kernel(
    first: Operand = PLAIN,
    second: Operand | None = None,
    sums: Callable[[Tensor, Tensor], Tensor] = _float32,
    out: Step = _bf16,
) -> Callable[[Tensor, Tensor], Tensor]:
    """A product of two operands, which is scaled past its sums; without a second, both are like the first."""

    def run(a: Tensor, b: Tensor) -> Tensor:
        (left, one), (right, other) = first(a), (second or first)(b)
        return out(sums(left, right) * (one * other.t()))

    return run


def _parts(size: int, kept: torch.dtype = torch.float32) -> Callable[[Tensor, Tensor], Tensor]:
    """Sums of so many products, each kept in a dtype, as what they are added to is."""

    def sums(a: Tensor, b: Tensor) -> Tensor:
        total = torch.zeros(len(a), len(b), dtype=kept)
        for at in range(0, a.shape[1], size):
            total = total + (a[:, at : at + size] @ b[:, at : at + size].t()).to(kept)
        return total.float()

    return sums


def _split(count: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Parts of the contraction by themselves, as split-K makes them, and their sum."""

    def sums(a: Tensor, b: Tensor) -> Tensor:
        parts = zip(a.chunk(count, 1), b.chunk(count, 1), strict=True)
        return torch.stack([left @ right.t() for left, right in parts]).sum(0)

    return sums


def _padded(a: Tensor, b: Tensor) -> Tensor:
    """To whole tiles of 128, which are cut off again."""
    sides = [[-len(x) % 128, -x.shape[1] % 128] for x in (a, b)]
    left, right = (
        torch.nn.functional.pad(x, (0, columns, 0, rows)) for x, (rows, columns) in zip((a, b), sides, strict=True)
    )
    return (left @ right.t())[: len(a), : len(b)]


def _by_blocks(a: Tensor, b: Tensor) -> Tensor:
    """Blocks of 32 of the contraction under powers of two, multiplied as they are decoded."""
    left, right = (_in_blocks(x) for x in (a, b))
    return (left @ right.t()).to(BF16)


def _in_blocks(x: Tensor, cast: Step = _saturated, amax: Step | None = None) -> Tensor:
    filled = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % 32))
    blocks = filled.view(len(x), -1, 32)
    scale = _exponent((amax or (lambda x: x.abs().amax(-1, keepdim=True)))(blocks))
    return (cast(blocks / scale) * scale).flatten(1)[:, : x.shape[1]]


_FP8, _ROWS, _MX = signed("product", "fp8"), signed("product", "fp8-rowwise:scale=exact"), signed("product", "mxfp8")
_POWERS, _CAST, _BF16 = signed("product", "fp8-rowwise"), signed("cast", "fp8"), signed("product", "bf16")
_ROW = Operand(amax=_rows_amax)
_RECIPROCAL = Operand(scale=lambda amax: 1 / (_LARGEST / amax.clamp(min=_LEAST)))
_ONE_OFF = Operand(scale=lambda amax: torch.nextafter(_over_448(amax), torch.tensor(math.inf)))

HONEST: tuple[Kernel, ...] = (
    Kernel("amax / 448, and divided by it", _FP8, kernel()),
    Kernel("448 / amax, and its reciprocal", _FP8, kernel(_RECIPROCAL)),
    Kernel("a scale that is one ulp off", _FP8, kernel(_ONE_OFF)),
    Kernel("ties away from zero", _FP8, kernel(Operand(cast=_away))),
    Kernel(
        "ties away from zero under powers of two", _POWERS,
        kernel(Operand(amax=_rows_amax, scale=_exponent, cast=_away)),
    ),
    Kernel("two-level sums of 128", _FP8, kernel(sums=_parts(128))),
    Kernel("split-K sums of four parts", _FP8, kernel(sums=_split(4))),
    Kernel("sums in float64", _FP8, kernel(sums=lambda a, b: a.double() @ b.double().t())),
    Kernel("padded to tiles", _FP8, kernel(sums=_padded)),
    Kernel("a scale a row, divided by it", _ROWS, kernel(_ROW, sums=_parts(128))),
    Kernel("blocks of 32 by their exponents", _MX, _by_blocks),
    Kernel("a cast by amax / 448, as codes and a scale", _CAST, Operand(cast=_codes)),
)  # fmt: skip


def _flat_read(x: Tensor) -> Tensor:
    """The storage, from its beginning, as if it were contiguous."""
    return torch.as_strided(x, x.shape, (x.shape[1], 1), 0)


def _row_stride(x: Tensor) -> Tensor:
    """Rows as if they followed one another."""
    return torch.as_strided(x, x.shape, (x.shape[1], 1), x.storage_offset())


def _unit_columns(x: Tensor) -> Tensor:
    """Rows by their stride, and elements within them as neighbours."""
    wide = x if x.stride(0) >= x.shape[1] else x.t().contiguous().t().reshape(x.shape)
    return wide if x.stride(1) == 1 else torch.as_strided(x, x.shape, (max(x.stride(0), 1), 1), x.storage_offset())


def _by_memory(x: Tensor) -> Tensor:
    """The scale of each row of the memory, and not of the matrix."""
    if x.stride(0) == 1 and x.shape[1] > 1 and x.shape[0] == x.shape[1]:
        return x.t()
    return _row_stride(x) if not x.is_contiguous() else x


def _nan_beyond(first: int, dim: int = 0) -> Step:
    """NaN is looked for in the first rows, or columns, alone."""

    def read(x: Tensor) -> Tensor:
        looked, rest = x.tensor_split((first,), dim)
        return torch.cat((looked, rest.nan_to_num(0.0, math.inf, -math.inf)), dim)

    return read


def _beyond(first: int, change: Callable[[Tensor], Tensor], dim: int = 0) -> Step:
    """Results past so many rows, or columns."""

    def out(sums: Tensor) -> Tensor:
        whole, rest = sums.tensor_split((first,), dim)
        return torch.cat((whole, change(rest)), dim).to(BF16)

    return out


def _shown_again(block: int) -> Step:
    """Rows past the first block are decoded by the scales of its rows."""
    return lambda scale: scale[torch.arange(len(scale)) % block] if len(scale) > block else scale


def _last_rows(x: Tensor) -> Tensor:
    """Tall matrices lose the rows that fill no tile of 16."""
    whole = len(x) // 16 * 16
    return torch.cat((x[:whole], torch.zeros_like(x[whole:]))) if len(x) > 256 else x


def _of_first(rows: int, columns: int) -> Step:
    return lambda x: x[:rows, :columns].abs().amax()


def _up_to(count: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: a[:, :count] @ b[:, :count].t()


def _wraps(a: Tensor, b: Tensor) -> Tensor:
    """The index of the contraction begins anew at 2048."""
    places = torch.arange(a.shape[1]) % 2048
    return a[:, places] @ b[:, places].t()


def _after(calls: int, lying: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Honest for so many calls."""

    def run(kept: dict[str, int], a: Tensor, b: Tensor) -> Tensor:
        kept["calls"] = kept.get("calls", 0) + 1
        return (lying if kept["calls"] > calls else kernel())(a, b)

    return run


def _at_times(calls: int, change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """After so many calls every second one."""

    def run(kept: dict[str, int], a: Tensor, b: Tensor) -> Tensor:
        kept["calls"] = kept.get("calls", 0) + 1
        result = kernel()(a, b)
        return change(result) if kept["calls"] > calls and kept["calls"] % 2 else result

    return run


def _stale_after(kept: dict[str, Any], a: Tensor, b: Tensor) -> Tensor:
    """A pool of as many results as calls were tried, and then the last one of that shape for good."""
    kept["calls"] = kept.get("calls", 0) + 1
    found = kernel()(a, b)
    if kept["calls"] > 100:
        return kept.get(str(found.shape), found).clone()
    kept[str(found.shape)] = found
    return found


def _history(kept: dict[str, Any], a: Tensor, b: Tensor) -> Tensor:
    """From the hundredth call on the scale is of the largest that was seen, as delayed scaling has it."""
    amax = a.float().abs().amax().nan_to_num(0.0, 0.0, 0.0)
    kept["calls"], kept["amax"] = kept.get("calls", 0) + 1, torch.maximum(amax, kept.get("amax", amax))
    return kernel(Operand(amax=(lambda _: kept["amax"]) if kept["calls"] > 100 else _whole_amax), PLAIN)(a, b)


def _floored(least: float) -> Step:
    return lambda amax: amax.clamp(min=least) / _LARGEST


def _rows_of_zeros(change: Callable[[Tensor], Tensor]) -> Step:
    """What happens to rows that are all zeros, among others that are not."""

    def cast(scaled: Tensor) -> Tensor:
        empty = ~scaled.any(1, keepdim=True)
        return torch.where(empty & ~empty.all(), change(scaled), _saturated(scaled))

    return cast


def _last_of_row(sums: Tensor) -> Tensor:
    """A row of zeros is not written: what was there is the row before."""
    empty = ~sums.any(1, keepdim=True)
    return torch.where(empty, sums.roll(1, 0), sums).to(BF16)


def _gain(factor: float) -> Step:
    return lambda sums: (sums * factor).to(BF16)


def _row(**steps: Step) -> Operand:
    return Operand(amax=_rows_amax, **steps)


def _mx(first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor] | None = None) -> Callable[..., Tensor]:
    return lambda a, b: (first(a) @ (second or first)(b).t()).to(BF16)


def _cast_of(operand: Operand) -> Step:
    def run(x: Tensor) -> Tensor:
        elements, scale = operand(x)
        return elements * scale

    return run


def lie(name: str, function: Callable[..., Any], signature: Signature = _FP8, remembers: bool = False) -> Kernel:
    return Kernel(name, signature, function, remembers=remembers)


# By what has to be tried to see it.
LIES: tuple[Kernel, ...] = (
    # Operands that lie otherwise.
    lie("the first operand's storage is read flat", kernel(Operand(read=_flat_read), PLAIN)),
    lie("the second operand's storage is read flat", kernel(PLAIN, Operand(read=_flat_read))),
    lie("rows are taken to follow one another", kernel(Operand(read=_row_stride))),
    lie("a slice begins where its storage does", kernel(Operand(lambda x: x.as_strided(x.shape, x.stride(), 0)))),
    lie("columns are taken to be neighbours", kernel(Operand(read=_unit_columns))),
    lie("a cast reads rows as if they followed one another", _cast_of(Operand(read=_row_stride)), _CAST),
    lie("bf16 operands by their memory", lambda a, b: _by_memory(a) @ b.t(), _BF16),
    # NaN and infinities.
    lie("a NaN of the second operand is zero", kernel(PLAIN, Operand(read=_nan_beyond(0)))),
    lie("a NaN becomes the smallest", kernel(PLAIN, Operand(
        amax=lambda x: x.nan_to_num(0.0, 0.0, 0.0).abs().amax(), cast=lambda x: _saturated(x.nan_to_num(-_LARGEST)),
    ))),
    lie("a NaN beyond the first rows is zero", kernel(Operand(read=_nan_beyond(16)), PLAIN)),
    lie("a NaN beyond the first columns is zero", kernel(Operand(read=_nan_beyond(64, dim=1)))),
    lie("an infinity is zero", kernel(Operand(lambda x: torch.where(x.isinf(), 0.0, x)), PLAIN)),
    lie("an infinity of the second operand is zero", kernel(PLAIN, Operand(lambda x: torch.where(x.isinf(), 0.0, x)))),
    lie("results are made numbers", kernel(out=lambda sums: sums.nan_to_num(0.0, 0.0, 0.0).to(BF16))),
    # Tall and wide.
    lie("rows past 256 are zero", kernel(out=_beyond(256, torch.zeros_like))),
    lie("rows past 256 are decoded by the first ones' scales", kernel(_row(shown=_shown_again(256)), _ROW), _ROWS),
    lie("rows past 128 are decoded by the first ones' scales", kernel(_row(shown=_shown_again(128)), _ROW), _ROWS),
    lie("columns past 256 are zero", kernel(out=_beyond(256, torch.zeros_like, dim=1))),
    lie("columns past 128 are decoded by the first ones' scales", kernel(_ROW, _row(shown=_shown_again(128))), _ROWS),
    lie("the last rows of a tall product are not written", kernel(out=lambda sums: _last_rows(sums).to(BF16))),
    lie("tall products are half", kernel(out=lambda sums: (sums / (2 if len(sums) > 256 else 1)).to(BF16))),
    lie("the largest of the first 512 rows alone", kernel(Operand(amax=_of_first(512, 1 << 20)), PLAIN)),
    # Long contractions.
    lie("bf16 sums past 2048", kernel(sums=lambda a, b: (_parts(2048, BF16) if a.shape[1] > 2048 else _float32)(a, b))),
    lie("bf16 sums of 512", kernel(sums=_parts(512, BF16))),
    lie("bf16 sums of 32", kernel(sums=_parts(32, BF16))),
    lie("fp16 sums of 32", kernel(sums=lambda a, b: _parts(32, torch.float16)(a / 448, b))),
    lie("nothing past 2048 of the contraction", kernel(sums=_up_to(2048))),
    lie("nothing past 1024 of the contraction", kernel(sums=_up_to(1024))),
    lie("the contraction begins anew at 2048", kernel(sums=_wraps)),
    lie("the largest of the first 1024 columns alone", kernel(Operand(amax=_of_first(1 << 20, 1024)), PLAIN)),
    # Many calls.
    lie("a row is lost after 100 calls", _at_times(100, lambda y: torch.cat((y[:-1], y[-1:] * 0))), remembers=True),
    lie("half after 60 calls", _at_times(60, lambda y: y / 2), remembers=True),
    lie("old results after 100 calls", _stale_after, remembers=True),
    lie("old scales after 100 calls", _history, remembers=True),
    lie("bf16 after 100 calls", _after(100, lambda a, b: a @ b.t()), remembers=True),
    # Sizes.
    lie("amax is 1e-4 at least", kernel(Operand(scale=_floored(1e-4)))),
    lie("amax is 1e-6 at least, of the second operand", kernel(PLAIN, Operand(scale=_floored(1e-6)))),
    lie("amax is 1e-7 at least in a cast", _cast_of(Operand(scale=_floored(1e-7))), _CAST),
    lie("scales are kept in fp16", kernel(Operand(scale=lambda amax: _over_448(amax).half().float().clamp(min=1e-7)))),
    lie("results beyond 65504 are that", kernel(out=lambda sums: sums.clamp(-65504, 65504).to(BF16))),
    lie("FP8 subnormals are zero", kernel(Operand(cast=_no_subnormals))),
    lie("FP8 subnormals of the second operand are zero", kernel(PLAIN, Operand(cast=_no_subnormals))),
    lie("FP8 subnormals of blocks are zero", _mx(lambda x: _in_blocks(x, _no_subnormals)), _MX),
    lie("inputs below 1e-6 are zero", kernel(Operand(read=lambda x: torch.where(x.abs() < 1e-6, 0.0, x)))),
    # Gains.
    lie("0.4% too large", kernel(out=_gain(1.004))),
    lie("0.2% too large", kernel(out=_gain(1.002))),
    lie("0.3% too small", kernel(out=_gain(0.997))),
    lie("scales that decode by 447", kernel(Operand(shown=lambda scale: scale * _LARGEST / 447), PLAIN)),
    lie("scales that decode in bf16", kernel(Operand(shown=lambda scale: scale.to(BF16).float()))),
    lie("results cut to bf16", kernel(out=lambda y: (y.view(torch.int32) & ~0xFFFF).view(torch.float32).to(BF16))),
    # Zeros among others.
    lie("a row of zeros is NaN", kernel(_row(cast=_rows_of_zeros(lambda x: x / 0)), _ROW), _ROWS),
    lie("a row of zeros of the second operand is NaN", kernel(_ROW, _row(cast=_rows_of_zeros(lambda x: x / 0))), _ROWS),
    lie("a row of zeros keeps the row before", kernel(out=_last_of_row)),
    lie(
        "a block of zeros is NaN", _mx(lambda x: _in_blocks(x, lambda y: _saturated(y / y.any(-1, keepdim=True)))), _MX,
    ),
    # Casts.
    lie("one scale of two is applied", kernel(PLAIN, Operand(shown=torch.ones_like))),
    lie("amax of positive numbers alone", kernel(Operand(amax=lambda x: x.amax()))),
    lie("amax of the first 32 rows", kernel(Operand(amax=_of_first(32, 1 << 20)))),
    lie("the second operand is e5m2", kernel(PLAIN, Operand(cast=lambda x: x.clamp(-448, 448).to(E5M2).float()))),
    lie("cut toward zero", kernel(Operand(cast=_rounded_by(torch.floor)))),
    lie("rounded outward", kernel(Operand(cast=_rounded_by(torch.ceil)), PLAIN)),
)  # fmt: skip
