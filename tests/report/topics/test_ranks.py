"""Times and traffic of several ranks, as tables, sentences and a picture, by values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8bench.analysis.findings import findings
from fp8bench.analysis.ranks import find_pareto_points
from fp8bench.model import Case, MemoryUse, Record, Run, Segments, SlotSample, Status, Timing
from fp8bench.model.ranks import FailedRank, Overlap, RankCalls, RankMemory, RankScaling, Transfer
from fp8bench.report.data.run import tidy_rows
from fp8bench.report.panels import Panel, group_into_panels
from fp8bench.report.topics.ranks import make_rank_elements
from tests.materials import part
from tests.runs import EMULATED, NATIVE, error, run_of
from tests.told_before import Told, as_before

MS = 1_000_000
RING = "a rank has to wait"
# Bytes that a rank sends, and decibels.
WAYS = {"fp8_gather": (3000.0, 31.5), "fp8_twoshot": (1500.0, 28.4), "fp8_ring": (1500.0, 26.0)}


def record(precision: str, way: str, wire: float, sqnr: float, **more: object) -> Record:
    params = (("collective", "all_reduce"), ("fp8", way), ("scaling", "pre"))
    took = (RankCalls(0, (10 * MS,), (5 * MS,)), RankCalls(1, (8 * MS,), (3 * MS,)))
    slots = tuple(SlotSample(number, ((10 * MS,),), 0.01, 0.01, ranks=took) for number in range(6))
    counted = precision == "fp8"
    return Record(
        Case("collective", params, precision, "cpu", ranks=2),
        EMULATED if counted else NATIVE,
        Status.OK,
        is_reference=precision == "fp32",
        timing=Timing(Segments(("communication",), (0,)), slots),
        transfer=Transfer(4000.0, 2000.0, wire, 1.0, counted),
        measurements=(error("sqnr_db", sqnr),),
        memory=MemoryUse(400, ranks=(RankMemory(0, 300), RankMemory(1, 400))),
        **more,
    )


def made() -> Run:
    records = []
    for way, (wire, sqnr) in WAYS.items():
        refused = (
            Overlap(why=RING)
            if way == "fp8_ring"
            else Overlap((4.0,) * 6, (2.0,) * 6, (5.0, 4.9, 5.1, 5.0, 5.0, 5.0), (6.0,) * 6)
        )
        records += [record("fp32", way, 6000.0, 151.0), record("bf16", way, 3000.0, 50.0)]
        records.append(record("fp8", way, wire, sqnr, overlap=refused))
    return run_of(records)


def test_the_cheapest_ways_are_those_that_nothing_beats() -> None:
    assert find_pareto_points([(1.0, 28.0), (1.0, 26.0), (2.0, 27.0), (3.0, 50.0), (1.0, 28.0)]) == (0, 3, 4)
    assert find_pareto_points([]) == ()
    assert find_pareto_points([(12813.3, 28.5), (12805.3, 26.7)]) == (0,)  # a ring sends one scale less


@as_before
def test_ranks() -> Told:
    (panel,) = group_into_panels(made(), findings(made()))
    yield "a column a rank; half of 2 s of communication hides in 5 s beside 4 s of products", make_rank_elements(panel)
    off = Overlap((4.0,) * 6, (2.0,) * 6, (5.0,) * 6, (9.0,) * 6)
    wide = Overlap((4.0,) * 6, (2.0,) * 6, (3.9, 4.5, 5.0, 5.0, 5.5, 6.0), (6.0,) * 6)
    both = [record("fp32", "fp8_ring", 6.0, 1.0, overlap=off), record("bf16", "fp8_ring", 6.0, 1.0, overlap=wide)]
    yield "a word stands where nothing is told, and what it means is said once", make_rank_elements(*of_run(*both))
    own = record("fp32", "", 1.0, 1.0)
    stages = replace(own, case=replace(own.case, workload="parallel", params=(("microbatches", 4),)), transfer=None)
    yield "of 18 ms of a pipeline's two ranks 8 are waiting and sending", make_rank_elements(*of_run(stages))


def of_run(*records: Record) -> tuple[Panel, ...]:
    run = run_of(list(records))
    return group_into_panels(run, findings(run))


def test_efficiencies_stand_with_what_rounds_leave_of_them() -> None:
    apart = RankScaling((10.0,) * 6, (5.0,) * 6, (3.0, 4.0, 5.0, 6.0, 7.0, 8.0))
    known = RankScaling((10.0,) * 6, (5.0,) * 6, (5.0, 5.5, 6.0, 6.0, 6.5, 7.0))
    run = run_of(
        [record("fp32", "fp8_ring", 6.0, 1.0, scaling=known), record("bf16", "fp8_ring", 6.0, 1.0, scaling=apart)]
    )
    elements = part("ranks", (run, findings(run))).elements
    (table,) = (element for element in elements if getattr(element, "name", "").startswith("scaling"))
    last_fields = [[field.text for field in row[-2:]] for row in table.rows]
    assert last_fields == [["83.3% (71.4% to 100.0%)"] * 2, ["wide", "wide"]]
    assert "Efficiency is unknown where the table has a word: wide: " in str(elements)
    efficiencies = [row for row in tidy_rows(run, findings(run)) if row["metric"] == "strong_scaling"]
    bounds = [
        (row["median_in_unit"], row["low_in_unit"], row["high_in_unit"], bool(row["why"])) for row in efficiencies
    ]
    assert bounds == [(pytest.approx(250 / 3), pytest.approx(500 / 7), 100.0, False), (None, None, None, True)]


def test_rows_of_a_rank_that_failed() -> None:
    lost = Record(
        Case("collective", (("collective", "broadcast"),), "bf16", "cpu", ranks=2),
        NATIVE,
        Status.FAILED,
        reason="rank 1 of 2 failed",
        failed_rank=FailedRank(1, 2, "slot", "gemm", 21, 0.5),
    )
    run = run_of([record("fp32", "fp8_ring", 6000.0, 151.0), lost])
    tidy = tidy_rows(run, findings(run))
    failed = [row for row in tidy if row["status"] == "failed"]
    assert failed and {(row["failed_rank"], row["failed_phase"]) for row in failed} == {(1, "gemm")}
