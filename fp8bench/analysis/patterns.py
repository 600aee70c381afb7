"""Which calls of a step take longer than the others: 'about 3 of 4 calls take 3.1 times as long'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fp8bench.analysis import stats
from fp8bench.model import Timing

# Two clusters explain so much of the variance of the logarithms, and their middles differ by so much.
EXPLAINED = 0.7
LEAST_RATIO = 1.1
LEAST_CALLS = 3
_MOST_OF = 50
_ABOUT = 0.15
_FAR = 1.5
# So few calls may be out of their place.
_STRAYS = 0.05


def pattern(timing: Timing) -> str:
    """What is to be said of the slower calls; '' where calls are alike, or differ in no two clusters."""
    slots = [np.array([sum(call) for call in slot.calls_ns], dtype=np.float64) for slot in timing.slots]
    taken = sum(slot.preemptions or 0 for slot in timing.slots if slot.waited_seconds)
    every = np.sort(np.concatenate(slots)) if slots else np.empty(0)
    every = every[: len(every) - min(taken, len(every) // 2)]
    if not len(every) or every[0] <= 0:
        return ""
    explained, place = stats.best_split(np.log(every))
    fast, slow = every[:place], every[place:]
    if explained < EXPLAINED or min(len(fast), len(slow)) < LEAST_CALLS:
        return ""
    longer = float(np.median(slow) / np.median(fast))
    if longer < LEAST_RATIO:
        return ""
    # A call far beyond the slow ones is one from which somebody took the core: nobody knows which it was.
    known = [np.where(slot < _FAR * np.median(slow), slot, np.nan) for slot in slots]
    classes: list[Any] = [np.ma.masked_invalid(one) > (fast[-1] + slow[0]) / 2 for one in known]
    share = sum(int(cls.filled(False).sum()) for cls in classes) / max(1, sum(cls.count() for cls in classes))
    return f"about {_of(share)} {_place(classes)} {longer:.1f} times as long"


def _of(share: float) -> str:
    """'3 of 4': the simplest numbers that are about as much."""
    for whole in range(2, _MOST_OF + 1):
        part = round(share * whole)
        if 0 < part < whole and abs(part / whole - share) <= _ABOUT * min(share, 1 - share):
            return f"{part} of {whole}"
    return f"1 of {round(1 / share)}" if share < 0.5 else f"all but 1 of {round(1 / (1 - share))}"


def _place(classes: Sequence[Any]) -> str:
    """Whether they are whole rounds, or always the same calls of a slot; `classes` says of each call whether it is."""
    fewest = min(map(len, classes))
    if fewest < 2:
        return "calls take"
    table = np.ma.stack([cls[:fewest] for cls in classes])
    for axis, words in ((1, "rounds take in all their calls"), (0, "calls, always the same ones of a slot, take")):
        shares = table.mean(axis=axis)
        if float(np.minimum(shares, 1 - shares).mean()) < _STRAYS:
            return words
    return "calls take"
