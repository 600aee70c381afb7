"""From comparisons to a verdict: suspects, their confirmation by a second look, failures of a build, and slow-downs
that would go undetected.

A figure is suspected if it is worse by more than its threshold, in ratio and in difference, and by more than chance
explains among that many figures. It fails only if a second measurement in a fresh process confirms it. Stored runs of
different times do not fail below 10% even then, unless the spread between runs is known: clocks, neighbours and drivers
change in between. Between two single runs the noise is unknown, but most cases did not change, and how far these moved
shows how far any may move.

A time whose threshold slow-down would go undetected does not pass: the gate ends with 4. Other
figures that noise leaves open are only listed, or no build would ever pass.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from fp8bench import units
from fp8bench.analysis.compare.interval import ALONE
from fp8bench.errors import EXIT_BASELINE, EXIT_FAILED, EXIT_OK, EXIT_REGRESSION
from fp8bench.features.gate.thresholds import Rules, Threshold, ruled_by, threshold_of
from fp8bench.model import Comparison, Direction, Evidence
from fp8bench.model.specs import COUNTS, RELATIVE, TIME
from fp8bench.report.panels import together

# At most this share of suspects may be chance; the second look removes nearly all of those.
CHANCE = 0.02
# With fewer cases the movement of a single case cannot be estimated.
LEAST_CASES = 12
# A second look must also be off by this many deviations: it shares the baseline, and its noise, with the first.
AGAIN = 3.0
_QUARTILE = statistics.NormalDist().inv_cdf(0.75)
# The nearer of two quartiles of n values is too near by this over the root of n.
_NEARER = 0.888


@dataclass(frozen=True)
class CaseSpread:
    """The common shift of all cases, and the deviation of a single case from it, as logarithms."""

    shift: float
    deviation: float

    def chance(self, log: float) -> float:
        distance = abs(log - self.shift)
        if not self.deviation:
            return 0.0 if distance else 1.0
        return math.erfc(distance / self.deviation / math.sqrt(2))

    def beyond(self, ratio: float) -> bool:
        return math.log(ratio) > AGAIN * self.deviation


def spread_of(logs: Sequence[float]) -> CaseSpread | None:
    """Returns the spread of unchanged cases among all; None for few cases. It uses the nearer quartile, so that neither
    regressions nor improvements count as noise, even if half of the cases changed. A common shift is not attributed to
    a case; from 10% on it exceeds a machine's usual variation, and counts."""
    if len(logs) < LEAST_CASES:
        return None
    low, middle, high = statistics.quantiles(logs, n=4)
    shift = middle if abs(middle) < math.log1p(ALONE) else 0.0
    nearer = min(max(shift - low, 0.0), max(high - shift, 0.0))
    return CaseSpread(shift, nearer / (_QUARTILE - _NEARER / math.sqrt(len(logs))))


def discoveries(p_values: Sequence[float], share: float) -> list[bool]:
    """Applies the rule of Benjamini and Hochberg: at most `share` of its picks are expected to be chance. If all are
    chance, it picks any with a probability of `share`."""
    ranked = sorted(range(len(p_values)), key=lambda place: p_values[place])
    passing = [rank for rank, place in enumerate(ranked, 1) if p_values[place] <= share * rank / len(p_values)]
    chosen = set(ranked[: max(passing, default=0)])
    return [place in chosen for place in range(len(p_values))]


class GateOutcome(StrEnum):
    """The gate's verdict on a figure."""

    REGRESSION = "regression"
    FAILED = "failed"
    SUSPECTED = "suspected"
    CANNOT_TELL = "cannot tell"
    CLEARED = "cleared"
    BETTER = "better"
    OPEN = "cannot tell (not blocking)"
    FINE = "fine"
    IGNORED = "ignored"
    NONE = "none"


NOT_TESTED = (GateOutcome.IGNORED, GateOutcome.NONE, GateOutcome.FAILED)
Key = tuple[str, str]


@dataclass(frozen=True)
class JudgedFigure:
    """A figure with its threshold and outcome. `again` is the second look, if there was one. `spread` is how far other
    cases of the same runs moved, if runs are too few to estimate their noise."""

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
    """Re-measured suspects: comparisons by case and figure, and how they were made; or why they are missing
    (`refused`). A look that `adds_up` shares its samples with later ones, which thus detect more."""

    comparisons: Mapping[Key, Comparison]
    how: str = ""
    refused: str = ""
    adds_up: bool = False


