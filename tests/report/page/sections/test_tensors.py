"""What formats and scalings leave of tensors, on the page."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import Status
from fp8bench.report.elements import Items, Table, Text, Tone
from tests.materials import Made, built, of_kind, part
from tests.report.tensors import left, tensors


def texts(table: Table) -> list[list[str]]:
    return [[field.text for field in row] for row in table.rows]


def with_record(made: Made, place: int, **changes: object) -> Made:
    run, findings = made
    records = list(run.records)
    records[place] = replace(records[place], **changes)  # type: ignore[arg-type]
    return replace(run, records=tuple(records)), findings


def test_a_table_for_each_tensor_scalings_down_and_formats_across() -> None:
    """What has no cell has a dash; a recipe stands in a row of its own; the best scaling of a format stands out."""
    *tables, _ = of_kind(part("tensors", tensors("gaussian", "outliers")), Table)
    assert [table.caption for table in tables] == ["numerics, gaussian: SQNR in dB", "numerics, outliers: SQNR in dB"]
    assert [column.title for column in tables[0].columns] == ["scaling", "fp16", "e4m3fn", "e2m1", "fp8"]
    assert texts(tables[0]) == [
        ["none", "70.0", "60.0", "-", "-"],
        ["row", "-", "50.0", "-", "-"],
        ["mx rceil", "-", "40.0", "30.0", "-"],
        ["its own", "-", "-", "-", "20.0"],
    ]
    tones = {field.text: field.tone for row in tables[0].rows for field in row if field.value is not None}
    assert [text for text, tone in tones.items() if tone is Tone.STRONG] == ["60.0"]
    assert tables[0].rows[0][1].hint == (
        "rows, p1 69.0 dB, blocks, p1 67.0 dB, underflow 0.08%, saturated 0%, slope 0.99925"
    )


def test_a_case_that_failed_is_a_dash_with_its_reason() -> None:
    made = with_record(tensors("gaussian"), 1, status=Status.FAILED, reason="out of memory", measurements=())
    table, _ = of_kind(part("tensors", made), Table)
    assert table.rows[0][2].text == "-" and table.rows[0][2].hint == "out of memory"


def test_numbers_that_became_infinite_are_said() -> None:
    """An SQNR that leaves them out says nothing of them."""
    (words,) = of_kind(part("tensors", with_record(tensors("gaussian"), 0, measurements=left(70.0, lost=0.5))), Text)
    assert words.tone is Tone.BAD
    assert words.text == "gaussian: numbers became infinite or NaN in fp16; its SQNR leaves them out."


def test_all_figures_are_for_who_asks() -> None:
    """Those that any case has, a row a case."""
    _, table = of_kind(part("tensors", tensors("gaussian")), Table)
    assert table.folded
    assert [column.title for column in table.columns] == [
        "tensor", "precision", "SQNR", "rows, p1", "blocks, p1", "relative error", "slope", "underflow", "saturated",
        "lost",
    ]  # fmt: skip
    assert [column.unit for column in table.columns[2:]] == ["dB", "dB", "dB", "", "", "%", "%", "%"]
    assert texts(table)[3] == [
        "gaussian", "e4m3fn mx rceil", "40.0", "39.0", "37.0", "1.0e-02", "0.99925", "0.08%", "0%", "0%",
    ]  # fmt: skip
    assert table.rows[3][1].hint == "custom:scaling=mx" and "sqnr_db" in table.columns[2].hint


def test_times_errors_and_memory_of_tensors_are_in_no_other_section() -> None:
    """They are costs of emulation: not even the table of all cases has them."""
    made = tensors("gaussian", "outliers")
    assert [
        name for name in ("results", "speedup", "phases", "memory", "samples", "numbers") if built(name, made)
    ] == []


def test_the_verdict_is_about_numbers() -> None:
    """Which precision of a width keeps most, and nothing of speed."""
    found = part("verdict", tensors("gaussian", "outliers"))
    (items,) = of_kind(found, Items)
    assert items.items[0].text == (
        "with 8 bits e4m3fn none has the highest SQNR in all 2 tensors of numerics: 60.0 to 61.0 dB"
    )
    assert found.lead == "" and not any("faster" in item.text or "alone was timed" in item.text for item in items.items)
