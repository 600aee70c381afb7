"""Tells whether a step's results depend on its inputs: a step that gives what it gave before does no work.

Results are tensors that the step writes or returns, as far as they can be reached from the state or from its answer.
Inputs are tensors that were there when the state had been prepared, and that no step writes. First up to four steps are
compared with those before: where each gives something new (weights go on, a loader goes on, numbers are drawn) they do
work. Otherwise all inputs are replaced by other numbers of the same range, past torch's version counters, so that a
cache which relies on these is deceived too; then what the step overwrites, in case it works in place. Results that stay
the same bit for bit are no work. Neither is a step that calls no operator of torch, takes next to no time, and leaves
everything as it was.

Nothing is reported where that may have other reasons: no result can be seen, no input could be replaced, the step loads
data, or part of its state lies in memory that is not torch's own (NumPy's, or a file's, which is never written).

A step may also know that it is timed, by whatever it looks at. So after its slots a state runs more slots like those,
and others in which each step runs under the mode that counts operators (late_slots.py). All begin with the same
numbers, which differ from those that it was timed with: results may be cached, or not be kept at all. They are compared
by their results and by their time. A difference counts only if all slots of either kind agree with the first of that
kind, in an order that no periodic step follows.
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
from fp8bench.worker.bits import copied, digest, other_numbers, put_back, same_after, sketch
from fp8bench.worker.clock import PhaseClock
from fp8bench.worker.state_tensors import address_of, draws_of, is_foreign, reads_elsewhere, tensors_of, version_of
from fp8bench.worker.static_scales import step as take_step

# A step that takes longer is not taken again; nor is a state read again whose reading takes longer.
LONGEST_SECONDS = 1.0
# Python's part of a step that does nothing takes less; work that torch does not see takes more.
NO_TIME_SECONDS = 50e-6
# How often such a step is taken. On a loaded machine even a sleeping step may take longer at times, so short ones are
# taken more often.
_TIMED, _MOST_TIMED, _SPENT_SECONDS = 5, 100, 0.01
# If none of so many steps gives what another one gave, they do work.
_MOST_STEPS = 4


class _SeenMemory(NamedTuple):
    """A stretch of memory: its address, a digest of its bits, and how often torch has written it."""

    address: int
    digest: int
    version: int
    elements: int
    floating: bool


class _TakesLong(Exception):
    """Looking takes longer than it is worth; the text says what does."""


class _Steps:
    """A state of a case, steps of it, and what its memory holds after them."""

    def __init__(self, workload: Workload, setup: Setup, device: Device, index: int) -> None:
        self._workload, self._setup, self._device, self._index = workload, setup, device, index
        self.phases = set[str]()
        # The stamper that timed steps have: a step may recognise it by its class.
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
        """Takes a step and returns its time; on a processor the thread's own, without waiting for others."""
        clock = time.thread_time if self._device.kind == "cpu" else time.perf_counter
        begun = clock()
        self.take()
        return clock() - begun

    def fails(self) -> bool:
        """Takes a step whose numbers may not suit it (a factorisation, say); tells whether it raises."""
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

    def seen(self) -> list[_SeenMemory]:
        digests, end = [], time.thread_time() + LONGEST_SECONDS
        for address, tensors in self.memories().items():
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
    """Judges a few steps of a state of its own; the first is not compared, because it may make what lasts."""
    try:
        return _effect(_Steps(workload, setup, device, index))
    except _TakesLong as long:
        return StepEffect(None, str(long))


def _effect(steps: _Steps) -> StepEffect:
    prepared = steps.seen()
    taken = _until_alike(steps)
    if taken is None:
        return StepEffect(True)
    before, after = taken.seen[-2:]
    if not after:
        return StepEffect(None, "its state holds no tensor")
    if LOADING & set(steps.phases) or reads_elsewhere(steps.state):
        return StepEffect(None, "it may read data outside of tensors")
    given = set(prepared) & set(before) & set(after)
    answered = {address_of(tensor) for tensor in tensors_of(steps.returned)}
    results = [
        tensor
        for tensor in after
        if not taken.counts(tensor) and tensor not in given and (tensor not in before or tensor.address in answered)
    ]
    if not given:
        return StepEffect(None, "it has no input tensor that could be changed")
    idle = not results and _idle(steps)
    if not idle and not any(
        result.floating or result.elements > 1 for result in results
    ):  # a truth value need not change
        return StepEffect(None, "none of its results is kept in its state, or returned")
    floating, others = ({tensor.address for tensor in given if tensor.floating is kind} for kind in (True, False))
    in_place = {result.address for result in results if result not in before} & {tensor.address for tensor in before}
    for chosen, results_too in ((floating, False), (others, False), (in_place, True)):
        if chosen and _changes(steps, chosen, taken, results_too):
            return StepEffect(True)  # also if others than torch have launched the work, which nobody counts
    if idle:
        if _rewrites(steps, set(before) & set(after) - given):
            return StepEffect(True)
        return StepEffect(False, "it calls no operator of torch and leaves all tensors as they were")
    return StepEffect(False, f"its results are the same, bit for bit, whatever its {len(given)} input tensors hold")


