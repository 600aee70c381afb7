"""Products with parameters of three dimensions, a matrix for each expert, wherever a module's forward pass makes them.

Nobody can know how a module deals tokens out to its experts, so it does that as ever: torch's functions are listened to
while it runs. What is taken out of such a parameter (a slice, a choice of its matrices, a cast of it) is known by the
call that made it, and a product with it is made by whoever listens. That works for one matrix at a
time, for products of many matrices, and for grouped ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Told that torch multiplies by the parameter of that name, whether that could be told as x times a weight, and what
# computes it.
Around = Callable[[str, bool, Callable[[], Any]], Any]

_LINEAR = {F.linear}
_PRODUCTS = {
    torch.mm, torch.bmm, torch.matmul, Tensor.mm, Tensor.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__,
}  # fmt: skip
_GROUPED = {getattr(owner, name) for owner, name in ((F, "grouped_mm"), (torch, "_grouped_mm")) if hasattr(owner, name)}
# Their arguments, which some give by name.
_NAMES = {F.linear: ("input", "weight", "bias"), **dict.fromkeys(_GROUPED, ("mat_a", "mat_b", "offs"))}
# Products that are not told as x times a weight.
_SUMS = {torch.addmm, torch.baddbmm, Tensor.addmm, Tensor.baddbmm, torch.einsum, F.bilinear}
KNOWN = _LINEAR | _PRODUCTS | _GROUPED


class Multiplier(Protocol):
    """What makes the products with a parameter."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x (..., K) times weight (N, K) transposed."""

    def grouped(self, x: Tensor, weights: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        """x (M, K), its first sizes[0] rows times the first of the weights (N, K) transposed, and so on."""


class Stacked(TorchFunctionMode):
    """Listens while a module's forward pass runs. `products` make those with its parameters, by their names, wherever
    they can be told as x times a weight; without them torch does, and `around` is told of each."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        products: Mapping[str, Multiplier] | None = None,
        around: Around | None = None,
    ) -> None:
        super().__init__()
        self._products = products
        self._around = around
        # With what was computed of one alone. Compared one by one: torch.compile follows that, and no hash of a tensor.
        self._known = list(parameters.items())

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, named = _by_place(func, args, kwargs or {})
        place = next((place for place, one in enumerate(args) if self._name(one)), None)
        if place is None:
            return func(*args, **named)
        name = self._name(args[place])
        if func in KNOWN or func in _SUMS:
            told = _may_be_told(func, args, named, place)
            if told and self._products is not None:
                return _product(func, args, place, self._products[name])
            run = partial(func, *args, **named)
            return run() if self._around is None else self._around(name, told, run)
        result = func(*args, **named)
        self._note(name, place, args, result)
        return result

    def _name(self, value: Any) -> str:
        """The parameter that a tensor is, or was computed of alone; '' of others."""
        return next((name for name, one in self._known if one is value), "") if isinstance(value, Tensor) else ""

    def _note(self, name: str, place: int, args: tuple[Any, ...], result: Any) -> None:
        others = any(isinstance(one, Tensor) and one.is_floating_point() for at, one in enumerate(args) if at != place)
        if others:
            return
        for one in result if isinstance(result, list | tuple) else (result,):
            if isinstance(one, Tensor) and one.dim() > 1 and one.is_floating_point() and not self._name(one):
                self._known.append((name, one))


def _by_place(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by their places, as far as names are those that follow."""
    rest, names = dict(named), _NAMES.get(func, ())
    while len(args) < len(names) and names[len(args)] in rest:
        args = (*args, rest.pop(names[len(args)]))
    return args, rest


def _may_be_told(func: Any, args: tuple[Any, ...], named: Mapping[str, Any], place: int) -> bool:
    """Whether it is x times a weight, which is the argument in that place."""
    if (
        func in _SUMS
        or any(one is not None for one in named.values())
        or not all(isinstance(one, Tensor) for one in args[:2])
    ):
        return False
    weight, other = args[place], args[1 - place]
    if func in _LINEAR:
        return place == 1 and weight.dim() == 2
    if func in _GROUPED:
        return place == 1 and len(args) == 3 and (other.dim(), weight.dim()) == (2, 3) and isinstance(args[2], Tensor)
    each = weight.dim() == 3 and (other.dim() == 2 or (other.dim() == 3 and len(other) == len(weight)))
    right = place == (0 if func is Tensor.__rmatmul__ else 1)
    return each or (weight.dim() == 2 and (right or other.dim() > 1))


def _product(func: Any, args: tuple[Any, ...], place: int, by: Multiplier) -> Tensor:
    """The same by products of x and a weight."""
    if func in _LINEAR:
        y = by.linear(args[0], args[1])
        return y if len(args) < 3 or args[2] is None else y + args[2].to(y.dtype)
    if func in _GROUPED:
        return _grouped(args[0], args[1], args[2].tolist(), by)
    left, right = (args[1], args[0]) if func is Tensor.__rmatmul__ else args
    if right is args[place]:
        return _right(left, right, by)
    return _right(right.mT, left.mT, by).mT


def _right(x: Tensor, weight: Tensor, by: Multiplier) -> Tensor:
    """x (..., M, K) times weight (K, N); or (E, K, N), where x is (E, M, K), or (M, K) for all."""
    if weight.dim() == 2:
        return by.linear(x, weight.mT)
    every = x.expand(len(weight), *x.shape[-2:])
    y = by.grouped(every.flatten(0, 1), weight.mT.unbind(), [every.shape[1]] * len(weight))
    return y.view(*every.shape[:2], -1)


def _grouped(x: Tensor, weight: Tensor, ends: list[int], by: Multiplier) -> Tensor:
    """Rows of x (M, K), up to each of `ends`, times a weight of their own of (E, K, N). The host waits for the ends."""
    sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    y = by.grouped(x[: sum(sizes)], weight.mT.unbind(), sizes)
    # Rows behind the last group belong to nobody.
    return F.pad(y, (0, 0, 0, len(x) - len(y)))