def join_looks(looks: Sequence[SecondLook]) -> SecondLook:
    comparisons: dict[Key, Comparison] = {}
    for look in looks:
        comparisons |= look.comparisons
    return SecondLook(
        comparisons,
        " and ".join(look.how for look in looks if look.how),
        "; ".join(look.refused for look in looks if look.refused),
        any(look.adds_up for look in looks),
    )


def key_of(figure: Comparison) -> Key:
    return figure.case, figure.metric


def first_look(comparisons: Sequence[Comparison], rules: Rules = ()) -> tuple[JudgedFigure, ...]:
    relative = {
        comparison.case for comparison in comparisons if comparison.metric == RELATIVE and comparison.ratio is not None
    }
    looked = [_judge_first(comparison, rules, relative) for comparison in comparisons]
    tested = [place for place, figure in enumerate(looked) if figure.outcome not in NOT_TESTED]
    # If runs are too few to show a spread, the other cases provide it.
    alone = together((comparisons[place].metric, place) for place in tested if is_alone(comparisons[place]))
    for places in alone.values():
        spread = spread_of([_log(looked[place]) for place in places])
        for place in places:
            looked[place] = replace(looked[place], spread=spread)
    chances = {place: chance_of(looked[place]) for place in tested}
    p_values = {place: chance for place, chance in chances.items() if chance is not None}
    for place, news in zip(p_values, discoveries(list(p_values.values()), CHANCE), strict=True):
        if looked[place].outcome is GateOutcome.SUSPECTED and not news and not clears(looked[place]):
            looked[place] = replace(
                looked[place],
                outcome=GateOutcome.OPEN,
                why=f"among {len(p_values)} figures, chance alone puts one this far off",
            )
    return tuple(looked)


def clears(figure: JudgedFigure) -> bool:
    """Whether a whole interval from shared rounds is beyond the threshold: then it is suspected regardless of the
    number of figures."""
    ratio = figure.comparison.ratio
    is_paired = figure.comparison.evidence is Evidence.PAIRED
    return is_paired and ratio is not None and ratio.low > 1 + figure.threshold.relative


def chance_of(figure: JudgedFigure) -> float | None:
    """Returns the probability of such a difference if nothing changed; None if it is unknown."""
    if figure.comparison.p_value is not None or figure.spread is None:
        return figure.comparison.p_value
    return figure.spread.chance(_log(figure))


def _log(figure: JudgedFigure) -> float:
    assert figure.comparison.ratio is not None
    return math.log(figure.comparison.ratio.point)


def second_look(judged: Sequence[JudgedFigure], look: SecondLook, rules: Rules = ()) -> tuple[JudgedFigure, ...]:
    return tuple(
        _settle(figure, look, rules) if figure.outcome is GateOutcome.SUSPECTED else figure for figure in judged
    )


def _judge_first(figure: Comparison, rules: Rules, relative: set[str]) -> JudgedFigure:
    threshold = threshold_of(figure, rules)
    if figure.failed:
        return JudgedFigure(figure, threshold, GateOutcome.FAILED, figure.why)
    if threshold.ignored:
        return JudgedFigure(figure, threshold, GateOutcome.IGNORED, "a rule requires it")
    if figure.direction is Direction.NONE:
        return JudgedFigure(figure, threshold, GateOutcome.NONE, figure.why)
    if figure.direction is Direction.DIFFERS:
        return JudgedFigure(figure, threshold, GateOutcome.IGNORED, figure.why)
    if figure.metric == TIME and figure.case in relative and ruled_by(figure, rules) is None:
        return JudgedFigure(
            figure,
            threshold,
            GateOutcome.IGNORED,
            "the time over the reference's, which does not depend on the machine's speed, is judged instead",
        )
    if exceeds(figure, threshold):
        # Counts would be the same again: no second look is needed.
        outcome = GateOutcome.REGRESSION if figure.metric in COUNTS else GateOutcome.SUSPECTED
        return JudgedFigure(figure, threshold, outcome, figure.why)
    outcomes = {Direction.BETTER: GateOutcome.BETTER, Direction.UNSURE: GateOutcome.OPEN}
    return JudgedFigure(figure, threshold, outcomes.get(figure.direction, GateOutcome.FINE), figure.why)


def exceeds(figure: Comparison, threshold: Threshold) -> bool:
    if figure.direction is Direction.DIFFERS or figure.before is None or figure.after is None:
        return False
    if figure.after - figure.before <= threshold.smallest:
        return False
    if figure.ratio is None:  # from nothing to something
        return figure.direction is Direction.WORSE
    # Below 10% a few stored runs are uncertain, but still suspects.
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


