"""What to do about a precision: answers to the questions that decide it, and what follows from them.

Gains are speed-ups of a step, above 1 is faster. Nothing here is about an emulated case but that it is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fp8bench.model.measured import Interval
from fp8bench.model.planned import Params


class Met(StrEnum):
    """Whether a question of the checklist is met here. UNCLEAR was measured, and the noise leaves it open."""

    YES = "yes"
    NO = "no"
    UNCLEAR = "unclear"
    UNKNOWN = "not measured here"


class AdviceKind(StrEnum):
    """Take a precision, leave layers high, leave steps or stages high, or leave all as it is."""

    ADOPT = "adopt"
    ROUTE = "route"
    SCHEDULE = "schedule"
    NOTHING = "do nothing"


@dataclass(frozen=True)
class Ground:
    """One figure that something rests on, and the row where it is found: a case of the run, a study, a training."""

    row: str
    figure: str


@dataclass(frozen=True)
class RuleAnswer:
    """What one rule says of a mode in a setting: above all whether its question is met.

    `figure` is the number that decides it, in words; where it is UNKNOWN `measure` is what would measure it.
    """

    rule: str
    question: str
    setting: str
    mode: str
    met: Met
    figure: str = ""
    grounds: tuple[Ground, ...] = ()
    measure: str = ""


@dataclass(frozen=True)
class Advice:
    """One thing to do, or not to do, about a mode.

    `settings` are those it holds for; a `doubtful` one rests on a case that a label casts doubt on. `gain` is the
    speed-up that it predicts of the step of `case`, for which it can be measured; None where it is about no speed, or
    nobody can tell. `recipe` is what to type for it, '' for nothing; `precision_map` the layers that take another
    precision.
    """

    rule: str
    kind: AdviceKind
    mode: str
    reference: str
    sentence: str
    settings: tuple[str, ...]
    recipe: str = ""
    precision_map: tuple[tuple[str, str], ...] = ()
    gain: Interval | None = None
    case: str = ""
    grounds: tuple[Ground, ...] = ()
    doubtful: bool = False


@dataclass(frozen=True)
class Advised:
    """All that is said of a run: advice, what matters most first, and the checklist that it comes from."""

    run: str
    advice: tuple[Advice, ...]
    answers: tuple[RuleAnswer, ...]
    least: float


@dataclass(frozen=True)
class Checked:
    """Advice that was measured: its prediction beside the speed-up of a run of its own, or why there is none.

    `advised` is the run that the advice was about, `run` the one that measured it; `under` is what machine, torch and
    device that was on, by name.
    """

    advice: Advice
    advised: str
    run: str
    when: str
    measured: Interval | None
    why: str = ""
    under: Params = ()

    @property
    def hit(self) -> bool | None:
        gain = self.advice.gain
        if gain is None or self.measured is None:
            return None
        return gain.low <= self.measured.point <= gain.high


@dataclass(frozen=True)
class Cost:
    """Of one precision for one model. `speed` is that of its step, above 1 is faster; `gap` by what share its loss lies
    above the reference's after as many steps.

    `joules` of a step, and `time` and `energy` to the same loss, are over the reference's: below 1 is less. `hours` and
    `energy_used` (joules) are the reference's own for the training's steps, None where they are not known. `why` says
    why something is missing.
    """

    setting: str
    mode: str
    reference: str
    speed: Interval | None = None
    gap: Interval | None = None
    learned: str = ""
    joules: Interval | None = None
    time: Interval | None = None
    energy: Interval | None = None
    hours: float | None = None
    energy_used: float | None = None
    steps: int = 0
    model: str = ""
    why: str = ""

    def money(self, price: float) -> Interval | None:
        if self.time is None or self.hours is None:
            return None
        whole = self.hours * price
        return Interval(self.time.point * whole, self.time.low * whole, self.time.high * whole, self.time.level)
