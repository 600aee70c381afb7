"""Whether a run records the operators of its steps."""

from __future__ import annotations

from collections.abc import Mapping

from fp8bench.model import Request
from fp8bench.model.run import is_on

VARIABLE = "FP8BENCH_TAPE"


def records_tapes(request: Request, environment: Mapping[str, str]) -> bool:
    """Unless a quick look was asked for, or the variable says off; --tape records them in any case."""
    return request.tape or (is_on(VARIABLE, environment, "recorded", "off", "to record no tapes") and not request.quick)
