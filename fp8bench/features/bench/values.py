"""The names and formats of inputs in options and cases of `bench`. This module does not import torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

# The dtypes of random inputs, with their names in torch.
DTYPES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp64": "float64",
    "fp8-e4m3": "float8_e4m3fn",
    "fp8-e5m2": "float8_e5m2",
}
SHAPE, DTYPE, INPUTS, AGAINST = "shape", "dtype", "inputs", "against"
TENSOR_FILES = (".pt", ".pth", ".safetensors")
_MAX_TENSOR_ELEMENTS = 1 << 40


def parse_shapes(text: str) -> tuple[tuple[int, ...], ...]:
    """Parses the shapes of tensors, such as '1024x4096,4096x1024'. Raises ValueError for any other text."""
    shapes = []
    for part in text.split(","):
        side_texts = part.strip().split("x")
        # isdigit() also accepts characters such as '²', which int() refuses.
        if not all(side.isascii() and side.isdigit() for side in side_texts):
            raise ValueError(f"{part!r} is not a shape; expected sizes with x between, like 1024x4096")
        shape = tuple(map(int, side_texts))
        if not 0 < math.prod(shape) <= _MAX_TENSOR_ELEMENTS:
            raise ValueError(f"{part!r} has {math.prod(shape):,} elements; expected from 1 to {_MAX_TENSOR_ELEMENTS:,}")
        shapes.append(shape)
    return tuple(shapes)


def format_shapes(shapes: Sequence[Sequence[int]]) -> str:
    return ",".join("x".join(map(str, shape)) for shape in shapes)
