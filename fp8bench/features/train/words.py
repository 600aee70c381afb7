"""Sentences about how well the arms of a training learned: verdicts, the effect of chance, and speeds. All outputs
use the same sentences.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from operator import attrgetter

from fp8bench import units
from fp8bench.analysis.energy import WindowRange
from fp8bench.features.train.values import ArmRole, LayerReading
from fp8bench.features.train.verdicts.curves import (
    MIN_PAIRS,
    InconclusiveReason,
    JudgedArm,
    LearningVerdict,
    VoidReason,
    bound_single_gap,
    compute_detectable_gap,
)
from fp8bench.features.train.verdicts.summary import ArmSummary, JudgedTraining, describe_importance
from fp8bench.features.train.verdicts.verdicts import AdjustedSpeed, ArmVerdict, RepeatDifferences, TrainingVerdicts
from fp8bench.model import Interval
from fp8bench.model.step import Coverage
from fp8bench.report.elements import Text, Tone
from fp8bench.report.panels import together
from fp8bench.report.topics.shares import describe_coverage, list_unconverted_products
from fp8bench.report.words.naming import join_words, many

_ARM_ROLE_WORDS = {
    ArmRole.REFERENCE: "the reference",
    ArmRole.REPEAT: "the reference repeated",
    ArmRole.CHAOS: "the reference with weights one ulp apart, in the first seed only",
    ArmRole.OTHER_RATE: "the reference at another rate",
}
# The most reasons for unconverted layers that are listed, and the most layer names per reason.
_MAX_LISTED = 3
VERDICT_WORDS = {
    LearningVerdict.DIVERGED: "no: diverges",
    LearningVerdict.DID_NOT_LEARN: "cannot tell",
    LearningVerdict.WORSE: "learns worse",
    LearningVerdict.WITHIN_NOISE: "as well",
    LearningVerdict.BETTER: "learns better",
    LearningVerdict.INCONCLUSIVE: "cannot tell",
}


def explain_coverage(name: str, coverage: Coverage) -> Iterator[str]:
    yield describe_coverage(name, coverage)
    for reason, names, _ in list_unconverted_products(coverage)[:_MAX_LISTED]:
        yield f"{join_words(names, _MAX_LISTED)}: {reason}"
    yield from coverage.remarks
    yield f"backward begins from {coverage.loss}"


def describe_arm(summary: ArmSummary, verdicts: TrainingVerdicts) -> str:
    """Returns why an arm was not trained, or its verdict, or else its role, such as 'the reference repeated'."""
    arm = summary.arm
    if arm.skip:
        return arm.skip
    if summary.verdict is not None:
        return describe_verdict(summary.verdict, verdicts)
    if arm.role is ArmRole.CHAOS and verdicts.chaos is not None:
        return f"{_ARM_ROLE_WORDS[arm.role]}: {100 * verdicts.chaos.gap:+.2g}% from it there"
    if arm.name == verdicts.reference and verdicts.rate_count > 1:
        return f"{_ARM_ROLE_WORDS[arm.role]} at its best rate, with which arms are compared"
    return _ARM_ROLE_WORDS[arm.role]


def _describe_gap_bound(arm: ArmVerdict, verdicts: TrainingVerdicts) -> str:
    """Returns text with an upper bound of the gap of an arm with too few seeds for a verdict; '' if no bound is known.
    For a single seed, the bound comes from the effect of one ulp (weights one unit in the last place apart).
    """
    gap = arm.judged.gap
    if gap is None or arm.judged.why is not InconclusiveReason.FEW_PAIRS:
        return ""
    if gap.shown is not None:
        return f"{describe_upper_bound(gap.shown)} (95%); "
    if verdicts.chaos is None or arm.pairs[0].seed != verdicts.chaos.seed:
        return ""
    bound = bound_single_gap(gap.point, verdicts.chaos.gap)
    if bound is None:
        return ""
    return f"{describe_upper_bound(bound)} in seed {verdicts.chaos.seed} (95%, by what one ulp does there); "


def describe_upper_bound(interval: Interval) -> str:
    """Returns a text such as 'at most 0.24% worse'."""
    if interval.high <= 0:
        return "at most 0% worse"
    return f"at most {_convert_bounds_to_percent(interval)[1]:.{_count_decimals(interval)}f}% worse"


def _convert_bounds_to_percent(interval: Interval) -> tuple[float, float]:
    """Returns the bounds of an interval in percent, rounded outward. Rounding inward would claim more than was
    measured.
    """
    scale = 10 ** _count_decimals(interval)
    # Round first: floor and ceil would turn a float error into a whole unit of the last decimal.
    low, high = (round(100 * bound * scale, 6) for bound in (interval.low, interval.high))
    if not math.isfinite(low + high):
        return low, high
    return math.floor(low) / scale, math.ceil(high) / scale


def _count_decimals(interval: Interval) -> int:
    """Returns the number of decimals with which an interval is shown in percent. They show two significant digits of
    half the interval's width. If the interval excludes 0, neither end is rounded to 0.
    """
    # The width of the interval determines how many decimals are meaningful.
    half_width = 100 * (interval.high - interval.low) / 2
    decimals = min(4, max(0, 1 - math.floor(math.log10(half_width)))) if 0 < half_width < math.inf else 2
    # If an end of the interval were rounded to 0, the interval would seem to include 0.
    nearest = 100 * min(abs(interval.low), abs(interval.high))
    if nearest and (interval.low > 0) == (interval.high > 0):
        decimals = max(decimals, min(9, math.ceil(-math.log10(nearest))))
    return decimals


def describe_verdict(arm: ArmVerdict, verdicts: TrainingVerdicts) -> str:
    """Returns a text such as 'worse by +0.84% [+0.72%, +0.96%] (99%): real, inside the 1% you tolerate'."""
    judged = arm.judged
    seeds = len(verdicts.seeds)
    if judged.learned is LearningVerdict.DIVERGED:
        return f"diverged in {len(arm.diverged_in)} of {many(seeds, 'seed')} ({_format_seeds(arm.diverged_in)})"
    if judged.learned is LearningVerdict.DID_NOT_LEARN:
        return f"no verdict: the reference did not learn ({describe_missing_loss_fall(verdicts)})"
    if judged.learned is LearningVerdict.INCONCLUSIVE:
        return f"{VERDICT_WORDS[judged.learned]}: {_describe_gap_bound(arm, verdicts)}{describe_inconclusive(judged)}"
    assert judged.gap is not None and judged.gap.decides is not None
    interval = judged.gap.decides
    if judged.learned is LearningVerdict.WITHIN_NOISE:
        if arm.same_bits:
            return "within noise: every loss is the reference's, bit for bit; does this arm take effect?"
        return f"within noise: {_format_interval(interval)}, inside +-{100 * verdicts.margin:.4g}%"
    importance_words = describe_importance(judged.learned, judged.matters, verdicts.margin)
    return f"{judged.learned} by {_format_interval(interval)}: {importance_words}"


# The values that --fail-on accepts.
ALARM = "alarm"
FAILURE_WORDS = (
    *(
        word.replace(" ", "-")
        for word in LearningVerdict
        if word not in (LearningVerdict.BETTER, LearningVerdict.WITHIN_NOISE)
    ),
    ALARM,
)


def list_failures(judged: JudgedTraining, requested_failures: Collection[str]) -> Iterator[str]:
    for arm in judged.verdicts.arms:
        # Neither a gap within the margin nor an unsuitable learning rate is a failure of the precision.
        has_arm_failed = not arm.judged.is_tolerated and arm.judged.why is not InconclusiveReason.OTHER_RATE
        if has_arm_failed and arm.judged.learned.replace(" ", "-") in requested_failures:
            yield f"{arm.arm.name}: {describe_verdict(arm, judged.verdicts)}"
    if ALARM in requested_failures:
        for event in judged.stored.alarms:
            yield f"{event.arm}, seed {event.seed}, step {event.step}: {event.words}"


_ADVICE_BY_VOID_REASON = {
    VoidReason.NEARLY_ZERO: ", and more seeds would not change that; train fewer --steps, on more --data, or with a "
    "loss that stays above 0",
    VoidReason.OTHER_TOKENS: ", and more seeds would not change that",
}


def describe_inconclusive(judged: JudgedArm) -> str:
    further_seeds_words = (
        f"{judged.more_seeds} more would do" if judged.more_seeds else "the number of seeds that would do is unknown"
    )
    if judged.why in (InconclusiveReason.SAME_BITS, InconclusiveReason.FALLBACK, InconclusiveReason.OTHER_RATE):
        return str(judged.why)
    if judged.why is InconclusiveReason.FEW_PAIRS:
        seed_pair_count = judged.gap.pairs if judged.gap else 0
        counted_seeds_text = (
            f"{many(seed_pair_count, 'seed')} {'counts' if seed_pair_count == 1 else 'count'}, fewer than {MIN_PAIRS}"
        )
        # Further seeds would be void for the same reason, so propose none.
        if judged.void:
            return f"{counted_seeds_text}: {judged.void}{_ADVICE_BY_VOID_REASON.get(judged.void, '')}"
        return f"{counted_seeds_text}; {further_seeds_words}"
    if judged.why is InconclusiveReason.TOO_WIDE:
        assert judged.gap is not None and judged.gap.decides is not None
        bound = describe_upper_bound(judged.gap.decides)
        interval_text = _format_interval(judged.gap.decides)
        # Four of five: the power for which curves.py proposes seeds is 80%.
        return f"{bound}, as {interval_text} is too wide to tell; {further_seeds_words} in four of five cases"
    if judged.why is InconclusiveReason.NO_HELD_OUT:
        return "too few seeds have a finite loss on held-out text"
    assert judged.gap is not None and judged.held_out is not None
    training_loss_change_text = units.change(1 + judged.gap.point)
    return (
        f"{training_loss_change_text} on training text, but {units.change(1 + judged.held_out.point)} on held-out text"
    )


def describe_missing_loss_fall(verdicts: TrainingVerdicts) -> str:
    required_loss_fall = units.percent(verdicts.least_fall)
    # NaN comes first, because it is worse than any number.
    smallest_loss_fall = min(verdicts.falls.values(), key=lambda fall: (not math.isnan(fall), fall))
    loss_fall_text = (
        "its loss was not a number in the end"
        if math.isnan(smallest_loss_fall)
        else f"its loss fell by {units.percent(smallest_loss_fall)}"
    )
    return f"in one seed {loss_fall_text}; every seed needs at least {required_loss_fall}"


def list_void_seeds(arm: ArmVerdict) -> Iterator[str]:
    """Yields a sentence for each reason why seeds of an arm do not count. The sentence lists these seeds."""
    reasons = together((void_reason.value, seed) for seed, void_reason in arm.voids if seed not in arm.diverged_in)
    for reason, seeds in reasons.items():
        yield f"{arm.arm.name}: {_format_seeds(seeds)} {'does' if len(seeds) == 1 else 'do'} not count: {reason}"


def describe_chance(verdicts: TrainingVerdicts) -> Iterator[str]:
    """Yields sentences on the effect of chance on the reference and on verdicts of several arms, and on the smallest
    gap that would have been visible.
    """
    if verdicts.repeat_band is not None:
        yield describe_nondeterminism(verdicts.repeat_band)
    if verdicts.chaos is not None:
        yield (
            f"one ulp moves the reference by {100 * verdicts.chaos.gap:+.2g}% in seed {verdicts.chaos.seed}: one seed "
            "shows nothing smaller"
        )
    arm_count = len(verdicts.arms)
    if arm_count > 1:
        yield (
            f"each verdict has its own 99% interval: with {arm_count} arms that do not differ, at most {arm_count} of "
            "100 trainings would call any of them worse or better"
        )
    if arm_count:
        yield describe_smallest_visible_gap(verdicts)


def describe_smallest_visible_gap(verdicts: TrainingVerdicts) -> str:
    """Returns a sentence on the smallest gap that would have been visible in all arms: that of the arm with the widest
    interval.
    """
    arm_loss_gaps = [arm.judged.gap for arm in verdicts.arms if arm.judged.gap is not None]
    visible_gaps = [compute_detectable_gap(gap) for gap in arm_loss_gaps if gap.pairs >= MIN_PAIRS]
    largest_pair_count = max((gap.pairs for gap in arm_loss_gaps), default=0)
    if visible_gaps:
        return f"a gap of {100 * max(visible_gaps):.2g}% or more would have shown in about three of four such trainings"
    return (
        f"fewer than {MIN_PAIRS} seeds count ({largest_pair_count}), so that it is unknown which gap would have shown"
    )


MODEL_SIZE_ADVICE = "these verdicts hold for this size of model only: train the size that you will use"


def describe_nondeterminism(band: RepeatDifferences) -> str:
    if band.first is None:
        return (
            f"nondeterminism is zero: the repeat has the same loss in each of {many(band.steps, 'step')}, bit for bit"
        )
    return f"the repeat differs from step {band.first} on, by at most {units.percent(band.largest, 3)} of a step's loss"


def format_adjusted_speed(speed: AdjustedSpeed | None) -> str | None:
    """Returns a text such as '1.42x [1.35x, 1.49x] (1.50x by steps)': the speed to the same loss with its interval, and
    the speed of steps.
    """
    if speed is None:
        return None
    step_speed_words = f"({units.ratio(speed.raw.point)} by steps)"
    interval = speed.adjusted
    if interval is None:
        return f"unknown, as the loss no longer surely falls {step_speed_words}"
    if speed.bounded:
        return f"at most {units.ratio(interval.point)} {step_speed_words}"
    return (
        f"{units.ratio(interval.point)} [{units.ratio(interval.low)}, {units.ratio(interval.high)}] {step_speed_words}"
    )


def format_joules(joules: WindowRange | None) -> str | None:
    """Returns the median energy of a step with the range over windows, such as '1.90 J [1.88 J, 1.91 J]'."""
    if joules is None:
        return None
    return f"{units.joules(joules.middle)} [{units.joules(joules.low)}, {units.joules(joules.high)}]"


def describe_loops(judged: JudgedTraining) -> Iterator[Text]:
    """Yields a sentence on each recorded loop: how its loss changed, and its first alarm. Then yields a sentence on the
    largest shares of a tensor that underflow and saturate in a cast.
    """
    for (name, seed), curve in judged.curves.items():
        first_row = curve.rows[0]
        last = curve.rows[-1]
        alarms = [alarm for alarm in judged.stored.alarms if (alarm.arm, alarm.seed) == (name, seed)]
        first_alarm_words = "".join(f", the first in step {alarm.step}: {alarm.words}" for alarm in alarms[:1])
        verb, tone = (
            ("fell", Tone.PLAIN) if last.loss < first_row.loss else ("rose", Tone.BAD if alarms else Tone.PLAIN)
        )
        yield Text(
            f"{name}: the loss {verb} from {first_row.loss:.4g} in step {first_row.step} to {last.loss:.4g} in step "
            f"{last.step}; {many(len(alarms), 'alarm')}{first_alarm_words}",
            tone,
        )
    casts = [line for line in judged.stored.select_lines(LayerReading) if line.signal_to_noise is not None]
    lost, saturated = (max(map(attrgetter(share), casts), default=0.0) for share in ("underflow", "saturated"))
    yield Text(
        f"casts: at most {units.percent(lost)} of a tensor underflows, and at most {units.percent(saturated)} saturates"
        if casts
        else "no cast was measured: `--precision fp8` measures what FP8 would lose"
    )


def _format_interval(interval: Interval) -> str:
    decimals = _count_decimals(interval)
    interval_percentages = (100 * interval.point, *_convert_bounds_to_percent(interval))
    # Adding 0.0 turns -0.0 into 0.0.
    point, low, high = (f"{round(value, decimals) + 0.0:+.{decimals}f}%" for value in interval_percentages)
    return f"{point} [{low}, {high}] ({units.percent(interval.level, 0)})"


def _format_seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' * (len(seeds) != 1)} {join_words(map(str, seeds))}"
