"""Whether what a step gives changes with what it is given: a step that gives what it gave before does no work.

What it gives are tensors that it writes or returns, as far as they can be reached from the state or from its answer;
what it is given are tensors that were there when the state had been prepared, and that no step writes. Up to four steps
are held against the ones before first: where each gives something else (weights go on, a loader goes on, numbers are
drawn) they do something. Else all that it is given is replaced by other numbers of the same range, past torch's count
of versions, so that a memory that goes by these is deceived too; then what it writes in its place, in case that is what
it works on. What is still the same, bit for bit, is no work.
Nor is a step that calls no operator of torch, takes next to no time, and leaves everything as it was.

Nothing is said where that may have other reasons: where nothing that the step gives can be seen, it is given nothing
that could be replaced, it loads data, or a part of its state lies in memory that is not torch's own (NumPy's, or a
file's, which is never written).

A step may know that it is timed, by whatever it looks at. So after its slots a state has more of them, just like those;
and others in which each step runs under the mode that counts operators. All begin with the same numbers, which are not
those that it was timed with, and are held against each other by what they leave, and by their time: results may be kept
from before, or not be kept at all. A difference is one if every slot of either kind agrees with the first of its kind,
in an order that no step that goes by turns follows.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from fp8bench.worker.bits import copied, digest, other_numbers, put_back, sketch
from fp8bench.worker.clock import PhaseClock
from fp8bench.worker.state_tensors import address_of, draws_of, is_foreign, reads_elsewhere, tensors_of, version_of
from fp8bench.worker.static_scales import step as take_step

# A step that takes longer is not taken again; nor is a state read again whose reading takes longer.
LONGEST_SECONDS = 1.0
# What Python does in a step that does nothing takes less; work that torch does not see takes more.
NO_TIME_SECONDS = 50e-6
# How often a step is taken. A loaded machine makes even a sleeping one take more than that at times: short ones are
# taken more often.
_TIMED, _MOST_TIMED, _SPENT_SECONDS = 5, 100, 0.01
# So many steps in which none gives what another gave do something.
_MOST_STEPS = 4


class _SeenMemory(NamedTuple):
    """A stretch of memory: where it lies, its bits as one number, and how often torch has written it."""

    address: int
    digest: int
    version: int
    elements: int
    floating: bool


class _TakesLong(Exception):
    """What is looked at takes longer than that is worth; the text says what."""


class _Steps:
    """A state of a case, steps of it, and what its memory holds after them."""

    def __init__(self, workload: Workload, setup: Setup, device: Device, index: int) -> None:
        self._workload, self._setup, self._device, self._index = workload, setup, device, index
        self.phases = set[str]()
        # What steps are timed with: they may know it by its class.
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
        """Take one more: how long it takes. On a processor by its own time: waiting for others is none of it."""
        clock = time.thread_time if self._device.kind == "cpu" else time.perf_counter
        begun = clock()
        self.take()
        return clock() - begun

    def fails(self) -> bool:
        """Take one more that may be at odds with its numbers, a factorisation say: whether it raises."""
        try:
            self.take()
        except Exception as error:
            if self._device.is_out_of_memory(error):
                raise
            self._device.synchronise(self._index)  # raises where nothing works any more
            return True
        return False

    def memories(self) -> dict[int, list[Any]]:
        """The tensors of the state, and of what the last step returned, by the memory that they share."""
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
    """The tensors that these hold, by the memory that they share; not in somebody else's memory."""
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
    """Of a few steps of a state of its own. The first one is not held against others: it may make what lasts."""
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
        return StepEffect(None, "it may read what does not lie in tensors")
    given = set(prepared) & set(before) & set(after)
    answered = {address_of(tensor) for tensor in tensors_of(steps.returned)}
    results = [
        tensor
        for tensor in after
        if not taken.counts(tensor) and tensor not in given and (tensor not in before or tensor.address in answered)
    ]
    if not given:
        return StepEffect(None, "it is given no tensor that could be changed")
    idle = not results and _idle(steps)
    if not idle and not any(
        result.floating or result.elements > 1 for result in results
    ):  # a truth value need not change
        return StepEffect(None, "nothing that it gives is kept in its state, or returned")
    floating, others = ({tensor.address for tensor in given if tensor.floating is kind} for kind in (True, False))
    in_place = {result.address for result in results if result not in before} & {tensor.address for tensor in before}
    for chosen, results_too in ((floating, False), (others, False), (in_place, True)):
        if chosen and _changes(steps, chosen, taken, results_too):
            return StepEffect(True)  # also of what others than torch have launched, which nobody counts
    if idle:
        return StepEffect(False, "it calls no operator of torch and leaves all tensors as they were")
    return StepEffect(
        False, f"it gives the same, bit for bit, whatever is in the {len(given)} tensors that it is given"
    )


