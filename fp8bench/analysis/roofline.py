"""Finds what limits a phase: its FLOPs, bytes and launches per second, compared with the peaks of the device.

Also the largest possible gain of a precision on a step, by Amdahl's law. Vendors' figures are in datasheet.toml.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from importlib.resources import files
from itertools import chain
from typing import Any

from fp8bench.model import Ceiling, Finding, Limit, Phase, Record
from fp8bench.model.step import PhaseCount

# A phase with a smaller share of a step's FLOPs does not count towards its products.
_LEAST_OF_PRODUCTS = 0.05
# A phase below this share of all its ceilings is not limited by any of them.
_NEAR = 0.5
# Operators that take less than this many times the shortest launch are mostly overhead.
_OVERHEAD = 10.0
# A rate whose runs differ by more than this is not used: something else used the device.
_WILD = 0.5


class Bound(StrEnum):
    """The limits of a phase. Far below all ceilings that is operator overhead, if operators are small, or something
    that no ceiling shows: kernels that do not fit its shapes, latency, code between operators."""

    COMPUTE = "compute-bound"
    MEMORY = "memory-bound"
    LAUNCH = "launch-bound"
    OVERHEAD = "overhead-bound"
    NONE = "far below its ceilings"


@dataclass(frozen=True)
class Roofs:
    """The peaks of a device per second, from one source: FLOPs of products by kind ('fp8'), bytes, launches.

    `words` name the source. None means unknown.
    """

    words: str
    products: Mapping[str, float]
    memory: float | None = None
    launches: float | None = None

    def least(self, count: PhaseCount, fused: bool = False) -> dict[Bound, float]:
        """Returns the least seconds that FLOPs, bytes and launches of a phase take, each alone.

        Empty if the FLOPs of an operator, the rate of a product or of the memory are unknown, since the bottleneck
        would be a guess. For phases that a compiler fused, only the products are known.
        """
        products = self.product_seconds(count.by_path)
        if count.unknown or products is None or self.memory is None:
            return {}
        if fused:
            return {Bound.COMPUTE: products} if products else {}
        seconds_by_bound = {
            Bound.COMPUTE: products,
            Bound.MEMORY: count.bytes / self.memory,
            Bound.LAUNCH: count.launches / self.launches if self.launches else None,
        }
        return {bound: seconds for bound, seconds in seconds_by_bound.items() if seconds}

    def product_seconds(self, by_path: Iterable[tuple[str, int]]) -> float | None:
        """Returns the least seconds of products, each in its dtype; None if a rate is unknown."""
        seconds = 0.0
        for path, flops in by_path:
            rate = self.products.get(kind_of_path(path))
            if rate is None:
                return None
            seconds += flops / rate
        return seconds


@dataclass(frozen=True)
class PhaseRoof:
    """A phase's counts and best-case seconds, and its least time by measured ceilings and by the datasheet.

    The bytes and launches of a `fused` phase are those without a compiler.
    """

    count: PhaseCount
    seconds: float
    measured: Mapping[Bound, float]
    sheet: Mapping[Bound, float]
    fused: bool = False

    @property
    def flop_rate(self) -> float | None:
        """FLOPs a second; None if there are zero, or an operator's are unknown."""
        return None if self.count.unknown or not self.count.flops else self.count.flops / self.seconds

    @property
    def byte_rate(self) -> float | None:
        return None if self.fused else self.count.bytes / self.seconds

    @property
    def intensity(self) -> float | None:
        """FLOPs for each byte; None if either is 0, or bytes are unknown."""
        if not self.flop_rate or not self.count.bytes or self.fused:
            return None
        return self.count.flops / self.count.bytes

    @property
    def bound(self) -> Bound | None:
        """The resource that takes longest at the ceilings (the datasheet's, if none were measured), if at least half of
        the phase's time."""
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
        """The least time at the measured ceilings over the actual time; 1 cannot be improved."""
        return max(self.measured.values()) / self.seconds if self.measured else None

    @property
    def of_sheet(self) -> float | None:
        return max(self.sheet.values()) / self.seconds if self.sheet else None


