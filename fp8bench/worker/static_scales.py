"""Calibrates static scales with data. The steps for this are untimed and use a separate state, so that all timed states
start in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from fp8bench.protocols import Phases, ScaleBook, Setup, SilentPhases, Workload


@dataclass
class CalibrationResults:
    """Stores the result of calibration for each case: the largest magnitudes by layer and role. A case is calibrated
    once.
    """

    _amax_by_case: dict[str, dict[tuple[str, str], float]] = field(default_factory=dict)

    def apply_static_scales(self, workload: Workload, setup: Setup) -> Setup:
        """Returns the setup with a new `ScaleBook` of the case's static scales, or the same setup if the case has no
        static scales.
        """
        static_scale_rule = setup.case.static
        if static_scale_rule is None:
            return setup
        if static_scale_rule.source:
            return replace(
                setup, scales=ScaleBook(static_scale_rule, static_scale_rule.find_magnitudes(setup.case.precision))
            )
        case_id = setup.case.id
        if case_id not in self._amax_by_case:
            scale_book = ScaleBook(static_scale_rule)
            state = workload.prepare(replace(setup, scales=scale_book))
            for _ in range(static_scale_rule.batches):
                step(workload, state, scale_book, SilentPhases())
            self._amax_by_case[case_id] = {(scale.layer, scale.role): scale.amax for scale in scale_book.states()}
        return replace(setup, scales=ScaleBook(static_scale_rule, self._amax_by_case[case_id]))


def step(workload: Workload, state: Any, scales: ScaleBook | None, phase: Phases) -> Any:
    """Takes one step of a state and returns the step's result. If the state has static scales, their `begin_step` is
    called before the step.
    """
    if scales is not None:
        scales.begin_step()
    return workload.step(state, phase)
