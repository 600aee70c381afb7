"""How far communication hides: parts of a step alone, at once and in turn, in rounds of random order."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from fp8bench.protocols.workload import StepParts

# Seconds of each round, by part.
Rounds = dict[str, list[float]]
# Fewer rounds agree by chance too often; short parts have more, for so many seconds of all ranks.
_LEAST_ROUNDS, _MOST_ROUNDS, _ROUNDS_SECONDS = 6, 15, 0.15
# Long enough that a barrier's own skew is small.
_LEAST_SECONDS = 3e-3
# Parts that do nothing new once the others have run: a whole step has run by then, too.
_MADE_OF_OTHERS = {"both", "in_turn"}


class RankMeeting(NamedTuple):
    """How a rank waits for its device, and for the other ranks."""

    synchronise: Callable[[], None]
    meet: Callable[[], None]


def step_rounds(parts: StepParts, together: RankMeeting, seed: int) -> Rounds:
    """Seconds of the parts of a step, of both at once and in turn, and of one rank's steps while the others wait."""
    import torch.distributed as dist

    if parts.together is None:
        parts = _repeated(parts, together.synchronise)
    assert parts.together is not None

    def in_turn() -> None:
        parts.compute()
        together.synchronise()
        parts.communicate()

    ours = {"compute": parts.compute, "communication": parts.communicate, "both": parts.together, "in_turn": in_turn}
    if parts.alone is not None:
        ours["whole"], ours["share"] = parts.alone if dist.get_rank() == 0 else (_nothing, _nothing)
    return rounds(ours, together, seed)


def _repeated(parts: StepParts, synchronise: Callable[[], None]) -> StepParts:
    """Beside a communication that goes on by itself, as many products as last long enough."""
    times = _times(parts.compute, synchronise)

    def products() -> None:
        for _ in range(times):
            parts.compute()

    def both() -> None:
        sent = parts.communicate()
        products()
        sent.wait()

    return StepParts(products, lambda: parts.communicate().wait(), both)


def rounds(parts: Mapping[str, Callable[[], object]], together: RankMeeting, seed: int) -> Rounds:
    """Seconds of each part in each round, which all ranks begin together. The order is the same on all of them."""
    order, found = random.Random(seed), {name: list[float]() for name in parts}
    for name, part in parts.items():  # for whatever comes first
        if name not in _MADE_OF_OTHERS:
            part()
    together.synchronise()
    begun = time.perf_counter()
    for number in range(_MOST_ROUNDS):
        if number >= _LEAST_ROUNDS and _most(time.perf_counter() - begun) > _ROUNDS_SECONDS:
            break
        for name in order.sample(list(parts), len(parts)):
            together.meet()
            start = time.perf_counter()
            parts[name]()
            together.synchronise()
            found[name].append(time.perf_counter() - start)
    return found


def _nothing() -> None:
    """What a rank does while another works."""


def _times(compute: Callable[[], object], synchronise: Callable[[], None]) -> int:
    """How many products last long enough: as many on each rank as on the fastest of them, or ranks would differ."""
    compute()
    synchronise()
    start = time.perf_counter()
    compute()
    synchronise()
    return int(_most(max(1.0, _LEAST_SECONDS / max(time.perf_counter() - start, 1e-6))))


def _most(value: float) -> float:
    """The largest that a rank has, on all of them."""
    import torch
    import torch.distributed as dist

    told = torch.tensor([value], device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return float(told)
