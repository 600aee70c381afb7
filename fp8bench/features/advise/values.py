"""The value types of advice. A gain is the speed-up of a step: above 1 is faster."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fp8bench.model.measured import Interval


class AdviceRuleOutcome(StrEnum):
    """The answer to a question of the checklist.

    TOLERATED: a model certainly learns worse in the lower precision, but by less than the margin of its training.
    UNCLEAR: it was measured, but noise leaves the answer open.
    """

    YES = "yes"
    NO = "no"
    TOLERATED = "worse, but tolerated"
    UNCLEAR = "unclear"
    NOT_MEASURED = "not measured here"


class AdviceQuestion(StrEnum):
    """The three questions that decide whether to use a precision, in this order: after a no, the next questions do not
    matter.
    """

    DOES_IT_PAY = "Does it pay?"
    DOES_IT_FIT = "Does it fit?"
    DOES_IT_LEARN = "Does it learn?"


class AdviceKind(StrEnum):
    """The recommended action: adopt a precision, keep some layers high, or keep the reference."""

    ADOPT_PRECISION = "adopt"
    ROUTE_LAYERS = "route"
    CHANGE_NOTHING = "do nothing"


@dataclass(frozen=True)
class AdviceGround:
    """One figure that supports advice, and its source: a case of the run, a study, or a training."""

    row: str
    figure: str


@dataclass(frozen=True)
class RuleAnswer:
    """A rule's answer about one mode in one setting. `topic` is the question (one of three) to which the rule
    belongs.

    `figure` describes the figure that decides the answer. If the answer is NOT_MEASURED, `measure` is the command that
    would measure it.
    """

    rule: str
    topic: AdviceQuestion
    question: str
    setting: str
    mode: str
    met: AdviceRuleOutcome
    figure: str = ""
    grounds: tuple[AdviceGround, ...] = ()
    measure: str = ""


@dataclass(frozen=True)
class Advice:
    """One recommendation about a mode in all of `settings`.

    `gain` is the speed-up of the step; None if the advice is not about speed, or if the speed was not measured.
    `recipe` has the options to use, '' for none. `doubtful` is True if a case on which the advice is based has a label
    that questions its times.
    """

    rule: str
    kind: AdviceKind
    mode: str
    reference: str
    sentence: str
    settings: tuple[str, ...]
    recipe: str = ""
    gain: Interval | None = None
    grounds: tuple[AdviceGround, ...] = ()
    doubtful: bool = False


@dataclass(frozen=True)
class AdviceResult:
    """The advice on a run, most important first, and the answers of the checklist."""

    run: str
    advice: tuple[Advice, ...]
    answers: tuple[RuleAnswer, ...]
    least: float
