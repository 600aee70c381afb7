"""The values of an audit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from fp8bench.model.promises import Signature


class AuditOutcome(StrEnum):
    """The outcome of an audit. CANNOT TELL: the callable gave nothing to judge."""

    PASS = "PASS"
    FAIL = "FAIL"
    CANNOT_TELL = "CANNOT TELL"


@dataclass(frozen=True)
class AuditFinding:
    """The result of one check. `code` is '' if there is nothing to report; with PASS it is a remark. `input` is the
    smallest input that showed it. `error` is the distance of results from the exact product of the inputs, `expected`
    that of the emulation; None if it does not apply."""

    check: str = ""
    outcome: AuditOutcome = AuditOutcome.PASS
    code: str = ""
    why: str = ""
    input: str = ""
    error: float | None = None
    expected: float | None = None

    @property
    def failed(self) -> bool:
        return self.outcome is AuditOutcome.FAIL

    @property
    def remark(self) -> bool:
        return self.outcome is AuditOutcome.PASS and bool(self.code)


def fail(code: str, reason: str, error: float | None = None, expected: float | None = None) -> AuditFinding:
    return AuditFinding("", AuditOutcome.FAIL, code, reason, "", error, expected)


def remark(code: str, reason: str, error: float | None = None, expected: float | None = None) -> AuditFinding:
    return AuditFinding("", AuditOutcome.PASS, code, reason, "", error, expected)


def worst(findings: Iterable[AuditFinding]) -> AuditOutcome:
    """Returns FAIL if any failed, CANNOT TELL if any could not be judged, or without checks."""
    outcomes = {finding.outcome for finding in findings}
    if AuditOutcome.FAIL not in outcomes and outcomes != {AuditOutcome.PASS}:
        return AuditOutcome.CANNOT_TELL
    return AuditOutcome.FAIL if AuditOutcome.FAIL in outcomes else AuditOutcome.PASS


@dataclass(frozen=True)
class AuditedLayer:
    """A layer of a converted model: `what` it is now, whether its class promises `low` precision, the precision in
    which its product `runs` ('' if unknown), and the FLOPs of its forward products. `wrong` describes a fault or
    peculiarity of its numbers, and `code` names it. An unconverted layer has the likely `reason` and its name (`rule`).
    `also` are further paths to it."""

    name: str
    what: str
    weight: tuple[int, ...]
    low: bool
    runs: str = ""
    flops: int = 0
    code: str = ""
    wrong: str = ""
    reason: str = ""
    rule: str = ""
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class CallWork:
    """The work of one call as torch sees it: allocations, casts, copies without a cast, and products."""

    allocations: int = 0
    casts: int = 0
    copies: int = 0
    products: int = 0


@dataclass(frozen=True)
class Audit:
    """All findings on one callable and device. `tried` counts judged results; only models have `layers`."""

    target: str
    signature: Signature
    findings: tuple[AuditFinding, ...]
    tried: int = 0
    seconds: float = 0.0
    layers: tuple[AuditedLayer, ...] = ()

    @property
    def low_flops(self) -> int:
        return sum(layer.flops for layer in self.layers if layer.low)

    @property
    def outcome(self) -> AuditOutcome:
        # The worst finding decides.
        return worst(self.findings)
