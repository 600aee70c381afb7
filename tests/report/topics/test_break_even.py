"""Break-even in words, a table, a chart and rows."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.analysis.break_even import TimeRatioAtSize, break_even
from fp8bench.model import Interval, Label, Scalar
from fp8bench.report.topics.break_even import break_even_table, describe_crossings, iterate_break_even_rows
from tests.materials import Made, built, material, part, shapes
from tests.told_before import Told, as_before


def params(m: int) -> dict[str, Scalar]:
    return {"m": m, "n": 64, "k": 64, "product": "forward"}


def swept_shapes(*speeds: float, labels: tuple[Label, ...] = ()) -> Made:
    """bf16 at m = 16, 32, 64, ... has this speed-up over fp32; fp8 is emulated."""
    made = [shapes(params(16 << place), speed=speed, labels=labels) for place, speed in enumerate(speeds)]
    run, _ = shapes(*(params(16 << place) for place in range(len(speeds))))
    return run, {key: finding for _, findings in made for key, finding in findings.items()}


def words(*speeds: float) -> str:
    intervals = (Interval(1 / speed, 0.99 / speed, 1.01 / speed, 0.99) for speed in speeds)
    curve = break_even([TimeRatioAtSize(16 << place, interval) for place, interval in enumerate(intervals)])
    assert curve is not None
    return describe_crossings("m", curve)


@as_before
def test_break_even() -> Told:
    for speeds in (
        (0.5, 0.8, 1.25, 2.0),
        (2.0, 1.25, 0.8, 0.5),
        (0.5, 2.0, 2.0, 0.5),
        (2.0, 0.5, 0.5, 2.0),
        (2.0, 2.0, 2.0),
        (0.5, 0.5, 0.5),
        (1.0, 1.0, 1.0),
        (2.0, 2.0, 1.0),
        (0.5, 0.5, 1.0),
    ):
        yield f"speed-ups of {speeds} pay", words(*speeds)
        rows = iterate_break_even_rows(*swept_shapes(*speeds))
        yield f"rows of {speeds}, without a size where there is no crossing", list(map(tuple, rows))
    for claim, made in {
        "a table says where each pays, and why not": swept_shapes(0.5, 0.8, 1.25, 2.0),
        "remarks name what is not sure": swept_shapes(1.0, 1.0, 1.25, 2.0, labels=(Label.NOISY,)),
    }.items():
        ((_, panel),) = material(made).panels()
        yield claim, list(break_even_table(panel))
    run, findings = swept_shapes(2.0, 2.0, 2.0)
    emulated = replace(run, records=tuple(record for record in run.records if record.case.mode != "bf16"))
    yield "a sweep of emulations alone has no line to draw", part("break-even", (emulated, findings))
    yield "without a sweep there is nothing", built("break-even", shapes(params(16), params(32)))
