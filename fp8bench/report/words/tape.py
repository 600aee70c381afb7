"""What else a reader of a tape should know, in words."""

from __future__ import annotations

from fp8bench.model import Tape
from fp8bench.report.panels import together


def remarks(tape: Tape) -> list[str]:
    """What has no formula, what nobody saw written, and what a compiler fused."""
    unknown = together((one.operator, one.calls) for one in tape.operators if one.flops is None)
    found = [f"unknown x {sum(calls)}: {operator} has no formula" for operator, calls in unknown.items()]
    if tape.unwritten:
        found.append(f"{tape.unwritten} tensors were written by no operator of torch: what else ran is not counted")
    return [*found, tape.fused] if tape.fused else found
