"""Random gradients whose magnitudes are spread as a network's are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
        """The next set, float32."""
        return [one.mul_(scale) for one, scale in zip(self.normal(), self.scales, strict=True)]

    def normal(self) -> list[Tensor]:
        """Standard normal values of the same shapes, from the same stream."""
        generator = self._generator
        return [torch.randn(shape, generator=generator, device=generator.device) for shape in self._shapes]

    def _scale(self, rows: int) -> Tensor:
        exponents = self._uniform(1, *_TENSOR_EXPONENTS) + self._uniform(rows, *_ROW_EXPONENTS)
        return torch.pow(10.0, exponents).unsqueeze(1)

    def _uniform(self, count: int, low: float, high: float) -> Tensor:
        generator = self._generator
        return torch.rand(count, generator=generator, device=generator.device) * (high - low) + low
