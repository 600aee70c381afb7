"""Which of what a device can do at most holds for a case."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import pytest

from fp8bench.measure import ceilings
from fp8bench.measure.ceilings import derive_ceiling
from fp8bench.model import Ceiling, Ceilings, Level, Limit, PlannedCase, Rate
from tests.counts import for_each
from tests.fakes import CPU, planned


def looked(copied: float | None = None, **products: float) -> Ceilings:
    rates = [Rate(Limit.PRODUCT, name, (rate,)) for name, rate in products.items()]
    return Ceilings((*rates, *([Rate(Limit.CACHED, runs=(copied,))] if copied is not None else [])))


KNOWN = looked(7.0, fp32=100.0, bf16=400.0, fp16=20.0)


MAPPED = replace(planned("fp32"), case=replace(planned("fp32").case, precision_map=(("mlp", "bf16"),)))


@for_each(
    ("case", "known", "ceiling"),
    [
        # A case's dtype and wider ones (a CPU may compute fp16 in fp32); emulated cases any; mapped cases also the
        # map's.
        (planned("fp32"), KNOWN, Ceiling(100.0, 7.0)),
        (planned("fp16"), KNOWN, Ceiling(100.0, 7.0)),
        (planned("bf16"), KNOWN, Ceiling(400.0, 7.0)),
        (planned("fp8", Level.EMULATED), KNOWN, Ceiling(400.0, 7.0)),
        (planned("tf32", Level.EMULATED), KNOWN, Ceiling(400.0, 7.0)),
        (MAPPED, KNOWN, Ceiling(400.0, 7.0)),
        (planned("fp32"), None, None),
        (planned("fp32"), looked(bf16=1.0), Ceiling(None, None)),
    ],
)
def test_a_cases_ceiling_includes_wider_dtypes(
    case: PlannedCase, known: Ceilings | None, ceiling: Ceiling | None
) -> None:
    found = derive_ceiling(case, known)
    assert (None if found is None else replace(found, rates=())) == ceiling


def test_the_ceiling_is_the_highest_rate_of_all_runs() -> None:
    steady, wide = (100.0, 101.0, 102.0, 103.0, 104.0), (100.0, 101.0, 102.0, 103.0, 108.0)
    rates = Rate(Limit.PRODUCT, "fp32", steady), Rate(Limit.CACHED, runs=wide)
    assert rates[0].value == 102.0 and rates[0].spread == pytest.approx(4 / 102) and rates[0].is_steady
    assert not rates[1].is_steady and not Rate(Limit.COPY, why="no memory").is_steady
    assert derive_ceiling(planned("fp32"), Ceilings(rates)) == Ceiling(104.0, 108.0, rates)
    assert Ceilings(rates).bound(Limit.PRODUCT, "fp32") == 102.0 and Ceilings(rates).bound(Limit.CACHED) is None


@dataclass
class SlowBench:
    """A worker whose products take seconds, and whose copies take no time."""

    now: float = 0.0

    def with_time_limit(self, limit: float) -> SlowBench:
        return self

    def ceiling_rates(self, device: object) -> tuple[Rate, Rate]:
        return Rate(Limit.PRODUCT, "fp32"), Rate(Limit.COPY)

    def ceiling(self, device: object, rate: Rate, seconds: float) -> Rate:
        self.now += 4.0 if rate.limit is Limit.PRODUCT else 0.0
        return replace(rate, runs=(*rate.runs, 1.0))


def test_a_slow_rate_gets_few_runs_and_leaves_the_time_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = SlowBench()
    monkeypatch.setattr(ceilings.time, "monotonic", lambda: bench.now)
    slow, fast = ceilings.measure_ceilings(cast(Any, bench), CPU).rates
    # The first run only searches a shape.
    assert len(slow.runs) == 1 + ceilings.MIN_RUNS_PER_RATE
    assert len(fast.runs) == 1 + ceilings.RUNS_PER_RATE
