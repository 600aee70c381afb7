"""The worker's side of an audit; run as a program, its process."""

from __future__ import annotations

from fp8bench.features.audit.values import Audit
from fp8bench.model import Ceilings, DeviceFacts
from fp8bench.model.promises import AuditKind, Signature
from fp8bench.user_code.named import declared_of, named
from fp8bench.worker.bench import Bench
from fp8bench.worker.main import main
from fp8bench.worker.step_guards import aside
from fp8bench.worker.switches import unchanged


class AuditBench(Bench):
    """Imports what is audited, here and nowhere else."""

    def declared(self, target: str) -> Signature | None:
        with aside():
            return declared_of(named(target))

    def audit(self, target: str, signature: Signature, facts: DeviceFacts, ceilings: Ceilings | None = None) -> Audit:
        from fp8bench.features.audit.auditor import audited
        from fp8bench.features.audit.model import audited_model, given_model
        from fp8bench.features.audit.times import CHECKS

        self._selected(facts)
        with unchanged(), aside():
            if signature.kind is AuditKind.MODEL:
                model, batch = given_model(target, named(target)())
                return audited_model(target, model, batch, signature, facts)
            baseline = named(signature.baseline) if signature.baseline else None
            seed, function = self._settings.seed, named(target)
            return audited(target, function, signature, facts, seed, CHECKS, ceilings, baseline)


if __name__ == "__main__":
    main(AuditBench)
