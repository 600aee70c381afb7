"""Watches all switches (global settings) of the process, including those of torch. If code leaves a switch changed, the
switch is restored, and an error names it.

All cases of a group run in the same process, so a case that changes the default dtype would affect the measurements of
other cases. Random states are not watched, because a step may draw numbers. The switches of a precision are set before
watching begins and reset after it ends: otherwise the precision would restore them, and hide that a step has changed
them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

from fp8bench.errors import UsageError
from fp8bench.model import Scalar
from fp8bench.model.run import SWITCH_PREFIX, SWITCHES_SET
from fp8bench.protocols import Precision, float32_products
from fp8bench.user_code.switches import Switch, Unset, list_process_switches, make_plain, read_values, restore_values

_MAX_NAMED_SWITCHES = 8


class SwitchesChanged(RuntimeError):
    """A workload left a switch of the process changed."""


@contextlib.contextmanager
def restore_switches(known_values: Sequence[Any] | None = None) -> Iterator[Sequence[Any]]:
    """Restores the switches (global settings) that the `with` block leaves changed. If there are any, raises
    SwitchesChanged, unless the block itself raises an error.

    Yields the switches' values before the block. The next call under the same precision may pass them as
    `known_values`, so that they need not be read again.
    """
    old_switch_values = read_values(switches()) if known_values is None else known_values
    try:
        yield old_switch_values
    except BaseException:
        restore_values(switches(), old_switch_values)
        raise
    changed_switches = restore_values(switches(), old_switch_values)
    if changed_switches:
        raise SwitchesChanged(
            f"it left {', '.join(changed_switches)}: other cases run in the same process. "
            "Restore switches in a finally block."
        )


@contextlib.contextmanager
def precision_scope(precision: Precision) -> Iterator[None]:
    """Sets the switches of a precision within the `with` block. A precision must restore the switches that it sets.
    This function checks this for a user's precision; tests check it for fp8bench's precisions.
    """
    is_fp8bench = type(precision).__module__.startswith("fp8bench.")
    with contextlib.nullcontext() if is_fp8bench else restore_switches(), precision.scope():
        yield


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Turns automatic garbage collection off, so that tensors in reference cycles are freed at a defined time."""
    was_gc_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_gc_enabled:
            gc.enable()


@functools.cache
def switches() -> tuple[Switch, ...]:
    from fp8bench.worker.torch_switches import list_torch_switches

    return (
        *list_torch_switches(),
        *list_process_switches(),
        Switch(_FP8BENCH_FUNCTIONS_TEXT, watch_measuring_functions(), None, usual=()),
    )


_FP8BENCH_FUNCTIONS_TEXT = "fp8bench's own functions"
# Prefixes of the fp8bench modules that time or inspect steps.
_MEASURING_MODULES = tuple(
    f"fp8bench.{room}"
    for room in ("devices.", "numerics.operands", "protocols.measuring", "tape.", "user_code.switches", "worker.")
)


def watch_measuring_functions() -> Callable[[], tuple[str, ...]]:
    """Remembers the functions of fp8bench that measure steps. Returns a function that names those that were replaced
    since then. A step that replaces such a function could falsify its measured time or the inspection of the step.
    """
    function_bindings: list[tuple[dict[str, Any], str]] = []
    for name, module in list(sys.modules.items()):
        # List the functions before any step runs, so that functions that a step adds to these modules are not listed.
        if name.startswith(_MEASURING_MODULES):
            module_classes = [kind for kind in vars(module).values() if getattr(kind, "__module__", "") == name]
            for function_owner in (module, *module_classes):
                names: Any = getattr(function_owner, "__dict__", {})
                # A copy, because another thread may add a name.
                for word, value in list(names.items()):
                    if type(value) is FunctionType:
                        function_bindings.append((names, word))
    measuring_functions: list[Any] = [names[name] for names, name in function_bindings]
    function_codes = [function.__code__ for function in measuring_functions]

    def list_replacements() -> tuple[str, ...]:
        # Every step takes this path. It is fast, because it computes no names.
        current_functions: list[Any] = [names.get(name) for names, name in function_bindings]
        if (
            current_functions == measuring_functions
            and [function.__code__ for function in measuring_functions] == function_codes
        ):
            return ()
        function_code_pairs = zip(measuring_functions, function_codes, current_functions, strict=True)
        return tuple(
            f"{function.__module__}.{function.__qualname__}"
            for function, code, current in function_code_pairs
            if current is not function or function.__code__ is not code
        )

    return list_replacements


@functools.cache
def get_arithmetic_switches() -> tuple[Switch, ...]:
    from fp8bench.worker.torch_switches import list_arithmetic_switches

    return tuple(list_arithmetic_switches())


def read_recorded_switches() -> dict[str, Scalar | None]:
    """Returns the value of each switch that is stored with a run. The additional entry SWITCHES_SET describes the
    switches whose value differs from their value in a new process. It is None if no value differs.
    """
    values = {switch: make_plain(switch.read()) for switch in switches() if switch.is_recorded}
    unusual_switch_texts = [
        f"{switch.name} at {value} (usually {make_plain(switch.usual)})"
        for switch, value in values.items()
        if switch.usual is not Unset and value != make_plain(switch.usual)
    ]
    switch_facts = {f"{SWITCH_PREFIX}{switch.name}": value for switch, value in values.items()}
    return {**switch_facts, SWITCHES_SET: "; ".join(unusual_switch_texts) or None}


def refuse_distorted_reference() -> None:
    """Raises UsageError if a switch is set that would distort the reference in this process."""
    values = {switch: switch.read() for switch in switches()}
    with contextlib.ExitStack() as scope:
        if "mixed" not in values.values():
            scope.enter_context(float32_products("highest"))  # the reference's precision sets this as well
            values = {switch: switch.read() for switch in switches()}
    distorting_switch_values = [
        (switch, value)
        for switch, value in values.items()
        if switch.is_distorting is not None and switch.is_distorting(value)
    ]
    if not distorting_switch_values:
        return
    distorting_switch_texts = [
        f"{switch.name} at {make_plain(value)!s:.100} (expected {switch.expected or make_plain(switch.usual)})"
        for switch, value in distorting_switch_values[:_MAX_NAMED_SWITCHES]
    ]
    further_count_texts = (
        [f"{len(distorting_switch_values) - _MAX_NAMED_SWITCHES} more"]
        if len(distorting_switch_values) > _MAX_NAMED_SWITCHES
        else []
    )
    switch_corrections = dict.fromkeys(
        switch.restore_instruction for switch, _ in distorting_switch_values[:_MAX_NAMED_SWITCHES]
    )
    raise UsageError(
        f"the process that is to measure has {'; '.join([*distorting_switch_texts, *further_count_texts])}, "
        "which would distort the reference. "
        f"Correct that first ({'; '.join(switch_corrections)}), or measure in a separate process (isolation)."
    )
