"""The findings and results of an audit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from fp8bench.model.promises import CallablePromise


class AuditOutcome(StrEnum):
    """The outcome of a check or of an audit. CANNOT TELL means that the callable gave no result that can be judged."""

    PASS = "PASS"
    FAIL = "FAIL"
    CANNOT_TELL = "CANNOT TELL"


@dataclass(frozen=True)
class AuditFinding:
    """The result of one check. `code` is '' if there is nothing to report. A PASS with a code is only a remark. `input`
    is the input that shows the finding. `error` is the distance of the results from the exact product of the inputs,
    and `expected` is the distance of emulated results. Either is None if it does not apply.
    """

    check: str = ""
    outcome: AuditOutcome = AuditOutcome.PASS
    code: str = ""
    why: str = ""
    input: str = ""
    error: float | None = None
    expected: float | None = None

    @property
    def has_failed(self) -> bool:
        return self.outcome is AuditOutcome.FAIL

    @property
    def is_remark(self) -> bool:
        return self.outcome is AuditOutcome.PASS and bool(self.code)


def make_failure(code: str, reason: str, error: float | None = None, expected: float | None = None) -> AuditFinding:
    return AuditFinding("", AuditOutcome.FAIL, code, reason, "", error, expected)


def make_remark(code: str, reason: str, error: float | None = None, expected: float | None = None) -> AuditFinding:
    return AuditFinding("", AuditOutcome.PASS, code, reason, "", error, expected)


def find_worst_outcome(findings: Iterable[AuditFinding]) -> AuditOutcome:
    """Returns FAIL if any finding failed. Otherwise returns CANNOT TELL if any finding could not be judged, or if
    there is none. Otherwise returns PASS.
    """
    outcomes = {finding.outcome for finding in findings}
    if AuditOutcome.FAIL in outcomes:
        return AuditOutcome.FAIL
    return AuditOutcome.PASS if outcomes == {AuditOutcome.PASS} else AuditOutcome.CANNOT_TELL


@dataclass(frozen=True)
class AuditedLayer:
    """A layer of a converted model, for the report. `what` is its current class, and `low` whether this class promises
    low precision. `runs` is the precision of its product ('' if unknown). `flops` counts its forward products. `code`
    names a fault or peculiarity of its numbers, and `wrong` describes it. For a layer that was not converted, `reason`
    is the likely reason, and `rule` the name of that reason. `also` lists further paths to the same layer.
    """

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
class AuditReport:
    """All findings on one callable and device. `tried` is the number of judged results. Only audits of models have
    `layers`. `not_run` names the checks that were skipped because an earlier check failed."""

    target: str
    signature: CallablePromise
    findings: tuple[AuditFinding, ...]
    tried: int = 0
    seconds: float = 0.0
    layers: tuple[AuditedLayer, ...] = ()
    not_run: tuple[str, ...] = ()

    @property
    def low_flops(self) -> int:
        return sum(layer.flops for layer in self.layers if layer.low)

    @property
    def outcome(self) -> AuditOutcome:
        # The worst finding decides.
        return find_worst_outcome(self.findings)
