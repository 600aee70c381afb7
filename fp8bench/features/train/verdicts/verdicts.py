"""Verdicts on the arms of a training: how well each arm learned compared with its reference, and how much sooner it
reaches the same loss.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fp8bench.analysis.compare.interval import student_quantile
from fp8bench.features.train.values import FALLBACK_EVENT, Arm, ArmRole, Lines, StepRow, Training, Validation
from fp8bench.features.train.verdicts.curves import (
    LASTING_VOID_REASONS,
    MIN_PAIRS,
    SHOWN_CONFIDENCE_LEVEL,
    CurveByKey,
    InconclusiveReason,
    JudgedArm,
    LearningVerdict,
    LossCurve,
    SeedComparison,
    VoidReason,
    average_gaps,
    count_endpoint_steps,
    judge_seed_pairs,
    make_curves,
    make_seed_pair,
    select_curves,
)
from fp8bench.model import Interval
from fp8bench.report.panels import together

# 'Within noise' would mean nothing if an arm could lose this share of the reference's fall in loss and stay inside the
# margin.
_LOST_LOSS_FALL_SHARE = 0.1
# A reference whose loss fell by less than this share of the first loss has learned too little.
_MIN_FALL = 0.1
# Loss curves are fitted from a third of the steps to the end.
_MIN_LOG_STEP = -math.log(3)
_MIN_FITTED_STEPS = 10


@dataclass(frozen=True)
class ArmVerdict:
    """The verdict on one arm. `pairs` are the seeds that count, and `voids` the other seeds, each with a reason.
    `speed` is None if it is unknown or meaningless.
    """

    arm: Arm
    judged: JudgedArm
    pairs: tuple[SeedComparison, ...] = ()
    voids: tuple[tuple[int, VoidReason], ...] = ()
    diverged_in: tuple[int, ...] = ()
    speed: AdjustedSpeed | None = None

    @property
    def same_bits(self) -> bool:
        return bool(self.pairs) and all(pair.same_bits for pair in self.pairs)


@dataclass(frozen=True)
class RepeatDifferences:
    """The differences between the reference and its repeat, a second training with the same seed. Has the number of
    steps, the first step whose losses differ (None if all are equal to the bit), and the largest relative difference in
    a step, which is infinite if a loss is not finite.
    """

    steps: int
    first: int | None
    largest: float


@dataclass(frozen=True)
class TrainingVerdicts:
    """The verdicts of a training. `falls` are the shares by which the reference's loss fell, by seed.
    Without `has_held_out`, no text is held out, and only the training loss decides. `chaos` compares two trainings of
    the reference in the first seed, whose weights differ by one ulp (unit in the last place). `rate_count` is
    the number of learning rates of the reference. With several rates, the reference and each arm are compared at their
    best rates.
    """

    reference: str
    margin: float
    seeds: tuple[int, ...]
    least_fall: float
    falls: Mapping[int, float]
    arms: tuple[ArmVerdict, ...]
    repeat_band: RepeatDifferences | None
    has_held_out: bool = True
    chaos: SeedComparison | None = None
    rate_count: int = 1

    def find_verdict(self, name: str) -> ArmVerdict | None:
        """Returns an arm's verdict. Returns None for the reference, its repeats, and its one-ulp arm."""
        return next((arm for arm in self.arms if arm.arm.name == name), None)


def compute_required_loss_fall(margin: float) -> float:
    """Returns the share by which the reference's loss must fall. It is at least `_MIN_FALL`, and large enough that
    losing `_LOST_LOSS_FALL_SHARE` of the fall is a gap as large as the margin.
    """
    # Solve `_LOST_LOSS_FALL_SHARE * fall / (1 - fall) = margin` for the fall.
    return max(_MIN_FALL, margin / (margin + _LOST_LOSS_FALL_SHARE))


