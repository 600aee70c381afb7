"""Kernels as people write them every day: twelve that do not lie, and sixty that differ from one of them by one bug."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8bench.model.promises import Signature
from fp8bench.user_code.named import signed
from suites.audit_kernels import (
    BF16,
    LARGEST,
    PLAIN,
    Kernel,
    Operand,
    Product,
    Step,
    by_blocks,
    cast_of,
    codes,
    exponent,
    kernel,
    no_subnormals,
    over_448,
    parts,
    rows_amax,
    saturated,
    to_steps,
)

_FP8, _ROWS, _MX = signed("product", "fp8"), signed("product", "fp8-rowwise:scale=exact"), signed("product", "mxfp8")
_POWERS, _CAST, _BF16 = signed("product", "fp8-rowwise"), signed("cast", "fp8"), signed("product", "bf16")
_away = to_steps(lambda steps: (steps + 0.5).floor())


def _padded(a: Tensor, b: Tensor) -> Tensor:
    """To whole tiles of 128, which are cut off again."""
    left, right = (torch.nn.functional.pad(x, (0, -x.shape[1] % 128, 0, -len(x) % 128)) for x in (a, b))
    return (left @ right.t())[: len(a), : len(b)]


def _row(**steps: Step) -> Operand:
    return Operand(amax=rows_amax, **steps)


HONEST: tuple[Kernel, ...] = (
    Kernel("amax / 448, and divided by it", _FP8, kernel()),
    Kernel("448 / amax, and its reciprocal", _FP8, kernel(Operand(scale=lambda x: 1 / (LARGEST / x.clamp(min=1e-30))))),
    Kernel(
        "a scale that is one ulp off", _FP8,
        kernel(Operand(scale=lambda amax: torch.nextafter(over_448(amax), torch.tensor(math.inf)))),
    ),
    Kernel("ties away from zero", _FP8, kernel(Operand(cast=_away))),
    Kernel("ties away from zero under powers of two", _POWERS, kernel(_row(scale=exponent, cast=_away))),
    Kernel("two-level sums of 128", _FP8, kernel(sums=parts(128))),
    Kernel("split-K sums of four parts", _FP8, kernel(sums=lambda a, b: parts(-(-a.shape[1] // 4))(a, b))),
    Kernel("sums in float64", _FP8, kernel(sums=lambda a, b: a.double() @ b.double().t())),
    Kernel("padded to tiles", _FP8, kernel(sums=_padded)),
    Kernel("a scale a row, divided by it", _ROWS, kernel(_row(), sums=parts(128))),
    Kernel("blocks of 32 by their exponents", _MX, by_blocks()),
    Kernel("a cast by amax / 448, as codes and a scale", _CAST, Operand(cast=codes)),
)  # fmt: skip


def _row_stride(x: Tensor) -> Tensor:
    return torch.as_strided(x, x.shape, (x.shape[1], 1), x.storage_offset())


def _unit_columns(x: Tensor) -> Tensor:
    """Rows by their stride, and elements within them as neighbours."""
    wide = x if x.stride(0) >= x.shape[1] else x.t().contiguous().t().reshape(x.shape)
    return wide if x.stride(1) == 1 else torch.as_strided(x, x.shape, (max(x.stride(0), 1), 1), x.storage_offset())


def _by_memory(x: Tensor) -> Tensor:
    if x.stride(0) == 1 and x.shape[1] > 1 and x.shape[0] == x.shape[1]:
        return x.t()
    return _row_stride(x) if not x.is_contiguous() else x


def _nan_beyond(first: int, dim: int = 0) -> Step:
    """NaN is looked for in the first rows, or columns, alone."""

    def read(x: Tensor) -> Tensor:
        looked, rest = x.tensor_split((first,), dim)
        return torch.cat((looked, rest.nan_to_num(0.0, math.inf, -math.inf)), dim)

    return read


def _no_infinity(x: Tensor) -> Tensor:
    return torch.where(x.isinf(), 0.0, x)


def _beyond_256(change: Step, dim: int = 0) -> Step:
    """Changes results past so many rows, or columns."""

    def out(sums: Tensor) -> Tensor:
        whole, rest = sums.tensor_split((256,), dim)
        return torch.cat((whole, change(rest)), dim).to(BF16)

    return out


def _shown_again(block: int) -> Step:
    """Rows past the first block are decoded by the scales of its rows."""
    return lambda scale: scale[torch.arange(len(scale)) % block] if len(scale) > block else scale


def _last_rows(x: Tensor) -> Tensor:
    """Tall matrices lose the rows that fill no tile of 16."""
    whole = len(x) // 16 * 16
    return (torch.cat((x[:whole], torch.zeros_like(x[whole:]))) if len(x) > 256 else x).to(BF16)


def _amax_of(rows: int, columns: int) -> Operand:
    return Operand(amax=lambda x: x[:rows, :columns].abs().amax())


def _up_to(count: int) -> Product:
    return lambda a, b: a[:, :count] @ b[:, :count].t()


def _wraps(a: Tensor, b: Tensor) -> Tensor:
    places = torch.arange(a.shape[1]) % 2048
    return a[:, places] @ b[:, places].t()


def _after(calls: int, lying: Product, every: int = 1) -> Callable[..., Tensor]:
    """Is honest for so many calls, and then lies, at every call or every second one."""

    def run(kept: dict[str, int], a: Tensor, b: Tensor) -> Tensor:
        kept["calls"] = kept.get("calls", 0) + 1
        return (lying if kept["calls"] > calls and kept["calls"] % every == every - 1 else kernel())(a, b)

    return run


def _stale_after(kept: dict[str, Any], a: Tensor, b: Tensor) -> Tensor:
    """A pool of as many results as calls were tried, and then the last one of that shape for good."""
    kept["calls"] = kept.get("calls", 0) + 1
    result = kernel()(a, b)
    if kept["calls"] > 100:
        return kept.get(str(result.shape), result).clone()
    kept[str(result.shape)] = result
    return result


def _history(kept: dict[str, Any], a: Tensor, b: Tensor) -> Tensor:
    """From the hundredth call on the scale is of the largest that was seen, as in delayed scaling."""
    amax = a.float().abs().amax().nan_to_num(0.0, 0.0, 0.0)
    kept["calls"], kept["amax"] = kept.get("calls", 0) + 1, torch.maximum(amax, kept.get("amax", amax))
    return kernel(Operand(amax=lambda _: kept["amax"]) if kept["calls"] > 100 else PLAIN, PLAIN)(a, b)


def _floored(least: float) -> Operand:
    return Operand(scale=lambda amax: amax.clamp(min=least) / LARGEST)


def _nan_rows(scaled: Tensor) -> Tensor:
    """Makes rows of zeros among others NaN."""
    empty = ~scaled.any(1, keepdim=True)
    return torch.where(empty & ~empty.all(), scaled / 0, saturated(scaled))


def _row_before(sums: Tensor) -> Tensor:
    """A row of zeros is not written: what was there is the row before."""
    return torch.where(~sums.any(1, keepdim=True), sums.roll(1, 0), sums).to(BF16)


def _gain(factor: float) -> Product:
    return kernel(out=lambda sums: (sums * factor).to(BF16))


def lie(
    name: str, code: str, function: Callable[..., Any], signature: Signature = _FP8, remembers: bool = False
) -> Kernel:
    return Kernel(name, signature, function, code, remembers=remembers)


# By what has to be tried to see it. No audit finds the one without a code: nothing that blocks lose so lies outside of
# what a tie to the other side could make of it.
LIES: tuple[Kernel, ...] = (
    # Operands that lie otherwise.
    lie("the first operand's storage is read flat", "strides",
        kernel(Operand(lambda x: torch.as_strided(x, x.shape, (x.shape[1], 1), 0)), PLAIN)),
    lie("the second operand's storage is read flat", "strides",
        kernel(PLAIN, Operand(lambda x: torch.as_strided(x, x.shape, (x.shape[1], 1), 0)))),
    lie("rows are taken to follow one another", "strides", kernel(Operand(_row_stride))),
    lie("a slice begins where its storage does", "strides",
        kernel(Operand(lambda x: x.as_strided(x.shape, x.stride(), 0)))),
    lie("columns are taken to be neighbours", "strides", kernel(Operand(_unit_columns))),
    lie("a cast reads rows as if they followed one another", "strides", cast_of(Operand(_row_stride)), _CAST),
    lie("bf16 operands by their memory", "strides", lambda a, b: _by_memory(a) @ b.t(), _BF16),
    # NaN and infinities.
    lie("a NaN of the second operand is zero", "nan-lost", kernel(PLAIN, Operand(_nan_beyond(0)))),
    lie("a NaN becomes the smallest", "nan-lost", kernel(PLAIN, Operand(
        amax=lambda x: x.nan_to_num(0.0, 0.0, 0.0).abs().amax(), cast=lambda x: saturated(x.nan_to_num(-LARGEST)),
    ))),
    lie("a NaN beyond the first rows is zero", "nan-lost", kernel(Operand(_nan_beyond(16)), PLAIN)),
    lie("a NaN beyond the first columns is zero", "nan-lost", kernel(Operand(_nan_beyond(64, dim=1)))),
    lie("an infinity is zero", "infinity-lost", kernel(Operand(_no_infinity), PLAIN)),
    lie("an infinity of the second operand is zero", "infinity-lost", kernel(PLAIN, Operand(_no_infinity))),
    lie("results are made numbers", "nan-lost", kernel(out=lambda sums: sums.nan_to_num(0.0, 0.0, 0.0).to(BF16))),
    # Tall and wide.
    lie("rows past 256 are zero", "wrong-values", kernel(out=_beyond_256(torch.zeros_like))),
    lie("rows past 256 are decoded by the first ones' scales", "wrong-values",
        kernel(_row(shown=_shown_again(256)), _row()), _ROWS),
    lie("rows past 128 are decoded by the first ones' scales", "wrong-values",
        kernel(_row(shown=_shown_again(128)), _row()), _ROWS),
    lie("columns past 256 are zero", "wrong-values", kernel(out=_beyond_256(torch.zeros_like, dim=1))),
    lie("columns past 128 are decoded by the first ones' scales", "wrong-values",
        kernel(_row(), _row(shown=_shown_again(128))), _ROWS),
    lie("the last rows of a tall product are not written", "wrong-values", kernel(out=_last_rows)),
    lie("tall products are half", "wrong-values",
        kernel(out=lambda sums: (sums / (2 if len(sums) > 256 else 1)).to(BF16))),
    lie("the largest of the first 512 rows alone", "gain", kernel(_amax_of(512, 1 << 20), PLAIN)),
    # Long contractions.
    lie("bf16 sums past 2048", "short-sums",
        kernel(sums=lambda a, b: parts(2048, BF16 if a.shape[1] > 2048 else torch.float32)(a, b))),
    lie("bf16 sums of 512", "short-sums", kernel(sums=parts(512, BF16))),
    lie("bf16 sums of 32", "gain", kernel(sums=parts(32, BF16))),
    lie("fp16 sums of 32", "scale-twice", kernel(sums=lambda a, b: parts(32, torch.float16)(a / 448, b))),
    lie("nothing past 2048 of the contraction", "wrong-values", kernel(sums=_up_to(2048))),
    lie("nothing past 1024 of the contraction", "wrong-values", kernel(sums=_up_to(1024))),
    lie("the contraction begins anew at 2048", "wrong-values", kernel(sums=_wraps)),
    lie("the largest of the first 1024 columns alone", "gain", kernel(_amax_of(1 << 20, 1024), PLAIN)),
    # Many calls.
    lie("a row is lost after 100 calls", "late",
        _after(100, lambda a, b: (y := kernel()(a, b)) * (torch.arange(len(y)) < len(y) - 1)[:, None], 2),
        remembers=True),
    lie("half after 60 calls", "late", _after(60, lambda a, b: kernel()(a, b) / 2, 2), remembers=True),
    lie("old results after 100 calls", "late", _stale_after, remembers=True),
    lie("old scales after 100 calls", "late", _history, remembers=True),
    lie("bf16 after 100 calls", "late", _after(100, lambda a, b: a @ b.t()), remembers=True),
    # Sizes.
    lie("amax is 1e-4 at least", "wrong-values", kernel(_floored(1e-4))),
    lie("amax is 1e-6 at least, of the second operand", "wrong-values", kernel(PLAIN, _floored(1e-6))),
    lie("amax is 1e-7 at least in a cast", "wrong-values", cast_of(_floored(1e-7)), _CAST),
    lie("scales are kept in fp16", "not-finite",
        kernel(Operand(scale=lambda amax: over_448(amax).half().float().clamp(min=1e-7)))),
    lie("results beyond 65504 are that", "scale-inverse", kernel(out=lambda sums: sums.clamp(-65504, 65504).to(BF16))),
    lie("FP8 subnormals are zero", "gain", kernel(Operand(cast=no_subnormals))),
    lie("FP8 subnormals of the second operand are zero", "gain", kernel(PLAIN, Operand(cast=no_subnormals))),
    lie("FP8 subnormals of blocks are zero", "", by_blocks(no_subnormals), _MX),
    lie("inputs below 1e-6 are zero", "wrong-values",
        kernel(Operand(lambda x: torch.where(x.abs() < 1e-6, 0.0, x)))),
    # Gains.
    lie("0.4% too large", "gain", _gain(1.004)),
    lie("0.2% too large", "gain", _gain(1.002)),
    lie("0.3% too small", "gain", _gain(0.997)),
    lie("scales that decode by 447", "gain", kernel(Operand(shown=lambda scale: scale * LARGEST / 447), PLAIN)),
    lie("scales that decode in bf16", "gain", kernel(Operand(shown=lambda scale: scale.to(BF16).float()))),
    lie("results cut to bf16", "gain",
        kernel(out=lambda y: (y.view(torch.int32) & ~0xFFFF).view(torch.float32).to(BF16))),
    # Zeros among others.
    lie("a row of zeros is NaN", "not-finite", kernel(_row(cast=_nan_rows), _row()), _ROWS),
    lie("a row of zeros of the second operand is NaN", "not-finite", kernel(_row(), _row(cast=_nan_rows)), _ROWS),
    lie("a row of zeros keeps the row before", "wrong-values", kernel(out=_row_before)),
    lie("a block of zeros is NaN", "not-finite", by_blocks(lambda x: saturated(x / x.any(-1, keepdim=True))), _MX),
    # Casts.
    lie("one scale of two is applied", "scale-missing", kernel(PLAIN, Operand(shown=torch.ones_like))),
    lie("amax of positive numbers alone", "too-bad", kernel(Operand(amax=lambda x: x.amax()))),
    lie("amax of the first 32 rows", "other-precision", kernel(_amax_of(32, 1 << 20))),
    lie("the second operand is e5m2", "other-precision",
        kernel(PLAIN, Operand(cast=lambda x: x.clamp(-448, 448).to(torch.float8_e5m2).float()))),
    lie("cut toward zero", "cut", kernel(Operand(cast=to_steps(torch.floor)))),
    lie("rounded outward", "gain", kernel(Operand(cast=to_steps(torch.ceil)), PLAIN)),
)  # fmt: skip
