"""A grouped FP8 product on a CPU that follows torch's documentation, behind torch's own shape rules for CUDA."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def exact(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums in float64 and rounds once, so that order does not matter; float32 sums vary."""
    return (a.double() @ b.double().t()).to(dtype)


def exact_mm(a: Tensor, b: Tensor) -> Tensor:
    return exact(a, b.t(), a.dtype)


def exact_grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
    """On CPUs without bfloat16 products, torch's sums depend on the layout of the operands."""
    return _joined(*_parted(a, b, offs), a.dtype, b.dim())


def _parted(a: Tensor, b: Tensor, ends: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    parts = list(itertools.pairwise([0, *ends.tolist()]))
    right = b.transpose(-2, -1)
    if b.dim() == 3:  # rows of a, each part with a separate matrix and scales
        assert a.dim() == 2 and parts[-1][1] == len(a) and len(parts) == len(b)
        return [a[slice(*part)] for part in parts], list(right)
    return [a[:, slice(*part)] for part in parts], [right[:, slice(*part)] for part in parts]


def _joined(lefts: Iterable[Tensor], rights: Iterable[Tensor], dtype: torch.dtype, dimensions: int) -> Tensor:
    join = torch.cat if dimensions == 3 else torch.stack
    return join([exact(left, right, dtype) for left, right in zip(lefts, rights, strict=True)])


def kernel(a: Tensor, b: Tensor, *others: Any) -> Tensor:
    """Multiplies part by part, with the codes and scales that the documentation assigns to each."""
    scale_a, scale_b, ends, bias, scale_result, output, fast = others
    assert bias is scale_result is None
    lefts, rights = _parted(a, b, ends)
    assert b.dim() == 3 or not fast, "sums of gradients"
    return _joined(_decoded(lefts, scale_a), _decoded(rights, scale_b), output, b.dim())


def _decoded(parts: list[Tensor], scales: Tensor) -> Iterator[Tensor]:
    lying, begin = scales.flatten(), 0
    for codes in parts:
        rows, across = codes.shape[0], codes.shape[1] // 32
        if scales.dtype != torch.float8_e8m0fnu:
            yield codes.to(torch.float32) * lying[begin : begin + rows, None]
            begin += rows
            continue
        row, column = torch.arange(rows)[:, None], torch.arange(across)
        wide = -(-across // 4)
        tile = (row // 128 * wide + column // 4) * 512
        of_blocks = lying.view(torch.uint8)[begin + tile + row % 32 * 16 + row % 128 // 32 * 4 + column % 4]
        powers = torch.exp2(of_blocks.to(torch.float32) - 127)
        yield codes.to(torch.float32) * powers.repeat_interleave(32, 1)
        begin += -(-rows // 128) * wide * 512
    assert begin == lying.numel()


class GroupedKernel:
    """Replaces the operator, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, a: Tensor, b: Tensor, *others: Any) -> Tensor:
        from torch._meta_registrations import _meta_grouped_mm_common

        self.calls += 1
        meta = [item.to("meta") for item in (a, b, *others[:3])]
        shape = _meta_grouped_mm_common(*meta, *others[3:]).shape
        result = kernel(a, b, *others)
        assert result.shape == shape and result.dtype is torch.bfloat16
        return result