def judge_training(training: Training, lines: Lines, curves: CurveByKey | None = None) -> TrainingVerdicts:
    """Returns the verdicts of a training. `curves` are the loss curves of `lines`; if they are missing, they are made
    here.
    """
    request = training.request
    seeds = tuple(range(request.seed, request.seed + request.seeds))
    has_held_out = not request.settings.make or any(isinstance(line, Validation) for line in lines)
    curves = make_curves(lines, request.steps) if curves is None else curves
    return judge_arms(training.arms, curves, seeds, request.steps, request.margin, has_held_out)


def judge_arms(
    all_arms: Sequence[Arm], curves: CurveByKey, seeds: tuple[int, ...], steps: int, margin: float, has_held_out: bool
) -> TrainingVerdicts:
    """Returns the verdicts of arms from their curves."""
    arms_by_role = together((arm.role, arm) for arm in all_arms if not arm.skip)
    base_arm = arms_by_role[ArmRole.REFERENCE][0]
    reference_rates = [base_arm, *arms_by_role.get(ArmRole.OTHER_RATE, ())]
    reference = _find_best_arm(reference_rates, curves, seeds)
    # A seed that is not begun has an empty curve.
    base_curves = {seed: curves.get((base_arm.name, seed), LossCurve(steps)) for seed in seeds}
    best_reference_curves = {seed: curves.get((reference.name, seed), LossCurve(steps)) for seed in seeds}
    required_loss_fall = compute_required_loss_fall(margin)
    has_learned = not any(
        curve.has_non_finite_end or curve.loss_fall < required_loss_fall for curve in best_reference_curves.values()
    )
    # 1. Compare the reference with its repetitions: an exact one in every seed (nondeterminism), and one with a one-ulp
    # change in the first seed (chaos).
    chaos_seed_pairs: list[SeedComparison] = []
    for arm in arms_by_role.get(ArmRole.CHAOS, ()):
        chaos_seed_pairs += _pair_seeds(base_curves, arm, curves)[0]
    repeated_rows: list[tuple[StepRow, StepRow]] = []
    for arm in arms_by_role.get(ArmRole.REPEAT, ()):
        for seed, curve in select_curves(curves, arm.name).items():
            repeated_rows += zip(base_curves[seed].rows, curve.rows, strict=False)
    # 2. Compare each candidate with the reference at the reference's best learning rate. Unless the candidate diverged,
    # its verdict becomes inconclusive if a different learning rate suits it better.
    candidates = arms_by_role.get(ArmRole.CANDIDATE, [])
    verdicts = []
    for arm in candidates:
        verdict = _judge_arm(reference, arm, best_reference_curves, curves, margin, has_learned, has_held_out)
        if len(reference_rates) > 1:
            verdict = _withdraw_unless_best_rate(verdict, candidates, curves)
        verdicts.append(verdict)
    return TrainingVerdicts(
        reference.name,
        margin,
        seeds,
        required_loss_fall,
        {seed: curve.loss_fall for seed, curve in best_reference_curves.items() if curve.rows},
        tuple(verdicts),
        _compare_repeats(repeated_rows) if repeated_rows else None,
        has_held_out,
        chaos_seed_pairs[0] if chaos_seed_pairs else None,
        len(reference_rates),
    )


def _find_best_arm(arms: Sequence[Arm], curves: CurveByKey, seeds: Iterable[int]) -> Arm:
    """Returns the arm with the lowest mean endpoint. An arm without an endpoint in one of the seeds does not count.
    Returns the first arm if none counts.
    """

    def mean_endpoint(arm: Arm) -> float:
        endpoint_losses = [
            curves[arm.name, seed].endpoint if (arm.name, seed) in curves else math.nan for seed in seeds
        ]
        mean_endpoint_loss = math.fsum(endpoint_losses) / len(endpoint_losses)
        return mean_endpoint_loss if math.isfinite(mean_endpoint_loss) else math.inf

    return min(arms, key=mean_endpoint)


