"""Times of several ranks: collectives, overlap with products, and gain over one rank, by values and simulation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fp8bench.analysis.labels import is_contended
from fp8bench.analysis.metric import MetricSources
from fp8bench.analysis.ranks import (
    FASTER_THAN_ALONE,
    OVERLAP_INTERVAL_TOO_WIDE,
    PIPELINE_WAITING,
    TIME_SUM_MISMATCH,
    TOO_FEW_ROUNDS,
    TOO_WIDE_EFFICIENCY,
    UNPAIRED_EFFICIENCY,
    MedianInterval,
    MissingFigure,
    OverlapFigures,
    PipelineBubble,
    compute_efficiency,
    compute_memory_skew,
    compute_overlap_figures,
    compute_rank_skew,
    count_sent_bytes,
    find_median_interval,
    measure_communication,
    measure_overlap,
    measure_pipeline_bubble,
    rank_metrics,
    rank_times,
)
from fp8bench.model import Finding, MemoryUse, Record, Segments, SlotSample, Status, Timing, Verdict
from fp8bench.model.ranks import Overlap, RankCalls, RankMemory, RankScaling, Sent, Transfer
from tests.counts import for_each
from tests.runs import NATIVE, case

MS = 1_000_000


def slot(number: int, *ranks: tuple[int, int]) -> SlotSample:
    took = tuple(RankCalls(rank, (step * MS,), (comm * MS,)) for rank, (step, comm) in enumerate(ranks))
    slowest = max(step for step, _ in ranks)
    return SlotSample(number, ((slowest * MS,),), slowest * 1e-3, slowest * 1e-3, ranks=took)


def timing(*slots: SlotSample) -> Timing:
    return Timing(Segments(("gemm",), (0,)), slots)


def test_a_late_rank_makes_the_others_wait() -> None:
    # Rank 1 sleeps 20 ms before a 7 ms collective, which lasts 27 ms on rank 0 but costs 7.
    found = timing(*(slot(number, (35, 27), (35, 7)) for number in range(5)))
    assert measure_communication(found) == pytest.approx(7e-3)
    first, second = rank_times(found)
    assert (first.communication_seconds, first.waiting_seconds) == (pytest.approx(27e-3), pytest.approx(20e-3))
    assert (second.communication_seconds, second.waiting_seconds) == (pytest.approx(7e-3), 0.0)
    found = timing(slot(0, (10, 1), (8, 1)), slot(1, (10, 1), (8, 1)), slot(2, (10, 1), (10, 1)))
    assert compute_rank_skew(found) == pytest.approx(0.2)
    alone = timing(replace(slot(0, (10, 1)), ranks=()))
    assert compute_rank_skew(alone) is None and rank_times(alone) == () and measure_communication(alone) is None
    waits = [replace(slot(number, (10, 9), (10, 9)), cpu_seconds=1e-3) for number in range(5)]
    computes = [replace(slot(number, (10, 0), (10, 0)), cpu_seconds=1e-3) for number in range(5)]
    assert not is_contended(timing(*waits)) and is_contended(timing(*computes))


def _told(record: Record) -> MetricSources:
    return MetricSources(record, Finding(record.case, Verdict.REFERENCE, median_seconds=0.01))


def test_memory_of_ranks_may_differ() -> None:
    assert compute_memory_skew(MemoryUse(8 << 20, ranks=(RankMemory(0, 6 << 20), RankMemory(1, 8 << 20)))) == 0.25
    assert compute_memory_skew(MemoryUse(5)) is None


def test_rates_are_those_of_nccl_tests() -> None:
    record = Record(
        case("collective", "bf16", {}),
        NATIVE,
        Status.OK,
        timing=timing(slot(0, (10, 5), (10, 5))),
        transfer=Transfer(4e6, 2e6, 3e6, 1.5, counted=False),
    )
    found = {str(one.name): one.value for one in rank_metrics(_told(record))}
    assert found["algbw"] == pytest.approx(2e8) and found["busbw"] == pytest.approx(3e8)
    assert found["effective_busbw"] == pytest.approx(6e8)
    assert (found["wire_bytes"], found["logical_bytes"]) == (3e6, 4e6)
    assert found["rank_skew"] == 0.0 and found["communication_time"] == pytest.approx(5e-3)


def test_a_bubble_is_the_time_without_computing() -> None:
    found = timing(*(slot(number, (10, 1), (10, 3)) for number in range(3)))
    record = Record(replace(case("parallel", "fp32", {"microbatches": 8}), ranks=2), NATIVE, Status.OK, timing=found)
    assert measure_pipeline_bubble(record) == PipelineBubble(pytest.approx(4 / 16), 1 / 8)
    values = {str(one.name): one.value for one in rank_metrics(MetricSources(record))}
    assert (values["bubble"], values["ideal_bubble"]) == (pytest.approx(25.0), 12.5)
    assert measure_pipeline_bubble(replace(record, case=case("parallel", "fp32", {"way": "ddp"}))) is None


def test_the_median_interval_ends_at_two_rounds() -> None:
    assert find_median_interval([3.0, 1.0, 2.0, 5.0, 4.0]) == MedianInterval(3.0, 1.0, 5.0)
    assert find_median_interval([float(one) for one in range(8)]) == MedianInterval(3.5, 1.0, 6.0)
    assert (
        find_median_interval([1.0] * 4) is TOO_FEW_ROUNDS
        and find_median_interval([]) is TOO_FEW_ROUNDS
        and find_median_interval([1.0] * 5 + [math.nan]) is TOO_FEW_ROUNDS
    )


def scaled(*parts: tuple[float, ...], **more: object) -> Record:
    found = RankScaling(*parts)
    return Record(replace(case("parallel", "fp32", {}), ranks=2), NATIVE, Status.OK, scaling=found, **more)


def test_an_efficiency_has_its_interval_by_rounds() -> None:
    sent = (
        Sent(0, "send", "uint8", 1, 8.0),
        Sent(1, "send", "uint8", 2, 16.0),
        Sent(1, "reduce", "float32", 1, 4.0),
    )
    together = (5.0, 5.5, 6.0, 6.0, 6.5, 7.0)
    made = scaled((10.0,) * 6, (5.0,) * 6, together, sent=sent)
    strong, weak, wire = rank_metrics(MetricSources(made))
    assert (strong.name, weak.name, wire.name, wire.value) == ("strong_scaling", "weak_scaling", "wire_bytes", 20.0)
    assert strong.value == pytest.approx(1000 / 12) and strong.bounds == pytest.approx((1000 / 14, 100.0))
    assert weak.value == pytest.approx(500 / 6) and weak.bounds == pytest.approx((500 / 7, 100.0))
    faster = compute_efficiency(scaled((10.0,) * 6, (5.0,) * 6, (4.0,) * 6))
    assert faster.strong_scaling.value == pytest.approx(1.25)
    assert compute_efficiency(replace(made, scaling=None)) is None and count_sent_bytes(replace(made, sent=())) == ()
    # Medians of each side alone would come from different rounds: 10 over twice 16 ms.
    slow = (1.0, 1.0, 1.0, 4.0, 4.0, 4.0)
    alone, together = tuple(10 * one for one in slow), tuple(6.4 * one for one in slow)
    found = compute_efficiency(scaled(alone, alone, together))
    assert isinstance(found.strong_scaling, MedianInterval)
    assert found.strong_scaling == pytest.approx((10 / 12.8,) * 3)


@for_each(
    ("parts", "why"),
    [
        (((10.0,), (5.0,), (6.0,)), TOO_FEW_ROUNDS),
        (((10.0,) * 5, (5.0,) * 5, (6.0,) * 6), UNPAIRED_EFFICIENCY),
        (((), (), ()), UNPAIRED_EFFICIENCY),
        (((0.0,) * 6, (0.0,) * 6, (6.0,) * 6), UNPAIRED_EFFICIENCY),
        (((math.nan,) * 6, (math.nan,) * 6, (6.0,) * 6), UNPAIRED_EFFICIENCY),
        (((10.0,) * 6, (5.0,) * 6, (4.0, 5.0, 6.0, 6.0, 7.0, 8.0)), TOO_WIDE_EFFICIENCY),
    ],
)
def test_an_uncertain_efficiency_has_a_reason(parts: tuple[tuple[float, ...], ...], why: object) -> None:
    made = scaled(*parts)
    found = compute_efficiency(made)
    assert found.strong_scaling == why == found.weak_scaling
    assert [(one.value, one.bounds, bool(one.why)) for one in rank_metrics(MetricSources(made))] == [
        (None, None, True)
    ] * 2


ROUNDS = 6


def overlap(both: float, in_turn: float, rounds: int = ROUNDS) -> Overlap:
    return Overlap(*((one,) * rounds for one in (36e-3, 8e-3, both, in_turn)))


def told(found: MedianInterval | MissingFigure) -> float:
    return found.value


def test_overlap_may_be_negative_or_above_one() -> None:
    assert told(compute_overlap_figures(overlap(40e-3, 44e-3)).hidden_communication_share) == pytest.approx(0.5)
    assert told(compute_overlap_figures(overlap(36e-3, 44e-3)).exposed_seconds) == pytest.approx(0.0)
    worse = compute_overlap_figures(overlap(50e-3, 44e-3))
    assert told(worse.exposed_seconds) == pytest.approx(14e-3) and told(
        worse.hidden_communication_share
    ) == pytest.approx(-0.75)
    both = tuple(one * 1e-3 for one in (35.1, 35.2, 35.3, 35.4, 35.5, 36.2))
    more = compute_overlap_figures(Overlap((36e-3,) * 6, (8e-3,) * 6, both, (44e-3,) * 6))
    assert (
        told(more.exposed_seconds) < 0
        and told(more.hidden_communication_share) > 1
        and more.hidden_communication_share.low < 1
    )


def test_a_pipeline_has_no_hidden_communication() -> None:
    """The step includes ranks waiting for each other: 30 ms against 8 ms of sending would give -275%."""
    for microbatches in (None, 2):
        params = {} if microbatches is None else {"microbatches": microbatches}
        found = measure_overlap(
            Record(case("parallel", "bf16", params), NATIVE, Status.OK, overlap=overlap(66e-3, 44e-3))
        )
        assert told(found.exposed_seconds) == pytest.approx(30e-3)
        assert (found.hidden_communication_share is PIPELINE_WAITING) == (microbatches == 2)


def test_disturbed_rounds_give_no_overlap() -> None:
    # Running both in turn took 1.34 times the sum of both alone: they interfere, so no conclusion is possible.
    assert compute_overlap_figures(overlap(50e-3, 59e-3)) == OverlapFigures(
        TIME_SUM_MISMATCH, TIME_SUM_MISMATCH, pytest.approx(1.34, abs=0.01)
    )
    # Products alone took 51 ms and both together 36: 254% would be hidden. A checksum cannot notice.
    products, both = (51.0, 50.0, 52.0, 51.5, 51.0, 50.5), (36.0, 35.0, 37.0, 36.0, 36.5, 35.5)
    parts = Overlap(products, (9.7,) * 6, both, tuple(one + 9.7 for one in products))
    assert compute_overlap_figures(parts) == OverlapFigures(FASTER_THAN_ALONE, FASTER_THAN_ALONE, pytest.approx(1.0))
    sending = Overlap((9.7,) * 6, products, both, tuple(one + 9.7 for one in products))
    assert compute_overlap_figures(sending).hidden_communication_share is FASTER_THAN_ALONE
    # Medians give 50% hidden, rounds give -49% to 149%. Exposed time of a long step is still known.
    both = tuple(one * 1e-3 for one in (32.1, 39.9, 40.0, 40.0, 40.1, 47.9))
    found = compute_overlap_figures(Overlap((36e-3,) * 6, (8e-3,) * 6, both, (44e-3,) * 6))
    assert found.exposed_seconds is OVERLAP_INTERVAL_TOO_WIDE is found.hidden_communication_share
    long = compute_overlap_figures(
        Overlap((0.36,) * 6, (8e-3,) * 6, tuple(seconds + 0.324 for seconds in both), (0.368,) * 6)
    )
    assert (
        told(long.exposed_seconds) == pytest.approx(4e-3)
        and long.hidden_communication_share is OVERLAP_INTERVAL_TOO_WIDE
    )
    for parts in (((1.0,), (), (1.0,), (1.0,)), ((0.0,), (0.0,), (1.0,), (1.0,)), ((1.0,), (0.0,), (1.0,), (1.0,))):
        found = compute_overlap_figures(Overlap(*parts)).exposed_seconds
        assert found.why == "it has no recorded rounds"
    assert compute_overlap_figures(overlap(40e-3, 44e-3, rounds=4)).hidden_communication_share is TOO_FEW_ROUNDS
    assert isinstance(compute_overlap_figures(overlap(math.nan, 44e-3)).hidden_communication_share, MissingFigure)


def test_figures_have_their_bounds_or_their_reason() -> None:
    def of(parts: Overlap) -> list[object]:
        record = Record(case("collective", "bf16", {}), NATIVE, Status.OK, overlap=parts)
        return [
            one for metric in rank_metrics(MetricSources(record)) for one in (metric.value, metric.bounds, metric.why)
        ]

    both = tuple(one * 1e-3 for one in (39.0, 39.5, 40.0, 40.0, 40.5, 41.0))
    found = of(Overlap((36e-3,) * 6, (8e-3,) * 6, both, (44e-3,) * 6))
    assert found == [
        pytest.approx(4e-3),
        pytest.approx((3e-3, 5e-3)),
        "",
        pytest.approx(50.0),
        pytest.approx((37.5, 62.5)),
        "",
    ]
    assert of(overlap(50e-3, 59e-3)) == [None, None, TIME_SUM_MISMATCH.why] * 2
