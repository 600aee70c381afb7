"""What phases wait for, in sentences and under both ceilings drawn, and what to do where nobody knows."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import Ceiling, Label, Limit, Request, Verdict
from fp8bench.report.elements import Items, Scatter, Table, Text
from fp8bench.report.panels import panels_of
from fp8bench.report.topics.roofline import how_to_know, roofline_section, sentences
from tests.materials import Made, built, material, of_kind, part, told
from tests.rooflines import CEILING, made
from tests.runs import render_whole


def test_a_phase_far_below_its_ceilings_is_bound_by_none() -> None:
    """Ten times as slow, it waits for something else."""
    run, findings = made()
    first = run.records[0].case.id
    slow = tuple((name, 10 * seconds) for name, seconds in findings[first].phases if name != "optimizer_step")
    findings = {**findings, first: replace(findings[first], best_seconds=1.0, phases=slow)}
    (said, *_) = sentences(panels_of(run, findings)[0])
    assert said.endswith(
        " is far below its ceilings in gemm (54% of the step, 5.40 ms an operator, at 7% of the nearest) and "
        "elementwise (21% of the step, 10.5 us an operator, at 10% of the nearest)."
    )


def sentences_of(one: Made) -> str:
    run, findings = one
    return how_to_know((result for panel in panels_of(run, findings) for result in panel.results), run)


def test_without_ceilings_somebody_is_told_how_to_know() -> None:
    """Once, in the terminal and on the page, with the threads and the store of the run; never beside a roofline."""
    run, findings = made(None)
    words = sentences_of((run, findings))
    assert words.startswith("What bounds each phase is not known yet: `fp8bench doctor --ceilings` measures")
    assert " ".join(render_whole(run, findings).split()).count("fp8bench doctor --ceilings") == 1
    (element,) = roofline_section(material((run, findings)))
    assert words in str(element)
    other = replace(run, request=Request("transformer", threads=2), command="fp8bench suite transformer --store kept")
    assert "`fp8bench doctor --ceilings --threads 2`, with the same --store, measures" in sentences_of(
        (other, findings)
    )
    assert sentences_of(made()) == "" and "doctor" not in render_whole(*made())
    bare = replace(run, records=tuple(replace(one, tape=None) for one in run.records))
    assert sentences_of((bare, findings)) == ""


def test_what_bounds_each_phase_in_words() -> None:
    """And by Amdahl what fp8 could give at most, what it gives, and the tax of its casts. No advice of an emulation."""
    (items,) = of_kind(part("roofline", made()), Items)
    bounds, own, gain = (one.text for one in items.items)
    assert bounds == (
        "bf16 is compute-bound in gemm (54% of the step, at 71% of its ceiling), memory-bound in optimizer step (25% "
        "of the step, at 80% of its ceiling) and launch-bound in elementwise (21% of the step, at 95% of its ceiling)."
    )
    assert own.startswith("fp8-rowwise is compute-bound in gemm (33% of the step, at 71% of its ceiling), memory-bound")
    assert "of its ceiling) and cast (10% of the step, at 50% of its ceiling) and launch-bound in elementwise" in own
    assert gain == (
        "bf16's products are 54% of the step and at 71% of their ceiling: fp8-rowwise at its own ceiling would give at "
        "most 1.53x; it gives 1.22x; its products alone are 2.00x as fast, with the casts 1.54x (casts move 3.73 GiB, "
        "products 9.31 GiB)."
    )


def test_what_is_not_clear_is_no_figure() -> None:
    """A case under a label gives it perhaps; one without a verdict does not say what."""
    run, findings = made()
    for change, words in (
        ({"labels": (Label.NOISY,), "floor": 0.2}, "it perhaps gives 1.22x"),
        ({"verdict": Verdict.UNSURE}, "not clear"),
    ):
        case = run.records[1].case.id
        (items,) = of_kind(part("roofline", (run, {**findings, case: replace(findings[case], **change)})), Items)
        assert words in items.items[-1].text


def test_both_ceilings_are_drawn() -> None:
    """A roof for each kind of products: memory's slope, the ridge, and the rate."""
    (chart,) = of_kind(part("roofline", made()), Scatter)
    assert chart.x.log and chart.y.log
    assert chart.joined == (
        "bf16 measured here", "fp8 measured here", "bf16 datasheet", "fp8 datasheet",
    )  # fmt: skip
    roof = [(point.x, point.y) for point in chart.points if point.series == "fp8 measured here"]
    assert roof[1] == (200.0, 2e14) and roof[2][1] == 2e14 and roof[0][1] == roof[0][0] * 1e12  # type: ignore[operator]
    phases = {(point.series, point.label): (point.x, point.y) for point in chart.points if point.label}
    assert {*phases} == {("bf16", "gemm"), ("fp8-rowwise", "gemm")}
    (table,) = of_kind(part("roofline", made()), Table)
    assert [field.text for field in table.rows[0]] == [
        "bf16", "gemm", "54.0 ms", "71.0 TFLOP/s", "185 GB/s", "383", "71%", "7%", "compute-bound",
    ]  # fmt: skip


