"""What devices did at most, measurement by measurement."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench.analysis.roofline import Pace, since
from fp8bench.model import Ceilings, DeviceFacts, Environment, Limit, Rate
from fp8bench.report.topics.roofline import lines_of
from fp8bench.store.ceilings import new_ceilings
from tests.commands import Say
from tests.facts import CPU

FOUND = Ceilings(
    (
        Rate(Limit.PRODUCT, "bf16", (4.24e11, 4.25e11, 4.26e11), 6, (512, 512, 2048)),
        Rate(Limit.PRODUCT, "nvfp4", searched=1, why="RuntimeError: no kernel"),
        Rate(Limit.COPY, runs=(8e9, 1e10, 9e9), searched=2, shape=(1 << 26,)),
        Rate(Limit.LAUNCH, runs=(5e5, 5e5, 5e5), shape=(1,)),
    ),
    "2026-11-22T23:24:30+00:00",
    (("torch", "2.13.0"), ("cuda:0 power_cap", 700.0), ("device", "cuda:0"), ("name", "H200")),
)


def ceilings(*runs: float) -> Ceilings:
    return Ceilings((Rate(Limit.COPY, runs=runs, shape=(1 << 20,)),))


@pytest.mark.parametrize(
    ("now", "pace"),
    [((90.0, 91.0), Pace.SLOWER), ((96.0, 97.0), Pace.AS_BEFORE), ((112.0, 113.0), Pace.FASTER),
     ((80.0, 90.0), Pace.UNCLEAR)],
)  # fmt: skip
def test_slower_is_below_all_of_before(now: tuple[float, ...], pace: Pace) -> None:
    """By more than 5%; what was wild before counts for nothing."""
    earlier = [ceilings(100.0, 101.0), ceilings(104.0, 105.0), ceilings(50.0, 150.0)]
    (rate,) = ceilings(*now).rates
    found = since(rate, earlier)
    assert found is not None and found.pace is pace and len(found.before) == 3
    assert since(rate, []) is None and since(Rate(Limit.COPY, why="no"), earlier) is None
    assert since(rate, earlier[2:]) == replace(found, before=(100.0,), pace=Pace.UNCLEAR)


def test_the_history_of_ceilings(store: Path, fp8bench: Say) -> None:
    """A part for each device with its settings, which do not compare with others."""
    store.mkdir()
    (store / "ceilings").mkdir()
    assert "fp8bench doctor --ceilings" in fp8bench("history", "ceilings")[1]
    measurements = [(1, 100.0, CPU), (1, 102.0, CPU), (1, 80.0, CPU), (2, 500.0, CPU)]
    for threads, rate, device in measurements:
        keep(store, threads, rate, device)
    code, out, err = fp8bench("history", "ceilings")
    assert (code, err) == (0, "") and "4 measurements" in out and "threads 1): 3 measurements" in out
    assert "copy  100 B/s to 102 B/s  80.0 B/s  -20.8%  slower" in out
    assert "copy  -       500 B/s       -" in out


def keep(store: Path, threads: int, rate: float, device: DeviceFacts) -> None:
    found = replace(ceilings(rate, rate), device=device.name)
    environment = Environment({"machine": "box", "torch": "2.13.0", "threads": threads})
    new_ceilings(store, environment, device, lambda begun, keep: found)


def test_every_rate_has_its_spread_and_what_was_searched() -> None:
    """Runs that differ by more than 5% are said to bound nothing; what was not measured has its reason."""
    assert list(lines_of(FOUND)) == [
        (
            "measured 2026-11-22T23:24:30+00:00 (torch 2.13.0, cuda:0 power_cap 700.0); other software or settings "
            "need their own"
        ),
        "product bf16   425 GFLOP/s; spread 0.5% over 3 runs; 512x512x2048, the best of 6 searched",
        "product nvfp4  not measured: RuntimeError: no kernel",
        "copy           9.00 GB/s; spread 22.2% over 3 runs: no bound; arrays of 64.0 MiB, the best of 2 searched",
        "launch         500 klaunches/s, 2.00 us each; spread 0.0% over 3 runs; one element",
    ]