def _withdraw_unless_best_rate(verdict: ArmVerdict, arms: Sequence[Arm], curves: CurveByKey) -> ArmVerdict:
    """Makes the verdict inconclusive if an arm that differs only in learning rate has a lower loss. The verdict of a
    diverged arm does not change.
    """

    def describe_without_rate(arm: Arm) -> tuple[object, ...]:
        return arm.precision, *(pair for pair in arm.settings if pair[0] != "rate")

    arms_differing_in_rate = [arm for arm in arms if describe_without_rate(arm) == describe_without_rate(verdict.arm)]
    names = {arm.name for arm in arms_differing_in_rate}
    seeds = {seed for name, seed in curves if name in names}
    if len(arms_differing_in_rate) < 2 or not seeds or verdict.judged.learned is LearningVerdict.DIVERGED:
        return verdict
    if _find_best_arm(arms_differing_in_rate, curves, seeds) is verdict.arm:
        return verdict
    judged = replace(
        verdict.judged,
        learned=LearningVerdict.INCONCLUSIVE,
        why=InconclusiveReason.OTHER_RATE,
        more_seeds=None,
        matters=None,
    )
    return replace(verdict, judged=judged, speed=None)


def _judge_arm(
    reference: Arm,
    arm: Arm,
    base_curves: Mapping[int, LossCurve],
    curves: CurveByKey,
    margin: float,
    has_learned: bool,
    has_held_out: bool,
) -> ArmVerdict:
    """Returns an arm's verdict. `base_curves` has the curve of the reference in each seed."""
    seed_pairs, void_seeds = _pair_seeds(base_curves, arm, curves)
    required_loss_fall = compute_required_loss_fall(margin)
    diverged_seeds = tuple(
        seed
        for seed, curve in base_curves.items()
        if (arm_curve := curves.get((arm.name, seed))) is not None
        and not curve.has_non_finite_end
        and (
            arm_curve.has_non_finite_end or (arm_curve.loss_fall <= 0 and curve.loss_fall >= required_loss_fall)
        )  # the arm did not learn, although the reference did
    )
    # The verdict from pairs of losses is replaced below if the arm diverged or the reference did not learn.
    judged = judge_seed_pairs(seed_pairs, margin, has_held_out)
    void_reason = Counter(reason for _, reason in void_seeds).most_common(1)[0][0] if void_seeds else None
    if judged.why is InconclusiveReason.FEW_PAIRS and void_reason in LASTING_VOID_REASONS:
        judged = replace(judged, more_seeds=None, void=void_reason)
    has_fallen_back = any(FALLBACK_EVENT in curve.events for curve in select_curves(curves, arm.name).values())
    has_same_bits = (
        bool(seed_pairs) and all(pair.same_bits for pair in seed_pairs) and arm.precision != reference.precision
    )
    if diverged_seeds:
        judged = JudgedArm(LearningVerdict.DIVERGED, judged.gap, judged.held_out)
    elif not has_learned:
        judged = JudgedArm(LearningVerdict.DID_NOT_LEARN)
    elif has_fallen_back or has_same_bits:
        reason = InconclusiveReason.FALLBACK if has_fallen_back else InconclusiveReason.SAME_BITS
        judged = replace(judged, learned=LearningVerdict.INCONCLUSIVE, why=reason, more_seeds=None, matters=None)
        has_learned = False
    speed = None
    if has_learned and not diverged_seeds and arm.native and reference.native:
        speed = measure_speed([(base_curves[pair.seed], curves[arm.name, pair.seed]) for pair in seed_pairs])
    return ArmVerdict(arm, judged, seed_pairs, void_seeds, diverged_seeds, speed)


