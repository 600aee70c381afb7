"""Tests whether a step's results depend on its inputs: a step that repeats its earlier results does no work.

Results are tensors that the step writes or returns, as far as they can be reached from the state or from its answer.
Inputs are tensors that existed when the state had been prepared, and that no step writes. First up to four steps are
compared with earlier ones: if each gives something new (weights or a loader advance, numbers are drawn) they do work.
Otherwise all inputs are replaced by other numbers of the same range, bypassing torch's version counters, so that caches
that rely on these are stale; then what the step overwrites, in case it works in place. If results stay bit-identical,
the step does no work. The same holds for a step that calls no torch operator, takes almost no time, and leaves
everything unchanged.

Nothing is reported if there may be other reasons: no result is visible, no input could be replaced, the step loads
data, or part of its state is in memory that is not torch's (NumPy's, or a file's, which is never written).

A step may also detect in some way that it is timed. So after its slots a state runs more slots like those, and others
in which each step runs under the mode that counts operators (late_slots.py). All begin with the same numbers, which
differ from those that it was timed with: results may be cached, or not be kept at all. They are compared by their
results and by their time. A difference counts only if all slots of either kind agree with the first of that kind, in an
order that no periodic step follows.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from statistics import median
from typing import Any, NamedTuple

from fp8bench import units
from fp8bench.model import CELL_PHASES, StepEffect
from fp8bench.model.words import LOADING
from fp8bench.profiler import calls_operators
from fp8bench.protocols import Device, Setup, Workload
from fp8bench.worker.bits import copy_bytes, digest, other_numbers, put_back, same_after, sketch
from fp8bench.worker.clock import PhaseClock
from fp8bench.worker.state_tensors import address_of, draws_of, is_foreign, reads_elsewhere, tensors_of, version_of
from fp8bench.worker.static_scales import step as take_step

# A step that takes longer is not repeated; nor is a state read again if that takes longer.
LONGEST_SECONDS = 1.0
# Python's part of a step that does nothing takes less; work that torch does not see takes more.
NO_TIME_SECONDS = 50e-6
# How often such a step is repeated. On a loaded machine even a sleeping step may sometimes take longer, so short ones
# are repeated more often.
_TIMED, _MOST_TIMED, _SPENT_SECONDS = 5, 100, 0.01
# If all of this many steps give different results, they do work.
_MOST_STEPS = 4


class _SeenMemory(NamedTuple):
    """A range of memory: its address, a digest of its bits, and how often torch has written it."""

    address: int
    digest: int
    version: int
    elements: int
    floating: bool


class _TakesLong(Exception):
    """Inspecting takes too long; the message names the slow part."""


class _Steps:
    """A state of a case, steps of it, and the contents of its memory after them."""

    def __init__(self, workload: Workload, setup: Setup, device: Device, index: int) -> None:
        self._workload, self._setup, self._device, self._index = workload, setup, device, index
        self.phases = set[str]()
        # The same stamper as timed steps: a step may recognise it by its class.
        self._stamper = device.stamper(index)
        self._clock = PhaseClock(self._stamper, lambda code: self.phases.add(CELL_PHASES[code]))
        self.state = workload.prepare(setup)
        self.returned: Any = None

    def take(self) -> None:
        self.returned = None
        self._clock.begin()
        self.returned = take_step(self._workload, self.state, self._setup.scales, self._clock)
        self._clock.end()
        self._device.synchronise(self._index)
        self._stamper.recycle()

    def seconds(self) -> float:
        """Takes a step and returns its time; on a CPU the thread's time, without waiting for others."""
        clock = time.thread_time if self._device.kind == "cpu" else time.perf_counter
        begun = clock()
        self.take()
        return clock() - begun

    def fails(self) -> bool:
        """Takes a step with replaced numbers, which a factorisation may refuse; returns whether it raises."""
        try:
            self.take()
        except Exception as error:
            if self._device.is_out_of_memory(error):
                raise
            self._device.synchronise(self._index)  # raises where nothing works any more
            return True
        return False

    def memories(self) -> dict[int, list[Any]]:
        return memories_of(self.state, self.returned)

    def read_memory(self) -> list[_SeenMemory]:
        return self.digest_memories(self.memories())

    def digest_memories(self, memories: Mapping[int, list[Any]]) -> list[_SeenMemory]:
        digests, end = [], time.thread_time() + LONGEST_SECONDS
        for address, tensors in memories.items():
            _in_time(end)
            first, version = tensors[0], max(map(version_of, tensors))
            count, floating = max(tensor.numel() for tensor in tensors), first.dtype.is_floating_point
            digests.append(_SeenMemory(address, digest(first), version, count, floating))
        return digests


