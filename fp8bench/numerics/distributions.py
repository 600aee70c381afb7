"""Random tensors that are difficult for low precision, such as gradients with different magnitudes per layer and row.

`draw_values` draws the operands of suites.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fp8bench.model import Scalars
from fp8bench.protocols.axes import CONTIGUOUS, PADDED, STRIDED, TRANSPOSED, VALUES

# The heavy tail of Student's t with 3 degrees of freedom: it has a variance but no kurtosis, so its largest values
# grow with the number of values.
DEGREES_OF_FREEDOM = 3
# One of CHANNELS_PER_OUTLIER channels is an outlier. Its values are larger by OUTLIER_FACTOR, as in activations of a
# trained model.
CHANNELS_PER_OUTLIER = 128
OUTLIER_FACTOR = 50.0
# Gradients' magnitudes are log-normal: their median, and the standard deviation of their natural logarithm.
MEDIAN_GRADIENT_MAGNITUDE = 1e-4
GRADIENT_DEVIATION = 2.0


def make_seeded_generator(device: str, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def draw_gaussian(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def draw_student_t(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    # Student's t is a normal value, divided by the root of the mean square of independent normal values.
    normal, *normals = (draw_gaussian(shape, generator) for _ in range(1 + DEGREES_OF_FREEDOM))
    sum_of_squares = torch.stack(normals).square_().sum(0)
    return normal.div_(sum_of_squares.div_(DEGREES_OF_FREEDOM).sqrt_())


def draw_outlier_channels(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Returns standard normal values in which a few columns are much larger. Each row has these outliers in the same
    columns.
    """
    values = draw_gaussian(shape, generator)
    count = max(1, shape[1] // CHANNELS_PER_OUTLIER)
    outlier_columns = torch.randperm(shape[1], generator=generator, device=generator.device)[:count]
    values[:, outlier_columns] *= OUTLIER_FACTOR
    return values


def draw_log_normal(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    random_signs = draw_gaussian(shape, generator).sign_()
    return (
        draw_gaussian(shape, generator)
        .mul_(GRADIENT_DEVIATION)
        .exp_()
        .mul_(MEDIAN_GRADIENT_MAGNITUDE)
        .mul_(random_signs)
    )


DISTRIBUTIONS: dict[str, Callable[[tuple[int, int], torch.Generator], Tensor]] = {
    "gaussian": draw_gaussian,
    "student-t": draw_student_t,
    "outliers": draw_outlier_channels,
    "log-normal": draw_log_normal,
}


# Ranges of the powers of ten by which matrices and their rows are scaled. Layers of a network differ by orders of
# magnitude, as do the rows of one layer. With equal magnitudes, one scale per tensor would look better than it is in
# training.
_TENSOR_SCALE_EXPONENT_RANGE = (-6.0, -2.0)
_ROW_SCALE_EXPONENTS = (-1.5, 1.5)


class GradientSource:
    """Draws sets of gradients: Gaussian matrices with a scale per matrix and per row. All sets have the same scales.

    `scales` has one column for each matrix: the standard deviations of its rows.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], generator: torch.Generator) -> None:
        self._shapes = tuple(shapes)
        self._generator = generator
        self.scales = [self._draw_row_scales(rows) for rows, _ in self._shapes]

    def draw(self) -> list[Tensor]:
        return [tensor.mul_(scale) for tensor, scale in zip(self.draw_unscaled_gradients(), self.scales, strict=True)]

    def draw_unscaled_gradients(self) -> list[Tensor]:
        return [draw_gaussian(shape, self._generator) for shape in self._shapes]

    def _draw_row_scales(self, rows: int) -> Tensor:
        generator = self._generator
        tensor, row = (
            torch.rand(count, generator=generator, device=generator.device) * (high - low) + low
            for count, (low, high) in ((1, _TENSOR_SCALE_EXPONENT_RANGE), (rows, _ROW_SCALE_EXPONENTS))
        )
        return torch.pow(10.0, tensor + row).unsqueeze(1)


# The largest integer up to which every format represents integers exactly, even FP4.
_LARGEST_INTEGER = 4


def draw_values(
    params: Scalars, shape: Sequence[int], generator: torch.Generator | None = None, device: str = ""
) -> Tensor:
    """Returns float32 values of the kind that the case's parameters name.

    Without a generator, torch's global one is used. The kind of values can change speed: constants switch fewer wires
    in the multipliers than random numbers, so a GPU at its power limit keeps a higher clock.
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


# The number of padding elements between rows in a padded layout.
PADDING_COLUMNS = 64


def apply_layout(matrix: Tensor, layout: str) -> Tensor:
    """Returns the matrix with the strides of a layout. Gaps between elements have copies of its values, because zeros
    would take less power.
    """
    if layout == CONTIGUOUS:
        return matrix
    if layout == TRANSPOSED:
        return matrix.t().contiguous().t()
    columns = matrix.shape[1]
    if layout == PADDED:
        padded_matrix = torch.cat([matrix, matrix[:, torch.arange(PADDING_COLUMNS, device=matrix.device) % columns]], 1)
        return padded_matrix[:, :columns]
    assert layout == STRIDED, layout
    return matrix.repeat_interleave(2, 1)[:, ::2]
