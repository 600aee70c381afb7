"""FP8 means over ranks, simulated by the programs that real ranks run: errors, bytes and scales."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fp8bench.numerics import rank_programs
from fp8bench.numerics.collectives import (
    FP8_MEAN_METHODS,
    FP8LM_SCALING,
    GATHER,
    MS_AMP_SCALING,
    POST_SCALING,
    PRE_SUM_SCALING,
    RING,
    TWOSHOT,
    AutoScale,
    FP8Collective,
    PlainCollective,
    SelfCheckFailed,
    check_collective_mean,
    compute_exact_result,
    compute_flushed_share,
    compute_fp8_mean,
    compute_largest_scale,
    compute_saturated_share,
    decode_e4m3,
    draw_rank_values,
    encode_e4m3,
)
from fp8bench.numerics.rank_programs import AllGather, ExchangeProgram, SentBytes, ShiftToNextRank, simulate
from fp8bench.workloads.collective import SCALINGS
from tests.counts import for_each

# SQNR in dB of 262,144 normal values, measured by separate code; and for values whose ranks share half of their
# variance.
OWN = {
    (RING, POST_SCALING): {2: 28.1, 4: 25.8, 8: 21.1, 16: 13.7, 64: 4.4},
    (RING, PRE_SUM_SCALING): {2: 28.1, 4: 26.0, 8: 23.8, 16: 21.4, 64: 16.1},
    (RING, MS_AMP_SCALING): {2: 28.1, 4: 26.0, 8: 23.7, 16: 21.4, 64: 16.1},
    (RING, FP8LM_SCALING): {2: 28.1, 4: 26.0, 8: 23.8, 16: 21.4, 64: 16.1},
    (GATHER, POST_SCALING): {2: 31.5, 4: 31.5, 8: 31.5, 16: 31.5, 64: 31.5},
    (TWOSHOT, POST_SCALING): {2: 28.1, 4: 28.4, 8: 28.5, 16: 28.5, 64: 28.5},
}
SHARED = {
    (RING, POST_SCALING): {8: 9.5, 16: 4.5, 64: 1.0},
    (RING, PRE_SUM_SCALING): {8: 25.7, 16: 23.4, 64: 9.0},
    (RING, MS_AMP_SCALING): {8: 25.4, 16: 20.9, 64: 8.3},
    (RING, FP8LM_SCALING): {8: 25.7, 16: 23.4, 64: 9.0},
    (GATHER, POST_SCALING): {8: 38.0, 16: 40.8, 64: 46.6},
    (TWOSHOT, POST_SCALING): {8: 30.7, 16: 31.1, 64: 31.4},
}
# Parts per million of the sum that are the format's largest.
SATURATED = {
    (POST_SCALING, 8, False): 12817,
    (MS_AMP_SCALING, 8, True): 1526,
    (MS_AMP_SCALING, 16, True): 23926,
    (MS_AMP_SCALING, 64, True): 98632,
}
# Other draws of equally many values.
WITHIN_DB = 0.6


def sources(size: int, shared: bool, count: int) -> list[Tensor]:
    own = [draw_rank_values(1, rank, count) for rank in range(size)]
    common = draw_rank_values(2, 0, count)
    return [(values + common).mul_(0.5**0.5) for values in own] if shared else own


def sqnr(values: Tensor, exact: Tensor) -> float:
    return 10 * math.log10(float(exact.square().sum() / (values.double() - exact).square().sum()))


def mean_of(way: str, scaling: str, given: list[Tensor]) -> tuple[Tensor, float, float]:
    """The mean that all ranks receive, the share of the largest code in ppm, and FP8-LM's settled mu."""
    size, mu = len(given), torch.ones(1)
    while True:
        autos = [AutoScale(mu) for _ in given]
        result = simulate(
            [compute_fp8_mean(way, item, scaling, rank, size, autos[rank]) for rank, item in enumerate(given)]
        )
        assert all(torch.equal(tensor.values, result[0].values) for tensor in result)
        share = float(compute_saturated_share(result[0].codes))
        if scaling != FP8LM_SCALING or share <= 1e-5:
            return result[0].values, share * 1e6, float(mu)
        mu = autos[0].mu
        assert all(torch.equal(item.mu, mu) for item in autos)


@pytest.mark.parametrize("size", [2, 8, *(pytest.param(item, marks=pytest.mark.slow) for item in (4, 16, 64))])
@for_each("shared", [False, True])
def test_errors_are_those_of_the_table(size: int, shared: bool) -> None:
    table = SHARED if shared else OWN
    given = sources(size, shared, 1 << 15)
    exact = compute_exact_result("all_reduce", given, 0)
    for (way, scaling), row in table.items():
        if size not in row:
            continue
        values, ppm, _ = mean_of(way, scaling, given)
        assert sqnr(values, exact) == pytest.approx(row[size], abs=WITHIN_DB), (way, scaling)
        if way == RING and (scaling, size, shared) in SATURATED:
            assert ppm == pytest.approx(SATURATED[scaling, size, shared], rel=0.35)


