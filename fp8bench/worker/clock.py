"""The phase clock, into which a workload's markers write.

A marker costs about a third of a microsecond, so it only does two appends: phases and times are computed after the
step. All markers share one plain object. It is intentionally not thread-local: on CUDA, autograd runs backward on
another thread, which sees an object's attributes but none of the main thread's locals. This module also measures the
overhead of observing: the marker, the stamp, the event pair, and the whole harness against a bare loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fp8bench.model import CELL_PHASES, PHASES, UNATTRIBUTED, Overheads
from fp8bench.protocols import Device, Markers, Phases, SilentPhases, Stamper

UNATTRIBUTED_CODE = CELL_PHASES.index(UNATTRIBUTED)


@dataclass(slots=True, eq=False)
class Marker:
    """A phase's context manager, created once and entered many times, also within itself. It records its code where the
    phase begins, and the code's complement where it ends."""

    _code: int
    _note: Callable[[int], None]
    _stamp: Callable[[Any], None]
    _now: Callable[[], Any]

    def __enter__(self) -> None:
        self._stamp(self._now())
        self._note(self._code)

    def __exit__(self, *exc: object) -> None:
        self._stamp(self._now())
        self._note(~self._code)


@dataclass(slots=True, eq=False)
class SharingMarker(Marker):
    """A marker that takes no stamp where its phase begins at the stamp of the previous phase's end."""

    _notes: list[int]
    _shared: dict[int, int]

    def __enter__(self) -> None:
        if self._shared.get(len(self._notes)) != self._code:
            self._stamp(self._now())
        self._note(self._code)


class PhaseClock(Markers[Marker]):
    """Provides markers by name and collects the marks of the current step. A mark is a stamp and a marker's record.
    `begin` opens a step in UNATTRIBUTED; `end` closes it and returns (codes, stamps): codes[i] is the phase between
    stamps[i] and stamps[i + 1]. A `told` callback also receives each code."""

    __slots__ = ("_last", "_notes", "_now", "_open", "_planned", "_shared", "_stamps", "_told")

    def __init__(self, stamper: Stamper, told: Callable[[int], None] | None = None) -> None:
        self._notes: list[int] = []
        self._last: tuple[list[int], list[int]] = [], [UNATTRIBUTED_CODE]  # records of a step, and their phases
        self._stamps: list[Any] = []
        self._open: list[int] = [UNATTRIBUTED_CODE]  # only needed for `told`
        # Marks that take no stamp, by their place among the step's: the code of the phase that begins there.
        self._shared: dict[int, int] = {}
        self._planned: list[int] = []
        self._told = told
        self._now = stamper.source()
        note = self._notes.append if told is None else self._tell
        super().__init__(lambda name: Marker(CELL_PHASES.index(name), note, self._stamps.append, self._now))

    @property
    def now(self) -> Callable[[], Any]:
        return self._now

    def share(self, notes: list[int], begins: Iterable[int]) -> None:
        """Takes no stamps at marks in the places `begins`, as long as steps have the marks `notes`.

        Each begins a phase right where another one ends: nothing is launched in between, so that no time is moved.
        """
        self._planned, self._shared = notes, {place: notes[place] for place in begins}
        note = self._notes.append if self._told is None else self._tell
        for name in PHASES:
            code, stamp = CELL_PHASES.index(name), self._stamps.append
            setattr(self, name, SharingMarker(code, note, stamp, self._now, self._notes, self._shared))

    def begin(self) -> None:
        """Starts a step; drops the remains of an aborted step."""
        self._notes.clear()
        self._stamps.clear()
        self._open[:] = [UNATTRIBUTED_CODE]
        if self._told is not None:
            self._told(UNATTRIBUTED_CODE)
        self._stamps.append(self._now())

    def end(self) -> tuple[list[int], list[Any]]:
        """Finishes the step. Raises RuntimeError if a marker is still open, or was closed out of order: bugs of the
        workload, which a marker cannot raise itself, as a thread or a dropped generator would swallow it."""
        self._stamps.append(self._now())
        notes, codes = self._last
        if self._notes != notes:  # most steps equal the previous one
            codes = _phases(self._notes)
            if self._shared:
                codes = [code for place, code in enumerate(codes) if not self._is_shared(place)]
                if self._notes and self._notes != self._planned:  # not the step that was counted, nor an unmarked one
                    self._shared.clear()
            self._last = self._notes.copy(), codes
        return codes.copy(), self._stamps.copy()

    def _is_shared(self, place: int) -> bool:
        return place < len(self._notes) and self._shared.get(place) == self._notes[place]

    def _tell(self, note: int) -> None:
        self._notes.append(note)
        if note >= 0:
            self._open.append(note)
        elif len(self._open) > 1:
            self._open.pop()
        assert self._told is not None
        self._told(self._open[-1])


class BetweenCalls:
    """Stamps around what an accelerator does between calls, with a stamper that no step gets."""

    def __init__(self, stamper: Stamper) -> None:
        self._stamper, self._now = stamper, stamper.source()
        self._stamps: list[Any] = []

    def mark(self) -> None:
        self._stamps.append(self._now())

    def seconds(self) -> float:
        """Returns the time between each first and second mark, and forgets them."""
        intervals = self._stamper.intervals_ns(self._stamps)
        self._stamps.clear()
        self._stamper.recycle()
        return sum(intervals[::2]) * 1e-9


def _phases(notes: Iterable[int]) -> list[int]:
    inside = [UNATTRIBUTED_CODE]
    codes = inside.copy()
    for note in notes:
        if note >= 0:
            inside.append(note)
        elif inside.pop() != ~note:
            raise RuntimeError(
                "the step closed a phase that was not the last one opened: phases nest, and what threads or generators "
                "open must be closed before another phase around it is"
            )
        codes.append(inside[-1])
    if len(inside) != 1:
        open_phases = ", ".join(CELL_PHASES[code] for code in inside[1:])
        raise RuntimeError(f"the step ended inside {open_phases}: every phase opened must be closed in the step")
    return codes


