"""Where tensors lie."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def addresses_of(tensor: Any) -> Iterator[int]:
    """Where a tensor's memory begins, as an allocator knows it; of a tensor that wraps others, where theirs do."""
    parts = getattr(type(tensor), "__tensor_flatten__", None)
    if parts is not None:
        for name in parts(tensor)[0]:
            yield from addresses_of(getattr(tensor, name))
        return
    try:
        address = int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # sparse, on no device, or of another library: it lies nowhere
        return
    if address:
        yield address
