"""Each benchmark that fp8bench has of itself runs, at its smallest."""

from __future__ import annotations

import math

import pytest

from suites import harness
from suites.harness import BENCHMARKS, Benchmark, Size, cases
from tests.counts import sampled

# These take a second or two; others start workers, compile or create stores.
QUICK = {
    harness.track_help,
    harness.track_list,
    harness.track_bad_usage,
    harness.track_marker_on,
    harness.track_marker_off,
    harness.track_harness_over_bare_loop,
}


def test_every_benchmark_is_listed() -> None:
    assert [value for name, value in vars(harness).items() if name.startswith("track_")] == BENCHMARKS


@pytest.mark.slow
@pytest.mark.usefixtures("short_slots")
@pytest.mark.parametrize("benchmark", sampled(QUICK, BENCHMARKS))
def test_a_benchmark_gives_a_figure(benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch) -> None:
    if "quantiser" in benchmark.__name__ or "emulated" in benchmark.__name__:
        monkeypatch.delenv("FP8BENCH_QUANTISERS")
    assert math.isfinite(benchmark(*next(cases(benchmark)), size=Size.SMALLEST))
