"""Whether a run records the operators of its steps, and where."""

from __future__ import annotations

from collections.abc import Mapping

from fp8bench.model import Request
from fp8bench.model.run import is_on

VARIABLE = "FP8BENCH_TAPE"


def records_tapes(request: Request, environment: Mapping[str, str]) -> bool:
    """Unless the variable says off; --tape records them in any case."""
    return request.tape or is_on(VARIABLE, environment, "recorded", "off", "to record no tapes")


def apart(request: Request) -> bool:
    """Whether a worker of its own records them, which takes seconds to start; a quick look's steps are recorded in
    the one that has timed them, but for compiled ones."""
    return request.tape or not request.quick
