"""Counts what a step sends, at the level of torch's operators, by operation and dtype, and sends it again by itself."""

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

# For n ranks, what a rank sends in a ring as a multiple of the bytes that it brings to an operation.
_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: float(n - 1),
    "send": lambda n: 1.0,
    **dict.fromkeys(("reduce_scatter", "all_to_all", "broadcast", "reduce"), lambda n: (n - 1) / n),
}
# The kind of operation, and the place of its argument that holds what this rank brings.
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
_RECEIVES = "c10d::recv_"
_FROM_TO = {"c10d::send", _RECEIVES}
_SENDS_NOTHING = {
    "c10d::barrier",
    "_c10d_functional::wait_tensor",
    "_c10d_functional::_wrap_tensor_autograd",
}


class NotCounted(RuntimeError):
    """An operation between ranks whose bytes are not defined here."""


class StepWire(OperatorWatch):  # type: ignore[no-untyped-call]
    """Watches every operation between ranks in its body: torch's own (c10d), and those of DTensor.

    It counts what a ring would send, which a backend need not use.
    """

    def __init__(self, rank: int = 0, repeatable: bool = True) -> None:
        """If `repeatable` the operations can be sent again, which keeps tensors as large as theirs."""
        super().__init__()
        self._rank = rank
        self._keeps = repeatable
        self._calls: Counter[tuple[str, str]] = Counter()
        self._bytes: dict[tuple[str, str], float] = defaultdict(float)
        self._again: list[tuple[Any, Any]] = []

    def see(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        # Operations of a DTensor contain these.
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.name().partition(".")[0]
            self._count(name, args)
            if self._keeps and name not in _SENDS_NOTHING:
                self._again.append((func, tree_map_only(Tensor, torch.zeros_like, args)))
        return func(*args, **named)

    def list_sent(self, rank: int) -> tuple[Sent, ...]:
        most_first = sorted(self._bytes, key=lambda key: (-self._bytes[key], key))
        return tuple(Sent(rank, *key, self._calls[key], self._bytes[key]) for key in most_first)

    def send_again(self) -> None:
        """The same operations on zeros, each waited for; sends and receives are waited for together at the end."""
        open_works = []
        for func, args in self._again:
            leaves = tree_leaves(func(*args))
            works: list[Any] = [leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject)]
            works = works or [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            if func.name().partition(".")[0] in _FROM_TO:
                open_works += works
            else:
                _wait(works)
        _wait(open_works)

    def _count(self, name: str, args: Sequence[Any]) -> None:
        if name in _SENDS_NOTHING or name == _RECEIVES:
            return
        if name not in _OPERATIONS:
            raise NotCounted(f"the bytes of {name} are not counted: give it a line in nn/parallel/wire.py")
        operation, place = _OPERATIONS[name]
        share = _FACTORS[operation](_size(args))
        if name == "c10d::alltoall_base_" and args[4]:  # rows to the rank itself are not sent
            share = 1 - args[4][self._rank] / max(1, sum(args[4]))
        for tensor in tree_leaves(args[place]):
            key = operation, str(tensor.dtype).removeprefix("torch.")
            self._calls[key] += 1
            self._bytes[key] += tensor.numel() * tensor.element_size() * share


def _size(args: Sequence[Any]) -> int:
    boxed = [arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())]
    if boxed:
        return int(dist.ProcessGroup.unbox(boxed[0]).size())
    return int(_resolve_process_group(args[-1]).size())


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        if isinstance(work, Tensor):
            torch.ops._c10d_functional.wait_tensor(work)
        else:
            dist.Work.unbox(work).wait()
