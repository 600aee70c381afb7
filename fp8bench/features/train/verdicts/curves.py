"""The loss curves of a training, the figure that is compared, and the verdicts on pairs of seeds. The compared figure
was declared in advance: the mean training loss over the last third of the steps.

Each seed of an arm is paired with the same seed of the reference. Their gaps are judged by Student's t: the 99%
interval decides, and the 95% interval is shown. Intervals are also computed as if the training had ended at each of its
last ten steps. All these intervals are joined, so that a verdict seldom depends on the last step.

A verdict has two parts. The interval against 0 shows whether there is a difference, and the interval against the margin
shows whether the difference matters. A verdict is about a single arm: of a hundred arms that do not differ from their
reference, at most one is called worse or better on average.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from fp8bench.analysis.compare.interval import student_quantile
from fp8bench.features.train.values import NOT_FINITE_EVENT, Lines, StepRow, StreamLine, TrainingEvent, Validation
from fp8bench.model import Interval
from fp8bench.report.panels import together

HELD_OUT_PART = "held-out"
# The endpoint of a curve is the mean loss over the last 1/10 of the steps. Arms are compared by the mean loss over the
# last 1/3.
_ENDPOINT_RANGE_DIVISOR = 10
_COMPARED_STEPS_DIVISOR = 3
# The training is judged as if it had ended at different steps: the last step, and others in the last tenth. This is the
# largest number of such steps.
_MAX_JUDGED_END_STEPS = 10
# If the reference's loss has fallen to this share of its first loss, the model has memorised the text, and relative
# gaps are meaningless. For bytes this share is a loss of 0.055 per token. Text that is learned but not memorised
# stays above 0.6.
_MEMORISED_LOSS_SHARE = 0.01
_STOPPED_EVENT = "stopped"

ArmAndSeed = tuple[str, int]


class VoidReason(StrEnum):
    """The reason why a seed does not count for an arm."""

    NOT_FINISHED = "not finished"
    NOT_FINITE = "not finite"
    NEARLY_ZERO = "the reference's loss is nearly zero or below"
    OTHER_TOKENS = "it has another number of tokens per step than the reference"
    COPY = "the reference's losses equal those of another seed, bit for bit"


@dataclass(frozen=True)
class LossCurve:
    """One arm in one seed: its rows in the order of steps. `steps` is the number of steps that was requested."""

    steps: int
    rows: tuple[StepRow, ...] = ()
    held_out: Mapping[int, float] = field(default_factory=dict)
    events: frozenset[str] = frozenset()

    @cached_property
    def losses(self) -> tuple[float, ...]:
        """Returns the loss of each step. In a watched script, the loss of the first step is NaN, because watching
        begins after that step.
        """
        missing_loss_count = min(1, self.rows[0].step) if self.rows else 0
        return (*[math.nan] * missing_loss_count, *(row.loss for row in self.rows))

    @property
    def is_complete(self) -> bool:
        return len(self.losses) == self.steps

    @property
    def endpoint(self) -> float:
        """Returns the mean loss of the last tenth of the steps. It is NaN if one of these losses is not finite, or if
        the arm did not finish.
        """
        endpoint_losses = self.losses[-count_endpoint_steps(self.steps) :]
        if self.is_complete and all(map(math.isfinite, endpoint_losses)):
            return math.fsum(endpoint_losses) / len(endpoint_losses)
        return math.nan

    @property
    def loss_fall(self) -> float:
        """Returns the share by which the loss fell from the first step to the endpoint, which is the mean of the last
        steps. If the share by which the held-out loss fell is larger, returns that share, because the first batch may
        be easy. Returns NaN if the endpoint is not finite.
        """
        if not (self.rows and self.rows[0].loss > 0):
            return math.nan
        training_loss_fall = 1 - self.endpoint / self.rows[0].loss
        first_validation_loss = self.held_out.get(0)
        last_validation_loss = self.held_out.get(self.steps)
        if first_validation_loss and last_validation_loss and math.isfinite(training_loss_fall):
            return max(training_loss_fall, 1 - last_validation_loss / first_validation_loss)
        return training_loss_fall

    @property
    def has_non_finite_end(self) -> bool:
        """Returns whether the arm ended with a loss that is not finite. Returns False for an arm that recovered from
        such a loss, and for an arm whose process was lost.
        """
        if self.is_complete:
            return not math.isfinite(self.rows[-1].loss)
        return {_STOPPED_EVENT, NOT_FINITE_EVENT} <= self.events


CurveByKey = Mapping[ArmAndSeed, LossCurve]


def count_endpoint_steps(steps: int) -> int:
    return max(1, steps // _ENDPOINT_RANGE_DIVISOR)


def make_curves(lines: Iterable[StreamLine], steps: int) -> dict[ArmAndSeed, LossCurve]:
    lines_by_arm_and_seed = together(((line.arm, line.seed), line) for line in lines)
    curves = {key: _make_loss_curve(arm_lines, steps) for key, arm_lines in lines_by_arm_and_seed.items()}
    return {key: curve for key, curve in curves.items() if curve.rows}


def select_curves(curves: CurveByKey, arm: str) -> dict[int, LossCurve]:
    """Returns an arm's curves by seed."""
    return {seed: curve for (name, seed), curve in curves.items() if name == arm}


