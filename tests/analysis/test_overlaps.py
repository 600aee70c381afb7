"""What of communication hides behind products, by values and by simulated rounds of which the truth is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from fp8bench.analysis.metric import Told
from fp8bench.analysis.ranks import (
    FEW,
    HIDDEN_WITHIN,
    OFF,
    SHORT,
    WAITING,
    WIDE_OVERLAP,
    Middle,
    OverlapFigures,
    Untold,
    overlap_figures,
    overlap_of,
    rank_metrics,
)
from fp8bench.model import Record, Status
from fp8bench.model.ranks import Overlap
from tests.counts import for_each
from tests.runs import NATIVE, case

ROUNDS = 6
TRIALS = 400


def overlap(both: float, in_turn: float, rounds: int = ROUNDS) -> Overlap:
    return Overlap(*((one,) * rounds for one in (36e-3, 8e-3, both, in_turn)))


def told(found: Middle | Untold) -> float:
    assert isinstance(found, Middle), found
    return found.value


def test_overlap_is_never_cut_to_what_one_would_like() -> None:
    """Half hidden, all hidden, worse than in turn, and more than all of it within what rounds leave."""
    assert told(overlap_figures(overlap(40e-3, 44e-3)).hidden) == pytest.approx(0.5)
    assert told(overlap_figures(overlap(36e-3, 44e-3)).exposed) == pytest.approx(0.0)
    worse = overlap_figures(overlap(50e-3, 44e-3))
    assert told(worse.exposed) == pytest.approx(14e-3) and told(worse.hidden) == pytest.approx(-0.75)
    both = tuple(one * 1e-3 for one in (35.1, 35.2, 35.3, 35.4, 35.5, 36.2))
    more = overlap_figures(Overlap((36e-3,) * 6, (8e-3,) * 6, both, (44e-3,) * 6))
    assert told(more.exposed) < 0 and told(more.hidden) > 1 and isinstance(more.hidden, Middle) and more.hidden.low < 1


def test_nothing_of_a_pipeline_s_sending_is_called_hidden() -> None:
    """Its step is longer by what ranks wait for each other: 30 ms beside 8 ms of sending would be -275%."""
    for microbatches in (None, 2):
        params = {} if microbatches is None else {"microbatches": microbatches}
        found = overlap_of(Record(case("parallel", "bf16", params), NATIVE, Status.OK, overlap=overlap(66e-3, 44e-3)))
        assert found is not None and told(found.exposed) == pytest.approx(30e-3)
        assert (found.hidden is WAITING) == (microbatches == 2)


def test_overlap_is_refused_where_the_check_sum_is_off() -> None:
    """Both in turn took 1.34 times both alone: they disturb each other, and nothing follows."""
    assert overlap_figures(overlap(50e-3, 59e-3)) == OverlapFigures(OFF, OFF, pytest.approx(1.34, abs=0.01))


def test_a_part_that_takes_longer_than_the_whole_is_no_overlap() -> None:
    """Products alone took 51 ms and both at once 36: 254% would be hidden. A check sum sees nothing of it."""
    products, both = (51.0, 50.0, 52.0, 51.5, 51.0, 50.5), (36.0, 35.0, 37.0, 36.0, 36.5, 35.5)
    parts = Overlap(products, (9.7,) * 6, both, tuple(one + 9.7 for one in products))
    assert overlap_figures(parts) == OverlapFigures(SHORT, SHORT, pytest.approx(1.0))
    sending = Overlap((9.7,) * 6, products, both, tuple(one + 9.7 for one in products))
    assert overlap_figures(sending).hidden is SHORT


def test_rounds_that_leave_it_open_tell_nothing() -> None:
    """Medians say that half of it hides; rounds say -49% to 149%. Of a long step exposed time is known all the same."""
    both = tuple(one * 1e-3 for one in (32.1, 39.9, 40.0, 40.0, 40.1, 47.9))
    found = overlap_figures(Overlap((36e-3,) * 6, (8e-3,) * 6, both, (44e-3,) * 6))
    assert found.exposed is WIDE_OVERLAP is found.hidden
    long = overlap_figures(Overlap((0.36,) * 6, (8e-3,) * 6, tuple(one + 0.324 for one in both), (0.368,) * 6))
    assert told(long.exposed) == pytest.approx(4e-3) and long.hidden is WIDE_OVERLAP


def test_an_overlap_whose_rounds_are_gone_is_none() -> None:
    """A file that somebody changed is shown all the same."""
    for parts in (((1.0,), (), (1.0,), (1.0,)), ((0.0,), (0.0,), (1.0,), (1.0,)), ((1.0,), (0.0,), (1.0,), (1.0,))):
        found = overlap_figures(Overlap(*parts)).exposed
        assert isinstance(found, Untold) and found.why == "no round of it was kept"
    assert overlap_figures(overlap(40e-3, 44e-3, rounds=4)).hidden is FEW
    assert isinstance(overlap_figures(overlap(math.nan, 44e-3)).hidden, Untold)


def test_figures_have_their_bounds_or_their_reason() -> None:
    """In percent, as its value."""

    def of(parts: Overlap) -> list[object]:
        record = Record(case("collective", "bf16", {}), NATIVE, Status.OK, overlap=parts)
        return [one for metric in rank_metrics(Told(record)) for one in (metric.value, metric.bounds, metric.why)]

    both = tuple(one * 1e-3 for one in (39.0, 39.5, 40.0, 40.0, 40.5, 41.0))
    found = of(Overlap((36e-3,) * 6, (8e-3,) * 6, both, (44e-3,) * 6))
    assert found == [
        pytest.approx(4e-3), pytest.approx((3e-3, 5e-3)), "", pytest.approx(50.0), pytest.approx((37.5, 62.5)), "",
    ]  # fmt: skip
    assert of(overlap(50e-3, 59e-3)) == [None, None, OFF.why] * 2


@dataclass(frozen=True)
class Counted:
    """Of simulated cases: how many told the hidden share, how many of these were right, and how many were short."""

    told: float
    held: float
    short: float


def simulated(compute: float, sent: float, hidden: float, disturbed: Callable[[random.Random], float]) -> Counted:
    """Rounds whose parts are each disturbed by themselves, on a machine that drifts by a fifth from round to round."""
    source, found = random.Random(7), []
    for _ in range(TRIALS):
        drifts = [math.exp(0.2 * source.gauss(0, 1)) for _ in range(ROUNDS)]
        parts = (
            tuple(part * drift * disturbed(source) for drift in drifts)
            for part in (compute, sent, compute + sent * (1 - hidden), compute + sent)
        )
        found.append(overlap_figures(Overlap(*parts)).hidden)
    shares = [one for one in found if isinstance(one, Middle)]
    held = sum(one.low <= hidden <= one.high for one in shares) / max(1, len(shares))
    return Counted(len(shares) / TRIALS, held, found.count(SHORT) / TRIALS)


@for_each("hidden", [-0.5, 0.0, 0.5, 1.0])
def test_of_quiet_rounds_the_truth_is_told(hidden: float) -> None:
    """However the machine drifts; what hides all of it is called impossible in a few of a hundred."""
    found = simulated(40e-3, 14e-3, hidden, lambda source: math.exp(0.02 * source.gauss(0, 1)))
    assert found.told > 0.9 and found.held > 0.9 and found.short < 0.06


@for_each("hidden", [0.0, 0.5, 1.0])
def test_of_rounds_that_a_busy_machine_disturbs_next_to_nothing_is_told(hidden: float) -> None:
    """By 30% each: a careless reader would have had a figure of all of them."""
    found = simulated(40e-3, 14e-3, hidden, lambda source: math.exp(0.3 * source.gauss(0, 1)))
    assert found.told < 0.02 and HIDDEN_WITHIN == 0.5


@pytest.mark.parametrize("hidden", [0.0, 1.0])
def test_bursts_make_it_wide_and_not_wrong(hidden: float) -> None:
    """A tenth of all parts takes up to twice as long."""
    found = simulated(
        40e-3, 14e-3, hidden,
        lambda source: 1 + 0.01 * abs(source.gauss(0, 1)) + (source.random() < 0.1) * source.random(),
    )  # fmt: skip
    assert 0.2 < found.told < 0.9 and found.held > 0.9 and found.short < 0.06
