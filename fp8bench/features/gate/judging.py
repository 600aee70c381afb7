"""Judges each figure of a comparison: suspected, confirmed by a second look, failed, or impossible to decide.

A figure is suspected if it is worse by more than its threshold, both as a ratio and as a difference. It must also be
worse by more than chance explains among all judged figures. The gate fails for a suspected figure only if a second
measurement in a fresh process (the second look) confirms it.

Between stored runs, a confirmed slow-down below 10% is still no failure, because clocks, neighbours and drivers
change from run to run. It is a failure only if there are enough runs to know their spread. Between too few runs the
noise of a case is unknown. But most cases have not changed, and how far they moved shows how far any case may move.

The gate does not pass if it would not notice a slow-down of a time by its threshold: then it ends with exit code 4.
Other undecided figures are only listed, because otherwise no build would ever pass.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from fp8bench import units
from fp8bench.analysis.compare.interval import MIN_DEGREES_OF_FREEDOM, MIN_VISIBLE_FEW_RUNS_CHANGE
from fp8bench.errors import EXIT_BASELINE, EXIT_FAILED, EXIT_OK, EXIT_REGRESSION
from fp8bench.features.gate.thresholds import FigureThreshold, ThresholdRules, find_threshold, find_threshold_rule
from fp8bench.model import Comparison, Direction, Evidence
from fp8bench.model.run import BENCH
from fp8bench.model.specs import COUNTS, RELATIVE_TIME, TIME
from fp8bench.report.panels import together
from fp8bench.report.words.naming import many

# The largest expected share of suspects that are due to chance. The second measurement removes nearly all of these.
FALSE_SUSPECT_SHARE = 0.02
# The fewest cases from which the spread of a single case can be estimated.
MIN_CASES_FOR_SPREAD = 12
# The change in the second measurement must exceed this many standard deviations. Both measurements share the noise of
# one baseline, so the second one is not independent.
CONFIRMING_DEVIATIONS = 3.0
_NORMAL_QUARTILE = statistics.NormalDist().inv_cdf(0.75)
# Among n normal values, the nearer quartile is this many standard deviations / sqrt(n) too near to the median.
_QUARTILE_BIAS = 0.888


@dataclass(frozen=True)
class CaseSpread:
    """How times of unchanged cases move between two sets of runs, as logarithms of ratios. `shift` is the movement that
    all cases have in common, and `deviation` the standard deviation of a single case around it.
    """

    shift: float
    deviation: float

    def compute_p_value(self, log_ratio: float) -> float:
        log_ratio_distance = abs(log_ratio - self.shift)
        if not self.deviation:
            return 0.0 if log_ratio_distance else 1.0
        return math.erfc(log_ratio_distance / self.deviation / math.sqrt(2))


def estimate_spread(log_ratios: Sequence[float]) -> CaseSpread | None:
    """Returns how far unchanged cases move between two sets of runs. Returns None for fewer cases than
    `MIN_CASES_FOR_SPREAD`. The spread is the distance from the median to the nearer quartile, so regressions or
    improvements of up to half of the cases do not count as noise. A median shift below 10%, the usual variation of a
    machine, is subtracted.
    """
    if len(log_ratios) < MIN_CASES_FOR_SPREAD:
        return None
    low, median_log, high = statistics.quantiles(log_ratios, n=4)
    common_log_ratio = median_log if abs(median_log) < math.log1p(MIN_VISIBLE_FEW_RUNS_CHANGE) else 0.0
    nearer_quartile_distance = min(max(common_log_ratio - low, 0.0), max(high - common_log_ratio, 0.0))
    return CaseSpread(
        common_log_ratio, nearer_quartile_distance / (_NORMAL_QUARTILE - _QUARTILE_BIAS / math.sqrt(len(log_ratios)))
    )


def select_discoveries(p_values: Sequence[float], false_share: float) -> list[bool]:
    """Applies the Benjamini-Hochberg procedure, and returns which p-values it selects. At most `false_share` of the
    selected p-values are expected to be due to chance. If all differences are due to chance, it selects any p-value
    with a probability of `false_share`.
    """
    indices_by_p_value = sorted(range(len(p_values)), key=lambda index: p_values[index])
    significant_p_value_ranks = [
        rank
        for rank, index in enumerate(indices_by_p_value, 1)
        if p_values[index] <= false_share * rank / len(p_values)
    ]
    chosen_indices = set(indices_by_p_value[: max(significant_p_value_ranks, default=0)])
    return [index in chosen_indices for index in range(len(p_values))]


class GateOutcome(StrEnum):
    """The gate's verdict on one figure."""

    REGRESSION = "regression"
    FAILED = "failed"
    SUSPECTED = "suspected"
    CANNOT_TELL = "cannot tell"
    CLEARED = "cleared"
    BETTER = "better"
    OPEN = "cannot tell (not blocking)"
    WITHIN_THRESHOLD = "fine"
    IGNORED = "ignored"
    NONE = "none"


