"""What devices did at most, measurement by measurement."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.analysis.roofline import Pace, since
from fp8bench.model import Ceilings, Limit, Rate
from tests.counts import for_each


def ceilings(*runs: float) -> Ceilings:
    return Ceilings((Rate(Limit.COPY, runs=runs, shape=(1 << 20,)),))


@for_each(
    ("now", "pace"),
    [((90.0, 91.0), Pace.SLOWER), ((96.0, 97.0), Pace.AS_BEFORE), ((112.0, 113.0), Pace.FASTER),
     ((80.0, 90.0), Pace.UNCLEAR)],
)  # fmt: skip
def test_slower_is_below_all_of_before(now: tuple[float, ...], pace: Pace) -> None:
    """By more than 5%; measurements that spread widely do not count."""
    earlier = [ceilings(100.0, 101.0), ceilings(104.0, 105.0), ceilings(50.0, 150.0)]
    (rate,) = ceilings(*now).rates
    change = since(rate, earlier)
    assert change is not None and change.pace is pace and len(change.before) == 3
    assert since(rate, []) is None and since(Rate(Limit.COPY, why="no"), earlier) is None
    assert since(rate, earlier[2:]) == replace(change, before=(100.0,), pace=Pace.UNCLEAR)
