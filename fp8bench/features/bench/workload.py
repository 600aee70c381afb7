"""Measures calls of a callable as a workload.

Each callable is a case. In place of a precision, the case has the callable's name, such as `mine.py:gelu` or
`torch:relu`. Importing this module registers the workload and this kind of precision. A run lists the module among its
imports, so that workers import it as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fp8bench.features.bench.values import AGAINST, DTYPE, DTYPES, INPUTS, SHAPE, format_shapes, parse_shapes
from fp8bench.formats.hardware import native, refused
from fp8bench.model import DeviceFacts, Params, Scalars, Support, Work
from fp8bench.model.run import BENCH
from fp8bench.model.specs import BEYOND_ROUNDING_ERROR, DIFFERENCE_ERROR, OUTPUT_ERROR
from fp8bench.nn.shared_precisions import PlainPrecision
from fp8bench.protocols import Phases, Precision, Setup, Workload
from fp8bench.protocols.axes import Axis, one_of
from fp8bench.registry import precisions, workloads
from fp8bench.user_code.named import named

if TYPE_CHECKING:
    from fp8bench.features.bench.calls import CallInputs


def _normalize_shapes(text: str) -> str:
    return format_shapes(parse_shapes(text)) if text else ""


class CallablePrecision(PlainPrecision):
    """Takes the place of a precision in cases that compare callables. The mode of such a case names its callable."""

    name = "callable"
    summary = "An unchanged callable, in the dtypes and switches that it sets."
    rank = 0
    dtype = "float32"
    listed = False

    def __init__(self, target: str) -> None:
        super().__init__()
        self._target = target

    @property
    def plain_mode(self) -> str:
        return self._target

    def support(self, facts: DeviceFacts) -> Support:
        """Refuses all workloads. `bench` does not ask: its `support` accepts every callable."""
        return refused("only `fp8bench bench` compares callables")

    @contextmanager
    def scope(self) -> Iterator[None]:
        yield


def find_callable_precision(word: str) -> CallablePrecision | None:
    """Returns the precision that stands for a callable, or None for another name such as `fp8-delayed:history=16`."""
    place, colon, name = word.rpartition(":")
    has_module = place.endswith(".py") or _is_dotted(place)
    is_callable = colon and has_module and _is_dotted(name) and place not in precisions.names(hidden=True)
    return CallablePrecision(word) if is_callable else None


def _is_dotted(name: str) -> bool:
    return name.replace(".", "_").isidentifier()


precisions.add_precision_maker(find_callable_precision)


@workloads.register(BENCH)
class CallableWorkload(Workload):
    """A workload whose step calls a callable. All callables of a group get the same inputs."""

    name = BENCH
    summary = "calls of your callables and a reference on the same inputs (fp8bench bench)"
    listed = False
    examined = True
    fused = False
    may_diverge = True

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        return (
            Axis(SHAPE, "shapes of random inputs, separated by commas", ("",), _normalize_shapes),
            Axis(DTYPE, "dtype of random inputs", ("fp32",), one_of(*DTYPES)),
            Axis(INPUTS, "function of device and seed that returns the inputs, or a file of tensors", ("",), str),
            Axis(AGAINST, "the reference", ("",), str),
        )

    def expand(self, params: Scalars) -> tuple[Params, ...]:
        unused_axes = (SHAPE, DTYPE) if params[INPUTS] else (INPUTS,)
        return (tuple(pair for pair in params.items() if pair[0] not in unused_axes),)

    def work(self, params: Scalars) -> Work:
        """Declares no FLOPs. They are counted while the callable runs."""
        return Work()

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        return native("the callable runs unchanged")

    def examine(self, setup: Setup) -> Sequence[str]:
        from fp8bench.features.bench.checks import examine_callable

        return examine_callable(setup, setup.case.precision, str(setup.params[AGAINST]))

    def prepare(self, setup: Setup) -> tuple[Callable[..., Any], CallInputs]:
        from fp8bench.features.bench.calls import make_inputs

        return named(setup.case.precision), make_inputs(setup)

    def step(self, state: Any, phase: Phases) -> object:  # type: ignore[override]
        function, inputs = state
        return function(*inputs.positional_arguments, **inputs.keyword_arguments)

    def error(self, setup: Setup) -> dict[str, float]:
        """Measures how far the results are from the reference's results. If the reference can compute in float64, also
        measures how far they are from its float64 results. A difference from the reference that rounding does not
        explain is also reported as BEYOND_ROUNDING_ERROR.
        """
        from fp8bench.features.bench.calls import (
            compute_exact_results,
            exceeds_rounding,
            find_magnified_rounding,
            make_inputs,
            measure_difference,
            run_callable,
        )

        against = str(setup.params[AGAINST])
        results = run_callable(setup.case.precision, make_inputs(setup))

        def compute_exact_reference() -> Any:
            return compute_exact_results(against, make_inputs(setup), setup.seed)

        exact_results = compute_exact_reference() if setup.shared is None else setup.shared(compute_exact_reference)
        errors = {} if exact_results is None else {OUTPUT_ERROR: measure_difference(results, exact_results)}
        if setup.case.precision != against:
            expected_results = run_callable(against, make_inputs(setup))
            errors[DIFFERENCE_ERROR] = measure_difference(results, expected_results)
            exceeds_rounding_by_result = list(map(exceeds_rounding, results, expected_results))
            if any(exceeds_rounding_by_result):
                # If a callable draws random numbers, its results differ from call to call.
                repeated_results = [run_callable(name, make_inputs(setup)) for name in (setup.case.precision, against)]
                draws_random_numbers = any(
                    map(exceeds_rounding, [*results, *expected_results], [*repeated_results[0], *repeated_results[1]])
                )
                magnified_rounding_by_result = find_magnified_rounding(against, make_inputs(setup), expected_results)
                unexplained_by_result = [
                    a and not b for a, b in zip(exceeds_rounding_by_result, magnified_rounding_by_result, strict=True)
                ]
                if any(unexplained_by_result) and not draws_random_numbers:
                    errors[BEYOND_ROUNDING_ERROR] = errors[DIFFERENCE_ERROR]
        return errors
