"""Finds out which weight of which module each matrix product of a step multiplies by. Products of two other tensors
are listed as products without a weight.

The result has a `Holder` for each weight, with the sizes of its products (`HeldProduct`), and an `OtherProduct` for
each kind of product without a weight.

The model is not changed. Global hooks record which module runs. An operator of the backward pass belongs to the
module whose forward pass created its autograd node. The sizes of products come from the same arguments as their
FLOPs.
"""

from __future__ import annotations

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
from fp8bench.formats.recipes import round_up
from fp8bench.model.step import Coverage, HeldProduct, Holder, OtherProduct
from fp8bench.nn.holders import CONV2D_KIND, EXPERTS_KIND, ProductWeight, StackedWeightWatch
from fp8bench.tape.formulas import PRODUCT_SHAPES, count_flops
from fp8bench.tape.recorder import Call, OperatorTape, bind_arguments, get_operator_name, iterate_tensors
from fp8bench.tape.timed_calls import RunningModules

# The largest relative difference of two steps' FLOPs that counts as equal. With experts, the number of tokens of
# each expert changes from step to step.
_FLOPS_TOLERANCE = 0.05
_MAX_LISTED_NAMES = 3
# The value of `Holder.rule` for a stack of expert weights that no product of the step uses.
_NO_PRODUCT_RULE = "no-product"
_LATE_PARAMETERS_REMARK = (
    "the first step creates parameters after copies were converted and optimizers made: {}; call the model once in "
    "make() to create them earlier"
)


def list_products(call: Call) -> list[HeldProduct]:
    """Returns the matrix products of one call with their sizes. The list is empty for operators without products. It
    is also empty for attention and LSTMs, whose products are inside one fused operator.
    """
    if get_operator_name(call) not in PRODUCT_SHAPES:
        return []
    _, shapes = PRODUCT_SHAPES[get_operator_name(call)]
    # The functions in PRODUCT_SHAPES take the call's result as an argument with the name ''.
    named_arguments = {**bind_arguments(call), "": next(iterate_tensors(call.result), None)}
    return [HeldProduct(m, n, k, product_count, call.backward) for m, n, k, product_count in shapes(named_arguments)]


@dataclass(frozen=True)
class _CallSite:
    """Where a call runs: the path of the module, and the weight that the module multiplies by, if any."""

    path: str = ""
    product_weight: ProductWeight | None = None


class _CallSiteTracker(RunningModules[_CallSite]):
    """Tracks the call site of each operator: which module runs, and which weight it multiplies by. Also counts the
    calls for each weight.
    """

    def __init__(self, model: nn.Module, product_weights: Sequence[ProductWeight]) -> None:
        # Modules such as an LSTM, with several weights under other names, have no entry.
        weights_by_module = {
            weight.module: weight
            for weight in product_weights
            if weight.kind != EXPERTS_KIND and weight.parameter == "weight"
        }
        call_sites = {module: _CallSite(path, weights_by_module.get(module)) for path, module in model.named_modules()}
        # The label of a module is its call site. Calls outside of all modules get an empty call site.
        super().__init__(call_sites.get, outside_label=_CallSite())
        # Ids of weights that an operator used, but in no product that could be recognised.
        self.unrecognised: set[int] = set()
        self.call_counts: Counter[int] = Counter()
        self._stacked_weights: dict[nn.Module, dict[str, ProductWeight]] = defaultdict(dict)
        for weight in product_weights:
            if weight.kind == EXPERTS_KIND:
                self._stacked_weights[weight.module][weight.parameter] = weight
        self._open_stacks: list[ExitStack] = []

    def enter_module(self, label: _CallSite) -> None:
        if label.product_weight is not None:
            self.call_counts[id(label.product_weight)] += 1
        super().enter_module(label)

    def _handle_module_start(self, module: nn.Module, inputs: Any) -> None:
        # A module with stacked expert weights runs several products, so each product gets a separate call site.
        super()._handle_module_start(module, inputs)
        if (stacked_weights := self._stacked_weights.get(module)) is None:
            return
        path = self._running[-1].label.path

        # StackedWeightWatch calls `around` in place of a function, such as matmul, that gets a stacked weight. `run`
        # makes the original call.
        def around(name: str, is_product: bool, run: Callable[[], Any]) -> Any:
            if not is_product:
                self.unrecognised.add(id(stacked_weights[name]))
                return run()
            self.enter_module(_CallSite(path, stacked_weights[name]))
            try:
                return run()
            finally:
                self.leave_module()

        self._open_stacks.append(ExitStack())
        weights = {name: stack.weight for name, stack in stacked_weights.items()}
        self._open_stacks[-1].enter_context(StackedWeightWatch(weights, around=around))

    def _handle_module_end(self, module: nn.Module, inputs: Any, result: Any) -> None:
        if module in self._stacked_weights:
            self._open_stacks.pop().close()
        super()._handle_module_end(module, inputs, result)


