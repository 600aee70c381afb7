"""Native casts as torch operators: float8 codes and their scales, each operator one kernel once it is compiled.

The bits are the same either way. Until KERNELS (operators.py) has compiled a kernel, a call runs as separate
operations. Inside a graph that torch compiles there are plain operations instead, which fuse with their surroundings.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8bench.formats import operators
from fp8bench.formats.blocks import float_factor, inverse_of
from fp8bench.formats.code_kernels import (
    SQUARE,
    CodesKernel,
    CurrentCodesKernel,
    DelayedCodesKernel,
    DelayedScaleKernel,
    RowCodesKernel,
    ScaleKernel,
    SquareCodesKernel,
    SquareScalesKernel,
    squares,
    stretches,
    turned_squares,
)
from fp8bench.formats.codes import DTYPES, torch_codes
from fp8bench.formats.compiling import Definition, Kernel, PairKernel
from fp8bench.formats.grids import FORMATS, Format
from fp8bench.formats.matrix_codes import (
    DelayedCodes,
    Memory,
    laid,
    memory_for_codes,
    memory_with_scales,
    new_memory,
    plain_row_codes,
    plain_square_codes,
    side_of,
    whole_blocks,
)
from fp8bench.formats.memory_layout import MOST_ELEMENTS
from fp8bench.formats.quantise import check_input
from fp8bench.formats.recipes import Amax, Delayed, ScaleRounding, Scaling
from fp8bench.formats.scale_layouts import filled_squares, turned_rows
from fp8bench.formats.triton_casts import find_by_hand, use_by_hand

LAUNCHES = {
    f"fp8bench::{name}": 1
    for name in ("codes", "row_codes", "row_codes_both", "scale", "square_scales", "delayed_scale")
}
"""GPU kernels that one call starts if torch compiles it, counted with torch 2.13 and 2.11 for sm_90 (method:
docs/gpu.md)."""


def codes(x: Tensor, fmt: Format, scale: Tensor | None = None) -> Tensor:
    """`x`, times a float32 scale if there is one, as contiguous codes; larger values saturate."""
    if torch.compiler.is_compiling():
        return torch_codes(x, fmt, scale)
    check_input(x)
    straight: Tensor = _codes(x, scale, fmt, True, False)[0]
    return straight


def codes_both(x: Tensor, fmt: Format, scale: Tensor) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling():
        straight = torch_codes(x, fmt, scale)
        return straight, straight.t().contiguous()
    check_input(x)
    return _codes(x, scale, fmt, True, True)


def transpose_codes(straight: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return straight.t().contiguous()
    turned: Tensor = _codes(straight.view(torch.uint8), None, None, False, True)[1]
    return turned.view(straight.dtype)


def _codes(x: Tensor, scale: Tensor | None, fmt: Format | None, straight: bool, turned: bool) -> tuple[Any, Any]:
    """Returns the codes and the codes of the transpose, None unless requested. Without a format the bytes of x are
    copied."""
    dtype, name = (x.dtype, "") if fmt is None else (DTYPES[fmt.name], fmt.name)
    layouts = x.shape if straight else None, x.shape[::-1] if turned else None
    written = (name,)
    out = cast("codes", (straight, turned), (x.detach(), scale), written, lambda: new_memory(x.device, dtype, *layouts))
    return out[0], out[1]


def row_codes(x: Tensor, fmt: Format, rounding: ScaleRounding, block: int = 0) -> tuple[Tensor, Tensor]:
    """Codes of a matrix under the current scale of each row, and the scales that decode them, (rows, 1).

    With a `block`, under a scale for each `block` elements of a row; the scales are then laid out by_columns
    (scale_layouts.py).
    """
    if torch.compiler.is_compiling() or not x.numel():
        return plain_row_codes(x, fmt, Scaling(1, block, rounding=rounding))
    check_input(x)
    rows = _Rows.of(x.detach(), fmt, block)
    out, inverse = cast("row_codes", None, (rows.matrix,), (fmt.name, rounding.value, block), rows.allocate)
    return rows.result(out, inverse)


def row_codes_both(
    x: Tensor, fmt: Format, rounding: ScaleRounding, block: int = 0
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Codes and scales of a matrix and of its transpose; the transpose has a scale for each of its rows."""
    if torch.compiler.is_compiling() or not x.numel():
        return row_codes(x, fmt, rounding, block), row_codes(x.t(), fmt, rounding, block)
    check_input(x)
    straight, turned = (_Rows.of(tensor, fmt, block) for tensor in (x.detach(), x.detach().t()))
    matrices, written = (straight.matrix, turned.matrix), (fmt.name, rounding.value, block)
    memory = cast("row_codes_both", None, matrices, written, lambda: straight.allocate() + turned.allocate())
    return straight.result(*memory[:2]), turned.result(*memory[2:])