def marks_of_step(step: Callable[[Phases], object]) -> tuple[list[int], list[int]]:
    """Runs a step; returns its marks, and the places of those that begin a phase where another one ends, with no
    operator of torch's launched in between. A kernel that torch does not launch is invisible."""
    from fp8bench.tape.recorder import PhasedWatch

    class Launches(PhasedWatch):  # type: ignore[no-untyped-call]
        launched = True

        def run_call(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            self.launched = True
            return super().run_call(func, args, named)

    watch = Launches()
    notes: list[int] = []
    begins: list[int] = []

    def note(code: int) -> None:
        if code >= 0 and notes and notes[-1] < 0 and not watch.launched:
            begins.append(len(notes))
        notes.append(code)
        watch.launched = False

    phases = Markers(lambda name: Marker(CELL_PHASES.index(name), note, lambda stamp: None, lambda: None))
    with watch:
        step(phases)
    return notes, begins


_REPEATS = 500
_TRIES = 15
# The device's cost of a stamp is visible if all stamps are enqueued before the device reaches them. A queue holds about
# 1,024; beyond that the host waits.
_QUEUED = 512
_OCCUPIED_SECONDS = 10e-3


_stamp_costs: dict[tuple[str, int], float] = {}


def stamp_cost(device: Device, index: int) -> float:
    """Returns the seconds that a stamp takes, measured once in a process."""
    key = device.kind, index
    if key not in _stamp_costs:
        _stamp_costs[key] = calibrate(device, index).stamp_cost
    return _stamp_costs[key]


def calibrate(device: Device, index: int) -> Overheads:
    """Measures best-case costs in seconds of the host and, on a GPU, the device's cost of an event pair."""
    stamper = device.stamper(index)
    clock = PhaseClock(stamper)
    now = stamper.source()

    def fresh() -> None:
        device.synchronise(index)
        stamper.recycle()
        clock.begin()

    # Subtract the time of the empty loop from everything else.
    loop = _best(lambda: None, _empty)
    on = _best(fresh, lambda: _enter(clock)) - loop
    off = _best(fresh, lambda: _enter(SilentPhases())) - loop
    stamp = _best(fresh, lambda: _call(now)) - loop
    pair = None
    if device.kind != "cpu":
        fresh()
        # Events wait behind other work, so that the device, not the host, determines their distance.
        device.occupy(index, max(_OCCUPIED_SECONDS, 2 * _QUEUED * stamp))
        stamps = [now() for _ in range(_QUEUED)]
        intervals = sorted(stamper.intervals_ns(stamps))
        pair = intervals[len(intervals) // 2] * 1e-9
    return Overheads(max(on, 0.0), max(off, 0.0), max(stamp, 0.0), pair, device.why_idle(index))


def _best(prepare: Callable[[], None], body: Callable[[], None]) -> float:
    best = float("inf")
    for _ in range(_TRIES):
        prepare()
        start = time.perf_counter()
        body()
        best = min(best, time.perf_counter() - start)
    return best / _REPEATS


def _empty() -> None:
    for _ in range(_REPEATS):
        pass


def _enter(phases: Phases) -> None:
    for _ in range(_REPEATS):
        with phases.gemm:
            pass


def _call(function: Callable[[], object]) -> None:
    for _ in range(_REPEATS):
        function()


def loop_pairs(
    bare: Callable[[], None], harness: Callable[[], object], steps: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Returns CPU seconds of the process per step, of harness slots and of bare loops, which alternate in going
    first."""
    inside, outside = [], []
    for turn in range(rounds):
        for which in (turn % 2, 1 - turn % 2):
            start = time.process_time()
            if which:
                harness()
                inside.append((time.process_time() - start) / steps)
            else:
                for _ in range(steps):
                    bare()
                outside.append((time.process_time() - start) / steps)
    return inside, outside


# Daemons that adjust the time change the speed of the system's clock by up to 0.05%, some temporarily by more.
MOST_APART = 0.02
# The hardware's clock, which cannot be set. Bound at import, so that later replacements have no effect.
_READ, _RAW = time.clock_gettime_ns, getattr(time, "CLOCK_MONOTONIC_RAW", time.CLOCK_MONOTONIC)


class ClocksDisagree(RuntimeError):
    """A clock that times steps does not agree with the hardware's."""


@contextmanager
def agreeing(clocks: Mapping[str, Callable[[], float]]) -> Iterator[None]:
    """Raises ClocksDisagree if a clock, in nanoseconds, measures another duration of the body than the hardware's
    clock. Replaced clocks are also found by identity (user_code/switches.py), unless they were replaced before the
    first check. Each clock is read between two readings of the hardware's, so that an interruption here causes no false
    alarm."""
    readings = {name: (_READ(_RAW), clock(), _READ(_RAW)) for name, clock in clocks.items()}
    yield
    for name, clock in clocks.items():
        first, began, then = readings[name]
        earliest, ended, latest = _READ(_RAW), clock(), _READ(_RAW)
        counted, least, most = ended - began, earliest - then, latest - first
        if not least * (1 - MOST_APART) <= counted <= most * (1 + MOST_APART):
            raise ClocksDisagree(
                f"{name} counted {counted * 1e-9:.6f} s where the hardware's clock counted {most * 1e-9:.6f} s: "
                "something has replaced a clock of this process, or is setting the system's clock. Times measured like "
                "this mean nothing: end it, and measure again."
            )
