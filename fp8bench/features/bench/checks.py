"""Quick checks of a callable before it is timed: whether its time and its results are meaningful.

They are not an audit: a callable that detects them can deceive them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from torch import Tensor

from fp8bench import units
from fp8bench.errors import UsageError
from fp8bench.features.bench.calls import CallInputs, call, describe, difference, draw_inputs, make_inputs
from fp8bench.features.bench.values import DTYPE, INPUTS, SHAPE, parse_shapes, show_shapes
from fp8bench.protocols import Setup
from fp8bench.worker.bits import other_numbers
from fp8bench.worker.state_tensors import address_of, is_foreign

# Results of different inputs differ by more than this; results of the same inputs at a different address, summed in a
# different order, by less.
_STALE = 0.01
# At another shape errors may be this many times those at the first one, or this large.
_TIMES_AS_FAR, _FAR = 10.0, 0.01


def examine(setup: Setup, target: str, against: str) -> list[str]:
    """Returns remarks on a callable for the reader; raises UsageError if it cannot be compared."""
    inputs = make_inputs(setup)
    if target == against:
        if not _is_same(inputs.tensors, make_inputs(setup).tensors):
            raise UsageError(
                f"{setup.params[INPUTS]} gives other inputs when it is called again with the same seed, so that "
                "callables would get different ones. Draw them by torch, random or numpy.random, which are seeded."
            )
        return [*_differs_from_itself(setup, target, call(target, inputs))]
    wanted, results = call(against, inputs), call(target, inputs)
    _check_alike(target, results, against, wanted)
    _check_fresh(target, inputs, results, against, wanted)
    return [
        *_differs_from_itself(setup, target, results),
        *_at_half_the_shape(setup, target, against, difference(results, wanted)),
        *_hides_nan(setup, target, against),
    ]


def _kinds(tensors: Sequence[Tensor]) -> list[tuple[object, ...]]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def _check_alike(target: str, results: Sequence[Tensor], against: str, wanted: Sequence[Tensor]) -> None:
    if _kinds(results) != _kinds(wanted):
        raise UsageError(
            f"{target} returns {describe(results)}, and {against} {describe(wanted)}: they do not do the same work. "
            "Wrap one of the two in a function that returns the other's shapes and dtypes."
        )
    if math.isinf(difference(results, wanted)):
        raise UsageError(
            f"{target} returns NaN, infinities or an error too large for a number where {against} does not, or the "
            "other way round. Mend it, or give inputs that both can take."
        )


def _check_fresh(
    target: str, inputs: CallInputs, results: Sequence[Tensor], against: str, wanted: Sequence[Tensor]
) -> None:
    """Overwrites the same memory with other numbers, bypassing torch's version counters, so that results cached by
    address or version become stale. Raises UsageError for stale results."""
    own = {address_of(tensor): tensor for tensor in inputs.tensors if not is_foreign(tensor)}
    try:
        with ExitStack() as others:
            for seed, tensor in enumerate(own.values()):
                others.enter_context(other_numbers(tensor, seed))
            in_place, copies = call(target, inputs), inputs.changed(lambda tensor: tensor.detach().clone())
            elsewhere, again, wanted_elsewhere = (call(name, copies) for name in (target, target, against))
    except UsageError:  # it may need special numbers, like a factorisation
        return
    if not _kinds(in_place) == _kinds(elsewhere) == _kinds(again):  # the shape depends on the numbers
        return
    if difference(in_place, elsewhere) > max(_STALE, 2 * difference(again, elsewhere)):  # more than it draws by chance
        raise UsageError(
            f"{target} remembers earlier inputs: it returns old results for new numbers in the same memory, "
            "so repeated calls would do less work. Remove its cache."
        )
    if _is_same(elsewhere, results) and not _is_same(wanted_elsewhere, wanted):
        raise UsageError(
            f"{target} returns the same results for different inputs, but {against} does not. Let it compute them "
            "from its inputs."
        )


def _is_same(results: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return _kinds(results) == _kinds(others) and difference(results, others) == 0


def _differs_from_itself(setup: Setup, target: str, results: Sequence[Tensor]) -> Iterator[str]:
    again = call(target, make_inputs(setup))
    if not _is_same(again, results):
        alike = _kinds(again) == _kinds(results)
        apart = f"by {units.relative_error(difference(again, results))}" if alike else "in shape"
        yield f"{target} differs from itself {apart} when it is called again with equal inputs"


def _at_half_the_shape(setup: Setup, target: str, against: str, apart: float) -> Iterator[str]:
    """Remarks on a callable that fails, or is wrong, if each even size is halved and the reference still works."""
    if SHAPE not in setup.params:
        return
    halves = list(map(_halve_even_sides, parse_shapes(str(setup.params[SHAPE]))))
    inputs = draw_inputs(halves, str(setup.params[DTYPE]), setup.facts.key, setup.seed)
    where, (wanted, results) = f"at {show_shapes(halves)}", _results_of(inputs, against, target)
    if isinstance(results, str):
        yield f"{where} {against} works, and {results}"
    elif _kinds(results) != _kinds(wanted):
        yield f"{where} {target} returns {describe(results)}, and {against} {describe(wanted)}"
    elif wanted and (further := difference(results, wanted)) > max(_FAR, _TIMES_AS_FAR * apart):
        yield f"{where} {target} is {units.relative_error(further)} from {against}: it is wrong at other shapes"


def _halve_even_sides(shape: Sequence[int]) -> list[int]:
    return [side // 2 if side % 2 == 0 else side for side in shape]


def _results_of(inputs: CallInputs, against: str, target: str) -> tuple[list[Tensor], list[Tensor] | str]:
    """Returns the results of a reference and a callable, or what the callable raises; empty for both if the reference
    raises."""
    try:
        wanted = call(against, inputs)
    except UsageError:
        return [], []
    try:
        return wanted, call(target, inputs)
    except UsageError as error:
        return wanted, str(error)


def _hides_nan(setup: Setup, target: str, against: str) -> Iterator[str]:
    """Remarks on a callable whose results are finite although a NaN in an input reaches the reference's results."""
    inputs = make_inputs(setup)
    floating = [tensor.detach() for tensor in inputs.tensors if tensor.is_floating_point() and tensor.numel()]
    for first in floating[:1]:
        first[(0,) * first.dim()] = math.nan
    wanted, results = _results_of(inputs, against, target)
    if isinstance(results, str):
        yield f"with a NaN in its input {results}"
    elif any(map(_has_nan, wanted)) and not any(map(_has_nan, results)):
        yield f"a NaN in the input does not reach the result of {target}, as it does with {against}: it hides mistakes"


def _has_nan(result: Tensor) -> bool:
    return result.is_floating_point() and bool(result.float().isnan().any())
