"""Sentences about how the arms of a training learned: verdicts, bands and speeds, the same wherever they are shown."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from fp8bench import units
from fp8bench.features.train.values import ArmRole
from fp8bench.features.train.verdicts.curves import (
    LEAST_PAIRS,
    JudgedArm,
    Learned,
    Pair,
    Void,
    Why,
    bound_of_one,
    smallest_effect,
)
from fp8bench.features.train.verdicts.summary import ArmSummary, JudgedTraining, TrainedEnergy, describe_importance
from fp8bench.features.train.verdicts.verdicts import AdjustedSpeed, ArmVerdict, RepeatBand, TrainingVerdicts
from fp8bench.model import Interval
from fp8bench.model.step import Coverage
from fp8bench.report.topics.shares import coverage_sentence, left_of
from fp8bench.report.words.naming import join_words, many

_ROLES = {
    ArmRole.REFERENCE: "the reference",
    ArmRole.REPEAT: "the reference repeated",
    ArmRole.CHAOS: "the reference with weights one ulp apart, in the first seed only",
    ArmRole.OTHER_RATE: "the reference at another rate",
}
_SHOWN = 3
VERDICTS = {
    Learned.DIVERGED: "no: diverges",
    Learned.DID_NOT_LEARN: "cannot tell",
    Learned.WORSE: "learns worse",
    Learned.WITHIN_NOISE: "as well",
    Learned.BETTER: "learns better",
    Learned.INCONCLUSIVE: "cannot tell",
}


def coverage_words(name: str, coverage: Coverage) -> Iterator[str]:
    yield coverage_sentence(name, coverage)
    for reason, names, _ in left_of(coverage)[:_SHOWN]:
        yield f"{join_words(names, _SHOWN)}: {reason}"
    yield from coverage.remarks
    yield f"backward begins from {coverage.loss}"


def describe_arm(summary: ArmSummary, among: TrainingVerdicts) -> str:
    """Returns the arm's verdict, why it has none, or what else it is for."""
    arm = summary.arm
    if arm.skip or summary.verdict is not None:
        return arm.skip if summary.verdict is None or arm.skip else verdict(summary.verdict, among)
    if arm.role is ArmRole.CHAOS and among.chaos is not None:
        return f"{_ROLES[arm.role]}: {100 * among.chaos.gap:+.2g}% from it there"
    best = arm.name == among.reference and among.rates > 1
    return f"{_ROLES[arm.role]}{' at its best rate, with which arms are compared' if best else ''}"


def _bound_so_far(arm: ArmVerdict, among: TrainingVerdicts) -> str:
    """Returns what few seeds show; for one seed, relative to the effect of one ulp in it."""
    gap = arm.judged.gap
    if gap is None or arm.judged.why is not Why.FEW_PAIRS:
        return ""
    if gap.shown is not None:
        return f"{at_most(gap.shown)} (95%); "
    if among.chaos is None or arm.pairs[0].seed != among.chaos.seed:
        return ""
    bound = bound_of_one(gap.point, among.chaos.gap)
    return "" if bound is None else f"{at_most(bound)} in seed {among.chaos.seed} (95%, by what one ulp does there); "


def at_most(interval: Interval) -> str:
    """'at most 0.24% worse'."""
    return f"at most {_ends(interval)[1]:.{_decimals(interval)}f}% worse" if interval.high > 0 else "at most 0% worse"


def _ends(interval: Interval) -> tuple[float, float]:
    """Returns the bounds in percent, rounded outward: narrower ones would claim more."""
    scale = 10 ** _decimals(interval)
    low, high = (round(100 * end * scale, 6) for end in (interval.low, interval.high))
    if not math.isfinite(low + high):
        return low, high
    return math.floor(low) / scale, math.ceil(high) / scale


