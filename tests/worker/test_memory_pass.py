"""Roles of memory, continuous growth, and arithmetics that report their casts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from fp8bench.model import Case, HeldBlock, MemoryRole
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.protocols import Arithmetic, Role, Setup, WatchedArithmetic
from fp8bench.registry import precisions
from fp8bench.worker.memory_pass import (
    LONGEST_STEP_SECONDS,
    compute_growth,
    find_memory_role,
    measure_memory_growth,
    report_casts,
)
from tests.counts import for_each
from tests.facts import CPU

R = MemoryRole
OLD = HeldBlock(1, 10, lasting=True)
NEW = HeldBlock(1, 10, "gemm")


@for_each(
    ("block", "before", "after", "role"),
    [
        (OLD, {1: R.WEIGHTS}, {1: R.WEIGHTS}, R.WEIGHTS),
        (OLD, {1: None}, {1: None}, R.OTHER),
        (HeldBlock(1, 10), {1: R.OPTIMIZER}, {}, R.OPTIMIZER),  # freed in the step
        (HeldBlock(1, 10), {}, {1: R.OPTIMIZER}, R.OTHER),  # another tensor is there now
        (HeldBlock(1, 10, "cast"), {1: R.OPTIMIZER}, {}, R.WORKSPACE),  # another tensor was there before
        (HeldBlock(1, 10, "cast", lasting=True), {}, {1: R.OPTIMIZER}, R.OPTIMIZER),
        (HeldBlock(1, 10, lasting=True, said=(R.LOW_WEIGHTS,)), {1: None}, {1: None}, R.LOW_WEIGHTS),
        (HeldBlock(1, 10, lasting=True, said=(R.LOW_WEIGHTS,)), {}, {1: R.OPTIMIZER}, R.OPTIMIZER),
        (HeldBlock(1, 10, "cast", said=(R.WEIGHTS,)), {}, {}, R.WORKSPACE),  # restored to be cast again
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
def test_a_role(block: HeldBlock, before: dict[int, R | None], after: dict[int, R | None], role: MemoryRole) -> None:
    """Addresses are reused, and refer only to the tensor there at the time."""
    assert find_memory_role(block, before, after) is role


KIB = 1024


def held(size_of: Callable[[int], int], count: int = 48) -> list[int]:
    return list(accumulate(size_of(number) for number in range(count)))


GROWING: dict[str, tuple[Callable[[int], int], int]] = {
    "every step": (lambda step: KIB, KIB),
    "every 12th": (lambda step: 12 * KIB * (step % 12 == 7), KIB),
    "beside batches of many sizes": (lambda step: KIB + (-1) ** step * 5 * KIB, KIB),
    "beside a cache that is emptied": (lambda step: KIB + (8 * KIB if step % 9 else -64 * KIB), KIB),
}  # fmt: skip


ENDING: dict[str, Callable[[int], int]] = {
    "nothing": lambda step: 0,
    "once": lambda step: KIB * (step == 20),
    "a history of 16": lambda step: KIB * (step < 16),
    "a history of 40": lambda step: KIB * (step < 40),
    "emptied every 5 steps": lambda step: KIB if step % 5 else -4 * KIB,
    "emptied every 20 steps": lambda step: KIB if step % 20 else -19 * KIB,
    "slower and slower": lambda step: 1 << max(0, 24 - step),
    "a little": lambda step: 100,
    "given back": lambda step: -KIB,
}


@for_each("how", [*GROWING, *ENDING])
def test_growth_is_bytes_a_step_where_it_goes_on(how: str) -> None:
    size_of, wanted = GROWING[how] if how in GROWING else (ENDING[how], 0.0)
    assert compute_growth(held(size_of)) == pytest.approx(wanted, rel=0.3)


def test_garbage_in_cycles_is_no_leak_and_steps_that_take_long_are_not_run_again() -> None:
    def step() -> None:
        cycle: list[object] = [torch.ones(KIB)]
        cycle.append(cycle)

    assert measure_memory_growth(step, "cpu", 0.001) == 0.0
    assert measure_memory_growth(lambda: pytest.fail("not to be run"), "cpu", LONGEST_STEP_SECONDS + 1) is None


class RoleNote:
    """Records the last role that was reported for each address."""

    def __init__(self) -> None:
        self.words: list[tuple[tuple[int, ...], MemoryRole]] = []

    def __call__(self, addresses: Sequence[int], role: MemoryRole) -> None:
        self.words.append((tuple(addresses), role))

    def of(self, tensor: Tensor | None) -> list[MemoryRole]:
        assert tensor is not None
        return [role for addresses, role in self.words if tensor.untyped_storage().data_ptr() in addresses]


def told(arithmetic: Arithmetic) -> tuple[Arithmetic, RoleNote]:
    said = RoleNote()
    setup = Setup(Case("mlp", (), "bf16", "cpu"), CPU, 0, arithmetic, arithmetic, {"up": arithmetic})
    changed = report_casts(setup, said)
    for listener in (changed.high, changed.layers["up"]):
        assert isinstance(listener, WatchedArithmetic) and listener.inner is arithmetic
    return changed.arithmetic, said


def test_a_cast_that_copies_reports_copy_and_source() -> None:
    arithmetic, said = told(PlainArithmetic(torch.bfloat16))
    x = torch.ones(2, 3)
    w = torch.ones(4, 3)
    g = torch.ones(2, 4)
    a, b, c = (arithmetic.cast(tensor, role) for tensor, role in zip((x, w, g), Role, strict=True))
    assert [said.of(tensor) for tensor in (x, w, g)] == [[R.ACTIVATIONS], [R.WEIGHTS], [R.GRADIENTS]]
    assert [said.of(operand.data) for operand in (a, b, c)] == [[R.LOW_ACTIVATIONS], [R.LOW_WEIGHTS], [R.GRADIENTS]]
    arithmetic.turn(a, x, Role.INPUT)
    assert said.of(a.data) == [R.LOW_ACTIVATIONS]


@for_each("name", ["fp8", "fp8-delayed", "mxfp8", "nvfp4", "fp16", "tf32"])
def test_every_precision_tells_and_computes_what_it_did(name: str) -> None:
    quiet = precisions.get(name).arithmetic(CPU)
    arithmetic, said = told(precisions.get(name).arithmetic(CPU))
    assert arithmetic.carrier is quiet.carrier
    for word in ("casts", "keeps_source", "explicit", "settles", "plain", "takes_amax"):
        assert getattr(arithmetic, word) is getattr(quiet, word)
    own = arithmetic.layer("up")
    own_quiet = quiet.layer("up")
    x = torch.randn(64, 64)
    for role in Role:
        for method in ("cast", "cast_transpose", "cast_without_scale"):
            found, wanted = (getattr(arithmetic, method)(x, role) for arithmetic in (own, own_quiet))
            assert torch.equal(found.data.float(), wanted.data.float())
        turned, wanted = (arithmetic.turn(arithmetic.cast(x, role), x, role) for arithmetic in (own, own_quiet))
        assert torch.equal(turned.data.float(), wanted.data.float())
        for found, wanted in zip(*(arithmetic.cast_both(x, role) for arithmetic in (own, own_quiet)), strict=True):
            assert (found is None) == (wanted is None)
            assert found is None or torch.equal(found.data.float(), wanted.data.float())
    assert {R.ACTIVATIONS, R.WEIGHTS, R.GRADIENTS} <= {role for _, role in said.words}
