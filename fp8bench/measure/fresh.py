"""The fastest of many candidates, timed again: a figure that was chosen for being the best is too good.

Of equal candidates the one that noise favoured is chosen, and its own samples say so. Rounds after the choice do not
know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fp8bench.measure.arm import Arm
from fp8bench.measure.handle import Worker
from fp8bench.measure.rounds import Session
from fp8bench.model import Fresh, Timing
from fp8bench.model.stopping import LEAST_CANDIDATES, StoppingRule

# Which of these timings is fastest beside the reference's and its control's; None where none is faster.
Choose = Callable[[Sequence[Timing], Timing, Timing | None], int | None]


def fastest_again(
    session: Session,
    choose: Choose,
    worker: Worker,
    rule: StoppingRule,
    seed: int,
    tick: Callable[[Arm, float], None],
    after: Callable[[Arm], None] | None,
) -> tuple[Arm, Fresh] | None:
    """The arm that was chosen, with as many rounds of it, the reference and its control as it had before."""
    candidates = [arm for arm in session.candidates if not arm.emulated]
    lead, control = session.reference, session.control
    if lead is None or lead.emulated or len(candidates) < LEAST_CANDIDATES:
        return None
    chosen = choose(
        [arm.timing() for arm in candidates], lead.timing(), control.timing() if control is not None else None
    )
    if chosen is None:
        return None
    winner = candidates[chosen]
    again = [None if arm is None else replace(arm, slots=[]) for arm in (lead, control, winner)]
    fixed = StoppingRule(fixed=len(winner.slots), ceiling=rule.ceiling)
    assert again[0] is not None and again[2] is not None
    Session(again[0], again[1], [again[2]]).run(
        worker, fixed, lambda case, reference, control: False, seed, tick, after=after
    )
    timings = [None if arm is None else arm.timing() for arm in again]
    assert timings[0] is not None and timings[2] is not None
    return winner, Fresh(timings[2], timings[0], timings[1], len(candidates))
