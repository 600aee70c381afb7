"""The values of advice. Gains are speed-ups of a step: above 1 is faster."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fp8bench.model.measured import Interval


class Met(StrEnum):
    """Whether a question of the checklist is met here. TOLERATED: the lower precision is surely worse, by less than the
    margin of what was measured. UNCLEAR: it was measured, and the noise leaves it open."""

    YES = "yes"
    NO = "no"
    TOLERATED = "worse, but tolerated"
    UNCLEAR = "unclear"
    UNKNOWN = "not measured here"


class Question(StrEnum):
    """What decides about a precision, in the order in which it is answered."""

    # A precision that does not pay need not fit, and one that does not fit cannot learn.
    PAYS = "Does it pay?"
    FITS = "Does it fit?"
    LEARNS = "Does it learn?"


class AdviceKind(StrEnum):
    """Take a precision, leave layers high, or leave all as it is."""

    ADOPT = "adopt"
    ROUTE = "route"
    NOTHING = "do nothing"


@dataclass(frozen=True)
class Ground:
    """One figure, and the row where it is found: a case of the run, a study, or a training."""

    row: str
    figure: str


@dataclass(frozen=True)
class RuleAnswer:
    """What one rule answers on a mode in a setting, as a part of one of the three questions (`topic`). `figure` decides
    it, in words; if it is UNKNOWN, `measure` is the command that would measure it."""

    rule: str
    topic: Question
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
    case with a doubtful label. `gain` is the speed-up of the step; None if it is not about speed, or was not measured.
    `recipe` are options to type for it, '' for none."""

    rule: str
    kind: AdviceKind
    mode: str
    reference: str
    sentence: str
    settings: tuple[str, ...]
    recipe: str = ""
    gain: Interval | None = None
    grounds: tuple[Ground, ...] = ()
    doubtful: bool = False


@dataclass(frozen=True)
class Advised:
    """The advice on a run, most important first, and the checklist that it comes from."""

    run: str
    advice: tuple[Advice, ...]
    answers: tuple[RuleAnswer, ...]
    least: float
