"""Whether timed steps do what counted ones do: a step may know that it is timed, by whatever it looks at.

After its slots a state has more of them, just like those; and others in which each step runs under the mode that counts
operators. All begin with the same numbers, which are not those that it was timed with, and are held against each other
by what they leave, and by their time: results may be kept from before, or not be kept at all. A difference is one if
every slot of either kind agrees with the first of its kind, in an order that no step that goes by turns follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from statistics import median
from typing import Any, NamedTuple

import torch

from fp8bench import units
from fp8bench.worker.state_bits import other_numbers, sketch
from fp8bench.worker.step_effect import LONGEST_SECONDS, memories_of

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
        if (found := slot(is_timed)) is None or found.typical > LONGEST_SECONDS:
            return ""
        (timed if is_timed else counted).append(found)
        if counted and not (why := _difference(timed, counted)):
            return ""
    return why


def _difference(timed: Sequence[Slot], counted: Sequence[Slot]) -> str:
    slowest, fastest = max(one.typical for one in timed), min(one.least for one in counted)
    if fastest > _SLOWER * slowest:
        shown = units.seconds(slowest), units.seconds(fastest)
        return "timed, a step takes {}, and its operators {} or more while they are counted".format(*shown)
    lefts = [one.left for one in (*timed, *counted)]
    least = _ROUNDING * max((float(sums.abs().max()) for left in lefts for sums in left), default=0.0)
    for place in zip_longest(*lefts):
        of_timed, of_counted = place[: len(timed)], place[len(timed) :]
        settled = all(_alike(some[0], one, least) for some in (of_timed, of_counted) for one in some[1:])
        if settled and not _alike(of_timed[0], of_counted[0], least):
            return "timed, a step leaves other numbers than while its operators are counted"
    return ""


def _alike(sums: Any, others: Any, least: float) -> bool:
    if sums is None or others is None:
        return sums is others
    apart, most = float((sums - others).abs().max()), max(float(one.abs().max()) for one in (sums, others))
    return apart <= max(_ALIKE * most, least)


@contextmanager
def as_they_were(state: object, inputs: set[int]) -> Iterator[Callable[[object], Left]]:
    """In the body inputs hold other numbers; after it the state's memory and torch's generator are as they were.

    Yields what tells, at the end of the body, what has been done to the state, and is in an answer. Nothing of a large
    state: it goes on.
    """
    memories = memories_of(state)
    if sum(some[0].untyped_storage().nbytes() for some in memories.values()) > MOST_BYTES:
        yield lambda answer: []
        return
    random = torch.get_rng_state()
    with ExitStack() as kept:
        kept.callback(torch.set_rng_state, random)
        for address, (first, *_) in memories.items():
            replaced = address in inputs and first.dtype.is_floating_point
            kept.enter_context(other_numbers(first, replaced))
        before = {address: sketch(some[0]) for address, some in memories.items()}
        yield lambda answer: _left(state, answer, before)


def _left(state: object, answer: object, before: Mapping[int, Any]) -> Left:
    memories = memories_of(state, answer)
    return [sketch(first) - before.get(address, 0.0) for address, (first, *_) in memories.items()]
