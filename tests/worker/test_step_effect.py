"""Steps that do no work are distinguished from honest ones, or left undecided.

And scripted timed slots are compared with counted ones.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from fp8bench.model import StepEffect
from fp8bench.protocols import Phases, Workload
from fp8bench.registry import devices
from fp8bench.worker import bits, step_effect
from fp8bench.worker.bits import digest, replace_numbers
from fp8bench.worker.step_effect import (
    TensorChangeSketches,
    check_step_effect,
    compare_slots,
    make_slot_summary,
    restore_state,
)
from tests.counts import for_each

State = SimpleNamespace
Step = Callable[[State, Phases], Any]
SIZE = 16


def state() -> State:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(SIZE, SIZE, generator=random)
    w = torch.randn(SIZE, SIZE, generator=random)
    return State(
        x=x,
        w=w,
        out=torch.empty(SIZE, SIZE),
        mask=torch.full((SIZE, SIZE), -torch.inf).triu(1),
        unused=torch.ones(3),
        index=torch.randint(SIZE, (SIZE,), generator=random),
        cache={},
        kept=None,
        positive=w @ w.T + torch.eye(SIZE),
        number=torch.zeros(()),
    )


def effect(step: Step, prepare: Callable[[], object] = state) -> StepEffect:
    workload = SimpleNamespace(prepare=lambda setup: prepare(), step=step)
    return check_step_effect(cast(Workload, workload), cast(Any, SimpleNamespace(scales=None)), devices.get("cpu"), 0)


def memoised(state: State, phase: Phases) -> Any:
    if "y" not in state.cache:
        state.cache["y"] = state.x @ state.w
    return state.cache["y"]


def versioned(state: State, phase: Phases) -> Any:
    """Caches correctly: until the inputs are written to."""
    key = (id(state.x), state.x.data_ptr(), state.x._version, state.w._version)
    if key not in state.cache:
        state.cache[key] = state.x @ state.w
    return state.cache[key]


def _drop(value: object) -> None:
    del value


@functools.cache
def product_of(size: int) -> torch.Tensor:
    return torch.ones(size, size) @ torch.ones(size, size)


def copied(state: State, phase: Phases) -> None:
    state.out.copy_(memoised(state, phase))


def kept(state: State, phase: Phases) -> None:
    state.kept = state.x @ state.w if state.kept is None else state.kept


def counting(state: State, phase: Phases) -> Any:
    state.number += 1
    return memoised(state, phase)


def foreign_kernel(state: State, phase: Phases) -> None:
    """Writes outside torch, like kernels of Triton and CUDA graphs, too fast to be noticed."""
    ctypes.memmove(state.out.data_ptr(), state.x.data_ptr(), 4 * state.x.numel())


def foreign_rounding(state: State, phase: Phases) -> None:
    """Works in place, and changes nothing the second time."""
    numbers = np.ctypeslib.as_array((ctypes.c_float * state.w.numel()).from_address(state.w.data_ptr()))
    np.rint(numbers, out=numbers)


def foreign_memory(state: State, phase: Phases) -> None:
    """Writes to memory stored in the first step, outside torch."""
    kept = memoised(state, phase)
    ctypes.memmove(state.out.data_ptr(), kept.data_ptr(), 4 * kept.numel())


def anew_in_turns(state: State, phase: Phases) -> None:
    """Allocates the last result at the previous one's address, if that is free."""
    for _ in range(2):
        state.kept = state.x @ state.w


def in_another_order(state: State, phase: Phases) -> Any:
    memoised(state, phase)
    state.cache = {"z": state.x * 2, **state.cache} if "z" not in state.cache else dict(reversed(state.cache.items()))
    return list(state.cache.values())


def after_steps(count: int) -> Step:
    """Runs an honest step on changing inputs a few times, then repeats the last result."""

    def step(state: State, phase: Phases) -> Any:
        state.steps = getattr(state, "steps", 0) + 1
        if state.steps <= count:
            state.x.mul_(0.9)
            state.cache["y"] = state.x @ state.w
        return state.cache["y"]

    return step


