"""Operators and kernels as a table, phase by phase."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import OperatorTime, Request
from fp8bench.report.elements import Table, Text
from fp8bench.report.page.section import MOST_ROWS
from fp8bench.report.topics.tape import MOST
from tests.materials import Made, built, many, of_kind, part
from tests.runs import transformer

HOST = (
    OperatorTime("gemm", "aten::mm", 54.0, 0.040),
    OperatorTime("gemm", "aten::t", 54.0, 0.0005),
    OperatorTime("gemm", "", 12.5, 0.0195),
    OperatorTime("data_load", "aten::slice", 2.5, 0.0001),
    OperatorTime("unattributed", "", 0.0, 0.040),
)
KERNELS = (OperatorTime("gemm", "hopper_gemm", 54.0, 0.002, True), OperatorTime("gemm", "", 3.0, 0.003, True))


def traced(*operators: OperatorTime, made: Made | None = None) -> Made:
    """Every case with these operators."""
    run, findings = made or transformer()
    records = tuple(replace(one, trace="a/b.pt.trace.json.gz", operators=operators) for one in run.records)
    return replace(run, records=records, request=Request("x", trace="traces")), findings


def rows(made: Made) -> list[tuple[str, ...]]:
    (table,) = of_kind(part("operators", made), Table)
    return [tuple(field.text for field in row) for row in table.rows]


def test_phase_by_phase_what_takes_most() -> None:
    """Small ones go into the rest of their phase, but each phase has its first."""
    assert [row for row in rows(traced(*HOST)) if row[0] == "bf16"] == [
        ("bf16", "data load", "aten::slice", "2.50", "100 us", "0.1%"),
        ("bf16", "gemm", "aten::mm", "54", "40.0 ms", "40.0%"),
        ("bf16", "gemm", "all else", "66.5", "20.0 ms", "20.0%"),
        ("bf16", "unattributed", "all else", "0", "40.0 ms", "40.0%"),
    ]


def test_kernels_stand_before_what_the_host_does() -> None:
    """As shares of the host's time of the step, like everything."""
    (table,) = of_kind(part("operators", traced(*HOST, *KERNELS)), Table)
    found = [tuple(field.text for field in row) for row in table.rows if row[0].text == "bf16"]
    assert [row[2] for row in found if row[1] == "gemm"] == [
        "hopper_gemm", "all else on the device", "aten::mm", "all else",
    ]  # fmt: skip
    assert table.columns[2].title == "operator or kernel" and "host" in table.columns[5].hint
    assert found[1] == ("bf16", "gemm", "hopper_gemm", "54", "2.00 ms", "2.0%")


def test_emulated_cases_say_so() -> None:
    assert {row[0] for row in rows(traced(*HOST))} == {"bf16", "fp16", "fp8 (emulated)"}


def test_no_more_than_a_few_of_a_phase() -> None:
    operators = tuple(OperatorTime("gemm", f"op{number}", 1.0, 0.1) for number in range(12))
    found = [row for row in rows(traced(*operators)) if row[0] == "bf16"]
    assert [row[2] for row in found] == [*(f"op{number}" for number in range(MOST)), "all else"]


def test_a_table_has_an_end() -> None:
    """Which cases it leaves out is said."""
    found = part("operators", traced(*HOST, made=many(60)))
    (table,) = of_kind(found, Table)
    assert MOST_ROWS - 4 < len(table.rows) <= MOST_ROWS
    assert any("not shown, for want of room: m=" in text.text for text in of_kind(found, Text))


def test_where_the_traces_lie() -> None:
    """And what opens them; a run whose request is lost has them somewhere."""
    run, findings = traced(*HOST)
    *_, last = of_kind(part("operators", (run, findings)), Text)
    assert (
        last.text.startswith("The traces lie in traces, a folder a case. ui.perfetto.dev") and "internet" in last.text
    )
    *_, last = of_kind(part("operators", (replace(run, request=Request("x")), findings)), Text)
    assert last.text.startswith("ui.perfetto.dev")


def test_where_no_operator_took_any_time_there_is_no_section() -> None:
    assert built("operators", traced(OperatorTime("gemm", "mm", 0.0, 0.0))) is None
