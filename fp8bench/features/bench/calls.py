"""Calls a callable on the inputs of a case, inside the worker. Also compares the results of two callables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fp8bench.errors import UsageError
from fp8bench.features.bench.values import DTYPE, DTYPES, INPUTS, SHAPE, TENSOR_FILES, format_shapes, parse_shapes
from fp8bench.nn.own_model import seed_generators
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.protocols import Setup
from fp8bench.user_code import own_words
from fp8bench.user_code.named import named
from fp8bench.worker.bits import digest
from fp8bench.worker.step_guards import LeftRunning, StepPrinted, require_silent_step
from fp8bench.worker.switches import SwitchesChanged, restore_switches
from fp8bench.workloads.model import is_out_of_memory_error

# A relative change of inputs that float64 can represent and float32 cannot.
_FLOAT64_ONLY_CHANGE = 2.0**-30
# Rounding never causes a larger relative difference of a result than this.
_MAX_ROUNDING_DIFFERENCE = 0.5
# The error of a column with fewer rows may be due to chance.
_MIN_COLUMN_ROWS = 16


class CallInputs(NamedTuple):
    """The arguments of a call: some by position, others by name."""

    positional_arguments: Sequence[Any]
    keyword_arguments: Mapping[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        return list_leaf_tensors((self.positional_arguments, self.keyword_arguments))

    def transform(self, change: Callable[[Tensor], Tensor]) -> CallInputs:
        """Returns the inputs with `change` applied to each tensor."""
        return CallInputs(*tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, tuple(self)))


def list_leaf_tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def describe_tensors(tensors: Sequence[Tensor]) -> str:
    """Formats the shapes and dtypes of tensors, such as '1024x4096 float32, 8 int64'."""
    return ", ".join(f"{format_shapes([tensor.shape]) or 'a number'} {str(tensor.dtype)[6:]}" for tensor in tensors)


def make_inputs(setup: Setup) -> CallInputs:
    """Makes the inputs of a case, with the same values at every call. Raises UsageError if they contain no tensor."""
    # 1. If the case has shapes, draw random tensors.
    params = setup.params
    device = setup.facts.key
    if SHAPE in params:
        return draw_inputs(parse_shapes(str(params[SHAPE])), str(params[DTYPE]), device, setup.seed)
    # 2. Otherwise, load the inputs from a file, or call the function of the user.
    source = str(params[INPUTS])
    source_inputs = _load_tensors(source) if source.endswith(TENSOR_FILES) else _make_inputs_by_function(source, setup)
    # 3. A mapping has arguments by name. A tensor, tuple or list has them by position.
    match source_inputs:
        case Tensor():
            inputs = CallInputs((source_inputs,), {})
        case Mapping():
            inputs = CallInputs((), source_inputs)
        case tuple() | list():
            inputs = CallInputs(source_inputs, {})
        case _:
            inputs = CallInputs((), {})
    if not inputs.tensors:
        raise UsageError(
            f"{source} returns {type(source_inputs).__name__} without tensors; expected a tensor, a tuple or list of "
            "arguments, or a dict of arguments by name."
        )
    return inputs.transform(lambda tensor: tensor.to(device))


def draw_inputs(shapes: Sequence[Sequence[int]], dtype: str, device: str, seed: int) -> CallInputs:
    """Draws normal numbers in float32 and converts them, so that every dtype rounds the same numbers."""
    generator = torch.Generator(device).manual_seed(seed)
    tensors = (torch.randn(tuple(shape), generator=generator, device=device) for shape in shapes)
    return CallInputs([tensor.to(getattr(torch, DTYPES[dtype])) for tensor in tensors], {})


def _load_tensors(file: str) -> Any:
    """Loads tensors and plain containers from a file. Raises UsageError for files whose objects could run code."""
    try:
        if file.endswith(".safetensors"):
            from safetensors.torch import load_file

            return load_file(file)
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UsageError(
            f"{file} cannot be loaded as tensors: {own_words(error)}. Write a tensor, tuple or dict of tensors with "
            "torch.save, or a .safetensors file. Other objects could run code, so they are not loaded."
        ) from error


def _make_inputs_by_function(source: str, setup: Setup) -> Any:
    function = named(source)
    try:
        with seed_generators(setup.seed, setup.facts):
            return function(setup.facts.key, setup.seed)
    except Exception as error:
        if is_out_of_memory_error(error):
            raise
        raise UsageError(f"{source}(device, seed), which returns the inputs, fails: {own_words(error)}.") from error


def run_callable(target: str, inputs: CallInputs) -> list[Tensor]:
    """Calls a callable and returns copies of the tensors in its result. Raises UsageError if the callable raises an
    exception or returns no tensor. Also raises it for side effects: printing, changing its inputs or a global switch
    (such as torch's default dtype), or leaving a thread or process running.
    """
    function = named(target)
    tensors = inputs.tensors
    if isinstance(function, type):
        raise UsageError(
            f"{target} is a class, and calling it only creates an object. Give a function, or a variable of the module "
            "that holds an instance."
        )
    tensor_digests_before = list(map(digest, tensors))
    try:
        with require_silent_step(), restore_switches():
            output = function(*inputs.positional_arguments, **inputs.keyword_arguments)
        tensor_digests_after = list(map(digest, tensors))  # errors of asynchronous device work are raised here
    except (StepPrinted, LeftRunning, SwitchesChanged) as error:
        raise UsageError(f"{target} cannot be measured: {error}") from error
    except Exception as error:
        if is_out_of_memory_error(error):
            raise
        raise UsageError(
            f"{target} cannot be measured with {describe_tensors(tensors)}: {own_words(error)}."
        ) from error
    if tensor_digests_before != tensor_digests_after:
        raise UsageError(
            f"{target} changes its inputs, so the next call would get different ones. Let it change copies (.clone())."
        )
    results = list_leaf_tensors(output)
    if not results:
        returned_description = "nothing" if output is None else f"{type(output).__name__} without a tensor"
        raise UsageError(
            f"{target} returns {returned_description}, so its results cannot be compared. Return the tensor."
        )
    return [result.detach().clone() for result in results]


def compute_exact_results(target: str, inputs: CallInputs, seed: int) -> list[Tensor] | None:
    """Returns the results of a callable on the same inputs in float64. Returns None if the callable refuses float64 or
    computes in a lower precision. A callable computes in a lower precision if its results ignore changes of the inputs
    that only float64 can represent.
    """
    float64_inputs = inputs.transform(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    generator = torch.Generator(float64_inputs.tensors[0].device).manual_seed(seed)

    def add_small_changes(tensor: Tensor) -> Tensor:
        if tensor.dtype is not torch.float64:
            return tensor
        random_factors = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype, device=tensor.device)
        return tensor * (1 + _FLOAT64_ONLY_CHANGE * random_factors)

    try:
        if not any(map(_needs_float64, run_callable(target, float64_inputs.transform(add_small_changes)))):
            return None
        return run_callable(target, float64_inputs)
    except UsageError:
        return None


def _needs_float64(result: Tensor) -> bool:
    if result.dtype is not torch.float64:
        return False
    # A float64 result may hold values that were computed in a lower precision, and so fit into float32.
    finite_values = result[result.isfinite()]
    return bool((finite_values.float().double() != finite_values).any())


def measure_difference(results: Sequence[Tensor], expected_results: Sequence[Tensor]) -> float:
    """Returns the largest relative difference between a result and its expected one, by Frobenius norms. For
    integers, this is the share of elements that differ. The difference is infinite if only one of the two results is
    finite, or if their infinities are at different places.
    """
    return max(_measure_result_difference(*pair) for pair in zip(results, expected_results, strict=True))


def exceeds_rounding(result: Tensor, expected_result: Tensor) -> bool:
    """Returns whether a floating-point result differs from the expected one by more than rounding explains: by more
    than half of the norm of the expected result, or of one of its columns.
    """
    if not (result.is_floating_point() or result.is_complex()):
        return False
    has_enough_rows = result.dim() > 0 and result.numel() >= _MIN_COLUMN_ROWS * result.shape[-1]
    exceeds_limit = _measure_result_difference(result, expected_result) > _MAX_ROUNDING_DIFFERENCE
    return exceeds_limit or (has_enough_rows and find_wrong_column(result, expected_result) is not None)


def find_magnified_rounding(target: str, inputs: CallInputs, expected_results: Sequence[Tensor]) -> list[bool]:
    """Repeats a callable in bfloat16. Returns for each result whether it then differs from the expected one by more
    than rounding can. Such a callable magnifies rounding, for example because it subtracts nearly equal numbers. So
    rounding may explain any difference of this result. Returns False for every result if the callable refuses bfloat16.
    """
    bfloat16_inputs = inputs.transform(lambda tensor: tensor.bfloat16() if tensor.is_floating_point() else tensor)
    try:
        return list(map(exceeds_rounding, run_callable(target, bfloat16_inputs), expected_results))
    except UsageError:
        return [False] * len(expected_results)


def find_wrong_column(result: Tensor, expected_result: Tensor) -> tuple[int, float] | None:
    """Returns the column with the largest difference, and its share of the sum of squared differences. Returns None if
    the difference is at most half of the norm of this column, or of an average column.
    """
    result = _widen_bytes(result)
    expected_result = _widen_bytes(expected_result)
    squared_difference_sums, sizes = (
        tensor.abs().double().square().nan_to_num(0.0, 0.0).reshape(-1, expected_result.shape[-1]).sum(0)
        for tensor in (result - expected_result, expected_result)
    )
    column = int(squared_difference_sums.argmax())
    size = max(float(sizes[column]), float(sizes.mean()))
    is_column_wrong = float(squared_difference_sums[column]) > _MAX_ROUNDING_DIFFERENCE**2 * size
    return (column, float(squared_difference_sums[column] / squared_difference_sums.sum())) if is_column_wrong else None


def _measure_result_difference(result: Tensor, expected_result: Tensor) -> float:
    if result.is_complex() or expected_result.is_complex():
        result, expected_result = (
            torch.view_as_real(tensor.to(torch.complex128)) for tensor in (result, expected_result)
        )
    if not result.is_floating_point() and not expected_result.is_floating_point():
        return float((result != expected_result).double().mean()) if result.numel() else 0.0
    result = _widen_bytes(result)
    expected_result = _widen_bytes(expected_result)
    is_nonfinite = ~(result.isfinite() & expected_result.isfinite())
    if is_nonfinite.any():
        # NaN and infinities must be at the same places. Then only finite elements are compared.
        are_elements_equal = (result.double() == expected_result.double()) | (result.isnan() & expected_result.isnan())
        if not are_elements_equal[is_nonfinite].all():
            return math.inf
        result = result.masked_fill(is_nonfinite, 0)
        expected_result = expected_result.masked_fill(is_nonfinite, 0)
    return relative_frobenius(result, expected_result)


def _widen_bytes(tensor: Tensor) -> Tensor:
    """Converts one-byte dtypes to float32, because torch cannot compute with them."""
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor
