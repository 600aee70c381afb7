"""Native casts as torch operators, which return float8 codes and their scales.

KERNELS (operators.py) compiles a kernel for each operator. Until then a call runs as separate operations with the
same results. Inside a graph of torch's compiler, casts are plain operations, which fuse with their neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8bench.formats import operators
from fp8bench.formats.blocks import float_factor, reciprocal
from fp8bench.formats.code_kernels import (
    SQUARE_SIDE,
    CodesKernel,
    CurrentScaleCodesKernel,
    DelayedCodesKernel,
    DelayedScaleKernel,
    RowCodesKernel,
    ScaleKernel,
    SquareCodesKernel,
    SquareScalesKernel,
    view_squares,
    view_stretches,
    view_transposed_squares,
)
from fp8bench.formats.codes import CODE_DTYPES, encode_with_torch
from fp8bench.formats.compiling import CombinedKernel, Kernel, KernelDefinition
from fp8bench.formats.grids import FORMATS, Format
from fp8bench.formats.matrix_codes import (
    DelayedScaleCodes,
    Memory,
    allocate,
    allocate_codes,
    allocate_scaled_codes,
    as_row_major,
    choose_aligned_side,
    pad_to_complete_blocks,
    row_codes_by_operations,
    square_codes_by_operations,
)
from fp8bench.formats.memory_layout import MAX_INDEXED_ELEMENTS
from fp8bench.formats.quantise import check_input
from fp8bench.formats.recipes import Amax, DelayedScaling, ScaleRounding, Scaling, count_blocks
from fp8bench.formats.scale_layouts import allocate_square_scales, transpose_row_major
from fp8bench.formats.triton_casts import find_triton_kernels, uses_triton

# The number of GPU kernels that one call of an operator launches if torch compiles it, counted with torch 2.13 and 2.11
# for sm_90 (docs/gpu.md).
LAUNCHES = {
    f"fp8bench::{name}": 1
    for name in ("codes", "row_codes", "row_codes_both", "scale", "square_scales", "delayed_scale")
}


def codes(x: Tensor, fmt: Format, scale: Tensor | None = None) -> Tensor:
    """Returns contiguous codes of `x`, or of `x` times `scale` if it is given. Values that are too large saturate."""
    if torch.compiler.is_compiling():
        return encode_with_torch(x, fmt, scale)
    check_input(x)
    straight_codes: Tensor = _make_codes(x, scale, fmt, True, False)[0]
    return straight_codes


def cast_codes_with_transpose(x: Tensor, fmt: Format, scale: Tensor) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling():
        straight_codes = encode_with_torch(x, fmt, scale)
        return straight_codes, straight_codes.t().contiguous()
    check_input(x)
    return _make_codes(x, scale, fmt, True, True)


def transpose_codes(straight: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return straight.t().contiguous()
    transposed_codes: Tensor = _make_codes(straight.view(torch.uint8), None, None, False, True)[1]
    return transposed_codes.view(straight.dtype)


def _make_codes(x: Tensor, scale: Tensor | None, fmt: Format | None, straight: bool, turned: bool) -> tuple[Any, Any]:
    """Returns codes of `x` if `straight`, and of its transpose if `turned`. Without a format, `x` has codes already."""
    dtype, name = (x.dtype, "") if fmt is None else (CODE_DTYPES[fmt.name], fmt.name)
    shapes = x.shape if straight else None, x.shape[::-1] if turned else None
    out = run_cast(
        "codes", (straight, turned), (x.detach(), scale), (name,), lambda: allocate(x.device, dtype, *shapes)
    )
    return out[0], out[1]


def row_codes(x: Tensor, fmt: Format, rounding: ScaleRounding, block: int = 0) -> tuple[Tensor, Tensor]:
    """Returns codes of a matrix with a current scale for each row, and the inverse scales that decode them, (rows, 1).

    With `block`, every `block` elements of a row have a scale. Scales are stored by columns (scale_layouts.py).
    """
    if torch.compiler.is_compiling() or not x.numel():
        return row_codes_by_operations(x, fmt, Scaling(1, block, rounding=rounding))
    check_input(x)
    rows = _RowScaledCast.of(x.detach(), fmt, block)
    out, inverse = run_cast("row_codes", None, (rows.matrix,), (fmt.name, rounding.value, block), rows.allocate)
    return rows.result(out, inverse)


def row_codes_both(
    x: Tensor, fmt: Format, rounding: ScaleRounding, block: int = 0
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Returns codes and scales of a matrix, then those of its transpose. Both have scales for their rows."""
    if torch.compiler.is_compiling() or not x.numel():
        return row_codes(x, fmt, rounding, block), row_codes(x.t(), fmt, rounding, block)
    check_input(x)
    straight_cast, turned_cast = (_RowScaledCast.of(tensor, fmt, block) for tensor in (x.detach(), x.detach().t()))
    matrices, plain_arguments = (straight_cast.matrix, turned_cast.matrix), (fmt.name, rounding.value, block)
    memory = run_cast(
        "row_codes_both", None, matrices, plain_arguments, lambda: straight_cast.allocate() + turned_cast.allocate()
    )
    return straight_cast.result(*memory[:2]), turned_cast.result(*memory[2:])