@dataclass(frozen=True)
class _Taken:
    """What was seen after each step but the first, the last one like an earlier one; `going_on` are the places of
    single numbers that were not, which may count steps. Those that each step makes anew have no place of their own."""

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
    """Steps until one gives what an earlier one gave, as a memory of results does in the end; None where none of
    a few does: weights go on, a loader goes on, numbers are drawn."""
    steps.take()
    seen = [steps.seen()]
    held = [steps.memories()]  # or what the next step makes anew might lie where this was, and look like it
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
    """The memories of single numbers that differ, and whether some of those made anew do; None where more differs.

    By where they lie, in whatever order they are found; what was made anew lies elsewhere, and is held together.
    """
    before = {tensor.address: tensor for tensor in old}
    stayed = {tensor.address: tensor for tensor in new if tensor.address in before}
    going_on = {address for address, tensor in stayed.items() if tensor.digest != before[address].digest}
    fresh = [[tensor for tensor in some if tensor.address not in stayed] for some in (old, new)]
    many, single = (
        [Counter(tensor.digest for tensor in some if (tensor.elements > 1) is more) for some in fresh]
        for more in (True, False)
    )
    if any(stayed[address].elements > 1 for address in going_on) or many[0] != many[1]:
        return None
    return going_on, single[0] != single[1]


def _changes(steps: _Steps, chosen: set[int], taken: _Taken, results_too: bool) -> bool:
    """Whether a step gives what none before gave once these memories hold other numbers.

    What goes on anyway is left out; so are they themselves, unless a step writes them: then it may work in place.
    """
    left_out = set[int]() if results_too else chosen

    def given(seen: Sequence[_SeenMemory]) -> Counter[int]:
        return Counter(tensor.digest for tensor in seen if not taken.counts(tensor) and tensor.address not in left_out)

    before = [given(seen) for seen in (*taken.seen, steps.seen())]
    with ExitStack() as replaced:
        for address, tensors in steps.memories().items():
            if address in chosen:
                replaced.enter_context(other_numbers(tensors[0]))
        return steps.fails() or given(steps.seen()) not in before


def _idle(steps: _Steps) -> bool:
    """Whether a step calls nothing of torch's, and takes no time that could be work of others'."""
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


# Timed or not: neither turns of 2, 3, 4 or 8, nor what goes on by as much each time, look like this.
_ORDER = (True, False, False, True, False, True, True, False)
# Other kernels round otherwise, by less than this share of what a step does to a tensor; and a tensor to which it does
# less than so small a share of what it does to another may hold nothing but rounding.
_ALIKE, _ROUNDING = 0.05, 1e-3
# The operators of the fastest counted step take so many times the slowest slot's typical step. A mode's Python lies
# between them; to call each past it takes no more than this.
_SLOWER = 1.5
_CALL_SECONDS = 30e-6
# Replacing the numbers of a larger state takes longer than it is worth.
MOST_BYTES = 1 << 26

# What a step does to each tensor, and leaves in new ones: a few sums of each, in the order they are found.
Left = list[Any]


class Slot(NamedTuple):
    """`least` is the fastest step of those whose operators are counted: what these took."""

    typical: float
    least: float
    left: Left


