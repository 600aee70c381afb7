"""Whether slots take longer for their place in the round: the first of it, the one after some neighbour.

Orders are balanced (`measure.orders`), so that no verdict leans on it. But noise comes from it, and a time that depends
on what ran before is not the step's alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple, TypeGuard

import numpy as np

from fp8bench.analysis.stats import Floats
from fp8bench.analysis.verdicts import FINAL_LEVEL, LEAST_FOR_VERDICT, means
from fp8bench.model import Interval, Timing

# No round has more slots.
_MOST = 1000


class PlaceEffect(NamedTuple):
    """So many slots after the first of a round, a slot takes so many times as long as the others of its round."""

    place: int
    ratio: Interval


def place_effect(timings: Sequence[Timing]) -> PlaceEffect | None:
    """The place that stands out most surely, of arms that shared rounds; None where none does.

    A slot counts by how far its mean lies from its arm's middle, and is held against the rest of its own round, so that
    a machine that becomes slower meanwhile says nothing. Had a place no effect, whatever the noise is like, any slot of
    the round might as well have been there: that gives the variance. All places together err in one of 100 groups.
    """
    table = _table(timings)
    table = table[(~np.isnan(table)).sum(axis=1) > 1]
    counts = (~np.isnan(table)).sum(axis=1, keepdims=True)
    apart = table - np.nansum(table, axis=1, keepdims=True) / counts
    # A slot against the others of its round, of which it is none.
    against = apart * counts / (counts - 1)
    variance = np.nansum(against**2, axis=1, keepdims=True) / counts
    judged = [place for place in range(table.shape[1]) if (~np.isnan(table[:, place])).sum() >= LEAST_FOR_VERDICT]
    judged = judged[:1] if table.shape[1] == 2 else judged  # of two places, what one gains is what the other loses
    reach = NormalDist().inv_cdf(1 - (1 - FINAL_LEVEL) / 2 / max(1, len(judged)))
    found: list[tuple[float, PlaceEffect]] = []
    for place in judged:
        there = ~np.isnan(table[:, place])
        point = float(against[there, place].mean())
        error = math.sqrt(float(variance[there].sum())) / int(there.sum())
        if abs(point) > reach * error:
            middle, low, high = (math.exp(point + side * reach * error) for side in (0, -1, 1))
            found.append((abs(point) / error, PlaceEffect(place, Interval(middle, low, high, FINAL_LEVEL))))
    return max(found, key=lambda one: one[0])[1] if found else None


def _is_known(place: int | None) -> TypeGuard[int]:
    """Older runs have none; a file that somebody changed may say anything."""
    return place is not None and 0 <= place < _MOST


def _table(timings: Sequence[Timing]) -> Floats:
    """By round and place the logarithm of a slot's mean over its arm's middle; NaN where nobody knows."""
    slots = [slot for timing in timings for slot in timing.slots]
    rounds = {number: row for row, number in enumerate(sorted({slot.round for slot in slots}))}
    places = 1 + max((slot.place for slot in slots if _is_known(slot.place)), default=-1)
    table: Floats = np.full((len(rounds), places), np.nan)
    for timing in timings:
        seconds = means(timing, [slot.round for slot in timing.slots])
        if not len(seconds) or seconds.min() <= 0:
            continue
        logs = np.log(seconds / np.median(seconds))
        for slot, log in zip(timing.slots, logs, strict=True):
            if _is_known(slot.place):
                table[rounds[slot.round], slot.place] = log
    return table