def memories_of(*roots: object) -> dict[int, list[Any]]:
    """Returns the tensors that the roots hold, by the memory that they share; leaves out foreign memory."""
    memories: dict[int, list[Any]] = {}
    end = time.thread_time() + LONGEST_SECONDS
    for tensor in tensors_of(*roots, until=end):
        if not is_foreign(tensor):
            memories.setdefault(address_of(tensor), []).append(tensor)
    _in_time(end)
    return memories


def _in_time(end: float) -> None:
    if time.thread_time() > end:
        raise _TakesLong(f"its state takes more than {LONGEST_SECONDS:g} s to read")


def effect_of(workload: Workload, setup: Setup, device: Device, index: int) -> StepEffect:
    """Judges a few steps of a separate state; the first is not compared, because it may create lasting objects."""
    try:
        return _effect(_Steps(workload, setup, device, index))
    except _TakesLong as long:
        return StepEffect(None, str(long))


def _effect(steps: _Steps) -> StepEffect:
    prepared = steps.read_memory()
    taken = _step_until_repeat(steps)
    if taken is None:
        return StepEffect(True)
    second_last, last = taken.history[-2:]
    if not last:
        return StepEffect(None, "its state holds no tensor")
    if LOADING & set(steps.phases) or reads_elsewhere(steps.state):
        return StepEffect(None, "it may read data outside of tensors")
    inputs = set(prepared) & set(second_last) & set(last)
    answered = {address_of(tensor) for tensor in tensors_of(steps.returned)}
    results = [
        tensor
        for tensor in last
        if not taken.counts(tensor)
        and tensor not in inputs
        and (tensor not in second_last or tensor.address in answered)
    ]
    if not inputs:
        return StepEffect(None, "it has no input tensor that could be changed")
    idle = not results and _idle(steps)
    if not idle and not any(
        result.floating or result.elements > 1 for result in results
    ):  # a truth value need not change
        return StepEffect(None, "none of its results is kept in its state, or returned")
    floating = {tensor.address for tensor in inputs if tensor.floating}
    integers = {tensor.address for tensor in inputs} - floating
    in_place = {result.address for result in results if result not in second_last} & {
        tensor.address for tensor in second_last
    }
    for chosen, results_too in ((floating, False), (integers, False), (in_place, True)):
        if chosen and _changes(steps, chosen, taken, results_too):
            return StepEffect(True)  # also if others than torch have launched the work, which nobody counts
    if idle:
        if _rewrites(steps, set(second_last) & set(last) - inputs):
            return StepEffect(True)
        return StepEffect(False, "it calls no operator of torch and leaves all tensors as they were")
    return StepEffect(False, f"its results are the same, bit for bit, whatever its {len(inputs)} input tensors hold")


@dataclass(frozen=True)
class _Taken:
    """Observations after each step but the first; the last is like an earlier one. `going_on` are addresses of single
    numbers that nevertheless changed: they may count steps. `recreated`: single numbers that each step makes at a new
    address changed as well."""

    history: list[list[_SeenMemory]]
    going_on: set[int]
    recreated: bool

    def counts(self, tensor: _SeenMemory) -> bool:
        return tensor.address in self.going_on or (
            self.recreated and tensor.elements <= 1 and tensor.address not in self._lasting
        )

    @cached_property
    def _lasting(self) -> set[int]:
        return {tensor.address for tensor in self.history[0]}


def _step_until_repeat(steps: _Steps) -> _Taken | None:
    """Takes steps until one repeats an earlier result; returns None if all of a few differ."""
    steps.take()
    held = [steps.memories()]  # kept alive, or the next step's new tensors might get the same address and look alike
    history = [steps.digest_memories(held[0])]
    while len(history) < _MOST_STEPS:
        if steps.seconds() > LONGEST_SECONDS:
            raise _TakesLong(f"a step takes more than {LONGEST_SECONDS:g} s")
        held.append(steps.memories())
        history.append(steps.digest_memories(held[-1]))
        for earlier in reversed(history[:-1]):
            if (going_on := _compare_steps(earlier, history[-1])) is not None:
                return _Taken(history, *going_on)
    return None