UNTESTED_OUTCOMES = (GateOutcome.IGNORED, GateOutcome.NONE, GateOutcome.FAILED)
FigureKey = tuple[str, str]


@dataclass(frozen=True)
class JudgedFigure:
    """A figure with its threshold and outcome. `again` is its comparison in the second measurement, if there was one.
    If there are too few runs to estimate the noise of the figure, `spread` is how far the other cases of the same runs
    moved.
    """

    comparison: Comparison
    threshold: FigureThreshold
    outcome: GateOutcome
    why: str = ""
    again: Comparison | None = None
    spread: CaseSpread | None = None

    @property
    def key(self) -> FigureKey:
        return case_and_metric(self.comparison)


@dataclass(frozen=True)
class SecondMeasurement:
    """The results of measuring suspects (figures that seem worse) again: comparisons by case and metric, and `how`
    they were measured. If they could not be measured, `refused` is the reason. If `pools_samples` is true, later
    measurements include the samples of this one, and so detect smaller changes.
    """

    comparisons: Mapping[FigureKey, Comparison]
    how: str = ""
    refused: str = ""
    pools_samples: bool = False


def join_second_looks(looks: Sequence[SecondMeasurement]) -> SecondMeasurement:
    comparisons: dict[FigureKey, Comparison] = {}
    for look in looks:
        comparisons |= look.comparisons
    return SecondMeasurement(
        comparisons,
        " and ".join(look.how for look in looks if look.how),
        "; ".join(look.refused for look in looks if look.refused),
        any(look.pools_samples for look in looks),
    )


def case_and_metric(figure: Comparison) -> FigureKey:
    return figure.case, figure.metric


def judge_first_look(comparisons: Sequence[Comparison], rules: ThresholdRules = ()) -> tuple[JudgedFigure, ...]:
    cases_with_ratio = {
        comparison.case
        for comparison in comparisons
        if comparison.metric == RELATIVE_TIME and comparison.ratio is not None
    }
    judged_figures = [_judge_comparison(comparison, rules, cases_with_ratio) for comparison in comparisons]
    tested_indices = [index for index, figure in enumerate(judged_figures) if figure.outcome not in UNTESTED_OUTCOMES]
    # If there are too few runs to estimate the noise of a case, use the spread of the other cases instead.
    few_run_figure_indices = [index for index in tested_indices if is_from_few_runs(comparisons[index])]
    for indices in together((comparisons[index].metric, index) for index in few_run_figure_indices).values():
        case_spread = estimate_spread([_compute_log_ratio(judged_figures[index]) for index in indices])
        for index in indices:
            judged_figures[index] = replace(judged_figures[index], spread=case_spread)
    # A figure beyond its threshold is suspected only if its p-value is small among all p-values, or its whole interval
    # is beyond the threshold.
    p_values = {}
    for index in tested_indices:
        p_value = probability_by_chance(judged_figures[index])
        if p_value is not None:
            p_values[index] = p_value
    are_discoveries = select_discoveries(list(p_values.values()), FALSE_SUSPECT_SHARE)
    reason = f"among {len(p_values)} figures, one differs by this much by chance"
    for index, is_discovery in zip(p_values, are_discoveries, strict=True):
        figure = judged_figures[index]
        if figure.outcome is GateOutcome.SUSPECTED and not (is_discovery or is_surely_beyond_threshold(figure)):
            judged_figures[index] = replace(figure, outcome=GateOutcome.OPEN, why=reason)
    return tuple(judged_figures)


def is_surely_beyond_threshold(figure: JudgedFigure) -> bool:
    """Returns whether the whole interval of a paired comparison is beyond the threshold. Then the figure is
    suspected, however many other figures are judged.
    """
    ratio = figure.comparison.ratio
    has_paired_evidence = figure.comparison.evidence is Evidence.PAIRED
    return has_paired_evidence and ratio is not None and ratio.low > 1 + figure.threshold.relative


def probability_by_chance(figure: JudgedFigure) -> float | None:
    """Returns the probability that a figure differs this much although nothing has changed. Returns None if the noise
    is unknown.
    """
    if figure.comparison.p_value is not None or figure.spread is None:
        return figure.comparison.p_value
    return figure.spread.compute_p_value(_compute_log_ratio(figure))


