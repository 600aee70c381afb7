"""What is said of a run as a whole, and of one whose header is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8bench.model import Environment, Plan, Resumption, Run, Scalar
from fp8bench.report.words.run_facts import (
    commit_of,
    counts,
    devices_of,
    fact,
    many,
    missing_of,
    notes_of,
    shortened,
    suites_of,
    when,
)
from tests.runs import gemm, run_of, transformer


def under(**facts: Scalar | None) -> Run:
    return run_of([], environment=Environment(facts))


def test_suites_and_devices() -> None:
    run, _ = gemm()
    assert suites_of(run) == ("gemm",) and devices_of(run) == ("AMD EPYC 7B13",)
    assert devices_of(replace(run, devices=())) == ("cpu",)
    planned = replace(run, records=())
    assert suites_of(planned) == ("gemm",) and suites_of(replace(planned, plan=Plan(()))) == ()


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"commit": "0a1b2c3d4e5f", "dirty": False}, "0a1b2c3d"),
        ({"commit": "0a1b2c3d4e5f", "dirty": True}, "0a1b2c3d with uncommitted changes"),
        ({"commit": None, "dirty": None}, ""),
        ({}, ""),
    ],
)
def test_commit(facts: dict[str, Scalar | None], text: str) -> None:
    assert commit_of(under(**facts)) == text


def test_a_fact_is_text() -> None:
    assert fact(under(threads=1, smt=None), "threads") == "1"
    assert fact(under(smt=None), "smt") == "" == fact(under(), "smt")


@pytest.mark.parametrize(
    ("started", "text"),
    [
        ("2026-01-05T12:00:59Z", "2026-01-05 12:00 UTC"),
        ("2026-01-05T12:00:00+02:00", "2026-01-05 10:00 UTC"),
        ("2026-01-05T12:00:00", "2026-01-05 12:00 UTC"),
        ("once", "once"),
        ("", ""),
    ],
)
def test_when(started: str, text: str) -> None:
    assert when(replace(under(), started=started)) == text


def test_counts() -> None:
    assert counts(gemm()[0]) == "8 measured, 3 skipped, 1 failed"
    assert counts(transformer()[0]) == "3 measured"
    assert counts(under()) == "none"


def test_many() -> None:
    assert (many(0, "case"), many(1, "case"), many(12, "case")) == ("0 cases", "1 case", "12 cases")


def test_shortened() -> None:
    assert shortened(" a\n b ", 3) == "a b" and shortened("abcdef", 5) == "ab..." and shortened("", 5) == ""


def test_notes() -> None:
    run = replace(
        transformer()[0], resumptions=(Resumption("2026-01-06", "", Environment({})),), notes=("beside another",)
    )
    assert notes_of(run) == [*run.plan.notes, "it was resumed at 2026-01-06", "beside another"]


def test_missing() -> None:
    run, _ = gemm()
    assert missing_of(run) == ""
    cut = replace(run, records=run.records[:4])
    assert missing_of(cut) == f"8 of 12 cases have no record: lines are broken or gone; --resume {run.id} measures them"
    early = missing_of(replace(cut, finished=False))
    assert early == f"stopped early: 8 of 12 cases have no record; --resume {run.id} measures them"
