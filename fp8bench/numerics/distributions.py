"""Random tensors of the kinds that low precision meets, each with the property that makes it hard.

Gradients of a network are among them: their magnitudes differ by layer and by row. `drawn` is what operands are made
of by the axis of every suite that draws its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fp8bench.model import Scalar
from fp8bench.protocols.axes import CONTIGUOUS, PADDED, STRIDED, TRANSPOSED, VALUES

# Student's t with this many degrees of freedom has a variance and no kurtosis: its largest values grow with the count.
DEGREES = 3
# A channel in so many is an outlier, and so many times as large as the others: as a trained model's activations have.
OUTLIER_EVERY, OUTLIER_FACTOR = 128, 50.0
# Magnitudes of gradients: their logarithm is normal about this median, with this deviation (in powers of e).
GRADIENT_MEDIAN, GRADIENT_DEVIATION = 1e-4, 2.0


def gaussian(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Standard normal values: what weights and normed activations are about."""
    return torch.randn(shape, generator=generator, device=generator.device)


def student_t(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Heavy tails: a few values far beyond the others, anywhere."""
    normal, *others = (gaussian(shape, generator) for _ in range(1 + DEGREES))
    squares = torch.stack(others).square_().sum(0)
    return normal.div_(squares.div_(DEGREES).sqrt_())


def outlier_channels(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Standard normal values with a few columns far beyond the others: every row, and every tensor, has some."""
    values = gaussian(shape, generator)
    count = max(1, shape[1] // OUTLIER_EVERY)
    chosen = torch.randperm(shape[1], generator=generator, device=generator.device)[:count]
    values[:, chosen] *= OUTLIER_FACTOR
    return values


def log_normal(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Signed values whose magnitudes span many octaves, as gradients' do."""
    signs = gaussian(shape, generator).sign_()
    return gaussian(shape, generator).mul_(GRADIENT_DEVIATION).exp_().mul_(GRADIENT_MEDIAN).mul_(signs)


DISTRIBUTIONS: dict[str, Callable[[tuple[int, int], torch.Generator], Tensor]] = {
    "gaussian": gaussian,
    "student-t": student_t,
    "outliers": outlier_channels,
    "log-normal": log_normal,
}


# Powers of ten. Layers of one network differ by some orders of magnitude, rows (neurons) of one layer by others: with
# one magnitude for all of it, a scale a tensor would look better than it is.
_TENSOR_EXPONENTS = (-6.0, -2.0)
_ROW_EXPONENTS = (-1.5, 1.5)


class GradientSource:
    """Gradients of matrices, one set after the other: Gaussian values, each row and each matrix with its own scale.

    The scales stay the same from set to set. `scales` holds a column for each matrix: the standard deviation of its
    rows.
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


# Integers that every format has, FP4's elements too.
_LARGEST_INTEGER = 4


def drawn(
    params: Mapping[str, Scalar], shape: Sequence[int], generator: torch.Generator | None = None, device: str = ""
) -> Tensor:
    """float32 values of a case's kind; without a generator from torch's own random state, on its default device.

    What multipliers are fed with changes how many of their wires switch: a GPU at its power limit keeps a higher clock
    on constants than on random numbers.
    """
    kind, empty = VALUES.of(params), torch.empty(tuple(shape), device=device or None, dtype=torch.float32)
    if kind == "normal":
        return empty.normal_(generator=generator)
    if kind == "uniform":
        return empty.uniform_(-1, 1, generator=generator)
    if kind == "integers":
        return empty.random_(-_LARGEST_INTEGER, _LARGEST_INTEGER + 1, generator=generator)
    return empty.fill_(float(kind == "ones"))


# Elements between one row and the next.
GAP = 64


def laid_out(matrix: Tensor, layout: str) -> Tensor:
    """The matrix with other strides. What lies between its elements are numbers of its own once more: a gap of zeros
    would take less power than any operand."""
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
