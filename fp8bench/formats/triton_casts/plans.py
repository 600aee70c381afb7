"""Which Triton kernels a cast launches: with what sizes, constants and grids. Knows no triton.

A plan depends on the kernel, shapes and strides alone, so that it is kept for the next call with the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from torch import Tensor

from fp8bench.formats.blocks import mx_carry, mx_exponent_of
from fp8bench.formats.code_kernels import (
    CodesKernel,
    CurrentCodesKernel,
    DelayedCodesKernel,
    RowCodesKernel,
    SquareCodesKernel,
)
from fp8bench.formats.compiling import Definition, Kernel, PairKernel
from fp8bench.formats.grids import E5M2, E8M0, Format
from fp8bench.formats.recipes import Amax, ScaleRounding
from fp8bench.formats.tiled_codes import TiledCodesKernel

SIDE = 128
MOST_ELEMENTS = (1 << 31) - (1 << 26)
"""Offsets are 32 bits wide, and a loop adds the elements of all programs to the last one."""
_LONGEST_ROW = 16384
"""Elements that the registers of one program hold."""
_LONGEST_WITH_PEAKS = 8192
_FLAT_BLOCK = 8192
_TILE = (64, 128)
_LINES = 32
_MOST_WARPS = 32
"""For tiles that are reduced down their columns, too: with fewer, a thread would need more than 64 registers."""
_BYTE = 8


@dataclass(frozen=True)
class Pointer:
    """Argument number `index` of the cast's kernel."""

    index: int


@dataclass(frozen=True)
class Counter:
    """Two int32 that are zero before and after every launch, and of this stream alone."""


@dataclass(frozen=True)
class Zeros:
    """`count` int32 that are zero at a cast's first launch, and that its launches share."""

    count: int


Argument = Pointer | Counter | Zeros | int | None
Arguments = dict[str, Argument]
Constants = dict[str, float | bool | None]


@dataclass(frozen=True)
class Plan:
    """One launch of a function of kernels.py: its arguments by name, constants included, `programs` and `warps`."""

    function: str
    programs: int
    warps: int
    arguments: Arguments
    constants: Constants = field(default_factory=dict)


def plan_launches(kernel: Definition, tensors: Sequence[Tensor], processors: int) -> list[Plan]:
    """The launches of a cast; empty where no Triton kernel is written for it. `processors` are the GPU's."""
    if max(tensor.numel() for tensor in tensors) > MOST_ELEMENTS:
        return []
    match kernel:
        case CodesKernel():
            return _plan_codes(kernel, tensors, processors)
        case CurrentCodesKernel():
            return _plan_current(kernel, tensors, processors)
        case DelayedCodesKernel():
            return _plan_delayed_scale(kernel, tensors, processors)
        case SquareCodesKernel():
            return _plan_squares(kernel, tensors)
        case RowCodesKernel() | TiledCodesKernel():
            return _plan_orientations([(kernel, 0)], tensors)
        # Both casts of one matrix become one launch that reads it once.
        case PairKernel(first=first, second=second):
            second_begins = len(first.free())
            if tensors[0].data_ptr() == tensors[second_begins].data_ptr():
                return _plan_orientations([(first, 0), (second, second_begins)], tensors)
            return _plan_orientations([(first, 0)], tensors) + _plan_orientations([(second, second_begins)], tensors)
    return []


def _plan_codes(kernel: CodesKernel, tensors: Sequence[Tensor], processors: int) -> list[Plan]:
    if kernel.by_square:
        return []
    down, side, across, _ = tensors[0].shape
    largest = None if kernel.fmt is None else kernel.fmt.largest
    straight, turned, scale = _optional(1, kernel.straight, kernel.turned, kernel.scaled)
    arguments: Arguments = {"x": Pointer(0), "codes": straight, "turned": turned, "scale": scale}
    return [_plan_cast(arguments, down * side, across * side, largest, processors)]


