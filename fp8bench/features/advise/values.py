"""The values of advice. Gains are speed-ups of a step: above 1 is faster."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fp8bench.model.measured import Interval
from fp8bench.model.planned import Params


class Met(StrEnum):
    """Whether a question of the checklist is met here. UNCLEAR: it was measured, and the noise leaves it open."""

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
    """One figure, and the row where it is found: a case of the run, a study, or a training."""

    row: str
    figure: str


@dataclass(frozen=True)
class RuleAnswer:
    """What one rule answers on a mode in a setting. `figure` decides it, in words; if it is UNKNOWN, `measure` is the
    command that would measure it."""

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
    """One thing to do, or not to do, about a mode. It holds for all `settings`; it is `doubtful` if it rests on a
    case with a doubtful label. `gain` is the predicted speed-up of the step of `case`; None if it is not about
    speed, or cannot be told. `recipe` are options to type for it, '' for none; `precision_map` are the layers that
    take another precision."""

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
    """The advice on a run, most important first, and the checklist that it comes from."""

    run: str
    advice: tuple[Advice, ...]
    answers: tuple[RuleAnswer, ...]
    least: float


@dataclass(frozen=True)
class Checked:
    """Advice beside the speed-up that a run of its own measured, or `why` there is none. `advised` is the run that
    the advice was about, `run` the one that measured it; `under` is the machine, torch and so on."""

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
    """What one precision costs for one model, over its reference. `speed` is that of a step, above 1 is faster;
    `gap` the share by which its loss lies above the reference's after the same steps. `joules` of a step, and `time`
    and `energy` to the same loss: below 1 is less. `hours` and `energy_used` (joules) are the reference's own for
    the training's steps. `why` says why something is None."""

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
