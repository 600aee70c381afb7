"""Switches that a case, or the import of a file, could leave changed for later code in its process.

These belong to the interpreter, the process and the C library, and need no torch; torch's own are in
worker/torch_switches.py.
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
from fp8bench.model.run import LOWERING, READ_BY_TORCH


class Unset:
    """Equals no value: the machine, or the user, decides what is usual."""


class NotInUse:
    """The value of a switch before its library is used: reading would initialize it."""


@dataclass(frozen=True, eq=False)
class Switch:
    """A switch of the process; `write` is None for one that ends with the object that holds it.

    `names` are torch's public names that set it; a census compares them with what torch has. `usual` is the value in a
    new process. `bends`: whether a value distorts the reference: fp8bench refuses to measure in such a process, and
    names the value `wanted` (by default `usual`) and how to `mend` it. Without `bends` any value will do, and is
    recorded. Switches `set_by_imports` of harmless packages are watched around steps only.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object] | None
    names: tuple[str, ...] = ()
    usual: Any = Unset
    bends: Callable[[Any], object] | None = None
    recorded: bool = True
    set_by_imports: bool = False
    wanted: str = ""
    mend: str = ""


def attribute(name: str, holder: Any, word: str, **more: Any) -> Switch:
    return Switch(name, partial(getattr, holder, word), lambda value: setattr(holder, word, value), **more)


def values_of(switches: Iterable[Switch]) -> tuple[Any, ...]:
    return tuple(switch.read() for switch in switches)


def put_back(switches: Sequence[Switch], before: Sequence[Any]) -> list[str]:
    after = values_of(switches)
    if after == before:
        return []
    known = zip(switches, before, after, strict=True)
    changed = [(switch, old, new) for switch, old, new in known if old is not NotInUse]
    for switch, old, _ in changed:  # each is read again, because an older switch of torch writes several newer ones
        if switch.write is not None and switch.read() != old:
            # The folder may be gone, a signal's handler may be in C, and torch refuses mixed settings of products.
            with contextlib.suppress(OSError, ValueError, TypeError, RuntimeError):
                switch.write(old)
    return [
        f"{switch.name} at {plain(new)!s:.200} (it was {plain(old)!s:.200}"
        f"{', and cannot be put back' if switch.read() != old else ''})"
        for switch, old, new in changed
        if old != new
    ]


def plain(value: Any) -> Scalar | None:
    match value:
        case enum.Enum():
            return value.name
        case _ if value is NotInUse:
            return None
        case None | bool() | int() | float() | str():
            return value
        case set() | frozenset():
            return ", ".join(sorted(map(str, value)))
        case dict():
            return ", ".join(f"{name}={item}" for name, item in value.items()) or "none"
        case tuple() | list():
            return ", ".join(str(plain(item)) for item in value) or "none"
    name = getattr(value, "__qualname__", None)
    return f"{value.__module__}.{name}" if name is not None else str(value)


# The bytes behind os.environ: reading them takes a fiftieth of the time, and happens around every slot.
_VARIABLES: dict[bytes, bytes] = os.environb._data  # type: ignore[attr-defined]
_KEYS = frozenset(map(os.fsencode, READ_BY_TORCH))
_LOWERING = frozenset(LOWERING)
# With these variables OpenMP itself binds the thread at its first loop.
_BINDS = {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"}
_CLOCKS = (
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
_HANDLED = tuple(
    signal.Signals[f"SIG{name}"] for name in ("INT", "TERM", "HUP", "ALRM", "VTALRM", "PROF", "USR1", "USR2")
)
_NO_HANDLER = {Handler.value: Handler for Handler in signal.Handlers}
_TIMERS = {"real": signal.ITIMER_REAL, "virtual": signal.ITIMER_VIRTUAL, "profiling": signal.ITIMER_PROF}


@cache
def process_switches() -> tuple[Switch, ...]:
    return (*_interpreter_switches(), *_system_switches(), *_library_switches(), *_clock_and_signal_switches())


def _interpreter_switches() -> Iterator[Switch]:
    yield Switch("the working directory", _folder, os.chdir, recorded=False)
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


def _system_switches() -> Iterator[Switch]:
    bound = _BINDS & os.environ.keys()
    if hasattr(os, "sched_getaffinity") and not bound:
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
        _environment,
        _set_environment,
        recorded=False,
        bends=_LOWERING.intersection,
        wanted="none of " + " and ".join(sorted(_LOWERING)),
        mend="unset it, and start Python again",
    )


def _clock_and_signal_switches() -> Iterator[Switch]:
    for name in _CLOCKS:
        yield attribute(
            f"time.{name}",
            time,
            name,
            usual=f"time.{name}",
            bends=partial(_is_other, name),
            mend="end what replaces the clocks of this process",
        )
    for number in _HANDLED:
        yield Switch(
            f"the handler of {number.name}",
            partial(_handler, number),
            partial(signal.signal, number),
            set_by_imports=True,
        )
    for kind, timer in _TIMERS.items():  # a timer that was left running is stopped; one that ended cannot be restarted
        yield Switch(f"the {kind} timer", partial(_runs, timer), partial(_stop, timer), usual=False)


def _library_switches() -> Iterator[Switch]:
    import ctypes

    library = ctypes.CDLL(None)
    if hasattr(library, "fegetround"):
        yield Switch(
            "the rounding of floats",
            library.fegetround,
            library.fesetround,
            usual=0,
            bends=bool,
            mend="call fesetround(FE_TONEAREST)",
        )


def _is_other(name: str, clock: Any) -> bool:
    """Whether a clock was replaced. Compares with the expected function, not with the initial one, which may have been
    replaced before."""
    own = isinstance(clock, types.BuiltinFunctionType) and clock.__module__ == "time"
    return not own or clock.__name__ != name


def _handler(number: int) -> Any:
    """Returns the same as signal.getsignal in a tenth of the time: that tries every handler as an enumerator first."""
    handler = raw_handler(number)
    return _NO_HANDLER[handler] if type(handler) is int else handler


def _runs(timer: int) -> bool:
    return any(signal.getitimer(timer))


def _stop(timer: int, ran: bool) -> object:
    return ran or signal.setitimer(timer, 0)


def _environment() -> dict[str, str]:
    there = sorted(_KEYS.intersection(_VARIABLES))
    return {os.fsdecode(name): os.fsdecode(_VARIABLES[name]) for name in there}


def _set_environment(old: dict[str, str]) -> None:
    for name in _environment().keys() - old.keys():
        del os.environ[name]
    os.environ.update(old)


def _folder() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - a quarter of the time, and it is read around every slot
    except OSError:
        return "a folder that is no more"
