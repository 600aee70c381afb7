"""One audit from its beginning to its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fp8bench.features.audit.checks import results, times
from fp8bench.features.audit.checks.auditor import AuditCheck, Auditor
from fp8bench.features.audit.subjects import SUBJECTS
from fp8bench.features.audit.values import Audit, AuditFinding, AuditOutcome
from fp8bench.model import Ceilings, DeviceFacts
from fp8bench.model.promises import Signature, Takes

# In the order in which they run.
CHECKS: tuple[type[AuditCheck], ...] = (*results.CHECKS, *times.CHECKS)


def audited(
    target: str,
    function: Callable[..., Any],
    signature: Signature,
    facts: DeviceFacts,
    seed: int,
    checks: Sequence[type[AuditCheck]] = CHECKS,
    ceilings: Ceilings | None = None,
    baseline: Callable[..., Any] | None = None,
) -> Audit:
    """Every check in turn. One that fails stops none of the others: they may find what explains it."""
    started = time.perf_counter()
    kind, plain = SUBJECTS[signature.kind], replace(signature, takes=Takes.VALUES)
    other = None if baseline is None else kind(baseline, plain, facts)
    auditor = Auditor(kind(function, signature, facts), seed, ceilings, other)
    findings: list[AuditFinding] = []
    for check in (one(auditor) for one in checks):
        if not check.applies():
            continue
        found: list[AuditFinding] = []
        try:
            found += check.look()
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything, at any time
            found.append(check.unknown(error))
        findings += found or [AuditFinding(check.name, AuditOutcome.PASS)]
        if isinstance(check, results.NumbersCheck):
            if any(one.code == "raises" for one in found):
                break
            auditor.sound = all(one.outcome is AuditOutcome.PASS for one in found)
    return Audit(
        target, signature, tuple(findings), auditor.tried, time.perf_counter() - started,
        times=tuple(auditor.times.items()),
        work=tuple((side, one, auditor.compared.get(side)) for side, one in auditor.work.items()),
    )  # fmt: skip