def _make_loss_curve(lines: Lines, steps: int) -> LossCurve:
    """Makes a curve from lines. If a step has several lines, the last one counts."""
    rows = {line.step: line for line in lines if isinstance(line, StepRow)}
    held_out = {line.step: line.loss for line in lines if isinstance(line, Validation) and line.of == HELD_OUT_PART}
    events = frozenset(line.kind for line in lines if isinstance(line, TrainingEvent))
    return LossCurve(steps, tuple(rows[step] for step in sorted(rows)), held_out, events)


@dataclass(frozen=True)
class SeedComparison:
    """One seed of an arm, compared with the same seed of its reference. `gap` is the share by which the arm's mean loss
    over the last third of the steps exceeds the reference's. `held_out` is the same gap on held-out text; None without
    such a text, or if its last loss is not finite. `earlier` holds the gaps that would result if the training had ended
    some steps earlier.
    """

    seed: int
    gap: float
    held_out: float | None = None
    same_bits: bool = False
    earlier: tuple[float, ...] = ()


def make_seed_pair(reference: LossCurve, arm: LossCurve, seed: int) -> SeedComparison | VoidReason:
    if not (reference.is_complete and arm.is_complete):
        return VoidReason.NOT_FINISHED
    # A gap needs two finite endpoints, even if all earlier losses are finite.
    reference_endpoint = reference.endpoint
    arm_endpoint = arm.endpoint
    if math.isnan(reference_endpoint) or math.isnan(arm_endpoint):
        return VoidReason.NOT_FINITE
    # relative to a negative loss, a gap would have the wrong sign
    if reference_endpoint <= _MEMORISED_LOSS_SHARE * abs(reference.rows[0].loss):
        return VoidReason.NEARLY_ZERO
    if reference.rows[-1].tokens != arm.rows[-1].tokens:
        return VoidReason.OTHER_TOKENS
    # Compute the gap as if the training had ended at each of the last steps, so that the last batch alone does not
    # decide the verdict.
    judged_endpoint_steps = range(
        arm.steps - min(_MAX_JUDGED_END_STEPS - 1, arm.steps // _ENDPOINT_RANGE_DIVISOR), arm.steps + 1
    )
    *earlier_gaps, gap = measure_loss_gaps(reference, arm, judged_endpoint_steps)
    if any(map(math.isnan, (*earlier_gaps, gap))):
        return VoidReason.NEARLY_ZERO
    held_out = _measure_held_out_gap(reference, arm)
    has_same_bits = reference.losses == arm.losses
    return SeedComparison(seed, gap, held_out, has_same_bits, tuple(earlier_gaps))


def measure_loss_gaps(reference: LossCurve, arm: LossCurve, ends: Sequence[int]) -> list[float]:
    """Returns a gap of the loss for each number of steps in `ends`, as if the training had ended there. A gap compares
    the means over the last third of the steps. A step is left out unless the losses of both arms are finite. A gap is
    NaN if the reference's mean is not positive.
    """
    loss_pairs = list(zip(reference.losses, arm.losses, strict=False))
    loss_gaps = []
    for end_step in ends:
        gap = (
            _measure_gap_of_means(loss_pairs[_find_last_third_start(end_step) : end_step])
            if end_step <= len(loss_pairs)
            else None
        )
        loss_gaps.append(math.nan if gap is None else gap)
    return loss_gaps


def _measure_gap_of_means(losses: Sequence[tuple[float, float]]) -> float | None:
    """Returns the gap between the mean losses of the reference and the arm. Pairs of losses that are not both finite
    are left out. Returns None if the reference's mean is not positive.
    """
    # Both means must cover the same steps.
    finite_loss_pairs = [pair for pair in losses if math.isfinite(sum(pair))]
    reference_sum, arm_sum = map(sum, zip(*finite_loss_pairs, strict=True)) if finite_loss_pairs else (0.0, 0.0)
    return arm_sum / reference_sum - 1 if reference_sum > 0 else None


def _find_last_third_start(steps: int) -> int:
    """Returns the first step of the last third of a training. Losses are compared over this third."""
    return steps - max(1, steps // _COMPARED_STEPS_DIVISOR)


def _measure_held_out_gap(reference: LossCurve, arm: LossCurve) -> float | None:
    """Returns the gap of the mean held-out losses, over all validations in the last third of the steps. Returns None
    if the loss of the last validation is not finite.
    """
    steps = sorted(
        step for step in reference.held_out.keys() & arm.held_out if step > _find_last_third_start(arm.steps)
    )
    losses = [(reference.held_out[step], arm.held_out[step]) for step in steps]
    return _measure_gap_of_means(losses) if losses and math.isfinite(sum(losses[-1])) else None


MIN_PAIRS = 5
DECIDING_CONFIDENCE_LEVEL = 0.99
SHOWN_CONFIDENCE_LEVEL = 0.95
# The largest total number of seeds that a verdict proposes.
MAX_SEEDS = 1000
# This quantile of the normal distribution leaves out 10% on each side. So the proposed number of seeds is enough in at
# least 80% of trainings, if gap and deviation are estimated correctly.
_STATISTICAL_POWER_QUANTILE = statistics.NormalDist().inv_cdf(0.9)


class LearningVerdict(StrEnum):
    """The verdict on an arm. Worse and better mean a certain difference, however small. Within noise means that no
    difference is visible, and that the true difference is not beyond the margin.
    """

    DIVERGED = "diverged"
    DID_NOT_LEARN = "did not learn"
    WORSE = "worse"
    WITHIN_NOISE = "within noise"
    BETTER = "better"
    INCONCLUSIVE = "inconclusive"


class DifferenceImportance(StrEnum):
    """Whether a difference exceeds the margin: certainly, certainly not, or possibly."""

    YES = "yes"
    NO = "no"
    OPEN = "open"


class InconclusiveReason(StrEnum):
    """The reason why a comparison is inconclusive."""

    SAME_BITS = "although the precision differs, every loss equals the reference's, bit for bit"
    OTHER_RATE = "the arm has a lower loss at another learning rate"
    FALLBACK = "its matrix products were computed in another precision than the arm's"
    FEW_PAIRS = "too few pairs of seeds"
    NO_HELD_OUT = "too few pairs of seeds have a loss on held-out text"
    DISAGREE = "the losses on training and on held-out text disagree"
    TOO_WIDE = "the interval is too wide"


@dataclass(frozen=True)
class LossGap:
    """The share by which an arm's loss exceeds its reference's, as a mean over seeds. A single seed has no intervals.
    `deviation` is the standard deviation between seeds. If the intervals also cover shorter trainings, `deviation` is
    the value that would give equally wide intervals without these trainings.
    """

    point: float
    pairs: int
    deviation: float
    decides: Interval | None
    shown: Interval | None


@dataclass(frozen=True)
class JudgedArm:
    """The verdict on an arm's pairs of seeds. `matters` is None if a verdict is impossible, for example with too few
    pairs. `more_seeds` is the number of further seeds that would probably be enough for a verdict. It is None if that
    number is unknown. It is also None if further seeds would not count: `void` is the reason.
    """

    learned: LearningVerdict
    gap: LossGap | None = None
    held_out: LossGap | None = None
    why: InconclusiveReason | None = None
    more_seeds: int | None = None
    void: VoidReason | None = None
    matters: DifferenceImportance | None = None

    @property
    def is_tolerated(self) -> bool:
        """Returns whether the arm is worse by less than the margin."""
        return self.learned is LearningVerdict.WORSE and self.matters is DifferenceImportance.NO


# If a seed is void for one of these reasons, further seeds would be void as well.
LASTING_VOID_REASONS = (VoidReason.NOT_FINISHED, VoidReason.NEARLY_ZERO, VoidReason.OTHER_TOKENS)


def find_deciding_interval(gap: LossGap | None) -> Interval | None:
    """Returns the 99% interval of a gap; None if too few pairs of seeds count for a verdict."""
    return gap.decides if gap is not None and gap.pairs >= MIN_PAIRS else None


def average_gaps(gaps: Sequence[float]) -> LossGap | None:
    if not gaps:
        return None
    point = statistics.fmean(gaps)
    pair_count = len(gaps)
    # The deviation of a single gap is unknown, so it gets no interval.
    if pair_count == 1:
        return LossGap(point, 1, math.nan, None, None)
    # statistics.stdev computes with fractions, which takes eighty times as long.
    deviation = math.sqrt(math.fsum((gap - point) ** 2 for gap in gaps) / (pair_count - 1))
    deciding_interval, shown_interval = (
        _make_student_interval(point, deviation, pair_count, level)
        for level in (DECIDING_CONFIDENCE_LEVEL, SHOWN_CONFIDENCE_LEVEL)
    )
    return LossGap(point, pair_count, deviation, deciding_interval, shown_interval)


def judge_seed_pairs(pairs: Sequence[SeedComparison], margin: float, has_held_out: bool = True) -> JudgedArm:
    """Returns the verdict on the pairs of an arm that has not diverged. With `has_held_out`, held-out losses must
    confirm the verdict.
    """
    gap = _measure_gap_over_ends(pairs)
    held_out = average_gaps([pair.held_out for pair in pairs if pair.held_out is not None])
    inconclusive_arm = JudgedArm(LearningVerdict.INCONCLUSIVE, gap, held_out)
    interval = find_deciding_interval(gap)
    held_out_interval = find_deciding_interval(held_out)
    # 1. Require enough pairs for an interval, and also enough held-out losses.
    if gap is None or interval is None:
        return replace(inconclusive_arm, why=InconclusiveReason.FEW_PAIRS, more_seeds=MIN_PAIRS - len(pairs))
    if has_held_out and held_out_interval is None:
        return replace(inconclusive_arm, why=InconclusiveReason.NO_HELD_OUT)
    # 2. Compare the interval with 0 and with the margin.
    learning_verdict = classify_loss_gap(interval, margin)
    gap_importance = classify_importance(interval, margin)
    if learning_verdict is LearningVerdict.INCONCLUSIVE:
        return replace(
            inconclusive_arm,
            matters=gap_importance,
            why=InconclusiveReason.TOO_WIDE,
            more_seeds=count_further_seeds(gap, margin),
        )
    # 3. A verdict stands only if held-out text confirms it.
    if (
        has_held_out
        and held_out_interval
        and not _is_confirmed_by_held_out(learning_verdict, gap_importance, held_out_interval, margin)
    ):
        return replace(inconclusive_arm, why=InconclusiveReason.DISAGREE)
    return replace(inconclusive_arm, learned=learning_verdict, matters=gap_importance)


def _measure_gap_over_ends(pairs: Sequence[SeedComparison]) -> LossGap | None:
    """Returns the mean gap of the pairs. Its intervals also cover the gaps of trainings that would have ended some
    steps earlier.
    """
    gap = average_gaps([pair.gap for pair in pairs])
    if gap is None or gap.pairs == 1:
        return gap
    end_step_gaps = [gap]
    for earlier_gaps in zip(*(pair.earlier for pair in pairs), strict=True):
        end_step_gaps += filter(None, [average_gaps(earlier_gaps)])
    deciding_interval = _extend_first_interval([end_gap.decides for end_gap in end_step_gaps if end_gap.decides])
    shown_interval = _extend_first_interval([end_gap.shown for end_gap in end_step_gaps if end_gap.shown])
    # Compute the standard deviation of gaps that would give an interval as wide as the extended one. The number of
    # further seeds is estimated from it.
    half_width = (deciding_interval.high - deciding_interval.low) / 2
    deviation = half_width * math.sqrt(gap.pairs) / student_quantile(DECIDING_CONFIDENCE_LEVEL, gap.pairs - 1)
    return replace(gap, deviation=deviation, decides=deciding_interval, shown=shown_interval)


def _extend_first_interval(intervals: Sequence[Interval]) -> Interval:
    """Returns the first interval, extended so that it covers all of them."""
    low = min(interval.low for interval in intervals)
    return replace(intervals[0], low=low, high=max(interval.high for interval in intervals))


def classify_loss_gap(interval: Interval, margin: float) -> LearningVerdict:
    """Returns WORSE for an interval above 0, and BETTER for an interval below 0. Any other interval is WITHIN_NOISE if
    it is inside the margin, and otherwise INCONCLUSIVE.
    """
    if interval.low > 0:
        return LearningVerdict.WORSE
    if interval.high < 0:
        return LearningVerdict.BETTER
    is_inside_margin = classify_importance(interval, margin) is DifferenceImportance.NO
    return LearningVerdict.WITHIN_NOISE if is_inside_margin else LearningVerdict.INCONCLUSIVE


def classify_importance(interval: Interval, margin: float) -> DifferenceImportance:
    if -margin <= interval.low and interval.high <= margin:
        return DifferenceImportance.NO
    return DifferenceImportance.YES if interval.low > margin or interval.high < -margin else DifferenceImportance.OPEN


def _is_confirmed_by_held_out(
    learned: LearningVerdict, matters: DifferenceImportance, held_out: Interval, margin: float
) -> bool:
    """Returns whether the held-out gap confirms a verdict. If the training gap is certainly inside the margin, the
    verdict is confirmed unless the held-out gap is certainly beyond the margin or certainly has the opposite sign.
    Otherwise the held-out gap must have the sign of the verdict.
    """
    verdict_sign = {LearningVerdict.WORSE: 1, LearningVerdict.BETTER: -1}.get(learned, 0)
    if matters is not DifferenceImportance.NO:
        return verdict_sign * held_out.point > 0
    has_opposite_sign = verdict_sign > 0 > held_out.high or verdict_sign < 0 < held_out.low
    return not has_opposite_sign and classify_importance(held_out, margin) is not DifferenceImportance.YES


def _make_student_interval(point: float, deviation: float, count: int, level: float) -> Interval:
    half_width = student_quantile(level, count - 1) * deviation / math.sqrt(count)
    return Interval(point, point - half_width, point + half_width, level)


def count_further_seeds(gap: LossGap, margin: float) -> int | None:
    """Returns the smallest number of further seeds that would probably be enough for a verdict. Returns None if more
    than 1000 seeds in all would be needed.
    """

    def is_decisive(count: int) -> bool:
        standard_error = gap.deviation / math.sqrt(count)
        half_width = student_quantile(DECIDING_CONFIDENCE_LEVEL, count - 1) * standard_error
        gap_error_distance = _STATISTICAL_POWER_QUANTILE * standard_error
        smallest_likely_gap = max(0.0, abs(gap.point) - gap_error_distance)
        largest_likely_gap = abs(gap.point) + gap_error_distance
        # Decisive if the interval would exclude 0, be inside the margin, or be too narrow to reach both 0 and the
        # margin.
        return smallest_likely_gap > half_width or largest_likely_gap <= margin - half_width or 2 * half_width <= margin

    # A larger number of seeds is decisive whenever a smaller one is, so use bisection.
    counts = range(max(gap.pairs + 1, MIN_PAIRS), MAX_SEEDS + 1)
    index = bisect_left(counts, True, key=is_decisive)
    return counts[index] - gap.pairs if index < len(counts) else None


def compute_detectable_gap(gap: LossGap) -> float:
    """Returns the smallest gap that would probably have been detected, given the number of pairs of `gap` and the
    deviation between them.
    """
    return (
        (student_quantile(DECIDING_CONFIDENCE_LEVEL, gap.pairs - 1) + _STATISTICAL_POWER_QUANTILE)
        * gap.deviation
        / math.sqrt(gap.pairs)
    )


def bound_single_gap(gap: float, one_ulp_gap: float) -> Interval | None:
    """Returns a 95% interval of the gap of a single seed, by Student's t with one degree of freedom. Its width comes
    from `one_ulp_gap`, the gap that a one-bit change of the reference's weights (one ulp) causes in that seed. Returns
    None if that change had no effect.
    """
    # The interval is slightly too wide. `gap` and `one_ulp_gap` are relative to the same reference, so their ratio
    # varies slightly less than Student's t.
    half_width = student_quantile(SHOWN_CONFIDENCE_LEVEL, 1) * abs(one_ulp_gap)
    return Interval(gap, gap - half_width, gap + half_width, SHOWN_CONFIDENCE_LEVEL) if half_width else None