@dataclass(frozen=True)
class _Taken:
    """What was seen after each step but the first; the last is like an earlier one. `going_on` are addresses of single
    numbers that changed all the same: they may count steps. `anew` tells that single numbers which each step makes
    anew, and which have no lasting address, changed too."""

    seen: list[list[_SeenMemory]]
    going_on: set[int]
    anew: bool

    def counts(self, tensor: _SeenMemory) -> bool:
        return tensor.address in self.going_on or (
            self.anew and tensor.elements <= 1 and tensor.address not in self._lasting
        )

    @cached_property
    def _lasting(self) -> set[int]:
        return {tensor.address for tensor in self.seen[0]}


def _until_alike(steps: _Steps) -> _Taken | None:
    """Takes steps until one gives what an earlier one gave; None where none of a few does."""
    steps.take()
    seen = [steps.seen()]
    held = [steps.memories()]  # kept alive, or the next step's new tensors might get the same address and look alike
    while len(seen) < _MOST_STEPS:
        if steps.seconds() > LONGEST_SECONDS:
            raise _TakesLong(f"a step takes more than {LONGEST_SECONDS:g} s")
        seen.append(steps.seen())
        held.append(steps.memories())
        for earlier in reversed(seen[:-1]):
            if (going_on := _alike(earlier, seen[-1])) is not None:
                return _Taken(seen, *going_on)
    return None


def _alike(old: Sequence[_SeenMemory], new: Sequence[_SeenMemory]) -> tuple[set[int], bool] | None:
    """Compares two steps; None if they differ in more than single numbers. Otherwise it returns the addresses of single
    numbers that differ, and whether some of those made anew do. Memory that stays is compared by its address; what is
    made anew lies elsewhere each time, and is compared all together."""
    before = {tensor.address: tensor for tensor in old}
    stayed = {tensor.address: tensor for tensor in new if tensor.address in before}
    going_on = {address for address, tensor in stayed.items() if tensor.digest != before[address].digest}
    made_anew = [[tensor for tensor in some if tensor.address not in stayed] for some in (old, new)]
    many, single = (
        [Counter(tensor.digest for tensor in some if (tensor.elements > 1) is more) for some in made_anew]
        for more in (True, False)
    )
    if any(stayed[address].elements > 1 for address in going_on) or many[0] != many[1]:
        return None
    return going_on, single[0] != single[1]


def _changes(steps: _Steps, chosen: set[int], taken: _Taken, results_too: bool) -> bool:
    """Tells whether a step gives what none gave before once the `chosen` memories hold other numbers. What changes
    anyway is left out, and so are chosen memories which still hold their other numbers. With `results_too` these count:
    the step may work in place.

    A chosen memory may be a result all the same: before the first step it held by chance what the steps give, as fresh
    memory does where the state before this one had its result, and torch did not count the writing."""
    before, replaced = steps.seen(), dict[int, int]()
    with ExitStack() as others:
        # Each by numbers of its own: a result that equals an input would else equal it afterwards too.
        for seed, (address, (first, *_)) in enumerate(steps.memories().items()):
            if address in chosen:
                others.enter_context(other_numbers(first, seed))
                replaced[address] = digest(first)
        if steps.fails():
            return True
        after = steps.seen()
    untouched = {tensor.address for tensor in after if tensor.digest == replaced.get(tensor.address)}
    left_out = set[int]() if results_too else untouched

    def given(seen: Sequence[_SeenMemory]) -> Counter[int]:
        return Counter(tensor.digest for tensor in seen if not taken.counts(tensor) and tensor.address not in left_out)

    return given(after) not in [given(seen) for seen in (*taken.seen, before)]


def _rewrites(steps: _Steps, written_once: set[_SeenMemory]) -> bool:
    """Tells whether a step works in place past torch: memory that only the first step changed, as rounding does, is
    changed again once it holds other numbers."""
    addresses = {tensor.address for tensor in written_once}
    for address, (first, *_) in steps.memories().items():
        if address in addresses:
            old = digest(first)
            with other_numbers(first, seed=0):
                other = digest(first)
                if steps.fails() or digest(first) not in (old, other):
                    return True
    return False


