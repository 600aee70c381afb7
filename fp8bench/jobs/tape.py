"""Records tapes (lists of the operators of a step) for the cases of a suite, or reads them from a stored run."""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path

from fp8bench.analysis.tapes import CaseTape
from fp8bench.errors import UsageError, WorkerError
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.limits import RequestTimeLimits
from fp8bench.model import Request, Run
from fp8bench.pipeline import open_worker
from fp8bench.plan.make import make_plan
from fp8bench.plan.resolve import resolve_request


def record_tapes(request: Request, store: Path, observer: JobObserver) -> list[CaseTape]:
    """Records a tape of every case of a request. Nothing is timed or stored."""
    corpus = resolve_request(request, os.environ).corpus(store)
    case_tapes: list[CaseTape] = []
    with open_worker(request, corpus) as worker, observer.counting() as report_progress:
        # 1. Plan the cases for the devices of this machine.
        facts = worker.probe()
        device_facts_by_key = {fact.key: fact for fact in facts}
        plan = make_plan(request, facts, corpus.identity if corpus else None)
        planned_cases = list(chain.from_iterable(group.cases for group in plan))
        # 2. Record the tape of each case, or the reason why it has none.
        for planned_case in planned_cases:
            case = planned_case.case
            report_progress(len(case_tapes), len(planned_cases), "cases", case.id)
            tape = None
            reason = planned_case.skip
            if planned_case.runs:
                try:
                    time_limit = RequestTimeLimits(request.case_timeout).for_untimed_pass(planned_case.work)
                    tape = worker.with_time_limit(time_limit).tape(case, device_facts_by_key[case.device])
                except WorkerError as error:
                    reason = str(error)
                    # The error may have damaged or ended the worker, and further cases need one.
                    worker.restart()
            case_tapes.append(CaseTape(case.setting, case.mode, tape, reason, planned_case.work.flops))
    return case_tapes


def read_tapes(run: Run) -> list[CaseTape]:
    case_tapes = []
    for record in run.records:
        reason = "" if record.tape is not None else record.reason or record.detail or "no tape was recorded"
        case_tapes.append(CaseTape(record.case.setting, record.case.mode, record.tape, reason, record.work.flops))
    if not any(taped_case.tape for taped_case in case_tapes):
        raise UsageError(
            f"the run {run.id} has no tape, as with --quick or FP8BENCH_TAPE=off. Measure it again with --tape."
        )
    return case_tapes
