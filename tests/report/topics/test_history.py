"""The cases at hand in other runs, commit by commit."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import Environment, Figure, Series, Trend
from fp8bench.report.page.section import PastSeries
from tests.materials import Made, part
from tests.runs import transformer
from tests.told_before import Told, as_before

DAY = 86_400_000
UNITS = {"time": "seconds", "launches": "count"}


def at_commit() -> Made:
    run, findings = transformer()
    return replace(run, environment=Environment({"commit": "3" * 40})), findings


def figure(number: int, value: float, **changes: object) -> Figure:
    made = Figure(str(number) * 40, number * DAY, "1", 1, 24, value, 0.9 * value, 1.1 * value)
    return replace(made, **changes)  # type: ignore[arg-type]


def series(precision: str, *figures: Figure, metric: str = "time", shape: str = "512", **changes: object) -> PastSeries:
    own = Series(f"gemm.Gemm.track_{metric}", "gemm", metric, UNITS[metric], ("dtype", "shape"), (), "1")
    made = PastSeries(Trend(own, (precision, shape), {"machine": "box"}, "", figures))
    return replace(made, **changes)  # type: ignore[arg-type]


@as_before
def test_history() -> Told:
    counts = series("bf16", figure(1, 20_110.0), figure(2, 20_111.0), metric="launches")
    yield "a count is told with all its digits", part("history", at_commit(), past=(counts,))
    emulation = series("fp8", figure(1, 0.01), figure(2, 0.09), emulated=True)
    yield "emulations are in no chart", part("history", at_commit(), past=(emulation,))
    shapes = ("256", "512")
    two = [series("bf16", figure(1, 1.0), figure(2, 1.0), shape=shape) for shape in shapes]
    yield "places are named where there are several", part("history", at_commit(), past=tuple(two))
    modes = ("fp32", "bf16", "fp16", "tf32")
    many = [series(mode, figure(1, 1.0), figure(2, 1.0), shape=shape) for shape in shapes for mode in modes]
    yield "and have charts of their own where too many", part("history", at_commit(), past=tuple(many))
    rough = series("bf16", figure(1, 1.0, hasty=True), unkept=(figure(2, 2.0),), incomparable=3)
    yield (
        "rough figures are grey and said; what does not compare is counted",
        part("history", at_commit(), past=(rough,)),
    )
    for past in ((), (series("bf16", figure(3, 1.0)),)):
        yield f"{len(past)} series with this run alone are no history", part("history", at_commit(), past=past)
    odd = series("bf16", figure(1, float("nan")), figure(2, float("inf")), figure(3, 0.0), figure(4, 2.0))
    yield "figures that are no numbers are left out", part("history", at_commit(), past=(odd,))
