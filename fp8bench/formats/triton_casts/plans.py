"""Plans the Triton kernels of a cast: their sizes, their constants, and how many programs run. Does not import
triton.

A plan depends only on the kernel, shapes and strides. It is stored for later calls with the same kernel, shapes and
strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from torch import Tensor

from fp8bench.formats.blocks import compute_mx_rounding_carry, mx_largest_exponent
from fp8bench.formats.code_kernels import (
    CodesKernel,
    CurrentScaleCodesKernel,
    DelayedCodesKernel,
    RowCodesKernel,
    SquareCodesKernel,
)
from fp8bench.formats.compiling import CombinedKernel, Kernel, KernelDefinition
from fp8bench.formats.grids import E5M2, E8M0, Format
from fp8bench.formats.recipes import Amax, ScaleRounding, count_blocks
from fp8bench.formats.tiled_codes import TiledCodesKernel

BLOCK_SIDE = 128
# Offsets have 32 bits. In a loop, a program adds the number of elements that all programs handle at once to its last
# offset, and this sum must not overflow.
MAX_INDEXED_ELEMENTS = (1 << 31) - (1 << 26)
# The longest row that fits into the registers of one program. If the program also finds the maxima of columns, the
# limit is lower.
_LONGEST_REGISTER_ROW = 16384
_LONGEST_REGISTER_ROW_WITH_PEAKS = 8192
_ELEMENTS_PER_PROGRAM = 8192
_TILE_SIDE_LENGTHS = (64, 128)
_ROWS_PER_PROGRAM = 32
# The number of warps for tiles that are also reduced down their columns. With fewer, a thread would need more than 64
# registers.
_TRANSPOSING_WARPS = 32
_BYTE_BITS = 8


@dataclass(frozen=True)
class TensorArgument:
    """A tensor argument of a launch. `index` is the position of the tensor among the arguments of the cast's kernel."""

    index: int


@dataclass(frozen=True)
class Counter:
    """The two int32 numbers of kernels.combine_maxima, a largest magnitude and a count of programs. They are zero
    before and after every launch. Each stream has separate numbers.
    """


@dataclass(frozen=True)
class Zeros:
    """`count` int32 numbers that are zero at the first launch of a cast. All launches of the cast use the same
    numbers.
    """

    count: int


LaunchArgument = TensorArgument | Counter | Zeros | int | None
Arguments = dict[str, LaunchArgument]
LaunchConstants = dict[str, float | bool | None]


@dataclass(frozen=True)
class Plan:
    """One launch of a function of kernels.py: its arguments by name, its constants, how many programs run, and how
    many warps each has.
    """

    function: str
    grid_program_count: int
    warps: int
    arguments: Arguments
    constants: LaunchConstants = field(default_factory=dict)


def plan_launches(kernel: KernelDefinition, tensors: Sequence[Tensor], processors: int) -> list[Plan]:
    """Returns the launches of a cast. The result is empty if the cast has no Triton kernel. `processors` is the
    number of the GPU's multiprocessors.
    """
    if max(tensor.numel() for tensor in tensors) > MAX_INDEXED_ELEMENTS:
        return []
    match kernel:
        case CodesKernel():
            return _plan_codes_kernel(kernel, tensors, processors)
        case CurrentScaleCodesKernel():
            return _plan_current_codes(kernel, tensors, processors)
        case DelayedCodesKernel():
            return _plan_delayed_codes(kernel, tensors, processors)
        case SquareCodesKernel():
            return _plan_square_codes(kernel, tensors)
        case RowCodesKernel() | TiledCodesKernel():
            return _plan_oriented_casts([(kernel, 0)], tensors)
        # Two casts of one matrix become one launch, which reads the matrix once.
        case CombinedKernel(first=first, second=second):
            second_argument_index = len(first.free())
            if tensors[0].data_ptr() == tensors[second_argument_index].data_ptr():
                return _plan_oriented_casts([(first, 0), (second, second_argument_index)], tensors)
            return _plan_oriented_casts([(first, 0)], tensors) + _plan_oriented_casts(
                [(second, second_argument_index)], tensors
            )
    return []


def _plan_codes_kernel(kernel: CodesKernel, tensors: Sequence[Tensor], processors: int) -> list[Plan]:
    # On these GPUs, SquareCodesKernel casts with scales of squares (native_codes.py).
    if kernel.has_scale_per_square:
        return []
    down, side, across, _ = tensors[0].shape
    largest = None if kernel.fmt is None else kernel.fmt.largest
    straight, transposed_pointer, scale = _assign_pointer_indices(1, kernel.straight, kernel.turned, kernel.scaled)
    arguments: Arguments = {"x": TensorArgument(0), "codes": straight, "turned": transposed_pointer, "scale": scale}
    return [_plan_cast_launch(arguments, down * side, across * side, largest, processors)]


