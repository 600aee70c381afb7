"""Counts the calls of a step: FLOPs, bytes and launches, by phase and by dtype.

Bytes are those that a call reads and writes: each tensor once, as much of its memory as exists. A view moves none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from fp8bench.model import CELL_PHASES
from fp8bench.model.step import OperatorCount, PhaseCount, Tape
from fp8bench.tape.formulas import flops_of
from fp8bench.tape.recorder import Call, TensorSeen, arguments_of, name_of, tensors_in, written_by

# These operators return memory that nothing was written to.
MAKE_ROOM = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_", "set_"}
)
# These do not read the tensor that they change.
_OVERWRITE = frozenset(
    {
        "copy_",
        "fill_",
        "zero_",
        "uniform_",
        "normal_",
        "random_",
        "bernoulli_",
        "exponential_",
        "_foreach_copy_",
        "_foreach_zero_",
    }
)
# These read no number.
_SAY_NOTHING = frozenset({"is_same_size", "is_pinned", "record_stream", "_fused_sdp_choice", "_has_same_storage_numel"})
# These add their first argument to a product, and do not read it if `beta` is 0.
_ADD_TO = frozenset({"addmm", "_addmm_activation", "addbmm", "baddbmm", "addmv", "addr"})
# These read as much of this argument as their result holds.
_PICK = {
    "embedding": "weight",
    "index": "self",
    "index_select": "self",
    "gather": "self",
    "take": "self",
    "_unsafe_index": "self",
    "masked_select": "self",
}
_BAGS = frozenset({"_embedding_bag", "_embedding_bag_forward_only"})
# These change as much as this argument holds.
_PUT = {
    "index_put_": "values",
    "_index_put_impl_": "values",
    "index_add_": "source",
    "index_copy_": "source",
    "scatter_": "index",
    "scatter_add_": "index",
    "masked_scatter_": "source",
    "index_fill_": "index",
}
_GRADIENTS = "grads"


def elements_of(tensor: TensorSeen) -> int:
    """Counts distinct elements in memory: broadcast elements, or overlapping windows, count once."""
    if 0 in tensor.shape:
        return 0
    if tensor.stride is None:
        return math.prod(tensor.shape)
    sides = [(size, abs(step)) for size, step in zip(tensor.shape, tensor.stride, strict=True) if step and size > 1]
    return min(math.prod(size for size, _ in sides), 1 + sum((size - 1) * step for size, step in sides))


def bytes_of(tensor: TensorSeen) -> int:
    return elements_of(tensor) * tensor.dtype.itemsize


def _numbers(value: Any) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors_in(value))


def _part_of(name: str, arguments: Mapping[str, Any], results: list[TensorSeen]) -> tuple[str, int]:
    """Returns the argument of which a call reads or changes a part, and how many of its numbers; '' if all of it."""
    if name in _BAGS:
        return "weight", _numbers(arguments["indices"]) * int(arguments["weight"].shape[-1])
    if name in _PICK and results:
        return _PICK[name], _numbers(results[0])
    if name not in _PUT:
        return "", 0
    count = _numbers(arguments.get(_PUT[name]))
    shape = arguments["self"].shape
    if name == "index_fill_":
        count *= math.prod(shape) // max(1, shape[arguments["dim"]])
    if "indices" in arguments:  # the numbers that are put may be broadcast over them
        indices = [*arguments["indices"], *(None for _ in shape[len(arguments["indices"]) :])]
        named = [index for index in indices if index is not None]
        if any(index.dtype is torch.bool for index in named):
            return ("self", count) if count > 1 else ("", 0)
        untouched = math.prod(size for size, index in zip(shape, indices, strict=True) if index is None)
        spread = torch.broadcast_shapes(*(index.shape for index in named))  # type: ignore[no-untyped-call]
        count = untouched * math.prod(spread)
    return "self", count


class Traffic:
    """The tensors that one call reads and writes, with the bytes of each; none for a view."""

    def __init__(self, call: Call) -> None:
        self._name = name_of(call)
        self.makes_room = self._name in MAKE_ROOM
        self.read: list[TensorSeen] = []
        self.written: list[TensorSeen] = []
        self._least: dict[int, int] = {}
        arguments = arguments_of(call)
        # True for arguments that only receive the result.
        changes = {argument.name: argument.kwarg_only for _, argument in written_by(call.operator)}
        accumulates = arguments.get("accumulate")
        overwrites = (
            self._name.startswith("fp8bench::")
            or self._name in _OVERWRITE
            or (self._name in _PUT and "add" not in self._name and not accumulates)
        )
        unread = "self" if self._name.removesuffix("_") in _ADD_TO and arguments.get("beta") == 0 else ""
        self.unread = list(tensors_in(arguments.get(unread)))
        # 1. The operator's schema and a few names determine which arguments it reads and writes.
        for name, value in arguments.items():
            tensors = list(tensors_in(value))
            writes = changes.get(name)
            if name != unread and (writes is None or not (overwrites or writes)):
                self.read += tensors
            if writes is not None and not (name == _GRADIENTS and arguments.get("grad_scale") is None):
                self.written += tensors
        # 2. Results in separate memory are written; views of arguments are not.
        storages = {tensor.storage for tensor in (*self.read, *self.written)}
        results = list(tensors_in(call.result))
        fresh = [result for result in results if result.storage not in storages]
        self.made = fresh
        is_view = bool(results) and not fresh and not self.written
        if is_view or self.makes_room or self._name in _SAY_NOTHING:
            self.read = []
            self.written = []
            return
        self.written += fresh
        # 3. Some operators touch only a part of an argument.
        argument, count = _part_of(self._name, arguments, fresh)
        for tensor in tensors_in(arguments.get(argument)):
            self._least[id(tensor)] = count * tensor.dtype.itemsize

    @property
    def moves(self) -> bool:
        return bool(self.read or self.written)

    def by_dtype(self) -> dict[Any, int]:
        """Returns bytes by the dtypes of the tensors; what is both read and written counts twice."""
        sizes: dict[Any, int] = {}
        for side in (self.read, self.written):
            distinct = {(tensor.storage, tensor.offset, elements_of(tensor)): tensor for tensor in side}
            for tensor in distinct.values():
                size = min(bytes_of(tensor), self._least.get(id(tensor), bytes_of(tensor)))
                sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + size
        return sizes


_WORDS = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "float8_e4m3fnuz": "e4m3fnuz",
    "float8_e5m2fnuz": "e5m2fnuz",
    "float8_e8m0fnu": "e8m0",
    "float4_e2m1fn_x2": "e2m1x2",
}
TF32 = "tf32"


def word_of(dtype: Any) -> str:
    """Returns the name that tables have for a dtype of torch's: 'bf16', 'e4m3', 'int64'."""
    name = str(dtype).removeprefix("torch.")
    return _WORDS.get(name, name)


