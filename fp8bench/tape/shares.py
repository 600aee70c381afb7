"""From timed operators to the shares of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from fp8bench.model.shares import Share, ShareKind, Shares, SharesFrom
from fp8bench.tape.operator_kinds import kind_of
from fp8bench.tape.timed_calls import TimedCall

# What two parts have in common that are one.
Alike = tuple[ShareKind, str, bool, str]


def shares_of(steps: Sequence[Sequence[TimedCall]], plain: Sequence[float]) -> Shares:
    """Of some steps that were looked at, and the seconds of others that were not.

    What the shortest of all operators takes is what it takes to call one past whoever looks: it is nobody's.
    """
    calls, nanoseconds = _typical(steps)
    calling = min(nanoseconds, default=0.0)
    return Shares(put_together(calls, [(one - calling) * 1e-9 for one in nanoseconds]), median(plain))


def shares_of_kernels(
    calls: Sequence[TimedCall], inside: Mapping[int, float], outside: Mapping[str, float], plain: float
) -> Shares:
    """Of one step: a device's seconds for the kernels of its operators, by their number, and for others by name."""
    known = put_together(calls, [inside.get(number, 0.0) for number in range(len(calls))])
    others = [Share(ShareKind.UNKNOWN, "", False, seconds, 1, name) for name, seconds in outside.items()]
    return Shares((*known, *others), plain, SharesFrom.KERNELS)


def put_together(calls: Iterable[TimedCall], seconds: Iterable[float]) -> tuple[Share, ...]:
    """Parts of one kind, in one module and direction, as one; the longest first."""
    found: dict[Alike, tuple[float, int]] = {}
    for call, taken in zip(calls, seconds, strict=True):
        kind, what = kind_of(call.operator, call.where)
        alike = kind, call.module, call.backward, what
        before = found.get(alike, (0.0, 0))
        found[alike] = before[0] + taken, before[1] + 1
    parts = [
        Share(kind, module, backward, taken, number, what)
        for (kind, module, backward, what), (taken, number) in found.items()
    ]
    return tuple(sorted(parts, key=lambda part: -part.seconds))


def _typical(steps: Sequence[Sequence[TimedCall]]) -> tuple[Sequence[TimedCall], list[float]]:
    """The operators of a step, and the median time of each; of steps that differ those of the one in the middle."""
    first = [call.operator for call in steps[0]]
    if all([call.operator for call in step] == first for step in steps):
        times = [[call.nanoseconds for call in step] for step in steps]
        return steps[0], [median(some) for some in zip(*times, strict=True)]
    by_time = sorted(steps, key=lambda step: sum(call.nanoseconds for call in step))
    typical = by_time[len(by_time) // 2]
    return typical, [float(call.nanoseconds) for call in typical]
