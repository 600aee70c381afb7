"""Finds what limits a phase by comparing its FLOPs, bytes and launches per second with the peaks of the device.

This module also computes by Amdahl's law how much a precision can gain over a whole step. Peaks from vendors are in
datasheet.toml.
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

# A phase counts as a phase with products if it has at least this share of the step's FLOPs.
_MIN_PRODUCT_FLOPS_SHARE = 0.05
# If a phase reaches less than this share of every ceiling, no ceiling limits it.
_NEAR_CEILING_SHARE = 0.5
# A phase is limited by overhead if it takes less than this many times the time of its launches.
_OVERHEAD_LAUNCH_TIME_RATIO = 10.0
# A measured peak is ignored if its runs differ by more than this share, because other programs then used the device.
_MAX_MEASURED_RATE_SPREAD = 0.5


class LimitingResource(StrEnum):
    """The resource that limits a phase.

    A phase that is far slower than its peaks allow is limited by overhead if its operators are small. For other such
    phases, the limit is unknown. It may be kernels that do not fit the phase's shapes, latency, or code between
    operators.
    """

    COMPUTE = "compute-bound"
    MEMORY = "memory-bound"
    LAUNCH = "launch-bound"
    OVERHEAD = "overhead-bound"
    NONE = "far below its ceilings"


@dataclass(frozen=True)
class DevicePeaks:
    """The peaks of a device per second: FLOPs by kind of product ('fp8'), bytes and launches. A peak of None is
    unknown.

    All peaks are from one source, which `words` names.
    """

    words: str
    products: Mapping[str, float]
    memory: float | None = None
    launches: float | None = None

    def min_seconds_by_resource(self, count: PhaseCount, is_fused: bool = False) -> dict[LimitingResource, float]:
        """Returns the least seconds that a phase needs at the device's peaks: for its FLOPs, its bytes and its
        launches.

        Returns {} if an operator's FLOPs, a product's peak or the memory's peak is unknown, because the bottleneck
        would be a guess. For phases that a compiler fused, returns only the seconds of the matrix products.
        """
        product_seconds = self.product_seconds(count.by_path)
        if count.unknown or product_seconds is None or self.memory is None:
            return {}
        if is_fused:
            return {LimitingResource.COMPUTE: product_seconds} if product_seconds else {}
        seconds_by_resource = {
            LimitingResource.COMPUTE: product_seconds,
            LimitingResource.MEMORY: count.bytes / self.memory,
            LimitingResource.LAUNCH: count.launches / self.launches if self.launches else None,
        }
        return {resource: seconds for resource, seconds in seconds_by_resource.items() if seconds}

    def product_seconds(self, by_path: Iterable[tuple[str, int]]) -> float | None:
        """Returns the least seconds that matrix products need at the device's peaks. `by_path` has pairs of a dtype or
        recipe and its FLOPs. Returns None if a peak is unknown.
        """
        seconds = 0.0
        for path, flops in by_path:
            rate = self.products.get(product_kind_of(path))
            if rate is None:
                return None
            seconds += flops / rate
        return seconds


@dataclass(frozen=True)
class PhaseRoofline:
    """The FLOPs, bytes and launches of a phase, its best-case seconds, and the least seconds that it could take at the
    measured peaks and at the datasheet's peaks.

    If a compiler fused the phase's operations (`is_fused`), bytes and launches are those without the compiler.
    """

    count: PhaseCount
    seconds: float
    measured_min_seconds: Mapping[LimitingResource, float]
    datasheet_min_seconds: Mapping[LimitingResource, float]
    is_fused: bool = False

    @property
    def flop_rate(self) -> float | None:
        """FLOPs per second. None if the phase has no FLOPs, or if an operator's FLOPs are unknown."""
        return None if self.count.unknown or not self.count.flops else self.count.flops / self.seconds

    @property
    def byte_rate(self) -> float | None:
        return None if self.is_fused else self.count.bytes / self.seconds

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte. None if the FLOPs or the bytes are 0 or unknown."""
        if not self.flop_rate or not self.count.bytes or self.is_fused:
            return None
        return self.count.flops / self.count.bytes

    @property
    def limiting_resource(self) -> LimitingResource | None:
        """The resource that limits the phase: the one that takes longest at the device's peaks, if it takes at least
        half of the phase's time. If no peaks were measured, the datasheet's peaks are used.
        """
        min_seconds = self.measured_min_seconds or self.datasheet_min_seconds
        if not min_seconds:
            return None
        slowest_resource = max(min_seconds, key=lambda bound: min_seconds[bound])
        if min_seconds[slowest_resource] >= _NEAR_CEILING_SHARE * self.seconds:
            return slowest_resource
        if self.is_fused:
            return None
        return (
            LimitingResource.OVERHEAD
            if self.seconds < _OVERHEAD_LAUNCH_TIME_RATIO * min_seconds.get(LimitingResource.LAUNCH, 0.0)
            else LimitingResource.NONE
        )

    @property
    def share_of_ceiling(self) -> float | None:
        """The least time of the phase at the measured peaks, divided by its actual time. If the share is 1, the phase
        cannot be faster.
        """
        return max(self.measured_min_seconds.values()) / self.seconds if self.measured_min_seconds else None

    @property
    def share_of_datasheet(self) -> float | None:
        return max(self.datasheet_min_seconds.values()) / self.seconds if self.datasheet_min_seconds else None


@dataclass(frozen=True)
class PossibleSpeedup:
    """The largest possible speed-up of a precision over its reference's step, and the actual speed-up.

    Products take `share` of the reference's step, and reach `share_of_ceiling` of their peak in that step. The step
    would be `max_speedup` times as fast if the precision's products ran at their peak and needed no casts.
    `speedup_without_casts` and `speedup_with_casts` are the actual speed-ups of the products. If `is_upper_bound` is
    False, a peak is uncertain, so a larger speed-up than `max_speedup` is possible.
    """

    share: float
    share_of_ceiling: float
    max_speedup: float
    speedup_without_casts: float
    speedup_with_casts: float
    cast_bytes: int
    product_bytes: int
    is_upper_bound: bool = True


def upper_bounds_of(ceiling: Ceiling) -> DevicePeaks:
    """Returns peaks that no claim may exceed: measured peaks of products, if repeated measurements agree, and the rate
    of the fastest copies.
    """
    steady_rates = [rate for rate in ceiling.rates if rate.is_steady]
    roofs = _collect_measured_roofs(replace(ceiling, rates=tuple(steady_rates)))
    return DevicePeaks("measured here", roofs.products if roofs else {}, ceiling.bytes)


def collect_roofs(ceiling: Ceiling | None) -> tuple[DevicePeaks | None, DevicePeaks | None]:
    """Returns two sets of peaks: those measured on this machine, and those of the datasheet. A missing set is None."""
    if ceiling is None:
        return None, None
    datasheet = find_datasheet(ceiling.device)
    datasheet_roofs = (
        DevicePeaks(datasheet.cite_figures("dense", "bandwidth"), datasheet.dense, datasheet.bandwidth)
        if datasheet
        else None
    )
    return _collect_measured_roofs(ceiling), datasheet_roofs


def _collect_measured_roofs(ceiling: Ceiling) -> DevicePeaks | None:
    rate_value_pairs = [
        (rate, rate.value)
        for rate in ceiling.rates
        if rate.value is not None and rate.spread <= _MAX_MEASURED_RATE_SPREAD
    ]
    if not rate_value_pairs:
        return None
    products: dict[str, float] = {}
    for rate, value in rate_value_pairs:
        if rate.limit is Limit.PRODUCT:  # all recipes of a format use the same kernels
            kind = product_kind_of(rate.precision)
            products[kind] = max(value, products.get(kind, 0.0))
    bytes_per_second = max(
        (value for rate, value in rate_value_pairs if rate.limit in (Limit.COPY, Limit.TRIAD)), default=None
    )
    launches_per_second = next((value for rate, value in rate_value_pairs if rate.limit is Limit.LAUNCH), None)
    return DevicePeaks("measured here", products, bytes_per_second, launches_per_second)


def find_phase_roofs(record: Record, finding: Finding | None) -> tuple[PhaseRoofline, ...]:
    """Returns the roofline figures of each phase. Phases without counts or time are left out, and so are phases that
    are too short for their markers.

    If operators bypassed torch, the FLOPs of every phase are unknown, because these operators may belong to any
    phase.
    """
    if record.tape is None or finding is None or not finding.best_seconds:
        return ()
    bypassed_operator_count = record.tape.unwritten
    counts = {
        count.phase: replace(count, unknown=count.unknown + bypassed_operator_count) for count in record.tape.phases
    }
    measured_roofs, datasheet_roofs = collect_roofs(record.ceiling)
    is_fused = bool(record.tape.fused)
    roofs = []
    for phase, seconds in finding.phases:
        count = counts.get(phase)
        if count is None or phase in finding.below_floor or not 0 < seconds < math.inf:
            continue
        measured_seconds = measured_roofs.min_seconds_by_resource(count, is_fused) if measured_roofs else {}
        datasheet_seconds = datasheet_roofs.min_seconds_by_resource(count, is_fused) if datasheet_roofs else {}
        roofs.append(PhaseRoofline(count, seconds, measured_seconds, datasheet_seconds, is_fused))
    return tuple(roofs)


def compute_possible_speedup(
    record: Record, finding: Finding, reference: Record, reference_finding: Finding
) -> PossibleSpeedup | None:
    """Returns the largest possible and the actual speed-up of a precision. Returns None if the precision is emulated,
    if peaks or counts are unknown, or if the case's step marks its products but the reference's does not.
    """
    ceilings, _ = collect_roofs(record.ceiling)
    roofs, base_roofs = find_phase_roofs(record, finding), find_phase_roofs(reference, reference_finding)
    reference_step_seconds = reference_finding.best_seconds
    if ceilings is None or record.support.is_emulated or not reference_step_seconds:
        return None
    if any(roof.count.unknown for roof in (*roofs, *base_roofs)):
        return None
    # 1. Find the phases with products in the steps of case and reference, their seconds, and the least seconds at the
    # peaks.
    product_roofs, base_product_roofs = _select_product_roofs(roofs), _select_product_roofs(base_roofs)
    seconds, base_seconds = (sum(roof.seconds for roof in part) for part in (product_roofs, base_product_roofs))
    flops_by_path, base_flops_by_path = _list_flops_by_path(product_roofs), _list_flops_by_path(base_product_roofs)
    min_seconds, base_min_seconds = (ceilings.product_seconds(flops) for flops in (flops_by_path, base_flops_by_path))
    if not base_min_seconds or not min_seconds or not seconds:
        return None
    # A reference without phases counts its products together with other work, so their time is unknown.
    are_products_marked = [
        Phase.GEMM in {roof.count.phase for roof in part} for part in (product_roofs, base_product_roofs)
    ]
    if are_products_marked == [True, False]:
        return None
    # 2. Find the casts that the precision adds.
    cast_phase_roofs = [roof for roof in roofs if roof.count.phase == Phase.CAST]
    product_kinds = {product_kind_of(path) for path, _ in (*flops_by_path, *base_flops_by_path)}
    is_steady_by_kind = _find_rate_steadiness(record.ceiling)
    return PossibleSpeedup(
        base_seconds / reference_step_seconds,
        base_min_seconds / base_seconds,
        reference_step_seconds / (reference_step_seconds - base_seconds + min_seconds),
        base_seconds / seconds,
        base_seconds / (seconds + sum(cast.seconds for cast in cast_phase_roofs)),
        sum(cast.count.bytes for cast in cast_phase_roofs),
        sum(product.count.bytes for product in product_roofs),
        all(steady for kind, steady in is_steady_by_kind.items() if kind in product_kinds),
    )


def _list_flops_by_path(roofs: Sequence[PhaseRoofline]) -> list[tuple[str, int]]:
    return list(chain.from_iterable(roof.count.by_path for roof in roofs))


def _find_rate_steadiness(ceiling: Ceiling | None) -> dict[str, bool]:
    """Returns for each kind of product whether its highest measured rate is certain: whether repeated measurements of
    this rate agree.
    """
    rates = [rate for rate in ceiling.rates if rate.runs and rate.limit is Limit.PRODUCT] if ceiling is not None else []
    # The highest rate of a kind comes last, so that it replaces the others in the dictionary.
    rates.sort(key=lambda rate: rate.value or 0.0)
    return {product_kind_of(rate.precision): rate.is_steady for rate in rates}


def _select_product_roofs(roofs: Sequence[PhaseRoofline]) -> list[PhaseRoofline]:
    flops = sum(roof.count.flops for roof in roofs)
    return [roof for roof in roofs if roof.count.flops > _MIN_PRODUCT_FLOPS_SHARE * flops]


# Maps the beginning of a dtype's name to the kind of product. The first match counts.
_KIND_BY_DTYPE_PREFIX = {
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
    """The datasheet of one device in torch's units: FLOP/s by kind of product, bytes per second and watts, with
    source and date.

    `unverified` lists fields that were not checked against a document of the vendor. `sparse` peaks need operands
    with 2:4 structure and apply to nothing measured here. `exceptions` explains unusual ratios between fields.
    `capacity` is the memory in bytes, and `link` the bytes per second to other devices of a node in one direction.
    Devices marked `published` were never measured by fp8bench. `lacks` maps precisions to the reason why a figure
    does not apply.
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
        """Returns the peak FLOP/s of products in a dtype or precision, or None if unknown."""
        return self.dense.get(product_kind_of(path))

    def cite_figures(self, *figures: str) -> str:
        """Returns 'datasheet', or 'datasheet, unverified' if any of the fields in `figures` is unverified."""
        return "datasheet, unverified" if {*figures} & {*self.unverified} else "datasheet"


