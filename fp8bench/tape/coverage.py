"""Which module of a model each product of a step belongs to: those of its weights, and what is left.

Nothing of the model is touched: hooks of the whole process say which module runs, and an operator of backward belongs
to the module that its node of the graph was made in (nodes are numbered as they are made, one thread after another).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fp8bench.errors import UsageError
from fp8bench.model.coverage import Coverage, HeldProduct, Holder, OtherProduct
from fp8bench.nn.conversion.holders import CONV2D, EXPERTS, Held
from fp8bench.nn.conversion.stacked import Stacked
from fp8bench.tape.formulas import flops_of
from fp8bench.tape.product_shapes import products_of
from fp8bench.tape.recorder import Call, OperatorTape, name_of

_number = torch._C._autograd._get_sequence_nr
_node = torch._C._current_autograd_node
_task = torch._C._current_graph_task_id


@dataclass(frozen=True)
class _Place:
    """Where an operator runs: the module of that path, and the weight that it multiplies by, if any."""

    path: str = ""
    held: Held | None = None


_NOWHERE = _Place()


@dataclass
class _Open:
    """A module, or a product with a weight, that is running; `task` is the backward pass that it runs in, if any."""

    place: _Place
    task: int
    listening: ExitStack = field(default_factory=ExitStack)


class _Places(OperatorTape):  # type: ignore[no-untyped-call]
    """A tape that knows where each of its calls ran."""

    def __init__(self, model: nn.Module, held: Sequence[Held]) -> None:
        super().__init__()
        self.places: list[_Place] = []
        # Weights that torch has multiplied by in a way that could not be told.
        self.missed: set[int] = set()
        self.called: Counter[int] = Counter()
        self._running: list[_Open] = []
        # From the number of a node on: the place that it was made in.
        self._from: list[int] = [0]
        self._made_in: list[_Place] = [_NOWHERE]
        self._paths = {module: path for path, module in model.named_modules()}
        self._whole = {one.module: one for one in held if one.kind != EXPERTS and one.parameter == "weight"}
        self._stacks: dict[nn.Module, dict[str, Held]] = defaultdict(dict)
        for one in held:
            if one.kind == EXPERTS:
                self._stacks[one.module][one.parameter] = one

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        place = self._place()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.places += [place] * (len(self.calls) - len(self.places))
        return result

    @contextmanager
    def following(self) -> Iterator[None]:
        """Modules are followed in the body."""
        before = register_module_forward_pre_hook(self._begin)
        after = register_module_forward_hook(self._end, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _place(self) -> _Place:
        """Where the operator that comes runs: in a module's forward pass, or in backward of what one has made."""
        node: Any = _node()
        if self._running and (node is None or self._running[-1].task == _task()):
            return self._running[-1].place
        if node is None:
            return _NOWHERE
        return self._made_in[bisect_right(self._from, node._sequence_nr()) - 1]

    def _begin(self, module: nn.Module, given: Any) -> None:
        path = self._paths.get(module)
        if path is None:
            return
        self._go_in(_Place(path, self._whole.get(module)))
        stacks = self._stacks.get(module)
        if stacks:
            weights = {name: one.weight for name, one in stacks.items()}

            def around(name: str, told: bool, run: Callable[[], Any]) -> Any:
                if not told:
                    self.missed.add(id(stacks[name]))
                    return run()
                self._go_in(_Place(path, stacks[name]))
                try:
                    return run()
                finally:
                    self._go_out()

            self._running[-1].listening.enter_context(Stacked(weights, around=around))

    def _end(self, module: nn.Module, given: Any, result: Any) -> None:
        if module in self._paths:
            self._go_out()

    def _go_in(self, place: _Place) -> None:
        self._mark(place)
        self.called[id(place.held)] += 1
        self._running.append(_Open(place, _task()))

    def _go_out(self) -> None:
        self._running.pop().listening.close()
        self._mark(self._running[-1].place if self._running else _NOWHERE)

    def _mark(self, place: _Place) -> None:
        """Nodes that are made from here on are made there."""
        number = _number()
        while self._from[-1:] >= [number]:  # none was made since
            self._from.pop()
            self._made_in.pop()
        self._from.append(number)
        self._made_in.append(place)


