"""Inspects steps of a state after its timing.

Slots (a case's turns) are requested in the same way as for timing. So a step has the same callers, equally long bursts
of calls, and the same clock, and a step that detects timing behaves in the same way here.
"""

from __future__ import annotations

import resource
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from time import thread_time
from typing import Any

from fp8bench.model import LateSteps
from fp8bench.protocols import Device
from fp8bench.tape.counting import ALLOCATION_OPERATORS, count_operator_calls
from fp8bench.tape.recorder import OperatorTape, operator_name
from fp8bench.user_code.switches import read_values
from fp8bench.worker.bits import count_subnormals
from fp8bench.worker.fusing import disable_compiling
from fp8bench.worker.step_effect import InitialStateContents, compare_slots, make_slot_summary, restore_state
from fp8bench.worker.switches import get_arithmetic_switches

# The operators of at most this many steps are counted.
_MAX_COUNTED_STEPS = 32
# Switches are read after at most this many operators of a step. About _MAX_SAMPLED_NUMBERS elements of each large
# result are inspected.
_MAX_CHECKED_OPERATORS, _MAX_SAMPLED_NUMBERS = 64, 4096
# If the FLOPs of two steps differ by more than this relative amount, the steps do different work.
_MAX_FLOPS_VARIATION = 0.05
# The number of operators whose seconds are reported, the slowest ones.
_MAX_REPORTED_OPERATORS = 12


class LateStepInspection:
    """Inspects steps after the timing (late steps), in slots: turns of a few steps.

    The caller enters the context manager `slot` for each slot while `is_due` is true. It calls `begin_late_call` before
    each step, passes the step's answer to `keep`, and after the slot passes the steps' seconds to `add_slot`. In the
    first slot, operators are recorded while the state still has the numbers of the timed steps, because a step may do
    less work with those. Later slots start from different numbers, and are compared with each other.
    """

    def __init__(self, state: Any, inputs: set[int], device: Device, tf32: bool) -> None:
        self.is_due = True
        self._device = device
        self._tf32 = tf32
        self._state_restoration = ExitStack()
        self._replace_inputs = partial(restore_state, state, inputs)
        self._initial_contents: InitialStateContents | None = None
        self._slot_requests = compare_slots()
        self._is_timed = False
        self._call = ExitStack()
        self._compiled: list[Any] = []
        self._tapes: list[_LateOperatorTape] = []
        self._answers: deque[Any] = deque(maxlen=1)
        self._late = LateSteps()
        self._wait_count = 0

    @property
    def keep(self) -> Callable[[object], object]:
        return self._answers.append

    @contextmanager
    def slot(self) -> Iterator[None]:
        if self._initial_contents is not None:
            self._initial_contents.restore()
        self._answers.clear()
        self._tapes.clear()
        with ExitStack() as stack:
            if not self._is_timed:
                self._compiled = stack.enter_context(disable_compiling())
            stack.callback(self._call.close)
            wait_count_at_start = _count_thread_waits()
            yield
            self._wait_count = _count_thread_waits() - wait_count_at_start

    def begin_late_call(self) -> None:
        self._call.close()
        if not self._is_timed:
            self._tapes.append(_LateOperatorTape(looks=not self._tapes and self._device.kind == "cpu"))
            self._call.enter_context(self._tapes[-1])

    def add_slot(self, seconds: Sequence[float], discarded: int) -> None:
        # 1. Describe how the slot has changed the state, before the next slot restores the state.
        tensor_sketches = (
            [] if self._initial_contents is None else self._initial_contents.sketch_changes(list(self._answers))
        )
        self._answers.clear()
        # 2. After the first slot, which had the inputs of timed steps, summarise its operators and replace the inputs.
        if self._initial_contents is None:
            self._late = self._summarise_step_tapes(self._tapes[discarded:])
            self._initial_contents = self._state_restoration.enter_context(self._replace_inputs())
            self._is_timed = next(self._slot_requests)
            return
        # 3. Compare later slots. Steps that call compiled functions run uncompiled in counted slots, so None ends the
        # comparison.
        step_seconds = [tape.seconds for tape in self._tapes] or seconds
        operator_count = len(self._tapes[-1].calls) if self._tapes else 0
        try:
            slot = (
                None
                if self._compiled
                else make_slot_summary(step_seconds, operator_count, tensor_sketches, max(seconds))
            )
            self._is_timed = self._slot_requests.send(slot)
        except StopIteration as comparison:
            self.is_due = False
            self._late = replace(self._late, told_apart=comparison.value)

    def _summarise_step_tapes(self, tapes: Sequence[_LateOperatorTape]) -> LateSteps:
        counted_step_tapes = [count_operator_calls(tape.calls, self._tf32) for tape in tapes[-_MAX_COUNTED_STEPS:]]
        step_flops = [tape.flops for tape in counted_step_tapes]
        flops_by_path = Counter[str]()
        for tape in counted_step_tapes:
            flops_by_path.update(tape.by_path)
        is_complete = all(tape.complete for tape in counted_step_tapes)
        # Only the first tape of a slot checks switches and samples numbers. It may be of a discarded step.
        first_step_tape = self._tapes[0]
        operator_seconds = _compute_mean_seconds(tapes)
        # Operators have no times on an accelerator, for which the host does not wait, and in a compiled step.
        has_operator_times = self._device.kind == "cpu" and not self._compiled
        return LateSteps(
            by_path=tuple((path, total / len(counted_step_tapes)) for path, total in sorted(flops_by_path.items()))
            if is_complete
            else None,
            varies=max(step_flops) - min(step_flops) > _MAX_FLOPS_VARIATION * max(step_flops),
            switches=tuple(first_step_tape.switches),
            subnormal=first_step_tape.subnormal / max(first_step_tape.sampled_count, 1),
            seconds=tuple(sorted(operator_seconds.items(), key=lambda pair: -pair[1])[:_MAX_REPORTED_OPERATORS])
            if has_operator_times
            else (),
            in_operators=sum(operator_seconds.values()) if has_operator_times else None,
            waits=self._wait_count / len(self._tapes),
        )

    def end(self) -> LateSteps:
        """Restores the state, and returns what was observed of the late steps."""
        self._state_restoration.close()
        return self._late


