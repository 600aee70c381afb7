"""Whether an optimizer is right after a thousand steps, and what its state takes."""

from __future__ import annotations

from collections.abc import Iterator

from fp8bench.audit.auditor import Auditor, Check, Given
from fp8bench.audit.optimizer import Optimizer
from fp8bench.model.audit import AuditFinding

_DATA = "normal"
# Scales, and the count of steps, beside the moments.
_MORE = 1.05


class ManySteps(Check):
    """Counts that stand still, and updates that are lost, show late."""

    name = "many steps"

    def applies(self, auditor: Auditor) -> bool:
        return auditor.sound and isinstance(auditor.subject, Optimizer)

    def look(self, auditor: Auditor) -> Iterator[AuditFinding]:
        subject = auditor.subject
        assert isinstance(subject, Optimizer)
        given = Given(_DATA, subject.many)
        try:
            for name, one in auditor.wrong(given):
                yield auditor.finding(self.name, given, name, one)
            few = Given(_DATA, subject.held)
            state = subject.state_bytes(auditor.matrices(few))
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything
            yield self.unknown(error, given.words(subject.sides))
            return
        if state is not None and state[0] > _MORE * state[1]:
            words = f"its state takes {state[0]:.3g} bytes an element, and {state[1]:.3g} were promised"
            yield self.remark("state-bytes", words, few.words(subject.sides))
