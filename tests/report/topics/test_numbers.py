"""Errors by metric and precision, what the data are made of, and scales from data."""

from __future__ import annotations

import math
from dataclasses import replace

from fp8bench.model import Finding, LayerScale, Record, Run, TensorStatistics
from fp8bench.report.elements import Bars, Table, Text, Tone
from fp8bench.report.page.section import MOST_ROWS
from tests.counts import for_each
from tests.materials import Made, many, of_kind, part, with_errors
from tests.runs import error, gemm, measured, render_whole, transformer

TITLE = "data, before any scaling"
FOUND = (LayerScale("blocks.0.mlp.up", "input", 3.5, 128.0), LayerScale("blocks.0.mlp.up", "gradient", 7e-5, 8e8, 12))


def texts(table: Table) -> list[list[str]]:
    return [[field.text for field in row] for row in table.rows]


@for_each(
    ("mode", "words"),
    [
        ("fp8:scale=pow2:accumulator=short", "to nearest even. Here with scale=pow2, accumulator=short."),
        ("mxfp8", "elements to nearest even."),
        ("somebody's", ""),
        ("fp8:bits=9", ""),
        ("fp8-delayed:history=0", ""),
    ],
)
def test_a_mode_is_told_with_its_options_and_one_not_known_here_not_at_all(mode: str, words: str) -> None:
    """A run may come from elsewhere: another version's options, a module that was not imported."""
    run, findings = transformer()
    last = replace(run.records[-1], case=replace(run.records[-1].case, precision=mode))
    (table,) = of_kind(part("numbers", (replace(run, records=(*run.records[:-1], last)), findings)), Table)
    assert table.rows[-1][0].text == mode and table.rows[-1][0].hint.endswith(words)
    assert bool(table.rows[-1][0].hint) == bool(words)


def test_of_several_groups_the_smallest_and_the_largest() -> None:
    run, findings = gemm()
    first = replace(run.records[0], measurements=(error("product_error", 1e-7),))
    table = of_kind(part("numbers", (replace(run, records=(first, *run.records[1:])), findings)), Table)[0]
    assert texts(table)[0] == ["fp32", "native", "1.0e-07 to 2.3e-07"] and table.rows[0][2].value == 2.3e-7
    assert table.caption == "gemm: errors by precision, the smallest and the largest of 3 groups"


def test_an_error_that_is_no_number_is_said() -> None:
    """In the table it counts as the largest; no bar is promised for it."""
    found = part("numbers", with_errors(transformer(), 1e-3, math.nan, math.inf))
    assert not of_kind(found, Bars)
    (text,) = of_kind(found, Text)
    assert text == Text("transformer: product_error is no finite number in fp16 (nan) and fp8 (inf).", Tone.BAD)
    (table,) = of_kind(found, Table)
    assert [row[2].text for row in table.rows] == ["1.0e-03", "nan", "inf"] and table.rows[1][2].tone is Tone.BAD


def test_an_exact_result_has_no_bar_and_is_said() -> None:
    (bars,) = of_kind(part("numbers", with_errors(transformer(), 0.0, 1e-3, 1e-2)), Bars)
    assert bars.description.endswith("1 is exactly 0, which has no place on a logarithmic axis.")


def test_no_data_no_legend() -> None:
    assert not of_kind(part("numbers", transformer()), Text)


def test_infinite_errors_of_a_measured_run() -> None:
    found = part("numbers", measured())
    assert any("is no finite number in m=64 operands=cast fp8 (inf)" in one.text for one in of_kind(found, Text))


def block(run: Run, findings: dict[str, Finding], width: int = 100) -> list[str]:
    """The lines of the first panel's table with its title; none if there is none."""
    lines = render_whole(run, findings, width).splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith(TITLE)]
    return lines[starts[0] : lines.index("", starts[0])] if starts else []


def with_data(*statistics: TensorStatistics) -> tuple[Run, dict[str, Finding]]:
    """One group, whose reference knows its data."""
    run, findings = transformer()
    return replace(run, records=(replace(run.records[0], statistics=statistics), *run.records[1:])), findings


def test_a_format_that_holds_everything_has_no_column() -> None:
    """But it is named: that nothing is lost is worth knowing, too."""
    text = block(*with_data(TensorStatistics("x", "", 9, 1.0, (("bf16", 0.0, 0.0), ("fp16", 0.0, 0.0)))))
    assert text[0] == f"{TITLE}; all within the range of bf16, fp16"
    assert text[1].split() == ["data", "values", "amax"]


def test_statistics_that_name_no_format_show_what_they_have() -> None:
    text = block(*with_data(TensorStatistics("x", "", 9, 1.0)))
    assert text[0] == TITLE and text[2].split() == ["x", "9", "1.00"]


def test_a_unit_scaled_model_has_other_data() -> None:
    """What would be lost here is not lost there. Of a mode that this version does not know nothing is said."""
    run, findings = with_data(TensorStatistics("x", "", 9, 1.0))
    for mode, words in ("fp8-unit", "; fp8-unit has them near a deviation of 1 where it casts"), ("fp9-unit", ""):
        last = replace(run.records[-1], case=replace(run.records[-1].case, precision=mode))
        own = {last.case.id: replace(findings[run.records[-1].case.id])} if run.records[-1].case.id in findings else {}
        assert block(replace(run, records=(*run.records[:-1], last)), {**findings, **own})[0] == TITLE + words


def test_groups_share_one_table_of_the_worst() -> None:
    """Or five shapes would drown the reader: the largest amax of one group beside the largest share of another."""
    run, findings = gemm()
    text = block(run, findings)
    assert "each figure is the largest of 3 groups" in text[0]
    assert [line.split()[:2] for line in text[2:]] == [["operand", "input"], ["operand", "weight"]]
    assert "68.0" in text[2] and "- / 0.08%" in text[2] and "<0.01% / 19.7%" in text[2]


def test_only_groups_whose_data_are_known_are_counted() -> None:
    run, findings = gemm()
    first = run.records[0].case.setting

    def forget(record: Record) -> Record:
        return record if record.case.setting == first else replace(record, statistics=())

    text = block(replace(run, records=tuple(forget(record) for record in run.records)), findings)
    assert "groups" not in text[0] and "4.25" in text[2]


def test_without_statistics_there_is_neither_table_nor_legend() -> None:
    text = render_whole(*transformer())
    assert TITLE not in text and "amax" not in text
    assert "amax: the largest magnitude" in " ".join(render_whole(*gemm()).split())


@for_each("width", [40, 60, 80])
def test_narrow_tables_lose_no_figure(width: int) -> None:
    """Columns without room follow their row."""
    text = block(*gemm(), width)
    assert max(len(line) for line in text) <= width
    assert sum("<0.01% / 19.7%" in line for line in text) == 2 and sum("- / 0.08%" in line for line in text) == 2


def scaled(made: Made, *modes: str) -> Made:
    """These modes with scales, or every case."""
    run, findings = made
    records = [replace(one, scales=FOUND) if not modes or one.case.mode in modes else one for one in run.records]
    return replace(run, records=tuple(records)), findings


def test_a_table_has_an_end() -> None:
    """Which cases it leaves out is said."""
    found = part("scales", scaled(many(160)))
    (table,) = of_kind(found, Table)
    assert MOST_ROWS - 2 < len(table.rows) <= MOST_ROWS
    assert any("not shown, for want of room: m=" in text.text for text in of_kind(found, Text))
