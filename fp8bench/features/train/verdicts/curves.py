"""The curves of a training: what was seen of each arm in each seed, and the points that are compared.

The endpoint is declared in advance: the mean training loss over the last tenth of the steps. The second measure is the
last loss on the held-out text. A point with any value that is not finite is void.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from fp8bench.features.train.values import REFERENCE_SECONDS, Line, StepFigure, StepRow, TrainingEvent, Validation

HELD_OUT = "held-out"
_TENTHS = 10
# A reference that has come down to this share of its first loss knows its text by heart: a share of next to nothing
# says nothing. Of bytes that is 0.055 a token, where text that was learned and not copied stays above 0.6.
_NEARLY_ZERO = 0.01
_STOPPED, _NOT_FINITE = "stopped", "not-finite"

Key = tuple[str, int]


class Void(StrEnum):
    """Why a seed says nothing of an arm beside its reference."""

    NOT_FINISHED = "not finished"
    NOT_FINITE = "not finite"
    NEARLY_ZERO = "the reference's loss is nearly zero"
    OTHER_TOKENS = "another number of tokens a step"
    COPY = "the reference's losses are those of another seed bit for bit"


@dataclass(frozen=True)
class Curve:
    """One arm in one seed, its rows in the order of their steps, of `steps` that were asked for.

    `beside` are the seconds of the reference's steps beside it, where these are not those of the reference's rows.
    """

    steps: int
    rows: tuple[StepRow, ...] = ()
    held_out: Mapping[int, float] = field(default_factory=dict)
    events: frozenset[str] = frozenset()
    beside: Mapping[int, float] = field(default_factory=dict)

    @property
    def losses(self) -> tuple[float, ...]:
        return tuple(row.loss for row in self.rows)

    @property
    def whole(self) -> bool:
        """Whether it came to its last step."""
        return len(self.rows) == self.steps

    @property
    def end(self) -> tuple[float, ...]:
        """The losses of the last tenth of the steps."""
        return self.losses[-last_of(self.steps) :]

    @property
    def endpoint(self) -> float:
        """Their mean; NaN if one is not finite, or it did not come to its last step."""
        return math.fsum(self.end) / len(self.end) if self.whole and all(map(math.isfinite, self.end)) else math.nan

    @property
    def fall(self) -> float:
        """The share of its first loss by which it fell until the end; NaN where one of these is void."""
        return 1 - self.endpoint / self.rows[0].loss if self.rows and self.rows[0].loss > 0 else math.nan

    @property
    def blew_up(self) -> bool:
        """Whether it was stopped for a value that is not finite, or came to its end with one.

        One that recovered from such a step is not meant, nor one that was lost for another reason.
        """
        if self.whole:
            return not math.isfinite(self.rows[-1].loss)
        return {_STOPPED, _NOT_FINITE} <= self.events


def last_of(steps: int) -> int:
    """How many steps the endpoint is the mean of."""
    return max(1, steps // _TENTHS)


def curves_of(lines: Iterable[Line], steps: int) -> dict[Key, Curve]:
    """Every arm in every seed. Of lines for the same step the last one counts."""
    rows: dict[Key, dict[int, StepRow]] = defaultdict(dict)
    held_out: dict[Key, dict[int, float]] = defaultdict(dict)
    events: dict[Key, set[str]] = defaultdict(set)
    beside: dict[Key, dict[int, float]] = defaultdict(dict)
    for line in lines:
        key = (line.arm, line.seed)
        if isinstance(line, StepRow):
            rows[key][line.step] = line
        elif isinstance(line, Validation) and line.of == HELD_OUT:
            held_out[key][line.step] = line.loss
        elif isinstance(line, TrainingEvent):
            events[key].add(line.kind)
        elif isinstance(line, StepFigure) and line.name == REFERENCE_SECONDS:
            beside[key][line.step] = line.value
    return {
        key: Curve(
            steps, tuple(found for _, found in sorted(own.items())), held_out[key], frozenset(events[key]), beside[key]
        )
        for key, own in rows.items()
    }


@dataclass(frozen=True)
class Pair:
    """One seed: by what share the arm's loss lies above its reference's. `held_out` is None where a point is void."""

    seed: int
    gap: float
    held_out: float | None = None
    same_bits: bool = False


def paired(reference: Curve, arm: Curve, seed: int) -> Pair | Void:
    """Hold an arm against its reference in one seed."""
    if not (reference.whole and arm.whole):
        return Void.NOT_FINISHED
    if math.isnan(reference.endpoint) or math.isnan(arm.endpoint):
        return Void.NOT_FINITE
    if reference.endpoint <= _NEARLY_ZERO * reference.rows[0].loss:
        return Void.NEARLY_ZERO
    if reference.rows[-1].tokens != arm.rows[-1].tokens:
        return Void.OTHER_TOKENS
    gap = (arm.endpoint - reference.endpoint) / reference.endpoint
    return Pair(seed, gap, _held_out_gap(reference, arm), reference.losses == arm.losses)


def _held_out_gap(reference: Curve, arm: Curve) -> float | None:
    """Of the last evaluation that both have had, in the last tenth of the steps or after them: an earlier one is of
    other weights than the endpoint."""
    both = [step for step in reference.held_out.keys() & arm.held_out if step >= arm.steps - last_of(arm.steps)]
    if not both:
        return None
    old, new = (curve.held_out[max(both)] for curve in (reference, arm))
    return new / old - 1 if math.isfinite(new) and 0 < old < math.inf else None