def _decimals(interval: Interval) -> int:
    """Returns the significant decimals of an interval in percent, '0.24%', '12%', or enough to show that it excludes
    0."""
    # Half of the width determines how many digits are meaningful.
    reach = 100 * (interval.high - interval.low) / 2
    digits = min(4, max(0, 1 - math.floor(math.log10(reach)))) if 0 < reach < math.inf else 2
    # An end that rounds to 0 would hide that the interval excludes it.
    nearest = 100 * min(abs(interval.low), abs(interval.high))
    if nearest and (interval.low > 0) == (interval.high > 0):
        digits = max(digits, min(9, math.ceil(-math.log10(nearest))))
    return digits


def verdict(arm: ArmVerdict, among: TrainingVerdicts) -> str:
    """'worse by +0.84% [+0.72%, +0.96%] (99%): real, inside the 1% you tolerate'."""
    judged, seeds = arm.judged, len(among.seeds)
    if judged.learned is Learned.DIVERGED:
        return f"diverged in {len(arm.diverged_in)} of {many(seeds, 'seed')} ({_seeds(arm.diverged_in)})"
    if judged.learned is Learned.DID_NOT_LEARN:
        return f"no verdict: the reference did not learn ({did_not_learn(among)})"
    if judged.learned is Learned.INCONCLUSIVE:
        return f"inconclusive: {_bound_so_far(arm, among)}{inconclusive(judged)}"
    assert judged.gap is not None and judged.gap.decides is not None
    interval = judged.gap.decides
    if judged.learned is Learned.WITHIN_NOISE:
        if arm.same_bits:
            return "within noise: every loss is the reference's, bit for bit; does this arm take effect?"
        return f"within noise: {_span(interval)}, inside +-{100 * among.margin:.4g}%"
    meaning = describe_importance(judged.learned, judged.matters, among.margin)
    return f"{judged.learned} by {_span(interval)}: {meaning}"


# The values that --fail-on accepts.
ALARM = "alarm"
FAILURES = (*(word.replace(" ", "-") for word in Learned if word not in (Learned.BETTER, Learned.WITHIN_NOISE)), ALARM)


def failures(judged: JudgedTraining, named: Collection[str]) -> Iterator[str]:
    for arm in judged.verdicts.arms:
        # A difference inside the margin is tolerated; a worse rate is not a failure of the precision.
        counts = not arm.judged.is_tolerated and arm.judged.why is not Why.OTHER_RATE
        if counts and arm.judged.learned.replace(" ", "-") in named:
            yield f"{arm.arm.name}: {verdict(arm, judged.verdicts)}"
    if ALARM in named:
        for event in judged.kept.alarms:
            yield f"{event.arm}, seed {event.seed}, step {event.step}: {event.words}"


_CURES = {
    Void.NEARLY_ZERO: ", and more seeds would not change that; train fewer --steps, on more --data, or with a loss "
    "that stays above 0",
    Void.OTHER_TOKENS: ", and more seeds would not change that",
}


def inconclusive(judged: JudgedArm) -> str:
    seeds = f"{judged.more_seeds} more would do" if judged.more_seeds else "how many would do is unknown"
    if judged.why in (Why.SAME_BITS, Why.FALLBACK, Why.OTHER_RATE):
        return str(judged.why)
    if judged.why is Why.FEW_PAIRS:
        pairs = judged.gap.pairs if judged.gap else 0
        few = f"{many(pairs, 'seed')} {'counts' if pairs == 1 else 'count'}, fewer than {LEAST_PAIRS}"
        return f"{few}: {judged.void}{_CURES.get(judged.void, '')}" if judged.void else f"{few}; {seeds}"
    if judged.why is Why.TOO_WIDE:
        assert judged.gap is not None and judged.gap.decides is not None
        interval = judged.gap.decides
        return f"{at_most(interval)}, as {_span(interval)} is too wide to tell; {seeds} in four of five cases"
    if judged.why is Why.NO_HELD_OUT:
        return "too few seeds have a finite loss on held-out text"
    assert judged.gap is not None and judged.held_out is not None
    training, held_out = (units.change(1 + difference.point) for difference in (judged.gap, judged.held_out))
    return f"{training} on training text, but {held_out} on held-out text"


