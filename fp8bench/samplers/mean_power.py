"""Mean power from single readings of a power sensor, where no energy counter can be had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fp8bench.samplers.readings import NoReading

# Sensors look a quarter of the time on some devices: a second has several of their looks.
SHORTEST = 1.0
FEWEST = 11


@dataclass(frozen=True, slots=True)
class PowerSample:
    """The power at an instant, in seconds and watts."""

    at: float
    watts: float


@dataclass(frozen=True)
class MeanPower:
    """The mean over `seconds`, from `samples` readings."""

    watts: float
    seconds: float
    samples: int


def sufficient(samples: Sequence[PowerSample], start: float, settle: float) -> bool:
    """Whether there is enough for a mean."""
    counted = _counted(samples, start, settle)
    return len(counted) >= FEWEST and counted[-1].at - counted[0].at >= SHORTEST


def mean_power(samples: Sequence[PowerSample], start: float, settle: float) -> MeanPower:
    """The trapezoid rule over what comes `settle` seconds after `start` or later; raises NoReading with too little.

    `settle` is what the sensor averages over: an earlier reading is about the time before.
    """
    counted = _counted(samples, start, settle)
    if not sufficient(samples, start, settle):
        seconds = counted[-1].at - counted[0].at if counted else 0.0
        raise NoReading(
            f"not measurable: {len(counted)} reading(s) of the power sensor over {seconds:.2g} s, "
            f"{FEWEST} over {SHORTEST:g} s are needed" + (f" after {settle:g} s of settling" if settle else "")
        )
    joules = sum((later.at - earlier.at) * (later.watts + earlier.watts) / 2 for earlier, later in pairwise(counted))
    seconds = counted[-1].at - counted[0].at
    return MeanPower(joules / seconds, seconds, len(counted))


def _counted(samples: Sequence[PowerSample], start: float, settle: float) -> Sequence[PowerSample]:
    return [sample for sample in samples if sample.at >= start + settle]
