"""Checks whether timed steps have turned numbers of a state into infinity or NaN. With such numbers, a step may take a
different time.

Infinity and NaN may exist from the start: attention masks hold -inf, and uninitialised memory may hold anything. So an
element counts as lost only if it was finite in the prepared state, or if a step made its tensor. Three kinds of tensors
that a step made are exceptions. A tensor that was made before the first timed step, and never written again, is an
input. A tensor with -inf next to finite numbers is a mask. If a prepared tensor held -inf, it is a mask that may move,
so more -inf may appear in it.

Tensors that cannot be read within READ_SECONDS are not checked.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from fp8bench.worker.state_tensors import TensorViewKey, get_tensor_view_key, get_version, iterate_tensors

# The limit in CPU seconds for reading a whole state once.
READ_SECONDS = 0.5
# A tensor of a one-byte dtype is converted in pieces of this many elements.
_ELEMENTS_PER_PIECE = 1 << 22


class LostFiniteElements(NamedTuple):
    """Elements of a state that are not finite any more: how many (`nonfinite_count`), of how many checked elements.
    `where` describes the first tensor with such elements.
    """

    nonfinite_count: int = 0
    checked_number_count: int = 0
    where: str = ""

    @property
    def share(self) -> float:
        return self.nonfinite_count / self.checked_number_count if self.checked_number_count else 0.0

    def __str__(self) -> str:
        if not self.nonfinite_count:
            return ""
        counts = f"{self.nonfinite_count} of {self.checked_number_count} numbers"
        return f"its state is not finite: {counts}, the first in {self.where}"


class _InitialNonFiniteElements(NamedTuple):
    not_finite: Any
    has_negative_infinity: bool


class InitialFiniteElements:
    """Remembers the finite elements of a prepared state, to find those that are not finite after the steps."""

    def __init__(self, state: object) -> None:
        self._prepared: dict[TensorViewKey, _InitialNonFiniteElements | None] = {}
        self._made_versions: dict[TensorViewKey, int] = {}
        # False if the time was too short to read the whole state. Then a tensor that is not in `_prepared` may have
        # existed since preparation.
        self._has_read_state = True
        for tensor in self._iterate_float_tensors(state):
            not_finite_mask = _make_not_finite_mask(tensor)
            has_negative_infinity = not_finite_mask is not None and bool(_make_negative_infinity_mask(tensor).any())
            self._prepared[get_tensor_view_key(tensor)] = (
                None if not_finite_mask is None else _InitialNonFiniteElements(not_finite_mask, has_negative_infinity)
            )

    @property
    def inputs(self) -> set[int]:
        return {view[0] for view in self._prepared}

    def begin(self, state: object) -> None:
        """Is called before the first timed step. A tensor with infinity or NaN that now exists, and is not written
        later, counts as an input and not as lost.
        """
        for tensor in self._iterate_float_tensors(state):
            view_key = get_tensor_view_key(tensor)
            if view_key not in self._prepared and _make_not_finite_mask(tensor) is not None:
                self._made_versions[view_key] = get_version(tensor)

    def find_lost_numbers(self, state: object) -> LostFiniteElements:
        lost_number_count = 0
        checked_number_count = 0
        first_tensor_description = ""
        had_read_whole_state = self._has_read_state
        for tensor in self._iterate_float_tensors(state):
            if get_tensor_view_key(tensor) not in self._prepared and not had_read_whole_state:
                continue
            checked_number_count += tensor.numel()
            tensor_lost_numbers = self._count_lost_numbers(tensor)
            if tensor_lost_numbers and not first_tensor_description:
                tensor_shape_text = " x ".join(map(str, tensor.shape)) or "one number"
                first_tensor_description = (
                    f"a tensor of {tensor_shape_text} ({str(tensor.dtype).removeprefix('torch.')})"
                )
            lost_number_count += tensor_lost_numbers
        return LostFiniteElements(lost_number_count, checked_number_count, first_tensor_description)

    def _iterate_float_tensors(self, state: object) -> Iterator[Any]:
        import torch

        deadline = time.thread_time() + READ_SECONDS
        for tensor in iterate_tensors(state, until=deadline):
            if time.thread_time() > deadline:
                break
            dtype = tensor.dtype
            # `aminmax` takes no complex numbers, and `view_as_real` no tensor whose conjugation is pending.
            if dtype.is_complex and not tensor.is_conj():
                yield torch.view_as_real(tensor.detach())
            elif dtype.is_floating_point and tensor.numel() and (dtype.itemsize > 1 or can_convert_dtype(dtype)):
                yield tensor.detach()
        self._has_read_state = self._has_read_state and time.thread_time() <= deadline

    def _count_lost_numbers(self, tensor: Any) -> int:
        not_finite_mask = _make_not_finite_mask(tensor)
        if not_finite_mask is None:
            return 0
        tensor_view_key = get_tensor_view_key(tensor)
        if tensor_view_key not in self._prepared:
            is_input = self._made_versions.get(tensor_view_key) == get_version(tensor)
            is_infinity_mask = bool((_make_negative_infinity_mask(tensor) == not_finite_mask).all()) and not bool(
                not_finite_mask.all()
            )
            return 0 if is_input or is_infinity_mask else int(not_finite_mask.sum())
        initially_not_finite_values = self._prepared[tensor_view_key]
        if initially_not_finite_values is not None:
            not_finite_mask = not_finite_mask & ~initially_not_finite_values.not_finite
            if initially_not_finite_values.has_negative_infinity:
                not_finite_mask = not_finite_mask & ~_make_negative_infinity_mask(tensor)
        return int(not_finite_mask.sum())


@functools.cache
def can_convert_dtype(dtype: Any) -> bool:
    """Returns whether torch can convert single elements of a dtype. It cannot convert packed pairs."""
    import torch

    try:
        return torch.empty(1, dtype=dtype).to(torch.float32).numel() == 1
    except NotImplementedError:
        return False


def _make_not_finite_mask(tensor: Any) -> Any:
    """Returns a mask of the elements that are not finite, or None if all are finite.

    It first computes the smallest and the largest element, because this takes only a fiftieth of the time.
    """
    import torch

    if tensor.dtype.itemsize > 1:
        smallest_and_largest_element = torch.stack(torch.aminmax(tensor))
        return None if bool(smallest_and_largest_element.isfinite().all()) else ~tensor.isfinite()
    # torch has no arithmetic for one-byte dtypes, so pieces of the tensor are converted first.
    mask_pieces = [~piece.to(torch.float32).isfinite() for piece in tensor.reshape(-1).split(_ELEMENTS_PER_PIECE)]
    return torch.cat(mask_pieces).reshape(tensor.shape) if any(bool(piece.any()) for piece in mask_pieces) else None


def _make_negative_infinity_mask(tensor: Any) -> Any:
    import torch

    return (tensor if tensor.dtype.itemsize > 1 else tensor.to(torch.float32)) == float("-inf")
