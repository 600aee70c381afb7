"""Random Hadamard transforms of 16 elements, which spread outliers over their neighbours before quantisation.

Both operands of a product are rotated along its contraction by the same orthogonal matrix, which leaves the product
unchanged. Sums are made in float64, whatever a device or a TF32 switch would do to float32, and rounded once: the
result is the same on every device.
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
from fp8bench.formats.code_kernels import IN_ORDER, TOGETHER
from fp8bench.formats.compiling import Kernel
from fp8bench.formats.matrix_codes import laid
from fp8bench.formats.native_codes import call
from fp8bench.formats.quantise import RANDOM_BITS, check_input, random_bits
from fp8bench.formats.scaled import largest_magnitude

SIZE = 16
_MATRIX = 2
# Sizes of examples that kernels are compiled with; those of real operands vary.
_ROWS = 640
_RUNS_IN_ROW = 48
_WHOLE_SUM = 1 << 10
# Runs of 16 that a CPU works on at a time, so that their float64 copy stays in its cache.
_RUNS = 1 << 12


def rotate(x: Tensor, seed: int) -> Tensor:
    """`x` with every 16 elements of its last dimension rotated by the seed's matrix, float32.

    The last dimension is padded with zeros to a multiple of 16. The result keeps that length, which a product needs to
    be unchanged. Infinities and NaN make NaN of all 16 elements of their run.
    """
    return _times(_fill_up(x), _matrix(seed, x.device))


class RotatedTensor(NamedTuple):
    """A rotated tensor, and the largest magnitudes of all its parts, float32, after and before the rotation."""

    values: Tensor
    amaxes: Tensor
    amaxes_before: Tensor


def rotation(x: Tensor, seed: int) -> RotatedTensor:
    """Rotates a matrix and finds the largest magnitudes that a cast of it begins with. Keeps its order in memory."""
    filled = _fill_up(x)
    matrix = _matrix(seed, x.device)
    # One kernel is faster on a GPU, where it replaces five operations; on a CPU the product of matrices is.
    slower = x.device.type == "cpu" or torch.compiler.is_compiling()
    if slower or not x.numel() or x.dim() != _MATRIX:
        values = _times(filled, matrix)
        return RotatedTensor(values, largest_magnitude(values), largest_magnitude(x))
    memory, turned = laid(filled)
    out = torch.empty(memory.shape, dtype=torch.float32, device=x.device)
    parts = len(memory) // SIZE if turned else len(memory)
    amaxes, amaxes_before = (torch.empty(parts, dtype=torch.float32, device=x.device) for _ in range(2))
    torch.ops.fp8bench.rotated_and_looked_at(memory, matrix, out, amaxes, amaxes_before, turned)
    return RotatedTensor(out.t() if turned else out, amaxes, amaxes_before)


def _fill_up(x: Tensor) -> Tensor:
    check_input(x)
    if not x.dim():
        raise ValueError("a tensor without dimensions has none that could be rotated")
    return pad(x.detach(), (0, -x.shape[-1] % SIZE)) if x.shape[-1] % SIZE else x.detach()


# Inductor would cut a sum of sixteen in two, and store the first half.
_WHOLE = {"realize_opcount_threshold": _WHOLE_SUM, "realize_reads_threshold": _WHOLE_SUM}


@dataclass(frozen=True)
class LookingRotationKernel(Kernel):
    """The rotation and the largest magnitudes of parts, of the result and of the operand, from one pass, which adds up
    sixteen products one after the other.

    Arguments: the operand's memory as (rows, runs, 16), or (runs, 16, columns) for one that is `turned`, whose first
    dimension counts parts; the matrix; memory for the result in that shape; and for both largest magnitudes.
    """

    source: torch.dtype
    device: str
    turned: bool

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        source, matrix, out, amaxes, amaxes_before = tensors
        run, signs = (1, matrix.unsqueeze(-1)) if self.turned else (2, matrix)
        columns = [source.narrow(run, number, 1) for number in range(SIZE)]
        turned = reduce(torch.add, [tensor.to(torch.float64) * signs[place] for place, tensor in enumerate(columns)])
        out.copy_(turned)
        amaxes.copy_(turned.to(torch.float32).abs().amax((1, 2)))
        # The maximum with the first of the run changes nothing, but both then read it, which puts them into one loop.
        amaxes_before.copy_(torch.maximum(source.abs(), columns[0].abs()).amax((1, 2)))
        return ()

    def examples(self) -> list[Tensor]:
        shape = (_RUNS_IN_ROW, SIZE, _ROWS) if self.turned else (_ROWS, _RUNS_IN_ROW, SIZE)
        numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        matrix = torch.eye(SIZE, dtype=torch.float64, device=self.device)
        memory = [torch.empty(row, device=self.device) for row in (shape, shape[:1], shape[:1])]
        return [numbers.to(torch.device(self.device), self.source), matrix, *memory]

    def free(self) -> list[Sequence[int]]:
        places = (0, 2) if self.turned else (0, 1)
        return [places, (), places, (0,), (0,)]

    def options(self) -> Mapping[str, object]:
        return {**IN_ORDER, **TOGETHER, **_WHOLE}


def _runs(memory: Tensor, turned: bool) -> Tensor:
    return memory.view(-1, SIZE, memory.shape[1]) if turned else memory.view(len(memory), -1, SIZE)


def _run_looking(x: Tensor, matrix: Tensor, out: Tensor, amaxes: Tensor, magnitudes: Tensor, turned: bool) -> None:
    blocks = _runs(x, turned)
    written = _runs(out, turned)
    call(LookingRotationKernel(x.dtype, str(x.device), turned), blocks, matrix, written, amaxes, magnitudes)


_LOOKING = "Tensor x, Tensor matrix, Tensor(a!) out, Tensor(b!) amaxes, Tensor(c!) before, bool turned"
operators.define("rotated_and_looked_at", f"({_LOOKING}) -> ()", _run_looking)


def _times(x: Tensor, matrix: Tensor) -> Tensor:
    runs = x.reshape(x.numel() // SIZE, SIZE)
    result = torch.empty(runs.shape, dtype=torch.float32, device=x.device)
    piece = _RUNS if x.device.type == "cpu" else max(len(runs), 1)
    for source, target in zip(torch.split(runs, piece), torch.split(result, piece), strict=True):
        target.copy_(source.to(torch.float64) @ matrix)
    return result.view(x.shape)


@lru_cache(maxsize=1024)
def _matrix(seed: int, device: torch.device) -> Tensor:
    """Sylvester's Hadamard matrix of 16, scaled by 1/4 to be orthogonal, its rows with random signs."""
    cpu = torch.device("cpu")  # not the caller's default device
    matrix = torch.ones(1, 1, dtype=torch.float64, device=cpu)
    while len(matrix) < SIZE:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    negative = random_bits((SIZE, 1), torch.tensor([seed], device=cpu)) >= 1 << (RANDOM_BITS - 1)
    return torch.where(negative, -matrix, matrix).div(SIZE**0.5).to(device)