def _plan_current(kernel: CurrentCodesKernel, tensors: Sequence[Tensor], processors: int) -> list[Plan]:
    rows, columns = tensors[0].shape
    size = rows * columns
    # Two launches: no program can use the scale before all have looked at the tensor.
    find = Plan(
        "find_scale",
        min(_parts(size, _FLAT_BLOCK), 8 * processors),
        8,
        {"x": Pointer(0), "scale": Pointer(1), "inverse": Pointer(2), "state": Counter(), "size": size},
        {**_scaled_by(kernel.fmt, kernel.rounding), "BLOCK": _FLAT_BLOCK},
    )
    straight, turned = _optional(3, kernel.straight, kernel.turned)
    arguments: Arguments = {"x": Pointer(0), "codes": straight, "turned": turned, "scale": Pointer(1)}
    return [find, _plan_cast(arguments, rows, columns, kernel.fmt.largest, processors)]


def _plan_delayed_scale(kernel: DelayedCodesKernel, tensors: Sequence[Tensor], processors: int) -> list[Plan]:
    delayed = kernel.delayed
    straight, turned = _optional(6, kernel.straight, kernel.turned)
    # The numbers are places among the kernel's tensors (code_kernels.py).
    arguments: Arguments = {
        "x": Pointer(0),
        "codes": straight,
        "turned": turned,
        "scale": Pointer(3),
        "state": Counter(),
        "history": Pointer(1),
        "casts": Pointer(2),
        "used": Pointer(4),
        "inverse": Pointer(5),
    }
    constants: Constants = {
        "HISTORY": delayed.history,
        "MOST_RECENT": delayed.algorithm is Amax.MOST_RECENT,
        "SHRINK": 2.0**-delayed.margin,
        "INTERVAL": delayed.interval,
    }
    rows, columns = tensors[0].shape
    return [_plan_cast(arguments, rows, columns, kernel.fmt.largest, processors, constants)]


_NO_HISTORY = dict.fromkeys(("state", "history", "casts", "used", "inverse"))
_NOT_DELAYED: Constants = {"HISTORY": 1, "MOST_RECENT": False, "SHRINK": 1.0, "INTERVAL": 1}


def _plan_cast(
    arguments: Arguments,
    rows: int,
    columns: int,
    largest: float | None,
    processors: int,
    delayed: Constants | None = None,
) -> Plan:
    turned = arguments["turned"] is not None
    # Without a transpose a matrix is one long row.
    rows, columns = (rows, columns) if turned else (1, rows * columns)
    down, across = _TILE if turned else (1, _FLAT_BLOCK)
    constants: Constants = {
        "LARGEST": largest,
        "STRAIGHT": arguments["codes"] is not None,
        "TURNED": turned,
        "SCALED": arguments["scale"] is not None,
        "DELAYED": delayed is not None,
        **(delayed or _NOT_DELAYED),
        "DOWN": down,
        "ACROSS": across,
    }
    tiles = _parts(rows, down) * _parts(columns, across)
    # Few programs where each ends with an atomic operation on the same address.
    programs = min(tiles, 4 * processors) if delayed else tiles
    sizes = {"rows": rows, "columns": columns}
    return Plan("cast", programs, 16 if delayed else 8, {**_NO_HISTORY, **arguments, **sizes}, constants)


def _plan_squares(kernel: SquareCodesKernel, tensors: Sequence[Tensor]) -> list[Plan]:
    x, inverse, turned_inverse, *_ = tensors
    straight, turned = _optional(3, kernel.straight, kernel.turned)
    arguments: Arguments = {
        "codes": straight,
        "inverse": Pointer(1),
        "turned": turned,
        "turned_inverse": Pointer(2),
        "stride": inverse.stride(0),
        "turned_stride": turned_inverse.stride(0),
    }
    rows, columns = x.shape
    return [_plan_blocks(arguments, rows, columns, _scaled_by(kernel.fmt, kernel.rounding), square=True)]


