"""Cases that were planned and never measured: a run or a duel that was cut off is not green for its first half."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from fp8bench.comparing.figures import TIME
from fp8bench.dueling.duel import Duel
from fp8bench.model import Comparison, Direction, Evidence, Run


def failed(case: str, suite: str, evidence: Evidence, why: str) -> Comparison:
    """A case that came to nothing where it should have."""
    return Comparison(case, suite, TIME, "s", Direction.NONE, evidence, why=why, failed=True)


def unmeasured(runs: Sequence[Run], evidence: Evidence) -> Iterator[Comparison]:
    """The cases that unfinished runs lack, where no other of these runs has them."""
    there = {record.case.id for run in runs for record in run.records}
    for run in runs:
        for planned in (one for group in run.plan for one in group.cases):
            if not run.finished and planned.case.id not in there:
                there.add(planned.case.id)
                why = f"run {run.id} was cut off before it was measured"
                yield failed(planned.case.id, planned.case.workload, evidence, why)


def unfought(duel: Duel, fought: Collection[str]) -> Iterator[Comparison]:
    """The cases that a duel lacks."""
    for case in duel.cases:
        if case not in fought:
            yield failed(case, case.partition("[")[0], Evidence.PAIRED, "the duel was cut off before it was measured")
