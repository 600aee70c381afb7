"""Whether tensors can be kept in a precision at all, and not only multiplied in it. No torch here: plans read it."""

from __future__ import annotations

from fp8bench.model import DeviceFacts, Level, Support
from fp8bench.protocols import Precision


def storage_support(precision: Precision, facts: DeviceFacts, without: str) -> Support:
    """The precision's own support, refused for one that changes products only; `without` says what it then lacks."""
    if precision.float32_products != "highest":
        return Support(
            Level.REFUSED,
            f"{precision.name} changes what products read and leaves tensors float32: {without}, and fp32 is that case",
        )
    return precision.support(facts)
