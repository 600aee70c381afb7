"""What a step does, on the page: the counts of every case with a tape, by phase."""

from __future__ import annotations

from dataclasses import replace

from tests.materials import built, part, told
from tests.rooflines import made


def test_what_a_compiler_fused_is_said_and_without_tapes_nothing_is() -> None:
    run, findings = made()
    first, *others = run.records
    assert first.tape is not None
    fused = replace(first, tape=replace(first.tape, fused="torch.compile: uncompiled", unwritten=2))
    said = " ".join(told(part("tape", (replace(run, records=(fused, *others)), findings)).elements))
    assert "bf16: torch.compile: uncompiled" in said and "bf16: 2 tensors were written by no operator" in said
    bare = tuple(replace(record, tape=None) for record in run.records)
    assert built("tape", (replace(run, records=bare), findings)) is None