def count_tape(calls: Iterable[Call], tf32: bool = False) -> Tape:
    """Returns the tape of a step. With `tf32` a GPU multiplies float32 tensors in TF32."""
    rows: Counter[OperatorCount] = Counter()
    sums: dict[str, PhaseCount] = {}
    room = _UnwrittenMemory()
    for call in calls:
        # Shape functions run on tensors without numbers.
        if not all(tensor.is_real for tensor in tensors_in(call.result)):
            continue  # it has computed no number
        traffic = Traffic(call)
        room.see(traffic)
        by_dtype = {word_of(dtype): size for dtype, size in traffic.by_dtype().items() if size}
        flops, argument = flops_of(call)
        if flops == 0 and not traffic.moves:
            continue  # a view, or an allocation
        operator = OperatorCount(
            call.phase,
            name_of(call),
            call.backward,
            tuple(_words((call.given, tuple(call.named.values())))),
            tuple(_words(call.result)),
            1,
            flops,
            sum(by_dtype.values()),
            _path(call, argument, tf32) if flops else "",
            int(traffic.moves),
        )
        # Equal calls become one row; phases are summed separately, because dtypes are counted there.
        rows[operator] += 1
        sums[call.phase] = _add_operator(sums.get(call.phase, PhaseCount(call.phase)), operator, by_dtype)
    operators = tuple(replace(operator_count, calls=count) for operator_count, count in rows.items())
    return Tape(operators, tuple(sums[phase] for phase in CELL_PHASES if phase in sums), room.unwritten)


class _UnwrittenMemory:
    def __init__(self) -> None:
        self._empty: set[int] = set()
        self._strange = 0

    @property
    def unwritten(self) -> int:
        return self._strange + len(self._empty)

    def see(self, traffic: Traffic) -> None:
        new_storages = {tensor.storage for tensor in traffic.made if 0 not in tensor.shape}
        if traffic.makes_room:
            self._empty |= new_storages
            return
        written = {tensor.storage for tensor in (*traffic.written, *traffic.unread)}
        read = ({tensor.storage for tensor in traffic.read} - written) & self._empty
        self._strange += len(read)
        self._empty -= read | new_storages | written


def _add_operator(phase: PhaseCount, operator: OperatorCount, by_dtype: dict[str, int]) -> PhaseCount:
    flops = operator.flops or 0
    paths = Counter(dict(phase.by_path)) + Counter({operator.path: flops} if flops else {})
    return PhaseCount(
        phase.phase,
        phase.flops + flops,
        phase.bytes + operator.bytes,
        phase.launches + operator.launches,
        phase.unknown + (operator.flops is None),
        tuple(sorted(paths.items())),
        tuple(sorted((Counter(dict(phase.by_dtype)) + Counter(by_dtype)).items())),
    )


def _words(value: Any) -> Iterator[str]:
    for tensor in tensors_in(value):
        yield f"{word_of(tensor.dtype)}[{','.join(map(str, tensor.shape))}]"


def _path(call: Call, argument: str, tf32: bool) -> str:
    """Returns the dtype that a call multiplies in, which is that of the first tensor in the argument of this name."""
    tensor = next(tensors_in(arguments_of(call).get(argument)), None) or next(tensors_in(call.given), None)
    if not isinstance(tensor, TensorSeen):
        return ""
    return TF32 if tf32 and tensor.accelerated and tensor.dtype is torch.float32 else word_of(tensor.dtype)
