"""What a step does, on the page: its counts by phase, and operators and kernels from traces."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import OperatorTime, Request
from fp8bench.report.elements import Text
from tests.materials import Made, built, of_kind, part, told
from tests.rooflines import made
from tests.runs import transformer
from tests.told_before import Told, as_before


def test_what_a_compiler_fused_is_said_and_without_tapes_nothing_is() -> None:
    run, findings = made()
    first, *others = run.records
    assert first.tape is not None
    fused = replace(first, tape=replace(first.tape, fused="torch.compile: uncompiled", unwritten=2))
    said = " ".join(told(part("tape", (replace(run, records=(fused, *others)), findings)).elements))
    assert "bf16: torch.compile: uncompiled" in said and "bf16: 2 tensors were written by no operator" in said
    bare = tuple(replace(record, tape=None) for record in run.records)
    assert built("tape", (replace(run, records=bare), findings)) is None


HOST = (
    OperatorTime("gemm", "aten::mm", 54.0, 0.040),
    OperatorTime("gemm", "aten::t", 54.0, 0.0005),
    OperatorTime("gemm", "", 12.5, 0.0195),
    OperatorTime("data_load", "aten::slice", 2.5, 0.0001),
    OperatorTime("unattributed", "", 0.0, 0.040),
)
KERNELS = (OperatorTime("gemm", "hopper_gemm", 54.0, 0.002, True), OperatorTime("gemm", "", 3.0, 0.003, True))


def traced(*operators: OperatorTime, made: Made | None = None) -> Made:
    run, findings = made or transformer()
    records = tuple(replace(record, trace="a/b.pt.trace.json.gz", operators=operators) for record in run.records)
    return replace(run, records=records, request=Request("x", trace="traces")), findings


@as_before
def test_operators() -> Told:
    run, findings = traced(*HOST)
    yield "phase by phase what takes most, small ones in the rest; emulations say so", part("operators", traced(*HOST))
    yield "kernels stand before what the host does", part("operators", traced(*HOST, *KERNELS))
    many_of_one = tuple(OperatorTime("gemm", f"op{number}", 1.0, 0.1) for number in range(12))
    yield "no more than a few of a phase", part("operators", traced(*many_of_one))
    lost = replace(run, request=Request("x")), findings
    yield "traces of a run whose request is lost lie somewhere", of_kind(part("operators", lost), Text)
    nothing = traced(OperatorTime("gemm", "mm", 0.0, 0.0))
    yield "where no operator took any time there is no section", built("operators", nothing)
