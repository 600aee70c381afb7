"""How much a device does at most: the fastest calls of a few shapes, on a clock that only calls move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain, repeat

import pytest

from fp8bench.model import Level, Limit, Rate
from fp8bench.registry import devices, precisions
from fp8bench.worker import ceilings
from fp8bench.worker.ceilings import count_call_work, list_shapes
from tests.facts import CPU, H200


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = 0.0

    def move(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(ceilings.time, "perf_counter", lambda: now)
    return move


def best(counts: dict[int, float], call: Callable[[int], None], seconds: float) -> tuple[int, object, int]:
    """The winning shape, its rate, and how many were tried."""
    shapes = {(size,): count for size, count in counts.items()}
    (size,), rate, tried = ceilings._find_best_shape(shapes, lambda shape: partial(call, *shape), lambda: None, seconds)
    return size, pytest.approx(rate), tried


def test_the_best_size_counts_and_a_clock_that_jumps_is_no_rate(clock: Callable[[float], None]) -> None:
    taken = {1: 1.0, 2: 1.0, 3: 6.0}
    assert best({1: 10.0, 2: 20.0, 3: 30.0}, lambda size: clock(taken[size]), 60.0) == (2, 20.0, 3)
    times = chain([1.0] * 5, [1e-12] * 2, repeat(1.0))
    assert best({1: 10.0}, lambda size: clock(next(times)), 30.0) == (1, 10.0, 1)


SMALL = replace(CPU, cache_bytes=1 << 16)


def test_winners_are_measured_again_in_every_run(
    clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ceilings._PRODUCT_SHAPES, "cpu", ((8, 8, 8), (16, 16, 16)))
    made: list[tuple[Limit, ceilings.Shape, int]] = []

    def call(limit: Limit, shape: ceilings.Shape, facts: object, arithmetic: object, seed: int) -> Callable[[], None]:
        made.append((limit, shape, seed))
        return partial(clock, 1e-4)

    monkeypatch.setattr(ceilings, "make_call", call)
    native = [name for name in ceilings.PRECISION_NAMES if precisions.get(name).support(CPU).level is Level.NATIVE]
    wanted = ceilings.list_rates(SMALL)
    assert [rate.precision for rate in wanted if rate.limit is Limit.PRODUCT] == native == ["fp32", "bf16", "fp16"]
    for rate in wanted:
        made.clear()
        again = rate
        for _ in range(6):
            again = ceilings.measure_next_run(devices.get("cpu"), SMALL, again, 0.01)
        assert len(again.runs) == 5 and again.searched == len(list_shapes(again.limit, SMALL))
        assert [(shape, seed) for _, shape, seed in made if seed] == [(again.shape, run) for run in range(1, 6)]
    assert {rate.limit for rate in wanted} == {*Limit} - {Limit.LOAD}


def test_what_a_device_refuses_ends_no_other_search(
    clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:

    def call(limit: Limit, *rest: object) -> Callable[[], None]:
        if limit is Limit.PRODUCT:
            raise RuntimeError("no kernel")
        return partial(clock, 1e-4)

    monkeypatch.setattr(ceilings, "make_call", call)
    cpu = devices.get("cpu")
    found = [ceilings.measure_next_run(cpu, SMALL, rate, 0.005) for rate in ceilings.list_rates(SMALL)]
    assert {rate.why for rate in found if not rate.shape} == {"RuntimeError: no kernel"}
    assert {rate.limit for rate in found if rate.shape} == {Limit.COPY, Limit.TRIAD, Limit.CACHED, Limit.LAUNCH}
    once = Rate(Limit.PRODUCT, "bf16", (1.0,), 2, (8, 8, 8))
    assert ceilings.measure_next_run(cpu, SMALL, once, 0.005) == replace(once, runs=(), why="RuntimeError: no kernel")


def test_counts_by_hand_and_tensors_beyond_the_cache() -> None:
    assert count_call_work(Limit.PRODUCT, (2, 3, 5)) == 60 and count_call_work(Limit.LAUNCH, (1,)) == 1
    moving = (Limit.COPY, Limit.TRIAD, Limit.CACHED, Limit.LOAD)
    assert [count_call_work(limit, (100,)) for limit in moving] == [200, 300, 200, 100]
    for facts in (replace(CPU, cache_bytes=33 << 20), replace(H200, cache_bytes=60 << 20), H200):
        for limit in (Limit.COPY, Limit.TRIAD):
            assert min(list_shapes(limit, facts))[0] >= 2 * facts.cache_bytes
    assert list_shapes(Limit.LOAD, H200) and not list_shapes(Limit.LOAD, CPU)
