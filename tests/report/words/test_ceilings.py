"""What a device does at most, in words."""

from __future__ import annotations

from fp8bench.model import Ceilings, Limit, Rate
from fp8bench.report.words.ceilings import lines_of

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
