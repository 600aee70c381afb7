"""Lists the switches (global settings) of the process that a case, or the import of a file, could leave changed for
later code.

These switches belong to the interpreter, to the operating system or to the C library, and do not need torch. The
switches of torch are in worker/torch_switches.py.
"""

from __future__ import annotations

import contextlib
import enum
import gc
import os
import signal
import sys
import time
import tracemalloc
import types
from _signal import getsignal as raw_handler  # type: ignore[import-not-found]
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from fp8bench.model import Scalar
from fp8bench.model.run import PRECISION_LOWERING_VARIABLES, TORCH_VARIABLES


class Unset:
    """Stands for the usual value of a switch if it depends on the machine or the user. Not equal to any value."""


class UnusedLibraryValue:
    """Stands for the value of a switch whose library is not in use. Reading the real value would initialise the
    library.
    """


@dataclass(frozen=True, eq=False)
class Switch:
    """A switch: a global setting of the process. `set_value` is None if the switch ends with an object (such as a
    profiler) and cannot be set.

    `names` are torch's public names that set a switch of torch; other switches have none. `usual` is the value in a new
    process. `is_distorting` returns whether a value distorts the reference. If so, fp8bench refuses to measure; the
    error names the expected value (`expected`, by default `usual`) and how to restore it (`restore_instruction`).
    `is_recorded` switches are stored with each run. Importing harmless packages may change a switch with
    `is_set_by_imports`, so it is watched only around steps.
    """

    name: str
    read: Callable[[], Any]
    set_value: Callable[[Any], object] | None
    names: tuple[str, ...] = ()
    usual: Any = Unset
    is_distorting: Callable[[Any], object] | None = None
    is_recorded: bool = True
    is_set_by_imports: bool = False
    expected: str = ""
    restore_instruction: str = ""


def make_attribute_switch(name: str, holder: Any, attribute: str, **more: Any) -> Switch:
    return Switch(name, partial(getattr, holder, attribute), lambda value: setattr(holder, attribute, value), **more)


def read_values(switches: Iterable[Switch]) -> tuple[Any, ...]:
    return tuple(switch.read() for switch in switches)


def restore_values(switches: Sequence[Switch], before: Sequence[Any]) -> list[str]:
    """Sets switches to their values `before`. Describes each switch that had a different value: both values, and
    whether restoring failed.
    """
    current_switch_values = read_values(switches)
    if current_switch_values == before:
        return []
    switches_with_values = zip(switches, before, current_switch_values, strict=True)
    # Ignore switches whose old value is UnusedLibraryValue: the first use of a library is not a change.
    comparable_switches = [
        (switch, old, new) for switch, old, new in switches_with_values if old is not UnusedLibraryValue
    ]
    # read each switch again, because writing an older switch of torch sets several newer ones
    for switch, old, _ in comparable_switches:
        if switch.set_value is not None and switch.read() != old:
            # Restoring may fail: a folder may not exist any more, a signal's handler may be in C, and torch refuses
            # mixed settings of products.
            with contextlib.suppress(OSError, ValueError, TypeError, RuntimeError):
                switch.set_value(old)
    return [
        f"{switch.name} at {make_plain(new)!s:.200} (it was {make_plain(old)!s:.200}"
        f"{', and cannot be put back' if switch.read() != old else ''})"
        for switch, old, new in comparable_switches
        if old != new
    ]


def make_plain(value: Any) -> Scalar | None:
    match value:
        case enum.Enum():
            return value.name
        case _ if value is UnusedLibraryValue:
            return None
        case None | bool() | int() | float() | str():
            return value
        case set() | frozenset():
            return ", ".join(sorted(map(str, value)))
        case dict():
            return ", ".join(f"{name}={item}" for name, item in value.items()) or "none"
        case tuple() | list():
            return ", ".join(str(make_plain(item)) for item in value) or "none"
    name = getattr(value, "__qualname__", None)
    return f"{value.__module__}.{name}" if name is not None else str(value)


