"""A run as plain figures with names, for programs that draw curves of such."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from fp8bench.analysis.energy import energy_figures, energy_ratio
from fp8bench.model import Finding, Level, Measurement, Record, Run, Status


@dataclass(frozen=True)
class Figure:
    """`tag` is the same for all precisions of a group, so that their curves share a chart; `mode` tells them apart."""

    mode: str
    tag: str
    value: float


def figures(run: Run, findings: Mapping[str, Finding]) -> Iterator[Figure]:
    """What each case that was measured has come to. SI units and plain ratios; what is not finite is left out."""
    references = {record.case.setting: record for record in run.records if record.is_reference}
    for record in run.records:
        if record.status is Status.OK:
            finding = findings.get(record.case.id)
            energy = _energy(record, finding, references.get(record.case.setting))
            for name, value in (*_figures(record, finding), *energy):
                if value is not None and math.isfinite(value):
                    yield Figure(record.case.mode, _tag(record, name), value)


def _tag(record: Record, name: str) -> str:
    """'gemm/best_seconds m=512,n=512@cpu': boards show what follows the last slash, and cut it at its end.

    A version of a workload that does not compare with the first has charts of its own.
    """
    case = record.case
    version = "" if case.version == "1" else f" v{case.version}"
    params = ",".join(f"{name}={value}" for name, value in case.params)
    return f"{case.workload}{version}/{name} {params}@{case.device}"


def _figures(record: Record, finding: Finding | None) -> Iterator[tuple[str, float | None]]:
    # What an emulation costs is no speed, and shares no chart with one.
    kind = "emulation_" if record.support.level is Level.EMULATED else ""
    if finding is not None:
        yield f"{kind}best_seconds", finding.best_seconds
        yield f"{kind}median_seconds", finding.median_seconds
        if finding.ratio is not None:
            yield "ratio", finding.ratio.point
            yield "ratio_low", finding.ratio.low
            yield "ratio_high", finding.ratio.high
        yield "labels", float(len(finding.labels))
        for phase, seconds in finding.phases:
            if seconds:
                yield f"{kind}phase_{phase}_seconds", seconds
    for measurement in record.measurements:
        yield _name(measurement), statistics.median(measurement.samples) if measurement.samples else None


def _energy(record: Record, finding: Finding | None, reference: Record | None) -> Iterator[tuple[str, float | None]]:
    kind = "emulation_" if record.support.level is Level.EMULATED else ""
    found = energy_figures(record, finding)
    if found is None:
        return
    yield f"{kind}energy_joules", found.gross.middle
    yield f"{kind}energy_net_joules", found.net.middle if found.net else None
    for name, joules in found.per:
        yield f"{kind}energy_per_{name}_joules", joules
    yield f"{kind}power_watts", found.watts
    yield "idle_power_watts", found.idle
    ratio = energy_ratio(record, reference)
    if ratio is not None:
        yield "energy_ratio", ratio.point
        yield "energy_ratio_low", ratio.low
        yield "energy_ratio_high", ratio.high


def _name(measurement: Measurement) -> str:
    return f"{measurement.metric}_bytes" if measurement.unit == "B" else measurement.metric


def moment(run: Run) -> int:
    """When a run stands on a curve, in seconds since 1970: its commit's date, or its own start if files had changed."""
    date, dirty = run.environment.get("commit_date"), run.environment.get("dirty")
    if isinstance(date, int) and not isinstance(date, bool) and dirty is False and date > 0:
        return date // 1000
    try:
        return max(0, int(datetime.fromisoformat(run.started).timestamp()))
    except (ValueError, OverflowError):
        return 0