def by_turns(state: State, phase: Phases) -> Any:
    state.steps = getattr(state, "steps", 0) + 1
    return state.cache.setdefault(state.steps % 2, (state.x * (1 + state.steps % 2)) @ state.w).clone()


IDLE: dict[str, Step] = {
    "nothing": lambda state, phase: None,
    "what is given": lambda state, phase: state.x,
    "a memory": memoised,
    "a memory by versions": versioned,
    "a memory of the module's": lambda state, phase: product_of(SIZE),
    "a memory that is copied": copied,
    "a result that stays": kept,
    "a memory that is copied past torch": foreign_memory,
    "constants anew": lambda state, phase: setattr(state, "out", torch.ones(SIZE, SIZE) * 3),
    "a memory beside a count": counting,
    "a memory in another order": in_another_order,
    "a memory after three steps": after_steps(3),
    "two memories by turns": by_turns,
    "time asleep": lambda state, phase: time.sleep(0.001),
}  # fmt: skip


def stale() -> State:
    """Its uninitialised memory contains an earlier state's values."""
    held = state()
    held.out = held.x.clone()
    return held


@for_each(("how", "prepare"), [(how, prepare) for how in IDLE for prepare in (state, stale)])
def test_a_step_that_does_no_work_is_found(how: str, prepare: Callable[[], State]) -> None:
    found = effect(IDLE[how], prepare)
    assert found.changes is False and found.why


def _turned(state: State) -> torch.Tensor:
    state.steps = getattr(state, "steps", 0) + 1
    return cast(torch.Tensor, state.x * (1 + state.steps % 2))


HONEST: dict[str, Step] = {
    "a product that is returned": lambda state, phase: state.x @ state.w,
    "a product that is kept in the place of another": anew_in_turns,
    "a product that is kept": lambda state, phase: setattr(state, "kept", state.x @ state.w),
    "a product in its place": lambda state, phase: torch.mm(state.x, state.w, out=state.out),
    "the largest": lambda state, phase: state.x.amax(),
    "an index": lambda state, phase: state.index.sort().values,
    "what is chosen": lambda state, phase: state.x.topk(2).indices,
    "scores under a mask": lambda state, phase: (state.x + state.mask).softmax(-1),
    "in place, to an end": lambda state, phase: state.w.clamp_(min=0),
    "in place, to infinity": lambda state, phase: state.w[0].mul_(1e30),
    "weights that go on": lambda state, phase: state.w.mul_(0.99),
    "two results by turns": lambda state, phase: _turned(state) @ state.w,
    "numbers that are drawn": lambda state, phase: state.out.normal_(),
    "a kernel that is not torch's": foreign_kernel,
    "rounding in place that is not torch's": foreign_rounding,
    "dropout": lambda state, phase: torch.dropout(state.x, 0.5, True),
    "a small format": lambda state, phase: state.x.to(torch.float8_e4m3fn),
    "what takes some numbers only": lambda state, phase: torch.linalg.cholesky(state.positive),
    "a backward pass": lambda state, phase: torch.autograd.grad((state.x @ state.w.requires_grad_()).sum(), state.w),
}  # fmt: skip


@for_each(("how", "prepare"), [(how, prepare) for how in HONEST for prepare in (state, stale)])
def test_an_honest_step_changes_what_it_gives(how: str, prepare: Callable[[], State]) -> None:
    assert effect(HONEST[how], prepare) == StepEffect(True)


def load(state: State, phase: Phases) -> None:
    with phase.data_load:
        state.out.copy_(
            torch.from_file(__file__, size=SIZE * SIZE * 4, dtype=torch.uint8).view(torch.float32).view(SIZE, -1)
        )


def numpy_state() -> State:
    return State(x=np.ones((SIZE, SIZE)), out=torch.empty(SIZE), spare=torch.ones(SIZE))


