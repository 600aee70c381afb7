"""The suite of collectives: what is planned of it, and real ranks in every precision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench import pipeline
from fp8bench.analysis.findings import findings
from fp8bench.analysis.metrics import iterate_case_metrics
from fp8bench.model import Level, Request, Status
from fp8bench.plan.make import make_plan
from fp8bench.protocols import SilentObserver
from fp8bench.registry import workloads
from tests.facts import CPU, H200


def test_one_process_is_no_collective() -> None:
    cases = [planned for group in make_plan(Request("collective"), (CPU,)) for planned in group.cases]
    refusal = "needs at least 2 ranks, but there is only 1: add --ranks 2"
    assert cases and all(refusal in planned.skip for planned in cases)
    assert "collective" not in workloads.names()


def test_what_is_only_sent_is_not_added_up() -> None:
    plan = make_plan(Request("collective", ranks=4), (replace(CPU, ranks=4),))
    assert len(plan.groups) == 2 * 3 * 4 + 3
    assert {planned.case.ranks for group in plan for planned in group.cases} == {4}
    assert all(planned.case.id.partition("/")[0].endswith("@cpu*4") for group in plan for planned in group.cases)
    assert any("functional test" in note for note in plan.notes)
    levels = {planned.case.precision: planned.support.level for planned in plan.groups[0].cases}
    assert levels == dict.fromkeys(("fp32", "bf16", "fp16"), Level.NATIVE) | {"fp8": Level.EMULATED}
    gpu = make_plan(Request("collective", ranks=2), (replace(H200, ranks=2),))
    assert {one.support.level for group in gpu for one in group.cases} == {Level.NATIVE}


def test_parts_must_be_equal() -> None:
    request = Request("collective", axes=(("elements", ("1000",)),), ranks=3)
    (first, *_) = make_plan(request, (replace(CPU, ranks=3),)).groups
    assert "choose a multiple of 96" in first.cases[0].skip


@pytest.mark.slow
def test_real_ranks_send_what_they_say(tmp_path: Path) -> None:
    axes = (("elements", ("4096",)), ("fp8", ("fp8_ring",)), ("scaling", ("ms_amp",)))
    request = Request("collective", axes=axes, quick=True, ranks=2)
    run = pipeline.execute(request, tmp_path, SilentObserver(), "")
    found = findings(run)
    assert len(run.records) == 5 * 4
    assert not [(record.case.id, record.reason) for record in run.records if record.status is not Status.OK]
    for record in run.records:
        told = {str(one.name): one.value for one in iterate_case_metrics(record, found.get(record.case.id))}
        assert {"algbw", "busbw", "effective_busbw", "rank_skew", "communication_time", "sqnr_db"} <= told.keys()
        assert record.transfer is not None and record.transfer.logical == 4096 * 4
        assert record.transfer.counted is (record.case.precision == "fp8")
        assert record.timing is not None and all(len(slot.ranks) == 2 for slot in record.timing.slots)
        assert record.overlap is not None and record.memory is not None and len(record.memory.ranks) == 2
        rings = record.case.precision == "fp8" and record.case.param("collective") in ("all_reduce", "reduce_scatter")
        assert bool(record.overlap.why) is rings and bool(record.overlap.both) is not rings
    sent = {(str(one.case.param("collective")), one.case.precision): one.transfer for one in run.records}
    wire = {key: transfer.wire for key, transfer in sent.items() if transfer is not None}
    # With 2 ranks a ring sends half the vector twice; for FP8 the amax too.
    assert wire["all_reduce", "fp32"] == 4 * 4096 and wire["all_reduce", "bf16"] == 2 * 4096
    assert wire["all_reduce", "fp8"] == 4096 + 4
    assert wire["all_gather", "fp8"] == 2048 + 4 and wire["all_to_all", "fp32"] == 4 * 2048
