"""Verdicts on the arms of a training: how each learned compared with its reference, and how much sooner it reaches a
loss."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fp8bench.analysis.compare.interval import quantile
from fp8bench.features.train.values import FALLBACK, Arm, ArmRole, Lines, StepRow, Training, Validation
from fp8bench.features.train.verdicts.curves import (
    INCURABLE,
    LEAST_PAIRS,
    SHOWN,
    Curve,
    Curves,
    JudgedArm,
    Learned,
    Pair,
    Void,
    Why,
    curves_of,
    curves_of_arm,
    gap_of,
    judge,
    last_of,
    pair_curves,
)
from fp8bench.model import Interval
from fp8bench.report.panels import together

# 'No worse' only means something if an arm that lost this share of what the reference learned would be outside the
# margin. A reference whose loss fell by less than the second share has only seen noise.
_LOST = 0.1
_LEAST_FALL = 0.1
# Loss curves are fitted over the last two thirds of the steps: the logarithm of a third is the furthest back.
_LEAST = -math.log(3)
_LEAST_POINTS = 10


@dataclass(frozen=True)
class ArmVerdict:
    """The verdict on one arm, its pairs, and why other seeds have no pair. `speed` is None if it is unknown or
    meaningless."""

    arm: Arm
    judged: JudgedArm
    pairs: tuple[Pair, ...] = ()
    voids: tuple[tuple[int, Void], ...] = ()
    diverged_in: tuple[int, ...] = ()
    speed: AdjustedSpeed | None = None

    @property
    def same_bits(self) -> bool:
        return bool(self.pairs) and all(pair.same_bits for pair in self.pairs)


@dataclass(frozen=True)
class RepeatBand:
    """The reference repeated with the same seed: the number of steps, the first that differs (None if all have the same
    bits), and the largest gap of any step, infinite if a loss is not finite."""

    steps: int
    first: int | None
    largest: float


@dataclass(frozen=True)
class TrainingVerdicts:
    """The verdicts of a training. `falls` are those of the reference's loss by seed. Without `looks` there is no
    held-out text, and only the training loss decides. `chaos` is the effect of one ulp in the first seed. `rates` is
    the number of the reference's learning rates, whose best is compared with each arm's best."""

    reference: str
    margin: float
    seeds: tuple[int, ...]
    least_fall: float
    falls: Mapping[int, float]
    arms: tuple[ArmVerdict, ...]
    repeat_band: RepeatBand | None
    looks: bool = True
    chaos: Pair | None = None
    rates: int = 1

    def of(self, name: str) -> ArmVerdict | None:
        """Returns an arm's verdict; None for the reference and its bands."""
        return next((arm for arm in self.arms if arm.arm.name == name), None)


def least_fall(margin: float) -> float:
    """Returns the share by which the reference's loss must fall, so that losing a tenth of that is a gap above the
    margin."""
    return max(_LEAST_FALL, margin / (margin + _LOST))


def verdicts_of(training: Training, lines: Lines, curves: Curves | None = None) -> TrainingVerdicts:
    """Computes the verdicts; `curves` are those of the lines, if the caller has them."""
    request = training.request
    seeds = tuple(range(request.seed, request.seed + request.seeds))
    looks = not request.settings.make or any(isinstance(line, Validation) for line in lines)
    curves = curves_of(lines, request.steps) if curves is None else curves
    return verdicts_on(training.arms, curves, seeds, request.steps, request.margin, looks)


def verdicts_on(
    all_arms: Sequence[Arm], curves: Curves, seeds: tuple[int, ...], steps: int, margin: float, looks: bool
) -> TrainingVerdicts:
    """Like `verdicts_of`, from curves of any origin."""
    by_role = together((arm.role, arm) for arm in all_arms if not arm.skip)
    base = by_role[ArmRole.REFERENCE][0]
    at_rates = [base, *by_role.get(ArmRole.OTHER_RATE, ())]
    reference = _best(at_rates, curves, seeds)
    base_curves = {seed: curves.get((base.name, seed), Curve(steps)) for seed in seeds}
    best_curves = {seed: curves.get((reference.name, seed), Curve(steps)) for seed in seeds}
    least = least_fall(margin)
    learned = not any(curve.blew_up or curve.fall < least for curve in best_curves.values())
    # 1. The effect of chance on the reference: nondeterminism in every seed, chaos in the first.
    chaos: list[Pair] = []
    for arm in by_role.get(ArmRole.CHAOS, ()):
        chaos += _pairs(base_curves, arm, curves)[0]
    repeats: list[tuple[Curve, Curve]] = []
    for arm in by_role.get(ArmRole.REPEAT, ()):
        repeats += [(base_curves[seed], curve) for seed, curve in curves_of_arm(curves, arm.name).items()]
    # 2. Compare each candidate with the reference at its best rate; of several rates only the best keeps its verdict.
    candidates = by_role.get(ArmRole.CANDIDATE, [])
    verdicts = [_arm_verdict(reference, arm, best_curves, curves, margin, learned, looks) for arm in candidates]
    return TrainingVerdicts(
        reference.name,
        margin,
        seeds,
        least,
        {seed: curve.fall for seed, curve in best_curves.items() if curve.rows},
        tuple(verdicts)
        if len(at_rates) == 1
        else tuple(_at_best_rate(arm_verdict, candidates, curves) for arm_verdict in verdicts),
        _repeat_band(repeats) if repeats else None,
        looks,
        chaos[0] if chaos else None,
        len(at_rates),
    )


