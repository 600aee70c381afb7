"""The fastest of several candidates is timed again, by rounds that did not choose it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from fp8bench.analysis.findings import find
from fp8bench.analysis.verdicts import find_fastest_candidate, is_case_decided
from fp8bench.errors import WorkerFault
from fp8bench.measure.group import GroupMeasurement, MeasurementMethod
from fp8bench.measure.rounds import ChooseFastest
from fp8bench.model import Level, PlannedCase, Record, Verdict
from fp8bench.model.stopping import StoppingRule
from fp8bench.protocols import SilentObserver
from tests.counts import for_each
from tests.fakes import CPU, MS, FakeWorker, Fault, Script, by_mode, gemm_steps, group, lasting, planned

NAMES = ("fp32", "bf16", "fp16", "tf32")
# The first 24 slots take 4 ms, later ones 5 ms, after four untimed calls.
FADING = Script(lambda call: gemm_steps(4 * MS if call < 28 else 5 * MS)(call))
SCRIPTS = {"bf16": FADING, "fp16": lasting(6), "tf32": lasting(9)}


def measured(
    *cases: PlannedCase,
    scripts: Mapping[str, Script] = SCRIPTS,
    choose: ChooseFastest | None = find_fastest_candidate,
    capacity: int = 1000,
) -> tuple[dict[str, Record], FakeWorker]:
    worker = FakeWorker(scripts, capacity)
    method = MeasurementMethod(rule=StoppingRule(fixed=24), judge=is_case_decided, seed=0, choose_fastest=choose)
    chosen = cases or tuple(map(planned, NAMES))
    records = GroupMeasurement(group(*chosen), {"cpu": CPU}, worker, SilentObserver(), method).run()
    assert not worker.held
    return by_mode(records), worker


def test_the_fastest_case_is_judged_by_new_rounds() -> None:
    records, worker = measured()
    assert [mode for mode, record in records.items() if record.fresh] == ["bf16"]
    fresh, first = records["bf16"].fresh, records["bf16"].timing
    assert first is not None and fresh.candidates == 3 and fresh.control is not None
    assert [timing.num_rounds for timing in (fresh.timing, fresh.reference, fresh.control)] == [24] * 3
    for timing, nanoseconds in ((first, 4 * MS), (fresh.timing, 5 * MS)):
        assert all(set(slot.calls_ns) == {(nanoseconds,)} for slot in timing.slots)
    assert {entry[1] for entry in worker.slots()[-24 * 3 :]} == {"fp32", "fp32'", "bf16"}
    finding = {finding.case.mode: finding for finding in find(list(records.values()), {})}["bf16"]
    assert finding.ratio.point == pytest.approx(0.5) and finding.verdict is Verdict.FASTER
    assert finding.why == "the fastest of 3: its speed-up is from rounds after the choice"
    assert finding.best_seconds == pytest.approx(5e-3)  # the reference's over its speed-up


def test_a_fastest_case_without_new_rounds_has_a_note() -> None:
    records, worker = measured(choose=None)
    assert all(record.fresh is None for record in records.values()) and len(worker.slots("bf16")) == 2 + 24
    found = {finding.case.mode: finding for finding in find(list(records.values()), {})}
    assert found["bf16"].why == (
        "the fastest of 3 by these rounds, and not timed again: choosing it inflates its speed-up"
    )
    assert found["fp16"].why == found["tf32"].why == ""


SLOW = {mode: lasting(20) for mode in NAMES[1:]}


@for_each(
    ("cases", "scripts"),
    [
        (tuple(map(planned, NAMES[:3])), SCRIPTS),  # two candidates
        ((*map(planned, NAMES[:3]), planned("tf32", Level.EMULATED)), SCRIPTS),
        ((planned("fp32", Level.EMULATED), *map(planned, NAMES[1:])), SCRIPTS),
        (tuple(map(planned, NAMES)), SLOW),  # none is faster
    ],
)
def test_fewer_candidates_are_not_timed_again(cases: tuple[PlannedCase, ...], scripts: Mapping[str, Script]) -> None:
    records, worker = measured(*cases, scripts=scripts)
    assert all(record.fresh is None for record in records.values()) and len(worker.slots("fp32")) <= 2 + 24
    assert not any("fastest" in finding.why for finding in find(list(records.values()), {}))


def test_a_fault_in_these_rounds_fails_its_case() -> None:
    faulty = lasting(4, faults=[Fault("slot", WorkerFault("ValueError", "boom", "trace"), at=30)])
    records, _ = measured(scripts={**SCRIPTS, "bf16": faulty})
    assert records["bf16"].status.value == "failed" and records["bf16"].fresh is None
    assert all(record.fresh is None for record in records.values()) and records["fp16"].timing is not None