def _is_worse_again(figure: JudgedFigure, second: Comparison, rules: Rules) -> bool:
    if second.evidence is Evidence.HISTORY:
        # One new value belongs to the new level: if that is at the threshold, half of such values are below it.
        return second.direction is Direction.WORSE
    if figure.spread and second.ratio and is_alone(second) and not figure.spread.beyond(second.ratio.point):
        return False
    # The time may decide about a ratio to the reference, with the threshold of the time.
    same = second.metric == figure.comparison.metric
    return exceeds(second, figure.threshold if same else threshold_of(second, rules))


def _deciding_command(figure: JudgedFigure) -> str:
    if figure.comparison.evidence is Evidence.PAIRED:
        return "more sessions of such a duel decide (--sessions)"
    return f"`fp8bench duel suite {figure.comparison.suite} --against COMMIT` decides"


def _is_absent(figure: JudgedFigure, second: Comparison) -> bool:
    """Whether a second look rules out what the first one found; not finding it again is not enough."""
    if second.direction is Direction.DIFFERS:
        return False
    if second.ratio is None or is_exact(second):
        return True
    # A slow-down may be hidden by load on the first side and, with few runs, by the spread between runs.
    least = math.log1p(figure.threshold.relative) - math.log(second.others)
    if is_alone(second):
        least -= AGAIN * figure.spread.deviation if figure.spread else math.log1p(ALONE)
    elif second.direction in (Direction.SAME, Direction.BETTER) and second.others == 1:
        return True
    return second.ratio.level > 0 and math.log(second.ratio.high) <= least


def _settle(figure: JudgedFigure, look: SecondLook, rules: Rules) -> JudgedFigure:
    # 1. Without a second look, only what may fail alone fails.
    case = figure.comparison.case
    failed = (second for second in look.comparisons.values() if second.failed and second.case == case)
    second = next(failed, None) or look.comparisons.get(figure.key)
    if second is None:
        reason = f"not measured again: {look.refused or 'the case was not among what could be'}"
        outcome = GateOutcome.REGRESSION if may_fail(figure.comparison) else GateOutcome.SUSPECTED
        reason += f"; {_deciding_command(figure)}" if outcome is GateOutcome.SUSPECTED else ""
        return replace(figure, outcome=outcome, why=reason)
    # 2. A case that fails now has no number to compare.
    if second.failed:
        return replace(figure, outcome=GateOutcome.FAILED, why=f"{look.how}, it failed: {second.why}", again=second)
    # 3. A second look clears a figure only if it could have detected the change.
    if not _is_worse_again(figure, second, rules):
        if _is_absent(figure, second):
            return replace(figure, outcome=GateOutcome.CLEARED, why=f"{look.how}, it was not so", again=second)
        note = f" ({second.why})" if second.why else ""
        return replace(
            figure, why=f"{look.how}, it was not shown to be absent{note}: {_deciding_command(figure)}", again=second
        )
    # 4. Confirmed by two looks: a regression.
    if may_fail(second) or second.p_value is not None or second.evidence is Evidence.HISTORY:
        return replace(figure, outcome=GateOutcome.REGRESSION, why=f"{look.how}, it was so again", again=second)
    # 5. Confirmed, but by evidence that is too weak alone: it stays suspected.
    below = "against a single stored run nothing fails below 10%"
    unlike = second.ratio is not None and second.ratio.point > 1 + ALONE
    cause = second.why if unlike and second.why else below
    return replace(figure, why=f"{look.how}, it was so again; {cause}; {_deciding_command(figure)}", again=second)


# The share of builds in which a slow-down must be detected.
POWER = 0.8
# A series with fewer nights at its present level is young, and may miss its threshold.
NIGHTS = 14
# If the gate cannot detect changes of these figures, it does not pass.
TIMES = (TIME, RELATIVE)


@dataclass(frozen=True)
class Sight:
    """The smallest slow-down of one figure that both looks would detect, as a share: 0.05 is 5% slower.

    It is math.inf if none would be. `threshold` is the least that may fail. `unknown` is why the noise is unknown: then
    `smallest` is a lower bound. `nights` counts those of a history since its last step.
    """

    case: str
    metric: str
    threshold: float
    smallest: float
    unknown: str = ""
    nights: int | None = None

    @property
    def key(self) -> Key:
        return self.case, self.metric

    @property
    def enough(self) -> bool:
        return self.smallest <= self.threshold and not self.unknown

    @property
    def share(self) -> str:
        size = "none found" if math.isinf(self.smallest) else units.change(1 + self.smallest)
        return f"{'at least ' * bool(self.unknown and math.isfinite(self.smallest))}{size}"


