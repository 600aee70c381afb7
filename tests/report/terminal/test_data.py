"""What the data of a run are made of, as a table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8bench.model import Finding, Record, Run, TensorStatistics
from fp8bench.report.terminal.run import render
from tests.runs import gemm, transformer

TITLE = "data, before any scaling"


def block(run: Run, findings: dict[str, Finding], width: int = 100) -> list[str]:
    """The lines of the first panel's table with its title; none if there is none."""
    lines = render(run, findings, width).splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith(TITLE)]
    return lines[starts[0] : lines.index("", starts[0])] if starts else []


def with_data(*statistics: TensorStatistics) -> tuple[Run, dict[str, Finding]]:
    """One group, whose reference knows its data."""
    run, findings = transformer()
    return replace(run, records=(replace(run.records[0], statistics=statistics), *run.records[1:])), findings


def test_a_row_for_each_kind_and_role() -> None:
    """Values that have no role in a product go by their kind alone, as do those whose role says no more."""
    text = block(
        *with_data(
            TensorStatistics("attn", "input", 131072, 4.5678, (("fp16", 0.0, 2e-7), ("e4m3", 0.0123, 0.0))),
            TensorStatistics("attn", "gradient", 4096, 1.5e-7, (("fp16", 0.0, 0.5), ("e4m3", 0.0, 1.0))),
            TensorStatistics("batch", "", 12, 255.0, (("fp16", 0.0, 0.0), ("e4m3", 0.0, 0.0))),
            TensorStatistics("gradient", "gradient", 7, 1.0, (("fp16", 0.0, 0.0), ("e4m3", 0.0, 0.0))),
        )
    )
    assert [line.split() for line in text] == [
        TITLE.split(),
        ["data", "values", "amax", "fp16", "e4m3"],
        ["attn", "input", "131", "k", "4.57", "-", "/", "<0.01%", "1.2%", "/", "-"],
        ["attn", "gradient", "4096", "1.50e-07", "-", "/", "50.0%", "-", "/", "100.0%"],
        ["batch", "12", "255", "-", "-"],
        ["gradient", "7", "1.00", "-", "-"],
    ]


def test_a_format_that_holds_everything_has_no_column() -> None:
    """But it is named: that nothing is lost is worth knowing, too."""
    text = block(*with_data(TensorStatistics("x", "", 9, 1.0, (("bf16", 0.0, 0.0), ("fp16", 0.0, 0.0)))))
    assert text[0] == f"{TITLE}; all within the range of bf16, fp16"
    assert text[1].split() == ["data", "values", "amax"]


def test_statistics_that_name_no_format_show_what_they_have() -> None:
    text = block(*with_data(TensorStatistics("x", "", 9, 1.0)))
    assert text[0] == TITLE and text[2].split() == ["x", "9", "1.00"]


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
    text = render(*transformer())
    assert TITLE not in text and "amax" not in text
    assert "amax: the largest magnitude" in " ".join(render(*gemm()).split())


@pytest.mark.parametrize("width", [40, 60, 80])
def test_narrow_tables_lose_no_figure(width: int) -> None:
    """Columns without room follow their row."""
    text = block(*gemm(), width)
    assert max(len(line) for line in text) <= width
    assert sum("<0.01% / 19.7%" in line for line in text) == 2 and sum("- / 0.08%" in line for line in text) == 2
