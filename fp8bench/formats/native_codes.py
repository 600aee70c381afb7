"""Native casts as operators of torch's: float8 codes and their scales, each operator one kernel once it is compiled.

The same bits either way. Until KERNELS (operators.py) has compiled what a call wants, it runs as many operations.
Inside a graph that torch compiles there are plain operations instead: they fuse with what stands around them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8bench.formats import operators
from fp8bench.formats.blocks import float_factor
from fp8bench.formats.code_kernels import (
    SIDE,
    CodesKernel,
    DelayedScaleKernel,
    RowCodesKernel,
    ScaleKernel,
    squares,
    turned_squares,
)
from fp8bench.formats.codes import DTYPES, torch_codes
from fp8bench.formats.compiling import Kernel
from fp8bench.formats.grids import FORMATS, Format
from fp8bench.formats.memory_layout import MOST_ELEMENTS, aligned
from fp8bench.formats.quantise import check_input
from fp8bench.formats.recipes import Amax, Delayed
from fp8bench.formats.scaled import factor, matrix_of
from fp8bench.formats.scalings import ROW, ScaleRounding, Scaling

LAUNCHES = {f"fp8bench::{name}": 1 for name in ("codes", "row_codes", "scale", "delayed_scale")}
"""GPU kernels that a call of each starts once it is compiled, of a matrix that lies row by row or is turned.

Counted with torch 2.13 and 2.11 for CUDA, sm_90, on a runtime that computes nothing; docs/gpu.md says how.
"""


def codes(x: Tensor, fmt: Format, scale: Tensor | None = None) -> Tensor:
    """`x`, times a float32 scale if there is one, as contiguous codes: what is too large becomes the largest value."""
    if torch.compiler.is_compiling():
        return torch_codes(x, fmt, scale)
    check_input(x)
    out = torch.empty(x.shape, dtype=DTYPES[fmt.name], device=x.device)
    torch.ops.fp8bench.codes(x.detach(), scale, out, None, fmt.name)
    return out


def codes_both(x: Tensor, fmt: Format, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The same of a matrix, and of its transpose, by reading it once."""
    if torch.compiler.is_compiling():
        straight = torch_codes(x, fmt, scale)
        return straight, straight.t().contiguous()
    check_input(x)
    straight, turned = (torch.empty(one.shape, dtype=DTYPES[fmt.name], device=x.device) for one in (x, x.t()))
    torch.ops.fp8bench.codes(x.detach(), scale, straight, turned, fmt.name)
    return straight, turned


def codes_turned(found: Tensor) -> Tensor:
    """Codes of the transpose of the matrix that these are the codes of."""
    if torch.compiler.is_compiling():
        return found.t().contiguous()
    turned = torch.empty(found.shape[::-1], dtype=found.dtype, device=found.device)
    torch.ops.fp8bench.codes(found.view(torch.uint8), None, None, turned.view(torch.uint8), "")
    return turned


def row_codes(x: Tensor, fmt: Format, rounding: ScaleRounding) -> tuple[Tensor, Tensor]:
    """Codes of a matrix under the current scale of each row, and the scales that decode them, (rows, 1)."""
    scaling = Scaling(ROW.rows, ROW.columns, rounding=rounding)
    if torch.compiler.is_compiling() or not x.numel():
        scale, inverse = factor(x, fmt, scaling)
        return torch_codes(x, fmt, scale), inverse
    check_input(x)
    out = torch.empty(x.shape, dtype=DTYPES[fmt.name], device=x.device)
    inverse = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    torch.ops.fp8bench.row_codes(x.detach(), out, inverse, fmt.name, rounding.value)
    return out, inverse


def current_scale(amax: Tensor, fmt: Format, rounding: ScaleRounding) -> tuple[Tensor, Tensor]:
    """The factor of a tensor with that largest magnitude, and its inverse, the scale that decodes."""
    if torch.compiler.is_compiling():
        found = float_factor(amax, fmt, rounding)
        return found, found.reciprocal()
    scale, inverse = torch.empty_like(amax), torch.empty_like(amax)
    torch.ops.fp8bench.scale(amax, scale, inverse, fmt.name, rounding.value)
    return scale, inverse