def _best(arms: Sequence[Arm], curves: Curves, seeds: Iterable[int]) -> Arm:
    """Returns the arm with the lowest mean endpoint; the first one if no arm has an endpoint in every seed."""

    def mean(arm: Arm) -> float:
        ends = [curves[arm.name, seed].endpoint if (arm.name, seed) in curves else math.nan for seed in seeds]
        end = math.fsum(ends) / len(ends)
        return end if math.isfinite(end) else math.inf

    return min(arms, key=mean)


def _at_best_rate(verdict: ArmVerdict, arms: Sequence[Arm], curves: Curves) -> ArmVerdict:
    """Keeps only the verdict at the best of an arm's rates: the others become inconclusive."""

    def without_rate(arm: Arm) -> tuple[object, ...]:
        return arm.precision, *(pair for pair in arm.settings if pair[0] != "rate")

    same_but_rate = [arm for arm in arms if without_rate(arm) == without_rate(verdict.arm)]
    names = {arm.name for arm in same_but_rate}
    seeds = {seed for name, seed in curves if name in names}
    if len(same_but_rate) < 2 or not seeds or verdict.judged.learned is Learned.DIVERGED:
        return verdict
    if _best(same_but_rate, curves, seeds) is verdict.arm:
        return verdict
    judged = replace(verdict.judged, learned=Learned.INCONCLUSIVE, why=Why.OTHER_RATE, more_seeds=None, matters=None)
    return replace(verdict, judged=judged, speed=None)


def _arm_verdict(
    reference: Arm,
    arm: Arm,
    base: Mapping[int, Curve],
    curves: Curves,
    margin: float,
    learned: bool,
    looks: bool,
) -> ArmVerdict:
    """Returns an arm's verdict; `base` are the reference's curves by seed."""
    pairs, voids = _pairs(base, arm, curves)
    least = least_fall(margin)
    diverged = tuple(
        seed
        for seed, curve in base.items()
        if (ended := curves.get((arm.name, seed))) is not None
        and not curve.blew_up
        and (ended.blew_up or (ended.fall <= 0 and curve.fall >= least))  # no lower than it began
    )
    # Divergence and a reference that did not learn override the pairs.
    judged = judge(pairs, margin, looks)
    void = Counter(reason for _, reason in voids).most_common(1)[0][0] if voids else None
    if judged.why is Why.FEW_PAIRS and void in INCURABLE:
        judged = replace(judged, more_seeds=None, void=void)
    fell_back = any(FALLBACK in curve.events for curve in curves_of_arm(curves, arm.name).values())
    same_bits = bool(pairs) and all(pair.same_bits for pair in pairs) and arm.precision != reference.precision
    if diverged:
        judged = JudgedArm(Learned.DIVERGED, judged.gap, judged.held_out)
    elif not learned:
        judged = JudgedArm(Learned.DID_NOT_LEARN)
    elif fell_back or same_bits:
        reason = Why.FALLBACK if fell_back else Why.SAME_BITS
        judged = replace(judged, learned=Learned.INCONCLUSIVE, why=reason, more_seeds=None, matters=None)
        learned = False
    speed = None
    if learned and not diverged and arm.native and reference.native:
        speed = adjusted_speed([(base[pair.seed], curves[arm.name, pair.seed]) for pair in pairs])
    return ArmVerdict(arm, judged, pairs, voids, diverged, speed)


def _pairs(
    base: Mapping[int, Curve], arm: Arm, curves: Curves
) -> tuple[tuple[Pair, ...], tuple[tuple[int, Void], ...]]:
    """Returns the arm's pairs, and the seeds without one. Seeds in which the reference has the same losses count
    once."""
    pairs: list[Pair] = []
    voids: list[tuple[int, Void]] = []
    losses_met: set[tuple[float, ...]] = set()
    for seed, reference in base.items():
        pair = pair_curves(reference, curves.get((arm.name, seed), Curve(reference.steps)), seed)
        # Two equal seeds are one observation: counting both would narrow the interval.
        if reference.losses in losses_met:
            pair = Void.COPY if isinstance(pair, Pair) else pair
        if isinstance(pair, Pair):
            pairs.append(pair)
            losses_met.add(reference.losses)
        else:
            voids.append((seed, pair))
    return tuple(pairs), tuple(voids)