def _plan_current_codes(kernel: CurrentScaleCodesKernel, tensors: Sequence[Tensor], processors: int) -> list[Plan]:
    rows, columns = tensors[0].shape
    size = rows * columns
    # There are two launches, because no program can use the scale before all programs have read the tensor.
    find_scale = Plan(
        "find_scale",
        min(count_blocks(size, _ELEMENTS_PER_PROGRAM), 8 * processors),
        8,
        {
            "x": TensorArgument(0),
            "scale": TensorArgument(1),
            "inverse": TensorArgument(2),
            "state": Counter(),
            "size": size,
        },
        {**_make_scale_constants(kernel.fmt, kernel.rounding), "BLOCK": _ELEMENTS_PER_PROGRAM},
    )
    straight, transposed_pointer = _assign_pointer_indices(3, kernel.straight, kernel.turned)
    arguments: Arguments = {
        "x": TensorArgument(0),
        "codes": straight,
        "turned": transposed_pointer,
        "scale": TensorArgument(1),
    }
    return [find_scale, _plan_cast_launch(arguments, rows, columns, kernel.fmt.largest, processors)]


def _plan_delayed_codes(kernel: DelayedCodesKernel, tensors: Sequence[Tensor], processors: int) -> list[Plan]:
    delayed = kernel.delayed
    straight, transposed_pointer = _assign_pointer_indices(6, kernel.straight, kernel.turned)
    # `TensorArgument(i)` is argument i of DelayedCodesKernel (code_kernels.py).
    arguments: Arguments = {
        "x": TensorArgument(0),
        "codes": straight,
        "turned": transposed_pointer,
        "scale": TensorArgument(3),
        "state": Counter(),
        "history": TensorArgument(1),
        "casts": TensorArgument(2),
        "used": TensorArgument(4),
        "inverse": TensorArgument(5),
    }
    delayed_scale_constants: LaunchConstants = {
        "HISTORY": delayed.history,
        "MOST_RECENT": delayed.algorithm is Amax.MOST_RECENT,
        "SHRINK": 2.0**-delayed.margin,
        "INTERVAL": delayed.interval,
    }
    rows, columns = tensors[0].shape
    return [_plan_cast_launch(arguments, rows, columns, kernel.fmt.largest, processors, delayed_scale_constants)]


# `cast` always takes these, but uses them only with delayed scaling.
_UNDELAYED_CAST_ARGUMENTS = dict.fromkeys(("state", "history", "casts", "used", "inverse"))
_UNDELAYED_CAST_CONSTANTS: LaunchConstants = {"HISTORY": 1, "MOST_RECENT": False, "SHRINK": 1.0, "INTERVAL": 1}


def _plan_cast_launch(
    arguments: Arguments,
    rows: int,
    columns: int,
    largest: float | None,
    processors: int,
    delayed: LaunchConstants | None = None,
) -> Plan:
    writes_transpose = arguments["turned"] is not None
    # Without a transpose, the matrix can be treated as one long row.
    rows, columns = (rows, columns) if writes_transpose else (1, rows * columns)
    down, across = _TILE_SIDE_LENGTHS if writes_transpose else (1, _ELEMENTS_PER_PROGRAM)
    kernel_constants: LaunchConstants = {
        "LARGEST": largest,
        "STRAIGHT": arguments["codes"] is not None,
        "TURNED": writes_transpose,
        "SCALED": arguments["scale"] is not None,
        "DELAYED": delayed is not None,
        **(delayed or _UNDELAYED_CAST_CONSTANTS),
        "DOWN": down,
        "ACROSS": across,
    }
    tiles = count_blocks(rows, down) * count_blocks(columns, across)
    # With delayed scaling, all programs end with an atomic operation on one address. Few programs limit the contention.
    program_count = min(tiles, 4 * processors) if delayed else tiles
    sizes = {"rows": rows, "columns": columns}
    return Plan(
        "cast",
        program_count,
        16 if delayed else 8,
        {**_UNDELAYED_CAST_ARGUMENTS, **arguments, **sizes},
        kernel_constants,
    )


def _plan_square_codes(kernel: SquareCodesKernel, tensors: Sequence[Tensor]) -> list[Plan]:
    x, inverse, turned_inverse, *_ = tensors
    straight, transposed_pointer = _assign_pointer_indices(3, kernel.straight, kernel.turned)
    arguments: Arguments = {
        "codes": straight,
        "inverse": TensorArgument(1),
        "turned": transposed_pointer,
        "turned_inverse": TensorArgument(2),
        "stride": inverse.stride(0),
        "turned_stride": turned_inverse.stride(0),
    }
    rows, columns = x.shape
    return [
        _plan_block_launch(arguments, rows, columns, _make_scale_constants(kernel.fmt, kernel.rounding), square=True)
    ]