def delayed_scale(
    amax: Tensor, history: Tensor, casts: Tensor, scale: Tensor, fmt: Format, delayed: Delayed
) -> tuple[Tensor, Tensor]:
    """The scale for this cast, which stood before it, and its inverse; enters `amax` and renews what is to be renewed.

    `history`, `casts` and `scale` are changed where they lie.
    """
    used, inverse = torch.empty_like(scale), torch.empty_like(scale)
    written = fmt.name, delayed.algorithm.value, delayed.margin, delayed.interval
    torch.ops.fp8bench.delayed_scale(amax, history, casts, scale, used, inverse, *written)
    return used, inverse


def _run_codes(x: Tensor, scale: Tensor | None, out: Tensor | None, turned: Tensor | None, fmt: str) -> None:
    if not x.numel():
        return
    matrix, swapped = _laid(x)
    if swapped:
        out, turned = turned, out
    side = _side(matrix)
    kernel = CodesKernel(
        FORMATS.get(fmt), x.dtype, str(x.device), side, out is not None, turned is not None, scale is not None
    )
    places = [squares(matrix, side)]
    if out is not None:
        places.append(squares(out.view(matrix.shape), side))
    if turned is not None:
        places.append(turned_squares(turned.view(matrix.shape[::-1]), side))
    _call(kernel, *places, *([] if scale is None else [scale.reshape(())]))


def _run_row_codes(x: Tensor, out: Tensor, inverse: Tensor, fmt: str, rounding: str) -> None:
    matrix, turned = _laid(x)
    side = _side(matrix)
    kernel = RowCodesKernel(FORMATS[fmt], ScaleRounding(rounding), x.dtype, str(x.device), side, turned)
    given = turned_squares(matrix, side) if turned else squares(matrix, side)
    _call(kernel, given, squares(out, side), inverse.view(-1, side, 1, 1))


def _run_scale(amax: Tensor, scale: Tensor, inverse: Tensor, fmt: str, rounding: str) -> None:
    _call(ScaleKernel(FORMATS[fmt], ScaleRounding(rounding), str(amax.device)), amax, scale, inverse)


def _run_delayed_scale(
    amax: Tensor, history: Tensor, casts: Tensor, scale: Tensor, used: Tensor, inverse: Tensor,
    fmt: str, algorithm: str, margin: int, interval: int,
) -> None:  # fmt: skip
    delayed = Delayed(len(history), Amax(algorithm), margin, interval)
    kernel = DelayedScaleKernel(FORMATS[fmt], delayed, str(scale.device))
    _call(kernel, used, inverse, history, casts, scale, amax)


def _call(kernel: Kernel, *tensors: Tensor) -> None:
    """By one kernel if it has been compiled, else as many operations."""
    small = max(one.numel() for one in tensors) <= MOST_ELEMENTS
    found = operators.KERNELS.get(kernel) if small else None
    (kernel if found is None else found.run)(*tensors)


def _laid(x: Tensor) -> tuple[Tensor, bool]:
    """The matrix that lies row by row, and whether `x` is its transpose. What lies otherwise is copied first."""
    if x.dim() == 2 and not x.is_contiguous() and x.t().is_contiguous():
        matrix, turned = x.t(), True
    else:
        matrix, turned = x.contiguous().view(matrix_of(x.shape)), False
    return (matrix if aligned(matrix) else matrix.clone()), turned


def _side(matrix: Tensor) -> int:
    return SIDE if not any(length % SIDE for length in matrix.shape) else 1


_DELAYED = (
    "Tensor amax, Tensor(a!) history, Tensor(b!) casts, Tensor(c!) scale, Tensor(d!) used, Tensor(e!) inverse, "
    "str fmt, str algorithm, int margin, int interval"
)
for _name, _arguments, _run in (
    ("codes", "Tensor x, Tensor? scale, Tensor(a!)? out, Tensor(b!)? turned, str fmt", _run_codes),
    ("row_codes", "Tensor x, Tensor(a!) out, Tensor(b!) inverse, str fmt, str rounding", _run_row_codes),
    ("scale", "Tensor amax, Tensor(a!) scale, Tensor(b!) inverse, str fmt, str rounding", _run_scale),
    ("delayed_scale", _DELAYED, _run_delayed_scale),
):
    operators.define(_name, f"({_arguments}) -> ()", _run)
