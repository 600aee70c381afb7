"""From comparisons to a verdict: what is suspected, what a second look confirms, and what fails a build.

A figure is suspected if it is worse by more than its threshold, in ratio and in difference, and by more than chance
among so many. It fails only if it is so again when measured again, in a fresh process. Stored runs of different times
do not fail below 10% even then, unless the spread between runs is known: clocks, neighbours and drivers change in
between. Between two single runs nobody knows the noise, but most cases did not change, and how far these moved says how
far any may move.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from fp8bench.analysis.compare.interval import ALONE
from fp8bench.errors import EXIT_BASELINE, EXIT_FAILED, EXIT_OK, EXIT_REGRESSION
from fp8bench.features.gate.thresholds import Rules, Threshold, ruled_by, threshold_of
from fp8bench.model import Comparison, Direction, Evidence
from fp8bench.model.specs import COUNTS, RELATIVE, TIME
from fp8bench.report.panels import together

# So large a share of suspects may be chance; the second look removes nearly all of that.
CHANCE = 0.02
# With fewer cases nobody can say how far one of them may move.
LEAST_CASES = 12
# A second look, too, must be off by so many deviations: it shares the baseline, and its noise, with the first.
AGAIN = 3.0
_QUARTILE = statistics.NormalDist().inv_cdf(0.75)
# The nearer of two quartiles of n values lies too near by this over the root of n.
_NEARER = 0.888


@dataclass(frozen=True)
class CaseSpread:
    """In logarithms: by how much all cases moved together, and the deviation of a single case from that."""

    shift: float
    deviation: float

    def chance(self, log: float) -> float:
        beside = abs(log - self.shift)
        if not self.deviation:
            return 0.0 if beside else 1.0
        return math.erfc(beside / self.deviation / math.sqrt(2))

    def beyond(self, ratio: float) -> bool:
        return math.log(ratio) > AGAIN * self.deviation


def spread_of(logs: Sequence[float]) -> CaseSpread | None:
    """Returns the spread of unchanged cases among all; None for few cases. It uses the nearer quartile, so that
    neither what became worse nor what became better counts as noise, even if half of the cases did. A common shift
    is not a case's own; from 10% on it is more than a machine's mood, and counts."""
    if len(logs) < LEAST_CASES:
        return None
    low, middle, high = statistics.quantiles(logs, n=4)
    shift = middle if abs(middle) < math.log1p(ALONE) else 0.0
    nearer = min(max(shift - low, 0.0), max(high - shift, 0.0))
    return CaseSpread(shift, nearer / (_QUARTILE - _NEARER / math.sqrt(len(logs))))


def discoveries(p_values: Sequence[float], share: float) -> list[bool]:
    """Applies Benjamini and Hochberg's rule: at most `share` of what it picks is expected to be chance. Where all
    are chance, it picks any at all with a probability of `share`."""
    ranked = sorted(range(len(p_values)), key=lambda place: p_values[place])
    passing = [rank for rank, place in enumerate(ranked, 1) if p_values[place] <= share * rank / len(p_values)]
    chosen = set(ranked[: max(passing, default=0)])
    return [place in chosen for place in range(len(p_values))]


class GateOutcome(StrEnum):
    """What the gate makes of a figure."""

    REGRESSION = "regression"
    FAILED = "failed"
    TO_CONFIRM = "to confirm"
    CLEARED = "cleared"
    BETTER = "better"
    UNSURE = "unsure"
    FINE = "fine"
    IGNORED = "ignored"
    NONE = "none"


NOT_TESTED = (GateOutcome.IGNORED, GateOutcome.NONE, GateOutcome.FAILED)
Key = tuple[str, str]


@dataclass(frozen=True)
class JudgedFigure:
    """A figure with its threshold and outcome. `again` is the second look, if there was one. `spread` is how far
    other cases of the same runs moved, where runs are too few to have a noise of their own."""

    comparison: Comparison
    threshold: Threshold
    outcome: GateOutcome
    why: str = ""
    again: Comparison | None = None
    spread: CaseSpread | None = None

    @property
    def key(self) -> Key:
        return key_of(self.comparison)


@dataclass(frozen=True)
class SecondLook:
    """Suspects measured again: comparisons by case and figure, and how; or why there are none (`refused`)."""

    comparisons: Mapping[Key, Comparison]
    how: str = ""
    refused: str = ""


def joined(looks: Sequence[SecondLook]) -> SecondLook:
    return SecondLook(
        {key: comparison for look in looks for key, comparison in look.comparisons.items()},
        " and ".join(look.how for look in looks if look.how), "; ".join(look.refused for look in looks if look.refused),
    )  # fmt: skip


def key_of(figure: Comparison) -> Key:
    return figure.case, figure.metric


def first_look(comparisons: Sequence[Comparison], rules: Rules = ()) -> tuple[JudgedFigure, ...]:
    relative = {
        comparison.case for comparison in comparisons if comparison.metric == RELATIVE and comparison.ratio is not None
    }
    looked = [_looked_at(comparison, rules, relative) for comparison in comparisons]
    tested = [place for place, figure in enumerate(looked) if figure.outcome not in NOT_TESTED]
    # Where runs are too few to have a spread of their own, the other cases give it.
    alone = together((comparisons[place].metric, place) for place in tested if is_alone(comparisons[place]))
    for places in alone.values():
        spread = spread_of([_log(looked[place]) for place in places])
        for place in places:
            looked[place] = replace(looked[place], spread=spread)
    chances = {place: chance_of(looked[place]) for place in tested}
    p_values = {place: chance for place, chance in chances.items() if chance is not None}
    for place, news in zip(p_values, discoveries(list(p_values.values()), CHANCE), strict=True):
        if looked[place].outcome is GateOutcome.TO_CONFIRM and not news:
            looked[place] = replace(
                looked[place],
                outcome=GateOutcome.UNSURE,
                why=f"among {len(p_values)} figures, one so far off is expected by chance",
            )
    return tuple(looked)


def chance_of(figure: JudgedFigure) -> float | None:
    """Returns the probability of such a difference where nothing changed; None if it is not known."""
    if figure.comparison.p_value is not None or figure.spread is None:
        return figure.comparison.p_value
    return figure.spread.chance(_log(figure))


def _log(figure: JudgedFigure) -> float:
    assert figure.comparison.ratio is not None
    return math.log(figure.comparison.ratio.point)


def second_look(judged: Sequence[JudgedFigure], look: SecondLook, rules: Rules = ()) -> tuple[JudgedFigure, ...]:
    return tuple(
        _settled(figure, look, rules) if figure.outcome is GateOutcome.TO_CONFIRM else figure for figure in judged
    )


def _looked_at(figure: Comparison, rules: Rules, relative: set[str]) -> JudgedFigure:
    threshold = threshold_of(figure, rules)
    if figure.failed:
        return JudgedFigure(figure, threshold, GateOutcome.FAILED, figure.why)
    if threshold.ignored:
        return JudgedFigure(figure, threshold, GateOutcome.IGNORED, "a rule says so")
    if figure.direction is Direction.NONE:
        return JudgedFigure(figure, threshold, GateOutcome.NONE, figure.why)
    if figure.direction is Direction.DIFFERS:
        return JudgedFigure(figure, threshold, GateOutcome.IGNORED, figure.why)
    if figure.metric == TIME and figure.case in relative and ruled_by(figure, rules) is None:
        return JudgedFigure(
            figure,
            threshold,
            GateOutcome.IGNORED,
            "the time over the reference's, which does not tell how fast the machine was, is judged instead",
        )
    if exceeds(figure, threshold):
        # Counts would be the same again: no second look is needed.
        outcome = GateOutcome.REGRESSION if figure.metric in COUNTS else GateOutcome.TO_CONFIRM
        return JudgedFigure(figure, threshold, outcome, figure.why)
    outcomes = {Direction.BETTER: GateOutcome.BETTER, Direction.UNSURE: GateOutcome.UNSURE}
    return JudgedFigure(figure, threshold, outcomes.get(figure.direction, GateOutcome.FINE), figure.why)


def exceeds(figure: Comparison, threshold: Threshold) -> bool:
    if figure.direction is Direction.DIFFERS or figure.before is None or figure.after is None:
        return False
    if figure.after - figure.before <= threshold.smallest:
        return False
    if figure.ratio is None:  # from nothing to something
        return figure.direction is Direction.WORSE
    # Below 10% a few stored runs are unsure, and still suspects.
    surely = figure.direction is Direction.WORSE or (is_alone(figure) and figure.ratio.low > 1)
    return surely and figure.ratio.point > 1 + threshold.relative


def may_fail(figure: Comparison) -> bool:
    if figure.evidence is Evidence.PAIRED or figure.ratio is None or is_exact(figure):
        return True
    return figure.direction is Direction.WORSE and figure.ratio.point >= 1 + ALONE


def is_exact(figure: Comparison) -> bool:
    return figure.ratio is not None and figure.ratio.low == figure.ratio.high and figure.ratio.level == 1


def is_alone(figure: Comparison) -> bool:
    stored = figure.evidence is not Evidence.PAIRED and figure.p_value is None
    return stored and figure.ratio is not None and not is_exact(figure) and figure.ratio.level > 0


def _again_worse(figure: JudgedFigure, again: Comparison, rules: Rules) -> bool:
    if again.evidence is Evidence.HISTORY:
        # One new value belongs to the new level: if that is at the threshold, half of such values lie below.
        return again.direction is Direction.WORSE
    if figure.spread and again.ratio and is_alone(again) and not figure.spread.beyond(again.ratio.point):
        return False
    # A ratio to the reference may be settled by the time itself, which has a threshold of its own.
    same = again.metric == figure.comparison.metric
    return exceeds(again, figure.threshold if same else threshold_of(again, rules))


def _decides(figure: JudgedFigure) -> str:
    if figure.comparison.evidence is Evidence.PAIRED:
        return "more sessions of such a duel decide (--sessions)"
    return f"`fp8bench duel suite {figure.comparison.suite} --against COMMIT` decides"


def _is_absent(figure: JudgedFigure, again: Comparison) -> bool:
    """Whether a second look excludes what the first one saw. That it does not see it again is not enough."""
    if again.direction is Direction.DIFFERS:
        return False
    if again.ratio is None or is_exact(again):
        return True
    # A slow-down may be hidden by load on the first side, and with few runs by the spread between runs.
    least = math.log1p(figure.threshold.relative) - math.log(again.others)
    if is_alone(again):
        least -= AGAIN * figure.spread.deviation if figure.spread else math.log1p(ALONE)
    elif again.direction in (Direction.SAME, Direction.BETTER) and again.others == 1:
        return True
    return again.ratio.level > 0 and math.log(again.ratio.high) <= least


def _settled(figure: JudgedFigure, look: SecondLook, rules: Rules) -> JudgedFigure:
    case = figure.comparison.case
    failed = (again for again in look.comparisons.values() if again.failed and again.case == case)
    again = next(failed, None) or look.comparisons.get(figure.key)
    if again is None:
        why = f"not measured again: {look.refused or 'the case was not among what could be'}"
        outcome = GateOutcome.REGRESSION if may_fail(figure.comparison) else GateOutcome.TO_CONFIRM
        why += f"; {_decides(figure)}" if outcome is GateOutcome.TO_CONFIRM else ""
        return replace(figure, outcome=outcome, why=why)
    if again.failed:
        return replace(figure, outcome=GateOutcome.FAILED, why=f"{look.how}, it failed: {again.why}", again=again)
    if not _again_worse(figure, again, rules):
        if _is_absent(figure, again):
            return replace(figure, outcome=GateOutcome.CLEARED, why=f"{look.how}, it was not so", again=again)
        reason = f" ({again.why})" if again.why else ""
        return replace(
            figure, why=f"{look.how}, it was not shown to be absent{reason}: {_decides(figure)}", again=again
        )
    if may_fail(again) or again.p_value is not None or again.evidence is Evidence.HISTORY:
        return replace(figure, outcome=GateOutcome.REGRESSION, why=f"{look.how}, it was so again", again=again)
    below = "against a single stored run nothing fails below 10%"
    unlike = again.ratio is not None and again.ratio.point > 1 + ALONE
    return replace(
        figure,
        why=f"{look.how}, it was so again; {again.why if unlike and again.why else below}; {_decides(figure)}",
        again=again,
    )


# The default share of builds in which a slow-down has to be found.
USUAL_POWER = 0.8
# With fewer nights at its present level a series may miss its threshold: it is young.
NIGHTS = 14


@dataclass(frozen=True)
class Sight:
    """The smallest slow-down of one figure that both looks would have found, as a share: 0.05 is 5% slower.

    It is math.inf if none would have been found. `threshold` is the least that may fail. `unknown` says why the noise
    is not known: then `smallest` is a lower bound. `nights` counts those of a history since its last step.
    """

    case: str
    metric: str
    threshold: float
    smallest: float
    unknown: str = ""
    nights: int | None = None

    @property
    def enough(self) -> bool:
        return self.smallest <= self.threshold and not self.unknown

    @property
    def is_young(self) -> bool:
        return self.nights is not None and self.nights < NIGHTS and not self.enough


@dataclass(frozen=True)
class Sights:
    """The sights of all figures that vary, the most blind first, each found in `power` of builds. If `required`, the
    gate ends with 4 where one is blind."""

    figures: tuple[Sight, ...] = ()
    power: float = USUAL_POWER
    required: bool = False

    @property
    def blind(self) -> tuple[Sight, ...]:
        return tuple(figure for figure in self.figures if not figure.enough and not figure.is_young)

    @property
    def young(self) -> tuple[Sight, ...]:
        return tuple(figure for figure in self.figures if figure.is_young)

    @property
    def fails(self) -> bool:
        return self.required and bool(self.blind)


NO_SIGHTS = Sights()


@dataclass(frozen=True)
class GateVerdict:
    """All figures judged. `title` says what was compared with what. `problem` says why there is nothing to judge,
    with the exit `code` for that. `sights` are the smallest slow-downs that would have been found."""

    title: str
    judged: tuple[JudgedFigure, ...] = ()
    notes: tuple[str, ...] = ()
    problem: str = ""
    code: int = EXIT_OK
    sights: Sights = NO_SIGHTS

    def of(self, outcome: GateOutcome) -> tuple[JudgedFigure, ...]:
        return tuple(figure for figure in self.judged if figure.outcome is outcome)

    @property
    def exit_code(self) -> int:
        if self.problem:
            return self.code
        if self.of(GateOutcome.FAILED):
            return EXIT_FAILED
        if self.of(GateOutcome.REGRESSION):
            return EXIT_REGRESSION
        return EXIT_BASELINE if self.of(GateOutcome.TO_CONFIRM) or self.sights.fails else EXIT_OK

    @property
    def headline(self) -> str:
        if self.problem:
            known = {EXIT_BASELINE: "no baseline to judge by", EXIT_OK: "the history is too young"}
            return known.get(self.code, "nothing was measured")
        failed, worse, suspected = (
            len(self.of(outcome)) for outcome in (GateOutcome.FAILED, GateOutcome.REGRESSION, GateOutcome.TO_CONFIRM)
        )
        parts = [f"{failed} failed"] * (failed > 0) + [f"{worse} regression{'s' * (worse != 1)}"] * (worse > 0)
        parts += [f"{suspected} to confirm"] * (suspected > 0 and not self.sights.fails)
        if parts or not self.sights.fails:
            unsure = len(self.of(GateOutcome.UNSURE))
            return " and ".join(parts) or "no regression" + (f" found, {unsure} unsure" if unsure else "")
        count = len(self.sights.blind)
        return f"no regression, but a slow-down at its threshold would be missed in {count} figure{'s' * (count != 1)}"

    @property
    def counts(self) -> str:
        counts = ((len(self.of(name)), _COUNTED.get(name, name.value)) for name in GateOutcome)
        parts, total = [f"{count} {words}" for count, words in counts if count], len(self.judged)
        return f"{total} figure{'s' * (total != 1)}" + (f": {', '.join(parts)}" if parts else "")


_COUNTED = {GateOutcome.NONE: "without a number on both sides", GateOutcome.IGNORED: "not judged"}
