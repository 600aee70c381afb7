"""What a call does besides its products, as far as torch sees it: memory that it takes, casts, and copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fp8bench.model.audit import CallWork
from fp8bench.worker.tape_pass import uncompiled

_COPIES = ("clone", "copy_", "_to_copy", "contiguous")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_scaled_mm_v2", "_grouped_mm", "_scaled_grouped_mm")


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocations = self.bytes = self.casts = self.copies = self.products = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = {_storage(one) for one in _tensors((args, kwargs))}
        found = func(*args, **(kwargs or {}))
        for one in _tensors(found):
            if one.numel() and _storage(one) not in before:
                before.add(_storage(one))
                self.allocations, self.bytes = self.allocations + 1, self.bytes + one.untyped_storage().nbytes()
        name = func.overloadpacket.__name__
        self.products += name in _PRODUCTS
        if name in _COPIES:
            source = args[1] if name == "copy_" else args[0]
            target = next(iter(_tensors(found)), None)
            cast = target is not None and isinstance(source, Tensor) and source.dtype != target.dtype
            self.casts, self.copies = self.casts + cast, self.copies + (not cast)
        return found


def work_of(call: Callable[[], object]) -> CallWork:
    """Of one call; what torch compiles does the operators that it was made of."""
    with uncompiled(), _Counting() as counting:
        call()
    return CallWork(counting.allocations, counting.bytes, counting.casts, counting.copies, counting.products)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if type(tensor) in (Tensor, torch.nn.Parameter) else id(tensor)
