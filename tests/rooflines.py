"""A step with counts, times and ceilings made by hand: what bounds its phases is known."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import Ceiling, Limit, Rate, Verdict
from fp8bench.model.step import PhaseCount, Tape
from tests.materials import Made
from tests.runs import NATIVE, phases, transformer

GB = 1_000_000_000
# 100 TFLOP/s of bf16 and 200 of fp8, 1 TB/s, 1 us a launch.
RATES = (
    Rate(Limit.PRODUCT, "bf16", (1e14,) * 5, 9, (4096, 4096, 4096)),
    Rate(Limit.PRODUCT, "fp8", (1.9e14, 2e14, 2e14, 2e14, 2e14), 9, (8192, 8192, 8192)),
    Rate(Limit.PRODUCT, "fp8-rowwise", (1.5e14,) * 5),
    Rate(Limit.COPY, runs=(9e11,) * 5),
    Rate(Limit.TRIAD, runs=(0.8e12, 1e12, 1e12, 1e12, 1.1e12)),
    Rate(Limit.CACHED, runs=(4e12,) * 5),
    Rate(Limit.LAUNCH, runs=(1e6,) * 5),
)
CEILING = Ceiling(2e14, 4e12, RATES, "NVIDIA H200")


def count(phase: str, flops: int = 0, moved: int = 0, launches: int = 1, path: str = "") -> PhaseCount:
    return PhaseCount(phase, flops, moved, launches, by_path=((path, flops),) if flops else ())


def tape(path: str, cast_bytes: int = 0) -> Tape:
    """3.8 TFLOP of products, 20 GB of optimizer, and 20,000 nearly empty launches."""
    found = [
        count("gemm", 3_834 * GB, 10 * GB, 100, path),
        count("optimizer_step", 0, 20 * GB, 10),
        count("elementwise", 0, GB, 20_000),
    ]
    return Tape(phases=(*found, *([count("cast", 0, cast_bytes, 50)] if cast_bytes else [])))


def made(ceiling: Ceiling | None = CEILING) -> Made:
    """A 100 ms bf16 step with 54% products at 71% of their ceiling; one in fp8 of 82 ms with casts.

    The last is emulated.
    """
    run, findings = transformer()
    bf16, fp16, fp8 = run.records
    lead, second, third = (findings[one.case.id] for one in run.records)
    case = replace(fp16.case, precision="fp8-rowwise")
    native = replace(fp16, case=case, support=NATIVE, tape=tape("e4m3", 4 * GB), ceiling=ceiling)
    records = (
        replace(bf16, tape=tape("bf16"), ceiling=ceiling),
        native,
        replace(fp8, tape=tape("fp32"), ceiling=ceiling),
    )
    assert second.ratio is not None
    ratio = replace(second.ratio, point=0.82, low=0.81, high=0.83)
    rest = {"optimizer_step": 0.025, "elementwise": 0.021}
    found = (
        replace(lead, best_seconds=0.1, phases=phases(0.1, gemm=0.54, optimizer_step=0.25, elementwise=0.21)),
        replace(
            second,
            case=case,
            best_seconds=0.082,
            ratio=ratio,
            verdict=Verdict.FASTER,
            labels=(),
            why="",
            phases=phases(0.082, gemm=0.027 / 0.082, cast=0.008 / 0.082, **{k: v / 0.082 for k, v in rest.items()}),
        ),
        third,
    )
    return replace(run, records=records), {one.case.id: one for one in found}