def _idle(steps: _Steps) -> bool:
    """Tells whether a step calls nothing of torch's, and is too fast to do work that torch does not see."""
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
# Other kernels round differently, by less than the first share of what a step does to a tensor. A tensor that changes
# by less than the second share of what another one does may hold nothing but rounding.
_ALIKE, _ROUNDING = 0.05, 1e-3
# Counted operators may take so many times a timed step, after deducting what counting each of them costs at most.
_SLOWER = 1.5
_CALL_SECONDS = 30e-6
# Replacing the numbers of a larger state takes longer than it is worth.
MOST_BYTES = 1 << 26

# A few sums of what a step did to each tensor, and of each new tensor, in the order of memories_of.
Left = list[Any]


class Slot(NamedTuple):
    """`least` is the time of the fastest step without what counting its operators costs, `most` that of the slowest
    with it."""

    typical: float
    least: float
    left: Left
    most: float


def slot_of(seconds: Sequence[float], operators: int, left: Left, most: float) -> Slot:
    """Makes a Slot of the seconds of its steps, or of their operators; `operators` is how many a step had if they were
    counted, else 0. The slowest step took `most`."""
    return Slot(median(seconds), min(seconds) - _CALL_SECONDS * operators, left, most)


def told_apart() -> Generator[bool, Slot | None, str]:
    """Asks for slots by whether they are timed (else counted), and returns how the two kinds differ; '' if they do not,
    or nobody can tell. Most cases need only two slots."""
    timed: list[Slot] = []
    counted: list[Slot] = []
    why = ""
    for is_timed in _ORDER:
        if (taken := (yield is_timed)) is None or taken.typical > LONGEST_SECONDS:
            return ""
        (timed if is_timed else counted).append(taken)
        if counted and not (why := _difference(timed, counted)):
            return ""
    return why


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
    lefts = [slot.left for slot in (*timed, *counted)]
    least = _ROUNDING * max((float(sums.abs().max()) for left in lefts for sums in left), default=0.0)
    for place in zip_longest(*lefts):
        of_timed, of_counted = place[: len(timed)], place[len(timed) :]
        settled = all(_left_alike(some[0], other, least) for some in (of_timed, of_counted) for other in some[1:])
        if settled and not _left_alike(of_timed[0], of_counted[0], least):
            return "timed, a step leaves other numbers than while its operators are counted"
    return ""


def _left_alike(sums: Any, others: Any, least: float) -> bool:
    if sums is None or others is None:
        return sums is others
    apart, most = float((sums - others).abs().max()), float(max(sums.abs().max(), others.abs().max()))
    return apart <= max(_ALIKE * most, least)


class Beginning:
    """Where all slots of a state begin: the numbers of its memories, by address, and the state of generators."""

    def __init__(self, state: object, memories: Mapping[int, list[Any]] | None) -> None:
        self._state, self._known = state, memories is not None
        self._begun = {address: (some[0], copied(some[0])) for address, some in (memories or {}).items()}
        self._draws = draws_of(state) if self._known else []
        self._made: dict[int, tuple[Any, Any]] = {}

    def again(self) -> None:
        """Restores the beginning. What earlier slots have made and left in the state stays, and is remembered."""
        for first, copy in self._begun.values():
            put_back(first, copy)
        held = memories_of(self._state) if self._known else {}
        self._made = {at: (some[0], copied(some[0])) for at, some in held.items() if at not in self._begun}
        for draw_again in self._draws:
            draw_again()

    def left(self, answer: object) -> Left:
        """Sketches what was done to the state since, and what an answer holds; empty if the beginning is not known."""
        memories = memories_of(self._state, answer) if self._known else {}
        return [sketch(first, self._before(address, first)) for address, (first, *_) in memories.items()]

    def _before(self, address: int, tensor: Any) -> Any:
        _, copy = self._begun.get(address) or self._made.get(address) or (None, None)
        return copy if copy is not None and copy.numel() == tensor.untyped_storage().nbytes() else None


@contextmanager
def as_they_were(state: object, inputs: set[int]) -> Iterator[Beginning]:
    """Gives inputs other numbers in the body; restores the state's memory and generators after it. A state of more than
    MOST_BYTES goes on as it is."""
    memories = memories_of(state)
    if sum(some[0].untyped_storage().nbytes() for some in memories.values()) > MOST_BYTES:
        yield Beginning(state, None)
        return
    with ExitStack() as kept:
        for draw_again in draws_of(state):
            kept.callback(draw_again)
        for seed, (address, (first, *_)) in enumerate(memories.items()):
            replaced = address in inputs and first.dtype.is_floating_point
            kept.enter_context(other_numbers(first, seed) if replaced else same_after(first))
        yield Beginning(state, memories)
