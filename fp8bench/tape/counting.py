"""Counts the FLOPs, bytes and kernel launches of a step's operator calls, by phase and by dtype.

A call's bytes are the bytes of each tensor that it reads or writes, counted once. Broadcast elements are stored once,
so they count once. A view moves no bytes.
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
from fp8bench.tape.formulas import count_flops
from fp8bench.tape.recorder import (
    Call,
    RecordedTensor,
    bind_arguments,
    get_operator_name,
    iterate_tensors,
    list_written_arguments,
)

# Operators that return memory and write nothing to it.
ALLOCATION_OPERATORS = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_", "set_"}
)
# Operators that overwrite their first tensor without reading it.
_OVERWRITING_OPERATORS = frozenset(
    [
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
    ]
)
# Operators that read only properties of their tensors, such as the shape, and no element.
_METADATA_OPERATORS = frozenset(
    {"is_same_size", "is_pinned", "record_stream", "_fused_sdp_choice", "_has_same_storage_numel"}
)
# Operators that add their first argument to a product. They do not read that argument if `beta` is 0.
_PRODUCTS_WITH_BETA = frozenset({"addmm", "_addmm_activation", "addbmm", "baddbmm", "addmv", "addr"})
# Maps operators that read only a part of one argument to that argument's name. They read as many elements as the result
# has.
_PARTLY_READ_ARGUMENTS = {
    "embedding": "weight",
    "index": "self",
    "index_select": "self",
    "gather": "self",
    "take": "self",
    "_unsafe_index": "self",
    "masked_select": "self",
}
_EMBEDDING_BAG_OPERATORS = frozenset({"_embedding_bag", "_embedding_bag_forward_only"})
# Maps operators that write only a part of a tensor to the argument that has as many elements as this part.
_WRITTEN_PART_ARGUMENTS = {
    "index_put_": "values",
    "_index_put_impl_": "values",
    "index_add_": "source",
    "index_copy_": "source",
    "scatter_": "index",
    "scatter_add_": "index",
    "masked_scatter_": "source",
    "index_fill_": "index",
}


def count_elements(tensor: RecordedTensor) -> int:
    """Counts how many different elements of memory a tensor has. Broadcast elements and overlapping windows count
    once.
    """
    if 0 in tensor.shape:
        return 0
    if tensor.stride is None:
        return math.prod(tensor.shape)
    sizes_and_strides = [
        (size, abs(stride)) for size, stride in zip(tensor.shape, tensor.stride, strict=True) if stride and size > 1
    ]
    # Overlapping windows share elements, so the distance from the first to the last element limits the count.
    return min(
        math.prod(size for size, _ in sizes_and_strides),
        1 + sum((size - 1) * stride for size, stride in sizes_and_strides),
    )


def count_tensor_bytes(tensor: RecordedTensor) -> int:
    return count_elements(tensor) * tensor.dtype.itemsize


def _count_tensor_elements(value: Any) -> int:
    return sum(math.prod(tensor.shape) for tensor in iterate_tensors(value))


def _find_partly_used_argument(
    name: str, arguments: Mapping[str, Any], results: list[RecordedTensor]
) -> tuple[str, int]:
    """Returns the argument of which a call reads or writes only a part, and the number of elements in that part. The
    name is '' if the call reads and writes all arguments completely.
    """
    if name in _EMBEDDING_BAG_OPERATORS:
        return "weight", _count_tensor_elements(arguments["indices"]) * int(arguments["weight"].shape[-1])
    if name in _PARTLY_READ_ARGUMENTS and results:
        return _PARTLY_READ_ARGUMENTS[name], _count_tensor_elements(results[0])
    if name not in _WRITTEN_PART_ARGUMENTS:
        return "", 0
    count = _count_tensor_elements(arguments.get(_WRITTEN_PART_ARGUMENTS[name]))
    shape = arguments["self"].shape
    if name == "index_fill_":
        count *= math.prod(shape) // max(1, shape[arguments["dim"]])
    # The values may be broadcast to the shape of the indices, so count the elements of that shape.
    if "indices" in arguments:
        indices = [*arguments["indices"], *(None for _ in shape[len(arguments["indices"]) :])]
        index_tensors = [index for index in indices if index is not None]
        # The contents of a mask are not recorded, so the number of values shows how many elements it selects. A single
        # value shows nothing, because it may be broadcast to any number of elements.
        if any(index.dtype is torch.bool for index in index_tensors):
            return ("self", count) if count > 1 else ("", 0)
        elements_per_index = math.prod(size for size, index in zip(shape, indices, strict=True) if index is None)
        index_shape = torch.broadcast_shapes(*(index.shape for index in index_tensors))  # type: ignore[no-untyped-call]
        count = elements_per_index * math.prod(index_shape)
    return "self", count


class CallTraffic:
    """The tensors that one operator call reads and writes, with the bytes of each. A call that only returns a view
    reads and writes nothing.
    """

    def __init__(self, call: Call) -> None:
        self._name = get_operator_name(call)
        self.only_allocates = self._name in ALLOCATION_OPERATORS
        self.read: list[RecordedTensor] = []
        self.written: list[RecordedTensor] = []
        self._partial_bytes: dict[int, int] = {}
        arguments = bind_arguments(call)
        # Maps the name of each written argument to whether it is an `out=` argument, which only receives the result.
        is_out_by_name = {argument.name: argument.kwarg_only for _, argument in list_written_arguments(call.operator)}
        # Operators that add to a part of a tensor read this part too.
        accumulate_option = arguments.get("accumulate")
        overwrites_tensor = (
            self._name.startswith("fp8bench::")
            or self._name in _OVERWRITING_OPERATORS
            or (self._name in _WRITTEN_PART_ARGUMENTS and "add" not in self._name and not accumulate_option)
        )
        unread_argument_name = (
            "self" if self._name.removesuffix("_") in _PRODUCTS_WITH_BETA and arguments.get("beta") == 0 else ""
        )
        self.overwritten_unread = list(iterate_tensors(arguments.get(unread_argument_name)))
        # 1. The operator's schema, with exceptions for some operators, determines which arguments are read and written.
        for name, value in arguments.items():
            tensors = list(iterate_tensors(value))
            is_out_argument = is_out_by_name.get(name)
            if name != unread_argument_name and (is_out_argument is None or not (overwrites_tensor or is_out_argument)):
                self.read += tensors
            # Fused optimizers write gradients only to unscale them.
            if is_out_argument is not None and not (name == "grads" and arguments.get("grad_scale") is None):
                self.written += tensors
        # 2. A result is written if it has its own memory. A view of an argument is not written.
        storages = {tensor.storage for tensor in (*self.read, *self.written)}
        results = list(iterate_tensors(call.result))
        self.new_tensors = [result for result in results if result.storage not in storages]
        is_view = bool(results) and not self.new_tensors and not self.written
        if is_view or self.only_allocates or self._name in _METADATA_OPERATORS:
            self.read = []
            self.written = []
            return
        self.written += self.new_tensors
        # 3. Some operators read or write only a part of an argument.
        argument, count = _find_partly_used_argument(self._name, arguments, self.new_tensors)
        for tensor in iterate_tensors(arguments.get(argument)):
            self._partial_bytes[id(tensor)] = count * tensor.dtype.itemsize

    @property
    def moves_data(self) -> bool:
        return bool(self.read or self.written)

    def count_bytes_by_dtype(self) -> dict[Any, int]:
        """Returns the bytes moved for each dtype. A tensor counts twice if it is read and written."""
        sizes: dict[Any, int] = {}
        for tensors in (self.read, self.written):
            # A tensor that occurs twice in a call, as in x * x, moves its bytes once.
            distinct_tensors = {(tensor.storage, tensor.offset, count_elements(tensor)): tensor for tensor in tensors}
            for tensor in distinct_tensors.values():
                size = min(count_tensor_bytes(tensor), self._partial_bytes.get(id(tensor), count_tensor_bytes(tensor)))
                sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + size
        return sizes


_DTYPE_NAMES = {
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


def get_dtype_name(dtype: Any) -> str:
    """Returns the short name that tables show for a torch dtype: 'bf16', 'e4m3', 'int64'."""
    name = str(dtype).removeprefix("torch.")
    return _DTYPE_NAMES.get(name, name)


def count_operator_calls(calls: Iterable[Call], tf32: bool = False) -> Tape:
    """Returns the operators of a step with their counts, and the sums of each phase (the step's tape). With `tf32`,
    float32 products on a GPU count as TF32.
    """
    calls_by_operator: Counter[OperatorCount] = Counter()
    sums: dict[str, PhaseCount] = {}
    unwritten_memory_tracker = _UnwrittenMemoryTracker()
    for call in calls:
        # Skip calls on meta tensors, with which torch only computes shapes.
        if not all(tensor.is_real for tensor in iterate_tensors(call.result)):
            continue
        call_traffic = CallTraffic(call)
        unwritten_memory_tracker.track_call(call_traffic)
        bytes_by_dtype = {
            get_dtype_name(dtype): size for dtype, size in call_traffic.count_bytes_by_dtype().items() if size
        }
        flops, argument = count_flops(call)
        if flops == 0 and not call_traffic.moves_data:
            continue  # the call only returned a view or new memory
        operator = OperatorCount(
            call.phase,
            get_operator_name(call),
            call.backward,
            tuple(_describe_tensors((call.positional, tuple(call.named.values())))),
            tuple(_describe_tensors(call.result)),
            1,
            flops,
            sum(bytes_by_dtype.values()),
            _find_product_dtype(call, argument, tf32) if flops else "",
            int(call_traffic.moves_data),
        )
        # Count equal calls together. An OperatorCount has no bytes by dtype, so sum those of each phase here.
        calls_by_operator[operator] += 1
        sums[call.phase] = _add_to_phase_count(sums.get(call.phase, PhaseCount(call.phase)), operator, bytes_by_dtype)
    operators = tuple(replace(operator_count, calls=count) for operator_count, count in calls_by_operator.items())
    return Tape(
        operators,
        tuple(sums[phase] for phase in CELL_PHASES if phase in sums),
        unwritten_memory_tracker.count_unwritten_storages,
    )


class _UnwrittenMemoryTracker:
    def __init__(self) -> None:
        self._unwritten_storages: set[int] = set()
        self._read_unwritten_count = 0

    @property
    def count_unwritten_storages(self) -> int:
        return self._read_unwritten_count + len(self._unwritten_storages)

    def track_call(self, traffic: CallTraffic) -> None:
        new_storages = {tensor.storage for tensor in traffic.new_tensors if 0 not in tensor.shape}
        if traffic.only_allocates:
            self._unwritten_storages |= new_storages
            return
        written_storages = {tensor.storage for tensor in (*traffic.written, *traffic.overwritten_unread)}
        read_storages = ({tensor.storage for tensor in traffic.read} - written_storages) & self._unwritten_storages
        self._read_unwritten_count += len(read_storages)
        self._unwritten_storages -= read_storages | new_storages | written_storages


def _add_to_phase_count(phase: PhaseCount, operator: OperatorCount, by_dtype: dict[str, int]) -> PhaseCount:
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


def _describe_tensors(value: Any) -> Iterator[str]:
    for tensor in iterate_tensors(value):
        yield f"{get_dtype_name(tensor.dtype)}[{','.join(map(str, tensor.shape))}]"


def _find_product_dtype(call: Call, argument: str, tf32: bool) -> str:
    """Returns the name of the dtype that a call multiplies in. It is the dtype of the first tensor in the named
    argument.
    """
    product_operand = next(iterate_tensors(bind_arguments(call).get(argument)), None) or next(
        iterate_tensors(call.positional), None
    )
    if not isinstance(product_operand, RecordedTensor):
        return ""
    return (
        TF32
        if tf32 and product_operand.accelerated and product_operand.dtype is torch.float32
        else get_dtype_name(product_operand.dtype)
    )