def test_a_smaller_factor_flushes_more() -> None:
    rows = torch.exp(2 * draw_rank_values(3, 0, 512)).repeat_interleave(128)
    given = [values * rows for values in sources(8, False, 1 << 16)]
    lost = []
    for name in (PRE_SUM_SCALING, MS_AMP_SCALING, POST_SCALING):
        shares = simulate([compute_flushed_share(item, name, 8, AutoScale()) for item in given])
        lost.append(float(shares[0]))
    assert lost == pytest.approx([0.1, 0.054, 0.029], rel=0.8) and lost == sorted(lost, reverse=True)


def test_mu_is_halved_until_next_to_nothing_saturates() -> None:
    assert mean_of(RING, FP8LM_SCALING, sources(16, False, 1 << 14))[2] == 0.25
    auto = AutoScale()
    auto.update(torch.tensor([2e-5]))
    assert float(auto.mu) == 0.5
    for _ in range(1000):
        auto.update(torch.tensor([0.0]))
    assert float(auto.mu) == pytest.approx(1.0, rel=1e-3)
    for _ in range(1500):
        auto.update(torch.tensor([0.0]))
    assert float(auto.mu) == 2.0


@for_each("whole", [True, False])
@for_each("way", FP8_MEAN_METHODS)
def test_what_is_cut_off_halves_mu_on_every_rank(way: str, whole: bool) -> None:
    one = torch.ones(1 << 12)
    given = [torch.cat([one, 1.9 * one]), torch.cat([one, one])]
    autos = [AutoScale(torch.full((1,), 2.0)) for _ in given]
    simulate(
        [compute_fp8_mean(way, item, FP8LM_SCALING, rank, 2, autos[rank], whole) for rank, item in enumerate(given)]
    )
    assert [float(auto.mu) for auto in autos] == [1.0, 1.0]


def test_bytes_are_counted() -> None:
    size, count = 4, 1 << 12
    given = sources(size, False, count)

    def sent(way: str, scaling: str, whole: bool) -> float:
        counted = SentBytes(size)
        simulate(
            [compute_fp8_mean(way, item, scaling, rank, size, AutoScale(), whole) for rank, item in enumerate(given)],
            counted,
        )
        return counted.bytes

    amax, share = 2 * 4 * (size - 1) / size, count * (size - 1) / size
    assert sent(GATHER, POST_SCALING, True) == (size - 1) * count + amax
    assert sent(RING, POST_SCALING, True) == 2 * share + amax
    assert sent(TWOSHOT, POST_SCALING, True) == 2 * share + amax + 4 * (size - 1)  # each part's scale
    for way in (RING, TWOSHOT):  # each part is sent only to its owner
        assert sent(way, PRE_SUM_SCALING, False) == share + amax


@for_each("way", FP8_MEAN_METHODS)
@for_each("scaling", SCALINGS)
def test_parts_are_those_of_the_whole(way: str, scaling: str) -> None:
    given = sources(4, False, 1 << 10)
    whole = FP8Collective("all_reduce", way, scaling).simulate_ranks(given)[0].values
    parts = torch.cat([item.values for item in FP8Collective("reduce_scatter", way, scaling).simulate_ranks(given)])
    assert torch.equal(parts, whole) or way == TWOSHOT
    assert sqnr(parts, whole.double()) > 27


def test_a_scale_is_the_largest_power_of_two_that_fits() -> None:
    """The largest power of two that fits.

    1 for an empty tensor, NaN for a non-finite one: an overflow sent as 448 would go unnoticed.
    """
    amax = torch.tensor([448.0, 449.0, 1.0, 0.0, 1e-45])
    assert compute_largest_scale(amax).tolist() == [1.0, 0.5, 256.0, 1.0, 1.0]
    assert compute_largest_scale(torch.tensor([math.inf, math.nan])).isnan().all()
    assert decode_e4m3(encode_e4m3(torch.tensor([1e6, -1e6, 448.0]))).tolist() == [448.0, -448.0, 448.0]


def test_ones_must_come_to_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainCollective, "__call__", lambda self, given, size, around: given * size)
    with pytest.raises(SelfCheckFailed, match=r"the mean of ones is 2\.0 instead of 1\.0"):
        check_collective_mean(PlainCollective("all_reduce", torch.float32), 64, 0, 2, "cpu")


def test_a_shift_sends_to_the_next_rank_and_receives_from_the_previous_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda group: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 5)
    monkeypatch.setattr(dist, "P2POp", lambda operation, payload, group, group_peer: (operation, group_peer))
    monkeypatch.setattr(dist, "batch_isend_irecv", list)
    waits, _ = rank_programs._start_rank_exchange(ShiftToNextRank(torch.ones(1)), None, False)
    assert waits == [(dist.isend, 4), (dist.irecv, 2)]


def test_ranks_that_end_early_are_noticed() -> None:
    def leaves(rank: int) -> ExchangeProgram[int]:
        if rank:
            yield ShiftToNextRank(torch.ones(1))
        yield AllGather(torch.ones(1))
        return rank

    with pytest.raises(RuntimeError, match="1 of 2 ranks have ended while the others wait"):
        simulate([leaves(0), leaves(1)])
