"""AdamW whose moments are stored in a chosen precision between steps.

Weights, gradients and the step itself are fp32. Low-precision moments are decoded before the step and cast after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from fp8bench.formats.grids import FP16, Format
from fp8bench.formats.native_codes import codes, compute_current_scale
from fp8bench.formats.recipes import ScaleRounding
from fp8bench.formats.scaled import largest_magnitude
from fp8bench.model import MemoryRole
from fp8bench.protocols import Arithmetic, Operand, Role

LEARNING_RATE = 3e-4
BETAS = (0.9, 0.999)
EPSILON = 1e-8
WEIGHT_DECAY = 0.1


@dataclass(frozen=True)
class MomentStorageMethod:
    """How one of AdamW's moments is stored between steps. `casts` is False if the moment stays an fp32 tensor.

    `store` returns the codes or rounded values of a moment, with the scale that decodes them if there is one.
    `make_tensor_storage(name)` returns a separate storage for one tensor; the field is None if storages have no state.
    If `settles` is true, scales come from earlier casts. So the first tensor must be stored twice, to get a scale that
    fits it.
    """

    store: Callable[[Tensor], Operand]
    restore: Callable[[Operand], Tensor]
    casts: bool = True
    settles: bool = False
    make_tensor_storage: Callable[[str], MomentStorageMethod] | None = None

    def choose_tensor_storage(self, name: str) -> MomentStorageMethod:
        return self if self.make_tensor_storage is None else self.make_tensor_storage(name)


def make_scaled_storage(fmt: Format, rounding: ScaleRounding = ScaleRounding.EXACT) -> MomentStorageMethod:

    def store(x: Tensor) -> Operand:
        # An operand has the scale that decodes it, which is the inverse of the scale that encodes it.
        encoding_scale, decoding_scale = compute_current_scale(largest_magnitude(x), fmt, rounding)
        return Operand(codes(x, fmt, encoding_scale), decoding_scale)

    def restore(operand: Operand) -> Tensor:
        assert operand.scale is not None
        return operand.data.to(torch.float32).mul_(operand.scale)

    return MomentStorageMethod(store, restore)


def make_arithmetic_storage(arithmetic: Arithmetic) -> MomentStorageMethod:
    """Returns a storage that casts and restores moments by an arithmetic. A moment has the layout of its weight and is
    rounded like a weight.
    """
    return MomentStorageMethod(
        partial(arithmetic.cast, role=Role.WEIGHT),
        partial(arithmetic.restore, dtype=torch.float32),
        arithmetic.casts,
        arithmetic.settles,
        lambda name: make_arithmetic_storage(arithmetic.layer(name)),
    )


def choose_storages(arithmetic: Arithmetic, same_precision: bool) -> tuple[MomentStorageMethod, MomentStorageMethod]:
    """Returns the storages of the first and the second moment. fp32 and bf16, whose arithmetics are `plain`, store both
    moments without a scale. fp16 is plain too, but needs a scale because of its short range.

    In lower precisions only the first moment is stored in the precision. The second is stored in scaled fp16, as in
    FP8-LM. A shorter range would round small second moments to zero, and the update would be divided by epsilon. With
    `same_precision`, both moments have the precision nevertheless.
    """
    if arithmetic.plain and arithmetic.carrier is torch.float16:
        return make_scaled_storage(FP16), make_scaled_storage(FP16)
    storage = make_arithmetic_storage(arithmetic)
    second_storage = storage if same_precision or arithmetic.plain else make_scaled_storage(FP16)
    return storage, second_storage


class MomentBucket:
    """Parameters with their gradients and AdamW's moments. If both moments are stored in fp32, they are in
    `fp32_moments`, and a step neither decodes nor casts moments.
    """

    def __init__(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        first: list[Tensor],
        second: list[Tensor],
        storages: tuple[MomentStorageMethod, MomentStorageMethod],
        steps: int,
        fused: bool,
    ) -> None:
        """Takes ownership of the tensors, which are all fp32. `steps` is the number of previous steps."""
        self.parameters = parameters
        self.gradients = gradients
        # Moments in fp32 need no cast, and torch updates them in place.
        self.fp32_moments = None if any(storage.casts for storage in storages) else (first, second)
        self._fused = fused
        indices = range(len(parameters))
        self._first_storages = [storages[0].choose_tensor_storage(f"moment.first.{index}") for index in indices]
        self._second_storages = [storages[1].choose_tensor_storage(f"moment.second.{index}") for index in indices]
        self._stored: tuple[list[Operand], list[Operand]] = ([], [])
        # torch reads the step count on the host, or on the device if the step is fused.
        step_count_device = parameters[0].device if fused else torch.device("cpu")
        self._steps = [torch.tensor(float(steps), device=step_count_device) for _ in parameters]
        if self.fp32_moments is None:
            self.store(first, second)
        # Store the moments again if their scales come from earlier casts.
        if any(storage.settles for storage in storages):
            self.store(first, second)

    def memory_roles(self) -> dict[MemoryRole, object]:
        return {
            MemoryRole.WEIGHTS: self.parameters,
            MemoryRole.GRADIENTS: self.gradients,
            MemoryRole.OPTIMIZER: (self.fp32_moments, self._stored, self._steps),
        }

    def restore(self) -> tuple[list[Tensor], list[Tensor]]:
        if self.fp32_moments is not None:
            return self.fp32_moments
        first, second = self._stored
        return _restore_moments(self._first_storages, first), _restore_moments(self._second_storages, second)

    def store(self, first: list[Tensor], second: list[Tensor]) -> None:
        self._stored = _store_moments(self._first_storages, first), _store_moments(self._second_storages, second)

    def stored_tensors(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        if self.fp32_moments is not None:
            return *self.fp32_moments, self._steps
        first_moments, second_moments = self._stored
        return _list_operand_tensors(first_moments), _list_operand_tensors(second_moments), self._steps

    def update(self, first: list[Tensor], second: list[Tensor]) -> None:
        """Runs one step of torch's AdamW, which changes the weights and both moments in place.

        If the step is not fused, torch processes whole lists of tensors at once (foreach) on a GPU, and one tensor at
        a time on a CPU.
        """
        # This function of torch.optim takes lists of tensors, so a bucket needs no optimizer object.
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


def _store_moments(storages: list[MomentStorageMethod], moments: list[Tensor]) -> list[Operand]:
    return [storage.store(moment) for storage, moment in zip(storages, moments, strict=True)]


def _restore_moments(storages: list[MomentStorageMethod], operands: list[Operand]) -> list[Tensor]:
    return [storage.restore(operand) for storage, operand in zip(storages, operands, strict=True)]


def _list_operand_tensors(operands: list[Operand]) -> list[Tensor]:
    tensors: list[Tensor] = []
    for operand in operands:
        tensors += operand.tensors
    return tensors


def split_into_buckets(elements: Sequence[int], max_elements: int) -> Iterator[slice]:
    """Yields slices of consecutive tensors. The tensors of a slice have at most `max_elements` elements together. A
    tensor that is larger gets a separate slice.
    """
    start = bucket_element_count = 0
    for index, count in enumerate(elements):
        if bucket_element_count and bucket_element_count + count > max_elements:
            yield slice(start, index)
            start = index
            bucket_element_count = 0
        bucket_element_count += count
    if bucket_element_count:
        yield slice(start, len(elements))