def _plan_blocks(arguments: Arguments, rows: int, columns: int, constants: Constants, square: bool) -> Plan:
    across = _parts(columns, SIDE)
    kinds = {
        "SQUARE": square,
        "STRAIGHT": arguments["codes"] is not None,
        "TURNED": arguments["turned"] is not None,
        "SIDE": SIDE,
    }
    # The scale's place differs by kind; x and the sizes are the same for all.
    sizes = {"rows": rows, "columns": columns, "across": across}
    arguments = {"x": Pointer(0), **arguments, **sizes}
    warps = _MOST_WARPS if kinds["TURNED"] and not square else 16
    return Plan("cast_blocks", _parts(rows, SIDE) * across, warps, arguments, {**constants, **kinds})


Oriented = Sequence[tuple[Kernel, int]]
"""Kernels that read one matrix, in one orientation or both, and the number of each one's first argument."""


def _plan_orientations(kernels: Oriented, tensors: Sequence[Tensor]) -> list[Plan]:
    first, begins = kernels[0]
    # Blocks of other lengths have no Triton kernel.
    if isinstance(first, RowCodesKernel) and first.block not in (0, SIDE):
        return []
    if isinstance(first, RowCodesKernel):
        stretches, down, side, length, width = tensors[begins].shape
        # The kernel's input comes as stretches, whose product gives back the matrix.
        operand = down * side, stretches * length * width
        rows, columns = operand[::-1] if first.turned else operand
        outputs = {_is_turned(kernel): number for kernel, number in kernels}
        plan = _plan_row_blocks if first.block else _plan_rows
        return plan(first, outputs, begins, rows, columns)
    if isinstance(first, TiledCodesKernel):
        return _plan_mx(kernels, tensors)
    return []


def _is_turned(kernel: Kernel) -> bool:
    assert isinstance(kernel, RowCodesKernel | TiledCodesKernel)
    return kernel.turned if isinstance(kernel, RowCodesKernel) else kernel.places.turned


def _output(outputs: dict[bool, int], turned: bool, number: int) -> Pointer | None:
    return Pointer(outputs[turned] + number) if turned in outputs else None


def _plan_row_blocks(
    kernel: RowCodesKernel, outputs: dict[bool, int], begins: int, rows: int, columns: int
) -> list[Plan]:
    arguments: Arguments = {
        "x": Pointer(begins),
        "codes": _output(outputs, False, 1),
        "inverse": _output(outputs, False, 2),
        "turned": _output(outputs, True, 1),
        "turned_inverse": _output(outputs, True, 2),
        "stride": rows,
        "turned_stride": columns,
    }
    return [_plan_blocks(arguments, rows, columns, _scaled_by(kernel.fmt, kernel.rounding), square=False)]


