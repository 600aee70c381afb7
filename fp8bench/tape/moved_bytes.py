"""The bytes that a call reads and writes: each tensor once, as much of its memory as there is. A view moves none."""

from __future__ import annotations

import math
from typing import Any

from fp8bench.tape.recorder import Call, TensorSeen, arguments_of, name_of, tensors_in

# What these give has nothing in it yet.
MAKE_ROOM = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_", "set_"}
)
# Of what they change these read nothing.
_OVERWRITE = frozenset(
    {"copy_", "fill_", "zero_", "uniform_", "normal_", "random_", "bernoulli_", "exponential_", "_foreach_copy_",
     "_foreach_zero_"}
)  # fmt: skip
# These look at no number.
_SAY_NOTHING = frozenset({"is_same_size", "is_pinned", "record_stream", "_fused_sdp_choice", "_has_same_storage_numel"})
# From this argument they take as much as they give.
_PICK = {
    "embedding": "weight", "index": "self", "index_select": "self", "gather": "self", "take": "self",
    "_unsafe_index": "self", "_embedding_bag": "weight", "masked_select": "self",
}  # fmt: skip
# Of what they change these reach as much as there is in this argument.
_PUT = {
    "index_put_": "values", "_index_put_impl_": "values", "index_add_": "source", "index_copy_": "source",
    "scatter_": "src", "scatter_add_": "src", "masked_scatter_": "source",
}  # fmt: skip
_GRADIENTS = "grads"


def elements_of(tensor: TensorSeen) -> int:
    """How many different ones there are in memory: what is broadcast, or lies in several windows, is there once."""
    if 0 in tensor.shape:
        return 0
    if tensor.stride is None:
        return math.prod(tensor.shape)
    own = [(size, abs(step)) for size, step in zip(tensor.shape, tensor.stride, strict=True) if step and size > 1]
    return min(math.prod(size for size, _ in own), 1 + sum((size - 1) * step for size, step in own))


def bytes_of(tensor: TensorSeen) -> int:
    return elements_of(tensor) * tensor.dtype.itemsize


class Traffic:
    """What one call moves: tensors that it reads and writes, with the bytes of each. Nothing, of a view."""

    def __init__(self, call: Call) -> None:
        self._name = name_of(call)
        self.read: list[TensorSeen] = []
        self.written: list[TensorSeen] = []
        self._least: dict[int, int] = {}
        arguments, changes = arguments_of(call), _changed(call)
        for name, value in arguments.items():
            tensors = list(tensors_in(value))
            writes = changes.get(name)
            if writes is None or not self._overwrites(call, name, writes):
                self.read += tensors
            if writes is not None and not (name == _GRADIENTS and arguments.get("grad_scale") is None):
                self.written += tensors
        given = {one.storage for one in (*self.read, *self.written)}
        results = list(tensors_in(call.result))
        made = [one for one in results if one.storage not in given]
        self.made = made
        is_view = bool(results) and not made and not self.written
        if is_view or self._name in MAKE_ROOM or self._name in _SAY_NOTHING:
            self.read, self.written = [], []
            return
        self.written += made
        self._limit(arguments, made)

    @property
    def makes_room(self) -> bool:
        return self._name in MAKE_ROOM

    @property
    def moves(self) -> bool:
        """Whether a kernel is needed for it."""
        return bool(self.read or self.written)

    def by_dtype(self) -> dict[Any, int]:
        """Bytes by the dtypes of the tensors; what is read and written counts twice."""
        found: dict[Any, int] = {}
        for side in (self.read, self.written):
            each = {(one.storage, one.offset, elements_of(one)): one for one in side}
            for one in each.values():
                size = min(bytes_of(one), self._least.get(id(one), bytes_of(one)))
                found[one.dtype] = found.get(one.dtype, 0) + size
        return found

    def _overwrites(self, call: Call, name: str, keyword: bool) -> bool:
        ours = self._name.startswith("fp8bench::")
        accumulates = call.named.get("accumulate", len(call.given) > 3 and call.given[3])
        put = self._name in _PUT and "add" not in self._name and not accumulates
        return ours or keyword or self._name in _OVERWRITE or put

    def _limit(self, arguments: dict[str, Any], made: list[TensorSeen]) -> None:
        """Of a table of which some rows are taken, or written, those."""
        if (source := _PICK.get(self._name)) and made:
            for one in tensors_in(arguments.get(source)):
                self._least[id(one)] = elements_of(made[0]) * one.dtype.itemsize
        if source := _PUT.get(self._name):
            count = sum(map(elements_of, tensors_in(arguments.get(source))))
            for one in tensors_in(arguments["self"]):
                if count:
                    self._least[id(one)] = count * one.dtype.itemsize


def _changed(call: Call) -> dict[str, bool]:
    """The arguments that a call writes to, and whether they are there for its result alone."""
    schema = getattr(call.operator, "_schema", None)
    arguments = schema.arguments if schema is not None else ()
    return {one.name: one.kwarg_only for one in arguments if one.alias_info is not None and one.alias_info.is_write}