def slot_of(seconds: Sequence[float], operators: int, left: Left) -> Slot:
    """Of the seconds of timed steps; or of the operators, so many a step, of counted ones."""
    return Slot(median(seconds), min(seconds) - _CALL_SECONDS * operators, left)


def told_apart(slot: Callable[[bool], Slot | None]) -> str:
    """How timed slots differ from counted ones, '' if they do not, or nobody can tell; two tell it of most."""
    timed: list[Slot] = []
    counted: list[Slot] = []
    why = ""
    for is_timed in _ORDER:
        if (taken := slot(is_timed)) is None or taken.typical > LONGEST_SECONDS:
            return ""
        (timed if is_timed else counted).append(taken)
        if counted and not (why := _difference(timed, counted)):
            return ""
    return why


def _difference(timed: Sequence[Slot], counted: Sequence[Slot]) -> str:
    slowest, fastest = max(slot.typical for slot in timed), min(one.least for one in counted)
    if fastest > _SLOWER * slowest:
        shown = units.seconds(slowest), units.seconds(fastest)
        return "timed, a step takes {}, and its operators {} or more while they are counted".format(*shown)
    lefts = [slot.left for slot in (*timed, *counted)]
    least = _ROUNDING * max((float(sums.abs().max()) for left in lefts for sums in left), default=0.0)
    for place in zip_longest(*lefts):
        of_timed, of_counted = place[: len(timed)], place[len(timed) :]
        settled = all(_left_alike(some[0], one, least) for some in (of_timed, of_counted) for one in some[1:])
        if settled and not _left_alike(of_timed[0], of_counted[0], least):
            return "timed, a step leaves other numbers than while its operators are counted"
    return ""


def _left_alike(sums: Any, others: Any, least: float) -> bool:
    if sums is None or others is None:
        return sums is others
    apart, most = float((sums - others).abs().max()), max(float(one.abs().max()) for one in (sums, others))
    return apart <= max(_ALIKE * most, least)


class Beginning:
    """Where all slots of a state begin: the numbers of its memories, by address, and what generators draw."""

    def __init__(self, state: object, memories: Mapping[int, list[Any]] | None) -> None:
        self._state, self._known = state, memories is not None
        self._begun = {address: (some[0], copied(some[0])) for address, some in (memories or {}).items()}
        self._draws = draws_of(state) if self._known else []
        self._made: dict[int, tuple[Any, Any]] = {}

    def again(self) -> None:
        """What slots before have made and left in the state stays, and is known."""
        for first, copy in self._begun.values():
            put_back(first, copy)
        held = memories_of(self._state) if self._known else {}
        self._made = {at: (some[0], copied(some[0])) for at, some in held.items() if at not in self._begun}
        for draw_again in self._draws:
            draw_again()

    def left(self, answer: object) -> Left:
        """What has been done to the state since, and is in an answer; nothing where nobody knows."""
        memories = memories_of(self._state, answer) if self._known else {}
        return [sketch(first, self._before(address, first)) for address, (first, *_) in memories.items()]

    def _before(self, address: int, tensor: Any) -> Any:
        """None for memory that was made since, wherever it lies."""
        _, copy = self._begun.get(address) or self._made.get(address) or (None, None)
        return copy if copy is not None and copy.numel() == tensor.untyped_storage().nbytes() else None


@contextmanager
def as_they_were(state: object, inputs: set[int]) -> Iterator[Beginning]:
    """In the body inputs hold other numbers; after it the state's memory and its generators are as they were.

    A large state goes on.
    """
    memories = memories_of(state)
    if sum(some[0].untyped_storage().nbytes() for some in memories.values()) > MOST_BYTES:
        yield Beginning(state, None)
        return
    with ExitStack() as kept:
        for draw_again in draws_of(state):
            kept.callback(draw_again)
        for address, (first, *_) in memories.items():
            replaced = address in inputs and first.dtype.is_floating_point
            kept.enter_context(other_numbers(first, replaced))
        yield Beginning(state, memories)
