"""Checks a callable quickly before it is timed: whether its time and its results have a meaning. These checks are no
audit, because a callable that detects them can deceive them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from torch import Tensor

from fp8bench import units
from fp8bench.errors import UsageError
from fp8bench.features.bench.calls import (
    CallInputs,
    describe_tensors,
    draw_inputs,
    exceeds_rounding,
    find_wrong_column,
    make_inputs,
    measure_difference,
    run_callable,
)
from fp8bench.features.bench.values import DTYPE, INPUTS, SHAPE, format_shapes, parse_shapes
from fp8bench.protocols import Setup
from fp8bench.worker.bits import replace_numbers
from fp8bench.worker.state_tensors import get_address, is_foreign_tensor

# Results that differ by more than this share have different inputs. For equal inputs at other addresses, another order
# of summation changes results by less.
_MIN_STALE_DIFFERENCE = 0.01
# A column is reported if it has more than this share of the squared difference.
_MIN_REPORTED_COLUMN_SHARE = 0.9
# The error at another shape may be at most _ERROR_LIMIT, or _ERROR_FACTOR times the error at the first shape if that is
# larger.
_ERROR_FACTOR, _ERROR_LIMIT = 10.0, 0.01


def examine_callable(setup: Setup, target: str, against: str) -> list[str]:
    """Returns remarks on a callable for the report. Raises UsageError if it cannot be compared with the reference."""
    inputs = make_inputs(setup)
    if target == against:
        # The reference has nothing to be compared with. Check that all callables get the same inputs.
        if not _are_equal(inputs.tensors, make_inputs(setup).tensors):
            raise UsageError(
                f"{setup.params[INPUTS]} returns other inputs when it is called again with the same seed, so the "
                "callables would get different inputs. Draw them by torch, random or numpy.random, which are seeded."
            )
        return [*_remark_on_randomness(setup, target, run_callable(target, inputs))]
    expected_results = run_callable(against, inputs)
    results = run_callable(target, inputs)
    _check_same_work(target, results, against, expected_results)
    _refuse_caching(target, inputs, results, against, expected_results)
    return [
        *_remark_on_randomness(setup, target, results),
        *_remark_on_error_in_one_column(target, results, expected_results),
        *_remark_on_halved_inputs(setup, target, against, measure_difference(results, expected_results)),
        *_remark_on_hidden_nan(setup, target, against),
    ]


def _list_shapes_and_dtypes(tensors: Sequence[Tensor]) -> list[tuple[object, ...]]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def _check_same_work(target: str, results: Sequence[Tensor], against: str, expected_results: Sequence[Tensor]) -> None:
    if _list_shapes_and_dtypes(results) != _list_shapes_and_dtypes(expected_results):
        raise UsageError(
            f"{target} returns {describe_tensors(results)}, and {against} "
            f"{describe_tensors(expected_results)}: they do different work. "
            "Wrap one of them in a function that returns the shapes and dtypes of the other."
        )
    if math.isinf(measure_difference(results, expected_results)):
        raise UsageError(
            f"{target} returns NaN, infinities or an error too large for a number where {against} does not, or the "
            "other way round. Correct it, or give inputs that both can process."
        )


def _refuse_caching(
    target: str, inputs: CallInputs, results: Sequence[Tensor], against: str, expected_results: Sequence[Tensor]
) -> None:
    """Raises UsageError if a callable returns results that it has stored from earlier inputs. The check writes other
    numbers into the same memory without changing torch's version counters. Results that were stored by address or
    version are then wrong.
    """
    tensor_by_address = {get_address(tensor): tensor for tensor in inputs.tensors if not is_foreign_tensor(tensor)}
    try:
        with ExitStack() as changed_memory:
            for seed, tensor in enumerate(tensor_by_address.values()):
                changed_memory.enter_context(replace_numbers(tensor, seed))
            overwritten_input_results = run_callable(target, inputs)
            copied_inputs = inputs.transform(lambda tensor: tensor.detach().clone())
            copy_results, repeated_results, expected_copy_results = (
                run_callable(name, copied_inputs) for name in (target, target, against)
            )
    except UsageError:  # a callable may refuse these inputs, as a matrix factorization does
        return
    shapes_and_dtypes = _list_shapes_and_dtypes(copy_results)
    if (
        not _list_shapes_and_dtypes(overwritten_input_results)
        == shapes_and_dtypes
        == _list_shapes_and_dtypes(repeated_results)
    ):
        return  # shapes that depend on the values cannot be compared
    # A callable that draws random numbers differs between equal calls as well, so allow twice that difference.
    difference_by_chance = measure_difference(repeated_results, copy_results)
    if measure_difference(overwritten_input_results, copy_results) > max(
        _MIN_STALE_DIFFERENCE, 2 * difference_by_chance
    ):
        raise UsageError(
            f"{target} remembers earlier inputs: it returns old results for new numbers in the same memory, "
            "so repeated calls would do less work. Remove its cache."
        )
    if _are_equal(copy_results, results) and not _are_equal(expected_copy_results, expected_results):
        raise UsageError(
            f"{target} returns the same results for different inputs, but {against} does not. Let it compute them "
            "from its inputs."
        )


def _are_equal(results: Sequence[Tensor], other_results: Sequence[Tensor]) -> bool:
    return (
        _list_shapes_and_dtypes(results) == _list_shapes_and_dtypes(other_results)
        and measure_difference(results, other_results) == 0
    )


def _remark_on_randomness(setup: Setup, target: str, results: Sequence[Tensor]) -> Iterator[str]:
    repeated_results = run_callable(target, make_inputs(setup))
    if not _are_equal(repeated_results, results):
        difference_text = "in shape"
        if _list_shapes_and_dtypes(repeated_results) == _list_shapes_and_dtypes(results):
            difference_text = f"by {units.relative_error(measure_difference(repeated_results, results))}"
        yield f"{target} differs from itself {difference_text} when it is called again with equal inputs"


def _remark_on_error_in_one_column(
    target: str, results: Sequence[Tensor], expected_results: Sequence[Tensor]
) -> Iterator[str]:
    """Yields a remark for each result that differs by more than rounding explains, if nearly all of the difference is
    in one column."""
    for result, correct in zip(results, expected_results, strict=True):
        if not (result.dim() and exceeds_rounding(result, correct)):
            continue
        column, difference_share = find_wrong_column(result, correct) or (0, 0.0)
        if difference_share > _MIN_REPORTED_COLUMN_SHARE:
            last_column_note = ", the last" if column == result.shape[-1] - 1 else ""
            yield f"{target} is wrong in column {column} of {result.shape[-1]} (from 0{last_column_note})"


def _remark_on_halved_inputs(setup: Setup, target: str, against: str, usual_error: float) -> Iterator[str]:
    """Halves every even size of the inputs. Yields a remark if the callable then fails or is wrong, but the reference
    still works.
    """
    if SHAPE not in setup.params:
        return
    halved_shapes = list(map(_halve_even_sides, parse_shapes(str(setup.params[SHAPE]))))
    inputs = draw_inputs(halved_shapes, str(setup.params[DTYPE]), setup.facts.key, setup.seed)
    shape_text = f"at {format_shapes(halved_shapes)}"
    expected_results, results = _call_reference_and_target(inputs, against, target)
    if isinstance(results, str):
        yield f"{shape_text} {against} works, but {results}"
    elif _list_shapes_and_dtypes(results) != _list_shapes_and_dtypes(expected_results):
        yield (
            f"{shape_text} {target} returns {describe_tensors(results)}, "
            f"but {against} {describe_tensors(expected_results)}"
        )
    elif expected_results:
        error = measure_difference(results, expected_results)
        if error > max(_ERROR_LIMIT, _ERROR_FACTOR * usual_error):
            difference_text = units.relative_error(error)
            yield f"{shape_text} {target} is {difference_text} from {against}, so it is wrong at other shapes"


def _halve_even_sides(shape: Sequence[int]) -> list[int]:
    return [side // 2 if side % 2 == 0 else side for side in shape]


def _call_reference_and_target(
    inputs: CallInputs, against: str, target: str
) -> tuple[list[Tensor], list[Tensor] | str]:
    """Returns the results of the reference, and those of the callable. If the callable raises an exception, returns
    its message in their place. If the reference raises one, returns two empty lists.
    """
    try:
        expected_results = run_callable(against, inputs)
    except UsageError:
        return [], []
    try:
        return expected_results, run_callable(target, inputs)
    except UsageError as error:
        return expected_results, str(error)


def _remark_on_hidden_nan(setup: Setup, target: str, against: str) -> Iterator[str]:
    """Yields a remark if a NaN in an input does not reach the results of the callable, although it reaches those of
    the reference.
    """
    inputs = make_inputs(setup)
    float_tensors = [tensor.detach() for tensor in inputs.tensors if tensor.is_floating_point() and tensor.numel()]
    # The detached tensors share memory with the inputs, so this changes the inputs.
    for first_tensor in float_tensors[:1]:
        first_tensor[(0,) * first_tensor.dim()] = math.nan
    expected_results, results = _call_reference_and_target(inputs, against, target)
    if isinstance(results, str):
        yield f"with a NaN in its input {results}"
    elif any(map(_has_nan, expected_results)) and not any(map(_has_nan, results)):
        yield (
            f"a NaN in the input does not reach the result of {target}, but does reach that of "
            f"{against}, so mistakes stay hidden"
        )


def _has_nan(result: Tensor) -> bool:
    return result.is_floating_point() and bool(result.float().isnan().any())
