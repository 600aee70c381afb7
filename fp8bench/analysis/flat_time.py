"""Time that does not grow with the work that a suite declares, where a run holds a case in two sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import permutations

from fp8bench import units
from fp8bench.analysis import stats, verdicts
from fp8bench.analysis.labels import HOST_PARTLY, Labelled, host_share
from fp8bench.model import Case, Label, Record, Scalar, Timing, Work
from fp8bench.model.stopping import EMULATED_ROUNDS

# So much more work is another size.
_TWICE = 2.0
# Standard errors of the ratio of two times, and what that may be at most: a wider one says nothing.
_ERRORS, _AT_MOST = 3.0, 1.1
# What an operator takes of the host whatever its size, with autograd and Python around it: 14 us in a convolution of
# 8 channels on an AMD EPYC (Zen 5), and twice that. Steps that take less are made of that, and grow with nothing.
_OPERATOR_SECONDS = 30e-6


def flat_times(records: Iterable[Record], threads: int = 1) -> dict[str, Labelled]:
    """A label for the larger of two sizes, by case: the smaller one may be what it says.

    No hard one: what does not show in the counts may have been the same in both. A GPU, or several threads, that were
    half idle take as long for twice the work: they are asked only where the larger size claims more than half of what
    they can do. Fewer rounds than an emulated case gets say nothing.
    """
    kinds: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        case = record.case
        if record.timing and record.timing.num_rounds >= EMULATED_ROUNDS:
            kinds.setdefault((case.workload, case.version, case.mode, case.device), []).append(record)
    found: dict[str, Labelled] = {}
    for alike in kinds.values():
        for small, large in permutations(alike, 2):
            if _grown(small, large) and _is_busy(large, threads) and (reason := _flat(small, large)):
                found.setdefault(large.case.id, Labelled(Label.FLAT_TIME, reason))
    return found


def _grown(small: Record, large: Record) -> bool:
    """Twice the work or more, in every count that is declared, by larger numbers and in nothing else.

    The memory that a state surely needs stands for bytes that are not declared: a product of one row takes as long as
    one of two, because both read all weights.
    """
    before, after = small.work, large.work
    if not (before.flops or before.bytes or before.tokens) or after.tokens < before.tokens:
        return False
    pairs = [(before.flops, after.flops), (before.bytes or before.least_memory, after.bytes or after.least_memory)]
    if not (before.flops or before.bytes):
        pairs.append((before.tokens, after.tokens))
    return all(more >= _TWICE * less for less, more in pairs) and _larger(small.case, large.case)


def _larger(small: Case, large: Case) -> bool:
    before, after = dict(small.params), dict(large.params)
    return before.keys() == after.keys() and all(_at_least(after[name], value) for name, value in before.items())


def _at_least(value: Scalar, other: Scalar) -> bool:
    if isinstance(value, str | bool) or isinstance(other, str | bool):
        return value == other
    return value >= other


def _flat(small: Record, large: Record) -> str:
    """Both times and works, where the larger size provably takes no longer; else ''."""
    assert small.timing is not None and large.timing is not None
    before, after = _best(small.timing), _best(large.timing)
    operators = None if small.products is None else small.products.operators
    if operators is None or before <= _OPERATOR_SECONDS * operators:
        return ""  # its time is not that of its work: it may grow with nothing
    if host_share(small.timing, small.case.device) > HOST_PARTLY:
        return ""
    if after > _AT_MOST * before:
        return ""
    fewest = ((timing, min(len(slot.calls_ns) for slot in timing.slots)) for timing in (small.timing, large.timing))
    error = _ERRORS * math.hypot(*(stats.best_case(verdicts.cells(timing, calls)).error for timing, calls in fewest))
    grown = math.log(after / before)
    if grown - error > 0 or grown + error > math.log(_AT_MOST):
        return ""
    return f"{units.seconds(after)} for {_told(large.work)}, {units.seconds(before)} for {_told(small.work)}"


def _best(timing: Timing) -> float:
    return sum(seconds for _, seconds in verdicts.best_phases(timing))


def _is_busy(record: Record, threads: int) -> bool:
    """Whether all of its device was at work: what does one thing at a time, or claims more than half of the bound."""
    if threads == 1 and record.case.device.startswith("cpu"):
        return True
    if record.ceiling is None or record.timing is None:
        return False
    half = _best(record.timing) / 2
    flops, moved = record.ceiling.flops or math.inf, record.ceiling.bytes or math.inf
    return record.work.flops > half * flops or record.work.bytes > half * moved


def _told(work: Work) -> str:
    if work.flops:
        return units.count(work.flops, "FLOP")
    return units.count(work.bytes, "B") if work.bytes else units.count(work.tokens, "tokens")
