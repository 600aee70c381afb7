"""The audit audited: every planted lie, and kernels that do not lie: `python -m suites.audit`.

Ends with 1 where a lie passes, or an honest kernel does not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fp8bench.features.audit.checks import CHECKS, audited
from fp8bench.features.audit.checks.auditor import AuditCheck
from fp8bench.features.audit.values import Audit, AuditOutcome
from fp8bench.measure.ceilings import SECONDS
from fp8bench.model import Ceilings
from fp8bench.model.raw import Settings
from fp8bench.registry import devices
from fp8bench.worker.bench import Bench
from suites import audit_lies, audit_optimizers
from suites.audit_lies import UNCAUGHT, Kernel

LIES = (*audit_lies.LIES, *audit_optimizers.LIES)
HONEST = (*audit_lies.HONEST, *audit_optimizers.HONEST)

_MOST_SECONDS = 20.0


def result_of(
    kernel: Kernel, device: str, checks: Sequence[type[AuditCheck]] = CHECKS, ceilings: Ceilings | None = None
) -> Audit:
    """Its audit, of a copy that remembers nothing."""
    facts = next(one for one in devices.get(device).available())
    return audited(kernel.name, kernel.made(), kernel.signature, facts, 0, checks, ceilings, kernel.baseline)


def codes_of(audit: Audit) -> str:
    """What failed, in the order of the checks."""
    failed = (one.code for one in audit.findings if one.outcome is not AuditOutcome.PASS)
    return ", ".join(dict.fromkeys(failed)) or "-"


def _told(title: str, kernels: Sequence[Kernel], device: str, wanted: AuditOutcome) -> tuple[int, int, float]:
    """How many are not as wanted, how many results were looked at, and the longest audit."""
    print(f"\n{title}\n")
    wrong, tried, longest = 0, 0, 0.0
    facts = next(one for one in devices.get(device).available())
    known = Bench(Settings()).ceilings(facts, SECONDS)
    for kernel in kernels:
        found = result_of(kernel, device, ceilings=known)
        wrong += found.outcome is not wanted
        tried, longest = tried + found.tried, max(longest, found.seconds)
        thread = f"  ({kernel.thread})" if kernel.thread else ""
        print(f"  {found.outcome.value:11} {kernel.name}: {codes_of(found)}{thread}", flush=True)
    return wrong, tried, longest


def main(words: Sequence[str] | None = None) -> int:
    """Print all three lists and the sums."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    device = parser.parse_args(words).device
    torch.set_num_threads(1)
    missed, _, slow = _told(f"{len(LIES)} lies", LIES, device, AuditOutcome.FAIL)
    alarms, tried, slower = _told(f"{len(HONEST)} honest kernels", HONEST, device, AuditOutcome.PASS)
    seen, _, _ = _told("lies that no audit of this kind catches", UNCAUGHT, device, AuditOutcome.PASS)
    print(f"\n{missed} of {len(LIES)} lies passed")
    print(f"{alarms} of {len(HONEST)} honest kernels did not, over {tried} results")
    print(f"the longest audit took {max(slow, slower):.1f} s, of {_MOST_SECONDS:g} allowed")
    return 1 if missed or alarms or seen else 0


if __name__ == "__main__":
    sys.exit(main())