def mark_blind(
    figures: Sequence[JudgedFigure], sights: Sequence[Sight], lost: Collection[str]
) -> tuple[JudgedFigure, ...]:
    """Marks the times with undetectable slow-downs at their threshold: those with too much noise, those whose interval
    extends beyond it, and those of cases that were `lost`: measured before, and not comparable now."""
    by_key = {sight.key: sight for sight in sights}
    return tuple(_mark_blind(figure, by_key.get(figure.key), lost) for figure in figures)


def _mark_blind(figure: JudgedFigure, sight: Sight | None, lost: Collection[str]) -> JudgedFigure:
    change = figure.comparison
    if change.metric not in TIMES:
        return figure
    if figure.outcome is GateOutcome.NONE and change.case in lost:
        return replace(figure, outcome=GateOutcome.CANNOT_TELL)
    if figure.outcome not in (GateOutcome.FINE, GateOutcome.OPEN) or sight is None:
        return figure
    reason = why_blind(sight, change)
    return replace(figure, outcome=GateOutcome.CANNOT_TELL, why=reason) if reason else figure


def why_blind(sight: Sight, change: Comparison) -> str:
    """Returns why a slow-down at the threshold would go undetected; '' if it would be detected."""
    threshold = units.change(1 + sight.threshold)
    if not sight.enough:
        reason = sight.unknown or change.why
        if sight.nights is not None and sight.nights < NIGHTS:
            reason = (
                reason or f"history too young: {sight.nights} nights at this level, of about {NIGHTS} that it takes"
            )
        visibility = f"the smallest slow-down that would have been found is {sight.share}"
        visibility = "no slow-down would have been found" if math.isinf(sight.smallest) else visibility
        return f"{visibility}, and the threshold is {threshold}" + (f": {reason}" if reason else "")
    if change.ratio is not None and change.ratio.high > 1 + sight.threshold:
        return f"its interval reaches {units.change(change.ratio.high)}, and the threshold is {threshold}"
    return ""


@dataclass(frozen=True)
class GateVerdict:
    """All figures judged. `title` names the compared sides. `problem` is why there is nothing to judge, with the exit
    `code` for that. `sights` are the smallest detectable slow-downs, the least sensitive first."""

    title: str
    judged: tuple[JudgedFigure, ...] = ()
    notes: tuple[str, ...] = ()
    problem: str = ""
    code: int = EXIT_OK
    sights: tuple[Sight, ...] = ()

    def of(self, *outcomes: GateOutcome) -> tuple[JudgedFigure, ...]:
        return tuple(figure for figure in self.judged if figure.outcome in outcomes)

    @property
    def exit_code(self) -> int:
        if self.problem:
            return self.code
        if self.of(GateOutcome.FAILED):
            return EXIT_FAILED
        if self.of(GateOutcome.REGRESSION):
            return EXIT_REGRESSION
        return EXIT_BASELINE if self.of(GateOutcome.SUSPECTED, GateOutcome.CANNOT_TELL) else EXIT_OK

    @property
    def headline(self) -> str:
        if self.problem:
            return "no baseline to judge by" if self.code == EXIT_BASELINE else "nothing was measured"
        failed, worse, suspected, blind, unsure = (len(self.of(outcome)) for outcome in _TOLD)
        parts = [f"{failed} failed"] * (failed > 0) + [f"{worse} regression{'s' * (worse != 1)}"] * (worse > 0)
        parts += [f"{suspected} suspected"] * (suspected > 0)
        parts += [f"cannot tell whether {blind} time{'s' * (blind != 1)} became worse"] * (blind > 0)
        return " and ".join(parts) or "no regression" + (
            f" found, {unsure} cannot tell (not blocking)" if unsure else ""
        )

    @property
    def counts(self) -> str:
        counts = ((len(self.of(name)), _COUNTED.get(name, name.value)) for name in GateOutcome)
        parts, total = [f"{count} {words}" for count, words in counts if count], len(self.judged)
        return f"{total} figure{'s' * (total != 1)}" + (f": {', '.join(parts)}" if parts else "")


_TOLD = (
    GateOutcome.FAILED,
    GateOutcome.REGRESSION,
    GateOutcome.SUSPECTED,
    GateOutcome.CANNOT_TELL,
    GateOutcome.OPEN,
)
_COUNTED = {GateOutcome.NONE: "without a number on both sides", GateOutcome.IGNORED: "not judged"}
