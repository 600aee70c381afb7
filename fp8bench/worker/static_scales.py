"""Finds scales in data with untimed steps of a separate state, so that all timed states start alike."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from fp8bench.protocols import Phases, ScaleBook, Setup, SilentPhases, Workload


@dataclass
class Calibrations:
    """The largest magnitudes by layer and role that calibrating found, by case. A worker calibrates a case once."""

    _amax_by_case: dict[str, dict[tuple[str, str], float]] = field(default_factory=dict)

    def apply(self, workload: Workload, setup: Setup) -> Setup:
        """Returns the setup with a separate book for the case's scales, if the case requests scales from data."""
        rule = setup.case.static
        if rule is None:
            return setup
        if rule.source:
            return replace(setup, scales=ScaleBook(rule, rule.known_for(setup.case.precision)))
        name = setup.case.id
        if name not in self._amax_by_case:
            book = ScaleBook(rule)
            state = workload.prepare(replace(setup, scales=book))
            for _ in range(rule.batches):
                step(workload, state, book, SilentPhases())
            self._amax_by_case[name] = {(scale.layer, scale.role): scale.amax for scale in book.states()}
        return replace(setup, scales=ScaleBook(rule, self._amax_by_case[name]))


def step(workload: Workload, state: Any, scales: ScaleBook | None, phase: Phases) -> Any:
    """Takes one step of a state, after notifying the book of its scales, if it has one; returns the step's result."""
    if scales is not None:
        scales.begin_step()
    return workload.step(state, phase)
