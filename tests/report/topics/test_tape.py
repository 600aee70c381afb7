"""What a step does, on the page: the counts of every case with a tape, by phase."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.report.elements import Table
from tests.materials import built, of_kind, part, told
from tests.rooflines import made


def test_counts_of_a_step_and_its_phases() -> None:
    """Also of an emulated case: what it does is known, what a device would make of it is not."""
    found = part("tape", made())
    (table,) = of_kind(found, Table)
    rows = [tuple(field.text for field in row) for row in table.rows]
    bf16 = [row for row in rows if row[0] == "bf16"]
    assert bf16[0][1:7] == ("step", "3.83 T", "3.10 G", "28.9 GiB", "124", "20110")
    assert {row[1]: row[6] for row in bf16[1:]} == {"gemm": "100", "optimizer step": "10", "elementwise": "20000"}
    fp8 = next(row for row in rows if row[0].startswith("fp8-rowwise"))
    assert fp8[8:] == ("100.0%", "0.0%", "0.0%") and any("(emulated)" in row[0] for row in rows)
    assert "20000" in " ".join(told(found.elements))


def test_what_a_compiler_fused_is_said_and_without_tapes_nothing_is() -> None:
    run, findings = made()
    first, *others = run.records
    assert first.tape is not None
    fused = replace(first, tape=replace(first.tape, fused="torch.compile: uncompiled", unwritten=2))
    said = " ".join(told(part("tape", (replace(run, records=(fused, *others)), findings)).elements))
    assert "bf16: torch.compile: uncompiled" in said and "bf16: 2 tensors were written by no operator" in said
    bare = tuple(replace(one, tape=None) for one in run.records)
    assert built("tape", (replace(run, records=bare), findings)) is None
