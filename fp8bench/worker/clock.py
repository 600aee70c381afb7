"""The phase clock: records when a workload's phases begin and end, and measures what this costs.

A marker takes a third of a microsecond, because it only appends to two lists. All markers use one plain object, which
is not thread-local. On CUDA, autograd runs backward on a different thread, which sees an object's attributes but not
the thread-locals of the main thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fp8bench.model import CELL_PHASES, PHASES, UNATTRIBUTED, Overheads
from fp8bench.protocols import Device, Markers, Phases, ReportingMarker, SilentPhases, Stamper

# CELL_PHASES are all PHASES and UNATTRIBUTED, the time outside of them. A phase's code is its index in CELL_PHASES.
UNATTRIBUTED_CODE = CELL_PHASES.index(UNATTRIBUTED)


@dataclass(slots=True, eq=False)
class PhaseMarker:
    """The context manager that marks a phase. It is created once and entered many times, even while it is already
    entered.

    A marker takes a time stamp and calls `_add_mark_code` with the code of the mark (see PhaseStampClock).
    """

    _phase_code: int
    _add_mark_code: Callable[[int], None]
    _append_time_stamp: Callable[[Any], None]
    _take_stamp: Callable[[], Any]

    def __enter__(self) -> None:
        self._append_time_stamp(self._take_stamp())
        self._add_mark_code(self._phase_code)

    def __exit__(self, *exc: object) -> None:
        self._append_time_stamp(self._take_stamp())
        self._add_mark_code(~self._phase_code)


@dataclass(slots=True, eq=False)
class StampSharingMarker(PhaseMarker):
    """A marker that takes fewer time stamps. At the beginnings of phases that are in `_shared`, it reuses the time
    stamp of the mark before (see `PhaseStampClock.share`).
    """

    _mark_codes: list[int]
    _shared: dict[int, int]

    def __enter__(self) -> None:
        if self._shared.get(len(self._mark_codes)) != self._phase_code:
            self._append_time_stamp(self._take_stamp())
        self._add_mark_code(self._phase_code)


class PhaseStampClock(Markers):
    """Provides a marker for each phase, and records the beginnings and ends of phases in the current step as marks. A
    mark has a time stamp and a code: the phase's code at its beginning, and the bitwise complement of it at its end.

    `begin` starts a step in the phase UNATTRIBUTED. `end` ends the step and returns (codes, stamps): codes[i] is the
    phase between stamps[i] and stamps[i + 1]. `report` is called with the code of the current phase whenever the phase
    changes.
    """

    __slots__ = (
        "_last_step",
        "_add_mark_code",
        "_mark_codes",
        "_open",
        "_expected_codes",
        "_shared",
        "_stamps",
        "_report",
        "now",
    )

    def __init__(self, stamper: Stamper, report: Callable[[int], None] | None = None) -> None:
        self._mark_codes: list[int] = []
        # the codes of the last step's marks, and the phase codes computed from them
        self._last_step: tuple[list[int], list[int]] = [], [UNATTRIBUTED_CODE]
        self._stamps: list[Any] = []
        self._open: list[int] = [UNATTRIBUTED_CODE]  # codes of open phases, used only with `report`
        # Marks without a time stamp: maps the index of the mark in the step to the code of the phase that begins there.
        self._shared: dict[int, int] = {}
        self._expected_codes: list[int] = []
        self._report = report
        self.now = stamper.source()
        self._add_mark_code = self._mark_codes.append if report is None else self._report_phase
        # Markers stores each of these as the attribute with the phase's name.
        super().__init__(
            lambda name: PhaseMarker(CELL_PHASES.index(name), self._add_mark_code, self._stamps.append, self.now)
        )

    def share(self, mark_codes: list[int], indices: Iterable[int]) -> None:
        """Leaves out the time stamps of the marks with these `indices`, in later steps whose marks have these codes.

        Each of these marks begins a phase right after another phase ends. No kernel is launched in between, so no time
        is assigned to the wrong phase.
        """
        self._expected_codes = mark_codes
        self._shared = {index: mark_codes[index] for index in indices}
        for name in PHASES:
            code = CELL_PHASES.index(name)
            append_time_stamp = self._stamps.append
            setattr(
                self,
                name,
                StampSharingMarker(
                    code, self._add_mark_code, append_time_stamp, self.now, self._mark_codes, self._shared
                ),
            )

    def begin(self) -> None:
        """Starts a step. Drops the marks of the previous step, which may have been aborted."""
        self._mark_codes.clear()
        self._stamps.clear()
        self._open[:] = [UNATTRIBUTED_CODE]
        if self._report is not None:
            self._report(UNATTRIBUTED_CODE)
        self._stamps.append(self.now())

    def end(self) -> tuple[list[int], list[Any]]:
        """Ends the step. Returns its time stamps, and the code of the phase between each two stamps.

        Raises RuntimeError for a bug of the workload: a marker that is still open, or was closed out of order. The
        marker itself does not raise, because a thread or a dropped generator would hide the error.
        """
        self._stamps.append(self.now())
        last_mark_codes, phase_codes = self._last_step
        if self._mark_codes != last_mark_codes:  # recompute only if the marks have changed, which is rare
            phase_codes = _compute_phase_codes(self._mark_codes)
            if self._shared:
                # Interval i ends at mark i. If this mark has no time stamp, interval i is empty, so drop its code.
                shared_mark_indices = {
                    index for index, mark_code in enumerate(self._mark_codes) if self._shared.get(index) == mark_code
                }
                phase_codes = [code for index, code in enumerate(phase_codes) if index not in shared_mark_indices]
                # If this step has other marks than the inspected step, share no stamps in later steps. A step without
                # marks does not count, because only some of the steps are marked.
                if self._mark_codes and self._mark_codes != self._expected_codes:
                    self._shared.clear()
            self._last_step = self._mark_codes.copy(), phase_codes
        # Return copies, because later steps use the same lists again.
        return phase_codes.copy(), self._stamps.copy()

    def _report_phase(self, mark_code: int) -> None:
        self._mark_codes.append(mark_code)
        if mark_code >= 0:
            self._open.append(mark_code)
        elif len(self._open) > 1:  # UNATTRIBUTED always stays, even if a step closes too many phases
            self._open.pop()
        assert self._report is not None
        self._report(self._open[-1])


class BetweenCallsTimer:
    """Measures how long an accelerator works between calls, for example to flush a cache. It has a separate source of
    time stamps (`Stamper`), which steps cannot change.
    """

    def __init__(self, stamper: Stamper) -> None:
        self._stamper = stamper
        self._take_stamp = stamper.source()
        self._stamps: list[Any] = []

    def mark(self) -> None:
        self._stamps.append(self._take_stamp())

    def seconds(self) -> float:
        """Returns how many seconds the device worked between calls, from time stamps before and after each such period.
        Deletes the time stamps.
        """
        intervals_ns = self._stamper.intervals_ns(self._stamps)
        self._stamps.clear()
        self._stamper.recycle()
        return sum(intervals_ns[::2]) * 1e-9


def _compute_phase_codes(mark_codes: Iterable[int]) -> list[int]:
    """Returns the code of the innermost open phase before the first mark and after each mark."""
    open_phase_codes = [UNATTRIBUTED_CODE]
    phase_codes = open_phase_codes.copy()
    for mark_code in mark_codes:
        if mark_code >= 0:
            open_phase_codes.append(mark_code)
        elif open_phase_codes.pop() != ~mark_code:
            raise RuntimeError(
                "the step closed a phase that was not the innermost open one: phases must be nested, and those that "
                "threads or generators open must be closed before the phase around them"
            )
        phase_codes.append(open_phase_codes[-1])
    if len(open_phase_codes) != 1:
        open_phases_text = ", ".join(CELL_PHASES[code] for code in open_phase_codes[1:])
        raise RuntimeError(f"the step ended inside {open_phases_text}: every phase opened must be closed in the step")
    return phase_codes


def make_reporting_phases(report: Callable[[str], None]) -> Markers:
    """Returns markers that call `report` with the name of the current phase whenever the phase changes."""
    # backward may run on a different thread, so all threads use the same list of open phases
    open_phases: list[str] = [UNATTRIBUTED]
    return Markers(lambda name: ReportingMarker(name, open_phases, report))


def find_shared_phase_marks(step: Callable[[Phases], object]) -> tuple[list[int], list[int]]:
    """Runs a step. Returns the arguments of `PhaseStampClock.share`: the codes of the step's marks, and the indices of
    those marks that can reuse the time stamp of the mark before them.

    Between such a mark and the mark before it, torch runs no operator. Kernels that torch does not launch are invisible
    here.
    """
    from fp8bench.tape.recorder import PhaseOperatorWatch

    class LaunchWatch(PhaseOperatorWatch):  # type: ignore[no-untyped-call]
        has_launched = True

        def run_call(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            self.has_launched = True
            return super().run_call(func, args, named)

    launch_watch = LaunchWatch()
    phase_mark_codes: list[int] = []
    stamp_sharing_indices: list[int] = []

    def add_mark_code(code: int) -> None:
        if code >= 0 and phase_mark_codes and phase_mark_codes[-1] < 0 and not launch_watch.has_launched:
            stamp_sharing_indices.append(len(phase_mark_codes))
        phase_mark_codes.append(code)
        launch_watch.has_launched = False

    phases = Markers(lambda name: PhaseMarker(CELL_PHASES.index(name), add_mark_code, lambda stamp: None, lambda: None))
    with launch_watch:
        step(phases)
    return phase_mark_codes, stamp_sharing_indices


_CALLS_PER_LOOP = 500
_TIMED_LOOP_COUNT = 15
# The device's cost of a stamp can be measured if all stamps are enqueued before the device reaches them. A queue holds
# about 1,024 launches. When it is full, the host waits, so enqueue only half as many stamps.
_QUEUED_STAMP_COUNT = 512
_MIN_DEVICE_BUSY_SECONDS = 10e-3


_stamp_seconds_by_device: dict[tuple[str, int], float] = {}


def stamp_cost(device: Device, index: int) -> float:
    """Returns the seconds that a stamp takes on the device. It is measured once per process."""
    # Store the costs by device kind, because each case makes a new `Device` object.
    device_key = device.kind, index
    if device_key not in _stamp_seconds_by_device:
        _stamp_seconds_by_device[device_key] = measure_overheads(device, index).stamp_cost
    return _stamp_seconds_by_device[device_key]


def measure_overheads(device: Device, index: int) -> Overheads:
    """Measures the smallest cost in seconds of a phase marker, a time stamp, and a marker that does nothing; on a GPU,
    also of a pair of events.
    """
    stamper = device.stamper(index)
    clock = PhaseStampClock(stamper)
    read_stamp_clock = stamper.source()

    def start_step() -> None:
        device.synchronise(index)
        stamper.recycle()
        clock.begin()

    # The loop itself takes time, which is subtracted from all costs.
    empty_loop_seconds = _time_fastest_loop(lambda: None, _run_empty_loop)
    phase_marker_seconds = _time_fastest_loop(start_step, lambda: _enter_phases(clock)) - empty_loop_seconds
    silent_phases_seconds = _time_fastest_loop(start_step, lambda: _enter_phases(SilentPhases())) - empty_loop_seconds
    clock_read_seconds = _time_fastest_loop(start_step, lambda: _call_repeatedly(read_stamp_clock)) - empty_loop_seconds
    event_pair_seconds = None
    if device.kind != "cpu":
        start_step()
        # Keep the device busy while events are enqueued. Otherwise the host would determine the time between events.
        device.occupy(index, max(_MIN_DEVICE_BUSY_SECONDS, 2 * _QUEUED_STAMP_COUNT * clock_read_seconds))
        time_stamps = [read_stamp_clock() for _ in range(_QUEUED_STAMP_COUNT)]
        intervals_ns = sorted(stamper.intervals_ns(time_stamps))
        event_pair_seconds = intervals_ns[len(intervals_ns) // 2] * 1e-9
    # Noise may make a small cost seem negative.
    return Overheads(
        marker_on=max(phase_marker_seconds, 0.0),
        marker_off=max(silent_phases_seconds, 0.0),
        stamp=max(clock_read_seconds, 0.0),
        event_pair=event_pair_seconds,
        why_idle=device.why_idle(index),  # the reason if `occupy` above could not keep the device busy with products
    )


def _time_fastest_loop(prepare: Callable[[], None], body: Callable[[], None]) -> float:
    # The fastest loop counts, because interruptions only lengthen a loop.
    best_seconds = float("inf")
    for _ in range(_TIMED_LOOP_COUNT):
        prepare()
        start = time.perf_counter()
        body()
        best_seconds = min(best_seconds, time.perf_counter() - start)
    return best_seconds / _CALLS_PER_LOOP


def _run_empty_loop() -> None:
    for _ in range(_CALLS_PER_LOOP):
        pass


def _enter_phases(phases: Phases) -> None:
    for _ in range(_CALLS_PER_LOOP):
        with phases.gemm:
            pass


def _call_repeatedly(function: Callable[[], object]) -> None:
    for _ in range(_CALLS_PER_LOOP):
        function()


def time_alternating_loops(
    bare: Callable[[], None], harness: Callable[[], object], steps: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Returns the CPU seconds per step of two loops of `steps` steps: a slot of fp8bench (one call of `harness` runs
    all steps), and a loop that measures nothing (each call of `bare` runs one step). Each round runs both loops, in
    alternating order.
    """
    harness_loop_seconds = []
    unmeasured_loop_seconds = []
    for round_number in range(rounds):
        for is_harness in (round_number % 2, 1 - round_number % 2):
            start = time.process_time()
            if is_harness:
                harness()
                harness_loop_seconds.append((time.process_time() - start) / steps)
            else:
                for _ in range(steps):
                    bare()
                unmeasured_loop_seconds.append((time.process_time() - start) / steps)
    return harness_loop_seconds, unmeasured_loop_seconds


