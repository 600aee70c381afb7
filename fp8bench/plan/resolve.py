"""Resolves a request before anything slow starts: finds its suites and its text, and reads environment variables.

All names and variables are read here, so that a wrong name or value is refused before a worker starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fp8bench.model import Request
from fp8bench.model.raw import QUANTISERS_VARIABLE
from fp8bench.model.run import is_switched_on
from fp8bench.plan.corpus import Corpus, prepare_corpus
from fp8bench.plan.make import check_request
from fp8bench.protocols import Workload
from fp8bench.user_code import import_user_modules

CEILINGS_VARIABLE = "FP8BENCH_CEILINGS"
TAPE_VARIABLE = "FP8BENCH_TAPE"
WARM_UP_VARIABLE = "FP8BENCH_WARM_UP"
SECOND_VARIABLE = "FP8BENCH_SECOND_WORKER"
WARM_UP_SECONDS, SHORT_WARM_UP_SECONDS = 30.0, 5.0


@dataclass(frozen=True)
class EnvironmentSwitches:
    """Settings of a run that environment variables can change.

    `why_eager` is the reason why quantisers are not compiled, or ''. If `ceilings` is True, the highest rates of a
    device are measured, unless they are stored already. `warm_up_seconds` is the longest warm-up of a device. If
    `tapes` is True, operators are recorded; if `tapes_apart` is True, by a separate worker, which takes seconds to
    start. If `second` is True, a second worker process runs untimed passes.
    """

    why_eager: str
    ceilings: bool
    warm_up_seconds: float
    tapes: bool
    tapes_apart: bool
    second: bool


@dataclass(frozen=True)
class ResolvedRequest:
    """A request whose names have been checked, its suites, and its switches from environment variables."""

    request: Request
    suites: tuple[Workload, ...]
    switches: EnvironmentSwitches

    def corpus(self, store: Path, write: bool = True) -> Corpus | None:
        """Returns the text that the suites read, or None if they read none. If `write` is True, also writes the tokens
        of the text into the store.
        """
        reads_corpus = any(suite.uses_corpus for suite in self.suites)
        return prepare_corpus(self.request.data, store / "data", write) if reads_corpus else None


def resolve_request(request: Request, environ: Mapping[str, str]) -> ResolvedRequest:
    """Checks a request. Raises UsageError for impossible values, and UnknownName for unknown names."""
    # Import these modules first, because they may register suites that the request names.
    import_user_modules(request.imports)
    suites = check_request(request)
    is_brisk_or_budgeted = request.brisk or request.budget is not None
    switches = read_switches(environ, request.quick, is_brisk_or_budgeted, request.tape)
    if request.brisk:  # each group gets only seconds, and measuring ceilings would take longer
        switches = replace(switches, ceilings=False)
    return ResolvedRequest(request, suites, switches)


def read_switches(
    environ: Mapping[str, str], quick: bool = False, has_budget: bool = False, tape: bool = False
) -> EnvironmentSwitches:
    """Reads the switches from environment variables. A quick run compiles no quantisers and measures no ceilings. A
    quick run and a run with a budget warm up less. With `tape`, operators are always recorded.
    """
    compiles_quantisers = is_switched_on(QUANTISERS_VARIABLE, environ, "compiled", "eager", "to compile no quantisers")
    eager_reason = "--quick compiles none" if quick else ""
    ceilings = is_switched_on(CEILINGS_VARIABLE, environ, "measured", "off", "to measure no ceilings")
    warms_up = is_switched_on(WARM_UP_VARIABLE, environ, "on", "off", "to begin without warming up")
    records_tapes = is_switched_on(TAPE_VARIABLE, environ, "recorded", "off", "to record no tapes")
    warm_up_seconds = SHORT_WARM_UP_SECONDS if quick or has_budget else WARM_UP_SECONDS
    return EnvironmentSwitches(
        why_eager=eager_reason if compiles_quantisers else f"{QUANTISERS_VARIABLE}=eager compiles none",
        ceilings=ceilings and not quick,
        warm_up_seconds=warm_up_seconds if warms_up else 0.0,
        tapes=tape or records_tapes,
        tapes_apart=tape or not quick,
        second=is_switched_on(SECOND_VARIABLE, environ, "on", "off", "to measure with one worker"),
    )
