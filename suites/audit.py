"""Audits kernels with planted lies, and honest kernels: `python -m suites.audit`.

Exit code 1 means that a lie passed, or that an honest kernel was accused.
"""

import sys
from collections.abc import Sequence

from fp8bench.features.audit.auditor import AuditCheck, run_checks
from fp8bench.features.audit.host import KernelHost
from fp8bench.features.audit.times import AUDIT_CHECKS
from fp8bench.features.audit.values import AuditOutcome, AuditReport
from fp8bench.measure.ceilings import measure_ceilings
from fp8bench.measure.handle import LocalWorker
from fp8bench.model import Ceilings
from fp8bench.model.raw import Settings
from fp8bench.registry import devices
from suites.audit_kernels import Kernel
from suites.audit_lies import HONEST, LIES, UNCAUGHT
from suites.trials import options, say

_MOST_SECONDS = 20.0


def result_of(
    kernel: Kernel,
    device: str,
    checks: Sequence[AuditCheck] = AUDIT_CHECKS,
    ceilings: Ceilings | None = None,
    seed: int = 0,
) -> AuditReport:
    """Audits a fresh copy of the kernel in this process."""
    facts = devices.get(device).available()[0]
    host = KernelHost(kernel.made(), kernel.signature, facts)
    return run_checks(kernel.name, host, kernel.signature, facts, seed, checks, ceilings)


def codes_of(audit: AuditReport) -> str:
    """Returns the codes of all failed findings, in the order of the checks; '-' if nothing failed."""
    failed = (finding.code for finding in audit.findings if finding.outcome is not AuditOutcome.PASS)
    return ", ".join(dict.fromkeys(failed)) or "-"


def main() -> int:
    import torch

    device = options(__doc__, device=("cpu", "cpu or cuda")).device
    torch.set_num_threads(1)
    ceilings = measure_ceilings(LocalWorker(Settings()), devices.get(device).available()[0])
    audits: dict[str, list[AuditReport]] = {}
    for title, kernels in (("lies", LIES), ("honest kernels", HONEST), ("lies that no audit catches", UNCAUGHT)):
        say(f"\n{len(kernels)} {title}\n")
        audits[title] = []
        for kernel in kernels:
            audit = result_of(kernel, device, ceilings=ceilings)
            audits[title].append(audit)
            thread = f"  ({kernel.thread})" if kernel.thread else ""
            say(f"  {audit.outcome.value:11} {kernel.name}: {codes_of(audit)}{thread}")
    lies, honest, uncaught = audits.values()
    passed = sum(audit.outcome is not AuditOutcome.FAIL for audit in lies)
    accused = sum(audit.outcome is not AuditOutcome.PASS for audit in honest)
    say(f"\n{passed} of {len(LIES)} lies passed")
    say(f"{accused} of {len(HONEST)} honest kernels did not, over {sum(audit.tried for audit in honest)} results")
    longest = max(audit.seconds for audit in (*lies, *honest))
    say(f"the longest audit took {longest:.1f} s, of {_MOST_SECONDS:g} allowed")
    return int(bool(passed or accused or any(audit.outcome is not AuditOutcome.PASS for audit in uncaught)))


if __name__ == "__main__":
    sys.exit(main())
