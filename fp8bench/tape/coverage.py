"""Assigns each product of a step to the weight of a module, or to the products without a weight.

The model is not changed. Global hooks record which module runs, and an operator of backward belongs to the module that
made its node of the graph (each thread numbers the nodes that it makes). The sides of products come from the same
arguments as FLOPs.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from fp8bench import units
from fp8bench.errors import UsageError
from fp8bench.model.step import Coverage, HeldProduct, Holder, OtherProduct
from fp8bench.nn.holders import CONV2D, EXPERTS, ProductWeight, Stacked
from fp8bench.tape.formulas import Named, Product, convolution_backward_shapes, convolution_shapes, flops_of
from fp8bench.tape.recorder import Call, OperatorTape, arguments_of, name_of, tensors_in
from fp8bench.tape.timed_calls import RunningModules

# Steps whose FLOPs differ by less are the same: the distribution of tokens over experts changes with the weights.
_SAME_FLOPS = 0.05
_MOST_NAMED = 3
_MADE = (
    "made in the first step, after copies were converted and optimizers begun: {}; let make() call the model once, so "
    "that they are there"
)


def _matrices(first: str, second: str) -> Callable[[Named], list[Product]]:
    def product(named: Named) -> list[Product]:
        *times, m, k = named[first].shape
        return [(m, named[second].shape[-1], k, math.prod(times))]

    return product


def _grouped_shapes(named: Named) -> list[Product]:
    first = named["self"]
    second = named["mat2"]
    return [(first.shape[-2], second.shape[-1], first.shape[-1], 1)]


# Functions that return the products of an operator, by its name.
SHAPES: dict[str, Callable[[Named], list[Product]]] = {
    **dict.fromkeys(("mm", "bmm", "_int_mm", "_scaled_mm", "_scaled_mm_v2"), _matrices("self", "mat2")),
    **dict.fromkeys(("addmm", "_addmm_activation"), _matrices("mat1", "mat2")),
    **dict.fromkeys(("baddbmm",), _matrices("batch1", "batch2")),
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"), _grouped_shapes),
    **dict.fromkeys(("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"), convolution_shapes),
    "convolution_backward": convolution_backward_shapes,
}  # fmt: skip


def products_of(call: Call) -> list[HeldProduct]:
    """Returns a call's products; none for operators that make none, or make them within something larger (attention, an
    LSTM)."""
    shapes = SHAPES.get(name_of(call))
    if shapes is None:
        return []
    named = {**arguments_of(call), "": next(tensors_in(call.result), None)}
    return [HeldProduct(m, n, k, times, call.backward) for m, n, k, times in shapes(named)]


@dataclass(frozen=True)
class _Place:
    """The path of the module that an operator runs in, and the weight that it multiplies by, if any."""

    path: str = ""
    held: ProductWeight | None = None


_NOWHERE = _Place()


class _HeldModules(RunningModules[_Place]):
    def __init__(self, model: nn.Module, held: Sequence[ProductWeight]) -> None:
        by_module = {
            weight.module: weight for weight in held if weight.kind != EXPERTS and weight.parameter == "weight"
        }
        places = {module: _Place(path, by_module.get(module)) for path, module in model.named_modules()}
        super().__init__(places.get, _NOWHERE)
        # Ids of weights that torch has multiplied by in an unknown way.
        self.missed: set[int] = set()
        self.called: Counter[int] = Counter()
        self._stacks: dict[nn.Module, dict[str, ProductWeight]] = defaultdict(dict)
        for weight in held:
            if weight.kind == EXPERTS:
                self._stacks[weight.module][weight.parameter] = weight
        self._listening: list[ExitStack] = []

    def go_in(self, label: _Place) -> None:
        self.called[id(label.held)] += 1
        super().go_in(label)

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        # No single module has a stacked weight, so its products are recognised instead.
        super()._enter(module, inputs)
        if (stacks := self._stacks.get(module)) is None:
            return
        path = self._running[-1].label.path

        def around(name: str, is_product: bool, run: Callable[[], Any]) -> Any:
            if not is_product:
                self.missed.add(id(stacks[name]))
                return run()
            self.go_in(_Place(path, stacks[name]))
            try:
                return run()
            finally:
                self.go_out()

        self._listening.append(ExitStack())
        weights = {name: stack.weight for name, stack in stacks.items()}
        self._listening[-1].enter_context(Stacked(weights, around=around))

    def _leave(self, module: nn.Module, inputs: Any, result: Any) -> None:
        if module in self._stacks:
            self._listening.pop().close()
        super()._leave(module, inputs, result)


class _PlacedTape(OperatorTape):  # type: ignore[no-untyped-call]
    def __init__(self, model: nn.Module, held: Sequence[ProductWeight]) -> None:
        super().__init__()
        self.modules = _HeldModules(model, held)
        self.places: list[_Place] = []
        # The node of the graph that each call of backward belongs to; None in forward.
        self.nodes: list[int | None] = []

    def run_call(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        place, node, _ = self.modules.now()
        self.places.append(place)
        self.nodes.append(None if node is None else node._sequence_nr())
        return super().run_call(func, args, named)


def coverage_of(
    model: nn.Module, held: Sequence[ProductWeight], step: Callable[[], object], *, multiple: int = 1, loss: str = ""
) -> Coverage:
    """Returns the products of a step of the unchanged model, by the weights that they are made with.

    `held` are the weights of a Conversion that is not entered; `multiple` is required of the sides of native products
    of the device (`Holder.native`). The sums are exact: every call of the step belongs to one holder or to one of the
    others. A second step shows whether steps are alike. The steps are not timed. Raises UsageError for a step without
    products.
    """
    parameters = dict(model.named_parameters())
    # Two steps: a product that only one of them has would make the shares depend on luck.
    tape = _record_step(model, held, step)
    second = _record_step(model, held, step)
    sums = _CoveredSums(model, tape)
    for call, place, node in zip(tape.calls, tape.places, tape.nodes, strict=True):
        sums.add(call, place, node)
    if not sums.flops and not sums.others:
        raise UsageError(f"a step of {type(model).__name__} multiplies no matrices: there is nothing to convert")
    # Weights first, then products of two activations, the largest first.
    holders = (_holder(weight, sums, tape, multiple) for weight in held)
    without_weights = sorted(sums.others.values(), key=lambda product: -(product.flops or 0))
    multiplying = (holder for holder in holders if holder.rule != _NO_PRODUCT)
    new_names = [name for name, _ in model.named_parameters() if name not in parameters]
    remarks = [_MADE.format(_some(new_names))] if new_names else _compare_steps(tape, second)
    return Coverage(tuple(multiplying), tuple(without_weights), sums.flops, loss, tuple(remarks))


def _record_step(model: nn.Module, held: Sequence[ProductWeight], step: Callable[[], object]) -> _PlacedTape:
    tape = _PlacedTape(model, held)
    with tape.modules.watch(), torch.autograd.set_multithreading_enabled(False), tape:
        step()
    return tape


def _compare_steps(first: _PlacedTape, second: _PlacedTape) -> list[str]:
    """Returns a remark if two steps multiply differently: in a different branch, or size."""
    flops, products = zip(*map(_count_products, (first, second)), strict=True)
    differing = (products[0] - products[1]) + (products[1] - products[0])
    if not differing and abs(flops[0] - flops[1]) <= _SAME_FLOPS * max(flops):
        return []
    where = f" ({_some(sorted({path or 'outside of layers' for path, _ in differing}))})" if differing else ""
    did, then = (units.count(count, "FLOP") for count in flops)
    return [f"steps are not alike: the first multiplies {did}, the second {then}{where}; the coverage is of the first"]


def _some(names: Sequence[str]) -> str:
    remainder = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + remainder


def _count_products(tape: _PlacedTape) -> tuple[int, Counter[tuple[str, str]]]:
    """Returns the FLOPs of a step, and how often each module calls each operator that multiplies."""
    total = 0
    calls = Counter[tuple[str, str]]()
    for call, place in zip(tape.calls, tape.places, strict=True):
        flops, _ = flops_of(call)
        total += flops or 0
        if flops != 0:
            calls[place.path, name_of(call)] += 1
    return total, calls


# A parameter that looks like a stack of weights, in a module that has run without multiplying by it.
_NO_PRODUCT = "no-product"


class _CoveredSums:
    """FLOPs and products of each weight, and of all other calls. `by_hand` are weights that a function uses directly,
    bypassing their layer."""

    def __init__(self, model: nn.Module, tape: _PlacedTape) -> None:
        self.flops = 0
        self.of: Counter[int] = Counter()
        self.products: dict[int, list[HeldProduct]] = defaultdict(list)
        self.others: dict[tuple[str, str, str, bool], OtherProduct] = {}
        self.by_hand: set[str] = set()
        self._names = {
            parameter.untyped_storage()._cdata: name
            for name, parameter in model.named_parameters()
            if type(parameter) is nn.Parameter and parameter.layout is torch.strided and parameter.dim() > 1
        }
        # Only one of the two calls of a node that computes the gradients of a product has the weight.
        self._of_nodes = {}
        for call, node in zip(tape.calls, tape.nodes, strict=True):
            if node is not None:
                for name in self._weights_of(call):
                    self._of_nodes[node] = name

    def add(self, call: Call, place: _Place, node: int | None) -> None:
        count, _ = flops_of(call)
        if count == 0:
            return
        self.flops += count or 0
        if place.held is not None and count is not None:
            self.products[id(place.held)] += products_of(call)
            self.of[id(place.held)] += count
            return
        of_node = "" if node is None else self._of_nodes.get(node, "")
        operator = name_of(call)
        weight = next(self._weights_of(call), of_node)
        self.by_hand.add(weight)
        key = operator, place.path, weight, count is None
        new = OtherProduct(operator, place.path, None if count is None else 0, 0, _why(operator, count, weight), weight)
        sums = self.others.get(key, new)
        flops = None if count is None else (sums.flops or 0) + count
        self.others[key] = replace(sums, flops=flops, calls=sums.calls + 1)

    def _weights_of(self, call: Call) -> Iterator[str]:
        if call.operator.namespace == "aten" and name_of(call) not in SHAPES:
            return
        for tensor in tensors_in((call.given, tuple(call.named.values()))):
            if tensor.storage in self._names and len(tensor.shape) > 1:
                yield self._names[tensor.storage]


def _why(operator: str, count: int | None, weight: str) -> str:
    if count is None:
        return "nobody has a formula for its FLOPs: they are in no sum"
    if weight:
        return "a function multiplies by the weight, and calls no layer that could be converted"
    if "attention" in operator:
        return "attention: queries, keys and values are multiplied with each other, and no weights"
    return "no layer's: a function multiplies tensors that are no weight of a layer here"


def _holder(held: ProductWeight, sums: _CoveredSums, tape: _PlacedTape, multiple: int) -> Holder:
    products = tuple(sums.products[id(held)])
    calls = tape.modules.called[id(held)]
    rule = held.rule
    reason = held.reason
    # A weight without a call has a reason: an unknown operator, nothing to multiply, or a call past its module.
    if not reason and not calls:
        if id(held) in tape.modules.missed:
            rule = "operator"
            reason = "it is multiplied in a way that is not x times a weight (an einsum, say)"
        elif held.kind == EXPERTS:
            rule = _NO_PRODUCT
            reason = "nothing is multiplied by it"
        elif f"{held.name}.{held.parameter}".lstrip(".") in sums.by_hand:
            rule = "not-called"
            reason = "the step multiplies by its weight in a function, and never calls it"
        else:
            rule = "not-called"
            reason = "the step never calls it"
    return Holder(
        held.name,
        held.shown_kind,
        held.shape,
        products,
        sums.of[id(held)],
        calls,
        not reason,
        reason,
        rule,
        unfit(held, products, multiple),
        held.also,
    )


def unfit(held: ProductWeight, products: Sequence[HeldProduct], multiple: int) -> str:
    """Describes the sides of a weight's products that native products do not take; '' if they take all.

    Contractions and columns must be multiples; the contraction of a weight's gradient is the rows of the forward pass.
    """
    if held.kind == CONV2D and multiple > 1:
        return "torch has no convolution in formats this narrow: values are rounded, and convolved in fp32"
    sides = chain.from_iterable((product.k, product.n) for product in products)
    wrong = sorted({size for size in sides if size % multiple})
    if not wrong:
        return ""
    names = dict(zip(held.sides, "NK", strict=True))
    sizes = ", ".join(f"{names.get(size, 'M')}={size}" for size in wrong)
    pads = ", ".join(str(-(-size // multiple) * multiple) for size in wrong)
    return f"native products take contractions and columns in multiples of {multiple}: pad {sizes} to {pads}"
