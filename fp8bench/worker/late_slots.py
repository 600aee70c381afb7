"""Slots of a state after its timing, in which its steps are inspected.

Each is run by the request that runs timed slots, so that a step finds the same callers above it, calls in bursts of the
same length, and the same clock: a step that can detect timing detects it here as well.
"""

from __future__ import annotations

import resource
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from time import thread_time
from typing import Any

from fp8bench.model import LateSteps
from fp8bench.protocols import Device
from fp8bench.tape.counting import MAKE_ROOM, count_tape
from fp8bench.tape.recorder import OperatorTape, operator_name
from fp8bench.user_code.switches import values_of
from fp8bench.worker.fusing import without_compiling
from fp8bench.worker.step_effect import Beginning, compare_slots, restore_state, slot_of
from fp8bench.worker.switches import arithmetic_switches

# Counting the operators of more steps is not worth the time.
_MOST_COUNTED = 32
# The number of operators per step at which switches are read, and of the numbers inspected that each writes.
_MOST_READ, _MOST_NUMBERS = 64, 4096
# If FLOPs of two steps differ by more than this share, their work differs.
_VARIES = 0.05
# The number of slowest operators whose seconds are kept.
_SLOWEST = 12


class LateSlots:
    """Inspects steps: the caller of a slot enters `slot`, calls `begin_call` before each step and passes its answer to
    `keep`; `add` takes the seconds of the slot's steps. `is_due` is whether another slot is needed.

    The first slot is recorded with the numbers that steps were timed with: a step may do less with only these. Later
    slots have different numbers, and are compared.
    """

    def __init__(self, state: Any, inputs: set[int], device: Device, tf32: bool) -> None:
        self.is_due = True
        self._device, self._tf32 = device, tf32
        self._kept = ExitStack()
        self._others = partial(restore_state, state, inputs)
        self._beginning: Beginning | None = None
        self._asked = compare_slots()
        self._is_timed = False
        self._call = ExitStack()
        self._compiled: list[Any] = []
        self._tapes: list[_LateTape] = []
        self._answers: deque[Any] = deque(maxlen=1)
        self._late = LateSteps()
        self._waits = 0

    @property
    def keep(self) -> Callable[[object], object]:
        return self._answers.append

    @contextmanager
    def slot(self) -> Iterator[None]:
        if self._beginning is not None:
            self._beginning.again()
        self._answers.clear()
        self._tapes.clear()
        with ExitStack() as stack:
            if not self._is_timed:
                self._compiled = stack.enter_context(without_compiling())
            stack.callback(self._end_call)
            waits_before = _waits()
            yield
            self._waits = _waits() - waits_before

    def begin_call(self) -> None:
        self._end_call()
        if not self._is_timed:
            self._tapes.append(_LateTape(looks=not self._tapes and self._device.kind == "cpu"))
            self._call.enter_context(self._tapes[-1])

    def _end_call(self) -> None:
        self._call.close()

    def add(self, seconds: Sequence[float], discarded: int) -> None:
        sums = [] if self._beginning is None else self._beginning.left(list(self._answers))
        self._answers.clear()
        if self._beginning is None:
            self._late = self._looked_at(self._tapes[discarded:])
            self._beginning = self._kept.enter_context(self._others())
            self._is_timed = next(self._asked)
            return
        spent = [tape.seconds for tape in self._tapes] or seconds
        operators = len(self._tapes[-1].calls) if self._tapes else 0
        try:
            slot = None if self._compiled else slot_of(spent, operators, sums, max(seconds))
            self._is_timed = self._asked.send(slot)
        except StopIteration as ended:
            self.is_due, self._late = False, replace(self._late, told_apart=ended.value)

    def _looked_at(self, tapes: Sequence[_LateTape]) -> LateSteps:
        counts = [count_tape(tape.calls, self._tf32) for tape in tapes[-_MOST_COUNTED:]]
        flops = [tape.flops for tape in counts]
        paths = Counter[str]()
        for tape in counts:
            paths.update(tape.by_path)
        complete = all(tape.complete for tape in counts)
        first, seconds = self._tapes[0], _mean_seconds(tapes)
        on_host = self._device.kind == "cpu" and not self._compiled
        return LateSteps(
            by_path=tuple((path, total / len(counts)) for path, total in sorted(paths.items())) if complete else None,
            varies=max(flops) - min(flops) > _VARIES * max(flops),
            switches=tuple(first.switches),
            subnormal=first.subnormal / max(first.looked, 1),
            seconds=tuple(sorted(seconds.items(), key=lambda pair: -pair[1])[:_SLOWEST]) if on_host else (),
            in_operators=sum(seconds.values()) if on_host else None,
            waits=self._waits / len(self._tapes),
        )

    def end(self) -> LateSteps:
        """Restores the state; returns the observations."""
        self._kept.close()
        return self._late


def _waits() -> int:
    """Counts how often this thread has yielded its core: to sleep, or to wait for a lock or a file."""
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_nvcsw


def _mean_seconds(tapes: Sequence[_LateTape]) -> dict[str, float]:
    """Returns the seconds of a step's operators by name, on average."""
    seconds: dict[str, float] = {}
    for tape in tapes:
        for operator, spent in tape.seconds_of.items():
            name = operator_name(operator)
            seconds[name] = seconds.get(name, 0.0) + spent / len(tapes)
    return seconds


class _LateTape(OperatorTape):  # type: ignore[no-untyped-call]
    """Records the operators of one step with their seconds, in the thread's own time, which stands still while others
    have the core. With `looks` it also reads the switches of arithmetic at
    each operator, and a sample of the numbers that it writes."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.seconds_of: dict[Any, float] = {}
        self.switches: dict[str, None] = {}
        self.looked = self.subnormal = 0
        self._switches = arithmetic_switches() if looks else ()
        self._usual = values_of(self._switches)

    def run_call(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        begun = thread_time()
        result = super().run_call(func, args, named)
        self.seconds_of[func] = self.seconds_of.get(func, 0.0) + thread_time() - begun
        if self._switches and len(self.calls) <= _MOST_READ:
            read = zip(self._switches, self._usual, values_of(self._switches), strict=True)
            self.switches.update((switch.name, None) for switch, usual, now in read if now != usual)
            if operator_name(func) not in MAKE_ROOM:  # its memory holds arbitrary values
                self._look(result)
        return result

    def _look(self, result: Any) -> None:
        import torch

        for tensor in result if isinstance(result, list | tuple) else (result,):
            # No CPU multiplies in float16.
            if not isinstance(tensor, torch.Tensor) or tensor.dtype not in (torch.float32, torch.bfloat16):
                continue
            if tensor.layout is not torch.strided or not tensor.numel():
                continue
            numbers = tensor.detach().flatten()
            numbers = numbers[:: max(1, len(numbers) // _MOST_NUMBERS)]
            small = (numbers.abs() < torch.finfo(numbers.dtype).tiny) & (numbers != 0)
            self.looked += len(numbers)
            self.subnormal += int(small.sum())
