"""What a step does that a device alone cannot do again: a replay has no host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fp8bench.numerics.operands import OperatorWatch


def needs_host(step: Callable[[], object]) -> str:
    """Why a step cannot be replayed, after one that is looked at operator by operator; '' if nothing was seen."""
    seen = _HostParts()
    with seen:
        step()
    return seen.why


class _HostParts(OperatorWatch):  # type: ignore[no-untyped-call]
    """Watches for numbers that go to the device or come from it: a replay has those of the step it was made of."""

    def __init__(self) -> None:
        super().__init__()
        self.why = ""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.why = self.why or moved(str(func), _tensors((args, kwargs)), _tensors(result))
        return result


def moved(operator: str, given: Iterable[Any], results: Iterable[Any]) -> str:
    """What an operator moved between host and device, if anything. A number that a kernel is called with is none, nor
    is one that it gives beside results on the device: the seed of attention's dropout."""
    places = {one.device.type for one in given if one.dim() or "copy" in operator}
    after = {one.device.type for one in results}
    if "cpu" in places and after - {"cpu"}:
        return f"its step takes data from the host ({operator}), and a replay would take the same again"
    if places - {"cpu"} and (after == {"cpu"} or "_local_scalar_dense" in operator):
        return f"its step waits for a value of the device ({operator})"
    return ""


def _tensors(parts: object) -> list[torch.Tensor]:
    return [one for one in tree_leaves(parts) if isinstance(one, torch.Tensor)]