def coverage_of(
    model: nn.Module, held: Sequence[Held], step: Callable[[], object], *, multiple: int = 1, loss: str = ""
) -> Coverage:
    """The products of a step of the model as it came, by the weights that they are made with. Never timed.

    `held` are those of a Conversion that is not entered; `multiple` is what a device's native products want of their
    sides (`Holder.native`). The sums are exact: every call of the step is in one holder or one of the others. Raises
    UsageError for a step without products.
    """
    tape = _Places(model, held)
    with tape.following(), torch.autograd.set_multithreading_enabled(False), tape:
        step()
    found = _Sums()
    for call, place in zip(tape.calls, tape.places, strict=True):
        found.add(call, place)
    if not found.flops and not found.others:
        raise UsageError(f"a step of {type(model).__name__} multiplies no matrices: there is nothing to convert")
    holders = (_holder(one, found, tape, multiple) for one in held)
    others = sorted(found.others.values(), key=lambda other: -(other.flops or 0))
    kept = (one for one in holders if one.rule != _NO_PRODUCT)
    return Coverage(tuple(kept), tuple(others), found.flops, loss)


# A parameter that looks like a stack of weights, in a module that has run without multiplying by it.
_NO_PRODUCT = "no-product"


class _Sums:
    """FLOPs and products of each weight, and of all that is outside."""

    def __init__(self) -> None:
        self.flops = 0
        self.of: Counter[int] = Counter()
        self.products: dict[int, list[HeldProduct]] = defaultdict(list)
        self.others: dict[tuple[str, str, bool], OtherProduct] = {}

    def add(self, call: Call, place: _Place) -> None:
        count, _ = flops_of(call)
        if count == 0:
            return
        self.flops += count or 0
        if place.held is not None and count is not None:
            self.products[id(place.held)] += products_of(call)
            self.of[id(place.held)] += count
            return
        key = name_of(call), place.path, count is None
        before = self.others.get(
            key, OtherProduct(key[0], key[1], None if count is None else 0, 0, _why(key[0], count))
        )
        flops = None if count is None else (before.flops or 0) + count
        self.others[key] = replace(before, flops=flops, calls=before.calls + 1)


def _why(operator: str, count: int | None) -> str:
    if count is None:
        return "nobody has a formula for its FLOPs: they are in no sum"
    if "attention" in operator:
        return "attention: queries, keys and values are multiplied with each other, and no weights"
    return "no layer's: a function multiplies tensors that are no weight of a layer here"


def _holder(held: Held, found: _Sums, tape: _Places, multiple: int) -> Holder:
    rule, reason = held.rule, held.reason
    products, calls = tuple(found.products[id(held)]), tape.called[id(held)]
    if not reason and not calls:
        rule, reason = "not-called", "the step never calls it"
        if id(held) in tape.missed:
            rule, reason = (
                "operator",
                "it is multiplied in a way that is not x times a weight (an einsum, or a sum with it)",
            )
        elif held.kind == EXPERTS:
            rule = _NO_PRODUCT
    return Holder(
        held.name, held.shown_kind, held.shape, products, found.of[id(held)], calls, not reason, reason, rule,
        unfit(held, products, multiple), held.also,
    )  # fmt: skip


def unfit(held: Held, products: Sequence[HeldProduct], multiple: int) -> str:
    """What native products want of a weight's products and do not have; '' if nothing.

    Contractions and columns have to be multiples: of weight gradients the contraction is the rows of the forward pass.
    """
    if held.kind == CONV2D:
        return "torch has no convolution narrower than 16 bits: values are rounded, and convolved in fp32"
    wrong = {size for one in products for size in (one.k, one.n) if size % multiple}
    if not wrong:
        return ""
    names = dict(zip(held.sides, "NK", strict=True))
    sizes = ", ".join(f"{names.get(size, 'M')}={size}" for size in sorted(wrong))
    return f"native products take contractions and columns in multiples of {multiple}: {sizes}"