def _plan_block_launch(arguments: Arguments, rows: int, columns: int, constants: LaunchConstants, square: bool) -> Plan:
    blocks_across = count_blocks(columns, BLOCK_SIDE)
    layout_constants = {
        "SQUARE": square,
        "STRAIGHT": arguments["codes"] is not None,
        "TURNED": arguments["turned"] is not None,
        "SIDE": BLOCK_SIDE,
    }
    # Casts of squares and of parts of rows differ only in the arguments for scales.
    arguments = {"x": TensorArgument(0), **arguments, "rows": rows, "columns": columns, "across": blocks_across}
    warp_count = _TRANSPOSING_WARPS if layout_constants["TURNED"] and not square else 16
    return Plan(
        "cast_blocks",
        count_blocks(rows, BLOCK_SIDE) * blocks_across,
        warp_count,
        arguments,
        {**constants, **layout_constants},
    )


# Kernels that read the same matrix, each with the index of its first argument. One kernel may write codes of the matrix
# and another those of its transpose.
OrientedKernels = Sequence[tuple[Kernel, int]]


def _plan_oriented_casts(kernels: OrientedKernels, tensors: Sequence[Tensor]) -> list[Plan]:
    first_kernel, first_argument = kernels[0]
    # Triton kernels exist only for blocks of this length.
    if isinstance(first_kernel, RowCodesKernel) and first_kernel.block not in (0, BLOCK_SIDE):
        return []
    if isinstance(first_kernel, RowCodesKernel):
        stretch_count, down, side, length, width = tensors[first_argument].shape
        # The input is a view by view_stretches. Compute the height and width of the matrix from the view's dimensions.
        operand = down * side, stretch_count * length * width
        rows, columns = operand[::-1] if first_kernel.turned else operand
        outputs = {_is_transposing_kernel(kernel): number for kernel, number in kernels}
        plan_casts = _plan_row_blocks if first_kernel.block else _plan_row_codes_cast
        return plan_casts(first_kernel, outputs, first_argument, rows, columns)
    if isinstance(first_kernel, TiledCodesKernel):
        return _plan_mx_cast(kernels, tensors)
    return []


def _is_transposing_kernel(kernel: Kernel) -> bool:
    assert isinstance(kernel, RowCodesKernel | TiledCodesKernel)
    return kernel.turned if isinstance(kernel, RowCodesKernel) else kernel.places.turned


def _choose_output_pointer(outputs: dict[bool, int], turned: bool, number: int) -> TensorArgument | None:
    return TensorArgument(outputs[turned] + number) if turned in outputs else None


def _plan_row_blocks(
    kernel: RowCodesKernel, outputs: dict[bool, int], first_argument: int, rows: int, columns: int
) -> list[Plan]:
    arguments: Arguments = {
        "x": TensorArgument(first_argument),
        "codes": _choose_output_pointer(outputs, False, 1),
        "inverse": _choose_output_pointer(outputs, False, 2),
        "turned": _choose_output_pointer(outputs, True, 1),
        "turned_inverse": _choose_output_pointer(outputs, True, 2),
        "stride": rows,
        "turned_stride": columns,
    }
    return [
        _plan_block_launch(arguments, rows, columns, _make_scale_constants(kernel.fmt, kernel.rounding), square=False)
    ]


