"""Errors by metric and precision, and what the data are made of."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fp8bench.report.elements import Axis, Bars, Table, Text, Tone
from fp8bench.report.words import legend
from tests.materials import of_kind, part, with_errors
from tests.runs import error, gemm, measured, transformer


def texts(table: Table) -> list[list[str]]:
    return [[field.text for field in row] for row in table.rows]


def test_the_main_error_as_bars_on_a_logarithmic_axis() -> None:
    (bars,) = of_kind(part("numbers", transformer()), Bars)
    assert bars.axis == Axis("gradient_error", log=True) and bars.title == "transformer: gradient_error"
    assert [(one.label, one.value) for one in bars.groups[0][1]] == [
        ("bf16", 3.1e-3),
        ("fp16", 4.2e-4),
        ("fp8", 4.7e-2),
    ]
    assert bars.description == "Smallest in fp16 (4.2e-04), largest in fp8 (4.7e-02)."
    assert bars.groups[0][1][2].hint == "fp8: 4.7e-02, emulated"


def test_every_error_by_precision() -> None:
    """Memory is no error, and stands elsewhere."""
    (table,) = of_kind(part("numbers", transformer()), Table)
    assert [column.title for column in table.columns] == ["precision", "how", "loss_error", "gradient_error"]
    assert texts(table) == [
        ["bf16", "native", "1.2e-05", "3.1e-03"],
        ["fp16", "native", "2.2e-06", "4.2e-04"],
        ["fp8", "emulated", "8.8e-04", "4.7e-02"],
    ]
    assert table.rows[2][1].hint.startswith("no hardware") and "E4M3" in table.rows[2][0].hint


@pytest.mark.parametrize(
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


def test_the_data_with_a_column_for_each_format_they_do_not_fit() -> None:
    """The same columns and figures as in the terminal, and the legend before them."""
    found = part("numbers", gemm())
    table = of_kind(found, Table)[-1]
    assert [column.title for column in table.columns] == ["data", "values", "amax", "e4m3", "e2m1"]
    assert texts(table) == [
        ["operand input", "262 k", "68.0", "- / 0.08%", "<0.01% / 19.7%"],
        ["operand weight", "4.19 M", "4.25", "- / 0.08%", "<0.01% / 19.7%"],
    ]
    assert table.caption == (
        "gemm: data, before any scaling; each figure is the largest of 3 groups; all within the range of bf16, fp16"
    )
    shown = [one.text.lower() for one in of_kind(found, Text)]
    assert shown[-2:] == ["what the data are made of", f"{legend.DATA.lower()}."]


def test_no_data_no_legend() -> None:
    assert not of_kind(part("numbers", transformer()), Text)


def test_infinite_errors_of_a_measured_run() -> None:
    found = part("numbers", measured())
    assert any("is no finite number in m=64 operands=cast fp8 (inf)" in one.text for one in of_kind(found, Text))