# The bytes that os.environ stores. They are read around every slot, and reading them directly takes a fiftieth of the
# time.
_ENVIRONMENT_BYTES: dict[bytes, bytes] = os.environb._data  # type: ignore[attr-defined]
_WATCHED_VARIABLES = frozenset(map(os.fsencode, TORCH_VARIABLES))
_PRECISION_LOWERING_NAMES = frozenset(PRECISION_LOWERING_VARIABLES)
# If one of these variables is set, OpenMP binds the thread to processors when its first loop runs.
_THREAD_BINDING_VARIABLES = {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"}
_CLOCK_NAMES = (
    "perf_counter",
    "perf_counter_ns",
    "monotonic",
    "monotonic_ns",
    "process_time",
    "process_time_ns",
    "thread_time",
    "thread_time_ns",
    "time",
    "time_ns",
    "sleep",
)
_HANDLED_SIGNALS = tuple(
    signal.Signals[f"SIG{name}"] for name in ("INT", "TERM", "HUP", "ALRM", "VTALRM", "PROF", "USR1", "USR2")
)
_SPECIAL_SIGNAL_HANDLERS = {handler.value: handler for handler in signal.Handlers}
_TIMERS_BY_KIND = {"real": signal.ITIMER_REAL, "virtual": signal.ITIMER_VIRTUAL, "profiling": signal.ITIMER_PROF}


@cache
def list_process_switches() -> tuple[Switch, ...]:
    return (
        *_list_interpreter_switches(),
        *_list_system_switches(),
        *_list_c_library_switches(),
        *_list_clock_and_signal_switches(),
    )


def _list_interpreter_switches() -> Iterator[Switch]:
    yield Switch("the working directory", _read_working_directory, os.chdir, is_recorded=False)
    yield Switch("garbage collection", gc.isenabled, lambda on: gc.enable() if on else gc.disable(), usual=True)
    yield Switch("the thresholds of garbage collection", gc.get_threshold, lambda old: gc.set_threshold(*old))
    yield Switch("the tracer", sys.gettrace, sys.settrace, usual=None)
    yield Switch("the profiler of calls", sys.getprofile, sys.setprofile, usual=None)
    yield Switch(
        "tracing of allocations",
        tracemalloc.is_tracing,
        lambda on: tracemalloc.start() if on else tracemalloc.stop(),
        usual=False,
    )
    yield Switch("the interpreter's switch interval", sys.getswitchinterval, sys.setswitchinterval, usual=0.005)


def _list_system_switches() -> Iterator[Switch]:
    thread_binding_variables = _THREAD_BINDING_VARIABLES & os.environ.keys()
    if hasattr(os, "sched_getaffinity") and not thread_binding_variables:
        yield Switch("the processors", partial(os.sched_getaffinity, 0), partial(os.sched_setaffinity, 0))
    yield Switch("niceness", partial(os.getpriority, os.PRIO_PROCESS, 0), partial(os.setpriority, os.PRIO_PROCESS, 0))
    if hasattr(os, "sched_getscheduler"):
        yield Switch(
            "the scheduling policy",
            partial(os.sched_getscheduler, 0),
            lambda policy: os.sched_setscheduler(0, policy, os.sched_param(0)),
        )
    yield Switch(
        "the environment",
        _read_environment,
        _set_environment,
        is_recorded=False,
        is_distorting=_has_precision_lowering_variable,
        expected="none of " + " and ".join(sorted(_PRECISION_LOWERING_NAMES)),
        restore_instruction="unset it, and start Python again",
    )


def _list_clock_and_signal_switches() -> Iterator[Switch]:
    for name in _CLOCK_NAMES:
        # `usual` is the text by which `make_plain` replaces the original clock. `read_recorded_switches` compares such
        # texts.
        yield make_attribute_switch(
            f"time.{name}",
            time,
            name,
            usual=f"time.{name}",
            is_distorting=partial(_is_replaced_clock, name),
            restore_instruction="end what replaces the clocks of this process",
        )
    for signal_number in _HANDLED_SIGNALS:
        yield Switch(
            f"the handler of {signal_number.name}",
            partial(_get_signal_handler, signal_number),
            partial(signal.signal, signal_number),
            is_set_by_imports=True,
        )
    # A timer that was started is stopped again. A timer that has ended cannot be started again.
    for kind, timer in _TIMERS_BY_KIND.items():
        yield Switch(f"the {kind} timer", partial(_is_timer_running, timer), partial(_stop_timer, timer), usual=False)


def _list_c_library_switches() -> Iterator[Switch]:
    import ctypes

    library = ctypes.CDLL(None)
    if hasattr(library, "fegetround"):
        yield Switch(
            "the rounding of floats",
            library.fegetround,
            library.fesetround,
            usual=0,  # FE_TONEAREST
            is_distorting=bool,
            restore_instruction="call fesetround(FE_TONEAREST)",
        )


def _is_replaced_clock(name: str, clock: Any) -> bool:
    """Returns whether a clock of the module `time` was replaced.

    The clock is compared with the expected name and type, because it may have been replaced before fp8bench was
    imported.
    """
    is_builtin_clock = isinstance(clock, types.BuiltinFunctionType) and clock.__module__ == "time"
    return not is_builtin_clock or clock.__name__ != name


def _get_signal_handler(number: int) -> Any:
    """Returns the handler of a signal, as signal.getsignal does. It is ten times as fast, because it does not convert
    handlers to enumerators first.
    """
    signal_handler = raw_handler(number)
    return _SPECIAL_SIGNAL_HANDLERS[signal_handler] if type(signal_handler) is int else signal_handler


def _is_timer_running(timer: int) -> bool:
    return any(signal.getitimer(timer))


def _stop_timer(timer: int, was_running: bool) -> None:
    if not was_running:
        signal.setitimer(timer, 0)


def _read_environment() -> dict[str, str]:
    present_variable_names = sorted(_WATCHED_VARIABLES.intersection(_ENVIRONMENT_BYTES))
    return {os.fsdecode(name): os.fsdecode(_ENVIRONMENT_BYTES[name]) for name in present_variable_names}


def _has_precision_lowering_variable(environment: dict[str, str]) -> bool:
    return not _PRECISION_LOWERING_NAMES.isdisjoint(environment)


def _set_environment(old: dict[str, str]) -> None:
    for name in _read_environment().keys() - old.keys():
        del os.environ[name]
    os.environ.update(old)


def _read_working_directory() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - a quarter of the time, and it is read around every slot
    except OSError:
        return "a folder that no longer exists"
