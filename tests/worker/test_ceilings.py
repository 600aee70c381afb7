"""How much a device does at most: the fastest calls of a few sizes, on a clock that only calls move."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain, repeat

import pytest

from fp8bench.model import Level
from fp8bench.registry import devices, precisions
from fp8bench.worker import ceilings
from tests.facts import CPU


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the clock that stretches are timed by."""
    now = 0.0

    def move(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(ceilings.time, "perf_counter", lambda: now)
    return move


def best(counts: dict[int, float], call: Callable[[int], None], seconds: float) -> float:
    return ceilings._best(counts, lambda size: partial(call, size), lambda: None, seconds)


def test_the_best_size_counts(clock: Callable[[float], None]) -> None:
    """Work of 10, 20 and 30 in so many seconds."""
    taken = {1: 1.0, 2: 1.0, 3: 6.0}
    assert best({1: 10.0, 2: 20.0, 3: 30.0}, lambda size: clock(taken[size]), 60.0) == pytest.approx(20.0)


def test_a_size_that_would_take_too_long_is_left_out(clock: Callable[[float], None]) -> None:
    """By the rate of those before it: no call of it is made, nor of larger ones."""
    called = []

    def call(size: int) -> None:
        called.append(size)
        clock(size)

    assert best({1: 1.0, 5: 5.0, 50: 50.0, 500: 500.0}, call, 80.0) == pytest.approx(1.0)
    assert set(called) == {1, 5}


def test_a_clock_that_jumps_is_no_rate(clock: Callable[[float], None]) -> None:
    """Two stretches of no time at all are passed over."""
    times = chain([1.0] * 5, [1e-12] * 2, repeat(1.0))
    assert best({1: 10.0}, lambda size: clock(next(times)), 30.0) == pytest.approx(10.0)


def test_a_processor_has_its_dtypes_and_copies() -> None:
    """Those that it multiplies natively; whatever the machine does, it does some of it."""
    found = ceilings.measured(devices.get("cpu"), CPU, 0.1)
    native = [name for name in ceilings.DTYPES if precisions.get(name).support(CPU).level is Level.NATIVE]
    assert [dtype for dtype, _ in found.flops] == native == ["fp32", "bf16", "fp16"]
    assert all(rate > 1e6 for _, rate in found.flops) and (found.bound("", "bytes") or 0) > 1e6
    assert found.bound("bf16", "flops") == dict(found.flops)["bf16"] and found.bound("fp8", "flops") is None
