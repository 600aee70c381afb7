"""What is held against what a workload says of itself: how much a device does at most, and what products ran on."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from enum import StrEnum

from fp8bench.model.planned import Scalar

# Runs that differ by more bound nothing.
WIDEST_SPREAD = 0.05


class Limit(StrEnum):
    """What a device does at most: products, copies and triads (a = b + s c) beyond its last cache, copies wherever they
    are fastest, launches of the least that there is to do, and copies from the host's memory to its own."""

    PRODUCT = "product"
    COPY = "copy"
    TRIAD = "triad"
    CACHED = "cached copy"
    LAUNCH = "launch"
    LOAD = "host to device"


@dataclass(frozen=True)
class Rate:
    """What a device was seen to do in a second, once in each of `runs`: FLOPs, bytes read and written, or launches.

    `precision` is that of products. `shape` (M, N and K of a product, the bytes of one array) won a search of so many
    (`searched`), and was then measured again: what it won by is in `runs` only where there is one run. Without any,
    `why` says what went wrong.
    """

    limit: Limit
    precision: str = ""
    runs: tuple[float, ...] = ()
    searched: int = 1
    shape: tuple[int, ...] = ()
    why: str = ""

    @property
    def value(self) -> float | None:
        return statistics.median(self.runs) if self.runs else None

    @property
    def spread(self) -> float:
        """From the lowest to the highest run, over their median."""
        return (max(self.runs) - min(self.runs)) / statistics.median(self.runs) if self.runs else 0.0

    @property
    def steady(self) -> bool:
        """Whether its runs agree so well that nothing can do more than it says."""
        return bool(self.runs) and self.spread <= WIDEST_SPREAD


@dataclass(frozen=True)
class Ceilings:
    """The most that a device was seen to do, kept for a machine: a quick look of one run, or several runs of all.

    `when` it was, and `under` which settings, by name; `device` is the device's name.
    """

    rates: tuple[Rate, ...] = ()
    when: str = ""
    under: tuple[tuple[str, Scalar], ...] = ()
    device: str = ""

    @property
    def whole(self) -> bool:
        """Whether there are several runs; a quick look is of one, with one thread of a processor."""
        return any(len(rate.runs) > 1 for rate in self.rates)

    def rate(self, limit: Limit, precision: str = "") -> Rate | None:
        """None where it was not measured."""
        return next((one for one in self.rates if one.runs and (one.limit, one.precision) == (limit, precision)), None)

    def bound(self, limit: Limit, precision: str = "") -> float | None:
        """What nothing can be above; None where nobody knows, or runs differ too much."""
        rate = self.rate(limit, precision)
        return rate.value if rate is not None and rate.steady else None

    def times(self, threads: int) -> Ceilings:
        """A quick look, of so many threads, if none ever waits for another one."""
        many = (replace(rate, runs=tuple(one * threads for one in rate.runs)) for rate in self.rates)
        return replace(self, rates=tuple(many))


@dataclass(frozen=True)
class Ceiling:
    """Of one case: the most FLOPs and bytes a second that it can be; None where nobody knows.

    `rates` are those of its device that were measured in several runs, steady or not; `device` is its name.
    """

    flops: float | None = None
    bytes: float | None = None
    rates: tuple[Rate, ...] = ()
    device: str = ""


@dataclass(frozen=True)
class Products:
    """What an untimed step ran: so many `operators`, and products up to the first with an operand of its formats.

    `low` says whether there was one, None where nobody knows which formats that would be. `count` products were looked
    at, and `operands` are the dtypes that they read. `attention` are the kernels that torch's attention took. `wide`
    says that native products had values of their formats in wider dtypes, and none codes; `looks_like` in what
    precision a product of the arithmetic really was, by its numbers, '' where it kept its promise. `kernels` are the
    names of those that multiplied in a profiled step, if there was one.
    """

    count: int
    low: bool | None
    operands: tuple[str, ...] = ()
    operators: int = 0
    attention: tuple[str, ...] = ()
    wide: bool = False
    looks_like: str = ""
    kernels: tuple[str, ...] = ()