# The largest allowed relative difference of two clocks. Daemons that adjust the time change the speed of the system's
# clock by up to 0.05%, and some by more for a while.
MAX_CLOCK_DIFFERENCE = 0.02
# The hardware's clock, which nobody can set. It is stored at import, so that replacing a function of `time` later has
# no effect.
_READ_CLOCK, _HARDWARE_CLOCK = time.clock_gettime_ns, getattr(time, "CLOCK_MONOTONIC_RAW", time.CLOCK_MONOTONIC)


class ClocksDisagree(RuntimeError):
    """A clock that times steps disagrees with the hardware's clock."""


@contextmanager
def require_agreeing_clocks(clocks: Mapping[str, Callable[[], float]]) -> Iterator[None]:
    """Raises ClocksDisagree if one of `clocks` measures a different duration of the `with` block than the hardware's
    clock.

    `clocks` return nanoseconds. The watch of switches (user_code/switches.py) finds replaced functions of the module
    `time` without reading them, but not a system clock that a program adjusts. Each clock is read between two readings
    of the hardware's clock, so that an interruption causes no false alarm.
    """
    readings = {
        name: (_READ_CLOCK(_HARDWARE_CLOCK), clock(), _READ_CLOCK(_HARDWARE_CLOCK)) for name, clock in clocks.items()
    }
    yield
    for name, clock in clocks.items():
        earliest_start_reading, clock_start_reading, latest_start_reading = readings[name]
        earliest_end_reading = _READ_CLOCK(_HARDWARE_CLOCK)
        clock_end_reading = clock()
        latest_end_reading = _READ_CLOCK(_HARDWARE_CLOCK)
        clock_duration = clock_end_reading - clock_start_reading
        min_duration = earliest_end_reading - latest_start_reading
        max_duration = latest_end_reading - earliest_start_reading
        if not min_duration * (1 - MAX_CLOCK_DIFFERENCE) <= clock_duration <= max_duration * (1 + MAX_CLOCK_DIFFERENCE):
            raise ClocksDisagree(
                f"{name} counted {clock_duration * 1e-9:.6f} s where the hardware's clock counted "
                f"{max_duration * 1e-9:.6f} s: code has replaced a clock of this process, or a program sets the "
                "system's clock. Such times mean nothing: end that, and measure again."
            )
