"""Tapes of a few operators, recorded in this process."""

from __future__ import annotations

from collections.abc import Callable

from fp8bench.model.step import OperatorCount, Tape
from fp8bench.protocols import Phases
from fp8bench.tape.counting import count_operator_calls
from fp8bench.tape.recorder import OperatorTape


def tape_of(run: Callable[[], object]) -> Tape:
    """A tape of operators outside of phases."""
    return tape_in_phases(lambda phase: run())


def tape_in_phases(run: Callable[[Phases], object]) -> Tape:
    """A tape of a step with phases."""
    mode = OperatorTape()
    with mode:
        run(mode.phases)
    return count_operator_calls(mode.calls)


def only(tape: Tape, operator: str) -> OperatorCount:
    """The only row of an operator."""
    (found,) = (one for one in tape.operators if one.operator == operator)
    return found
