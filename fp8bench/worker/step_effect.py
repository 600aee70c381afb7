"""Checks whether a step's results depend on its inputs: a step that repeats earlier results does no work.

Results are tensors that the step writes or returns, as far as the state or the step's answer holds them. Inputs are
tensors that existed when the state had been prepared, and that no step writes. First, up to four steps are compared
with earlier steps. If each gives a new result, the steps do work: weights change, a loader advances, or random numbers
are drawn. Otherwise all inputs are replaced by different numbers of the same range. This bypasses torch's version
counters, so that caches that rely on them become wrong. Then the tensors that the step overwrites are replaced, because
the step may work in place. If the results are still bitwise equal, the step does no work. A step also does no work if
it calls no operator of torch, takes almost no time, and changes nothing.

Nothing is reported if equal results may have a different reason: no result is visible, no input could be replaced, the
step loads data, or part of its state is in memory that is not torch's.

A step may also detect that it is timed. So after the timing, a state runs more slots like the timed ones, and slots in
which operators are counted (late_slots.py). All of them begin with equal numbers, which differ from the timed numbers,
because a step may cache its results. Timed and counted slots are compared by results and times. A difference counts
only if the timed slots agree with each other, and the counted slots with each other.
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
from fp8bench.model.words import LOADING_PHASES
from fp8bench.profiler import calls_operators
from fp8bench.protocols import Device, Setup, Workload
from fp8bench.worker.bits import copy_bytes, digest, replace_numbers, restore_afterwards, restore_bytes, sketch_tensor
from fp8bench.worker.clock import PhaseStampClock
from fp8bench.worker.state_tensors import (
    get_address,
    get_version,
    holds_non_torch_data,
    is_foreign_tensor,
    iterate_tensors,
    save_generators,
)
from fp8bench.worker.static_scales import step as take_step

# A step that takes more seconds than this is not repeated. A state that takes longer to read is not compared.
MAX_STEP_SECONDS = 1.0
# In Python, a step that does nothing takes less than this many seconds. A step whose work torch does not see takes
# more.
MAX_IDLE_STEP_SECONDS = 50e-6
# Limits for repeating a step that seems to do nothing: the least and most repetitions, and the CPU seconds after which
# no more follow. Load may lengthen some repetitions, so short steps are repeated more often.
_MIN_REPETITIONS, _MAX_REPETITIONS, _REPETITION_SECONDS = 5, 100, 0.01
# If this many steps all give different results, the steps do work.
_MAX_COMPARED_STEPS = 4


class _MemoryDigest(NamedTuple):
    """The contents of a range of memory: its address, a digest of its bits, and how often torch has written it."""

    address: int
    digest: int
    version: int
    elements: int
    has_float_elements: bool


class _InspectionTooSlow(Exception):
    """Inspecting a step takes too long. The message names what is slow."""


class _StateSteps:
    """Prepares the state of a case, runs steps on it, and computes digests of the memory of its tensors."""

    def __init__(self, workload: Workload, setup: Setup, device: Device, index: int) -> None:
        self._workload, self._setup, self._device, self._index = workload, setup, device, index
        self.phases = set[str]()
        # Use the phase markers of timed steps, because a step could detect markers of a different class.
        self._stamper = device.stamper(index)
        self._clock = PhaseStampClock(self._stamper, lambda code: self.phases.add(CELL_PHASES[code]))
        self.state = workload.prepare(setup)
        self.returned: Any = None

    def take_step_and_wait(self) -> None:
        self.returned = None
        self._clock.begin()
        self.returned = take_step(self._workload, self.state, self._setup.scales, self._clock)
        self._clock.end()
        self._device.synchronise(self._index)
        self._stamper.recycle()

    def seconds(self) -> float:
        """Takes a step and returns its seconds. On a CPU these are the thread's CPU seconds, which exclude waiting
        for a core.
        """
        clock = time.thread_time if self._device.kind == "cpu" else time.perf_counter
        start = clock()
        self.take_step_and_wait()
        return clock() - start

    def is_step_failing(self) -> bool:
        """Takes a step after tensors were filled with other numbers. Returns whether it raises an error. A matrix
        factorisation may fail for such numbers.
        """
        try:
            self.take_step_and_wait()
        except Exception as error:
            if self._device.is_out_of_memory(error):
                raise
            self._device.synchronise(self._index)  # raises if the device is broken
            return True
        return False

    def memories(self) -> dict[int, list[Any]]:
        return find_tensors_by_address(self.state, self.returned)

    def read_memory(self) -> list[_MemoryDigest]:
        return self.digest_memories(self.memories())

    def digest_memories(self, memories: Mapping[int, list[Any]]) -> list[_MemoryDigest]:
        memory_digests = []
        deadline = time.thread_time() + MAX_STEP_SECONDS
        for address, tensors in memories.items():
            _check_deadline(deadline)
            first_tensor = tensors[0]
            version = max(map(get_version, tensors))
            count = max(tensor.numel() for tensor in tensors)
            is_float_tensor = first_tensor.dtype.is_floating_point
            memory_digests.append(_MemoryDigest(address, digest(first_tensor), version, count, is_float_tensor))
        return memory_digests


def find_tensors_by_address(*roots: object) -> dict[int, list[Any]]:
    """Returns the tensors that the objects `roots` hold, by the address of their memory. Leaves out memory that is not
    torch's.
    """
    memories: dict[int, list[Any]] = {}
    deadline = time.thread_time() + MAX_STEP_SECONDS
    for tensor in iterate_tensors(*roots, until=deadline):
        if not is_foreign_tensor(tensor):
            memories.setdefault(get_address(tensor), []).append(tensor)
    _check_deadline(deadline)
    return memories


def _check_deadline(deadline: float) -> None:
    if time.thread_time() > deadline:
        raise _InspectionTooSlow(f"its state takes more than {MAX_STEP_SECONDS:g} s to read")


def check_step_effect(workload: Workload, setup: Setup, device: Device, index: int) -> StepEffect:
    """Checks whether steps of a separate state do work. Contents are compared only after the first step, because
    it may create lasting objects.
    """
    try:
        return _find_step_effect(_StateSteps(workload, setup, device, index))
    except _InspectionTooSlow as long:
        return StepEffect(None, str(long))


def _find_step_effect(steps: _StateSteps) -> StepEffect:
    prepared_contents = steps.read_memory()
    history = _step_until_repeat(steps)
    if history is None:
        return StepEffect(True)
    previous_step, last_step = history.history[-2:]
    if not last_step:
        return StepEffect(None, "its state holds no tensor")
    if LOADING_PHASES & set(steps.phases) or holds_non_torch_data(steps.state):
        return StepEffect(None, "it may read data outside of tensors")
    inputs = set(prepared_contents) & set(previous_step) & set(last_step)
    returned_tensor_addresses = {get_address(tensor) for tensor in iterate_tensors(steps.returned)}
    results = [
        tensor
        for tensor in last_step
        if not history.is_counter(tensor)
        and tensor not in inputs
        and (tensor not in previous_step or tensor.address in returned_tensor_addresses)
    ]
    if not inputs:
        return StepEffect(None, "it has no input tensor that could be changed")
    is_idle = not results and _is_idle(steps)
    if not is_idle and not any(
        result.has_float_elements or result.elements > 1 for result in results
    ):  # a result that is a single truth value may be equal by chance
        return StepEffect(None, "no result of it is stored in its state or returned")
    float_tensor_addresses = {tensor.address for tensor in inputs if tensor.has_float_elements}
    other_tensor_addresses = {tensor.address for tensor in inputs} - float_tensor_addresses
    overwritten_addresses = {result.address for result in results if result not in previous_step} & {
        tensor.address for tensor in previous_step
    }
    replacements = ((float_tensor_addresses, False), (other_tensor_addresses, False), (overwritten_addresses, True))
    for chosen_addresses, with_results in replacements:
        if chosen_addresses and _changes_result(steps, chosen_addresses, history, with_results):
            return StepEffect(True)  # the step did work, perhaps by code outside of torch
    if is_idle:
        if _rewrites_memory(steps, set(previous_step) & set(last_step) - inputs):
            return StepEffect(True)
        return StepEffect(False, "it calls no operator of torch and leaves all tensors unchanged")
    return StepEffect(False, f"its results are the same, bit for bit, whatever its {len(inputs)} input tensors hold")


@dataclass(frozen=True)
class _StepHistory:
    """Digests of the memory after each step. The last step's results equal those of an earlier step, except in
    one-element tensors.

    Such tensors may count steps. `changed_number_addresses` has the addresses of those that differ. `has_new_counters`
    is true if any of those that each step allocates again differ.
    """

    history: list[list[_MemoryDigest]]
    changed_number_addresses: set[int]
    has_new_counters: bool

    def is_counter(self, tensor: _MemoryDigest) -> bool:
        return tensor.address in self.changed_number_addresses or (
            self.has_new_counters and tensor.elements <= 1 and tensor.address not in self._first_step_addresses
        )

    @cached_property
    def _first_step_addresses(self) -> set[int]:
        return {tensor.address for tensor in self.history[0]}


def _step_until_repeat(steps: _StateSteps) -> _StepHistory | None:
    """Takes steps until one gives the results of an earlier step. Returns None if a few steps all give new results."""
    steps.take_step_and_wait()
    # keep these tensors, so that new tensors of the next step get different addresses
    step_memories = [steps.memories()]
    history = [steps.digest_memories(step_memories[0])]
    while len(history) < _MAX_COMPARED_STEPS:
        if steps.seconds() > MAX_STEP_SECONDS:
            raise _InspectionTooSlow(f"a step takes more than {MAX_STEP_SECONDS:g} s")
        step_memories.append(steps.memories())
        history.append(steps.digest_memories(step_memories[-1]))
        for earlier in reversed(history[:-1]):
            if (changed_numbers := _find_changed_scalars(earlier, history[-1])) is not None:
                return _StepHistory(history, *changed_numbers)
    return None


def _find_changed_scalars(old: Sequence[_MemoryDigest], new: Sequence[_MemoryDigest]) -> tuple[set[int], bool] | None:
    """Compares the memory after two steps. Returns None if a tensor of several elements differs. Otherwise returns the
    addresses of one-element tensors that differ and exist after both steps, and whether any of the one-element tensors
    differ that each step allocates again.
    """
    old_contents = {tensor.address: tensor for tensor in old}
    lasting_memories = {tensor.address: tensor for tensor in new if tensor.address in old_contents}
    changed_addresses = {
        address for address, tensor in lasting_memories.items() if tensor.digest != old_contents[address].digest
    }
    # Memory that each step allocates again has no lasting address. So compare the digests of all such tensors in any
    # order, and separately the digests of all single numbers.
    old_tensors, old_numbers = _count_content_digests(old, lasting_memories)
    new_tensors, new_numbers = _count_content_digests(new, lasting_memories)
    if any(lasting_memories[address].elements > 1 for address in changed_addresses) or old_tensors != new_tensors:
        return None
    return changed_addresses, old_numbers != new_numbers


def _count_content_digests(
    memories: Sequence[_MemoryDigest], lasting_memories: Mapping[int, object]
) -> tuple[Counter[int], Counter[int]]:
    """Returns how often each digest of contents occurs in tensors with several elements, and in one-element tensors.
    Does not count `lasting_memories`: tensors that keep their address from step to step.
    """
    tensor_count_by_digest = Counter[int]()
    number_count_by_digest = Counter[int]()
    for memory in memories:
        if memory.address not in lasting_memories:
            (tensor_count_by_digest if memory.elements > 1 else number_count_by_digest)[memory.digest] += 1
    return tensor_count_by_digest, number_count_by_digest


def _changes_result(steps: _StateSteps, chosen_addresses: set[int], history: _StepHistory, with_results: bool) -> bool:
    """Returns whether a step's results change after the numbers at `chosen_addresses` were replaced. One-element
    tensors that change in every step are not compared.

    Memory at a chosen address that still holds the new numbers after the step is compared only with `with_results`,
    because the step may work in place. Such memory may also be a result: before the first step, it may have held an
    earlier state's results at the same address, and torch may not have counted that a step wrote it.
    """
    contents_before_step = steps.read_memory()
    fill_digest_by_address = dict[int, int]()
    with ExitStack() as stack:
        # Use a different seed for each tensor. Otherwise a result and an input that were equal could be equal again.
        for seed, (address, (first_tensor, *_)) in enumerate(steps.memories().items()):
            if address in chosen_addresses:
                stack.enter_context(replace_numbers(first_tensor, seed))
                fill_digest_by_address[address] = digest(first_tensor)
        if steps.is_step_failing():
            return True
        memory_after = steps.read_memory()
    addresses_still_replaced = {
        tensor.address for tensor in memory_after if tensor.digest == fill_digest_by_address.get(tensor.address)
    }
    excluded_addresses = set[int]() if with_results else addresses_still_replaced

    def count_results(memories: Sequence[_MemoryDigest]) -> Counter[int]:
        results = (
            tensor for tensor in memories if not history.is_counter(tensor) and tensor.address not in excluded_addresses
        )
        return Counter(tensor.digest for tensor in results)

    return count_results(memory_after) not in map(count_results, (*history.history, contents_before_step))


def _rewrites_memory(steps: _StateSteps, written_once: set[_MemoryDigest]) -> bool:
    """Returns whether a step changes memory in place without torch noticing. Only the first step changed the memory
    `written_once`: rounding, for example, changes nothing when it is repeated. So this function fills the memory with
    other numbers, which a step that works in place changes again.
    """
    addresses = {tensor.address for tensor in written_once}
    for address, (first_tensor, *_) in steps.memories().items():
        if address in addresses:
            original_digest = digest(first_tensor)
            with replace_numbers(first_tensor, seed=0):
                replacement_digest = digest(first_tensor)
                if steps.is_step_failing() or digest(first_tensor) not in (original_digest, replacement_digest):
                    return True
    return False


def _is_idle(steps: _StateSteps) -> bool:
    """Returns whether a step calls no operator of torch, and is too fast to do any other work."""
    if calls_operators(steps.take_step_and_wait) is not False:
        return False
    deadline = time.monotonic() + MAX_STEP_SECONDS
    spent_seconds = 0.0
    for number in range(_MAX_REPETITIONS):
        start = time.process_time()
        steps.take_step_and_wait()
        step_seconds = time.process_time() - start
        if step_seconds < MAX_IDLE_STEP_SECONDS:
            return True
        spent_seconds += step_seconds
        if number + 1 >= _MIN_REPETITIONS and (spent_seconds > _REPETITION_SECONDS or time.monotonic() > deadline):
            break
    return False


# The order of slots that time steps (True) and slots that count operators (False). A step's time does not follow this
# order if it drifts steadily, or repeats after 2, 3, 4 or 8 slots.
_TIMED_SLOT_PATTERN = (True, False, False, True, False, True, True, False)
# Kernels may round differently in two slots. So ignore differences below _ROUNDING_SHARE of the step's effect on a
# tensor, and differences below _LEAST_CHANGE_SHARE of the largest effect on any tensor.
_ROUNDING_SHARE, _LEAST_CHANGE_SHARE = 0.05, 1e-3
# The largest allowed ratio between step times in timed slots and in slots that count operators, in both directions.
# Counting an operator may cost _OPERATOR_COUNTING_SECONDS.
_MAX_STEP_SLOWDOWN = 1.5
_OPERATOR_COUNTING_SECONDS = 30e-6
# The largest state, in bytes, that is filled with other numbers. Filling a larger state takes too long.
MAX_BYTES = 1 << 26

# For each tensor, in the order of `find_tensors_by_address`: a few sums that describe how a step changed the tensor
# (bits.sketch_tensor), or the content of the tensor if it is new.
TensorChangeSketches = list[Any]


class SlotSummary(NamedTuple):
    """Step times of a slot (one case's turn in a round). `least` is the fastest step without the cost of counting
    operators, and `most` the slowest step with this cost.
    """

    typical: float
    least: float
    sums: TensorChangeSketches
    most: float


def make_slot_summary(seconds: Sequence[float], operators: int, sums: TensorChangeSketches, most: float) -> SlotSummary:
    """Summarises a slot (one case's turn) whose slowest step took `most` seconds. If operators were counted, `seconds`
    has the time that each step spent in its `operators` operators. Otherwise `seconds` has the time of each step, and
    `operators` is 0.
    """
    return SlotSummary(median(seconds), min(seconds) - _OPERATOR_COUNTING_SECONDS * operators, sums, most)


def compare_slots() -> Generator[bool, SlotSummary | None, str]:
    """A generator that yields whether the next slot (turn of a case) is timed (True) or has its operators counted
    (False), and receives this slot. It returns how the two kinds differ; '' if they do not, or if this is unknown.
    """
    timed_slots: list[SlotSummary] = []
    counted_slot_summaries: list[SlotSummary] = []
    reason = ""
    for is_timed in _TIMED_SLOT_PATTERN:
        if (slot := (yield is_timed)) is None or slot.typical > MAX_STEP_SECONDS:
            return ""
        (timed_slots if is_timed else counted_slot_summaries).append(slot)
        if counted_slot_summaries and not (reason := _describe_slot_difference(timed_slots, counted_slot_summaries)):
            return ""
    return reason


def _describe_slot_difference(timed: Sequence[SlotSummary], counted: Sequence[SlotSummary]) -> str:
    slowest_timed_seconds = max(slot.typical for slot in timed)
    fastest_counted_seconds = min(slot.least for slot in counted)
    if fastest_counted_seconds > _MAX_STEP_SLOWDOWN * slowest_timed_seconds:
        return (
            f"a step takes {units.seconds(slowest_timed_seconds)} when it is timed, and its operators take "
            f"{units.seconds(fastest_counted_seconds)} or more when they are counted"
        )
    fastest_timed = min(slot.least for slot in timed)
    slowest_counted = max(slot.most for slot in counted)
    if fastest_timed > _MAX_STEP_SLOWDOWN * slowest_counted:
        return (
            f"a step takes {units.seconds(fastest_timed)} when it is timed, and {units.seconds(slowest_counted)} when "
            "its operators are counted"
        )
    # A tensor is evidence that a step cheats only if all timed slots agree about its change, and all counted slots too.
    sums_by_slot = [slot.sums for slot in (*timed, *counted)]
    least_change = _LEAST_CHANGE_SHARE * max(
        (float(sums.abs().max()) for slot_sums in sums_by_slot for sums in slot_sums), default=0.0
    )
    for tensor_sums in zip_longest(*sums_by_slot):
        timed_slot_sums = tensor_sums[: len(timed)]
        counted_sums = tensor_sums[len(timed) :]
        all_slots_agree = _do_all_agree(timed_slot_sums, least_change) and _do_all_agree(counted_sums, least_change)
        if all_slots_agree and not _are_sketches_close(timed_slot_sums[0], counted_sums[0], least_change):
            return "a step leaves other results when it is timed than when its operators are counted"
    return ""


def _do_all_agree(sketches: Sequence[Any], least_change: float) -> bool:
    return all(_are_sketches_close(sketches[0], sums, least_change) for sums in sketches[1:])


def _are_sketches_close(sums: Any, other_sums: Any, least_change: float) -> bool:
    if sums is None or other_sums is None:
        return sums is other_sums
    difference = float((sums - other_sums).abs().max())
    largest_absolute_sum = float(max(sums.abs().max(), other_sums.abs().max()))
    return difference <= max(_ROUNDING_SHARE * largest_absolute_sum, least_change)


class InitialStateContents:
    """Stores the contents of a state's memory and the positions of its random generators, to start each slot after the
    timing from them.
    """

    def __init__(self, state: object, memories: Mapping[int, list[Any]] | None) -> None:
        self._state = state
        self._is_stored = memories is not None
        self._initial = {address: (some[0], copy_bytes(some[0])) for address, some in (memories or {}).items()}
        self._generator_resets = save_generators(state) if self._is_stored else []
        # The tensors that the state held when the slot began, with copies of their memory, by address. They stay
        # alive, so that no new tensor gets the address of one of them.
        self._contents: dict[int, tuple[Any, Any]] = {}

    def restore(self) -> None:
        """Restores the memory and the generators, except for tensors that earlier slots added to the state."""
        for first_tensor, copy in self._initial.values():
            restore_bytes(first_tensor, copy)
        memories = find_tensors_by_address(self._state) if self._is_stored else {}
        self._contents = dict(self._initial)
        for address, (first_tensor, *_) in memories.items():
            if address not in self._contents:
                self._contents[address] = first_tensor, copy_bytes(first_tensor)
        for draw_again in self._generator_resets:
            draw_again()

    def sketch_changes(self, answer: object) -> TensorChangeSketches:
        """Returns sketches (random sums) of the state's changes since `restore`, and of the tensors in a step's answer.
        Returns [] if the state's contents were not stored.
        """
        memories = find_tensors_by_address(self._state, answer) if self._is_stored else {}
        change_sketches = []
        for address, (first_tensor, *_) in memories.items():
            _, copy = self._contents.get(address, (None, None))
            # Memory of a different size is a new tensor at an old address.
            if copy is not None and copy.numel() != first_tensor.untyped_storage().nbytes():
                copy = None
            change_sketches.append(sketch_tensor(first_tensor, copy))
        return change_sketches


@contextmanager
def restore_state(state: object, inputs: set[int]) -> Iterator[InitialStateContents]:
    """Replaces the numbers of the inputs within the `with` block. Restores the state's memory and generators
    afterwards.

    A state of more than MAX_BYTES is left unchanged.
    """
    memories = find_tensors_by_address(state)
    if sum(some[0].untyped_storage().nbytes() for some in memories.values()) > MAX_BYTES:
        yield InitialStateContents(state, None)
        return
    with ExitStack() as stack:
        for draw_again in save_generators(state):
            stack.callback(draw_again)
        for seed, (address, (first_tensor, *_)) in enumerate(memories.items()):
            is_float_input = address in inputs and first_tensor.dtype.is_floating_point
            stack.enter_context(
                replace_numbers(first_tensor, seed) if is_float_input else restore_afterwards(first_tensor)
            )
        yield InitialStateContents(state, memories)