def _plan_row_codes_cast(
    kernel: RowCodesKernel, outputs: dict[bool, int], first_argument: int, rows: int, columns: int
) -> list[Plan]:
    scale_constants = _make_scale_constants(kernel.fmt, kernel.rounding)
    straight, has_transpose = False in outputs, True in outputs
    sizes = {"rows": rows, "columns": columns}
    peaks = Zeros(columns)
    codes, inverse = (_choose_output_pointer(outputs, False, number) for number in (1, 2))
    arguments: Arguments = {"x": TensorArgument(first_argument), "codes": codes, "inverse": inverse, **sizes}
    # A range in Triton must be a power of two.
    width = max(1 << (columns - 1).bit_length(), 16)
    plans = []
    # One pass can find codes and maxima of columns only if a row fits into registers.
    is_one_pass_enough = straight and has_transpose and width <= _LONGEST_REGISTER_ROW_WITH_PEAKS
    if straight and width > _LONGEST_REGISTER_ROW:
        plans.append(Plan("cast_long_rows", rows, 8, arguments, {**scale_constants, "WIDTH": _ELEMENTS_PER_PROGRAM}))
    # A program handles several short rows, because otherwise most of its threads would be idle.
    elif straight:
        down = max(1, 4096 // width)
        lines = max(_ROWS_PER_PROGRAM, down) if is_one_pass_enough else down
        kernel_constants = {
            **scale_constants,
            "STRAIGHT": True,
            "PEAKS": is_one_pass_enough,
            "LINES": lines,
            "DOWN": down,
            "WIDTH": width,
        }
        arguments = {**arguments, "peaks": peaks if is_one_pass_enough else None}
        warp_count = 16 if width > (4096 if is_one_pass_enough else 8192) else 8
        plans.append(Plan("cast_rows", count_blocks(rows, lines), warp_count, arguments, kernel_constants))
    if not has_transpose:
        return plans
    down, across = _TILE_SIDE_LENGTHS
    arguments = {"x": TensorArgument(first_argument), "peaks": peaks, **sizes}
    # If the first launch could not find the maxima of columns, a separate pass does.
    if not is_one_pass_enough:
        lines = 4 * down
        program_count = count_blocks(rows, lines) * count_blocks(columns, across)
        plans.append(Plan("find_peaks", program_count, 8, arguments, {"LINES": lines, "DOWN": down, "ACROSS": across}))
    arguments = {
        **arguments,
        "turned": _choose_output_pointer(outputs, True, 1),
        "inverse": _choose_output_pointer(outputs, True, 2),
    }
    program_count = count_blocks(rows, down) * count_blocks(columns, across)
    plans.append(Plan("cast_columns", program_count, 8, arguments, {**scale_constants, "DOWN": down, "ACROSS": across}))
    return plans


def _plan_mx_cast(kernels: OrientedKernels, tensors: Sequence[Tensor]) -> list[Plan]:
    kernel, first_argument = kernels[0]
    assert isinstance(kernel, TiledCodesKernel)
    scaling = kernel.places.scaling
    # The Triton kernel casts to MX with elements of 8 bits, rounded to nearest. torch compiles the other casts.
    if scaling.scale is not E8M0 or kernel.fmt.bits < _BYTE_BITS or kernel.stochastic:
        return []
    shape = tensors[first_argument].shape
    # The view splits rows and columns of the matrix into several dimensions. `TileViews` (tiled_codes.py) orders them
    # differently for a transposed matrix.
    down, across = ((2, 3, 4, 5), (0, 1, 6)) if kernel.places.turned else ((0, 1, 2, 5), (3, 4, 6))
    rows, columns = prod(shape[number] for number in down), prod(shape[number] for number in across)
    if kernel.places.turned:
        rows, columns = columns, rows
    outputs, tiled_by_orientation = dict[bool, int](), dict[bool, bool]()
    for oriented_kernel, number in kernels:
        assert isinstance(oriented_kernel, TiledCodesKernel)
        outputs[oriented_kernel.places.turned], tiled_by_orientation[oriented_kernel.places.turned] = (
            number,
            oriented_kernel.places.is_tiled,
        )
    arguments: Arguments = {
        "x": TensorArgument(first_argument),
        "codes": _choose_output_pointer(outputs, False, 1),
        "scales": _choose_output_pointer(outputs, False, 2),
        "turned": _choose_output_pointer(outputs, True, 1),
        "turned_scales": _choose_output_pointer(outputs, True, 2),
        "rows": rows,
        "columns": columns,
    }
    kernel_constants: LaunchConstants = {
        "LARGEST": kernel.fmt.largest,
        "E5M2": kernel.fmt is E5M2,
        "CARRY": compute_mx_rounding_carry(kernel.fmt, scaling.rounding),
        "EXPONENT": mx_largest_exponent(kernel.fmt),
        "STRAIGHT": False in outputs,
        "TURNED": True in outputs,
        "TILED": tiled_by_orientation.get(False, False),
        "TURNED_TILED": tiled_by_orientation.get(True, False),
        "DOWN": BLOCK_SIDE,
        "ACROSS": BLOCK_SIDE,
    }
    # Writing transposed codes needs more warps.
    warp_count = _TRANSPOSING_WARPS if True in outputs else 16
    return [
        Plan(
            "cast_mx",
            count_blocks(rows, BLOCK_SIDE) * count_blocks(columns, BLOCK_SIDE),
            warp_count,
            arguments,
            kernel_constants,
        )
    ]


def _make_scale_constants(fmt: Format, rounding: ScaleRounding) -> LaunchConstants:
    return {"LARGEST": fmt.largest, "POWER_OF_TWO": rounding is ScaleRounding.POWER_OF_TWO}


def _assign_pointer_indices(first_argument: int, *present: bool) -> list[TensorArgument | None]:
    """Returns a TensorArgument for each argument that is present, and None for the others. The indices are consecutive,
    from `first_argument` on.
    """
    return [
        TensorArgument(first_argument + sum(present[:number])) if is_present else None
        for number, is_present in enumerate(present)
    ]