UNDECIDED: dict[str, tuple[Callable[[], object], Step, str]] = {
    "a local result": (state, lambda state, phase: _drop(state.x @ state.w), "stored"),
    "whether all is finite": (state, lambda state, phase: state.x.isfinite().all(), "stored"),
    "the same file each time": (state, load, "may read"),
    "work that torch does not see": (state, lambda state, phase: _drop(sum(range(20_000))), "stored"),
    "numbers": (lambda: 3, lambda state, phase: _drop(sum(range(cast(int, state)))), "holds no tensor"),
    "arrays of NumPy's": (numpy_state, lambda state, phase: state.out.fill_(float(state.x.sum())), "may read"),
    "results alone": (lambda: State(out=torch.empty(SIZE)), lambda state, phase: state.out.fill_(1), "no input tensor"),
}


@for_each("how", UNDECIDED)
def test_where_nothing_can_be_seen_nothing_is_claimed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, step, words = UNDECIDED[how]
    told = effect(step, prepare)
    assert told.changes is None and words in told.why
    monkeypatch.setattr(step_effect, "MAX_STEP_SECONDS", 0.0)
    assert "takes more than 0 s" in effect(lambda state, phase: None).why


def test_a_file_that_is_mapped_is_never_written(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(np.arange(64, dtype=np.float32).tobytes())
    before = path.read_bytes()

    def prepare() -> State:
        return State(x=torch.from_file(str(path), shared=True, size=64), out=torch.empty(64), spare=torch.ones(3))

    assert effect(lambda state, phase: state.out.copy_(state.x), prepare).changes is None
    assert path.read_bytes() == before


def test_tensors_that_others_hold_too_are_as_before() -> None:
    shared = torch.ones(SIZE)
    before = torch.ones(SIZE)
    assert effect(lambda state, phase: state.x * 2, lambda: State(x=shared)) == StepEffect(True)
    assert effect(memoised, lambda: State(x=shared, w=shared, cache={})).changes is False
    assert torch.equal(shared, before)


@for_each("count", [1, 7, 8, 1000])
def test_a_digest_is_of_every_bit_and_its_place(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits, "_ELEMENTS_PER_PIECE", 16)
    numbers = torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    seen = {digest(numbers)}
    for place in range(count):
        other = numbers.clone()
        other[place] ^= 1 << (place % 8)
        seen.add(digest(other))
    assert len(seen) == count + 1 and digest(numbers.clone()) in seen
    if count > 1:
        assert digest(numbers.flip(0)) != digest(numbers)


@for_each(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e8m0fnu,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
    ],
)
def test_numbers_are_replaced_by_others_of_their_range(dtype: torch.dtype) -> None:
    numbers = (torch.arange(1, 200) % 5).to(dtype)
    view = numbers.view(-1)[3:]
    version = numbers._version
    before = digest(numbers)
    with replace_numbers(view, 1):
        assert digest(numbers) != before and numbers._version == version
        if not dtype.is_complex:
            assert float(numbers.to(torch.float32).min()) >= 0 and float(numbers.to(torch.float32).max()) <= 4
    assert digest(numbers) == before and numbers._version == version


def test_equal_numbers_are_replaced_by_numbers_of_their_size() -> None:
    numbers = torch.full((64,), 448.0)
    with replace_numbers(numbers, 1):
        assert 224 <= float(numbers.min()) < float(numbers.max()) <= 448
    assert bool((numbers == 448).all())


MS = 1e-3


def told(
    left: Callable[[int, bool], TensorChangeSketches], seconds: Callable[[int, bool], float] = lambda n, timed: MS
) -> str:
    """Compares scripted slots; the n-th leaves `left(n)` and takes `seconds(n)`."""
    numbers = iter(range(8))

    def slot(timed: bool) -> step_effect.SlotSummary:
        number = next(numbers)
        return make_slot_summary([seconds(number, timed)] * 3, 1, left(number, timed), seconds(number, timed))

    return compared(slot)


