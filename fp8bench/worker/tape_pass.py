"""The operators of an untimed step, in a worker that times nothing.

In torch 2.13 a function that is compiled, and is called for the first time under a dispatch mode, stays uncompiled for
good. Here it runs as what it was made of: the operators inside a fused kernel show nowhere else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fp8bench.model import CELL_PHASES, Tape
from fp8bench.protocols import Precision, Setup, Stamper, Workload
from fp8bench.worker.clock import PhaseClock
from fp8bench.worker.static_scales import step

_FUSED = "torch.compile: operators, bytes and launches are those of the step uncompiled"


def tape_of_step(workload: Workload, setup: Setup, precision: Precision, stamper: Stamper) -> Tape:
    """Of a state's second step, with the clock of timed ones: what the first one makes and keeps is there by then."""
    from fp8bench.tape.counting import counted
    from fp8bench.tape.recorder import OperatorTape

    mode = OperatorTape()
    clock = PhaseClock(stamper, lambda code: mode.enter(CELL_PHASES[code]))
    state = workload.prepare(setup)
    with uncompiled():
        step(workload, state, setup.scales, clock)
    clock.begin()
    with uncompiled() as compiled, mode:
        step(workload, state, setup.scales, clock)
    tape = counted(mode.calls, precision.float32_products != "highest")
    return replace(tape, fused=_FUSED) if compiled else tape


@contextmanager
def uncompiled() -> Iterator[list[Any]]:
    """Compiled functions run uncompiled in the body, and leave a mark in the list. Torch's compiler is not imported."""
    called: list[Any] = []
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:
        yield called
        return
    import torch

    # What it does about a compiled function that is called torch asks here, whatever the stance.
    asked: Callable[[Any], Any] = frames._callback_from_stance

    def noted(callback: Any) -> Any:
        if callback not in (None, False):
            called.append(callback)
        return asked(callback)

    frames._callback_from_stance = noted  # type: ignore[attr-defined]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield called
    finally:
        frames._callback_from_stance = asked  # type: ignore[attr-defined]
