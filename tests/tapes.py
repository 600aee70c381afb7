"""Tapes of a few operators, recorded in this process."""

from __future__ import annotations

from collections.abc import Callable

from fp8bench.model.step import OperatorCount, Tape
from fp8bench.protocols import Phases
from fp8bench.tape.counting import count_tape
from fp8bench.tape.recorder import OperatorTape


def tape_of(run: Callable[[], object]) -> Tape:
    """Of what runs in no phase."""
    return tape_in_phases(lambda phase: run())


def tape_in_phases(run: Callable[[Phases], object]) -> Tape:
    """Of a step that says what it is at."""
    mode = OperatorTape()
    with mode:
        run(mode.phases)
    return count_tape(mode.calls)


def only(tape: Tape, operator: str) -> OperatorCount:
    """The one row of an operator."""
    (found,) = (one for one in tape.operators if one.operator == operator)
    return found