def _compute_log_ratio(figure: JudgedFigure) -> float:
    assert figure.comparison.ratio is not None
    return math.log(figure.comparison.ratio.point)


def apply_second_look(
    judged: Sequence[JudgedFigure], look: SecondMeasurement, rules: ThresholdRules = ()
) -> tuple[JudgedFigure, ...]:
    return tuple(
        _judge_remeasured_figure(figure, look, rules) if figure.outcome is GateOutcome.SUSPECTED else figure
        for figure in judged
    )


def _judge_comparison(figure: Comparison, rules: ThresholdRules, cases_with_ratio: set[str]) -> JudgedFigure:
    threshold = find_threshold(figure, rules)
    gate_outcome = GateOutcome.WITHIN_THRESHOLD
    reason = figure.why
    if figure.failed:
        gate_outcome = GateOutcome.FAILED
    elif threshold.ignored:
        gate_outcome = GateOutcome.IGNORED
        reason = "a rule requires it"
    elif figure.direction is Direction.NONE:
        gate_outcome = GateOutcome.NONE
    elif figure.direction is Direction.DIFFERS:
        gate_outcome = GateOutcome.IGNORED
    elif figure.metric == TIME and figure.case in cases_with_ratio and find_threshold_rule(figure, rules) is None:
        gate_outcome = GateOutcome.IGNORED
        reason = "the time over the reference's, which does not depend on the machine's speed, is judged instead"
    elif exceeds_threshold(figure, threshold):
        # Counts, such as FLOPs, do not vary between runs, so they need no second measurement.
        gate_outcome = GateOutcome.REGRESSION if figure.metric in COUNTS else GateOutcome.SUSPECTED
    elif figure.direction is Direction.BETTER:
        gate_outcome = GateOutcome.BETTER
    elif figure.direction is Direction.UNSURE:
        gate_outcome = GateOutcome.OPEN
    return JudgedFigure(figure, threshold, gate_outcome, reason)


def exceeds_threshold(figure: Comparison, threshold: FigureThreshold) -> bool:
    if figure.direction is Direction.DIFFERS or figure.before is None or figure.after is None:
        return False
    if figure.after - figure.before <= threshold.smallest:
        return False
    if figure.ratio is None:  # the previous value was 0, so the ratio is undefined
        return figure.direction is Direction.WORSE
    # Between few stored runs, a slow-down below 10% is uncertain, but must be measured again.
    is_surely_worse = figure.direction is Direction.WORSE or (is_from_few_runs(figure) and figure.ratio.low > 1)
    return is_surely_worse and figure.ratio.point > 1 + threshold.relative


def can_fail_without_confirmation(figure: Comparison) -> bool:
    if figure.evidence is Evidence.PAIRED or figure.ratio is None or has_exact_ratio(figure):
        return True
    return figure.direction is Direction.WORSE and figure.ratio.point >= 1 + MIN_VISIBLE_FEW_RUNS_CHANGE


def has_exact_ratio(figure: Comparison) -> bool:
    return figure.ratio is not None and figure.ratio.low == figure.ratio.high and figure.ratio.level == 1


def is_from_few_runs(figure: Comparison) -> bool:
    lacks_test_evidence = figure.evidence is not Evidence.PAIRED and figure.p_value is None
    return lacks_test_evidence and figure.ratio is not None and not has_exact_ratio(figure) and figure.ratio.level > 0


def _is_confirmed(figure: JudgedFigure, second: Comparison, rules: ThresholdRules) -> bool:
    if second.evidence is Evidence.HISTORY:
        # A series is measured again only once. The new value need not exceed the threshold: if the true slow-down
        # equals the threshold, only half of all values exceed it.
        return second.direction is Direction.WORSE
    if (
        figure.spread
        and second.ratio
        and is_from_few_runs(second)
        and math.log(second.ratio.point) <= CONFIRMING_DEVIATIONS * figure.spread.deviation
    ):
        return False
    # A duel measures the time, not the ratio to the reference. So the time and its threshold decide.
    is_same_metric = second.metric == figure.comparison.metric
    return exceeds_threshold(second, figure.threshold if is_same_metric else find_threshold(second, rules))


def suggest_decisive_runs(change: Comparison) -> str:
    if change.evidence is Evidence.PAIRED:
        return "more sessions of such a duel decide (--sessions)"
    if change.suite == BENCH:
        return f"{MIN_DEGREES_OF_FREEDOM + 2} runs in all decide: repeat `fp8bench bench` at both commits"
    return f"`fp8bench duel suite {change.suite} --against {change.since[:8] or 'COMMIT'}` decides"


