"""Scales from data: found in untimed steps of a state of its own, so that all that is timed with them starts alike."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from fp8bench.protocols import Phases, ScaleBook, Setup, SilentPhases, Workload


@dataclass
class Calibrations:
    """What calibrating found, by case: the largest magnitudes by layer and role. A case is calibrated once a worker."""

    _known: dict[str, dict[tuple[str, str], float]] = field(default_factory=dict)

    def applied(self, workload: Workload, setup: Setup) -> Setup:
        """The setup with a book of its own for the case's scales, where it asks for them."""
        rule = setup.case.static
        if rule is None:
            return setup
        if rule.source:
            return replace(setup, scales=ScaleBook(rule, rule.known_for(setup.case.precision)))
        name = setup.case.id
        if name not in self._known:
            book = ScaleBook(rule)
            state = workload.prepare(replace(setup, scales=book))
            for _ in range(rule.batches):
                step(workload, state, book, SilentPhases())
            self._known[name] = {(scale.layer, scale.role): scale.amax for scale in book.states()}
        return replace(setup, scales=ScaleBook(rule, self._known[name]))


def step(workload: Workload, state: Any, scales: ScaleBook | None, phase: Phases) -> Any:
    """One step of a state, and what it returns if anything; the book of its scales, if it has one, is told of it."""
    if scales is not None:
        scales.begin_step()
    return workload.step(state, phase)