def _pair_seeds(
    base_curves: Mapping[int, LossCurve], arm: Arm, curves: CurveByKey
) -> tuple[tuple[SeedComparison, ...], tuple[tuple[int, VoidReason], ...]]:
    """Returns the arm's seeds that are paired with the reference, and the seeds without a pair, each with the reason.
    If the reference has equal losses in several seeds, only one of these seeds counts.
    """
    seed_pairs: list[SeedComparison] = []
    void_seeds: list[tuple[int, VoidReason]] = []
    paired_reference_losses: set[tuple[float, ...]] = set()
    for seed, reference in base_curves.items():
        pair = make_seed_pair(reference, curves.get((arm.name, seed), LossCurve(reference.steps)), seed)
        # Two seeds with equal losses are one observation: counting both would narrow the interval.
        if reference.losses in paired_reference_losses:
            pair = VoidReason.COPY if isinstance(pair, SeedComparison) else pair
        if isinstance(pair, SeedComparison):
            seed_pairs.append(pair)
            paired_reference_losses.add(reference.losses)
        else:
            void_seeds.append((seed, pair))
    return tuple(seed_pairs), tuple(void_seeds)


def _compare_repeats(repeats: Sequence[tuple[StepRow, StepRow]]) -> RepeatDifferences:
    """Returns the differences between the reference and its repeat. A pair in `repeats` has the row of each for the
    same step.
    """
    first_different_step = None
    largest = 0.0
    for reference, repeat_row in repeats:
        if reference.loss != repeat_row.loss:
            gap = abs(repeat_row.loss / reference.loss - 1) if reference.loss else math.inf
            largest = max(largest, gap if math.isfinite(gap) else math.inf)
            if first_different_step is None:
                first_different_step = reference.step
    return RepeatDifferences(len(repeats), first_different_step, largest)


@dataclass(frozen=True)
class AdjustedSpeed:
    """How many times as fast an arm is as its reference. `raw` compares the time of steps. `adjusted` compares the time
    to the same loss (docs/watching.md). `adjusted` is None unless the lower of the two losses certainly still falls.
    `bounded` means that the arm is at most this fast: the reference reached the arm's last loss within a third of the
    steps.
    """

    raw: Interval
    adjusted: Interval | None
    bounded: bool = False


def measure_speed(pairs: Sequence[tuple[LossCurve, LossCurve]]) -> AdjustedSpeed | None:
    """Returns how fast an arm is compared with its reference. `pairs` has the curves of the reference and the arm in
    each seed. Returns None if fewer than five pairs have steps that were timed in both arms.
    """
    pairs_with_log_speed = [(pair, log) for pair in pairs if (log := _measure_log_speed_ratio(*pair)) is not None]
    if len(pairs_with_log_speed) < MIN_PAIRS:
        return None
    timed_curve_pairs = [pair for pair, _ in pairs_with_log_speed]
    log_speed_ratios = [log for _, log in pairs_with_log_speed]
    # Logarithms of ratios, because half and twice as fast are equally far from 1.
    mean_log_speed = average_gaps(log_speed_ratios)
    assert mean_log_speed is not None and mean_log_speed.shown is not None
    unadjusted_speed = _exponentiate_interval(mean_log_speed.shown)
    steps = measure_log_step_ratio(timed_curve_pairs)
    if steps is None:
        return AdjustedSpeed(unadjusted_speed, None)
    point = mean_log_speed.point + max(steps, _MIN_LOG_STEP)
    # Curves are fitted only from a third of the steps on. For an earlier step the speed is only bounded.
    if steps < _MIN_LOG_STEP:
        return AdjustedSpeed(
            unadjusted_speed,
            _exponentiate_interval(Interval(point, -math.inf, point, SHOWN_CONFIDENCE_LEVEL)),
            bounded=True,
        )
    log_steps_without_seed = [
        max(log, _MIN_LOG_STEP)
        for seed in range(len(timed_curve_pairs))
        if (log := measure_log_step_ratio(timed_curve_pairs[:seed] + timed_curve_pairs[seed + 1 :])) is not None
    ]
    # If the ratio is unknown without one of the seeds, it depends too much on that seed.
    if len(log_steps_without_seed) < len(timed_curve_pairs):
        return AdjustedSpeed(unadjusted_speed, None)
    estimates = [
        statistics.fmean(log_speed_ratios[:seed] + log_speed_ratios[seed + 1 :]) + log
        for seed, log in enumerate(log_steps_without_seed)
    ]
    # The jackknife: the variance of estimates that leave out one seed each gives the standard error.
    error = math.sqrt((len(estimates) - 1) * statistics.pvariance(estimates))
    half_width = student_quantile(SHOWN_CONFIDENCE_LEVEL, len(estimates) - 1) * error
    return AdjustedSpeed(
        unadjusted_speed,
        _exponentiate_interval(Interval(point, point - half_width, point + half_width, SHOWN_CONFIDENCE_LEVEL)),
    )


