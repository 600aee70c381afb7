"""Scales from data that a run has kept, by precision, layer and role, for another run or a training to take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from fp8bench.errors import UsageError
from fp8bench.model import Request, Run
from fp8bench.model.request import KnownScales
from fp8bench.store.runs.listing import load_named


def scales_of(run: Run) -> KnownScales:
    """The largest magnitudes of all its cases; of cases in one precision the largest of each layer and role."""
    return largest(
        (record.case.precision, scale.layer, scale.role, scale.amax)
        for record in run.records
        for scale in record.scales
    )


def largest(scales: Iterable[tuple[str, str, str, float]]) -> KnownScales:
    kept: dict[tuple[str, str, str], float] = {}
    for *key, amax in scales:
        mode, layer, role = map(str, key)
        kept[mode, layer, role] = max(amax, kept.get((mode, layer, role), 0.0))
    return tuple((*key, amax) for key, amax in kept.items())


def with_stored_scales(request: Request, store: Path) -> Request:
    if request.scales_from is None or request.known_scales:
        return request
    run = load_named(request.scales_from, store)
    return replace(request, known_scales=refuse_none(scales_of(run), f"run {run.id}"))


def refuse_none(scales: KnownScales, of: str) -> KnownScales:
    if not scales:
        raise UsageError(
            f"--scales-from: {of} has kept no scales. Measure it with --static-scales N, which finds and keeps them."
        )
    return scales
