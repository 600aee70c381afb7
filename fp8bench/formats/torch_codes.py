"""Codes in torch's own dtypes, by torch's own casts: what native products and buffers are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8bench.formats.grids import E4M3, E5M2, FP16, Format

DTYPES: dict[str, torch.dtype] = {
    E4M3.name: torch.float8_e4m3fn,
    E5M2.name: torch.float8_e5m2,
    FP16.name: torch.float16,
}


def torch_codes(x: Tensor, fmt: Format, scale: Tensor | None = None) -> Tensor:
    """`x`, times a float32 scale if there is one, as contiguous codes: what is too large becomes the largest value."""
    values = x.detach().to(torch.float32)
    # Out of place at first: what has no scale and is float32 already is the caller's own.
    scaled = values.clamp(-fmt.largest, fmt.largest) if scale is None else (values * scale)
    return scaled.clamp_(-fmt.largest, fmt.largest).to(DTYPES[fmt.name]).contiguous()
