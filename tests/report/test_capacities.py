"""The largest batches in the terminal's table, the report and the rows; and what must not be said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8bench.model import Capacity, Record, Status
from fp8bench.report.data.tidy import rows
from fp8bench.report.elements import Table, Text, Tone
from fp8bench.report.panels import panels_of
from fp8bench.report.terminal.figures import capacity
from fp8bench.report.terminal.run import render
from tests.materials import Made, built, of_kind, part, told
from tests.runs import EMULATED, NATIVE, case, gemm, run_of

GIB = 1 << 30


def fits(
    batch: int | None, why: str = "tensors need 1.63 MiB more", limit: int | None = GIB, axis: str = "batch"
) -> Capacity:
    """A search that came to that."""
    beyond = None if batch is None else batch + 1
    return Capacity(axis, limit, batch, 1, 192 * (batch or 0), GIB - 7 if batch else None, beyond, why, 5)


def made(*found: tuple[str, Capacity | None], **sizes: int) -> Made:
    """One group: the first is the reference; fp8 is emulated."""
    records = [
        Record(
            case("transformer", mode, {"size": "nano", "batch": 2, **sizes}), EMULATED if mode == "fp8" else NATIVE,
            Status.OK, is_reference=number == 0, capacity=one,
        )
        for number, (mode, one) in enumerate(found)
    ]  # fmt: skip
    return run_of(records), {}


USUAL = made(("fp32", fits(376)), ("bf16", fits(606, "tensors need 963 KiB more")), ("fp8", fits(288)))


def lines(one: Made, width: int = 100) -> list[str]:
    return told([element for panel in panels_of(*one) for element in capacity(panel)], width)


def test_the_table() -> None:
    assert lines(USUAL) == [
        "largest batch that fits into 1.00 GiB",
        "  case  largest  vs fp32    tokens a step  peak memory  does not fit",
        "  fp32      376  reference         72.2 k     1.00 GiB  377: tensors need 1.63 MiB more",
        "  bf16      606  1.61x              116 k     1.00 GiB  607: tensors need 963 KiB more",
        "  fp8       288  emulated          55.3 k     1.00 GiB  289: tensors need 1.63 MiB more",
        "  bf16 fits 1.61x of fp32's batch into 1.00 GiB.",
        "  fp8 is emulated, with values of a small format kept in wider ones: what fits here says nothing",
        "    about a device that has the format.",
    ]


@pytest.mark.parametrize("width", [40, 60, 200])
def test_it_stands_in_the_text_and_keeps_its_width(width: int) -> None:
    text = render(*USUAL, width=width)
    assert "largest batch that fits" in text and all(len(line) <= width for line in text.splitlines())


def test_who_did_not_ask_sees_nothing() -> None:
    assert lines(gemm()) == [] and built("memory", gemm()) is None
    assert "largest batch" not in render(*gemm())
    assert not [row for row in rows(*gemm()) if str(row["metric"]).startswith("max_batch")]


def test_no_batch_at_all_and_no_answer_are_told_apart() -> None:
    """A zero is known; what is not known is a dash with the reason. Nothing is compared with either."""
    shown = lines(
        made(("fp32", fits(0, "tensors need 3.00 MiB more")), ("bf16", fits(None, "a batch of 4 ended it: no")))
    )
    assert shown[2:] == [
        "  fp32     none  reference              -            -  1: tensors need 3.00 MiB more",
        "  bf16        -  -                      -            -  a batch of 4 ended it: no",
    ]


def test_an_axis_that_ends_first_says_so() -> None:
    whole = replace(fits(4096, ""), beyond=None)
    assert "none: the suite takes no more" in lines(made(("fp32", whole)))[2]


def test_the_device_s_own_end_and_an_axis_of_another_name() -> None:
    shown = lines(made(("fp32", fits(64, limit=None, axis="tokens")), ("bf16", fits(96, limit=None, axis="tokens"))))
    assert shown[0] == "largest batch (tokens) that fits into the device's memory"
    assert shown[-1] == "  bf16 fits 1.50x of fp32's tokens into the device's memory."


def test_an_emulated_reference_compares_with_nothing() -> None:
    shown = lines(made(("fp8", fits(10)), ("bf16", fits(20))))
    assert not [line for line in shown if "2.00x" in line]


def test_groups_are_told_apart_by_all_but_their_batch() -> None:
    first, second = (made(("fp32", fits(n)), ("bf16", fits(2 * n)), sequence=n) for n in (64, 128))
    other = [replace(one, capacity=None) for one in made(("fp32", None), ("bf16", None), sequence=64)[0].records]
    other = [
        replace(one, case=replace(one.case, params=tuple((k, 8 if k == "batch" else v) for k, v in one.case.params)))
        for one in other
    ]
    run = run_of([*first[0].records, *other, *second[0].records])
    shown = lines((run, {}))
    assert [line for line in shown if line.startswith("sequence")] == ["sequence=64", "sequence=128"]
    assert "  bf16 fits 2.00x of fp32's batch into 1.00 GiB at sequence=128." in shown
    assert "batch=" not in "".join(shown)


def test_the_section() -> None:
    found = part("memory", USUAL)
    (table,) = of_kind(found, Table)
    assert table.caption == "transformer: largest batch that fits into 1.00 GiB"
    assert [[field.value for field in row[1:5]] for row in table.rows] == [
        [376, None, 72192, GIB - 7], [606, pytest.approx(606 / 376), 116352, GIB - 7], [288, None, 55296, GIB - 7],
    ]  # fmt: skip
    assert [row[0].tone for row in table.rows] == [Tone.PLAIN, Tone.PLAIN, Tone.DOUBT]
    assert next(text.text for text in of_kind(found, Text)) == "bf16 fits 1.61x of fp32's batch into 1.00 GiB."


def test_two_runs_have_tables_of_different_names() -> None:
    tables = of_kind(part("memory", USUAL, USUAL), Table)
    assert len({table.name for table in tables}) == 2


def test_the_rows() -> None:
    """Numbers as they are; the ratio of a native case alone; the reason with the largest."""
    found = [row for row in rows(*USUAL) if str(row["metric"]).startswith("max_batch")]
    largest = {row["mode"]: row for row in found if row["metric"] == "max_batch"}
    assert {mode: row["median_in_unit"] for mode, row in largest.items()} == {"fp32": 376, "bf16": 606, "fp8": 288}
    assert {mode: row["ratio_to_reference"] for mode, row in largest.items()} == {
        "fp32": None, "bf16": pytest.approx(606 / 376), "fp8": None,
    }  # fmt: skip
    assert largest["bf16"]["why"] == "607: tensors need 963 KiB more"
    others = {row["metric"]: row["median_in_unit"] for row in found if row["mode"] == "bf16"}
    assert others["max_batch_tokens"] == 116352 and others["max_batch_limit"] == GIB
    assert others["max_batch_memory"] == GIB - 7


def test_the_rows_of_what_is_unknown_are_empty() -> None:
    found = [row for row in rows(*made(("fp32", fits(None, "it crashed", None)))) if "max_batch" in str(row["metric"])]
    assert [(row["metric"], row["median_in_unit"], row["why"]) for row in found] == [("max_batch", None, "it crashed")]
