"""What bounds a phase: its counted FLOPs, bytes and launches over its time, beside what the device does at most.

And by Amdahl's law what a precision could give at most on a step. Values to values; words are made in report/.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import takewhile

from fp8bench.analysis.datasheet import datasheet_of, kind_of_path
from fp8bench.model import Ceiling, Ceilings, Finding, Level, Limit, Phase, Rate, Record
from fp8bench.model.measured import WIDEST_SPREAD
from fp8bench.model.step import PhaseCount

# A phase that has less of a step's FLOPs is none of its products.
_LEAST_OF_PRODUCTS = 0.05
# A phase that is further below all of its ceilings than this waits for none of them.
_NEAR = 0.5
# Operators that take so many times the least launch on average are hardly more than being started one by one.
_OVERHEAD = 10.0
# Runs that lie further apart than this say nothing of a device: somebody else had it.
_WILD = 0.5


class Bound(StrEnum):
    """What a phase waits for. Far below all ceilings that is either its operators' overhead, where they are so small,
    or something that no ceiling says: kernels that do not fit its shapes, latency, code between operators."""

    COMPUTE = "compute-bound"
    MEMORY = "memory-bound"
    LAUNCH = "launch-bound"
    OVERHEAD = "overhead-bound"
    NONE = "far below its ceilings"


@dataclass(frozen=True)
class Roofs:
    """What a device does at most in a second, by one source: FLOPs of products by kind ('fp8'), bytes, launches.

    `words` name the source. None where it does not say.
    """

    words: str
    products: Mapping[str, float]
    memory: float | None = None
    launches: float | None = None

    def least(self, count: PhaseCount, fused: bool = False) -> dict[Bound, float]:
        """Seconds that the FLOPs, the bytes and the launches of a phase take at least, each alone; nothing where the
        rate of a product or of the memory is not known: what takes longest would be a guess. Of what a compiler fused
        only the products are known."""
        products = self.product_seconds(count.by_path)
        if products is None or self.memory is None:
            return {}
        if fused:
            return {Bound.COMPUTE: products} if products else {}
        found = {
            Bound.COMPUTE: products,
            Bound.MEMORY: count.bytes / self.memory,
            Bound.LAUNCH: count.launches / self.launches if self.launches else None,
        }
        return {bound: seconds for bound, seconds in found.items() if seconds}

    def product_seconds(self, by_path: Iterable[tuple[str, int]]) -> float | None:
        """Of products, each in its dtype; None where the rate of one is not known."""
        seconds = 0.0
        for path, flops in by_path:
            rate = self.products.get(kind_of_path(path))
            if rate is None:
                return None
            seconds += flops / rate
        return seconds


@dataclass(frozen=True)
class PhaseRoof:
    """A phase's counts and its best-case seconds, with the least it takes by what was measured here, and by the
    datasheet. Of a `fused` one bytes and launches are those without a compiler."""

    count: PhaseCount
    seconds: float
    measured: Mapping[Bound, float]
    sheet: Mapping[Bound, float]
    fused: bool = False

    @property
    def flop_rate(self) -> float:
        return self.count.flops / self.seconds

    @property
    def byte_rate(self) -> float | None:
        return None if self.fused else self.count.bytes / self.seconds

    @property
    def intensity(self) -> float | None:
        """FLOPs for each byte; None where nothing is multiplied, or nothing moved, or nobody knows how much."""
        known = self.count.flops and self.count.bytes and not self.fused
        return self.count.flops / self.count.bytes if known else None

    @property
    def bound(self) -> Bound | None:
        """What takes longest of it at the ceilings, if that is half of the time at least; by the datasheet's where
        nothing was measured."""
        least = self.measured or self.sheet
        if not least:
            return None
        longest = max(least, key=lambda bound: least[bound])
        if least[longest] >= _NEAR * self.seconds:
            return longest
        if self.fused:
            return None
        return Bound.OVERHEAD if self.seconds < _OVERHEAD * least.get(Bound.LAUNCH, 0.0) else Bound.NONE

    @property
    def of_ceiling(self) -> float | None:
        """The least that it takes at the measured ceilings over what it took: 1 can not be done better."""
        return max(self.measured.values()) / self.seconds if self.measured else None

    @property
    def of_sheet(self) -> float | None:
        return max(self.sheet.values()) / self.seconds if self.sheet else None


@dataclass(frozen=True)
class Gain:
    """What a precision could give at most on its reference's step, and gives.

    Products take `share` of that step; `of_ceiling` is how near they come to their ceiling there. `most` is how many
    times as fast the step would be with these products at the precision's ceiling, without a cast, and all else as it
    is; `kernels` and `with_casts` how many times as fast the products are now, alone and with the casts. Where the runs
    of a rate that it rests on differ too much, it `binds` nothing: more may be had.
    """

    share: float
    of_ceiling: float
    most: float
    kernels: float
    with_casts: float
    cast_bytes: int
    product_bytes: int
    binds: bool = True


def bounds_of(ceiling: Ceiling) -> Roofs:
    """What nothing can be above: rates whose runs agree, and copies where they are fastest."""
    steady = [rate for rate in ceiling.rates if rate.steady]
    found = _measured(replace(ceiling, rates=tuple(steady)))
    return Roofs("measured here", found.products if found else {}, ceiling.bytes)


def roofs_of(ceiling: Ceiling | None) -> tuple[Roofs | None, Roofs | None]:
    """By what was measured here in several runs, and by the datasheet of that device; None where there is none."""
    if ceiling is None:
        return None, None
    return _measured(ceiling), _sheet(ceiling)


def _measured(ceiling: Ceiling) -> Roofs | None:
    values = [(one, one.value) for one in ceiling.rates if one.value is not None and one.spread <= _WILD]
    if not values:
        return None
    products: dict[str, float] = {}
    for rate, value in values:
        if rate.limit is Limit.PRODUCT:  # recipes of one format differ in what they add to its kernels
            kind = kind_of_path(rate.precision)
            products[kind] = max(value, products.get(kind, 0.0))
    memory = max((value for one, value in values if one.limit in (Limit.COPY, Limit.TRIAD)), default=None)
    launches = next((value for one, value in values if one.limit is Limit.LAUNCH), None)
    return Roofs("measured here", products, memory, launches)


def _sheet(ceiling: Ceiling) -> Roofs | None:
    sheet = datasheet_of(ceiling.device)
    if sheet is None:
        return None
    return Roofs(sheet.told("dense", "bandwidth"), sheet.dense, sheet.bandwidth)


def phase_roofs(record: Record, finding: Finding | None) -> tuple[PhaseRoof, ...]:
    """Every phase that was counted and timed, and is long enough to be told from its markers."""
    if record.tape is None or finding is None or not finding.best_seconds:
        return ()
    measured, sheet = roofs_of(record.ceiling)
    fused = bool(record.tape.fused)
    return tuple(
        PhaseRoof(
            count,
            seconds,
            measured.least(count, fused) if measured else {},
            sheet.least(count, fused) if sheet else {},
            fused,
        )
        for phase, seconds in finding.phases
        if 0 < seconds < math.inf and phase not in finding.below_floor and (count := record.tape.of(phase)) is not None
    )


def gain_of(record: Record, finding: Finding, reference: Record, lead: Finding) -> Gain | None:
    """Of a native precision; None of an emulated one, which has no speed, and where ceilings or counts are missing."""
    measured, _ = roofs_of(record.ceiling)
    own, base = phase_roofs(record, finding), phase_roofs(reference, lead)
    if measured is None or record.support.level is Level.EMULATED or not lead.best_seconds:
        return None
    own_products, products = _products(own), _products(base)
    before, after = (sum(roof.seconds for roof in found) for found in (products, own_products))
    paths = [[path for roof in found for path in roof.count.by_path] for found in (products, own_products)]
    least, at_best = (measured.product_seconds(path) for path in paths)
    if not least or not at_best or not after:
        return None
    kinds = {kind_of_path(path) for found in paths for path, _ in found}
    casts = [roof for roof in own if roof.count.phase == Phase.CAST]
    return Gain(
        before / lead.best_seconds, least / before, lead.best_seconds / (lead.best_seconds - before + at_best),
        before / after, before / (after + sum(cast.seconds for cast in casts)),
        sum(cast.count.bytes for cast in casts), sum(product.count.bytes for product in own_products),
        all(steady for kind, steady in _steadiness(record.ceiling).items() if kind in kinds),
    )  # fmt: skip


def _steadiness(ceiling: Ceiling | None) -> dict[str, bool]:
    """Of each kind of products whether the runs of its best rate agree."""
    rates = ceiling.rates if ceiling is not None else ()
    known = sorted(
        (rate for rate in rates if rate.runs and rate.limit is Limit.PRODUCT), key=lambda rate: rate.value or 0.0
    )
    return {kind_of_path(rate.precision): rate.steady for rate in known}


def _products(roofs: Sequence[PhaseRoof]) -> list[PhaseRoof]:
    flops = sum(roof.count.flops for roof in roofs)
    return [roof for roof in roofs if roof.count.flops > _LEAST_OF_PRODUCTS * flops]


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
    return [ceilings for ceilings in before if (ceilings.device, ceilings.under) == (found.device, found.under)]