@dataclass(frozen=True)
class Gain:
    """The largest possible gain of a precision over its reference's step, and the actual one.

    Products take `share` of that step, and reach `of_ceiling` of their ceiling. With these products at the precision's
    ceiling and no casts, the step would be `most` times as fast; `kernels` and `with_casts` are the actual factors of
    the products, without and with casts. `binds` is False if runs of a rate behind it differ too much: more may be
    possible.
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
    """Returns upper bounds for checks: rates whose runs agree, and the fastest copies."""
    steady = [rate for rate in ceiling.rates if rate.steady]
    roofs = _measured_roofs(replace(ceiling, rates=tuple(steady)))
    return Roofs("measured here", roofs.products if roofs else {}, ceiling.bytes)


def roofs_of(ceiling: Ceiling | None) -> tuple[Roofs | None, Roofs | None]:
    """Returns the roofs measured on this machine, and those of the datasheet; None for missing ones."""
    if ceiling is None:
        return None, None
    sheet = datasheet_of(ceiling.device)
    published = Roofs(sheet.cite("dense", "bandwidth"), sheet.dense, sheet.bandwidth) if sheet else None
    return _measured_roofs(ceiling), published


def _measured_roofs(ceiling: Ceiling) -> Roofs | None:
    values = [(rate, rate.value) for rate in ceiling.rates if rate.value is not None and rate.spread <= _WILD]
    if not values:
        return None
    products: dict[str, float] = {}
    for rate, value in values:
        if rate.limit is Limit.PRODUCT:  # recipes of one format differ only in the work around its kernels
            kind = kind_of_path(rate.precision)
            products[kind] = max(value, products.get(kind, 0.0))
    memory = max((value for rate, value in values if rate.limit in (Limit.COPY, Limit.TRIAD)), default=None)
    launches = next((value for rate, value in values if rate.limit is Limit.LAUNCH), None)
    return Roofs("measured here", products, memory, launches)


def phase_roofs(record: Record, finding: Finding | None) -> tuple[PhaseRoof, ...]:
    """Returns every counted and timed phase that is much longer than its markers.

    Yields nothing if operators bypassed torch, because they may have run in any phase.
    """
    if record.tape is None or finding is None or not finding.best_seconds:
        return ()
    past = record.tape.unwritten
    counts = {count.phase: replace(count, unknown=count.unknown + past) for count in record.tape.phases}
    measured, sheet = roofs_of(record.ceiling)
    fused = bool(record.tape.fused)
    roofs = []
    for phase, seconds in finding.phases:
        count = counts.get(phase)
        if count is None or phase in finding.below_floor or not 0 < seconds < math.inf:
            continue
        by_measured = measured.least(count, fused) if measured else {}
        by_sheet = sheet.least(count, fused) if sheet else {}
        roofs.append(PhaseRoof(count, seconds, by_measured, by_sheet, fused))
    return tuple(roofs)


def gain_of(record: Record, finding: Finding, reference: Record, reference_finding: Finding) -> Gain | None:
    """Returns the possible gain; None for emulated precisions, which have no speed, and if ceilings or counts are
    missing."""
    ceilings, _ = roofs_of(record.ceiling)
    roofs, base_roofs = phase_roofs(record, finding), phase_roofs(reference, reference_finding)
    step = reference_finding.best_seconds
    if ceilings is None or record.support.is_emulated or not step:
        return None
    if any(roof.count.unknown for roof in (*roofs, *base_roofs)):
        return None
    # 1. The products of both steps: their seconds, and their least possible seconds.
    products, base_products = _product_roofs(roofs), _product_roofs(base_roofs)
    seconds, base_seconds = (sum(roof.seconds for roof in part) for part in (products, base_products))
    flops_by_path, base_flops_by_path = _list_paths(products), _list_paths(base_products)
    least, base_least = (ceilings.product_seconds(flops) for flops in (flops_by_path, base_flops_by_path))
    if not base_least or not least or not seconds:
        return None
    # 2. The casts that the precision adds.
    casts = [roof for roof in roofs if roof.count.phase == Phase.CAST]
    kinds = {kind_of_path(path) for path, _ in (*flops_by_path, *base_flops_by_path)}
    steadiness = _steadiness(record.ceiling)
    return Gain(
        base_seconds / step,
        base_least / base_seconds,
        step / (step - base_seconds + least),
        base_seconds / seconds,
        base_seconds / (seconds + sum(cast.seconds for cast in casts)),
        sum(cast.count.bytes for cast in casts),
        sum(product.count.bytes for product in products),
        all(steady for kind, steady in steadiness.items() if kind in kinds),
    )


def _list_paths(roofs: Sequence[PhaseRoof]) -> list[tuple[str, int]]:
    return list(chain.from_iterable(roof.count.by_path for roof in roofs))


def _steadiness(ceiling: Ceiling | None) -> dict[str, bool]:
    """Returns for each kind of products whether the runs of its best rate agree."""
    rates = [rate for rate in ceiling.rates if rate.runs and rate.limit is Limit.PRODUCT] if ceiling is not None else []
    rates.sort(key=lambda rate: rate.value or 0.0)
    return {kind_of_path(rate.precision): rate.steady for rate in rates}


def _product_roofs(roofs: Sequence[PhaseRoof]) -> list[PhaseRoof]:
    flops = sum(roof.count.flops for roof in roofs)
    return [roof for roof in roofs if roof.count.flops > _LEAST_OF_PRODUCTS * flops]


# The kind of product by the beginning of a dtype's name; the first match counts.
_PATHS = {
    "fp32": "fp32",
    "tf32": "tf32",
    "bf16": "bf16",
    "fp16": "fp16",
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "fp8": "fp8",
    "mxfp8": "fp8",
    "float8": "fp8",
    "e4m3": "fp8",
    "e5m2": "fp8",
    "mxfp6": "fp6",
    "mxfp4": "fp4",
    "nvfp4": "fp4",
    "float4": "fp4",
    "e2m1": "fp4",
    "fp4": "fp4",
}


@dataclass(frozen=True)
class Datasheet:
    """Figures of one device as torch counts them: FLOPs per second by path, bytes per second, watts, with source and
    date.

    `unverified` are fields not checked against a vendor document. `sparse` needs operands with 2:4 structure, and does
    not apply to anything measured here. `exceptions` explain unusual ratios of two fields. `capacity` is bytes of
    memory, `link` bytes per second to other devices of a node, one way; None if unknown. Devices marked `published`
    were never measured. `lacks` maps precisions to the reason why a figure of the document does not apply.
    """

    name: str
    match: tuple[str, ...]
    source: str
    date: str
    dense: Mapping[str, float]
    bandwidth: float
    sparse: Mapping[str, float] = field(default_factory=dict)
    watts: float | None = None
    capacity: float | None = None
    link: float | None = None
    published: bool = False
    unverified: tuple[str, ...] = ()
    exceptions: Mapping[str, str] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)

    def peak(self, path: str) -> float | None:
        """Returns the peak of products in a dtype or precision; None if unknown."""
        return self.dense.get(kind_of_path(path))

    def cite(self, *figures: str) -> str:
        """Returns 'datasheet', or that it is unverified if one of these fields is."""
        return "datasheet, unverified" if {*figures} & {*self.unverified} else "datasheet"


def kind_of_path(path: str) -> str:
    """Returns the column of the table for a path of products: 'fp8' for 'e4m3fn'; '' for anything else."""
    return next((kind for word, kind in _PATHS.items() if path.startswith(word)), "")


@cache
def datasheets() -> tuple[Datasheet, ...]:
    text = files(__package__).joinpath("datasheet.toml").read_text(encoding="utf-8")
    return tuple(datasheet_from(entry) for entry in tomllib.loads(text)["device"])


def datasheet_from(entry: Mapping[str, Any]) -> Datasheet:
    """Converts an entry of the file, which counts in TFLOP/s, GB/s and GB."""
    fields = dict(entry)
    fields["date"] = str(entry["date"])
    for kind in ("dense", "sparse"):
        fields[kind] = {name: 1e12 * value for name, value in entry.get(kind, {}).items()}
    for name in ("match", "unverified"):
        fields[name] = tuple(entry.get(name, ()))
    for name in ("bandwidth", "capacity", "link"):
        if name in entry:
            fields[name] = 1e9 * entry[name]
    return Datasheet(**fields)


def datasheet_of(device: str) -> Datasheet | None:
    """Returns the datasheet whose words match the device's name best; None for an unknown device.

    A slice (MIG) of a device has an unknown share of its peaks, so it has none.
    """
    if "MIG" in device:
        return None
    longest, fitting = 0, None
    for datasheet in datasheets():
        for words in datasheet.match:
            if len(words) > longest and re.search(rf"\b{re.escape(words)}\b", device):
                longest, fitting = len(words), datasheet
    return fitting
