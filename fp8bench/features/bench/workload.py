"""One call of a callable as a workload. Each callable is a case, named like a precision: `mine.py:gelu`, `torch:relu`.

Importing this module registers both. A run lists it among its imports, so that its workers import it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fp8bench.features.bench.values import AGAINST, DTYPE, DTYPES, INPUTS, SHAPE, parse_shapes, show_shapes
from fp8bench.formats.hardware import native, refused
from fp8bench.model import DeviceFacts, Params, Scalars, Support, Work
from fp8bench.model.run import BENCH
from fp8bench.model.specs import DIFFERENCE_ERROR, OUTPUT_ERROR
from fp8bench.nn.shared_precisions import PlainPrecision
from fp8bench.protocols import Phases, Precision, Setup, Workload
from fp8bench.protocols.axes import Axis, one_of
from fp8bench.registry import precisions, workloads
from fp8bench.user_code.named import named

if TYPE_CHECKING:
    from fp8bench.features.bench.calls import CallInputs


def _shapes(text: str) -> str:
    return show_shapes(parse_shapes(text)) if text else ""


class CallablePrecision(PlainPrecision):
    """Represents a callable in place of a case's precision: its mode is the callable's name."""

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
        """Returns refused; only the workload `bench` overrides that."""
        return refused("a callable is compared by `fp8bench bench` alone")

    @contextmanager
    def scope(self) -> Iterator[None]:
        yield


def precision_of(word: str) -> CallablePrecision | None:
    """Returns a callable's precision; None for other names, such as `fp8-delayed:history=16`."""
    place, colon, name = word.rpartition(":")
    is_place = place.endswith(".py") or _is_dotted(place)
    is_callable = colon and is_place and _is_dotted(name) and place not in precisions.names(hidden=True)
    return CallablePrecision(word) if is_callable else None


def _is_dotted(name: str) -> bool:
    return name.replace(".", "_").isidentifier()


precisions.add_maker(precision_of)


@workloads.register(BENCH)
class Callables(Workload):
    """Calls a callable on the same inputs as every other callable of its group."""

    name = BENCH
    summary = "calls of your callables and a reference on the same inputs (fp8bench bench)"
    listed = False
    examined = True
    fused = False
    may_diverge = True

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        return (
            Axis(SHAPE, "shapes of the inputs that are drawn, with commas between", ("",), _shapes),
            Axis(DTYPE, "dtype of the inputs that are drawn", ("fp32",), one_of(*DTYPES)),
            Axis(INPUTS, "function of device and seed that returns the inputs, or a file of tensors", ("",), str),
            Axis(AGAINST, "the reference", ("",), str),
        )

    def expand(self, params: Scalars) -> tuple[Params, ...]:
        unused = (SHAPE, DTYPE) if params[INPUTS] else (INPUTS,)
        return (tuple(pair for pair in params.items() if pair[0] not in unused),)

    def work(self, params: Scalars) -> Work:
        """Declares no FLOPs; the tape counts them."""
        return Work()

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        return native("a callable, unchanged")

    def examine(self, setup: Setup) -> Sequence[str]:
        from fp8bench.features.bench.checks import examine

        return examine(setup, setup.case.precision, str(setup.params[AGAINST]))

    def prepare(self, setup: Setup) -> tuple[Callable[..., Any], CallInputs]:
        from fp8bench.features.bench.calls import make_inputs

        return named(setup.case.precision), make_inputs(setup)

    def step(self, state: Any, phase: Phases) -> object:  # type: ignore[override]
        function, inputs = state
        return function(*inputs.places, **inputs.names)

    def error(self, setup: Setup) -> dict[str, float]:
        """Compares the results with the reference's: in float64 from the same inputs, if it can compute in that, and
        with its usual ones."""
        from fp8bench.features.bench.calls import call, difference, exact_results, make_inputs

        against = str(setup.params[AGAINST])
        results = call(setup.case.precision, make_inputs(setup))

        def make_exact() -> Any:
            return exact_results(against, make_inputs(setup), setup.seed)

        exact = setup.shared(make_exact) if setup.shared is not None else make_exact()
        errors = {} if exact is None else {OUTPUT_ERROR: difference(results, exact)}
        if setup.case.precision != against:
            errors[DIFFERENCE_ERROR] = difference(results, call(against, make_inputs(setup)))
        return errors
