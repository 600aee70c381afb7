"""One audit from its beginning to its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from fp8bench.audit.auditor import Auditor, Check
from fp8bench.audit.checks import CHECKS
from fp8bench.audit.kinds import SUBJECTS
from fp8bench.model import DeviceFacts
from fp8bench.model.audit import Audit, AuditFinding, AuditOutcome, Signature


def audited(
    target: str,
    function: Callable[..., Any],
    signature: Signature,
    facts: DeviceFacts,
    seed: int,
    checks: Sequence[type[Check]] = CHECKS,
) -> Audit:
    """Every check in turn. One that fails stops none of the others: they may find what explains it."""
    started = time.perf_counter()
    auditor = Auditor(SUBJECTS[signature.kind](function, signature, facts), seed)
    findings: list[AuditFinding] = []
    for kind in checks:
        check = kind()
        if not check.applies(auditor):
            continue
        try:
            found = list(check.look(auditor))
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything, at any time
            found = [check.unknown(error, "")]
        findings += found or [AuditFinding(check.name, AuditOutcome.PASS)]
        if kind is CHECKS[0]:
            if any(one.code == "raises" for one in found):
                break
            auditor.sound = all(one.outcome is AuditOutcome.PASS for one in found)
    return Audit(target, signature, tuple(findings), auditor.tried, time.perf_counter() - started)
