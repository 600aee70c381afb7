"""The main table: every case is a row, fields sort by numbers, and colour is for facts."""

from __future__ import annotations

import math
from dataclasses import replace

from fp8bench.model import Interval, Label, Measurement, Tape, Verdict
from fp8bench.report.elements import Field, Table, Text, Tone
from tests.counts import for_each
from tests.materials import Made, emulated_with_a_ratio, nothing, of_kind, part, skipped, strange
from tests.runs import gemm, judged, transformer


def table(*made: Made) -> Table:
    (found,) = of_kind(part("results", *made), Table)
    return found


def row(mode: str, *made: Made) -> dict[str, Field]:
    """The first row of a precision, by the titles of its columns."""
    found = table(*made)
    titles = [column.title for column in found.columns]
    rows = [dict(zip(titles, fields, strict=True)) for fields in found.rows]
    return next(one for one in rows if one["precision"].text == mode)


def test_every_case_is_a_row_of_the_main_table() -> None:
    assert table(gemm()).main and len(table(gemm()).rows) == 12


def test_a_number_of_a_suite_is_not_taken_for_the_steps_own() -> None:
    """Whatever the suite calls it."""
    run, findings = gemm()
    own = tuple(Measurement(name, "J", (7.0,)) for name in ("time", "energy", "flops_per_second", "tokens_per_second"))
    records = tuple(replace(one, measurements=(*one.measurements, *own)) for one in run.records)
    assert row("bf16", (replace(run, records=records), findings)) == row("bf16", gemm())


def test_an_emulation_has_no_speed() -> None:
    """Not even where a finding carries a ratio; its time and memory are called what they are."""
    run, findings = emulated_with_a_ratio()
    found = row("fp8", (run, findings))
    assert [found[title].text for title in ("verdict", "speed-up", "interval", "throughput")] == [
        "emulated", "-", "-", "-",
    ]  # fmt: skip
    assert {found[title].tone for title in ("verdict", "best", "median", "peak memory", "how")} == {Tone.DOUBT}
    assert found["best"].hint == found["peak memory"].hint == "the cost of emulation, not of the precision"
    alone = replace(run, records=(replace(run.records[2], is_reference=True),))
    assert row("fp8", (alone, findings))["verdict"].text == "reference, emulated"


def test_a_doubted_verdict_is_perhaps_one() -> None:
    found = row("bf16", judged((Verdict.SLOWER, 1.25, Label.NOISY)))
    assert found["verdict"].text == "perhaps slower" and found["verdict"].tone is Tone.DOUBT
    assert found["verdict"].hint.startswith("noisy: ") and found["labels"].text == "noisy"
    assert found["labels"].hint == found["verdict"].hint


@for_each(
    ("verdict", "tone", "word"),
    [
        (Verdict.FASTER, Tone.GOOD, "faster"),
        (Verdict.SLOWER, Tone.BAD, "slower"),
        (Verdict.SAME, Tone.PLAIN, "same"),
        (Verdict.UNSURE, Tone.DOUBT, "unsure"),
        (Verdict.NONE, Tone.DOUBT, "-"),
    ],
)
def test_colour_follows_the_verdict(verdict: Verdict, tone: Tone, word: str) -> None:
    found = row("bf16", judged((verdict, 0.5)))
    assert found["verdict"].tone is tone and found["verdict"].text == word
    assert found.get("speed-up", found["verdict"]).tone is tone


def test_what_was_not_measured_says_why() -> None:
    skipped = row("nvfp4", gemm())
    assert (skipped["verdict"].text, skipped["verdict"].tone) == ("refused", Tone.DOUBT)
    assert skipped["verdict"].hint == "fp4 needs torch 2.8 or later, this is 2.7.1"
    failed = next(fields for fields in table(gemm()).rows if fields[2].text == "FAILED")
    assert failed[2] == Field("FAILED", tone=Tone.BAD, hint="out of memory, even alone")
    assert {field.text for field in failed[3:9]} == {"-"}


