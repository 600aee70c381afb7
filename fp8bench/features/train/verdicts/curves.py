"""The curves of a training, what is compared of them, and the verdicts on pairs of seeds.

The compared figure was declared in advance: the mean training loss over the last third of the steps. Gaps are paired
over seeds and judged by Student's t: the interval of 99% decides, that of 95% is shown. An interval spans those of the
same training ended at any of its last ten steps, so that a verdict seldom depends on the last one. A verdict is two
facts: whether there is a difference (the interval against 0), and whether it matters (against the margin). It is about
a single arm: of a hundred arms that do not differ from their reference, at most one is called worse or better.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from fp8bench.analysis.compare.interval import quantile
from fp8bench.features.train.values import NOT_FINITE, Lines, StepRow, StreamLine, TrainingEvent, Validation
from fp8bench.model import Interval
from fp8bench.report.panels import together

HELD_OUT = "held-out"
_TENTHS = 10
_THIRDS = 3
# An interval spans those at this many steps: the last one, and earlier ones within the last tenth.
_ENDS = 10
# A reference whose loss has fallen to this share of its first one has memorized its text, and gaps relative to it are
# meaningless. For bytes that is 0.055 per token; text that was learned and not copied stays above 0.6.
_NEARLY_ZERO = 0.01
_STOPPED = "stopped"

Key = tuple[str, int]


class Void(StrEnum):
    """Why a seed does not count for an arm."""

    NOT_FINISHED = "not finished"
    NOT_FINITE = "not finite"
    NEARLY_ZERO = "the reference's loss is nearly zero or below"
    OTHER_TOKENS = "another number of tokens a step"
    COPY = "the reference's losses are those of another seed bit for bit"


@dataclass(frozen=True)
class Curve:
    """One arm in one seed: its rows in the order of steps; `steps` is the requested number."""

    steps: int
    rows: tuple[StepRow, ...] = ()
    held_out: Mapping[int, float] = field(default_factory=dict)
    events: frozenset[str] = frozenset()

    @cached_property
    def losses(self) -> tuple[float, ...]:
        """The loss of each step; NaN for a script's first one, which is over when watching begins."""
        unwatched = min(1, self.rows[0].step) if self.rows else 0
        return (*[math.nan] * unwatched, *(row.loss for row in self.rows))

    @property
    def whole(self) -> bool:
        first = self.rows[0].step if self.rows else 0
        return first <= 1 and len(self.rows) == self.steps - first

    @property
    def endpoint(self) -> float:
        """The mean final loss; NaN if a step of the last tenth is not finite, or the arm did not finish."""
        end = self.losses[-last_of(self.steps) :]
        return math.fsum(end) / len(end) if self.whole and all(map(math.isfinite, end)) else math.nan

    @property
    def fall(self) -> float:
        """The fall of the loss from the first step to the endpoint, or on held-out text if more: a first batch may be
        easy. NaN if void."""
        if not (self.rows and self.rows[0].loss > 0):
            return math.nan
        fell, first_look, last_look = 1 - self.endpoint / self.rows[0].loss, *map(self.held_out.get, (0, self.steps))
        return max(fell, 1 - last_look / first_look) if first_look and last_look and math.isfinite(fell) else fell

    @property
    def blew_up(self) -> bool:
        """Whether it ended with a value that is not finite. Recovered steps do not count, nor does a lost arm."""
        if self.whole:
            return not math.isfinite(self.rows[-1].loss)
        return {_STOPPED, NOT_FINITE} <= self.events


Curves = Mapping[Key, Curve]


