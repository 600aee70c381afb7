"""Efficiencies of several ranks: with what rounds leave of them, or the reason why there are none."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from fp8bench.analysis.metric import Told
from fp8bench.analysis.ranks import (
    EFFICIENCY_WITHIN,
    FEW,
    UNPAIRED,
    WIDE_EFFICIENCY,
    Middle,
    efficiency,
    rank_metrics,
    sent_by_rank,
)
from fp8bench.model import Record, Status
from fp8bench.model.ranks import Scaling, Sent
from tests.counts import for_each
from tests.runs import NATIVE, case

TRIALS = 400


def record(*parts: tuple[float, ...], **more: object) -> Record:
    found = Scaling(*parts)
    return Record(replace(case("parallel", "fp32", {}), ranks=2), NATIVE, Status.OK, scaling=found, **more)


def test_an_efficiency_has_its_interval() -> None:
    """Two ranks in 6 ms what one does in 10, and in 5 with half of the batch; nothing is cut to 100%."""
    sent = (Sent(0, "send", "uint8", 1, 8.0), Sent(1, "send", "uint8", 2, 16.0), Sent(1, "reduce", "float32", 1, 4.0))
    together = (5.0, 5.5, 6.0, 6.0, 6.5, 7.0)
    made = record((10.0,) * 6, (5.0,) * 6, together, sent=sent)
    strong, weak, wire = rank_metrics(Told(made))
    assert (strong.name, weak.name, wire.name, wire.value) == ("strong_scaling", "weak_scaling", "wire_bytes", 20.0)
    assert strong.value == pytest.approx(1000 / 12) and strong.bounds == pytest.approx((1000 / 14, 100.0))
    assert weak.value == pytest.approx(500 / 6) and weak.bounds == pytest.approx((500 / 7, 100.0))
    faster = efficiency(record((10.0,) * 6, (5.0,) * 6, (4.0,) * 6))
    assert faster is not None and isinstance(faster.strong, Middle) and faster.strong.value == pytest.approx(1.25)
    assert efficiency(replace(made, scaling=None)) is None and sent_by_rank(replace(made, sent=())) == ()


def test_what_is_slow_for_a_while_is_so_on_both_sides() -> None:
    """Medians of either side by itself would be of different rounds: 10 over twice 16 ms."""
    slow = (1.0, 1.0, 1.0, 4.0, 4.0, 4.0)
    alone, together = tuple(10 * one for one in slow), tuple(6.4 * one for one in slow)
    found = efficiency(record(alone, alone, together))
    assert found is not None and isinstance(found.strong, Middle)
    assert found.strong == pytest.approx((10 / 12.8,) * 3)


@for_each(
    ("parts", "why"),
    [
        (((10.0,), (5.0,), (6.0,)), FEW),
        (((10.0,) * 5, (5.0,) * 5, (6.0,) * 6), UNPAIRED),
        (((), (), ()), UNPAIRED),
        (((0.0,) * 6, (0.0,) * 6, (6.0,) * 6), UNPAIRED),
        (((math.nan,) * 6, (math.nan,) * 6, (6.0,) * 6), UNPAIRED),
        (((10.0,) * 6, (5.0,) * 6, (4.0, 5.0, 6.0, 6.0, 7.0, 8.0)), WIDE_EFFICIENCY),
    ],
)
def test_no_bare_figure_looks_certain(parts: tuple[tuple[float, ...], ...], why: object) -> None:
    """Too few rounds, sides of different ones, a file that was changed, and rounds that are too far apart."""
    made = record(*parts)
    found = efficiency(made)
    assert found is not None and found.strong == why == found.weak
    assert [(one.value, one.bounds, bool(one.why)) for one in rank_metrics(Told(made))] == [(None, None, True)] * 2


@for_each(("noise", "told"), [(0.02, (0.99, 1.0)), (0.5, (0.0, 0.2))])
def test_the_truth_lies_within_what_is_told(noise: float, told: tuple[float, float]) -> None:
    """Of quiet rounds nearly all are told and more than 90% of them right, on a machine that drifts by a fifth; a busy
    one tells next to nothing."""
    source, found = random.Random(3), []
    for _ in range(TRIALS):
        drifts = [math.exp(0.2 * source.gauss(0, 1)) for _ in range(6)]
        parts = (
            tuple(part * drift * math.exp(noise * source.gauss(0, 1)) for drift in drifts) for part in (1.0, 0.5, 0.625)
        )
        made = efficiency(record(*parts))
        assert made is not None
        found.append(made.strong)
    shares = [one for one in found if isinstance(one, Middle)]
    assert told[0] <= len(shares) / TRIALS <= told[1]
    if told[0]:
        assert sum(one.low <= 0.8 <= one.high for one in shares) / len(shares) > 0.9
    assert all(one.high - one.low <= EFFICIENCY_WITHIN * one.value for one in shares)
