"""The history of the cases at hand, as lines and as a table."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import Environment
from fp8bench.report.elements import Lines, Table, Text, Tone
from fp8bench.report.page.section import PastFigure, PastSeries
from fp8bench.report.topics.history import NONE_YET
from tests.materials import Made, of_kind, part
from tests.runs import transformer


def at_commit() -> Made:
    run, findings = transformer()
    return replace(run, environment=Environment({"commit": "3" * 40})), findings


def figure(number: int, value: float, **changes: object) -> PastFigure:
    """The figure of the commit of that number."""
    made = PastFigure(f"day {number}", str(number) * 40, value, 0.9 * value, 1.1 * value, 24, order=float(number))
    return replace(made, **changes)  # type: ignore[arg-type]


def series(precision: str, *figures: PastFigure, **changes: object) -> PastSeries:
    made = PastSeries(
        f"gemm.Gemm.track_time({precision}, 512)", "s", figures, "gemm", "time", precision, "shape=512", "box"
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_a_count_is_told_with_all_its_digits() -> None:
    """One launch more in a thousand must show."""
    past = (series("bf16", figure(1, 20_110.0), figure(2, 20_111.0), metric="launches", unit="count"),)
    (table,) = of_kind(part("history", at_commit(), past=past), Table)
    assert [field.text for field in table.rows[0]][2:4] == ["20,110", "20,111"]


def test_emulations_are_in_no_chart() -> None:
    past = (series("fp8", figure(1, 0.01), figure(2, 0.09), emulated=True),)
    found = part("history", at_commit(), past=past)
    assert not of_kind(found, Lines) and "a cost" in of_kind(found, Text)[-1].text


def test_places_are_named_where_there_are_several_and_split_where_too_many() -> None:
    two = [series("bf16", figure(1, 1.0), figure(2, 1.0), place=f"shape={size}") for size in (256, 512)]
    (lines,) = of_kind(part("history", at_commit(), past=tuple(two)), Lines)
    assert [name for name, _ in lines.series] == ["shape=256 bf16", "shape=512 bf16"]
    many = [replace(one, precision=name) for one in two for name in ("fp32", "bf16", "fp16", "tf32")]
    charts = of_kind(part("history", at_commit(), past=tuple(many)), Lines)
    assert [chart.title for chart in charts] == [
        "gemm shape=256: time, commit by commit", "gemm shape=512: time, commit by commit",
    ]  # fmt: skip
    assert [name for name, _ in charts[0].series] == ["fp32", "bf16", "fp16", "tf32"]


def test_rough_figures_are_grey_and_said() -> None:
    """Those of a few rounds, and those of files that no commit has; what does not compare is counted."""
    changed = figure(2, 2.0, unkept=True, when="now, with uncommitted changes")
    past = (series("bf16", figure(1, 1.0, hasty=True), changed, incomparable=3),)
    found = part("history", at_commit(), past=past)
    (lines,) = of_kind(found, Lines)
    assert lines.places == ("11111111", "22222222+")
    first, last = lines.series[0][1]
    assert first is not None and first.tone is Tone.DOUBT and first.hint.endswith("; a few rounds only")
    assert last is not None and last.tone is Tone.DOUBT
    texts = [one.text for one in of_kind(found, Text)]
    assert texts[0] == "3 older figures of other versions of a suite or the method do not compare."
    assert texts[1].startswith("Grey figures are of --quick runs") and texts[2].startswith("+ after a commit: ")


def test_nothing_from_before_is_said() -> None:
    """A series with this run alone is no history."""
    for past in ((), (series("bf16", figure(3, 1.0)),)):
        assert part("history", at_commit(), past=past).elements == (Text(NONE_YET),)


def test_figures_that_are_no_numbers_are_left_out() -> None:
    past = (series("bf16", figure(1, float("nan")), figure(2, float("inf")), figure(3, 0.0), figure(4, 2.0)),)
    (table,) = of_kind(part("history", at_commit(), past=past), Table)
    assert [field.text for field in table.rows[0]][2:] == ["0 s", "2.00 s", "-", "44444444", "2"]
