"""What several ranks took, by values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8bench.analysis.labels import contended
from fp8bench.analysis.metric import Told
from fp8bench.analysis.ranks import (
    Bubble,
    bubble,
    memory_skew,
    rank_metrics,
    rank_times,
    round_times,
    skew,
    true_communication,
)
from fp8bench.model import Finding, MemoryUse, Record, Segments, SlotSample, Status, Timing, Verdict
from fp8bench.model.ranks import RankCalls, RankMemory, Transfer
from tests.runs import NATIVE, case

MS = 1_000_000


def slot(number: int, *ranks: tuple[int, int]) -> SlotSample:
    """One call, of which each rank gives its step and its communication in milliseconds."""
    took = tuple(RankCalls(rank, (step * MS,), (comm * MS,)) for rank, (step, comm) in enumerate(ranks))
    slowest = max(step for step, _ in ranks)
    return SlotSample(number, ((slowest * MS,),), slowest * 1e-3, slowest * 1e-3, ranks=took)


def timing(*slots: SlotSample) -> Timing:
    return Timing(Segments(("gemm",), (0,)), slots)


def test_a_rank_that_comes_late_makes_the_others_wait() -> None:
    """Rank 1 sleeps 20 ms before a collective of 7: that lasts 27 on rank 0, and takes 7."""
    found = timing(*(slot(number, (35, 27), (35, 7)) for number in range(5)))
    assert true_communication(found) == pytest.approx(7e-3)
    first, second = rank_times(found)
    assert (first.communication, first.waiting) == (pytest.approx(27e-3), pytest.approx(20e-3))
    assert (second.communication, second.waiting) == (pytest.approx(7e-3), 0.0)


def test_skew_and_rounds() -> None:
    """Of each call, the median; one process has neither."""
    found = timing(slot(0, (10, 1), (8, 1)), slot(1, (10, 1), (8, 1)), slot(2, (10, 1), (10, 1)))
    assert skew(found) == pytest.approx(0.2)
    assert round_times(found) == ((0.01, 0.01, 0.01), (0.008, 0.008, 0.01))
    alone = timing(replace(slot(0, (10, 1)), ranks=()))
    assert skew(alone) is None and rank_times(alone) == () == round_times(alone) and true_communication(alone) is None


def _told(record: Record) -> Told:
    """With a median step of 10 ms."""
    return Told(record, Finding(record.case, Verdict.REFERENCE, median_seconds=0.01))


def test_memory_of_each_rank_is_a_figure() -> None:
    """One a rank, and how far they are apart."""
    use = MemoryUse(8 << 20, ranks=(RankMemory(0, 6 << 20), RankMemory(1, 8 << 20)))
    timed = timing(slot(0, (10, 5), (8, 3)))
    record = Record(case("collective", "bf16", {}), NATIVE, Status.OK, timing=timed, memory=use)
    found = {(str(one.name), one.of_rank): one.value for one in rank_metrics(_told(record))}
    assert memory_skew(use) == 0.25 and found["memory_skew", None] == 25.0
    assert (found["rank_memory", 0], found["rank_memory", 1]) == (float(6 << 20), float(8 << 20))
    assert (found["rank_time", 0], found["rank_time", 1]) == (pytest.approx(0.01), pytest.approx(0.008))
    assert (found["rank_waiting_time", 0], found["rank_waiting_time", 1]) == (pytest.approx(2e-3), 0.0)
    assert memory_skew(MemoryUse(5)) is None


def test_rates_are_those_of_nccl_tests() -> None:
    """Bytes of the vector as it is sent over the slowest rank's median, times the factor; logical bytes beside it."""
    record = Record(
        case("collective", "bf16", {}), NATIVE, Status.OK, timing=timing(slot(0, (10, 5), (10, 5))),
        transfer=Transfer(4e6, 2e6, 3e6, 1.5, counted=False),
    )  # fmt: skip
    found = {str(one.name): one.value for one in rank_metrics(_told(record))}
    assert found["algbw"] == pytest.approx(2e8) and found["busbw"] == pytest.approx(3e8)
    assert found["effective_busbw"] == pytest.approx(6e8)
    assert (found["wire_bytes"], found["logical_bytes"]) == (3e6, 4e6)
    assert found["rank_skew"] == 0.0 and found["communication_time"] == pytest.approx(5e-3)


def test_a_bubble_is_what_nobody_computes_in() -> None:
    """Two stages of 8 microbatches wait or send 4 of 20 ms; a way without microbatches has none."""
    found = timing(*(slot(number, (10, 1), (10, 3)) for number in range(3)))
    record = Record(replace(case("parallel", "fp32", {"microbatches": 8}), ranks=2), NATIVE, Status.OK, timing=found)
    assert bubble(record) == Bubble(pytest.approx(4 / 16), 1 / 8)
    values = {str(one.name): one.value for one in rank_metrics(Told(record))}
    assert (values["bubble"], values["ideal_bubble"]) == (pytest.approx(25.0), 12.5)
    assert bubble(replace(record, case=case("parallel", "fp32", {"way": "ddp"}))) is None


def test_waiting_for_another_rank_is_no_contention() -> None:
    """A rank that waits needs no core; one that computes does."""
    waits = [replace(slot(number, (10, 9), (10, 9)), cpu_seconds=1e-3) for number in range(5)]
    computes = [replace(slot(number, (10, 0), (10, 0)), cpu_seconds=1e-3) for number in range(5)]
    assert not contended(timing(*waits)) and contended(timing(*computes))
