"""A model of anybody's, some of whose layers multiply in another arithmetic for a while.

The forward pass of such a layer is replaced on the instance: its class, parameters, hooks and state stay as they are,
and so do tied weights and optimizers that were made before. It is undone by taking that away again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Self

from torch import nn

from fp8bench.errors import UsageError
from fp8bench.nn.conversion.holders import EXPERTS, LINEAR, Held, check_map, held_in, refuse_meta
from fp8bench.nn.conversion.products import Products, forward_of
from fp8bench.nn.conversion.stacked import Stacked
from fp8bench.nn.whole_layers import WholeLayers
from fp8bench.protocols import Arithmetic, Layer, Phases, SilentPhases

# The arithmetic of a layer, or None to leave it as it is.
Choose = Callable[[Layer], Arithmetic | None]


class Conversion:
    """Layers of a model in the arithmetics that `choose` gives them, while it is entered.

        with Conversion(model, setup.layer, skip=["head"]) as conversion:
            conversion.phase = phase
            loss = model(**batch).loss

    `held` are all the weights that products are made with, those that stay as they are with the reason. `multiples` are
    what native products of a device want of contractions and columns: a layer whose sides do not fit stays as it is,
    and rows are filled up. `keys` are those of the precision map that `choose` obeys: a layer of two paths is asked for
    by the one that the map names. Raises UsageError if nothing would be converted, UnknownName for a pattern or a key
    that names no layer; the model is untouched until it is entered.
    Whoever copies a model copies it before: what was replaced belongs to this one.
    """

    def __init__(
        self,
        model: nn.Module,
        choose: Choose,
        *,
        skip: Sequence[str] = (),
        allow: Sequence[str] = (),
        keys: Collection[str] = (),
        multiples: tuple[int, int] = (1, 1),
    ) -> None:
        refuse_meta(model)
        self.phase: Phases = SilentPhases()
        self._rows = multiples[0]
        self._replaced: list[nn.Module] = []
        found = held_in(model, skip, allow)
        check_map(keys, found)
        chosen = [(one, None if one.reason else choose(one.layer(keys))) for one in found]
        self.held = tuple(_decided(one, arithmetic, multiples) for one, arithmetic in chosen)
        self._arithmetics = {
            id(held): arithmetic
            for held, (_, arithmetic) in zip(self.held, chosen, strict=True)
            if arithmetic is not None and not held.reason
        }
        if not self._arithmetics:
            raise UsageError(f"nothing of {type(model).__name__} can be converted ({_reasons(self.held)})")

    @property
    def converted(self) -> tuple[Held, ...]:
        return tuple(one for one in self.held if not one.reason)

    def __enter__(self) -> Self:
        try:
            stacks: dict[nn.Module, list[Held]] = {}
            for one in self.converted:
                if one.kind == EXPERTS:
                    stacks.setdefault(one.module, []).append(one)
                else:
                    self._replace(one.module, forward_of(one.module, one.kind, self._products(one)))
            for module, parameters in stacks.items():
                self._replace(module, self._listening(module, parameters))
        except BaseException:
            self.undo()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def undo(self) -> None:
        """The model is as it was; nothing to do where it is already."""
        while self._replaced:
            vars(self._replaced[-1]).pop("forward", None)
            self._replaced.pop()

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._replaced.append(module)  # first: whatever comes in between is undone
        vars(module)["forward"] = forward

    def _products(self, held: Held) -> Products:
        return Products(self._arithmetics[id(held)], lambda: self.phase, self._rows)

    def _listening(self, module: nn.Module, parameters: Sequence[Held]) -> Callable[..., Any]:
        products = {one.parameter: self._products(one) for one in parameters}
        own = module.forward

        def forward(*arguments: Any, **options: Any) -> Any:
            with Stacked({name: getattr(module, name) for name in products}, products):
                return own(*arguments, **options)

        return forward


def _decided(held: Held, arithmetic: Arithmetic | None, multiples: tuple[int, int]) -> Held:
    """The same with the reason why it stays as it is, if it does."""
    if held.reason:
        return held
    if arithmetic is None:
        return replace(held, rule="kept", reason="kept as it is by the precision map")
    if isinstance(arithmetic, WholeLayers) and held.kind != LINEAR:
        return replace(held, rule="backend", reason=f"the backend has whole linear layers, and none for {held.kind}")
    wrong = misfit(held, multiples)
    return replace(held, rule="shape", reason=wrong) if wrong else held


def misfit(held: Held, multiples: tuple[int, int]) -> str:
    """Why a layer's sides are none that native products take; '' if they are. Rows can be filled up."""
    least = max(multiples)  # each side is a contraction in one of its products, and columns in another
    outputs, inputs = held.sides
    wrong = [f"{name}={size}" for name, size in (("N", outputs), ("K", inputs)) if size % least]
    return f"{' and '.join(wrong)} {_is_no(wrong)} of {least}, as native products want" if wrong else ""


def _is_no(wrong: Sequence[str]) -> str:
    return "is no multiple" if len(wrong) == 1 else "are no multiples"


def _reasons(held: Sequence[Held]) -> str:
    counts = Counter(one.reason for one in held)
    words = [f"{count} weight{'s' if count > 1 else ''}: {why}" for why, count in counts.most_common(3)]
    return "; ".join(words) or "it has no layer that multiplies by weights"