def last_of(steps: int) -> int:
    return max(1, steps // _TENTHS)


def curves_of(lines: Iterable[StreamLine], steps: int) -> dict[Key, Curve]:
    by_key = together(((line.arm, line.seed), line) for line in lines)
    curves = {key: _curve(arm_lines, steps) for key, arm_lines in by_key.items()}
    return {key: curve for key, curve in curves.items() if curve.rows}


def curves_of_arm(curves: Curves, arm: str) -> dict[int, Curve]:
    """Returns the curves of an arm by seed."""
    return {seed: curve for (name, seed), curve in curves.items() if name == arm}


def _curve(lines: Lines, steps: int) -> Curve:
    """Makes a curve; the last of several lines for one step counts."""
    rows = {line.step: line for line in lines if isinstance(line, StepRow)}
    looks = (line for line in lines if isinstance(line, Validation) and line.of == HELD_OUT)
    events = (line.kind for line in lines if isinstance(line, TrainingEvent))
    return Curve(
        steps,
        tuple(row for _, row in sorted(rows.items())),
        {look.step: look.loss for look in looks},
        frozenset(events),
    )


@dataclass(frozen=True)
class Pair:
    """One seed: the share by which the arm's mean loss over the last third of the steps exceeds its reference's.
    `held_out` is None if a point is void. `earlier` are the gaps if the training had ended some steps before."""

    seed: int
    gap: float
    held_out: float | None = None
    same_bits: bool = False
    earlier: tuple[float, ...] = ()


def pair_curves(reference: Curve, arm: Curve, seed: int) -> Pair | Void:
    if not (reference.whole and arm.whole):
        return Void.NOT_FINISHED
    # An endpoint that is not finite leaves nothing to compare, regardless of earlier steps.
    old, new = reference.endpoint, arm.endpoint
    if math.isnan(old) or math.isnan(new):
        return Void.NOT_FINITE
    if old <= _NEARLY_ZERO * abs(reference.rows[0].loss):  # of a negative loss a share has the wrong sign
        return Void.NEARLY_ZERO
    if reference.rows[-1].tokens != arm.rows[-1].tokens:
        return Void.OTHER_TOKENS
    # A verdict spans these ends, so that no single last batch decides it.
    ends = range(arm.steps - min(_ENDS - 1, arm.steps // _TENTHS), arm.steps + 1)
    *earlier, gap = gaps_at(reference, arm, ends)
    if any(map(math.isnan, (*earlier, gap))):
        return Void.NEARLY_ZERO
    held_out, same_bits = _held_out_gap(reference, arm), reference.losses == arm.losses
    return Pair(seed, gap, held_out, same_bits, tuple(earlier))


def gaps_at(reference: Curve, arm: Curve, ends: Sequence[int]) -> list[float]:
    """Returns the gap of the loss as if the training had ended after each of these numbers of steps, from the means
    over the last third of them. Steps without a finite loss in both arms are left out. NaN without a share."""
    pairs = list(zip(reference.losses, arm.losses, strict=False))
    gaps = []
    for end in ends:
        gap = _gap_of_means(pairs[_late(end) : end]) if end <= len(pairs) else None
        gaps.append(math.nan if gap is None else gap)
    return gaps


def _gap_of_means(losses: Sequence[tuple[float, float]]) -> float | None:
    """Returns the gap of (reference, arm) losses that are finite in both. None without a share."""
    # Otherwise a step that one arm skipped would count only for the other.
    both = [pair for pair in losses if math.isfinite(sum(pair))]
    old, new = map(sum, zip(*both, strict=True)) if both else (0.0, 0.0)
    return new / old - 1 if old > 0 else None


def _late(steps: int) -> int:
    """Returns the first of the steps that are compared."""
    return steps - max(1, steps // _THIRDS)


def _held_out_gap(reference: Curve, arm: Curve) -> float | None:
    """Returns the gap of the means over all validations in the last third of the steps. None if the last one is not
    finite."""
    steps = sorted(step for step in reference.held_out.keys() & arm.held_out if step > _late(arm.steps))
    looks = [(reference.held_out[step], arm.held_out[step]) for step in steps]
    return _gap_of_means(looks) if looks and math.isfinite(sum(looks[-1])) else None


LEAST_PAIRS = 5
DECIDING, SHOWN = 0.99, 0.95
# No verdict asks for more seeds than this.
MOST_SEEDS = 1000
# The proposed number of seeds decides with a probability of at least 80%, if gap and spread are as estimated: in 80 of
# 100 cases chance moves the mean by no more than this.
_POWER = statistics.NormalDist().inv_cdf(0.9)


class Learned(StrEnum):
    """The verdict on an arm, in the order in which they are tried. Worse and better are certain differences, however
    small; within noise, no difference is visible, and none beyond the margin."""

    DIVERGED = "diverged"
    DID_NOT_LEARN = "did not learn"
    WORSE = "worse"
    WITHIN_NOISE = "within noise"
    BETTER = "better"
    INCONCLUSIVE = "inconclusive"


class Matters(StrEnum):
    """Whether a difference is beyond the margin: certainly, certainly not, or perhaps."""

    YES = "yes"
    NO = "no"
    OPEN = "open"


class Why(StrEnum):
    """Why a comparison is inconclusive."""

    SAME_BITS = "in another precision every loss is the reference's, bit for bit"
    OTHER_RATE = "at another rate it has a lower loss"
    FALLBACK = "its products are in another precision than its own"
    FEW_PAIRS = "too few pairs of seeds"
    NO_HELD_OUT = "too few pairs of seeds have a loss on held-out text"
    DISAGREE = "the losses on training and on held-out text disagree"
    TOO_WIDE = "the interval is too wide"


@dataclass(frozen=True)
class Gap:
    """The share by which an arm's loss exceeds its reference's: the mean over pairs, with intervals if there are at
    least two. `deviation` is the deviation between pairs that corresponds to the width of the deciding interval."""

    point: float
    pairs: int
    deviation: float
    decides: Interval | None
    shown: Interval | None


@dataclass(frozen=True)
class JudgedArm:
    """The verdict on the pairs of one arm. `matters` is None if there are too few, or another reason rules out a
    verdict. `more_seeds` would decide; None if that is unknown, or if further seeds would be void, too, for the reason
    `void`."""

    learned: Learned
    gap: Gap | None = None
    held_out: Gap | None = None
    why: Why | None = None
    more_seeds: int | None = None
    void: Void | None = None
    matters: Matters | None = None

    @property
    def is_tolerated(self) -> bool:
        """Whether it is worse, but by less than the margin."""
        return self.learned is Learned.WORSE and self.matters is Matters.NO


# Reasons that further seeds would share.
INCURABLE = (Void.NOT_FINISHED, Void.NEARLY_ZERO, Void.OTHER_TOKENS)


def gap_of(gaps: Sequence[float]) -> Gap | None:
    if not gaps:
        return None
    point, count = statistics.fmean(gaps), len(gaps)
    if count == 1:
        return Gap(point, 1, math.nan, None, None)
    # statistics.stdev computes with fractions, which takes eighty times as long.
    deviation = math.sqrt(math.fsum((gap - point) ** 2 for gap in gaps) / (count - 1))
    decides, shown = (_interval(point, deviation, count, level) for level in (DECIDING, SHOWN))
    return Gap(point, count, deviation, decides, shown)


def judge(pairs: Sequence[Pair], margin: float, looks: bool = True) -> JudgedArm:
    """Returns the verdict on pairs, none of which diverged. Without `looks` there is no held-out text that must
    agree."""
    gap = _gap_over_ends(pairs)
    held_out = gap_of([pair.held_out for pair in pairs if pair.held_out is not None])
    open_arm = JudgedArm(Learned.INCONCLUSIVE, gap, held_out)
    if gap is None or gap.decides is None or gap.pairs < LEAST_PAIRS:
        return replace(open_arm, why=Why.FEW_PAIRS, more_seeds=LEAST_PAIRS - len(pairs))
    if looks and (held_out is None or held_out.decides is None or held_out.pairs < LEAST_PAIRS):
        return replace(open_arm, why=Why.NO_HELD_OUT)
    learned, matters = rule(gap.decides, margin), importance(gap.decides, margin)
    if learned is Learned.INCONCLUSIVE:
        return replace(open_arm, matters=matters, why=Why.TOO_WIDE, more_seeds=seeds_until(gap, margin))
    if looks and held_out and held_out.decides and not _agrees(learned, matters, held_out.decides, margin):
        return replace(open_arm, why=Why.DISAGREE)
    return replace(open_arm, learned=learned, matters=matters)


def _gap_over_ends(pairs: Sequence[Pair]) -> Gap | None:
    gap = gap_of([pair.gap for pair in pairs])
    if gap is None or gap.decides is None or gap.shown is None:
        return gap
    by_end = zip(*(pair.earlier for pair in pairs), strict=True)
    earlier = list(map(gap_of, by_end))
    decides = _hull(gap.decides, [gap_before.decides for gap_before in earlier if gap_before and gap_before.decides])
    shown = _hull(gap.shown, [gap_before.shown for gap_before in earlier if gap_before and gap_before.shown])
    # The deviation that would give the hull's width, from which the number of seeds is estimated.
    reach = (decides.high - decides.low) / 2
    deviation = reach * math.sqrt(gap.pairs) / quantile(DECIDING, gap.pairs - 1)
    return replace(gap, deviation=deviation, decides=decides, shown=shown)


def _hull(last: Interval, earlier: Sequence[Interval]) -> Interval:
    every = [last, *earlier]
    return replace(last, low=min(interval.low for interval in every), high=max(interval.high for interval in every))


def rule(interval: Interval, margin: float) -> Learned:
    """Returns worse for an interval above 0, better below; one that includes 0 is within noise inside the margin, else
    inconclusive."""
    if interval.low > 0:
        return Learned.WORSE
    if interval.high < 0:
        return Learned.BETTER
    inside = importance(interval, margin) is Matters.NO
    return Learned.WITHIN_NOISE if inside else Learned.INCONCLUSIVE


def importance(interval: Interval, margin: float) -> Matters:
    if -margin <= interval.low and interval.high <= margin:
        return Matters.NO
    return Matters.YES if interval.low > margin or interval.high < -margin else Matters.OPEN


def _agrees(learned: Learned, matters: Matters, held_out: Interval, margin: float) -> bool:
    """Whether held-out text agrees: by its sign or, inside the margin, by not certainly being on the other side or
    beyond the margin."""
    sign = {Learned.WORSE: 1, Learned.BETTER: -1}.get(learned, 0)
    if matters is not Matters.NO:
        return sign * held_out.point > 0
    opposite = sign > 0 > held_out.high or sign < 0 < held_out.low
    return not opposite and importance(held_out, margin) is not Matters.YES


def _interval(point: float, deviation: float, count: int, level: float) -> Interval:
    reach = quantile(level, count - 1) * deviation / math.sqrt(count)
    return Interval(point, point - reach, point + reach, level)


def seeds_until(gap: Gap, margin: float) -> int | None:
    """Returns the smallest number of further seeds that probably decides; None if too many are needed."""

    def decides(count: int) -> bool:
        reach, moved = (value * gap.deviation / math.sqrt(count) for value in (quantile(DECIDING, count - 1), _POWER))
        nearest, furthest = max(0.0, abs(gap.point) - moved), abs(gap.point) + moved
        return nearest > reach or furthest <= margin - reach or 2 * reach <= margin

    # More seeds decide more, so the smallest number is found by bisection.
    counts = range(max(gap.pairs + 1, LEAST_PAIRS), MOST_SEEDS + 1)
    place = bisect_left(counts, True, key=decides)
    return counts[place] - gap.pairs if place < len(counts) else None


def smallest_effect(gap: Gap) -> float:
    """Returns the gap that would probably have been called a difference, with as many pairs and the same deviation."""
    return (quantile(DECIDING, gap.pairs - 1) + _POWER) * gap.deviation / math.sqrt(gap.pairs)


def bound_of_one(gap: float, chaos: float) -> Interval | None:
    """Bounds a gap by the effect of one ulp in the same seed: Student's t with one degree of freedom. None if that had
    no effect. Both share the reference's chance, which makes their ratio slightly narrower."""
    reach = quantile(SHOWN, 1) * abs(chaos)
    return Interval(gap, gap - reach, gap + reach, SHOWN) if reach else None
