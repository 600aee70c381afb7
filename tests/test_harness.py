"""Every benchmark that fp8bench has of itself works: each is run once, at its smallest."""

from __future__ import annotations

import math

import pytest

from suites import harness
from suites.harness import BENCHMARKS, Benchmark, Size, cases
from tests.counts import sampled

# A second or two each, with workers that are forked; others start command lines with workers, compile or make stores.
QUICK = {
    harness.track_help,
    harness.track_list,
    harness.track_bad_usage,
    harness.track_marker_on,
    harness.track_marker_off,
    harness.track_harness_over_bare_loop,
    harness.track_update_view,
    harness.track_sampler_share,
    harness.track_asv_combination,
    harness.track_gate_false_alarms,
    harness.track_gate_missed,
}


def test_every_benchmark_is_listed() -> None:
    """What asv takes for one, this file runs, and `python -m suites.harness` prints."""
    assert [one for name, one in vars(harness).items() if name.startswith("track_")] == BENCHMARKS


@pytest.mark.slow
@pytest.mark.usefixtures("short_slots")
@pytest.mark.parametrize("benchmark", sampled(QUICK, BENCHMARKS))
def test_a_benchmark_gives_a_figure(benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first value of its parameter, where it has one. Those of quantisers are of compiled ones."""
    if "quantiser" in benchmark.__name__ or "emulated" in benchmark.__name__:
        monkeypatch.delenv("FP8BENCH_QUANTISERS")
    assert math.isfinite(benchmark(*next(cases(benchmark)), size=Size.SMALLEST))
