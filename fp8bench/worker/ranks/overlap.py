"""How far communication hides: parts of a step alone, at once and in turn, in rounds of random order."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from fp8bench.protocols.workload import StepParts

_ROUNDS = 5
# Long enough that a barrier's own skew is small.
_LEAST_SECONDS = 3e-3


def overlap_rounds(
    compute: Callable[[], object], communicate: Callable[[], Any], synchronise: Callable[[], None], seed: int
) -> dict[str, list[float]]:
    """Seconds of products, of a communication, of both at once and of both in turn."""
    times = _times(compute, synchronise)

    def products() -> None:
        for _ in range(times):
            compute()

    def alone() -> None:
        communicate().wait()

    def both() -> None:
        sent = communicate()
        products()
        sent.wait()

    def in_turn() -> None:
        products()
        synchronise()
        alone()

    return rounds({"compute": products, "communication": alone, "both": both, "in_turn": in_turn}, synchronise, seed)


def step_rounds(parts: StepParts, synchronise: Callable[[], None], seed: int) -> dict[str, list[float]]:
    """Seconds of a step of all ranks and of what it is made of, and of one rank's while the others wait."""
    import torch.distributed as dist

    def in_turn() -> None:
        parts.compute()
        synchronise()
        parts.communicate()

    first = dist.get_rank() == 0
    alone = {"whole": parts.whole, "share": parts.share} if first else dict.fromkeys(("whole", "share"), _nothing)
    ours = {"compute": parts.compute, "communication": parts.communicate, "both": parts.together, "in_turn": in_turn}
    return rounds({**ours, **alone}, synchronise, seed)


def rounds(
    parts: Mapping[str, Callable[[], object]], synchronise: Callable[[], None], seed: int
) -> dict[str, list[float]]:
    """Seconds of each part in each round, which all ranks begin together. The order is the same on all of them."""
    import torch.distributed as dist

    order, found = random.Random(seed), {name: list[float]() for name in parts}
    for number in range(_ROUNDS + 1):
        for name in order.sample(list(parts), len(parts)):
            dist.barrier()
            start = time.perf_counter()
            parts[name]()
            synchronise()
            if number:  # the first round is for whatever comes first
                found[name].append(time.perf_counter() - start)
    return found


def _nothing() -> None:
    """What a rank does while another works."""


def _times(compute: Callable[[], object], synchronise: Callable[[], None]) -> int:
    """How many products last long enough: as many on each rank as on the fastest of them, or ranks would differ."""
    import torch
    import torch.distributed as dist

    compute()
    synchronise()
    start = time.perf_counter()
    compute()
    synchronise()
    times = torch.tensor([max(1.0, _LEAST_SECONDS / max(time.perf_counter() - start, 1e-6))])
    if dist.get_backend() == "nccl":
        times = times.cuda()
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return int(times)