def _repeat_band(repeats: Sequence[tuple[Curve, Curve]]) -> RepeatBand:
    both: list[tuple[StepRow, StepRow]] = []
    for reference, repeat in repeats:
        both += zip(reference.rows, repeat.rows, strict=False)
    first = next((old.step for old, new in both if old.loss != new.loss), None)
    gaps = [abs(new.loss / old.loss - 1) if old.loss else math.inf for old, new in both if old.loss != new.loss]
    return RepeatBand(len(both), first, max((gap if math.isfinite(gap) else math.inf for gap in gaps), default=0.0))


@dataclass(frozen=True)
class AdjustedSpeed:
    """How much sooner an arm reaches a loss, above 1 for faster: `raw` by the time of steps, `adjusted` to the same
    loss (docs/watching.md). `bounded`: it is at most this fast, as its reference passed its last loss within a third of
    the steps. None if the better loss no longer certainly falls."""

    raw: Interval
    adjusted: Interval | None
    bounded: bool = False


def adjusted_speed(pairs: Sequence[tuple[Curve, Curve]]) -> AdjustedSpeed | None:
    """Returns the speed from `pairs` of (reference, arm), one per seed. None for fewer than five that were timed."""
    timed = [(pair, log) for pair in pairs if (log := _log_speed(*pair)) is not None]
    if len(timed) < LEAST_PAIRS:
        return None
    curves, speeds = [pair for pair, _ in timed], [log for _, log in timed]
    # Logarithms of ratios: half and twice as fast are equally far from 1.
    pace = gap_of(speeds)
    assert pace is not None and pace.shown is not None
    raw, steps = _exp(pace.shown), log_steps(curves)
    if steps is None:
        return AdjustedSpeed(raw, None)
    point = pace.point + max(steps, _LEAST)
    if steps < _LEAST:
        return AdjustedSpeed(raw, _exp(Interval(point, -math.inf, point, SHOWN)), bounded=True)
    without_one = [
        max(log, _LEAST)
        for seed in range(len(curves))
        if (log := log_steps(curves[:seed] + curves[seed + 1 :])) is not None
    ]
    if len(without_one) < len(curves):
        return AdjustedSpeed(raw, None)
    without_seed = [statistics.fmean(speeds[:seed] + speeds[seed + 1 :]) + log for seed, log in enumerate(without_one)]
    return AdjustedSpeed(raw, _jackknife(point, without_seed))


def _jackknife(point: float, estimates: Sequence[float]) -> Interval:
    error = math.sqrt((len(estimates) - 1) * statistics.pvariance(estimates))
    reach = quantile(SHOWN, len(estimates) - 1) * error
    return _exp(Interval(point, point - reach, point + reach, SHOWN))


def log_steps(pairs: Sequence[tuple[Curve, Curve]]) -> float | None:
    """Returns the logarithm of how many times fewer steps the arm takes; minus infinity for less than a third as many.
    None if the better loss does not fall, or was not recorded that far back."""
    rise = statistics.fmean(arm.endpoint - reference.endpoint for reference, arm in pairs)
    better, sign = (1, -1.0) if rise < 0 else (0, 1.0)
    place = _place_above([pair[better].losses for pair in pairs], sign * rise)
    return None if place is None or (sign < 0 and place < _LEAST) else sign * place


def _place_above(curves: Sequence[Sequence[float]], rise: float) -> float | None:
    """Returns the logarithm of the step at which the mean of curves was `rise` above its endpoint, over the endpoint's
    step. Minus infinity if that is before the last two thirds; None if losses there do not fall throughout."""
    steps = len(curves[0])
    places = np.log(np.arange(1, steps + 1) / (steps - (last_of(steps) - 1) / 2))
    losses = np.array(curves).mean(axis=0)
    fitted = (places >= _LEAST) & np.isfinite(losses)
    if fitted.sum() < _LEAST_POINTS:
        return None
    bend, slope, _ = (float(term) for term in np.polyfit(places[fitted], losses[fitted], 2))
    if max(slope, slope + 2 * bend * _LEAST) >= 0:
        # A parabola that turns up at its end would imply a loss that rises again.
        bend, slope = 0.0, float(np.polyfit(places[fitted], losses[fitted], 1)[0])
    if slope >= 0:
        return None
    if rise > _LEAST * (slope + bend * _LEAST):
        return -math.inf
    # The root of bend x^2 + slope x = rise near 0, in a form that also works for a bend of 0.
    root = math.sqrt(max(0.0, slope * slope + 4 * bend * rise))
    return -2 * rise / (root - slope)


def _log_speed(reference: Curve, arm: Curve) -> float | None:
    """Returns the median over steps that were timed in both arms; None if none was."""
    logs = [
        math.log(new.tokens / new.seconds * old.seconds / old.tokens)
        for old, new in zip(reference.rows, arm.rows, strict=True)
        if min(old.seconds, new.seconds) > 0
    ]
    return statistics.median(logs) if logs else None


def _exp(logs: Interval) -> Interval:
    point, low, high = (math.exp(min(700.0, max(-700.0, value))) for value in (logs.point, logs.low, logs.high))
    return Interval(point, low, high, logs.level)
