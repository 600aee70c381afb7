"""Speed against error: where each case stands, which are outdone, and what has no place."""

from __future__ import annotations

import math
from dataclasses import replace

from fp8bench.model import Label, Verdict
from fp8bench.report.elements import Point, Scatter, Tone
from tests.materials import Made, emulated_with_a_ratio, of_kind, part, recased, with_errors
from tests.runs import gemm, judged, transformer


def charts(*made: Made) -> list[Scatter]:
    return of_kind(part("speedup", *made), Scatter)


def test_each_case_has_a_place() -> None:
    (chart,) = charts(gemm())
    assert (chart.title, chart.x.unit, chart.y.log) == ("Speed-up against product_error: gemm", "x", True)
    assert chart.points[:3] == (
        Point("fp32", "m=256 n=256 k=256", 1.0, 2.3e-7, hint="1.00x, error 2.3e-07"),
        Point("bf16", "m=256 n=256 k=256", 1 / 0.512, 2.4e-3, Tone.GOOD, "1.95x, error 2.4e-03"),
        Point("fp8", "m=256 n=256 k=256", None, 3.7e-2, Tone.DOUBT, "error 3.7e-02; emulated: no speed"),
    )
    assert chart.margin == "emulated: no speed"
    assert chart.description == "8 cases. product_error: fp32 2.3e-07, bf16 2.4e-03 and fp8 3.7e-02."


def test_errors_of_different_kinds_have_charts_of_their_own() -> None:
    first, second = charts(gemm(), transformer())
    assert (first.y.title, second.y.title) == ("product_error", "gradient_error")
    assert (first.name, second.name) == ("trade-off-1", "trade-off-2")


def test_labels_say_the_suite_where_several_share_a_chart() -> None:
    alone = with_errors(judged((Verdict.FASTER, 0.5)), 1e-7, 1e-3)
    assert [point.label for point in charts(alone)[0].points] == ["fp32", "bf16"]
    run, findings = alone
    other, more = recased(alone, lambda case: replace(case, workload="mlp"))
    (chart,) = charts((replace(run, records=(*run.records, *other.records)), findings | more))
    assert [point.label for point in chart.points] == ["gemm", "gemm", "mlp", "mlp"]


def test_each_run_has_an_axis_of_its_own() -> None:
    """Its speeds are over its own reference, whatever that of another run is called."""
    first, second = charts(gemm(), with_errors(judged((Verdict.FASTER, 0.5)), 1e-7, 1e-3))
    assert first.x.title == second.x.title == "speed-up over fp32" and len(second.points) == 2


def test_what_is_slower_and_less_exact_is_outdone() -> None:
    (chart,) = charts(with_errors(judged((Verdict.SLOWER, 1.25), (Verdict.FASTER, 0.5)), 1e-7, 1e-3))
    assert chart.description.endswith("Outdone in both: gemm m=64 bf16 by fp32.")
    assert [("outdone by fp32, which is faster and more exact" in point.hint) for point in chart.points] == [
        False, True, False, False,
    ]  # fmt: skip


def test_only_what_is_sure_is_weighed() -> None:
    """Neither a verdict in doubt nor intervals that touch let one case outdo another."""
    doubted = with_errors(judged((Verdict.SLOWER, 1.25, Label.NOISY)), 1e-7, 1e-3)
    alike = with_errors(judged((Verdict.SAME, 1.005)), 1e-7, 1e-3)
    more_exact = with_errors(judged((Verdict.SLOWER, 1.25)), 1e-3, 1e-7)
    for made in (doubted, alike, more_exact):
        (chart,) = charts(made)
        assert "utdone" not in chart.description and "outdone" not in "".join(point.hint for point in chart.points)


def test_doubt_is_grey_with_its_reason() -> None:
    (chart,) = charts(with_errors(judged((Verdict.FASTER, 0.5, Label.NOISY)), 1e-7, 1e-3))
    assert chart.points[1].tone is Tone.DOUBT and "noisy: so much noise" in chart.points[1].hint
    assert chart.margin == ""


def test_what_has_no_place_is_left_out() -> None:
    """An error of zero has none on a logarithmic axis, one that is no number has none at all."""
    for value in (0.0, math.nan, math.inf, -1.0):
        (chart,) = charts(with_errors(judged((Verdict.FASTER, 0.5)), value, 1e-3))
        assert [point.series for point in chart.points] == ["bf16"]
    unclear = with_errors(judged((Verdict.UNSURE, None), (Verdict.FASTER, 0.5)), 1e-7, 1e-3)
    assert [point.series for point in charts(unclear)[0].points] == ["fp32", "fp32", "bf16"]


def test_an_emulation_with_a_ratio_still_has_no_speed() -> None:
    assert {point.series for point in charts(emulated_with_a_ratio())[0].points if point.x is None} == {"fp8"}


def test_without_errors_there_is_no_chart() -> None:
    assert not charts(judged((Verdict.FASTER, 0.5)))
