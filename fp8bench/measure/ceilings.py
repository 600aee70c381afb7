"""Whether a run measures what its devices can do at most, and which of that holds for a case."""

from __future__ import annotations

from collections.abc import Mapping

from fp8bench.model import Ceiling, Ceilings, Level, Limit, PlannedCase
from fp8bench.model.variables import is_on
from fp8bench.registry import precisions

VARIABLE = "FP8BENCH_CEILINGS"
# The word for whole ceilings in the place of a suite's name.
SUITE = "ceilings"
# For all of a device's in a quick look, once a machine; and for whole ones, which is asked for and takes its time.
SECONDS = 5.0
WHOLE_SECONDS = 35.0
RUNS = 5


def measures_ceilings(quick: bool, environment: Mapping[str, str]) -> bool:
    """Unless a quick look was asked for, or the variable says off: then what is known already is used."""
    return is_on(VARIABLE, environment, "measured", "off", "to measure no ceilings") and not quick


def ceiling_of(planned: PlannedCase, known: Ceilings | None) -> Ceiling | None:
    """The most that a case can do.

    Products of a narrow dtype may be computed in a wider one, where that is faster: fp16's on a processor, say. An
    emulated case may multiply in whatever there is.
    """
    if known is None:
        return None
    dtypes = [rate.precision for rate in known.rates if rate.limit is Limit.PRODUCT]
    if planned.support.level is not Level.EMULATED:
        names = (planned.case.precision, *(name for _, name in planned.case.precision_map))
        rank = max(precisions.get(name).rank for name in names)
        dtypes = [dtype for dtype in dtypes if precisions.get(dtype).rank <= rank]
    flops = [rate for dtype in dtypes if (rate := known.bound(Limit.PRODUCT, dtype)) is not None]
    return Ceiling(
        max(flops, default=None), known.bound(Limit.CACHED), known.rates if known.whole else (), known.device
    )
