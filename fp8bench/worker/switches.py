"""Watches all switches of the process, including torch's: those that a body leaves changed are restored and named.

All cases of a group share a process; a case that leaves the default dtype changed would affect the measurements of the
others. Random states are not watched: a step may draw numbers. A precision's switches are set outside the watch,
because restoring them would hide that a step had changed them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fp8bench.errors import UsageError
from fp8bench.model import Scalar
from fp8bench.model.run import SWITCH, SWITCHES_SET
from fp8bench.protocols import Precision, float32_products
from fp8bench.user_code.switches import Switch, Unset, plain, process_switches, put_back, values_of

_MOST_NAMED = 8


class SwitchesChanged(RuntimeError):
    """A workload left a switch of the process changed."""


@contextlib.contextmanager
def restore_switches(known_values: Sequence[Any] | None = None) -> Iterator[Sequence[Any]]:
    """Restores the switches that the body leaves changed; raises SwitchesChanged unless the body itself raised. Yields
    the values before the body. Another body under the same precision may get them as `known_values`, which saves
    reading them."""
    old_values = values_of(switches()) if known_values is None else known_values
    try:
        yield old_values
    except BaseException:
        put_back(switches(), old_values)
        raise
    changed = put_back(switches(), old_values)
    if changed:
        raise SwitchesChanged(
            f"it left {', '.join(changed)}: other cases run in the same process. Restore switches in a finally block."
        )


@contextlib.contextmanager
def under(precision: Precision) -> Iterator[None]:
    """Enters a precision's scope. Checks that a user's precision restores what it sets; fp8bench's have tests."""
    is_fp8bench = type(precision).__module__.startswith("fp8bench.")
    with contextlib.nullcontext() if is_fp8bench else restore_switches(), precision.scope():
        yield


@contextlib.contextmanager
def collected_by_hand() -> Iterator[None]:
    """Disables automatic garbage collection, so that tensors in cycles are freed at a defined time."""
    gc_was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc_was_on:
            gc.enable()


@functools.cache
def switches() -> tuple[Switch, ...]:
    from fp8bench.worker.torch_switches import torch_switches

    return (*torch_switches(), *process_switches(), Switch(_OWN_CODE, own_code(), None, usual=()))


_OWN_CODE = "fp8bench's own functions"
# Modules that time steps, and that inspect them.
_MEASURING = tuple(
    f"fp8bench.{room}"
    for room in ("devices.", "numerics.operands", "protocols.measuring", "tape.", "user_code.switches", "worker.")
)


def own_code() -> Callable[[], tuple[str, ...]]:
    """Returns a function that names measuring functions that were replaced since this call. A step that replaces one of
    them changes its time, or what is observed of it."""
    places: list[tuple[dict[str, Any], str]] = []
    for name, module in list(sys.modules.items()):
        # Places are listed once: what a step adds to a module later is not ours.
        if name.startswith(_MEASURING):
            kinds = [kind for kind in vars(module).values() if getattr(kind, "__module__", "") == name]
            for holder in (module, *kinds):
                places += _functions_of(holder)
    functions: list[Any] = [names[name] for names, name in places]
    codes = [function.__code__ for function in functions]

    def find_replaced() -> tuple[str, ...]:
        # The fast path, which every step takes: no names are computed.
        now: list[Any] = [names.get(name) for names, name in places]
        if now == functions and [function.__code__ for function in functions] == codes:
            return ()
        functions_now = zip(functions, codes, now, strict=True)
        return tuple(
            f"{function.__module__}.{function.__qualname__}"
            for function, code, current in functions_now
            if current is not function or function.__code__ is not code
        )

    return find_replaced


def _functions_of(holder: Any) -> Iterator[tuple[dict[str, Any], str]]:
    names: Any = getattr(holder, "__dict__", {})
    for name, value in list(names.items()):
        if isinstance(value, types.FunctionType):
            yield names, name


@functools.cache
def arithmetic_switches() -> tuple[Switch, ...]:
    from fp8bench.worker.torch_switches import switches_of_arithmetic

    return tuple(switches_of_arithmetic())


def recorded_values() -> dict[str, Scalar | None]:
    """Returns the values of all recorded switches, and one text of those that differ from a new process, or None."""
    values = {switch: plain(switch.read()) for switch in switches() if switch.recorded}
    unusual = [
        f"{switch.name} at {value} (usually {plain(switch.usual)})"
        for switch, value in values.items()
        if switch.usual is not Unset and value != plain(switch.usual)
    ]
    facts = {f"{SWITCH}{switch.name}": value for switch, value in values.items()}
    return {**facts, SWITCHES_SET: "; ".join(unusual) or None}


def refuse_distorted_reference() -> None:
    """Raises UsageError if a switch is set that would distort the reference in this process."""
    values = {switch: switch.read() for switch in switches()}
    with contextlib.ExitStack() as scope:
        if "mixed" not in values.values():
            scope.enter_context(float32_products("highest"))  # as the reference's scope sets them
            values = {switch: switch.read() for switch in switches()}
    wrong = [(switch, value) for switch, value in values.items() if switch.bends is not None and switch.bends(value)]
    if not wrong:
        return
    words = [
        f"{switch.name} at {plain(value)!s:.100} (expected {switch.wanted or plain(switch.usual)})"
        for switch, value in wrong[:_MOST_NAMED]
    ]
    remaining = [f"{len(wrong) - _MOST_NAMED} more"] if len(wrong) > _MOST_NAMED else []
    mends = dict.fromkeys(switch.mend for switch, _ in wrong[:_MOST_NAMED])
    raise UsageError(
        f"the process that is to measure has {'; '.join([*words, *remaining])}, "
        "which would distort the reference. "
        f"Correct that first ({'; '.join(mends)}), or measure in a separate process (isolation)."
    )
