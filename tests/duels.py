"""A duel made by hand, for those who keep, judge and print one."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.features.duel.values import CaseResult, CaseSession, Duel, DuelSide
from fp8bench.model import Environment, Request, Status
from tests.fakes import CPU, record, steady

FACTS = Environment({"python": "3.11.7", "torch": "2.13.0", "numpy": None})
SESSION = CaseSession(
    (steady(1000, 5), steady(1001, 5)), (steady(1100, 5), steady(1101, 5)), "time was up after 5 rounds"
)


def side(name: str) -> DuelSide:
    """A side on this machine."""
    return DuelSide(name, f"side {name}", "/usr/bin/python", "", FACTS, (CPU,))


def result(precision: str, *sessions: CaseSession, status: Status = Status.OK) -> CaseResult:
    """A case with these sessions."""
    return CaseResult(record(None, precision), record(None, precision, status=status), sessions)


def header(**changes: object) -> Duel:
    """A duel that has just started."""
    cases = tuple(result(one).after.case.id for one in ("fp32", "bf16"))
    begun = Duel(
        "0a1b2c3d", "2026-01-02T03:04:05.678+00:00", "fp8bench duel", Request("gemm"), side("A"), side("B"), cases, 2
    )
    return replace(begun, **changes)  # type: ignore[arg-type]