def test_the_lead_explains_what_occurs() -> None:
    plain, doubted = (part("results", judged((Verdict.FASTER, 0.5, *labels))).lead for labels in ((), (Label.NOISY,)))
    best = "Best: a step that nothing disturbs, with a hot cache unless it says cache=."
    assert plain == f"Speed-up: above 1x is faster. {best}"
    assert doubted == f"{plain} 'Perhaps': a label casts doubt on it."
    assert "Emulated cases are right in numbers" in part("results", gemm()).lead


def test_columns_that_say_nothing_are_left_out() -> None:
    titles = {column.title for column in table(judged((Verdict.FASTER, 0.5))).columns}
    assert not titles & {"run", "device", "throughput", "error", "peak memory"}
    assert [column.title for column in table(skipped()).columns] == ["precision", "verdict", "how"]
    assert "peak memory" in {column.title for column in table(transformer()).columns}
    assert "run" in {column.title for column in table(gemm(), transformer()).columns}


def test_devices_have_a_column_where_there_are_several() -> None:
    run, findings = judged((Verdict.FASTER, 0.5))
    moved = replace(run.records[1], case=replace(run.records[1].case, device="cuda:0"))
    found = table((replace(run, records=(run.records[0], moved)), findings))
    assert [fields[1].text for fields in found.rows] == ["cpu", "cuda:0"] and found.columns[1].title == "device"


def test_the_parameters_of_a_group_that_is_alone_are_said_once() -> None:
    assert "setting" not in row("bf16", transformer())
    (text,) = of_kind(part("results", transformer()), Text)
    assert text.text.startswith("The same in every row: transformer layers=4 width=256 heads=4")


def test_what_is_no_number_sorts_by_nothing() -> None:
    found = table(strange())
    values = [field.value for fields in found.rows for field in fields if field.value is not None]
    assert values and not any(math.isnan(value) for value in values)


def test_a_ratio_without_an_interval_says_so() -> None:
    run, findings = judged((Verdict.FASTER, 0.5))
    case = run.records[1].case.id
    findings[case] = replace(findings[case], ratio=Interval(0.5, 0.0, math.inf, 0.99))
    assert row("bf16", (run, findings))["interval"].text == "[no interval]"


def test_without_cases_it_says_so() -> None:
    assert part("results", nothing()).elements == (Text("There are no cases.", Tone.DOUBT),)


def test_what_differs_between_runs_is_not_said_to_be_the_same() -> None:
    """A run of one shape beside a run of three: its shape is told in its row."""
    run, findings = gemm()
    alone = replace(run, id="alone", records=run.records[:4])
    found = part("results", (alone, findings), (run, findings))
    assert "m=256 n=256 k=256" in {field.text for field in of_kind(found, Table)[0].rows[0]}
    assert of_kind(found, Text)[0].text == "The same in every row: gemm product=forward operands=cast."


@for_each(
    ("labels", "tape", "told"),
    [
        ((Label.FEW_SAMPLES,), None, False),
        ((Label.FEW_SAMPLES,), Tape(), True),
        ((Label.WORK_MISMATCH,), Tape(), False),
        ((Label.NO_WORK, Label.NOISY), Tape(), False),
        ((Label.NOISY,), None, True),
    ],
)
def test_no_rate_is_told_of_work_that_nobody_saw(labels: tuple[Label, ...], tape: Tape | None, told: bool) -> None:
    """Of a quick look that counted nothing, and of work that is known to be other work than was declared."""
    run, findings = gemm()
    place = next(place for place, one in enumerate(run.records) if one.case.mode == "bf16")
    record = replace(run.records[place], tape=tape)
    found = replace(findings[record.case.id], labels=labels)
    records = (*run.records[:place], record, *run.records[place + 1 :])
    shown = row("bf16", (replace(run, records=records), {**findings, record.case.id: found}))["throughput"].text
    assert (shown != "-") == told