class _RowScaledCast(NamedTuple):
    """A cast with scales for rows or parts of rows. `matrix` is the input of `columns` columns, in complete blocks."""

    matrix: Tensor
    columns: int
    block: int
    fmt: Format

    @classmethod
    def of(cls, x: Tensor, fmt: Format, block: int) -> _RowScaledCast:
        return cls(pad_to_complete_blocks(x, 1, block)[0], x.shape[1], block, fmt)

    def allocate(self) -> tuple[Tensor, Tensor]:
        """Allocates memory for codes and scales."""
        matrix = self.matrix
        inverse_shape = count_blocks(self.columns, self.block) if self.block else 1, len(matrix)
        codes = torch.empty(matrix.shape, dtype=CODE_DTYPES[self.fmt.name], device=matrix.device)
        return codes, torch.empty(inverse_shape, dtype=torch.float32, device=matrix.device)

    def result(self, out: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
        data = out if out.shape[1] == self.columns else out[:, : self.columns].contiguous()
        # torch's products check strides even in dimensions of size 1. Block scales must be stored column by column.
        return data, transpose_row_major(inverse) if self.block else inverse.view(-1, 1)


def square_codes(
    x: Tensor, fmt: Format, rounding: ScaleRounding, both: bool = False
) -> tuple[tuple[Tensor, Tensor], ...]:
    """Returns codes of a matrix with a current scale for each 128x128 square, and the inverse scales that decode them.

    With `both`, the transpose is cast as well. Scales have the layout of `store_square_scales`.
    """
    if torch.compiler.is_compiling() or not x.numel():
        return square_codes_by_operations(x, fmt, Scaling(SQUARE_SIDE, SQUARE_SIDE, rounding=rounding), both)
    check_input(x)
    if uses_triton(x.device):
        return _square_codes_by_triton(x.detach(), fmt, rounding, both)
    rows, columns = x.shape
    x, is_whole = pad_to_complete_blocks(x.detach(), SQUARE_SIDE, SQUARE_SIDE)
    matrix, is_swapped = as_row_major(x)
    squares_down, squares_across = (length // SQUARE_SIDE for length in matrix.shape)
    scale = torch.empty(squares_down, squares_across, dtype=torch.float32, device=x.device)
    inverse, turned_inverse = allocate_square_scales(squares_down, squares_across, x.device)
    torch.ops.fp8bench.square_scales(
        matrix, scale, inverse[:, :squares_across], turned_inverse[:, :squares_down].t(), fmt.name, rounding.value
    )
    # `codes` needs the scales in the order of the squares in memory, which `scale` has.
    results = cast_codes_with_transpose(x, fmt, scale) if both else (codes(x, fmt, scale),)
    inverse_scales = (turned_inverse, inverse) if is_swapped else (inverse, turned_inverse)
    shapes = (rows, columns), (columns, rows)
    return tuple(
        (data if is_whole else data[:height, :width].contiguous(), transpose_row_major(memory))
        for data, memory, (height, width) in zip(results, inverse_scales, shapes, strict=False)
    )


def _square_codes_by_triton(
    x: Tensor, fmt: Format, rounding: ScaleRounding, both: bool
) -> tuple[tuple[Tensor, Tensor], ...]:
    squares_down, squares_across = (count_blocks(length, SQUARE_SIDE) for length in x.shape)
    inverse, turned_inverse = allocate_square_scales(squares_down, squares_across, x.device)
    straight_codes, transposed_codes = run_cast(
        "square_codes",
        both,
        (x, inverse, turned_inverse),
        (fmt.name, rounding.value),
        lambda: allocate_codes(x, fmt, both),
    )
    result = (straight_codes, transpose_row_major(inverse))
    return (result,) if transposed_codes is None else (result, (transposed_codes, transpose_row_major(turned_inverse)))


def compute_current_scale(amax: Tensor, fmt: Format, rounding: ScaleRounding) -> tuple[Tensor, Tensor]:
    """Returns the factor that multiplies a tensor with this `amax` before its cast, and its inverse for decoding."""
    if torch.compiler.is_compiling():
        scale = float_factor(amax, fmt, rounding)
        return scale, reciprocal(scale)
    scale, inverse = (torch.empty(amax.shape, dtype=amax.dtype, device=amax.device) for _ in range(2))
    torch.ops.fp8bench.scale(amax, scale, inverse, fmt.name, rounding.value)
    return scale, inverse


def casts_in_one_call(x: Tensor) -> bool:
    """Returns whether a single operator can find the largest magnitude of `x`, its scale and its codes."""
    return not torch.compiler.is_compiling() and uses_triton(x.device) and bool(x.numel())


def current_codes(x: Tensor, fmt: Format, rounding: ScaleRounding, both: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the inverse scale that decodes, the codes, and with `both` the codes of the transpose.

    Call it only for tensors that can be cast in one call (`casts_in_one_call`).
    """
    check_input(x)
    out = run_cast(
        "current_codes", both, (x.detach(),), (fmt.name, rounding.value), lambda: allocate_scaled_codes(x, fmt, both)
    )
    return out[1], out[2], out[3]


def delayed_codes(
    x: Tensor, history: Tensor, casts: Tensor, scale: Tensor, fmt: Format, delayed: DelayedScaling, both: bool
) -> DelayedScaleCodes:
    """Casts in one pass with the delayed scale and updates it like `delayed_scale`. Requires `casts_in_one_call`."""
    check_input(x)
    non_tensor_arguments = fmt.name, delayed.algorithm.value, delayed.margin, delayed.interval
    inputs = x.detach(), history, casts, scale
    return DelayedScaleCodes(
        *run_cast("delayed_codes", both, inputs, non_tensor_arguments, lambda: allocate_scaled_codes(x, fmt, both))
    )


def delayed_scale(
    amax: Tensor, history: Tensor, casts: Tensor, scale: Tensor, fmt: Format, delayed: DelayedScaling
) -> tuple[Tensor, Tensor]:
    """Returns the scale for this cast, which earlier casts have determined, and the inverse of the scale.

    Then records `amax`, and updates the scale if this is due. Changes `history`, `casts` and `scale` in place.
    """
    used_scale, inverse = torch.empty_like(scale), torch.empty_like(scale)
    non_tensor_arguments = fmt.name, delayed.algorithm.value, delayed.margin, delayed.interval
    torch.ops.fp8bench.delayed_scale(amax, history, casts, scale, used_scale, inverse, *non_tensor_arguments)
    return used_scale, inverse


def _run_codes(x: Tensor, scale: Tensor | None, out: Tensor | None, turned: Tensor | None, fmt: str) -> Launch | None:
    if not x.numel():
        return None
    matrix, is_swapped = as_row_major(x)
    # If `x` is a transposed matrix, the kernel reads the transpose of `x`. So the two outputs are swapped.
    if is_swapped:
        out, turned = turned, out
    # If each square has a scale, their number gives the side of a square. Otherwise, the matrix's shape decides.
    has_square_scales = scale is not None and scale.dim() == 2
    side = len(matrix) // len(scale) if scale is not None and has_square_scales else choose_aligned_side(matrix.shape)
    kernel_flags = out is not None, turned is not None, scale is not None, has_square_scales
    kernel = CodesKernel(FORMATS.get(fmt), x.dtype, str(x.device), side, *kernel_flags)
    kernel_tensor_views = [view_squares(matrix, side)]
    if out is not None:
        kernel_tensor_views.append(view_squares(out.view(matrix.shape), side))
    if turned is not None:
        kernel_tensor_views.append(view_transposed_squares(turned.view(matrix.shape[::-1]), side))
    if scale is not None:
        kernel_tensor_views.append(scale[:, None, :, None] if has_square_scales else scale.reshape(()))
    return run_kernel(kernel, *kernel_tensor_views)


def _run_row_codes(*arguments: Any) -> Launch | None:
    return _prepare_row_cast(*arguments).run()


def _run_two_row_casts(
    x: Tensor, y: Tensor, out: Tensor, inverse: Tensor, out_of_y: Tensor, inverse_of_y: Tensor, *recipe: Any
) -> Launch | None:
    return _prepare_row_cast(x, out, inverse, *recipe).run_together_with(
        _prepare_row_cast(y, out_of_y, inverse_of_y, *recipe)
    )


def _prepare_row_cast(x: Tensor, out: Tensor, inverse: Tensor, fmt: str, rounding: str, block: int) -> PreparedCall:
    matrix, is_turned = as_row_major(x)
    side = choose_aligned_side(x.shape[:1] if block else x.shape)
    kernel = RowCodesKernel(*_kernel_fields(x, fmt, rounding), side, block, is_turned)
    scales = inverse.view(len(inverse), -1, side, 1, 1)
    return PreparedCall(
        kernel, (view_stretches(matrix, side, block, is_turned), view_stretches(out, side, block), scales), is_turned
    )


def _kernel_fields(x: Tensor, fmt: str, rounding: str) -> tuple[Format, ScaleRounding, torch.dtype, str]:
    return FORMATS[fmt], ScaleRounding(rounding), x.dtype, str(x.device)


def _run_current_scale_codes(
    x: Tensor, scale: Tensor, inverse: Tensor, out: Tensor, turned: Tensor | None, fmt: str, rounding: str
) -> Launch | None:
    matrix, _, outputs, orientations = _matrix_and_outputs(x, out, turned)
    kernel = CurrentScaleCodesKernel(*_kernel_fields(x, fmt, rounding), *orientations)
    return run_kernel(kernel, matrix, scale, inverse, *outputs)


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
) -> Launch | None:
    matrix, _, outputs, orientations = _matrix_and_outputs(x, out, turned)
    delayed = DelayedScaling(len(history), Amax(algorithm), margin, interval)
    kernel = DelayedCodesKernel(FORMATS[fmt], delayed, x.dtype, str(x.device), *orientations)
    return run_kernel(kernel, matrix, history, casts, scale, used, inverse, *outputs)


def _launch_square_codes_kernel(
    x: Tensor, inverse: Tensor, turned_inverse: Tensor, out: Tensor, turned: Tensor | None, fmt: str, rounding: str
) -> Launch | None:
    matrix, is_swapped, outputs, orientations = _matrix_and_outputs(x, out, turned)
    if is_swapped:
        inverse, turned_inverse = turned_inverse, inverse
    kernel = SquareCodesKernel(*_kernel_fields(x, fmt, rounding), *orientations)
    return run_kernel(kernel, matrix, inverse, turned_inverse, *outputs)


def _matrix_and_outputs(
    x: Tensor, out: Tensor, turned: Tensor | None
) -> tuple[Tensor, bool, list[Tensor], tuple[bool, bool]]:
    """Returns the row-major matrix, whether `x` is its transpose, memory for codes, and which codes are requested."""
    matrix, is_swapped = as_row_major(x)
    straight_memory, transpose = (turned, out) if is_swapped else (out, turned)
    outputs = [memory for memory in (straight_memory, transpose) if memory is not None]
    return matrix, is_swapped, outputs, (straight_memory is not None, transpose is not None)


def _run_square_scales(matrix: Tensor, scale: Tensor, inverse: Tensor, turned: Tensor, fmt: str, rounding: str) -> None:
    block = len(matrix) // len(scale)
    kernel = SquareScalesKernel(*_kernel_fields(matrix, fmt, rounding), block)
    run_kernel(kernel, view_squares(matrix, block).transpose(1, 2), scale, inverse, turned)


def _run_scale_kernel(amax: Tensor, scale: Tensor, inverse: Tensor, fmt: str, rounding: str) -> None:
    run_kernel(ScaleKernel(FORMATS[fmt], ScaleRounding(rounding), str(amax.device)), amax, scale, inverse)


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
    delayed = DelayedScaling(len(history), Amax(algorithm), margin, interval)
    kernel = DelayedScaleKernel(FORMATS[fmt], delayed, str(scale.device))
    run_kernel(kernel, used, inverse, history, casts, scale, amax)


class PreparedCall(NamedTuple):
    """A kernel with its arguments. If `turned`, the matrix to cast is the transpose of a row-major matrix."""

    kernel: Kernel
    tensors: tuple[Tensor, ...]
    turned: bool

    def run(self) -> Launch | None:
        return run_kernel(self.kernel, *self.tensors)

    def run_together_with(self, second: PreparedCall) -> Launch | None:
        """Runs this call and `second` as one kernel if exactly one matrix is transposed, otherwise one by one."""
        # If both matrices had the same orientation, the compiler would assume that their sizes are always equal.
        if self.turned != second.turned:
            return run_kernel(CombinedKernel(self.kernel, second.kernel), *self.tensors, *second.tensors)
        self.run()
        second.run()
        return None


class Launch(NamedTuple):
    """A launch of hand-written kernels for tensors at `addresses`. `repeat` launches them for other addresses."""

    repeat: Callable[[Sequence[int]], bool]
    addresses: list[int]


def run_kernel(kernel: KernelDefinition, *tensors: Tensor) -> Launch | None:
    """Runs the hand-written or compiled kernel. If neither exists, runs separate operations with the same results."""
    is_indexable = max(tensor.numel() for tensor in tensors) <= MAX_INDEXED_ELEMENTS
    triton_kernels = find_triton_kernels(kernel, tensors) if is_indexable and uses_triton(tensors[0].device) else None
    is_compilable = triton_kernels is not None or (is_indexable and isinstance(kernel, Kernel))
    compiled_kernel = operators.KERNELS.get(triton_kernels or kernel) if is_compilable else None
    if compiled_kernel is None:
        kernel(*tensors)
        return None
    repeat: Any = compiled_kernel.run(*tensors)
    return Launch(repeat, [tensor.data_ptr() for tensor in tensors]) if triton_kernels and repeat is not None else None


def run_cast(
    name: str,
    variant: Hashable,
    inputs: Sequence[Tensor | None],
    plain_arguments: tuple[Hashable, ...],
    allocate: Callable[[], Memory],
) -> Memory:
    """Calls the operator `name`, and returns its outputs, which `allocate` allocates. Their shapes follow from the
    inputs, `variant` and `plain_arguments`.

    If an earlier call of a hand-written cast differs only in addresses, its kernels are launched again. Planning and
    torch's dispatcher would take longer than these launches.
    """
    x = inputs[0]
    assert x is not None
    if not uses_triton(x.device) or operators.are_operators_observed(x):
        outputs = allocate()
        getattr(torch.ops.fp8bench, name)(*inputs, *outputs, *plain_arguments)
        return outputs
    # 1. Describe the call, in a single loop, because the description takes a large part of the time of a small cast.
    addresses: list[int] = []
    call_description: list[Hashable] = [name, variant, x.device, plain_arguments]
    for tensor in inputs:
        if tensor is None:
            call_description.append(None)
        else:
            addresses.append(tensor.data_ptr())
            call_description += tensor.shape, tensor.stride(), tensor.dtype
    if len({*addresses}) < len(addresses):  # the same address may be passed twice, so describe which arguments share it
        call_description += map(addresses.index, addresses)
    key = tuple(call_description)
    # 2. Repeat the launches of an earlier call.
    relaunch = operators.KERNELS.relaunches.get(key)
    if relaunch is not None and (memory := relaunch.run(x.device, [*addresses])) is not None:
        operators.KERNELS.count_launch()
        return memory
    # 3. Plan and launch. Launches that read copies of the inputs cannot be repeated.
    memory = allocate()
    launch = _KERNEL_IMPLEMENTATIONS[name](*inputs, *memory, *plain_arguments)
    addresses += [out.data_ptr() for out in memory if out is not None]
    if launch is not None and {*launch.addresses} <= {*addresses}:
        layouts = tuple(None if out is None else (out.shape, out.stride(), out.dtype) for out in memory)
        select_addresses = itemgetter(*map(addresses.index, launch.addresses))
        operators.KERNELS.relaunches[key] = operators.Relaunch(layouts, launch.repeat, select_addresses)
    return memory


_KERNEL_IMPLEMENTATIONS: dict[str, Callable[..., Launch | None]] = {}


def register_cast_operator(name: str, schema: str, run: Callable[..., Launch | None]) -> None:
    """Registers an operator that `run_cast` calls."""

    def call_run(*arguments: object) -> None:
        run(*arguments)

    _KERNEL_IMPLEMENTATIONS[name] = run
    operators.define_operator(name, schema, call_run)


_DELAYED_SCHEMA = (
    "Tensor amax, Tensor(a!) history, Tensor(b!) casts, Tensor(c!) scale, Tensor(d!) used, Tensor(e!) inverse, "
    "str fmt, str algorithm, int margin, int interval"
)
_ROWS_SCHEMA = "Tensor x, Tensor y, Tensor(a!) out, Tensor(b!) inverse, Tensor(c!) out_of_y, Tensor(d!) inverse_of_y"
_OUTPUT_ARGUMENTS_SCHEMA = "Tensor(y!) out, Tensor(z!)? turned"
_DELAYED_CODES_SCHEMA = (
    "Tensor x, Tensor(a!) history, Tensor(b!) casts, Tensor(c!) scale, Tensor(d!) used, Tensor(e!) inverse, "
    f"{_OUTPUT_ARGUMENTS_SCHEMA}, str fmt, str algorithm, int margin, int interval"
)
_SQUARE_SCALES_SCHEMA = "Tensor matrix, Tensor(a!) scale, Tensor(b!) inverse, Tensor(c!) turned, str fmt, str rounding"
for _name, _arguments, _run in (
    ("codes", "Tensor x, Tensor? scale, Tensor(a!)? out, Tensor(b!)? turned, str fmt", _run_codes),
    ("row_codes", "Tensor x, Tensor(a!) out, Tensor(b!) inverse, str fmt, str rounding, int block", _run_row_codes),
    ("row_codes_both", f"{_ROWS_SCHEMA}, str fmt, str rounding, int block", _run_two_row_casts),
    ("square_scales", _SQUARE_SCALES_SCHEMA, _run_square_scales),
    (
        "current_codes",
        f"Tensor x, Tensor(a!) scale, Tensor(b!) inverse, {_OUTPUT_ARGUMENTS_SCHEMA}, str fmt, str rounding",
        _run_current_scale_codes,
    ),
    ("delayed_codes", _DELAYED_CODES_SCHEMA, _run_delayed_codes),
    (
        "square_codes",
        f"Tensor x, Tensor(a!) inverse, Tensor(b!) turned_inverse, {_OUTPUT_ARGUMENTS_SCHEMA}, str fmt, str rounding",
        _launch_square_codes_kernel,
    ),
    ("scale", "Tensor amax, Tensor(a!) scale, Tensor(b!) inverse, str fmt, str rounding", _run_scale_kernel),
    ("delayed_scale", _DELAYED_SCHEMA, _run_delayed_scale),
):
    (register_cast_operator if "codes" in _name else operators.define_operator)(_name, f"({_arguments}) -> ()", _run)
