"""Random tensors that are hard for low precision, among them gradients, whose magnitudes differ by layer and row; and
`drawn`, the operands of suites."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fp8bench.model import Scalars
from fp8bench.protocols.axes import CONTIGUOUS, PADDED, STRIDED, TRANSPOSED, VALUES

# Student's t with this many degrees of freedom has a variance and no kurtosis: its largest values grow with the count.
DEGREES = 3
# One channel in this many is an outlier, by this factor, as in a trained model's activations.
OUTLIER_EVERY = 128
OUTLIER_FACTOR = 50.0
# Magnitudes of gradients are log-normal about this median, with this deviation in powers of e.
GRADIENT_MEDIAN = 1e-4
GRADIENT_DEVIATION = 2.0


def seeded_generator(device: str, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def gaussian(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def student_t(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    normal, *normals = (gaussian(shape, generator) for _ in range(1 + DEGREES))
    squares = torch.stack(normals).square_().sum(0)
    return normal.div_(squares.div_(DEGREES).sqrt_())


def outlier_channels(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Returns standard normal values with a few much larger columns, the same in every row."""
    values = gaussian(shape, generator)
    count = max(1, shape[1] // OUTLIER_EVERY)
    chosen = torch.randperm(shape[1], generator=generator, device=generator.device)[:count]
    values[:, chosen] *= OUTLIER_FACTOR
    return values


def log_normal(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    signs = gaussian(shape, generator).sign_()
    return gaussian(shape, generator).mul_(GRADIENT_DEVIATION).exp_().mul_(GRADIENT_MEDIAN).mul_(signs)


DISTRIBUTIONS: dict[str, Callable[[tuple[int, int], torch.Generator], Tensor]] = {
    "gaussian": gaussian,
    "student-t": student_t,
    "outliers": outlier_channels,
    "log-normal": log_normal,
}


# Ranges of powers of ten. A network's layers differ by some orders of magnitude, as do rows of one layer; with equal
# magnitudes, a single scale per tensor would look better than it is.
_TENSOR_EXPONENTS = (-6.0, -2.0)
_ROW_EXPONENTS = (-1.5, 1.5)


class GradientSource:
    """Sets of gradients of matrices: Gaussian values, each row and each matrix with its own scale, the same in all
    sets.

    `scales` has a column for each matrix: the standard deviations of its rows.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], generator: torch.Generator) -> None:
        self._shapes = tuple(shapes)
        self._generator = generator
        self.scales = [self._scale(rows) for rows, _ in self._shapes]

    def draw(self) -> list[Tensor]:
        return [tensor.mul_(scale) for tensor, scale in zip(self.normal(), self.scales, strict=True)]

    def normal(self) -> list[Tensor]:
        return [gaussian(shape, self._generator) for shape in self._shapes]

    def _scale(self, rows: int) -> Tensor:
        generator = self._generator
        tensor, row = (
            torch.rand(count, generator=generator, device=generator.device) * (high - low) + low
            for count, (low, high) in ((1, _TENSOR_EXPONENTS), (rows, _ROW_EXPONENTS))
        )
        return torch.pow(10.0, tensor + row).unsqueeze(1)


# Every format can represent integers up to this, FP4 too.
_LARGEST_INTEGER = 4


def drawn(params: Scalars, shape: Sequence[int], generator: torch.Generator | None = None, device: str = "") -> Tensor:
    """Returns float32 values of the case's kind; without a generator from torch's own state, on its default device.

    The kind can change speed: constants switch fewer wires of the multipliers than random numbers do, so that a GPU at
    its power limit keeps a higher clock.
    """
    kind = VALUES.of(params)
    empty = torch.empty(tuple(shape), device=device or None, dtype=torch.float32)
    if kind == "normal":
        return empty.normal_(generator=generator)
    if kind == "uniform":
        return empty.uniform_(-1, 1, generator=generator)
    if kind == "integers":
        return empty.random_(-_LARGEST_INTEGER, _LARGEST_INTEGER + 1, generator=generator)
    return empty.fill_(float(kind == "ones"))


# Elements between one row and the next in a padded layout.
GAP = 64


def laid_out(matrix: Tensor, layout: str) -> Tensor:
    """Returns the matrix with other strides. The gaps between its elements repeat its numbers: zeros would take less
    power."""
    if layout == CONTIGUOUS:
        return matrix
    if layout == TRANSPOSED:
        return matrix.t().contiguous().t()
    columns = matrix.shape[1]
    if layout == PADDED:
        wide = torch.cat([matrix, matrix[:, torch.arange(GAP, device=matrix.device) % columns]], 1)
        return wide[:, :columns]
    assert layout == STRIDED, layout
    return matrix.repeat_interleave(2, 1)[:, ::2]