def _is_slow_down_ruled_out(figure: JudgedFigure, second: Comparison) -> bool:
    """Returns whether a second measurement (`second`) shows that the suspected slow-down is not real. A second
    measurement that could hide the slow-down does not show this.
    """
    if second.direction is Direction.DIFFERS:
        return False
    if second.ratio is None or has_exact_ratio(second):
        return True
    # Other processes may have slowed down one side, by the factor `others`. This may hide a slow-down, and so may the
    # spread between few runs.
    max_log_ratio = math.log1p(figure.threshold.relative) - math.log(second.others)
    if is_from_few_runs(second):
        max_log_ratio -= (
            CONFIRMING_DEVIATIONS * figure.spread.deviation
            if figure.spread
            else math.log1p(MIN_VISIBLE_FEW_RUNS_CHANGE)
        )
    elif second.direction in (Direction.SAME, Direction.BETTER) and second.others == 1:
        return True
    return second.ratio.level > 0 and math.log(second.ratio.high) <= max_log_ratio


def _judge_remeasured_figure(figure: JudgedFigure, look: SecondMeasurement, rules: ThresholdRules) -> JudgedFigure:
    # 1. A figure that was not measured again fails only if its first measurement is enough evidence alone.
    first = figure.comparison
    failed_comparisons = (second for second in look.comparisons.values() if second.failed and second.case == first.case)
    second = next(failed_comparisons, None) or look.comparisons.get(figure.key)
    suggestion = suggest_decisive_runs(first)
    if second is None:
        reason = f"not measured again: {look.refused or 'the case was not among what could be'}"
        if can_fail_without_confirmation(first):
            return replace(figure, outcome=GateOutcome.REGRESSION, why=reason)
        return replace(figure, why=f"{reason}; {suggestion}")
    # 2. A case that failed when measured again has no number to compare.
    figure = replace(figure, again=second)
    if second.failed:
        return replace(figure, outcome=GateOutcome.FAILED, why=f"{look.how}, it failed: {second.why}")
    # 3. If the second measurement does not confirm the slow-down, the outcome is CLEARED if it rules the slow-down out,
    # and otherwise SUSPECTED.
    if not _is_confirmed(figure, second, rules):
        if _is_slow_down_ruled_out(figure, second):
            return replace(figure, outcome=GateOutcome.CLEARED, why=f"{look.how}, it was not worse")
        reason = f" ({second.why})" if second.why else ""
        return replace(figure, why=f"{look.how}, it was neither confirmed nor ruled out{reason}: {suggestion}")
    # 4. If both measurements show the slow-down with enough evidence, the figure is a regression.
    has_strong_evidence = second.p_value is not None or second.evidence is Evidence.HISTORY
    if has_strong_evidence or can_fail_without_confirmation(second):
        return replace(figure, outcome=GateOutcome.REGRESSION, why=f"{look.how}, it was worse again")
    # 5. Otherwise the evidence is too weak, and the figure remains suspected.
    reason = "against a single stored run nothing fails below 10%"
    if second.why and second.ratio is not None and second.ratio.point > 1 + MIN_VISIBLE_FEW_RUNS_CHANGE:
        reason = second.why
    return replace(figure, why=f"{look.how}, it was worse again; {reason}; {suggestion}")


# A slow-down counts as detectable if the gate would find it in this share of all builds.
DETECTION_PROBABILITY = 0.8
# About how many nightly values at one level it takes to detect a slow-down as large as the threshold.
MIN_NIGHTLY_VALUES = 14
# The metrics of time. The gate passes only if it would detect a slow-down as large as the threshold in each of them.
TIME_METRICS = (TIME, RELATIVE_TIME)


@dataclass(frozen=True)
class DetectionLimit:
    """The smallest slow-down of one figure that both measurements (looks) would detect, as a share: 0.05 is 5%
    slower.

    `smallest` is math.inf if no slow-down would be detected. `threshold` is the smallest slow-down for which the gate
    may fail. If the noise is unknown, `unknown` is the reason, and `smallest` is a lower bound. `nights` is the
    number of nightly values of a history since its last step.
    """

    case: str
    metric: str
    threshold: float
    smallest: float
    unknown: str = ""
    nights: int | None = None

    @property
    def key(self) -> FigureKey:
        return self.case, self.metric

    @property
    def can_detect_threshold(self) -> bool:
        return self.smallest <= self.threshold and not self.unknown

    @property
    def smallest_text(self) -> str:
        if math.isinf(self.smallest):
            return "none detectable"
        return ("at least " if self.unknown else "") + units.change(1 + self.smallest)