class _Rows(NamedTuple):
    """A cast by rows: the matrix filled to whole blocks, how many of its columns count, and its codes' format."""

    matrix: Tensor
    columns: int
    block: int
    fmt: Format

    @classmethod
    def of(cls, x: Tensor, fmt: Format, block: int) -> _Rows:
        return cls(whole_blocks(x, 1, block)[0], x.shape[1], block, fmt)

    def allocate(self) -> tuple[Tensor, Tensor]:
        """Memory for codes and scales."""
        matrix, block = self.matrix, self.block
        inverse = -(-self.columns // block) if block else 1, len(matrix)
        return new_memory(matrix.device, DTYPES[self.fmt.name], matrix.shape) + new_memory(
            matrix.device, torch.float32, inverse
        )

    def result(self, out: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
        data = out if out.shape[1] == self.columns else out[:, : self.columns].contiguous()
        # Products check strides even of sides of 1: scales of rows are a column, those of blocks lie by columns.
        return data, turned_rows(inverse) if self.block else inverse.view(-1, 1)


def square_codes(
    x: Tensor, fmt: Format, rounding: ScaleRounding, both: bool = False
) -> tuple[tuple[Tensor, Tensor], ...]:
    """Codes of a matrix under the current scale of each 128x128 square, and the scales that decode them.

    With `both` also those of its transpose. Scales lie as `squares` lays them (scale_layouts.py).
    """
    if torch.compiler.is_compiling() or not x.numel():
        return plain_square_codes(x, fmt, Scaling(SQUARE, SQUARE, rounding=rounding), both)
    check_input(x)
    if use_by_hand(x.device):
        return _square_codes_by_hand(x.detach(), fmt, rounding, both)
    rows, columns = x.shape
    x, is_whole = whole_blocks(x.detach(), SQUARE, SQUARE)
    matrix, swapped = laid(x)
    down, across = (length // SQUARE for length in matrix.shape)
    scale = torch.empty(down, across, dtype=torch.float32, device=x.device)
    inverse, turned_inverse = filled_squares(down, across, x.device)
    torch.ops.fp8bench.square_scales(
        matrix, scale, inverse[:, :across], turned_inverse[:, :down].t(), fmt.name, rounding.value
    )
    # `scale` is in the order of the squares in memory, as `codes` expects it.
    results = codes_both(x, fmt, scale) if both else (codes(x, fmt, scale),)
    inverses = (turned_inverse, inverse) if swapped else (inverse, turned_inverse)
    shapes = (rows, columns), (columns, rows)
    return tuple(
        (data if is_whole else data[:height, :width].contiguous(), turned_rows(memory))
        for data, memory, (height, width) in zip(results, inverses, shapes, strict=False)
    )


def _square_codes_by_hand(
    x: Tensor, fmt: Format, rounding: ScaleRounding, both: bool
) -> tuple[tuple[Tensor, Tensor], ...]:
    down, across = (-(-length // SQUARE) for length in x.shape)
    inverse, turned_inverse = filled_squares(down, across, x.device)
    straight, turned = cast(
        "square_codes",
        both,
        (x, inverse, turned_inverse),
        (fmt.name, rounding.value),
        lambda: memory_for_codes(x, fmt, both),
    )
    result = (straight, turned_rows(inverse))
    return (result,) if turned is None else (result, (turned, turned_rows(turned_inverse)))


def current_scale(amax: Tensor, fmt: Format, rounding: ScaleRounding) -> tuple[Tensor, Tensor]:
    """The factor of a tensor with that largest magnitude, and its inverse, the scale that decodes."""
    if torch.compiler.is_compiling():
        scale = float_factor(amax, fmt, rounding)
        return scale, inverse_of(scale)
    scale, inverse = (torch.empty(amax.shape, dtype=amax.dtype, device=amax.device) for _ in range(2))
    torch.ops.fp8bench.scale(amax, scale, inverse, fmt.name, rounding.value)
    return scale, inverse


def casts_in_one_call(x: Tensor) -> bool:
    """Whether a cast of `x` with the scale of a tensor is one operator, from its largest magnitude to its codes."""
    return not torch.compiler.is_compiling() and use_by_hand(x.device) and bool(x.numel())


def current_codes(x: Tensor, fmt: Format, rounding: ScaleRounding, both: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes under the tensor's current scale, where `casts_in_one_call`: the scale that decodes them, codes, and with
    `both` those of the transpose."""
    check_input(x)
    out = cast(
        "current_codes", both, (x.detach(),), (fmt.name, rounding.value), lambda: memory_with_scales(x, fmt, both)
    )
    return out[1], out[2], out[3]


def delayed_codes(
    x: Tensor, history: Tensor, casts: Tensor, scale: Tensor, fmt: Format, delayed: Delayed, both: bool
) -> DelayedCodes:
    """Does `delayed_scale` and a cast in one pass, where `casts_in_one_call`."""
    check_input(x)
    written = fmt.name, delayed.algorithm.value, delayed.margin, delayed.interval
    inputs = x.detach(), history, casts, scale
    return DelayedCodes(*cast("delayed_codes", both, inputs, written, lambda: memory_with_scales(x, fmt, both)))


def delayed_scale(
    amax: Tensor, history: Tensor, casts: Tensor, scale: Tensor, fmt: Format, delayed: Delayed
) -> tuple[Tensor, Tensor]:
    """The scale for this cast, which was set before it, and its inverse; then records `amax` and renews the scale if
    due.

    `history`, `casts` and `scale` are changed in place.
    """
    used, inverse = torch.empty_like(scale), torch.empty_like(scale)
    written = fmt.name, delayed.algorithm.value, delayed.margin, delayed.interval
    torch.ops.fp8bench.delayed_scale(amax, history, casts, scale, used, inverse, *written)
    return used, inverse


def _run_codes(x: Tensor, scale: Tensor | None, out: Tensor | None, turned: Tensor | None, fmt: str) -> Launched | None:
    if not x.numel():
        return None
    matrix, swapped = laid(x)
    # The memory decides which orientation is straight: x may be a transposed view of it.
    if swapped:
        out, turned = turned, out
    # A scale for each square fixes its side; otherwise the side is free, and chosen for the shape.
    by_square = scale is not None and scale.dim() == 2
    side = len(matrix) // len(scale) if scale is not None and by_square else side_of(matrix.shape)
    which = out is not None, turned is not None, scale is not None, by_square
    kernel = CodesKernel(FORMATS.get(fmt), x.dtype, str(x.device), side, *which)
    places = [squares(matrix, side)]
    if out is not None:
        places.append(squares(out.view(matrix.shape), side))
    if turned is not None:
        places.append(turned_squares(turned.view(matrix.shape[::-1]), side))
    if scale is not None:
        places.append(scale[:, None, :, None] if by_square else scale.reshape(()))
    return call(kernel, *places)


def _run_row_codes(x: Tensor, out: Tensor, inverse: Tensor, fmt: str, rounding: str, block: int) -> Launched | None:
    kernel, places, _ = _of_rows(x, out, inverse, fmt, rounding, block)
    return call(kernel, *places)


def _run_row_codes_both(
    x: Tensor,
    y: Tensor,
    out: Tensor,
    inverse: Tensor,
    out_of_y: Tensor,
    inverse_of_y: Tensor,
    fmt: str,
    rounding: str,
    block: int,
) -> Launched | None:
    turned = _of_rows(y, out_of_y, inverse_of_y, fmt, rounding, block)
    return _of_rows(x, out, inverse, fmt, rounding, block).beside(turned)


def _of_rows(x: Tensor, out: Tensor, inverse: Tensor, fmt: str, rounding: str, block: int) -> Called:
    matrix, turned = laid(x)
    side = side_of(x.shape[:1] if block else x.shape)
    kernel = RowCodesKernel(FORMATS[fmt], ScaleRounding(rounding), x.dtype, str(x.device), side, block, turned)
    scales = inverse.view(len(inverse), -1, side, 1, 1)
    return Called(kernel, (stretches(matrix, side, block, turned), stretches(out, side, block), scales), turned)


def _run_current_codes(
    x: Tensor, scale: Tensor, inverse: Tensor, out: Tensor, turned: Tensor | None, fmt: str, rounding: str
) -> Launched | None:
    matrix, _, outputs, which = _matrix_and_outputs(x, out, turned)
    kernel = CurrentCodesKernel(FORMATS[fmt], ScaleRounding(rounding), x.dtype, str(x.device), *which)
    return call(kernel, matrix, scale, inverse, *outputs)


def _run_delayed_codes(
    x: Tensor,
    history: Tensor,
    casts: Tensor,
    scale: Tensor,
    used: Tensor,
    inverse: Tensor,
    out: Tensor,
    turned: Tensor | None,
    fmt: str,
    algorithm: str,
    margin: int,
    interval: int,
) -> Launched | None:
    matrix, _, outputs, which = _matrix_and_outputs(x, out, turned)
    delayed = Delayed(len(history), Amax(algorithm), margin, interval)
    kernel = DelayedCodesKernel(FORMATS[fmt], delayed, x.dtype, str(x.device), *which)
    return call(kernel, matrix, history, casts, scale, used, inverse, *outputs)


def _run_square_codes(
    x: Tensor, inverse: Tensor, turned_inverse: Tensor, out: Tensor, turned: Tensor | None, fmt: str, rounding: str
) -> Launched | None:
    matrix, swapped, outputs, which = _matrix_and_outputs(x, out, turned)
    if swapped:
        inverse, turned_inverse = turned_inverse, inverse
    kernel = SquareCodesKernel(FORMATS[fmt], ScaleRounding(rounding), x.dtype, str(x.device), *which)
    return call(kernel, matrix, inverse, turned_inverse, *outputs)


def _matrix_and_outputs(
    x: Tensor, out: Tensor, turned: Tensor | None
) -> tuple[Tensor, bool, list[Tensor], tuple[bool, bool]]:
    """The matrix that lies row by row, and whether x is its transpose; memory for its codes and those of its transpose,
    and which of both there are."""
    matrix, swapped = laid(x)
    straight, transpose = (turned, out) if swapped else (out, turned)
    outputs = [memory for memory in (straight, transpose) if memory is not None]
    return matrix, swapped, outputs, (straight is not None, transpose is not None)


def _run_square_scales(matrix: Tensor, scale: Tensor, inverse: Tensor, turned: Tensor, fmt: str, rounding: str) -> None:
    block = len(matrix) // len(scale)
    kernel = SquareScalesKernel(FORMATS[fmt], ScaleRounding(rounding), matrix.dtype, str(matrix.device), block)
    call(kernel, squares(matrix, block).transpose(1, 2), scale, inverse, turned)


def _run_scale(amax: Tensor, scale: Tensor, inverse: Tensor, fmt: str, rounding: str) -> None:
    call(ScaleKernel(FORMATS[fmt], ScaleRounding(rounding), str(amax.device)), amax, scale, inverse)


def _run_delayed_scale(
    amax: Tensor,
    history: Tensor,
    casts: Tensor,
    scale: Tensor,
    used: Tensor,
    inverse: Tensor,
    fmt: str,
    algorithm: str,
    margin: int,
    interval: int,
) -> None:
    delayed = Delayed(len(history), Amax(algorithm), margin, interval)
    kernel = DelayedScaleKernel(FORMATS[fmt], delayed, str(scale.device))
    call(kernel, used, inverse, history, casts, scale, amax)


class Called(NamedTuple):
    """A kernel with its arguments, and whether it reads a matrix that lies `turned`."""

    kernel: Kernel
    tensors: tuple[Tensor, ...]
    turned: bool

    def beside(self, other: Called) -> Launched | None:
        """Calls both kernels as one, unless both read matrices alike: their sizes would then be taken for the same."""
        if self.turned != other.turned:
            return call(PairKernel(self.kernel, other.kernel), *self.tensors, *other.tensors)
        for called in (self, other):
            call(called.kernel, *called.tensors)
        return None


class Launched(NamedTuple):
    """A launch by hand, and the addresses that it had."""

    repeat: Callable[[Sequence[int]], bool]
    addresses: list[int]


def call(kernel: Definition, *tensors: Tensor) -> Launched | None:
    """Runs the kernel by hand or the compiled one if there is one, else the same as separate operations."""
    small = max(tensor.numel() for tensor in tensors) <= MOST_ELEMENTS
    by_hand = find_by_hand(kernel, tensors) if small and use_by_hand(tensors[0].device) else None
    compiled = operators.KERNELS.get(by_hand or kernel) if small and (by_hand or isinstance(kernel, Kernel)) else None
    if compiled is None:
        kernel(*tensors)
        return None
    repeat: Any = compiled.run(*tensors)
    return Launched(repeat, [tensor.data_ptr() for tensor in tensors]) if by_hand and repeat is not None else None


def cast(
    name: str,
    variant: Hashable,
    inputs: Sequence[Tensor | None],
    written: tuple[Hashable, ...],
    allocate: Callable[[], Memory],
) -> Memory:
    """Calls the operator `name` with inputs, memory that it writes, and words; returns the memory.

    A cast by hand that differs from an earlier one in addresses alone repeats its launches: planning them and torch's
    dispatcher take longer than the launches. `variant` and the words decide what is allocated.
    """
    x = inputs[0]
    assert x is not None
    if not use_by_hand(x.device) or operators.is_observed(x):
        outputs = allocate()
        getattr(torch.ops.fp8bench, name)(*inputs, *outputs, *written)
        return outputs
    # 1. Describe the call: one loop, because its time is a large part of a small cast's.
    addresses: list[int] = []
    described: list[Hashable] = [name, variant, x.device, written]
    for tensor in inputs:
        if tensor is None:
            described.append(None)
        else:
            addresses.append(tensor.data_ptr())
            described += tensor.shape, tensor.stride(), tensor.dtype
    if len({*addresses}) < len(addresses):  # two inputs are one matrix
        described += map(addresses.index, addresses)
    key = tuple(described)
    # 2. Repeat the launches of an earlier call.
    relaunch = operators.KERNELS.relaunches.get(key)
    if relaunch is not None and (memory := relaunch.run(x.device, [*addresses])) is not None:
        operators.KERNELS.count_launch()
        return memory
    # 3. Plan and launch, and store the launches unless they used copies of inputs.
    memory = allocate()
    launched = _RUNS[name](*inputs, *memory, *written)
    addresses += [out.data_ptr() for out in memory if out is not None]
    if launched is not None and {*launched.addresses} <= {*addresses}:
        layouts = [None if out is None else (out.shape, out.stride(), out.dtype) for out in memory]
        take = itemgetter(*map(addresses.index, launched.addresses))
        operators.KERNELS.relaunches[key] = operators.Relaunch(tuple(layouts), launched.repeat, take)
    return memory


_RUNS: dict[str, Callable[..., Launched | None]] = {}


def define_cast(name: str, schema: str, run: Callable[..., Launched | None]) -> None:
    """Registers an operator of `cast`."""

    def call_run(*arguments: object) -> None:
        run(*arguments)

    _RUNS[name] = run
    operators.define(name, schema, call_run)


_DELAYED = (
    "Tensor amax, Tensor(a!) history, Tensor(b!) casts, Tensor(c!) scale, Tensor(d!) used, Tensor(e!) inverse, "
    "str fmt, str algorithm, int margin, int interval"
)
_ROWS_BOTH = "Tensor x, Tensor y, Tensor(a!) out, Tensor(b!) inverse, Tensor(c!) out_of_y, Tensor(d!) inverse_of_y"
_OUT = "Tensor(y!) out, Tensor(z!)? turned"
_DELAYED_CODES = (
    f"Tensor x, Tensor(a!) history, Tensor(b!) casts, Tensor(c!) scale, Tensor(d!) used, Tensor(e!) inverse, {_OUT}"
)
_SQUARES = "Tensor matrix, Tensor(a!) scale, Tensor(b!) inverse, Tensor(c!) turned, str fmt, str rounding"
for _name, _arguments, _run in (
    ("codes", "Tensor x, Tensor? scale, Tensor(a!)? out, Tensor(b!)? turned, str fmt", _run_codes),
    ("row_codes", "Tensor x, Tensor(a!) out, Tensor(b!) inverse, str fmt, str rounding, int block", _run_row_codes),
    (
        "row_codes_both",
        f"{_ROWS_BOTH}, str fmt, str rounding, int block",
        _run_row_codes_both,
    ),
    ("square_scales", _SQUARES, _run_square_scales),
    (
        "current_codes",
        f"Tensor x, Tensor(a!) scale, Tensor(b!) inverse, {_OUT}, str fmt, str rounding",
        _run_current_codes,
    ),
    ("delayed_codes", f"{_DELAYED_CODES}, str fmt, str algorithm, int margin, int interval", _run_delayed_codes),
    (
        "square_codes",
        f"Tensor x, Tensor(a!) inverse, Tensor(b!) turned_inverse, {_OUT}, str fmt, str rounding",
        _run_square_codes,
    ),
    ("scale", "Tensor amax, Tensor(a!) scale, Tensor(b!) inverse, str fmt, str rounding", _run_scale),
    ("delayed_scale", _DELAYED, _run_delayed_scale),
):
    (define_cast if "codes" in _name else operators.define)(_name, f"({_arguments}) -> ()", _run)