def test_sources_and_spreads_are_told() -> None:
    """What bounds nothing is named; what nobody has checked is said to be unverified."""
    texts = [one.text for one in of_kind(part("roofline", made()), Text)]
    assert texts == [
        "Ceilings were measured here; these bound nothing, their runs differ too much: triad (30.0%).",
        "Peaks are those of the H200 SXM's datasheet (https://www.nvidia.com/en-us/data-center/h200/, 2026-08-01).",
    ]
    unsure = replace(CEILING, device="NVIDIA GB200", rates=())
    texts = [one.text for one in of_kind(part("roofline", made(unsure)), Text)]
    assert [text.partition(" (")[0] for text in texts] == [
        "Peaks are those of the GB200, one GPU's datasheet, unverified"
    ]


def test_runs_that_differ_are_no_bound() -> None:
    """The sentence says about what would be given, and which rate it is."""
    wide = tuple(replace(one, runs=(8e13, *one.runs[1:])) if one.precision == "bf16" else one for one in CEILING.rates)
    found = made(replace(CEILING, rates=wide))
    assert "at its own ceiling would give about 1.53x" in of_kind(part("roofline", found), Items)[0].items[-1].text
    assert of_kind(part("roofline", found), Text)[0].text == (
        "Ceilings were measured here; these bound nothing, their runs differ too much: product bf16 (20.0%) and triad "
        "(30.0%)."
    )


def test_ceilings_of_a_machine_that_was_not_left_alone_are_no_roofs() -> None:
    """Their runs lie more than half apart: of the memory that leaves nothing to say, and why is said."""
    wild = tuple(
        replace(one, runs=(one.runs[0] / 9, *one.runs[1:])) if one.limit in (Limit.COPY, Limit.TRIAD) else one
        for one in CEILING.rates
    )
    found = part("roofline", made(Ceiling(2e14, 4e12, wild)))
    (text,) = of_kind(found, Text)
    assert text.text.endswith("bound nothing, their runs differ too much: copy (88.9%) and triad (101.1%).")


def test_more_than_memory_gives_is_a_cache() -> None:
    """A tenth of the bandwidth: the optimizer moves eight times what memory could."""
    slow = tuple(replace(one, runs=tuple(run / 10 for run in one.runs)) if one.limit.value in ("copy", "triad") else one
                 for one in CEILING.rates)  # fmt: skip
    (table,) = of_kind(part("roofline", made(replace(CEILING, rates=slow))), Table)
    assert table.rows[1][-1].text == "in cache" and table.rows[1][6].text == "800%"


def test_without_ceilings_a_sentence_and_without_tapes_nothing() -> None:
    run, findings = made(None)
    assert "fp8bench doctor --ceilings" in " ".join(told(part("roofline", (run, findings)).elements))
    bare = replace(run, records=tuple(replace(one, tape=None) for one in run.records))
    assert built("roofline", (bare, findings)) is None
