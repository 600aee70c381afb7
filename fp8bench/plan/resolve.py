"""What a request comes to before anything slow is started: its suites, its text, and what variables switch off.

Every name and every variable is read here, once, so that a wrong one is refused before a worker runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fp8bench.model import Request
from fp8bench.model.raw import QUANTISERS_VARIABLE
from fp8bench.model.run import is_on
from fp8bench.plan.corpus import Corpus, prepare_corpus
from fp8bench.plan.make import check_names
from fp8bench.protocols import Workload
from fp8bench.user_code import import_user_modules

CEILINGS_VARIABLE = "FP8BENCH_CEILINGS"
TAPE_VARIABLE = "FP8BENCH_TAPE"
WARM_UP_VARIABLE = "FP8BENCH_WARM_UP"
WARM_UP_SECONDS, WARM_UP_SECONDS_HURRIED = 30.0, 5.0


@dataclass(frozen=True)
class Switches:
    """What a run does unasked.

    `why_eager` says why quantisers are not compiled, '' where they are. `ceilings` has unknown ceilings measured.
    `warm_up_seconds` is the longest that a device may take to settle. `tapes` records operators, with `tapes_apart` in
    a worker of their own, which takes seconds to start.
    """

    why_eager: str
    ceilings: bool
    warm_up_seconds: float
    tapes: bool
    tapes_apart: bool


@dataclass(frozen=True)
class Resolved:
    """A request whose names are known, with the suites that it means."""

    request: Request
    suites: tuple[Workload, ...]
    switches: Switches

    def corpus(self, store: Path, write: bool = True) -> Corpus | None:
        """The text that the suites read, None where they read none; its tokens are kept in the store with `write`."""
        reads_text = any(suite.uses_corpus for suite in self.suites)
        return prepare_corpus(self.request.data, store / "data", write) if reads_text else None


def resolve(request: Request, environ: Mapping[str, str]) -> Resolved:
    """Raises UsageError for what cannot be meant, and UnknownName for a name that is none."""
    import_user_modules(request.imports)
    suites = check_names(request)
    switches = switches_of(environ, request.quick, request.budget is not None, request.tape)
    return Resolved(request, suites, switches)


def switches_of(
    environ: Mapping[str, str], quick: bool = False, budgeted: bool = False, tape: bool = False
) -> Switches:
    """Read from fp8bench's own variables; a user in a hurry gets less, and --tape is obeyed in any case."""
    compiled = is_on(QUANTISERS_VARIABLE, environ, "compiled", "eager", "to compile no quantisers")
    eager = "--quick compiles none" if quick else ""
    ceilings = is_on(CEILINGS_VARIABLE, environ, "measured", "off", "to measure no ceilings")
    warms_up = is_on(WARM_UP_VARIABLE, environ, "on", "off", "to begin without warming up")
    tapes = is_on(TAPE_VARIABLE, environ, "recorded", "off", "to record no tapes")
    return Switches(
        why_eager=eager if compiled else f"{QUANTISERS_VARIABLE}=eager compiles none",
        ceilings=ceilings and not quick,
        warm_up_seconds=0.0 if not warms_up else WARM_UP_SECONDS_HURRIED if quick or budgeted else WARM_UP_SECONDS,
        tapes=tape or tapes,
        tapes_apart=tape or not quick,
    )