def product_kind_of(path: str) -> str:
    """Returns the kind of product for the name of a dtype or recipe, like 'fp8' for 'e4m3fn', or '' for unknown
    names.
    """
    return next((kind for prefix, kind in _KIND_BY_DTYPE_PREFIX.items() if path.startswith(prefix)), "")


@cache
def load_datasheets() -> tuple[Datasheet, ...]:
    text = files(__package__).joinpath("datasheet.toml").read_text(encoding="utf-8")
    return tuple(parse_datasheet(device_table) for device_table in tomllib.loads(text)["device"])


def parse_datasheet(device_table: Mapping[str, Any]) -> Datasheet:
    """Converts an entry of datasheet.toml from TFLOP/s, GB/s and GB to FLOP/s, bytes per second and bytes."""
    fields = dict(device_table)
    fields["date"] = str(device_table["date"])
    for kind in ("dense", "sparse"):
        fields[kind] = {name: 1e12 * value for name, value in device_table.get(kind, {}).items()}
    for name in ("match", "unverified"):
        fields[name] = tuple(device_table.get(name, ()))
    for name in ("bandwidth", "capacity", "link"):
        if name in device_table:
            fields[name] = 1e9 * device_table[name]
    return Datasheet(**fields)


def find_datasheet(device: str) -> Datasheet | None:
    """Returns the datasheet of a device, or None for an unknown device. If several datasheets fit the device's name,
    the longest match counts.

    A MIG slice has no datasheet, because its share of the device's peaks is unknown.
    """
    if "MIG" in device:
        return None
    longest_match, best_match = 0, None
    for datasheet in load_datasheets():
        for words in datasheet.match:
            # Match whole words, so that 'A10' does not fit 'A100'.
            if len(words) > longest_match and re.search(rf"\b{re.escape(words)}\b", device):
                longest_match, best_match = len(words), datasheet
    return best_match