class _CallSiteTape(OperatorTape):  # type: ignore[no-untyped-call]
    def __init__(self, model: nn.Module, product_weights: Sequence[ProductWeight]) -> None:
        super().__init__()
        self.modules = _CallSiteTracker(model, product_weights)
        self.sites: list[_CallSite] = []
        # For each call of the backward pass, the sequence number of its autograd node. It is None for calls of the
        # forward pass.
        self.nodes: list[int | None] = []

    def run_call(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        site, node, _ = self.modules.locate_running_call()
        self.sites.append(site)
        self.nodes.append(None if node is None else node._sequence_nr())
        return super().run_call(func, args, named)


def measure_coverage(
    model: nn.Module, product_weights: Sequence[ProductWeight], step: Callable[[], object], *, multiple: int = 1
) -> Coverage:
    """Returns the products of a step of the unchanged model, grouped by the weight that each multiplies by.
    `product_weights` are the weights that the model multiplies by. The sizes of native products must be multiples of
    `multiple`.

    Each product counts for exactly one weight, or as a product without a weight. A second step shows whether steps
    differ.

    Raises UsageError if a step has no product.
    """
    parameters = dict(model.named_parameters())
    # Record two steps, to report a product that only one of them has.
    tape = _record_step(model, product_weights, step)
    second_step_tape = _record_step(model, product_weights, step)
    coverage_sums = _CoverageSums(model, tape)
    for call, site, node in zip(tape.calls, tape.sites, tape.nodes, strict=True):
        coverage_sums.add(call, site, node)
    if not coverage_sums.flops and not coverage_sums.other_products:
        raise UsageError(f"a step of {type(model).__name__} multiplies no matrices: there is nothing to convert")
    # List the weights first. Then list the products without a weight, those with the most FLOPs first.
    product_weight_holders = (_build_weight_holder(weight, coverage_sums, tape, multiple) for weight in product_weights)
    products_without_weight = sorted(coverage_sums.other_products.values(), key=lambda product: -(product.flops or 0))
    # Leave out stacked parameters that no product uses: they only look like stacks of expert weights.
    multiplying_weight_holders = (
        weight_holder for weight_holder in product_weight_holders if weight_holder.rule != _NO_PRODUCT_RULE
    )
    # If the first step creates parameters, steps may differ for this reason, so describe no other differences.
    late_parameter_names = [name for name, _ in model.named_parameters() if name not in parameters]
    remarks = (
        [_LATE_PARAMETERS_REMARK.format(_join_first_names(late_parameter_names))]
        if late_parameter_names
        else _describe_step_differences(tape, second_step_tape)
    )
    return Coverage(
        tuple(multiplying_weight_holders), tuple(products_without_weight), coverage_sums.flops, remarks=tuple(remarks)
    )


def _record_step(
    model: nn.Module, product_weights: Sequence[ProductWeight], step: Callable[[], object]
) -> _CallSiteTape:
    tape = _CallSiteTape(model, product_weights)
    with tape.modules.watch(), torch.autograd.set_multithreading_enabled(False), tape:
        step()
    return tape


def _describe_step_differences(first: _CallSiteTape, second: _CallSiteTape) -> list[str]:
    """Returns a remark if the two steps call different products or differ in FLOPs, and otherwise nothing."""
    first_flops, first_step_products = _count_products(first)
    second_flops, second_step_products = _count_products(second)
    differing_products = (first_step_products - second_step_products) + (second_step_products - first_step_products)
    allowed_flops_difference = _FLOPS_TOLERANCE * max(first_flops, second_flops)
    if not differing_products and abs(first_flops - second_flops) <= allowed_flops_difference:
        return []
    differing_modules_note = (
        f" ({_join_first_names(sorted({path or 'outside of layers' for path, _ in differing_products}))})"
        if differing_products
        else ""
    )
    first_text, second_text = (units.count(flops, "FLOP") for flops in (first_flops, second_flops))
    figures = f"the first multiplies {first_text}, the second {second_text}{differing_modules_note}"
    return [f"steps are not alike: {figures}; the coverage is that of the first step"]


def _join_first_names(names: Sequence[str]) -> str:
    unlisted_names_text = f" and {len(names) - _MAX_LISTED_NAMES} more" if len(names) > _MAX_LISTED_NAMES else ""
    return ", ".join(names[:_MAX_LISTED_NAMES]) + unlisted_names_text


def _count_products(tape: _CallSiteTape) -> tuple[int, Counter[tuple[str, str]]]:
    """Returns the FLOPs of a step, and how often each module calls each operator that has products."""
    total_product_flops = 0
    calls = Counter[tuple[str, str]]()
    for call, site in zip(tape.calls, tape.sites, strict=True):
        flops, _ = count_flops(call)
        total_product_flops += flops or 0
        if flops != 0:
            calls[site.path, get_operator_name(call)] += 1
    return total_product_flops, calls


class _CoverageSums:
    """Sums the FLOPs of each weight's products and lists these products. Also sums the products without a weight.
    `used_by_functions` has the names of weights that a function such as F.linear multiplies by, outside of their
    layer's forward pass.
    """

    def __init__(self, model: nn.Module, tape: _CallSiteTape) -> None:
        self.flops = 0
        self.flops_by_weight: Counter[int] = Counter()
        self.products: dict[int, list[HeldProduct]] = defaultdict(list)
        self.other_products: dict[tuple[str, str, str, bool], OtherProduct] = {}
        self.used_by_functions: set[str] = set()
        # Identify weights by storage, because a product may read a view, such as the transposed weight. Leave out norms
        # and biases, which have one dimension.
        self._names = {
            parameter.untyped_storage()._cdata: name
            for name, parameter in model.named_parameters()
            if type(parameter) is nn.Parameter and parameter.layout is torch.strided and parameter.dim() > 1
        }
        # A backward node runs one product for each of two gradients. Only the input gradient's product reads the
        # weight, so use the weight's name for both.
        self._weight_name_by_node = {}
        for call, node in zip(tape.calls, tape.nodes, strict=True):
            if node is not None:
                for name in self._find_weights(call):
                    self._weight_name_by_node[node] = name

    def add(self, call: Call, site: _CallSite, node: int | None) -> None:
        # The count is 0 for a call without a matrix product, and None for a product of unknown size.
        count, _ = count_flops(call)
        if count == 0:
            return
        self.flops += count or 0
        # 1. Count the product for the weight of the module that runs.
        if site.product_weight is not None and count is not None:
            self.products[id(site.product_weight)] += list_products(call)
            self.flops_by_weight[id(site.product_weight)] += count
            return
        # 2. Otherwise look for a weight in the call's arguments, or in those of any call of the same autograd node.
        node_weight_name = "" if node is None else self._weight_name_by_node.get(node, "")
        operator = get_operator_name(call)
        weight = next(self._find_weights(call), node_weight_name)
        self.used_by_functions.add(weight)
        # 3. Add the call to the sum of its kind: the same operator, module and weight.
        key = operator, site.path, weight, count is None
        empty_product_sum = OtherProduct(
            operator,
            site.path,
            None if count is None else 0,
            0,
            _explain_missing_layer(operator, count, weight),
            weight,
        )
        previous_product_sum = self.other_products.get(key, empty_product_sum)
        flops = None if count is None else (previous_product_sum.flops or 0) + count
        self.other_products[key] = replace(previous_product_sum, flops=flops, calls=previous_product_sum.calls + 1)

    def _find_weights(self, call: Call) -> Iterator[str]:
        """Yields the names of weights among a call's arguments, if the call may be a product. Operators outside of
        aten may be products.
        """
        if call.operator.namespace == "aten" and get_operator_name(call) not in PRODUCT_SHAPES:
            return
        for tensor in iterate_tensors((call.positional, tuple(call.named.values()))):
            if tensor.storage in self._names and len(tensor.shape) > 1:
                yield self._names[tensor.storage]


def _explain_missing_layer(operator: str, count: int | None, weight: str) -> str:
    if count is None:
        return "no formula for its FLOPs is known, so no sum contains them"
    if weight:
        return "a function multiplies by the weight directly, so no layer can be converted"
    if "attention" in operator:
        return "attention: it multiplies queries, keys and values, and has no weight"
    return "a function multiplies tensors, and none of them is the weight of a layer"


def _build_weight_holder(
    product_weight: ProductWeight, sums: _CoverageSums, tape: _CallSiteTape, multiple: int
) -> Holder:
    products = tuple(sums.products[id(product_weight)])
    calls = tape.modules.call_counts[id(product_weight)]
    rule = product_weight.rule
    reason = product_weight.reason
    # Explain why a weight was never called: its operator is unknown, or it is in no product, or a function bypasses
    # its module.
    if not reason and not calls:
        if id(product_weight) in tape.modules.unrecognised:
            rule = "operator"
            reason = "it is multiplied in a way that is not x times a weight (for example an einsum)"
        elif product_weight.kind == EXPERTS_KIND:
            rule = _NO_PRODUCT_RULE
            reason = "the step multiplies nothing by it"
        # The name of the root module is '', so its parameters have no prefix.
        elif f"{product_weight.name}.{product_weight.parameter}".lstrip(".") in sums.used_by_functions:
            rule = "not-called"
            reason = "a function multiplies by its weight, and the step never calls the layer itself"
        else:
            rule = "not-called"
            reason = "the step never calls it"
    return Holder(
        product_weight.name,
        product_weight.shown_kind,
        product_weight.shape,
        products,
        sums.flops_by_weight[id(product_weight)],
        calls,
        converted=not reason,
        reason=reason,
        rule=rule,
        native=explain_misfit(product_weight, products, multiple),
        also=product_weight.module_aliases,  # other paths of the same module in the model
    )


def explain_misfit(product_weight: ProductWeight, products: Sequence[HeldProduct], multiple: int) -> str:
    """Returns why native kernels refuse some products of a weight, or '' if they accept all. K (the summed dimension)
    and N (the result's columns) must be multiples of `multiple`. In the weight gradient, K is the number of rows of the
    forward pass.
    """
    if product_weight.kind == CONV2D_KIND and multiple > 1:
        return "torch has no convolution in formats this narrow: values are rounded, and convolved in fp32"
    contracted_and_output_sizes = chain.from_iterable((product.k, product.n) for product in products)
    misfit_sizes = sorted({size for size in contracted_and_output_sizes if size % multiple})
    if not misfit_sizes:
        return ""
    # Use the letters of the forward product: N and K are the sides of the weight, and M is the number of rows. Show a
    # size once, even if two of them have it, with the letter K or N.
    letters_by_size = dict(zip(product_weight.sides, "NK", strict=True))
    sizes = ", ".join(f"{letters_by_size.get(size, 'M')}={size}" for size in misfit_sizes)
    padded_sizes = ", ".join(str(round_up(size, multiple)) for size in misfit_sizes)
    return f"native products take contractions and columns in multiples of {multiple}: pad {sizes} to {padded_sizes}"
