"""Records tapes (lists of the operators of a step) for the cases of a suite, or reads them from a stored run."""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path

from fp8bench.analysis.tapes import Taped
from fp8bench.errors import UsageError, WorkerError
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.limits import Limits
from fp8bench.model import PlannedCase, Request, Run, Tape
from fp8bench.pipeline import worker_for
from fp8bench.plan.make import make_plan
from fp8bench.plan.resolve import resolve


def record_tapes(request: Request, store: Path, observer: JobObserver) -> list[Taped]:
    """Records a tape of every case of a request. Nothing is timed or stored."""
    corpus = resolve(request, os.environ).corpus(store)
    taped: list[Taped] = []
    with worker_for(request, corpus) as worker, observer.counting() as report_progress:
        facts = worker.probe()
        facts_by_device = {fact.key: fact for fact in facts}
        plan = make_plan(request, facts, corpus.identity if corpus else None)
        planned = list(chain.from_iterable(group.cases for group in plan))
        for case in planned:
            report_progress(len(taped), len(planned), "cases", case.case.id)
            if case.runs:
                try:
                    limit = Limits(request.case_timeout).for_untimed_pass(case.work)
                    taped.append(
                        _make_taped_case(case, worker.within(limit).tape(case.case, facts_by_device[case.case.device]))
                    )
                except WorkerError as error:
                    taped.append(_make_taped_case(case, None, str(error)))
                    worker.restart()
            else:
                taped.append(_make_taped_case(case, None, case.skip))
    return taped


def _make_taped_case(planned: PlannedCase, tape: Tape | None, reason: str = "") -> Taped:
    return Taped(planned.case.setting, planned.case.mode, tape, reason, planned.work.flops)


def read_tapes(run: Run) -> list[Taped]:
    tapes = [
        Taped(
            record.case.setting,
            record.case.mode,
            record.tape,
            "" if record.tape is not None else record.reason or record.detail or "no tape was recorded",
            record.work.flops,
        )
        for record in run.records
    ]
    if not any(taped.tape for taped in tapes):
        raise UsageError(
            f"the run {run.id} has no tape, as with --quick or FP8BENCH_TAPE=off. Measure it again with --tape."
        )
    return tapes