def _compare_steps(old: Sequence[_SeenMemory], new: Sequence[_SeenMemory]) -> tuple[set[int], bool] | None:
    """Compares two steps; None if they differ in more than single numbers. Otherwise it returns the addresses of single
    numbers that differ, and whether some recreated ones do. Lasting memory is compared by address; recreated memory has
    a new address each time, and is compared as a whole."""
    old_by_address = {tensor.address: tensor for tensor in old}
    stayed = {tensor.address: tensor for tensor in new if tensor.address in old_by_address}
    going_on = {address for address, tensor in stayed.items() if tensor.digest != old_by_address[address].digest}
    # Recreated memory has no lasting address: compare all of its digests, with single numbers separately.
    many_old, single_old = _count_digests(old, stayed)
    many_new, single_new = _count_digests(new, stayed)
    if any(stayed[address].elements > 1 for address in going_on) or many_old != many_new:
        return None
    return going_on, single_old != single_new


def _count_digests(memories: Sequence[_SeenMemory], stayed: Mapping[int, object]) -> tuple[Counter[int], Counter[int]]:
    """Counts the digests of memory that did not last: of tensors with several elements, and of single numbers."""
    many, single = Counter[int](), Counter[int]()
    for memory in memories:
        if memory.address not in stayed:
            (many if memory.elements > 1 else single)[memory.digest] += 1
    return many, single


def _changes(steps: _Steps, chosen: set[int], taken: _Taken, results_too: bool) -> bool:
    """Whether a step gives a new result once the `chosen` memories hold other numbers. Numbers that change anyway are
    left out, and so are chosen memories which still hold their other numbers. With `results_too` these count: the step
    may work in place.

    A chosen memory may nevertheless be a result: before the first step it held by chance what the steps give, as fresh
    memory does where the previous state had its result, and torch did not count the writing.
    """
    memory_before, replaced = steps.read_memory(), dict[int, int]()
    with ExitStack() as stack:
        # Each gets different numbers, otherwise a result that equals an input would also equal it afterwards.
        for seed, (address, (first, *_)) in enumerate(steps.memories().items()):
            if address in chosen:
                stack.enter_context(other_numbers(first, seed))
                replaced[address] = digest(first)
        if steps.fails():
            return True
        memory_after = steps.read_memory()
    untouched = {tensor.address for tensor in memory_after if tensor.digest == replaced.get(tensor.address)}
    left_out = set[int]() if results_too else untouched

    def count_results(memories: Sequence[_SeenMemory]) -> Counter[int]:
        results = (tensor for tensor in memories if not taken.counts(tensor) and tensor.address not in left_out)
        return Counter(tensor.digest for tensor in results)

    return count_results(memory_after) not in map(count_results, (*taken.history, memory_before))


def _rewrites(steps: _Steps, written_once: set[_SeenMemory]) -> bool:
    """Whether a step works in place unseen by torch: memory that only the first step changed, as rounding does, is
    changed again once it holds other numbers."""
    addresses = {tensor.address for tensor in written_once}
    for address, (first, *_) in steps.memories().items():
        if address in addresses:
            old = digest(first)
            with other_numbers(first, seed=0):
                replaced_digest = digest(first)
                if steps.fails() or digest(first) not in (old, replaced_digest):
                    return True
    return False


def _idle(steps: _Steps) -> bool:
    """Whether a step calls no torch operator, and is too fast to work outside of torch."""
    if calls_operators(steps.take) is not False:
        return False
    end, spent = time.monotonic() + LONGEST_SECONDS, 0.0
    for number in range(_MOST_TIMED):
        begun = time.process_time()
        steps.take()
        took = time.process_time() - begun
        if took < NO_TIME_SECONDS:
            return True
        spent += took
        if number + 1 >= _TIMED and (spent > _SPENT_SECONDS or time.monotonic() > end):
            break
    return False


# Whether a slot is timed. No step that repeats after 2, 3, 4 or 8 slots, or drifts steadily, follows this order.
_ORDER = (True, False, False, True, False, True, True, False)
# Other kernels round differently, by less than the first share of a step's effect on a tensor. A tensor that changes by
# less than the second share of what another one does may only hold rounding errors.
_ALIKE, _ROUNDING = 0.05, 1e-3
# Counted operators may take this many times as long as a timed step, after deducting the maximum cost of counting each
# of them.
_SLOWER = 1.5
_CALL_SECONDS = 30e-6
# Replacing the numbers of a larger state is not worth the time.
MOST_BYTES = 1 << 26

# A few sums of a step's effect on each tensor, and of each new tensor, in the order of memories_of.
Left = list[Any]


class Slot(NamedTuple):
    """The times of one slot: `least` is that of the fastest step without the cost of counting its operators, `most`
    that of the slowest with it."""

    typical: float
    least: float
    sums: Left
    most: float


