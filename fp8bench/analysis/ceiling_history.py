"""What a device did at most from one measurement to the next: whether it became slower."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile

from fp8bench.model import Ceilings, Rate
from fp8bench.model.measured import WIDEST_SPREAD


class Pace(StrEnum):
    """What became of a rate."""

    SLOWER = "slower"
    FASTER = "faster"
    AS_BEFORE = "as before"
    UNCLEAR = "unclear"


@dataclass(frozen=True)
class Since:
    """The newest value of a rate beside those of so many earlier measurements under the same settings.

    It is slower where it lies below all of them by more than runs of one measurement may differ: machines that are
    shared differ from day to day. Where its own runs differ by more, or all of theirs did, it is unclear.
    """

    rate: Rate
    before: tuple[float, ...]
    pace: Pace

    @property
    def middle(self) -> float:
        return statistics.median(self.before)


def since(rate: Rate, earlier: Iterable[Ceilings]) -> Since | None:
    """None for one that was not measured, or not before."""
    alike = [
        one for found in earlier for one in found.rates if (one.limit, one.precision) == (rate.limit, rate.precision)
    ]
    known = [(one, one.value) for one in alike if one.value is not None]
    if rate.value is None or not known:
        return None
    steady = [value for one, value in known if one.steady]
    values = tuple(value for _, value in known)
    if not rate.steady or not steady:
        return Since(rate, values, Pace.UNCLEAR)
    slower = rate.value < (1 - WIDEST_SPREAD) * min(steady)
    faster = rate.value > (1 + WIDEST_SPREAD) * max(steady)
    return Since(rate, values, Pace.SLOWER if slower else Pace.FASTER if faster else Pace.AS_BEFORE)


def alike(found: Ceilings, history: Sequence[Ceilings]) -> list[Ceilings]:
    """Those of a history, oldest first, that stand before it, of the same device under the same settings."""
    before = takewhile(found.__ne__, history)
    return [one for one in before if (one.device, one.under) == (found.device, found.under)]
