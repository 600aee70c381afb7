"""What an allocation is for, by who holds it, what was said of it, and when it came and went."""

from __future__ import annotations

import random

from fp8bench.model import PHASES, HeldBlock, MemoryRole
from fp8bench.worker.memory_pass import role_of, roles
from tests.counts import for_each

R = MemoryRole
OLD = HeldBlock(1, 10, lasting=True)
NEW = HeldBlock(1, 10, "gemm")


@for_each(
    ("block", "before", "after", "role"),
    [
        (OLD, {1: R.WEIGHTS}, {1: R.WEIGHTS}, R.WEIGHTS),
        (OLD, {1: None}, {1: None}, R.OTHER),
        (OLD, {}, {}, R.OTHER),
        (HeldBlock(1, 10), {1: R.OPTIMIZER}, {}, R.OPTIMIZER),  # it went in the step
        (HeldBlock(1, 10), {}, {1: R.OPTIMIZER}, R.OTHER),  # another one lies there now
        (HeldBlock(1, 10, "cast"), {1: R.OPTIMIZER}, {}, R.WORKSPACE),  # another one lay there before
        (HeldBlock(1, 10, "cast", lasting=True), {}, {1: R.OPTIMIZER}, R.OPTIMIZER),
        (HeldBlock(1, 10, lasting=True, said=(R.LOW_WEIGHTS,)), {1: None}, {1: None}, R.LOW_WEIGHTS),
        (HeldBlock(1, 10, lasting=True, said=(R.LOW_WEIGHTS,)), {}, {1: R.OPTIMIZER}, R.OPTIMIZER),
        (HeldBlock(1, 10, lasting=True, said=(R.WEIGHTS,)), {}, {}, R.WEIGHTS),
        (HeldBlock(1, 10, "cast", said=(R.WEIGHTS,)), {}, {}, R.WORKSPACE),  # restored, to be cast again
        (HeldBlock(1, 10, "communication", said=(R.WEIGHTS,)), {}, {}, R.WEIGHTS),  # gathered for a step
        (HeldBlock(1, 10, "gemm", said=(R.ACTIVATIONS, R.LOW_WEIGHTS)), {}, {}, R.LOW_WEIGHTS),
        (HeldBlock(1, 10, "data_load", awaited=True, said=(R.ACTIVATIONS,)), {}, {}, R.DATA),
        (HeldBlock(1, 10, "gemm", backward=True, said=(R.ACTIVATIONS,)), {}, {}, R.ACTIVATIONS),
        (HeldBlock(1, 10, "unattributed", awaited=True, brief=True), {}, {}, R.ACTIVATIONS),
        (HeldBlock(1, 10, "gemm", backward=True, brief=True), {}, {}, R.WORKSPACE),
        (HeldBlock(1, 10, "gemm", backward=True), {}, {}, R.GRADIENTS),
        (HeldBlock(1, 10, "optimizer_step"), {}, {}, R.WORKSPACE),
        (NEW, {}, {}, R.ACTIVATIONS),
        (HeldBlock(1, 10, "gemm", lasting=True), {}, {}, R.OTHER),
    ],
)
def test_one_allocation(
    block: HeldBlock, before: dict[int, R | None], after: dict[int, R | None], role: MemoryRole
) -> None:
    """Case by case; addresses are used again, and count only for what lay there at the time."""
    assert role_of(block, before, after) is role


def test_they_sum_to_the_peak() -> None:
    """What the allocator counts and nobody saw is other; where more was seen than it counts, nobody can say."""
    held = [NEW, HeldBlock(2, 5, "cast")]
    assert roles(held, 15, {}, {}) == {R.ACTIVATIONS: 10, R.WORKSPACE: 5}
    assert roles(held, 18, {}, {}) == {R.ACTIVATIONS: 10, R.WORKSPACE: 5, R.OTHER: 3}
    assert roles(held, 14, {}, {}) == {}
    assert roles([], 0, {}, {}) == {}


def test_any_blocks_sum_to_their_size() -> None:
    draw = random.Random(3)
    flag = lambda: draw.random() < 0.5  # noqa: E731
    held = [
        HeldBlock(
            number, draw.randrange(1, 99), draw.choice(("", *PHASES)), flag(), flag(), flag(), flag(),
            tuple(draw.sample(list(R), draw.randrange(3))),
        )
        for number in range(1000)
    ]  # fmt: skip
    known: list[dict[int, R | None]] = [{number: draw.choice((None, *R)) for number in range(500)} for _ in range(2)]
    found = roles(held, sum(one.size for one in held), *known)
    assert sum(found.values()) == sum(one.size for one in held) and list(found) == [one for one in R if one in found]
