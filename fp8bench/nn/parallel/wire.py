"""Counts the bytes that a step sends between ranks, by operation (such as all_reduce) and dtype. The operations of a
step can also be repeated alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.utils._pytree import tree_leaves, tree_map_only

from fp8bench.model.ranks import Sent
from fp8bench.numerics.operands import OperatorWatch

# Maps an operation to a function of the number n of ranks. It returns the bytes that a rank sends if the ranks form a
# ring, divided by the bytes of the rank's input.
_RING_BYTE_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: float(n - 1),
    "send": lambda n: 1.0,
    **dict.fromkeys(("reduce_scatter", "all_to_all", "broadcast", "reduce"), lambda n: (n - 1) / n),
}
# For each of torch's operators: the operation, and the position of the argument that holds this rank's input.
_OPERATIONS = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::allreduce_coalesced_": ("all_reduce", 0),
    "c10d::allgather_": ("all_gather", 1),
    "c10d::_allgather_base_": ("all_gather", 1),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 1),
    "c10d::reduce_scatter_": ("reduce_scatter", 1),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d::alltoall_": ("all_to_all", 1),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::reduce_": ("reduce", 0),
    "c10d::send": ("send", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", 0),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", 0),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
}
_RECEIVE_PREFIX = "c10d::recv_"
_POINT_TO_POINT_OPERATIONS = {"c10d::send", _RECEIVE_PREFIX}
_OPERATIONS_WITHOUT_DATA = {
    "c10d::barrier",
    "_c10d_functional::wait_tensor",
    "_c10d_functional::_wrap_tensor_autograd",
}


class UncountedOperation(RuntimeError):
    """Raised for an operation between ranks if this module does not define how many bytes it sends."""


class StepTrafficWatch(OperatorWatch):  # type: ignore[no-untyped-call]
    """Watches every operation between ranks in a `with` block, those of torch's c10d and those of DTensor.

    It counts the bytes that ranks in a ring would send. A backend may use another algorithm.
    """

    def __init__(self, rank: int = 0, repeatable: bool = True) -> None:
        """With `repeatable`, also records the operations between ranks for `repeat_exchanges`, with zeros instead of
        data.
        """
        super().__init__()
        self._rank = rank
        self._is_repeatable = repeatable
        self._calls: Counter[tuple[str, str]] = Counter()
        self._bytes: dict[tuple[str, str], float] = defaultdict(float)
        self._recorded_calls: list[tuple[Any, Any]] = []

    def watch_operator(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        # The operations of DTensor call operators of these namespaces too.
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.name().partition(".")[0]
            self._count_sent_bytes(name, args)
            if self._is_repeatable and name not in _OPERATIONS_WITHOUT_DATA:
                self._recorded_calls.append((func, tree_map_only(Tensor, torch.zeros_like, args)))
        return func(*args, **named)

    def list_sent_bytes(self, rank: int) -> tuple[Sent, ...]:
        keys_sorted_by_bytes = sorted(self._bytes, key=lambda key: (-self._bytes[key], key))
        return tuple(Sent(rank, *key, self._calls[key], self._bytes[key]) for key in keys_sorted_by_bytes)

    def repeat_exchanges(self) -> None:
        """Repeats the recorded operations on zeros. It waits for each operation before the next one, but for all sends
        and receives together at the end.
        """
        pending_transfers = []
        for func, args in self._recorded_calls:
            result_leaves = tree_leaves(func(*args))
            # c10d returns handles. Functional operations return tensors, for which `wait_tensor` waits.
            operations: list[Any] = [leaf for leaf in result_leaves if isinstance(leaf, torch.ScriptObject)]
            operations = operations or [leaf for leaf in result_leaves if isinstance(leaf, Tensor)]
            if func.name().partition(".")[0] in _POINT_TO_POINT_OPERATIONS:
                # Waiting for a send here could deadlock, because the other rank may receive it later.
                pending_transfers += operations
            else:
                _wait_for_operations(operations)
        _wait_for_operations(pending_transfers)

    def _count_sent_bytes(self, name: str, args: Sequence[Any]) -> None:
        # The sender counts the bytes of a transfer.
        if name in _OPERATIONS_WITHOUT_DATA or name == _RECEIVE_PREFIX:
            return
        if name not in _OPERATIONS:
            raise UncountedOperation(
                f"the bytes of {name} cannot be counted: add it to _OPERATIONS in nn/parallel/wire.py"
            )
        operation, position = _OPERATIONS[name]
        sent_byte_ratio = _RING_BYTE_FACTORS[operation](_count_ranks(args))
        if name == "c10d::alltoall_base_" and args[4]:  # rows that a rank keeps are not sent
            # A step without rows must not cause a division by 0.
            sent_byte_ratio = 1 - args[4][self._rank] / max(1, sum(args[4]))
        for tensor in tree_leaves(args[position]):
            key = operation, str(tensor.dtype).removeprefix("torch.")
            self._calls[key] += 1
            self._bytes[key] += tensor.numel() * tensor.element_size() * sent_byte_ratio


def _count_ranks(args: Sequence[Any]) -> int:
    # c10d operators get the group as an object. Functional operators get its name as their last argument.
    process_groups = [arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())]
    if process_groups:
        return int(dist.ProcessGroup.unbox(process_groups[0]).size())
    return int(_resolve_process_group(args[-1]).size())


def _wait_for_operations(operations: Sequence[Any]) -> None:
    for pending_operation in operations:
        if isinstance(pending_operation, Tensor):
            torch.ops._c10d_functional.wait_tensor(pending_operation)
        else:
            dist.Work.unbox(pending_operation).wait()
