"""What a history is made of: series of points, a point for every run."""

from __future__ import annotations

from dataclasses import dataclass

from fp8bench.model.planned import Scalar
from fp8bench.model.words import Status

Cell = tuple[Scalar, ...]


@dataclass(frozen=True)
class Series:
    """One metric of a workload over its declared grid: what asv calls a benchmark. Lower is better, always.

    `name` is asv's ('gemm.Gemm.track_time'). `params` are the values of each parameter, the dtype first; a cell is one
    of each. Points of different versions do not compare.
    """

    name: str
    workload: str
    metric: str
    unit: str
    param_names: tuple[str, ...]
    params: tuple[tuple[Scalar, ...], ...]
    version: str


@dataclass(frozen=True)
class Point:
    """What one run says of one cell of a series: raw samples in the series' unit.

    OK without samples means that the case has no such number (an emulated one no speed); `reason` is that of a case
    that was skipped or failed. A `hasty` one comes from a few rounds, to see that something runs.
    """

    series: str
    cell: Cell
    version: str
    samples: tuple[float, ...]
    status: Status = Status.OK
    reason: str = ""
    hasty: bool = False
