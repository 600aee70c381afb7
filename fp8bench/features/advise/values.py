"""The values of advice. Gains are speed-ups of a step: above 1 is faster."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fp8bench.model.measured import Interval


class Met(StrEnum):
    """The answer to a question of the checklist. TOLERATED: the lower precision is certainly worse, but by less than
    the margin. UNCLEAR: measured, but noise leaves it open."""

    YES = "yes"
    NO = "no"
    TOLERATED = "worse, but tolerated"
    UNCLEAR = "unclear"
    UNKNOWN = "not measured here"


class Question(StrEnum):
    """The questions that decide about a precision, in the order in which they are answered."""

    # A precision that does not pay need not fit, and one that does not fit cannot learn.
    PAYS = "Does it pay?"
    FITS = "Does it fit?"
    LEARNS = "Does it learn?"


class AdviceKind(StrEnum):
    """Adopt a precision, keep layers high, or leave everything unchanged."""

    ADOPT = "adopt"
    ROUTE = "route"
    NOTHING = "do nothing"


@dataclass(frozen=True)
class Ground:
    """One figure and its source: a case of the run, a study, or a training."""

    row: str
    figure: str


@dataclass(frozen=True)
class RuleAnswer:
    """A rule's answer about a mode in a setting, as part of one of the three questions (`topic`). `figure` decides it,
    in words; if it is UNKNOWN, `measure` is the command that would measure it."""

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
    """One recommendation about a mode. It holds for all `settings`; it is `doubtful` if it is based on a case with a
    doubtful label. `gain` is the speed-up of the step; None if it is not about speed, or was not measured. `recipe` are
    options to type for it, '' for none."""

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
    """The advice on a run, most important first, and the checklist behind it."""

    run: str
    advice: tuple[Advice, ...]
    answers: tuple[RuleAnswer, ...]
    least: float