def _count_thread_waits() -> int:
    """Returns how often this thread has given up its core, for example to sleep, or to wait for a lock or a file."""
    # Not all systems can count for a single thread.
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_nvcsw


def _compute_mean_seconds(tapes: Sequence[_LateOperatorTape]) -> dict[str, float]:
    """Returns for each operator, by its name, the mean seconds that it takes in a step."""
    seconds = defaultdict[str, float](float)
    for tape in tapes:
        for operator, operator_seconds in tape.seconds_of.items():
            seconds[operator_name(operator)] += operator_seconds / len(tapes)
    return seconds


class _LateOperatorTape(OperatorTape):  # type: ignore[no-untyped-call]
    """Records the operators of a step after the timing, and the thread's CPU seconds of each operator.

    With `looks`, it also checks torch's arithmetic switches after each operator, and samples the numbers that the
    operator writes.
    """

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.seconds_of = defaultdict[Any, float](float)
        self.switches: dict[str, None] = {}
        self.sampled_count = self.subnormal = 0
        self._switches = get_arithmetic_switches() if looks else ()
        self._initial_values = read_values(self._switches)

    def run_call(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        start = thread_time()
        result = super().run_call(func, args, named)
        self.seconds_of[func] += thread_time() - start
        if self._switches and len(self.calls) <= _MAX_CHECKED_OPERATORS:
            switches_with_values = zip(self._switches, self._initial_values, read_values(self._switches), strict=True)
            self.switches.update(
                (switch.name, None)
                for switch, initial_value, present_value in switches_with_values
                if present_value != initial_value
            )
            if operator_name(func) not in ALLOCATION_OPERATORS:  # newly allocated memory holds arbitrary values
                self._count_subnormals(result)
        return result

    def _count_subnormals(self, result: Any) -> None:
        import torch

        for tensor in result if isinstance(result, list | tuple) else (result,):
            # float16 is excluded, because no CPU multiplies in it.
            if not isinstance(tensor, torch.Tensor) or tensor.dtype not in (torch.float32, torch.bfloat16):
                continue
            if tensor.layout is not torch.strided or not tensor.numel():
                continue
            sampled_numbers = tensor.detach().flatten()
            sampled_numbers = sampled_numbers[:: max(1, len(sampled_numbers) // _MAX_SAMPLED_NUMBERS)]
            self.sampled_count += len(sampled_numbers)
            self.subnormal += count_subnormals(sampled_numbers)