def slot_of(seconds: Sequence[float], operators: int, sums: Left, most: float) -> Slot:
    """Makes a Slot from the seconds of its steps, or of their operators; `operators` is their number per step if they
    were counted, else 0. The slowest step took `most`."""
    return Slot(median(seconds), min(seconds) - _CALL_SECONDS * operators, sums, most)


def compare_slots() -> Generator[bool, Slot | None, str]:
    """Requests slots by whether they are timed (else counted), and returns how the two kinds differ; '' if they do not,
    or it is unknown. Most cases need only two slots."""
    timed: list[Slot] = []
    counted: list[Slot] = []
    reason = ""
    for is_timed in _ORDER:
        if (taken := (yield is_timed)) is None or taken.typical > LONGEST_SECONDS:
            return ""
        (timed if is_timed else counted).append(taken)
        if counted and not (reason := _difference(timed, counted)):
            return ""
    return reason


def _difference(timed: Sequence[Slot], counted: Sequence[Slot]) -> str:
    slowest, fastest = max(slot.typical for slot in timed), min(slot.least for slot in counted)
    if fastest > _SLOWER * slowest:
        return (
            f"timed, a step takes {units.seconds(slowest)}, and its operators {units.seconds(fastest)} or more while "
            "they are counted"
        )
    quickest, most = min(slot.least for slot in timed), max(slot.most for slot in counted)
    if quickest > _SLOWER * most:
        return (
            f"timed, a step takes {units.seconds(quickest)}, and {units.seconds(most)} while its operators are counted"
        )
    # A tensor incriminates a step only if all slots of either kind agree about it.
    sketches = [slot.sums for slot in (*timed, *counted)]
    least = _ROUNDING * max((float(sums.abs().max()) for slot_sums in sketches for sums in slot_sums), default=0.0)
    for place in zip_longest(*sketches):
        of_timed, of_counted = place[: len(timed)], place[len(timed) :]
        is_settled = _agree(of_timed, least) and _agree(of_counted, least)
        if is_settled and not _same_sums(of_timed[0], of_counted[0], least):
            return "timed, a step leaves other numbers than while its operators are counted"
    return ""


def _agree(sketches: Sequence[Any], least: float) -> bool:
    return all(_same_sums(sketches[0], sums, least) for sums in sketches[1:])


def _same_sums(sums: Any, other_sums: Any, least: float) -> bool:
    if sums is None or other_sums is None:
        return sums is other_sums
    apart, most = float((sums - other_sums).abs().max()), float(max(sums.abs().max(), other_sums.abs().max()))
    return apart <= max(_ALIKE * most, least)


class Beginning:
    """Where all slots of a state begin: the numbers of its memories, by address, and the state of generators."""

    def __init__(self, state: object, memories: Mapping[int, list[Any]] | None) -> None:
        self._state, self._known = state, memories is not None
        self._begun = {address: (some[0], copy_bytes(some[0])) for address, some in (memories or {}).items()}
        self._draws = draws_of(state) if self._known else []
        self._made: dict[int, tuple[Any, Any]] = {}

    def again(self) -> None:
        """Restores the beginning, except for tensors that earlier slots have added to the state."""
        for first, copy in self._begun.values():
            put_back(first, copy)
        held = memories_of(self._state) if self._known else {}
        self._made = {at: (some[0], copy_bytes(some[0])) for at, some in held.items() if at not in self._begun}
        for draw_again in self._draws:
            draw_again()

    def left(self, answer: object) -> Left:
        """Sketches the changes of the state since, and the contents of an answer; empty if the beginning is not
        known."""
        memories = memories_of(self._state, answer) if self._known else {}
        return [sketch(first, self._before(address, first)) for address, (first, *_) in memories.items()]

    def _before(self, address: int, tensor: Any) -> Any:
        _, copy = self._begun.get(address) or self._made.get(address) or (None, None)
        return copy if copy is not None and copy.numel() == tensor.untyped_storage().nbytes() else None


@contextmanager
def restore_state(state: object, inputs: set[int]) -> Iterator[Beginning]:
    """Gives inputs other numbers in the body; restores the state's memory and generators after it. A state of more than
    MOST_BYTES continues unchanged."""
    memories = memories_of(state)
    if sum(some[0].untyped_storage().nbytes() for some in memories.values()) > MOST_BYTES:
        yield Beginning(state, None)
        return
    with ExitStack() as stack:
        for draw_again in draws_of(state):
            stack.callback(draw_again)
        for seed, (address, (first, *_)) in enumerate(memories.items()):
            replaced = address in inputs and first.dtype.is_floating_point
            stack.enter_context(other_numbers(first, seed) if replaced else same_after(first))
        yield Beginning(state, memories)