def compared(slot: Callable[[bool], step_effect.SlotSummary | None]) -> str:
    """Feeds the comparison the slots it requests; returns its result."""
    comparison = compare_slots()
    asked = next(comparison)
    try:
        while True:
            asked = comparison.send(slot(asked))
    except StopIteration as ended:
        return str(ended.value)


def sums(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_slots_that_agree_are_two() -> None:
    seen: list[bool] = []

    def slot(timed: bool) -> step_effect.SlotSummary:
        seen.append(timed)
        return make_slot_summary([MS], 1, [sums(1, 2), sums(3, 4)], MS)

    assert compared(slot) == "" and seen == [True, False]
    assert compared(lambda timed: None) == ""
    assert told(lambda n, timed: [sums(timed)], lambda n, timed: 1.1) == "", "a step that long is not taken again"


@for_each("period", range(2, 9))
@for_each("run", [1, 2, 3, 4])
def test_turns_are_no_lie(period: int, run: int) -> None:
    for begin in range(period * run):
        assert told(lambda n, timed, begin=begin: [sums(1 + (n + begin) // run % period, 1)]) == ""  # type: ignore[misc]
    assert told(lambda n, timed: [sums(n, n)]) == "" == told(lambda n, timed: [sums(1, 1)] * n)


@for_each(
    ("timed", "counted", "lies"),
    [
        ([sums(1, 2)], [sums(1, 2.01)], False),  # other kernels
        ([sums(1, 2)], [sums(1, 2.5)], True),
        ([sums(1, 2), sums(1e-5, 0)], [sums(1, 2), sums(-1e-5, 0)], False),  # rounding
        ([sums(1, 2), sums(0, 0)], [sums(1, 2), sums(0.1, 0)], True),
        ([sums(1, 2)], [sums(1, 2), sums(1, 2)], True),
        ([], [], False),
    ],
)
def test_what_differs_each_time_is_a_difference(
    timed: TensorChangeSketches, counted: TensorChangeSketches, lies: bool
) -> None:
    said = "a step leaves other results when it is timed than when its operators are counted" if lies else ""
    assert told(lambda n, is_timed: timed if is_timed else counted) == said


def test_time_that_only_counted_steps_take() -> None:
    assert told(lambda n, timed: [], lambda n, timed: MS if timed else 3 * MS) == (
        "a step takes 1.00 ms when it is timed, and its operators take 2.97 ms or more when they are counted"
    )
    assert told(lambda n, timed: [], lambda n, timed: MS if timed else 1.5 * MS) == ""
    assert told(lambda n, timed: [], lambda n, timed: MS if timed or n == 4 else 3 * MS) == ""
    assert told(lambda n, timed: [], lambda n, timed: 3 * MS if timed else MS) == (
        "a step takes 2.97 ms when it is timed, and 1.00 ms when its operators are counted"
    )


def test_a_state_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    given = torch.randn(8, 8)
    weights = torch.randn(8, 8)
    state = SimpleNamespace(x=given, w=weights)
    before = (given.clone(), weights.clone())
    found = []
    with restore_state(state, {given.untyped_storage().data_ptr()}) as beginning:
        for _ in range(2):
            beginning.restore()
            assert not torch.equal(given, before[0]) and torch.equal(weights, before[1])
            weights.add_(given @ torch.rand(8, 8))
            found.append(beginning.sketch_changes(given @ given))
    assert torch.equal(given, before[0]) and torch.equal(weights, before[1])
    assert all(map(torch.equal, *found)) and sorted(bool(tensor.any()) for tensor in found[0]) == [False, True, True]
    monkeypatch.setattr(step_effect, "MAX_BYTES", 100)
    with restore_state(state, {given.untyped_storage().data_ptr()}) as beginning:
        assert torch.equal(given, before[0]) and beginning.sketch_changes(given) == []
