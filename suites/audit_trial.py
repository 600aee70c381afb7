"""How often an audit accuses an honest kernel, and how many everyday bugs it sees: `python -m suites.audit_trial
--folder FOLDER --seeds 3`.

Values only, in one process: nothing is timed. What FOLDER/rows.jsonl has is not done again; rows of one commit and
`--state` belong together. Ends with 1 where more honest audits fail than one in 1,200, or fewer than nine lies of ten
are caught at a seed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fp8bench.features.audit.auditor import audited
from fp8bench.features.audit.results import VALUE_CHECKS
from fp8bench.features.audit.values import AuditOutcome
from fp8bench.registry import devices
from suites.audit import codes_of
from suites.audit_everyday import HONEST, LIES
from suites.audit_lies import Kernel
from suites.trials import Rows, options, say

_ACCUSED, _CAUGHT = 1 / 1200, 0.9


def audit_of(kernel: Kernel, seed: int, device: str = "cpu") -> tuple[str, str, float]:
    """The outcome, what failed, and the seconds."""
    facts = devices.get(device).available()[0]
    audit = audited(kernel.name, kernel.made(), kernel.signature, facts, seed, VALUE_CHECKS)
    return audit.outcome.value, codes_of(audit), audit.seconds


def main() -> int:
    import torch

    known = options(
        __doc__, folder=(str(Path("reports/audit_cpu_202611")), "where rows are kept"), seeds=(3, "how many"),
        state=("after", "a word for the code that audits"), honest=(False, "honest kernels alone"),
    )  # fmt: skip
    torch.set_num_threads(1)
    rows = Rows(Path(known.folder))
    for seed in range(known.seeds):
        for kernel in (*HONEST, *(() if known.honest else LIES)):
            if not rows.of(state=known.state, seed=seed, kernel=kernel.name):
                outcome, codes, seconds = audit_of(kernel, seed)
                rows.add(
                    state=known.state, seed=seed, kernel=kernel.name, outcome=outcome, codes=codes,
                    seconds=round(seconds, 2),
                )  # fmt: skip
    return _told(rows, known.state, known.seeds)


def _told(rows: Rows, state: str, seeds: int) -> int:
    """The counts; 1 where they miss what is asked for."""
    mine = rows.of(state=state)
    honest = [row for row in mine if row["kernel"] in {kernel.name for kernel in HONEST}]
    accused = [row for row in honest if row["outcome"] != AuditOutcome.PASS]
    say(f"{len(accused)} of {len(honest)} audits of honest kernels do not pass")
    wrong = len(accused) > max(1.0, _ACCUSED * len(honest))
    for seed in range(seeds):
        lies = [row for row in mine if row not in honest and row["seed"] == seed]
        caught = sum(row["outcome"] == AuditOutcome.FAIL for row in lies)
        if lies:
            say(f"seed {seed}: {caught} of {len(lies)} lies are caught")
            wrong |= caught < _CAUGHT * len(lies)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
