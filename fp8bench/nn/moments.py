"""AdamW with its moments kept in some precision between steps.

Weights, gradients and the step itself are fp32: low-precision moments are restored before the step and cast after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from fp8bench.formats.grids import FP16, Format
from fp8bench.formats.native_codes import codes, current_scale
from fp8bench.formats.recipes import ScaleRounding
from fp8bench.formats.scaled import largest_magnitude
from fp8bench.model import MemoryRole
from fp8bench.protocols import Arithmetic, Operand, Role

LEARNING_RATE = 3e-4
BETAS = (0.9, 0.999)
EPSILON = 1e-8
WEIGHT_DECAY = 0.1


@dataclass(frozen=True)
class Storage:
    """How a moment is kept between steps. `casts` is False where it stays the fp32 tensor that the step writes.

    `of(name)` gives one tensor its own storage, where a storage remembers what it kept. `settles` means that a storage
    suits a tensor only after it has kept one like it.
    """

    keep: Callable[[Tensor], Operand]
    restore: Callable[[Operand], Tensor]
    casts: bool = True
    settles: bool = False
    of: Callable[[str], Storage] | None = None

    def for_tensor(self, name: str) -> Storage:
        return self if self.of is None else self.of(name)


def scaled_storage(fmt: Format, rounding: ScaleRounding = ScaleRounding.EXACT) -> Storage:

    def keep(x: Tensor) -> Operand:
        scale, inverse = current_scale(largest_magnitude(x), fmt, rounding)
        return Operand(codes(x, fmt, scale), inverse)

    def restore(operand: Operand) -> Tensor:
        assert operand.scale is not None
        return operand.data.to(torch.float32).mul_(operand.scale)

    return Storage(keep, restore)


def in_arithmetic(arithmetic: Arithmetic) -> Storage:
    """The precision's own cast and its way back. A moment has its weight's layout, and is rounded as one."""
    return Storage(
        partial(arithmetic.cast, role=Role.WEIGHT),
        partial(arithmetic.restore, dtype=torch.float32),
        arithmetic.casts,
        arithmetic.settles,
        lambda name: in_arithmetic(arithmetic.layer(name)),
    )


def storages(arithmetic: Arithmetic, same: bool) -> tuple[Storage, Storage]:
    """The storages of the first and the second moment.

    fp32 and bf16 keep both unchanged. fp16 has too little range and needs a scale. Below that the first moment has the
    precision's own format and the second is scaled fp16, as in FP8-LM, unless it shall be the `same`: a second moment
    that a short range flushes to zero divides the update by epsilon.
    """
    if arithmetic.plain and arithmetic.carrier is torch.float16:
        return scaled_storage(FP16), scaled_storage(FP16)
    storage = in_arithmetic(arithmetic)
    return storage, storage if same or arithmetic.plain else scaled_storage(FP16)


class Bucket:
    """Matrices with all that AdamW keeps for them. `plain` holds the moments where they are kept in fp32, so that a
    step has nothing to restore or cast."""

    def __init__(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        first: list[Tensor],
        second: list[Tensor],
        storages: tuple[Storage, Storage],
        steps: int,
        fused: bool,
    ) -> None:
        """All tensors are fp32 and belong to the bucket from now on; `steps` have been taken before."""
        self.parameters = parameters
        self.gradients = gradients
        # Moments that are stored unchanged need no cast, and torch updates them in place.
        self.plain = None if any(storage.casts for storage in storages) else (first, second)
        self._fused = fused
        indices = range(len(parameters))
        self._first = [storages[0].for_tensor(f"moment.first.{index}") for index in indices]
        self._second = [storages[1].for_tensor(f"moment.second.{index}") for index in indices]
        self._kept: tuple[list[Operand], list[Operand]] = ([], [])
        # torch reads the count of an unfused step on the host, and of a fused one on the device.
        place = parameters[0].device if fused else torch.device("cpu")
        self._steps = [torch.tensor(float(steps), device=place) for _ in parameters]
        # Delayed scales settle only once they have seen the values; a second pass has them settled.
        if self.plain is None:
            self.keep(first, second)
        if any(storage.settles for storage in storages):
            self.keep(first, second)

    def memory_roles(self) -> dict[MemoryRole, object]:
        return {
            MemoryRole.WEIGHTS: self.parameters,
            MemoryRole.GRADIENTS: self.gradients,
            MemoryRole.OPTIMIZER: (self.plain, self._kept, self._steps),
        }

    def restore(self) -> tuple[list[Tensor], list[Tensor]]:
        if self.plain is not None:
            return self.plain
        first, second = self._kept
        return _restore_all(self._first, first), _restore_all(self._second, second)

    def keep(self, first: list[Tensor], second: list[Tensor]) -> None:
        self._kept = _keep_all(self._first, first), _keep_all(self._second, second)

    def stored_tensors(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        first, second = self.plain or map(_tensors_of, self._kept)
        return first, second, self._steps

    def update(self, first: list[Tensor], second: list[Tensor]) -> None:
        """One step of torch's AdamW, which writes weights and both moments in place.

        Unfused, torch takes whole lists (foreach) on a GPU, and tensor by tensor on a CPU.
        """
        # The functional form takes lists, so that a bucket needs no optimizer object.
        adamw(
            self.parameters,
            self.gradients,
            first,
            second,
            [],
            self._steps,
            fused=True if self._fused else None,
            amsgrad=False,
            beta1=BETAS[0],
            beta2=BETAS[1],
            lr=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            eps=EPSILON,
            maximize=False,
        )


def _keep_all(storages: list[Storage], moments: list[Tensor]) -> list[Operand]:
    return [storage.keep(moment) for storage, moment in zip(storages, moments, strict=True)]


def _restore_all(storages: list[Storage], operands: list[Operand]) -> list[Tensor]:
    return [storage.restore(operand) for storage, operand in zip(storages, operands, strict=True)]


def _tensors_of(operands: list[Operand]) -> list[Tensor]:
    tensors: list[Tensor] = []
    for operand in operands:
        tensors += operand.tensors
    return tensors


def split_into_buckets(elements: Sequence[int], most: int) -> Iterator[slice]:
    """Slices of consecutive tensors with at most `most` elements together, or with one larger tensor."""
    start = total = 0
    for index, count in enumerate(elements):
        if total and total + count > most:
            yield slice(start, index)
            start = index
            total = 0
        total += count
    if total:
        yield slice(start, len(elements))
