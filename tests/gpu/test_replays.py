"""Replays, a full queue and a cold cache, as only a GPU shows them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fp8bench.devices.cuda import Cuda
from fp8bench.measure.slots import choose_slot_filling
from fp8bench.model import Case, DeviceFacts, Level
from fp8bench.model.raw import RawSlot, Settings
from fp8bench.plan.corpus import Corpus
from fp8bench.registry import precisions
from fp8bench.worker.bench import Bench

pytestmark = pytest.mark.gpu


@pytest.fixture
def facts() -> DeviceFacts:
    return Cuda().available()[0]


@pytest.fixture
def bench() -> Iterator[Bench]:
    one = Bench(Settings())
    yield one
    one.close()


def best(slot: RawSlot) -> float:
    return float(np.median([step.seconds for step in slot.steps]))


def product(side: int, facts: DeviceFacts, precision: str = "bf16", cache: str = "hot") -> Case:
    params = (("m", side), ("n", side), ("k", side), ("product", "forward"), ("operands", "cast"))
    return Case("gemm", params if cache == "hot" else (*params, ("cache", cache)), precision, facts.key)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_a_replay_takes_no_longer_than_a_step(bench: Bench, facts: DeviceFacts, precision: str) -> None:
    if precisions.get(precision).support(facts).level is not Level.NATIVE:
        pytest.skip(f"{precision} is not native on {facts.name}")
    before = torch.cuda.memory_reserved()
    bench.prepare("key", product(2048, facts, precision), facts)
    assert bench.capture("key") == ""
    steps = bench.slot("key", 20, 2)
    replays = bench.replay("key", 20, 2, choose_slot_filling(20e-6, 20))
    assert best(replays) <= 1.1 * best(steps) and bench.check("key").wrong == ""
    bench.release("key")
    assert torch.cuda.memory_reserved() <= before + (64 << 20)


def test_a_full_queue_takes_the_host_out(bench: Bench, facts: DeviceFacts) -> None:
    bench.prepare("key", product(128, facts), facts)
    empty = bench.slot("key", 20, 2)
    full = bench.slot("key", 20, 2, choose_slot_filling(empty.host_seconds, 20))
    assert best(full) <= 1.05 * best(empty) and full.host_seconds > 0


def test_a_cold_cache_is_slower_where_the_data_fits_it(bench: Bench, facts: DeviceFacts) -> None:
    params = (
        ("rows", 1024),
        ("columns", 2048),
        ("source", "fp32"),
        ("direction", "to"),
        ("scaling", "on"),
        ("role", "input"),
    )
    times = {}
    for cache in ("hot", "rotating", "cold"):
        own = params if cache == "hot" else (*params, ("cache", cache))
        bench.prepare(cache, Case("cast", own, "bf16", facts.key), facts)
        host = bench.slot(cache, 1, 1).host_seconds
        times[cache] = best(bench.slot(cache, 20, 2, choose_slot_filling(host, 20)))
        bench.release(cache)
    assert times["cold"] > 1.25 * times["hot"] and times["rotating"] > times["hot"]


def test_a_step_that_reads_its_data_is_not_captured(corpus: Corpus, facts: DeviceFacts) -> None:
    bench = Bench(Settings(corpus=corpus.path))
    params = (("kind", "transfer"), ("batch", 16), ("record", 4096))
    bench.prepare("key", Case("data", params, "fp32", facts.key), facts)
    assert "takes data from the host" in bench.capture("key")
    assert len(bench.slot("key", 2, 1).steps) == 2
    bench.close()


def test_a_phase_by_itself_takes_its_time_in_the_step(bench: Bench, facts: DeviceFacts) -> None:
    bench.prepare("key", product(2048, facts), facts)
    filling = choose_slot_filling(20e-6, 20)
    step = best(bench.slot("key", 20, 2, filling))
    before = torch.cuda.memory_allocated()
    held = bench.hold_phase("key", "gemm", facts.memory_bytes // 4)
    assert held.why == "" and bench.loop_phase("key", 200) / 200 == pytest.approx(step, rel=0.3)
    assert bench.drop_phase("key") == "" and torch.cuda.memory_allocated() <= before + (1 << 20)
    bench.release("key")
