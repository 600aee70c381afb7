"""Replays recorded amaxes through every history, margin, interval and algorithm of delayed scaling, without training.

The scales are those that a training would have had on the same tensors, bit by bit, in float32 as in
nn/tensor_scales.py; a test compares the two. How other scales would have changed the tensors is not included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from fp8bench.errors import UnknownName, UsageError
from fp8bench.features.train.values import Arm, LayerReading, StreamLine, Training
from fp8bench.formats.recipes import FORMATS_BY_ROLE, Amax, Delayed
from fp8bench.protocols import Role
from fp8bench.registry import precisions

Floats = NDArray[np.float32]

# Every combination of histories, margins and intervals.
DELAYED_WAYS = tuple(
    Delayed(history, Amax.MOST_RECENT if history == 1 else Amax.MAX, margin, interval)
    for history, margin, interval in product((1, 4, 16, 64, 256, 1024), (0, 1, 2), (1, 4, 16))
)
_ROLES = (Role.INPUT, Role.WEIGHT, Role.GRADIENT)
_LARGEST_FACTOR = np.float32(2.0**126)
# A scaled amax may exceed the largest value by the rounding of quotient and product: it loses nothing.
_ROUNDED = 1 + 2.0**-22


@dataclass(frozen=True)
class Trace:
    """The largest magnitudes of one tensor, cast by cast, and the smallest above 0 where they were recorded."""

    layer: str
    role: Role
    amax: tuple[float, ...]
    smallest: tuple[float, ...] = ()


@dataclass(frozen=True)
class Replayed:
    """What one way of scaling would have done to all tensors of one role, as shares of their casts: `overflow` of those
    cut off, by at most `worst` octaves, `underflow` of those whose smallest value would have become 0, None where that
    was not recorded. `idle` are the octaves that the others left unused, in the mean."""

    delayed: Delayed
    role: Role
    casts: int
    overflow: float
    worst: float
    underflow: float | None
    idle: float


def traces_of(training: Training, lines: Iterable[StreamLine], arm: Arm) -> tuple[Trace, ...]:
    """All tensors that an arm casts, in all seeds. Raises UsageError unless every cast was recorded."""
    batches = arm.taken(training.request.settings).micro_batches
    if batches > 1:
        raise UsageError(
            f"{arm.name} casts each tensor {batches} times a step, and keeps one amax. Train with --micro-batches 1."
        )
    tensors: dict[tuple[str, Role, int], dict[int, LayerReading]] = {}
    for line in lines:
        if isinstance(line, LayerReading) and line.arm == arm.name and line.role in _ROLES:
            tensors.setdefault((line.layer, Role(line.role), line.seed), {})[line.step] = line
    if not tensors:
        raise UsageError(f"{arm.name} was not watched, so that there are no amaxes. Train with --stride 1.")
    for (layer, role, _), readings in tensors.items():
        if max(readings) + 1 != len(readings):
            raise UsageError(
                f"{layer} {role} in {arm.name} has {len(readings)} amaxes in {max(readings) + 1} steps: --stride 1."
            )
    cast = _layers_cast(line for readings in tensors.values() for line in readings.values())
    traces = []
    for (layer, role, _), readings in tensors.items():
        if layer in cast:
            ordered = [readings[step] for step in sorted(readings)]
            # The infinite amax of a tensor that is not finite enters no history.
            amax = tuple(math.inf if reading.not_finite else reading.amax for reading in ordered)
            traces.append(Trace(layer, role, amax, tuple(reading.smallest for reading in ordered)))
    return tuple(traces)


def _layers_cast(readings: Iterable[LayerReading]) -> set[str]:
    """Layers with a product; where an arm scales only some of them, those."""
    roles: dict[str, set[str]] = {}
    scaled = set()
    for reading in readings:
        roles.setdefault(reading.layer, set()).add(reading.role)
        if reading.scale != 1:
            scaled.add(reading.layer)
    products = {layer for layer, kinds in roles.items() if len(kinds) == len(_ROLES)}
    return products & scaled or products


def best_of(replays: Sequence[Replayed]) -> Delayed:
    """The way that overflows in the smallest share of casts, and of those the one that leaves the least idle."""

    def cost(way: Delayed) -> tuple[float, float]:
        own = [replay for replay in replays if replay.delayed == way]
        casts = sum(replay.casts for replay in own)
        return sum(replay.overflow * replay.casts for replay in own) / casts, sum(replay.idle for replay in own)

    return min(dict.fromkeys(replay.delayed for replay in replays), key=cost)


def histories_of(training: Training, lines: Iterable[StreamLine], name: str) -> tuple[Replayed, ...]:
    """Replays every way on the amaxes of the named arm, in its own formats where it has a choice."""
    arms = {arm.name: arm for arm in training.arms}
    if name not in arms:
        raise UnknownName("arm", name, arms)
    traces = traces_of(training, lines, arms[name])
    word = str(precisions.get(arms[name].precision).chosen.get("formats", ""))
    formats = word if word in FORMATS_BY_ROLE else "hybrid"
    return tuple(replay for way in DELAYED_WAYS for replay in replayed(traces, way, formats))


def replayed(traces: Sequence[Trace], delayed: Delayed, formats: str = "hybrid") -> Iterator[Replayed]:
    for role, fmt in zip(_ROLES, FORMATS_BY_ROLE[formats], strict=True):
        own = [trace for trace in traces if trace.role is role]
        if not own:
            continue
        scales = [scales_of(trace.amax, delayed, fmt.largest) for trace in own]
        amaxes = [np.array(trace.amax, dtype=np.float32) for trace in own]
        scaled = np.concatenate([scale * amax for scale, amax in zip(scales, amaxes, strict=True)])
        used = scaled[np.isfinite(scaled) & (scaled > 0)]
        octaves = np.log2(used.astype(np.float64) / fmt.largest)
        over = used > fmt.largest * _ROUNDED
        underflow = None
        if all(trace.smallest for trace in own):
            least = [np.array(trace.smallest, dtype=np.float32) for trace in own]
            # Halfway to the smallest value, nearest even is 0.
            low = np.concatenate(
                [scale * amax <= fmt.smallest_subnormal / 2 for scale, amax in zip(scales, least, strict=True)]
            )
            underflow = float((low & (np.concatenate(least) > 0)).mean())
        yield Replayed(
            delayed, role, len(scaled), float(over.sum() / len(scaled)), float(octaves[over].max(initial=0.0)),
            underflow, float(-octaves[~over].mean()) if not over.all() else 0.0,
        )  # fmt: skip


def scales_of(amaxes: Sequence[float], delayed: Delayed, largest: float) -> Floats:
    """The scale of each cast: the one that was set before it, at first 1."""
    amax = np.array(amaxes, dtype=np.float32)
    finite = np.isfinite(amax)
    entries = np.where(finite, amax, np.float32(0))
    largest_amax = entries if delayed.algorithm is Amax.MOST_RECENT else _trailing_max(entries, delayed.history)
    with np.errstate(divide="ignore", over="ignore"):
        wanted = np.minimum(np.float32(largest) / largest_amax, _LARGEST_FACTOR) / np.float32(2.0**delayed.margin)
    casts = np.arange(1, len(amax) + 1)
    renewed = finite & (largest_amax > 0) & (casts % delayed.interval == 0)
    # A cast uses the scale of the last renewal before it.
    last = np.maximum.accumulate(np.where(renewed, casts, 0))
    standing = np.concatenate([[np.float32(1)], wanted.astype(np.float32)])
    before = np.concatenate([[0], last[:-1]]).astype(np.int64)
    return standing[before]


def _trailing_max(values: Floats, history: int) -> Floats:
    """The largest of each value and the `history` - 1 before it, by doubling."""
    most, length = values.copy(), 1
    while length < min(history, len(values)):
        step = min(length, history - length)
        most[step:] = np.maximum(most[step:], most[:-step])
        length += step
    return most