def _plan_rows(kernel: RowCodesKernel, outputs: dict[bool, int], begins: int, rows: int, columns: int) -> list[Plan]:
    scaled = _scaled_by(kernel.fmt, kernel.rounding)
    straight, turned = False in outputs, True in outputs
    sizes = {"rows": rows, "columns": columns}
    peaks = Zeros(columns)
    codes, inverse = (_output(outputs, False, number) for number in (1, 2))
    arguments: Arguments = {"x": Pointer(begins), "codes": codes, "inverse": inverse, **sizes}
    # Triton's ranges are powers of two.
    width = max(1 << (columns - 1).bit_length(), 16)
    plans = []
    # One pass gives codes and the maxima of columns only while a row fits into registers.
    at_once = straight and turned and width <= _LONGEST_WITH_PEAKS
    if straight and width > _LONGEST_ROW:
        plans.append(Plan("cast_long_rows", rows, 8, arguments, {**scaled, "WIDTH": _FLAT_BLOCK}))
    # Short rows share a program, or most of its threads would idle.
    elif straight:
        down = max(1, 4096 // width)
        lines = max(_LINES, down) if at_once else down
        constants = {**scaled, "STRAIGHT": True, "PEAKS": at_once, "LINES": lines, "DOWN": down, "WIDTH": width}
        arguments = {**arguments, "peaks": peaks if at_once else None}
        warps = 16 if width > (4096 if at_once else 8192) else 8
        plans.append(Plan("cast_rows", _parts(rows, lines), warps, arguments, constants))
    if not turned:
        return plans
    down, across = _TILE
    arguments = {"x": Pointer(begins), "peaks": peaks, **sizes}
    # The maxima of columns cost a separate pass where the first launch could not find them.
    if not at_once:
        lines = 4 * down
        programs = _parts(rows, lines) * _parts(columns, across)
        plans.append(Plan("find_peaks", programs, 8, arguments, {"LINES": lines, "DOWN": down, "ACROSS": across}))
    arguments = {**arguments, "turned": _output(outputs, True, 1), "inverse": _output(outputs, True, 2)}
    programs = _parts(rows, down) * _parts(columns, across)
    plans.append(Plan("cast_columns", programs, 8, arguments, {**scaled, "DOWN": down, "ACROSS": across}))
    return plans


def _plan_mx(kernels: Oriented, tensors: Sequence[Tensor]) -> list[Plan]:
    kernel, begins = kernels[0]
    assert isinstance(kernel, TiledCodesKernel)
    scaling = kernel.places.scaling
    if scaling.scale is not E8M0 or kernel.fmt.bits < _BYTE or kernel.stochastic:
        return []
    shape = tensors[begins].shape
    # Places (tiled_codes.py) puts the parts of the contraction first for a turned matrix, else between those of rows.
    down, across = ((2, 3, 4, 5), (0, 1, 6)) if kernel.places.turned else ((0, 1, 2, 5), (3, 4, 6))
    rows, columns = prod(shape[number] for number in down), prod(shape[number] for number in across)
    if kernel.places.turned:
        rows, columns = columns, rows
    outputs, tiled = dict[bool, int](), dict[bool, bool]()
    for oriented, number in kernels:
        assert isinstance(oriented, TiledCodesKernel)
        outputs[oriented.places.turned], tiled[oriented.places.turned] = number, oriented.places.tiled
    arguments: Arguments = {
        "x": Pointer(begins),
        "codes": _output(outputs, False, 1),
        "scales": _output(outputs, False, 2),
        "turned": _output(outputs, True, 1),
        "turned_scales": _output(outputs, True, 2),
        "rows": rows,
        "columns": columns,
    }
    constants: Constants = {
        "LARGEST": kernel.fmt.largest,
        "E5M2": kernel.fmt is E5M2,
        "CARRY": mx_carry(kernel.fmt, scaling.rounding),
        "EXPONENT": mx_exponent_of(kernel.fmt),
        "STRAIGHT": False in outputs,
        "TURNED": True in outputs,
        "TILED": tiled.get(False, False),
        "TURNED_TILED": tiled.get(True, False),
        "DOWN": SIDE,
        "ACROSS": SIDE,
    }
    # The transposed codes need more warps than the straight ones.
    warps = _MOST_WARPS if True in outputs else 16
    return [Plan("cast_mx", _parts(rows, SIDE) * _parts(columns, SIDE), warps, arguments, constants)]


def _scaled_by(fmt: Format, rounding: ScaleRounding) -> Constants:
    return {"LARGEST": fmt.largest, "POWER_OF_TWO": rounding is ScaleRounding.POWER_OF_TWO}


def _optional(begins: int, *present: bool) -> list[Pointer | None]:
    """Numbers the arguments that are present."""
    return [
        Pointer(begins + sum(present[:number])) if is_present else None for number, is_present in enumerate(present)
    ]


def _parts(length: int, part: int) -> int:
    return -(-length // part)