def measure_log_step_ratio(pairs: Sequence[tuple[LossCurve, LossCurve]]) -> float | None:
    """Returns log(reference steps / arm steps), counting the steps to the higher of the two endpoint losses. Returns
    minus infinity if the ratio is below 1/3. Returns None if the ratio is above 3, or if the curve with the lower loss
    does not fall.
    """
    mean_endpoint_difference = statistics.fmean(arm.endpoint - reference.endpoint for reference, arm in pairs)
    better, sign = (1, -1.0) if mean_endpoint_difference < 0 else (0, 1.0)
    log_step = _find_log_step_ratio([pair[better].losses for pair in pairs], sign * mean_endpoint_difference)
    return None if log_step is None or (sign < 0 and log_step < _MIN_LOG_STEP) else sign * log_step


def _find_log_step_ratio(curves: Sequence[Sequence[float]], loss_rise: float) -> float | None:
    """Finds the step at which the mean of the curves was `loss_rise` above its endpoint. Returns the logarithm of the
    ratio of this step to the endpoint's step. Returns minus infinity if this step is in the first third of the
    training. Returns None if the mean does not fall in the last two thirds.
    """
    steps = len(curves[0])
    # The endpoint is a mean over steps, so it counts as the middle one of them.
    log_steps = np.log(np.arange(1, steps + 1) / (steps - (count_endpoint_steps(steps) - 1) / 2))
    losses = np.array(curves).mean(axis=0)
    is_step_in_fit = (log_steps >= _MIN_LOG_STEP) & np.isfinite(losses)
    if is_step_in_fit.sum() < _MIN_FITTED_STEPS:
        return None
    curvature, loss_slope, _ = (
        float(term) for term in np.polyfit(log_steps[is_step_in_fit], losses[is_step_in_fit], 2)
    )
    if max(loss_slope, loss_slope + 2 * curvature * _MIN_LOG_STEP) >= 0:
        # A parabola that turns upwards at its end would mean that the loss rises again.
        curvature = 0.0
        loss_slope = float(np.polyfit(log_steps[is_step_in_fit], losses[is_step_in_fit], 1)[0])
    if loss_slope >= 0:
        return None
    if loss_rise > _MIN_LOG_STEP * (loss_slope + curvature * _MIN_LOG_STEP):
        return -math.inf
    # The root near 0 of curvature x^2 + slope x = loss_rise. This form also works if curvature is 0.
    discriminant_root = math.sqrt(max(0.0, loss_slope * loss_slope + 4 * curvature * loss_rise))
    return -2 * loss_rise / (discriminant_root - loss_slope)


def _measure_log_speed_ratio(reference: LossCurve, arm: LossCurve) -> float | None:
    """Returns the logarithm of the arm's speed relative to the reference: the median over the steps that were timed in
    both arms. Returns None without such steps.
    """
    logs = [
        math.log(new.tokens / new.seconds * old.seconds / old.tokens)
        for old, new in zip(reference.rows, arm.rows, strict=True)
        if min(old.seconds, new.seconds) > 0
    ]
    return statistics.median(logs) if logs else None


def _exponentiate_interval(logs: Interval) -> Interval:
    # math.exp overflows above 709.8.
    point, low, high = (math.exp(min(700.0, max(-700.0, value))) for value in (logs.point, logs.low, logs.high))
    return Interval(point, low, high, logs.level)
