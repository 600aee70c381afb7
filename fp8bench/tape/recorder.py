"""Records the operator calls of a step with a torch dispatch mode. The calls are counted after the step, so that the
step stays fast.

A custom operator that is registered with torch is one call, whatever runs inside it. Code that calls no torch
operator is not recorded, for example a kernel that is launched directly.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from time import perf_counter
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fp8bench.model import UNATTRIBUTED
from fp8bench.numerics.operands import OperatorWatch
from fp8bench.protocols import Markers, ReportingMarker

# Namespaces of operators that do not change or read tensors.
_SILENT_NAMESPACES = ("prim", "profiler", "_c10d_functional_autograd")
_COMPOSITE_KEY = "CompositeImplicitAutograd"
_STRIDED_LAYOUT = torch.strided
_current_autograd_task = torch._C._current_graph_task_id
_NO_AUTOGRAD_TASK = -1


class RecordedTensor:
    """Where a tensor is in memory, with its shape and dtype but without its values. `is_real` is false for torch's
    fake and meta tensors, which have no memory.
    """

    __slots__ = ("accelerated", "dtype", "is_real", "offset", "shape", "storage", "stride")

    def __init__(self, tensor: Tensor) -> None:
        self.stride: tuple[int, ...] | None
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.accelerated = not tensor.is_cpu
        if tensor.layout is _STRIDED_LAYOUT:
            self.stride = tensor.stride()
            self.offset = tensor.storage_offset()
            storage = tensor.untyped_storage()
            self.storage = storage._cdata
            self.is_real = storage.device.type != "meta"
        else:  # a sparse tensor consists of several storages
            self.stride = None
            self.offset = 0
            self.storage = id(tensor)
            self.is_real = True


class Call(NamedTuple):
    """One call of an operator. `positional` and `named` are its arguments and `result` is its result. Tensors in them
    are RecordedTensor objects.
    """

    operator: Any
    phase: str
    backward: bool
    positional: tuple[Any, ...]
    named: dict[str, Any]
    result: Any


class OperatorRoute(Enum):
    """The treatment of an operator by a dispatch mode: record it, decompose it first, or run it without a record. Views
    and torch's profiler markers are not recorded.
    """

    RECORD = 0
    DECOMPOSE = 1
    SKIP = 2


def choose_operator_route(func: Any) -> OperatorRoute:
    if func.namespace in _SILENT_NAMESPACES:
        return OperatorRoute.SKIP
    if not isinstance(func, torch._ops.OpOverload):  # a higher-order operator, such as torch.cond
        return OperatorRoute.RECORD
    name = func.name()  # type: ignore[no-untyped-call]
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, _COMPOSITE_KEY):
        return OperatorRoute.DECOMPOSE
    return OperatorRoute.SKIP if is_view(func) else OperatorRoute.RECORD


def is_view(func: Any) -> bool:
    """Returns whether an operator only returns a view. torch marks `squeeze` as such an operator but not `squeeze_`,
    so this function looks up both names.
    """
    out_of_place_packet = getattr(torch.ops.aten, operator_name(func).removesuffix("_"), None)
    out_of_place_overload = getattr(out_of_place_packet, func._overloadname, None)
    return any(getattr(overload, "is_view", False) for overload in (func, out_of_place_overload))


class PhaseOperatorWatch(OperatorWatch):  # type: ignore[no-untyped-call]
    """A dispatch mode that passes each operator of a step to `run_call`, and keeps the current phase in `_phase`. The
    step enters phases by the markers in `phases`.

    Views and operators without work (such as profiler markers) are not passed on. If `watches_views` is set, operators
    that torch marks as views are passed on.
    """

    watches_views: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        # This list is not thread-local, because backward may run on another thread.
        self._open_phases = [UNATTRIBUTED]
        self._phase = UNATTRIBUTED
        # Entering `with phases.gemm` calls `enter("gemm")`. Leaving it calls `enter` with the enclosing phase.
        self.phases = Markers(lambda name: ReportingMarker(name, self._open_phases, self.enter))
        self._routes: dict[Any, OperatorRoute] = {}

    def enter(self, phase: str) -> None:
        self._phase = phase

    def watch_operator(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        operator_route = self._routes.get(func)
        if operator_route is None:
            operator_route = self._routes[func] = choose_operator_route(func)
        if operator_route is OperatorRoute.DECOMPOSE:
            # Without gradients, torch does not decompose some composite operators itself.
            with self:  # record the operators that the decomposition calls
                result = func.decompose(*args, **named)
            if result is not NotImplemented:
                return result
            # torch has no decomposition for these arguments, so treat the operator as one call.
        elif operator_route is OperatorRoute.SKIP:
            is_watched_view = self.watches_views and getattr(func, "is_view", False)
            if not is_watched_view:
                return func(*args, **named)
        return self.run_call(func, args, named)

    def run_call(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return func(*args, **named)


class OperatorTape(PhaseOperatorWatch):  # type: ignore[no-untyped-call]
    """Records every operator that runs in the `with` block, and the phase that it runs in. Also sums the seconds of
    all operators.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Called by torch. Returns False, so that this mode also records the operators inside compiled functions."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.seconds = 0.0

    def run_call(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        inputs = tuple(map(_record_tensors, args))
        named_inputs = {name: _record_tensors(argument) for name, argument in named.items()}
        call_start_time = perf_counter()
        result = func(*args, **named)
        self.seconds += perf_counter() - call_start_time
        self.calls.append(
            Call(
                func,
                self._phase,
                _current_autograd_task() != _NO_AUTOGRAD_TASK,
                inputs,
                named_inputs,
                _record_tensors(result),
            )
        )
        return result


def _record_tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        return RecordedTensor(value)
    if isinstance(value, (list, tuple)):  # a tuple is faster here than a union type
        return tuple(map(_record_tensors, value))
    return value


def iterate_tensors(value: Any) -> Iterator[RecordedTensor]:
    if isinstance(value, RecordedTensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from iterate_tensors(part)


def bind_arguments(call: Call) -> dict[str, Any]:
    """Returns a call's arguments by their names in the operator's schema. Without a schema, the names are the
    positions.
    """
    schema = getattr(call.operator, "_schema", None)
    names = (
        [argument.name for argument in schema.arguments]
        if schema is not None
        else map(str, range(len(call.positional)))
    )
    return {**dict(zip(names, call.positional, strict=False)), **call.named}


def list_written_arguments(operator: Any) -> Iterator[tuple[int, Any]]:
    """Yields the position and schema entry of each argument that an operator writes to."""
    schema = getattr(operator, "_schema", None)
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield position, argument


def get_operator_name(call: Call) -> str:
    return operator_name(call.operator)


def operator_name(operator: Any) -> str:
    """Returns an operator's name: 'mm' for one of torch's, 'fp8bench::block' with the namespace for any other."""
    operator_packet = getattr(operator, "overloadpacket", operator)
    return (
        operator_packet.__name__
        if operator.namespace == "aten"
        else f"{operator.namespace}::{operator_packet.__name__}"
    )