def mark_undetectable_figures(
    figures: Sequence[JudgedFigure], limits: Sequence[DetectionLimit], lost_cases: Collection[str]
) -> tuple[JudgedFigure, ...]:
    """Marks each time as `CANNOT_TELL` if the gate would not detect a slow-down as large as its threshold: there is too
    much noise, or the interval extends beyond the threshold. Also marks the times of `lost_cases`, which have an
    earlier time but no comparable time now.
    """
    limits_by_key = {limit.key: limit for limit in limits}
    return tuple(_mark_undetectable_figure(figure, limits_by_key.get(figure.key), lost_cases) for figure in figures)


def _mark_undetectable_figure(
    figure: JudgedFigure, limit: DetectionLimit | None, lost_cases: Collection[str]
) -> JudgedFigure:
    change = figure.comparison
    if change.metric not in TIME_METRICS:
        return figure
    if figure.outcome is GateOutcome.NONE and change.case in lost_cases:
        return replace(figure, outcome=GateOutcome.CANNOT_TELL)
    if figure.outcome not in (GateOutcome.WITHIN_THRESHOLD, GateOutcome.OPEN) or limit is None:
        return figure
    reason = explain_detection_limit(limit, change)
    return replace(figure, outcome=GateOutcome.CANNOT_TELL, why=reason) if reason else figure


def explain_detection_limit(limit: DetectionLimit, change: Comparison) -> str:
    """Returns why the gate would not detect a slow-down as large as the threshold; '' if it would."""
    threshold = units.change(1 + limit.threshold)
    if not limit.can_detect_threshold:
        reason = limit.unknown or change.why
        night_count = limit.nights
        if not reason and night_count is not None and night_count < MIN_NIGHTLY_VALUES:
            reason = (
                f"history too young: {night_count} nights at this level, of about {MIN_NIGHTLY_VALUES} that it takes"
            )
        detection_limit_text = f"the smallest slow-down that would have been found is {limit.smallest_text}"
        if math.isinf(limit.smallest):
            detection_limit_text = "no slow-down would have been found"
        return f"{detection_limit_text}, and the threshold is {threshold}" + (f": {reason}" if reason else "")
    if change.ratio is not None and change.ratio.high > 1 + limit.threshold:
        return f"its interval reaches {units.change(change.ratio.high)}, and the threshold is {threshold}"
    return ""


@dataclass(frozen=True)
class GateVerdict:
    """The gate's verdict on all figures. `title` names the compared sides. If nothing can be judged, `problem` is the
    reason, and `code` its exit code. `sights` has the smallest slow-down of each figure that the gate would detect, the
    least sensitive figure first.
    """

    title: str
    judged: tuple[JudgedFigure, ...] = ()
    notes: tuple[str, ...] = ()
    problem: str = ""
    code: int = EXIT_OK
    sights: tuple[DetectionLimit, ...] = ()

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
        failed, worse, suspected, undetectable, unsure = (len(self.of(outcome)) for outcome in _OUTCOMES_IN_HEADLINE)
        count_text_pairs = (
            (failed, f"{failed} failed"),
            (worse, many(worse, "regression")),
            (suspected, f"{suspected} suspected"),
            (undetectable, f"cannot tell whether {many(undetectable, 'time')} became worse"),
        )
        headline = " and ".join(text for count, text in count_text_pairs if count)
        if headline or not unsure:
            return headline or "no regression"
        return f"no regression found, {unsure} cannot tell (not blocking)"

    @property
    def counts(self) -> str:
        counts_and_labels = (
            (len(self.of(name)), _COUNT_LABEL_BY_OUTCOME.get(name, name.value)) for name in GateOutcome
        )
        counts_text = ", ".join(f"{count} {label}" for count, label in counts_and_labels if count)
        total = many(len(self.judged), "figure")
        return f"{total}: {counts_text}" if counts_text else total


_OUTCOMES_IN_HEADLINE = (
    GateOutcome.FAILED,
    GateOutcome.REGRESSION,
    GateOutcome.SUSPECTED,
    GateOutcome.CANNOT_TELL,
    GateOutcome.OPEN,
)
_COUNT_LABEL_BY_OUTCOME = {GateOutcome.NONE: "without a number on both sides", GateOutcome.IGNORED: "not judged"}
