"""Random Hadamard transforms of 16 elements, which spread outliers over neighbouring elements before quantisation.

Both operands of a product are rotated along its contraction by the same orthogonal matrix, which leaves the product
unchanged. Sums are computed in float64, independent of a TF32 switch, and rounded once, so the result is the same on
every device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8bench.formats import operators
from fp8bench.formats.code_kernels import FUSED_SCALAR_OPTIONS, OPERAND_ORDER_CONFIG
from fp8bench.formats.compiling import Kernel, draw_example
from fp8bench.formats.matrix_codes import as_row_major
from fp8bench.formats.native_codes import run_kernel
from fp8bench.formats.quantise import ROUNDING_RANDOM_BITS, check_input, random_bits
from fp8bench.formats.scaled import largest_magnitude

ROTATED_RUN_LENGTH = 16
_MATRIX_DIMENSIONS = 2
# The sizes of the example tensors with which a kernel is compiled. Its calls may have other sizes.
_EXAMPLE_ROWS = 640
_EXAMPLE_RUN_COUNT = 48
# Far more operations than a sum of sixteen products has.
_MAX_UNSPLIT_OPERATIONS = 1 << 10
# How many runs of 16 elements a CPU rotates at a time, so that their float64 copy stays in its cache.
_ROTATED_RUNS_PER_PIECE = 1 << 12


def rotate(x: Tensor, seed: int) -> Tensor:
    """Multiplies each run of 16 elements of the last dimension by the seed's matrix. Returns float32.

    The last dimension is padded with zeros to a multiple of 16. The result keeps the padding, which does not change a
    product. If one element of a run is infinite or NaN, all 16 become NaN.
    """
    return _multiply_runs(_pad_to_run_multiple(x), _make_hadamard_matrix(seed, x.device))


class RotatedTensor(NamedTuple):
    """A rotated tensor. `amaxes` and `amaxes_before_rotation` have the largest magnitudes of parts of the tensor, after
    and before the rotation. Their maxima are those of the whole tensor.
    """

    values: Tensor
    amaxes: Tensor
    amaxes_before_rotation: Tensor


def rotate_and_find_amaxes(x: Tensor, seed: int) -> RotatedTensor:
    """Applies the random Hadamard transform of `seed` to a matrix, and finds the largest magnitudes for a later cast.
    The result is row-major or column-major, like the matrix.
    """
    padded_matrix = _pad_to_run_multiple(x)
    matrix = _make_hadamard_matrix(seed, x.device)
    # On a GPU one kernel is faster than the five operations that it replaces. On a CPU a matrix product is faster.
    uses_matmul = x.device.type == "cpu" or torch.compiler.is_compiling()
    if uses_matmul or not x.numel() or x.dim() != _MATRIX_DIMENSIONS:
        values = _multiply_runs(padded_matrix, matrix)
        return RotatedTensor(values, largest_magnitude(values), largest_magnitude(x))
    row_major_matrix, is_transposed = as_row_major(padded_matrix)
    out = torch.empty(row_major_matrix.shape, dtype=torch.float32, device=x.device)
    part_count = len(row_major_matrix) // ROTATED_RUN_LENGTH if is_transposed else len(row_major_matrix)
    amaxes, amaxes_before = (torch.empty(part_count, dtype=torch.float32, device=x.device) for _ in range(2))
    torch.ops.fp8bench.rotated_and_looked_at(row_major_matrix, matrix, out, amaxes, amaxes_before, is_transposed)
    return RotatedTensor(out.t() if is_transposed else out, amaxes, amaxes_before)


def _pad_to_run_multiple(x: Tensor) -> Tensor:
    check_input(x)
    if not x.dim():
        raise ValueError("a tensor without dimensions cannot be rotated")
    return pad(x.detach(), (0, -x.shape[-1] % ROTATED_RUN_LENGTH)) if x.shape[-1] % ROTATED_RUN_LENGTH else x.detach()


# Without these options Inductor splits the sum of sixteen products in two, and stores the first half in memory.
_UNSPLIT_SUM_INDUCTOR_OPTIONS = {
    "realize_opcount_threshold": _MAX_UNSPLIT_OPERATIONS,
    "realize_reads_threshold": _MAX_UNSPLIT_OPERATIONS,
}


@dataclass(frozen=True)
class RotationKernel(Kernel):
    """Computes a rotation in one pass, and also the largest magnitudes of the result and of the operand. Each sum adds
    its sixteen products in order.

    The first argument is the operand's memory, viewed as (rows, runs, 16). If the operand is `turned` (column-major),
    the view is (runs, 16, columns). The other arguments are the matrix, memory for the result in the same shape, and
    memory for the largest magnitudes of the result and of the operand: one number for each row (for each run if
    `turned`).
    """

    source: torch.dtype
    device: str
    turned: bool

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        source, matrix, out, amaxes, amaxes_before = tensors
        run, hadamard_signs = (1, matrix.unsqueeze(-1)) if self.turned else (2, matrix)
        columns = [source.narrow(run, number, 1) for number in range(ROTATED_RUN_LENGTH)]
        rotated_values = reduce(
            torch.add, [tensor.to(torch.float64) * hadamard_signs[place] for place, tensor in enumerate(columns)]
        )
        out.copy_(rotated_values)
        amaxes.copy_(rotated_values.to(torch.float32).abs().amax((1, 2)))
        # torch.maximum with columns[0] does not change the largest magnitude of `source`. But then both calls of amax
        # read columns[0], so the compiler fuses their loops.
        amaxes_before.copy_(torch.maximum(source.abs(), columns[0].abs()).amax((1, 2)))
        return ()

    def examples(self) -> list[Tensor]:
        shape = (
            (_EXAMPLE_RUN_COUNT, ROTATED_RUN_LENGTH, _EXAMPLE_ROWS)
            if self.turned
            else (_EXAMPLE_ROWS, _EXAMPLE_RUN_COUNT, ROTATED_RUN_LENGTH)
        )
        matrix = torch.eye(ROTATED_RUN_LENGTH, dtype=torch.float64, device=self.device)
        example_tensors = [torch.empty(row, device=self.device) for row in (shape, shape[:1], shape[:1])]
        return [draw_example(shape, self.source, self.device), matrix, *example_tensors]

    def free(self) -> list[Sequence[int]]:
        variable_dimensions = (0, 2) if self.turned else (0, 1)
        return [variable_dimensions, (), variable_dimensions, (0,), (0,)]

    def options(self) -> Mapping[str, object]:
        return {**OPERAND_ORDER_CONFIG, **FUSED_SCALAR_OPTIONS, **_UNSPLIT_SUM_INDUCTOR_OPTIONS}


def _view_as_rotation_runs(memory: Tensor, turned: bool) -> Tensor:
    return (
        memory.view(-1, ROTATED_RUN_LENGTH, memory.shape[1])
        if turned
        else memory.view(len(memory), -1, ROTATED_RUN_LENGTH)
    )


def _run_kernel(x: Tensor, matrix: Tensor, out: Tensor, amaxes: Tensor, magnitudes: Tensor, turned: bool) -> None:
    blocks = _view_as_rotation_runs(x, turned)
    result_blocks = _view_as_rotation_runs(out, turned)
    run_kernel(RotationKernel(x.dtype, str(x.device), turned), blocks, matrix, result_blocks, amaxes, magnitudes)


_ROTATION_SCHEMA = "Tensor x, Tensor matrix, Tensor(a!) out, Tensor(b!) amaxes, Tensor(c!) before, bool turned"
operators.define_operator("rotated_and_looked_at", f"({_ROTATION_SCHEMA}) -> ()", _run_kernel)


def _multiply_runs(x: Tensor, matrix: Tensor) -> Tensor:
    runs = x.reshape(x.numel() // ROTATED_RUN_LENGTH, ROTATED_RUN_LENGTH)
    result = torch.empty(runs.shape, dtype=torch.float32, device=x.device)
    # torch.split needs a positive size, also without runs.
    runs_per_piece = _ROTATED_RUNS_PER_PIECE if x.device.type == "cpu" else max(len(runs), 1)
    for source, target in zip(torch.split(runs, runs_per_piece), torch.split(result, runs_per_piece), strict=True):
        target.copy_(source.to(torch.float64) @ matrix)
    return result.view(x.shape)


@lru_cache(maxsize=1024)
def _make_hadamard_matrix(seed: int, device: torch.device) -> Tensor:
    """Returns Sylvester's 16x16 Hadamard matrix, divided by 4 to be orthogonal, and with random signs of its rows."""
    cpu = torch.device("cpu")  # name the device, because the caller may have set another default device
    matrix = torch.ones(1, 1, dtype=torch.float64, device=cpu)
    while len(matrix) < ROTATED_RUN_LENGTH:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    is_negated_row = random_bits((ROTATED_RUN_LENGTH, 1), torch.tensor([seed], device=cpu)) >= 1 << (
        ROUNDING_RANDOM_BITS - 1
    )
    return torch.where(is_negated_row, -matrix, matrix).div(ROTATED_RUN_LENGTH**0.5).to(device)
