"""A dispatch mode that records the operators of a step; they are counted afterwards, so that the step stays fast.

A custom operator of fp8bench is one call, however it runs, and so is any other that torch knows by name. Code that
calls no operator of torch, such as a kernel launched directly, is not visible.
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
from fp8bench.protocols import Markers, TellingMarker

# Namespaces of operators that do nothing to a tensor.
_SILENT = ("prim", "profiler", "_c10d_functional_autograd")
_COMPOSITE = "CompositeImplicitAutograd"
_STRIDED = torch.strided
_task = torch._C._current_graph_task_id
_NO_TASK = -1


class TensorSeen:
    """The location and layout of a tensor, without its numbers. One of torch's fake or meta tensors has none, and
    `is_real` is false."""

    __slots__ = ("accelerated", "dtype", "is_real", "offset", "shape", "storage", "stride")

    def __init__(self, tensor: Tensor) -> None:
        self.stride: tuple[int, ...] | None
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.accelerated = not tensor.is_cpu
        if tensor.layout is _STRIDED:
            self.stride = tensor.stride()
            self.offset = tensor.storage_offset()
            storage = tensor.untyped_storage()
            self.storage = storage._cdata
            self.is_real = storage.device.type != "meta"
        else:  # a sparse tensor has no single memory
            self.stride = None
            self.offset = 0
            self.storage = id(tensor)
            self.is_real = True


class Call(NamedTuple):
    """One call of an operator. `given` and `named` are its arguments, `result` what it returned: tensors as
    TensorSeen."""

    operator: Any
    phase: str
    backward: bool
    given: tuple[Any, ...]
    named: dict[str, Any]
    result: Any


class Route(Enum):
    """How a mode treats an operator. A SILENT one does nothing to numbers: a view, or one of torch's markers."""

    RECORDED = 0
    COMPOSITE = 1
    SILENT = 2


def route_of(func: Any) -> Route:
    if func.namespace in _SILENT:
        return Route.SILENT
    if not isinstance(func, torch._ops.OpOverload):
        return Route.RECORDED
    name = func.name()  # type: ignore[no-untyped-call]
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, _COMPOSITE):
        return Route.COMPOSITE
    return Route.SILENT if is_view(func) else Route.RECORDED


def is_view(func: Any) -> bool:
    """Whether an operator only gives another view of memory. torch declares that for `squeeze`, not for `squeeze_`."""
    packet = getattr(torch.ops.aten, operator_name(func).removesuffix("_"), None)
    return any(getattr(overload, "is_view", False) for overload in (func, getattr(packet, func._overloadname, None)))


class PhasedWatch(OperatorWatch):  # type: ignore[no-untyped-call]
    """Follows the phase of a step, and passes operators that do something to `called`; with `views`, views too."""

    views: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        # Not thread-local: backward may run on another thread.
        self._open = [UNATTRIBUTED]
        self._phase = UNATTRIBUTED
        self.phases = Markers(lambda name: TellingMarker(name, self._open, self.enter))
        self._routes: dict[Any, Route] = {}

    def enter(self, phase: str) -> None:
        self._phase = phase

    def see(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        route = self._routes.get(func)
        if route is None:
            route = self._routes[func] = route_of(func)
        if route is Route.COMPOSITE:  # without gradients some arrive undecomposed
            with self:
                result = func.decompose(*args, **named)
            if result is not NotImplemented:
                return result
        elif route is Route.SILENT and not (self.views and getattr(func, "is_view", False)):
            return func(*args, **named)
        return self.run_call(func, args, named)

    def run_call(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return func(*args, **named)


class OperatorTape(PhasedWatch):  # type: ignore[no-untyped-call]
    """Records every operator of its body with its phase, and the seconds of all."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns True, to record compiled functions as the operators that they were made of."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.seconds = 0.0

    def run_call(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        inputs = tuple(map(_note_tensors, args))
        named_inputs = {name: _note_tensors(argument) for name, argument in named.items()}
        begun = perf_counter()
        result = func(*args, **named)
        self.seconds += perf_counter() - begun
        self.calls.append(Call(func, self._phase, _task() != _NO_TASK, inputs, named_inputs, _note_tensors(result)))
        return result


def _note_tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TensorSeen(value)
    if isinstance(value, (list, tuple)):  # a union takes longer
        return tuple(map(_note_tensors, value))
    return value


def tensors_in(value: Any) -> Iterator[TensorSeen]:
    if isinstance(value, TensorSeen):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from tensors_in(part)


def arguments_of(call: Call) -> dict[str, Any]:
    """Returns a call's arguments by their names in the schema, or by position without a schema."""
    schema = getattr(call.operator, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else map(str, range(len(call.given)))
    return {**dict(zip(names, call.given, strict=False)), **call.named}


def written_by(operator: Any) -> Iterator[tuple[int, Any]]:
    """Yields the arguments that an operator writes to, with their places in its schema."""
    schema = getattr(operator, "_schema", None)
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield place, argument


def name_of(call: Call) -> str:
    return operator_name(call.operator)


def operator_name(operator: Any) -> str:
    """Returns 'mm' for an operator of torch's own, 'fp8bench::block' with its namespace for another."""
    packet = getattr(operator, "overloadpacket", operator)
    return packet.__name__ if operator.namespace == "aten" else f"{operator.namespace}::{packet.__name__}"