def did_not_learn(among: TrainingVerdicts) -> str:
    least = units.percent(among.least_fall)
    worst = min(among.falls.values(), key=lambda fall: (not math.isnan(fall), fall))
    fell = "its loss was not a number in the end" if math.isnan(worst) else f"its loss fell by {units.percent(worst)}"
    return f"in one seed {fell}; every seed needs at least {least}"


def notes(arm: ArmVerdict) -> Iterator[str]:
    """Yields which seeds of the arm do not count, by reason."""
    reasons: dict[str, list[int]] = {}
    for seed, void in arm.voids:
        if seed not in arm.diverged_in:
            reasons.setdefault(void.value, []).append(seed)
    for reason, seeds in reasons.items():
        yield f"{arm.arm.name}: {_seeds(seeds)} {'does' if len(seeds) == 1 else 'do'} not count: {reason}"


def chance_of_all(among: TrainingVerdicts) -> str:
    """Returns what 99% means for several arms; '' for one."""
    count = len(among.arms)
    if count < 2:
        return ""
    return (
        f"each verdict has its own 99% interval: with {count} arms that do not differ, at most {count} of 100 "
        "trainings would call any of them worse or better"
    )


def effect(among: TrainingVerdicts) -> str:
    """Returns which gap the training could have shown, in the arm with the widest interval, and what it is about."""
    gaps = [arm.judged.gap for arm in among.arms if arm.judged.gap is not None]
    sizes = [smallest_effect(gap) for gap in gaps if gap.pairs >= LEAST_PAIRS]
    counted = max((gap.pairs for gap in gaps), default=0)
    smallest = f"fewer than {LEAST_PAIRS} seeds count ({counted}), so that it is unknown which gap would have shown"
    if sizes:
        smallest = f"a gap of {100 * max(sizes):.2g}% or more would have shown in about three of four such trainings"
    return f"{smallest}; none of this transfers to a model of another size"


def chaos(pair: Pair) -> str:
    return f"one ulp moves the reference by {100 * pair.gap:+.2g}% in seed {pair.seed}: one seed shows nothing smaller"


def repeat_band(band: RepeatBand) -> str:
    if band.first is None:
        return (
            f"nondeterminism is zero: the repeat has the same loss in each of {many(band.steps, 'step')}, bit for bit"
        )
    return f"the repeat differs from step {band.first} on, by at most {units.percent(band.largest, 3)} of a step's loss"


def speed(sooner: AdjustedSpeed | None) -> str | None:
    """'1.42x [1.35x, 1.49x] (1.50x by steps)'."""
    if sooner is None:
        return None
    raw = f"({units.ratio(sooner.raw.point)} by steps)"
    if sooner.adjusted is None:
        return f"unknown, as the loss no longer surely falls {raw}"
    adjusted = f"at most {units.ratio(sooner.adjusted.point)}" if sooner.bounded else _ratio(sooner.adjusted)
    return f"{adjusted} {raw}"


def joules(used: TrainedEnergy | None) -> str | None:
    """'1.90 J [1.88 J, 1.91 J]': the median and the range of windows."""
    if used is None or used.joules is None:
        return None
    return "{} [{}, {}]".format(*map(units.joules, (used.joules.middle, used.joules.low, used.joules.high)))


def _ratio(interval: Interval) -> str:
    """'0.83x [0.80x, 0.87x]'."""
    return "{} [{}, {}]".format(*map(units.ratio, (interval.point, interval.low, interval.high)))


def _span(interval: Interval) -> str:
    digits = _decimals(interval)
    ends = (100 * interval.point, *_ends(interval))
    point, low, high = (f"{round(value, digits) + 0.0:+.{digits}f}%" for value in ends)
    return f"{point} [{low}, {high}] ({units.percent(interval.level, 0)})"


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' * (len(seeds) != 1)} {join_words(map(str, seeds))}"
