"""Watches untimed steps, and checks whether their products are computed in the precision of the case.

There are three kinds of evidence. The first is the operands of products. The second is the result of a test product of
the case's precision, which is compared with the results in other precisions. On a GPU, the third is the names of the
kernels that multiply. An emulation may multiply values in a wider dtype. If a native precision does so, it has fallen
back to that dtype.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8bench.formats.grids import FORMATS, Format
from fp8bench.formats.hardware import find_operand_bits
from fp8bench.formats.recipe_support import recipe_on_device
from fp8bench.formats.recipes import Accumulator, Recipe
from fp8bench.model import Case, DeviceFacts, GivenTensors, Products
from fp8bench.nn.arithmetics import RecipeArithmetic
from fp8bench.numerics.conformity import find_nearest_precision
from fp8bench.numerics.operands import ProductWatch, has_format, has_format_dtype
from fp8bench.protocols import Precision, Role, Setup, Workload
from fp8bench.protocols.workload import find_map_key
from fp8bench.registry import devices, precisions
from fp8bench.worker.bits import count_subnormals
from fp8bench.worker.clock import PhaseStampClock
from fp8bench.worker.memory_pass import report_casts
from fp8bench.worker.state_tensors import find_models, get_address, get_version, iterate_tensors, state_tensors
from fp8bench.worker.static_scales import step
from fp8bench.worker.tracing import record_trace

# If none of this many products has an operand in a format of the case, no more products are inspected. Inspecting them
# takes about a second.
_MAX_INSPECTED_PRODUCTS = 256
# A step is taken a second time only if it takes less than this many seconds.
_MAX_STEP_SECONDS = 1.0


def inspect_products(workload: Workload, make_setup: Callable[[], Setup], facts: DeviceFacts) -> Products:
    # 1. Prepare a state. In its steps, each cast adds the addresses of its source and its result to this set.
    addresses_cast_in_step = set[int]()
    setup = report_casts(make_setup(), lambda addresses, role: addresses_cast_in_step.update(addresses))
    formats = find_product_formats(workload, setup.case, facts)
    precision = precisions.get(setup.case.precision)
    is_native = precision.support(facts).is_native
    # Native products of a recipe take codes, which are tensors in the dtype of a format. Emulated products take rounded
    # values in a wider dtype. A precision that sets `float32_products` to 'high' uses TF32 units, which read float32
    # tensors and round them.
    takes_codes = is_native and isinstance(getattr(precision, "recipe", None), Recipe)
    operand_inspection = _OperandInspection(
        formats, reads_float32=is_native and precision.float32_products != "highest", takes_codes=takes_codes
    )
    state = workload.prepare(setup)
    state_input_tensors = StepInputSums(state)
    clock = PhaseStampClock(devices.get(facts.kind).stamper(facts.index))
    # 2. Inspect the operands of one step, and sum its inputs.
    start = time.thread_time()
    with ProductWatch(operand_inspection.inspect_operands) as watch:
        step(workload, state, setup.scales, clock)
    input_sums = state_input_tensors.sum_inputs()
    # 3. If steps are fast, take a second step to find weights that were cast before it. The first step may have cast
    # tensors that later steps reuse.
    held_weights = _StateWeightFinder(state, formats)
    if time.thread_time() - start < _MAX_STEP_SECONDS:
        addresses_cast_in_step.clear()
        with ProductWatch(held_weights.inspect_operands):
            step(workload, state, setup.scales, clock)
    # 4. Profile a few steps, and compute a test product. The profiler passes the last argument of `step`, the markers
    # of phases.
    multiplying_kernels = (
        _list_multiplying_kernels(partial(step, workload, state, setup.scales), facts) if takes_codes else ()
    )
    del state, state_input_tensors
    identified_precision = identify_product(precision, facts) if operand_inspection.count or multiplying_kernels else ""
    # 5. Above the limit, products are not inspected. Such a product may have the only operand in a format of the case.
    has_low_values = operand_inspection.has_low_precision_operand or operand_inspection.has_wide_operand
    is_limit_exceeded = operand_inspection.count > _MAX_INSPECTED_PRODUCTS
    is_precision_unknown = not formats or (is_limit_exceeded and not has_low_values)
    return Products(
        count=operand_inspection.count,
        low=None if is_precision_unknown else has_low_values,
        operands=tuple(operand_inspection.operand_dtype_names),
        operators=watch.operators,
        attention=tuple(watch.attention),
        wide=operand_inspection.has_wide_operand and not operand_inspection.has_low_precision_operand,
        looks_like=identified_precision,
        kernels=multiplying_kernels,
        given=input_sums,
        # weights in the case's formats that no cast of the step has made
        cast_before=len(held_weights.find_unwritten_weights() - addresses_cast_in_step),
    )


class _StateWeightFinder:
    """Finds tensors of a state that may be weights stored in a low-precision format of the case: they are the right
    operand of a product, and no step writes them. Leaves out the parameters of models, and tensors whose purpose the
    state declares.
    """

    def __init__(self, state: object, formats: Sequence[Format]) -> None:
        addresses_with_role = {address for address, role in state_tensors(state).items() if role is not None}
        for model in find_models(state):
            addresses_with_role.update(map(get_address, model.parameters()))
        tensors = ((get_address(tensor), tensor) for tensor in iterate_tensors(state))
        self._held = {
            address: (tensor, get_version(tensor)) for address, tensor in tensors if address not in addresses_with_role
        }
        self._formats = formats
        self._read = set[int]()

    def inspect_operands(self, operands: Sequence[Any]) -> None:
        """Notes the right operand of a forward product if it has a low-precision dtype. Skips the backward pass, whose
        products multiply gradients with the inputs of the forward pass.
        """
        # torch reports -1 outside of any backward pass.
        for weight in operands[1:2] if torch._C._current_graph_task_id() == -1 else ():
            if any(has_format_dtype(weight, fmt) for fmt in self._formats):
                self._read.add(get_address(weight))

    def find_unwritten_weights(self) -> set[int]:
        held = ((address, *self._held[address]) for address in self._read & self._held.keys())
        return {address for address, tensor, version in held if get_version(tensor) == version}


def find_product_formats(workload: Workload, case: Case, facts: DeviceFacts) -> tuple[Format, ...]:
    """Returns the formats of a case's products: those of its precision map if the map covers all layers, else those
    of its precision.
    """
    precision_by_layer_key = dict(case.precision_map)
    layers = workload.layers(dict(case.params))
    layers_and_keys = [(layer, find_map_key(layer, precision_by_layer_key)) for layer in layers]
    modes = [precision_by_layer_key[key] for _layer, key in layers_and_keys if key is not None]
    # A layer without a key has the precision of the case, or stays in high precision if `high` is set.
    if not layers or any(key is None and not layer.high for layer, key in layers_and_keys):
        modes = [case.precision]
    formats: dict[Format, None] = {}
    for mode in modes:
        recipe = getattr(precisions.get(mode), "recipe", None)
        if isinstance(recipe, Recipe):
            # A recipe may treat inputs, weights and gradients differently.
            formats |= dict.fromkeys(treatment.fmt for treatment in recipe_on_device(recipe, facts).treatments)
        elif mode in FORMATS:
            formats[FORMATS[mode]] = None
    return tuple(formats)


def _list_multiplying_kernels(run_step: Callable[[Any], None], facts: DeviceFacts) -> tuple[str, ...]:
    """Returns the names of the kernels that multiply in a few profiled steps; () on a CPU, or if none was recorded."""
    if not facts.accelerated:
        return ()
    with suppress(RuntimeError):  # some drivers forbid profiling
        kernel_names = (
            str(event.get("name"))
            for event in record_trace(run_step, facts.kind)["traceEvents"]
            if event.get("cat") == "kernel"
        )
        return tuple(name for name in dict.fromkeys(kernel_names) if find_operand_bits(name) is not None)
    return ()


# M, N, K of the product whose numbers are examined, as multiples of every block size.
_EXAMINED_PRODUCT_SHAPE = (128, 256, 512)
_PLACEHOLDER_LAYER_NAME = "fingerprint"


def identify_product(precision: Precision, facts: DeviceFacts) -> str:
    """Returns the precision in which a product seems to be computed, judged by its numbers. Returns '' if this is the
    precision of the recipe, or if it is unknown: without a recipe, if emulation takes too long, or if the product fails
    or is not finite.
    """
    recipe = getattr(precision, "recipe", None)
    if not isinstance(recipe, Recipe):
        return ""
    is_native = precision.support(facts).is_native
    if not is_native and recipe.accumulator is not Accumulator.FP32:  # emulating sums in few bits takes seconds
        return ""
    arithmetic = precision.arithmetic(facts)
    generator = torch.Generator(facts.key).manual_seed(0)
    m, n, k = _EXAMINED_PRODUCT_SHAPE
    x, weight = (torch.randn(rows, k, generator=generator, device=facts.key).to(arithmetic.carrier) for rows in (m, n))
    emulated_layer = RecipeArithmetic(recipe_on_device(recipe, facts)).layer(_PLACEHOLDER_LAYER_NAME)
    emulated_operands = emulated_layer.cast(x, Role.INPUT).data, emulated_layer.cast(weight, Role.WEIGHT).data
    carrier_name = str(arithmetic.carrier).removeprefix("torch.")
    operands_by_precision: dict[str, tuple[Tensor, Tensor]] = {
        precision.mode: emulated_operands,
        carrier_name: (x, weight),
    }
    if is_native:
        operands_in_carrier_dtype = (
            emulated_operands[0].to(arithmetic.carrier),
            emulated_operands[1].to(arithmetic.carrier),
        )
        operands_by_precision[f"{carrier_name} copies of {precision.mode}'s values"] = operands_in_carrier_dtype
    try:
        # A library may have a function for the whole layer, instead of separate casts and products.
        whole_layer = arithmetic.whole(torch.nn.Parameter(weight.to(torch.float32)))
        layer = arithmetic.layer(_PLACEHOLDER_LAYER_NAME)
        product = (
            whole_layer(x)
            if whole_layer is not None
            else layer.product(layer.cast(x, Role.INPUT), layer.cast(weight, Role.WEIGHT), arithmetic.carrier)
        )
    except Exception:  # noqa: BLE001 - a product that this device cannot do fails where it is timed, with the reason
        return ""
    return find_nearest_precision(product, precision.mode, operands_by_precision)


@dataclass
class _OperandInspection:
    """Checks whether a step multiplies in one of the case's formats (`has_low_precision_operand`), until one product
    does.

    If products read codes, the operand must have a format's dtype. `has_wide_operand` is true once an operand has
    values of a format, but a wider dtype.
    """

    formats: Sequence[Format]
    reads_float32: bool
    takes_codes: bool = False
    count: int = 0
    has_low_precision_operand: bool = False
    has_wide_operand: bool = False
    operand_dtype_names: dict[str, None] = field(default_factory=dict)

    def inspect_operands(self, operands: Sequence[Any]) -> None:
        """Checks the formats of a product's operands. The backward pass calls this method from a different thread, but
        for one product at a time.
        """
        if self.has_low_precision_operand or self.count > _MAX_INSPECTED_PRODUCTS:
            return
        self.count += 1
        self.operand_dtype_names.update(
            dict.fromkeys(str(operand.dtype).removeprefix("torch.") for operand in operands)
        )
        operand_format_pairs = [(tensor, fmt) for tensor in operands for fmt in self.formats]
        if self.takes_codes:
            self.has_low_precision_operand = any(has_format_dtype(tensor, fmt) for tensor, fmt in operand_format_pairs)
            self.has_wide_operand = self.has_wide_operand or (
                not self.has_low_precision_operand
                and any(has_format(tensor, fmt) for tensor, fmt in operand_format_pairs)
            )
        else:
            reads_float32 = self.reads_float32 and any(operand.dtype == torch.float32 for operand in operands)
            self.has_low_precision_operand = reads_float32 or any(
                has_format(tensor, fmt) for tensor, fmt in operand_format_pairs
            )


# The limit in CPU seconds for reading a state. Nothing is reported about a state that takes longer.
READ_SECONDS = 0.5
_ELEMENTS_PER_PIECE = 1 << 20
# The most input shapes that are reported, largest first. The largest inputs decide how long a step takes.
_MAX_INPUT_SHAPES = 32


class StepInputSums:
    """Sums the numbers of the tensors that a step takes as input, by shape. The sums must be equal in all precisions,
    up to rounding. A tensor counts as input if the step does not write it, or if it is trained. Tensors that the step
    overwrites do not count, because they may be uninitialised.
    """

    def __init__(self, state: object) -> None:
        self._deadline = time.thread_time() + READ_SECONDS
        readable_tensors = [
            tensor for tensor in iterate_tensors(state, until=self._deadline) if _is_readable_float_tensor(tensor)
        ]
        self._sums_before = [
            (tensor, get_version(tensor), sums) for tensor in readable_tensors if (sums := self._sum_numbers(tensor))
        ]
        self._remaining_seconds = self._deadline - time.thread_time()

    def sum_inputs(self) -> tuple[GivenTensors, ...]:
        input_sums_by_shape: dict[tuple[int, ...], GivenTensors] = {}
        self._deadline = time.thread_time() + self._remaining_seconds
        for tensor, version, sums in self._sums_before:
            is_trained = tensor.is_leaf and tensor.requires_grad
            if is_trained or (get_version(tensor) == version and self._sum_numbers(tensor) == sums):
                shape = tuple(tensor.shape)
                previous_tensors = input_sums_by_shape.get(shape, GivenTensors(shape))
                total, sum_of_squares, subnormals = (a + b for a, b in zip(previous_tensors.sums, sums, strict=True))
                has_no_adjacent_numbers = tensor.layout is torch.strided and 1 not in tensor.stride()
                input_sums_by_shape[shape] = GivenTensors(
                    shape,
                    previous_tensors.tensors + 1,
                    total,
                    sum_of_squares,
                    int(subnormals),
                    previous_tensors.scattered + has_no_adjacent_numbers,
                )
        if time.thread_time() > self._deadline:
            return ()
        return tuple(sorted(input_sums_by_shape.values(), key=lambda tensors: -tensors.elements)[:_MAX_INPUT_SHAPES])

    def _sum_numbers(self, tensor: Any) -> tuple[float, float, int] | None:
        """Returns the sum, the sum of squares and the number of subnormals of a tensor; None if they are not finite or
        take too long.
        """
        total = 0.0
        sum_of_squares = 0.0
        subnormal_count = 0
        for piece in tensor.detach().reshape(-1).split(_ELEMENTS_PER_PIECE):
            if time.thread_time() > self._deadline:
                return None
            total += float(piece.sum(dtype=torch.float64))
            sum_of_squares += float(torch.linalg.vector_norm(piece, dtype=torch.float64)) ** 2
            # Subnormals count because they slow down CPUs. CPUs convert float16 to float32 before they multiply, which
            # makes its subnormals normal numbers.
            if tensor.dtype is not torch.float16:
                subnormal_count += count_subnormals(piece)
        # The comparison is false for NaN as well.
        return (total, sum_of_squares, subnormal_count) if sum_of_squares < float("inf") else None


def _is_readable_float_tensor(tensor: Any) -> bool:
    """Returns whether a tensor has several floating-point numbers, of two bytes or more each. Returns False for a view
    that repeats some of its numbers.
    """
    has_wide_floats = tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1 and tensor.numel() > 1
    return bool(has_wide_floats and tensor.numel() * tensor.dtype.itemsize <= tensor.untyped_storage().nbytes())
