"""Where a lower precision gains, phase against phase: every number by hand."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import Finding, Level, Record, Status, Verdict
from fp8bench.report.elements import Table, Text, Waterfall
from tests.materials import Made, built, many, of_kind, part
from tests.runs import EMULATED, NATIVE, case, run_of, transformer
from tests.told_before import Told, as_before

BEFORE = (("data_load", 1e-6), ("gemm", 8e-3), ("attention", 1e-3), ("elementwise", 1e-3), ("unattributed", 1e-5))
AFTER = (("data_load", 2e-6), ("cast", 1e-3), ("gemm", 2e-3), ("attention", 1.5e-3), ("elementwise", 5e-4))


def step(reference: Level = Level.NATIVE, low: Level = Level.NATIVE, **changes: object) -> Made:
    """10 ms in fp32 and 5 ms in bf16: gemm is four times as fast, attention slower, and casts come on top."""
    fp32, bf16 = (case("model", name, {"size": 1}) for name in ("fp32", "bf16"))
    records = [
        Record(fp32, NATIVE if reference is Level.NATIVE else EMULATED, Status.OK, is_reference=True),
        Record(bf16, NATIVE if low is Level.NATIVE else EMULATED, Status.OK),
    ]
    findings = {
        fp32.id: Finding(fp32, Verdict.REFERENCE, 1e-2, phases=BEFORE, below_floor=("data_load",)),
        bf16.id: replace(Finding(bf16, Verdict.FASTER, 5e-3, phases=AFTER), **changes),  # type: ignore[arg-type]
    }
    return run_of(records), findings


@as_before
def test_gains() -> Told:
    yield "where it gains and where not", part("gains", step())
    longer = tuple((name, 2 * seconds) for name, seconds in BEFORE)
    yield "a step that only got longer", of_kind(part("gains", step(best_seconds=2e-2, phases=longer)), Waterfall)
    yield "a doubted case is grey with its labels; its plain ratio names the paired one", part("gains", transformer())
    yield "an emulation has no speed", built("gains", step(Level.EMULATED))
    yield "neither has what is held against one", built("gains", step(low=Level.EMULATED))
    elements = part("gains", many(20))
    yield "of many cases some are drawn", [chart.title for chart in of_kind(elements, Waterfall)]
    yield (
        "some have tables, and the others are counted",
        [*of_kind(elements, Table)[-1:], *of_kind(elements, Text)[-1:]],
    )
