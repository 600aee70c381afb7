"""What a phase takes in the middle of all calls, beside its best case."""

from __future__ import annotations

import numpy as np

from fp8bench.model import Timing


def phase_medians(timing: Timing) -> dict[str, tuple[float, float]]:
    """For each phase of the step: the median over all calls of its seconds, and of its share of the call.

    Medians of parts do not sum to the median of the whole, as best cases do.
    """
    calls = np.array([call for slot in timing.slots for call in slot.calls_ns], dtype=np.float64)
    if not len(calls):
        return {}
    totals = calls.sum(axis=1)
    phases = np.array(timing.segments.phases)
    medians = {}
    for phase in dict.fromkeys(timing.segments.phases):
        seconds = calls[:, phases == phase].sum(axis=1)
        shares = np.divide(seconds, totals, out=np.zeros_like(totals), where=totals > 0)
        medians[phase] = float(np.median(seconds)) * 1e-9, float(np.median(shares))
    return medians
