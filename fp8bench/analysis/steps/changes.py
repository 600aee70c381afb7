"""Finds changes in the trends of a history: where figures stepped up or down between commits, and stayed there.

Steps are searched among figures of complete measurements, of one version and under the same conditions. Commits without
a comparable figure still count in a step's range. Exact counts are compared with the last count: each difference is a
certain step. A figure that becomes or stops being finite, like an error with a NaN, is also a certain step.
"""

from __future__ import annotations

import itertools
import math
import secrets
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain

import numpy as np

from fp8bench.analysis.metric import unit_of_series
from fp8bench.analysis.stats import Floats
from fp8bench.analysis.steps.change_points import LEAST_VALUES, Counts, Step, steps_of_many
from fp8bench.analysis.verdicts import UNEVEN
from fp8bench.model import Ack, Comparison, Conditions, Direction, Evidence, Figure, Label, Trend
from fp8bench.model.specs import COUNTS, MEAN, RELATIVE, RELATIVE_MEAN, TIME, spec_of

TOO_FEW = f"fewer than {LEAST_VALUES} commits measured under the same conditions, which is too few for a step to show"
TOO_FEW_COUNTS = "fewer than 2 commits counted under the same conditions, which is too few for a step to show"
TOO_FEW_SINCE = (
    f"since their conditions or version changed fewer than {LEAST_VALUES} commits were measured under the same, which "
    "is too few for a step to show: nothing is said of these"
)
BELOW_ZERO = "values below 0, which have no meaningful ratio"
_NOT_FINITE = "from or to a number that is not finite, so without a ratio"
# Zero counts as this share of the smallest other value.
_NOTHING = 0.5


# For each metric over all calls, the corresponding metric of the fastest calls.
_FASTEST_CALLS: Mapping[str, str] = {MEAN: TIME, RELATIVE_MEAN: RELATIVE}
Look = Callable[[Sequence[Floats]], list[tuple[Step, ...]]]


class ChangeState(StrEnum):
    """The state of a change. Only OPEN ones raise an alarm, if they are worse, or of exact counts."""

    OPEN = "open"
    ACKNOWLEDGED = "acknowledged"
    # The mean over all calls stepped the other way between the same commits.
    CONTRADICTED = "contradicted"
    # A later step took at least half of it back; for exact counts, also a step back to an earlier count.
    REVERTED = "reverted"
    # The work or the method has changed since: today's figures do not compare.
    OLD_VERSION = "old version"


@dataclass(frozen=True)
class Change:
    """A step of a trend, as a comparison of the level after it with the one before it.

    It lies after the commit `comparison.since` and not after `comparison.until`; `first` is the most likely first
    commit with the new level. `commits` counts the trend's commits in that range, `unmeasured` those without a
    comparable figure. `error` is the standard error of the ratio's logarithm. `current` is True if the newest figure
    was measured under the same conditions. `ack` is set for ACKNOWLEDGED.
    """

    trend: Trend
    comparison: Comparison
    first: str
    commits: int
    unmeasured: int
    error: float
    version: str
    current: bool
    state: ChangeState = ChangeState.OPEN
    ack: Ack | None = None

    @property
    def is_worse(self) -> bool:
        return self.comparison.direction is Direction.WORSE

    @property
    def is_counted(self) -> bool:
        """Whether it is a change of an exact count: then the step does different work, whether more or less."""
        return self.trend.series.metric in COUNTS

    @property
    def alarms(self) -> bool:
        return (self.is_worse or self.is_counted) and self.state is ChangeState.OPEN

    @property
    def size(self) -> float:
        """The absolute logarithm of its ratio; infinite for a change from or to 0."""
        return math.inf if self.comparison.ratio is None else abs(math.log(self.comparison.ratio.point))


@dataclass(frozen=True)
class Found:
    """All changes, the worst first; the number of trends searched, and of those skipped (`left`), by reason.

    Trends of exact counts are `counted` separately, because they have no noise.
    """

    changes: tuple[Change, ...]
    looked_at: int
    left: Counter[str]
    counted: int = 0


@dataclass(frozen=True)
class Stretch:
    """Comparable figures of a trend: their indices in it, and their values, which may be infinite or NaN.

    `read` returns the trend; `counted` marks exact counts.
    """

    read: Callable[[], Trend]
    places: Counts
    values: Floats
    counted: bool = False

    def finite(self) -> Stretch:
        is_finite = np.isfinite(self.values)
        return replace(self, places=self.places[is_finite], values=self.values[is_finite])


def find_changes(trends: Iterable[Trend]) -> Found:
    """Searches all trends together, without applying acknowledgements."""
    return changes_of((_stretches(trend) for trend in trends), steps_of_many)


def changes_of(stretches: Iterable[Sequence[Stretch]], look: Look) -> Found:
    """Returns the changes in stretches of trends. `look` finds steps; only trends with steps are read."""
    skipped: Counter[str] = Counter()
    sound: list[Stretch] = []
    changes: list[Change] = []
    looked_at = [0, 0]
    # 1. Choose the stretches that can have steps, and collect the reasons why others cannot.
    for of_trend in stretches:
        of_finiteness = list(chain.from_iterable(map(_changes_of_finiteness, of_trend)))
        changes += of_finiteness
        counted = any(stretch.counted for stretch in of_trend)
        finite = [stretch.finite() for stretch in of_trend]
        long_enough = [stretch for stretch in finite if len(stretch.values) >= (2 if stretch.counted else LEAST_VALUES)]
        searched = [stretch for stretch in long_enough if stretch.values.min() >= 0]
        sound += searched
        looked_at[counted] += bool(searched or of_finiteness)
        if not searched and not of_finiteness:
            too_few = TOO_FEW_COUNTS if counted else TOO_FEW
            skipped[BELOW_ZERO if long_enough else too_few] += 1
        elif searched and not counted and len(max(finite, key=_last_place).values) < LEAST_VALUES:
            skipped[TOO_FEW_SINCE] += 1
    # 2. Find the steps of all timed stretches together, and those of exact counts one by one.
    timed = [stretch for stretch in sound if not stretch.counted]
    exact = [stretch for stretch in sound if stretch.counted]
    steps = look([_above_zero(stretch.values) for stretch in timed])
    steps += [_exact_steps(_above_zero(stretch.values)) for stretch in exact]
    of_steps: list[Change] = []
    for stretch, of_stretch in zip([*timed, *exact], steps, strict=True):
        of_steps += _changes(stretch, of_stretch)
    changes += _check_against_means(of_steps)
    return Found(tuple(sorted(changes, key=worst_first)), looked_at[0], skipped, looked_at[1])


def _last_place(stretch: Stretch) -> int:
    return int(stretch.places[-1]) if len(stretch.places) else -1


def _exact_steps(values: Floats) -> tuple[Step, ...]:
    places = (np.flatnonzero(np.diff(values)) + 1).tolist()
    return tuple(Step(at, at - 1, at, float(values[at - 1]), float(values[at]), 0.0, 0.0) for at in places)


def _check_against_means(changes: Sequence[Change]) -> Iterator[Change]:
    """Yields the changes, marked where the mean over all calls contradicts the fastest calls.

    If both agree, the mean's change is dropped. Otherwise it is kept, because the mean includes every call.
    """
    restated = set[int]()
    opposite: dict[int, Change] = {}
    means = [change for change in changes if change.trend.series.metric in _FASTEST_CALLS]
    for mean, fast in itertools.product(means, changes):
        if not _is_same_step(mean, fast):
            continue
        if mean.is_worse is fast.is_worse and abs(mean.size - fast.size) <= math.log1p(UNEVEN):
            restated.add(id(mean))
        else:
            opposite[id(mean)] = fast
            opposite[id(fast)] = mean
    for change in changes:
        if id(change) not in restated:
            yield _mark_uneven(change, opposite[id(change)]) if id(change) in opposite else change


def _is_same_step(mean: Change, fast: Change) -> bool:
    """Whether both changes are of one case, and the same commit may have made both."""
    if fast.trend.series.metric != _FASTEST_CALLS[mean.trend.series.metric]:
        return False
    if fast.state is not mean.state or _cell_of(mean) != _cell_of(fast):
        return False
    places = {figure.commit: place for place, figure in enumerate(mean.trend.figures)}
    begins = [places.get(change.comparison.since, -1) for change in (mean, fast)]
    return max(begins) < min(places.get(change.comparison.until, -1) for change in (mean, fast))


def _cell_of(change: Change) -> tuple[object, ...]:
    return change.trend.series.workload, change.trend.cell, change.trend.machine.get("machine"), change.trend.python


def _mark_uneven(change: Change, opposite: Change) -> Change:
    is_mean = change.trend.series.metric in _FASTEST_CALLS
    comparison = replace(
        change.comparison,
        labels=(*change.comparison.labels, Label.UNEVEN),
        why="the fastest calls and the mean over all calls did not step alike",
    )
    stands = is_mean or change.state is not ChangeState.OPEN or change.is_worse is opposite.is_worse
    return replace(change, comparison=comparison, state=change.state if stands else ChangeState.CONTRADICTED)


def _stretches(trend: Trend) -> list[Stretch]:
    """Returns the comparable figures for each version and set of conditions."""
    values: dict[tuple[str, Conditions], dict[int, float]] = {}
    for place, figure in enumerate(trend.figures):
        if (value := _comparable_value(figure)) is not None:
            values.setdefault((figure.version, figure.under), {})[place] = value
    counted = trend.series.metric in COUNTS
    return [
        Stretch(lambda: trend, np.array([*by_place]), np.array([*by_place.values()]), counted)
        for by_place in values.values()
    ]


def _comparable_value(figure: Figure) -> float | None:
    return None if figure.hasty else figure.value


def _above_zero(values: Floats) -> Floats:
    """Replaces zeros, because steps are searched in logarithms."""
    above = values[values > 0]
    if len(above) == len(values):
        return values
    return np.where(values > 0, values, _NOTHING * above.min() if len(above) else _NOTHING)


def _changes(stretch: Stretch, steps: Sequence[Step]) -> Iterator[Change]:
    if not steps:
        return
    levels = _levels(stretch.values, steps)
    band = math.log1p(spec_of(stretch.read().series.metric).least_change)
    for number, step in enumerate(steps):
        if abs(math.log(step.after / step.before)) < band:
            continue
        change = _make_change(stretch, step, levels[number], levels[number + 1])
        yield replace(change, state=_state(change, levels[:number], levels[number + 2 :]))


def _changes_of_finiteness(stretch: Stretch) -> Iterator[Change]:
    """Yields a change for each place where a figure becomes, or stops being, a finite number."""
    finite = np.isfinite(stretch.values)
    for at in (np.flatnonzero(np.diff(finite)) + 1).tolist():
        level, new_level = stretch.values[at - 1 : at + 1].tolist()
        # Values that are not finite count as worse than any number.
        order = (0.0, 1.0) if finite[at - 1] else (1.0, 0.0)
        change = _make_change(stretch, Step(at, at - 1, at, *order, 0.0, 0.0), level, new_level)
        state = _state(change, (), ())
        if state is ChangeState.OPEN and (finite[at:] != finite[at]).any():
            state = ChangeState.REVERTED
        yield replace(change, state=state)


def _levels(values: Floats, steps: Sequence[Step]) -> list[float]:
    """Returns the level before the first step, and the level after each step."""
    if values.min() > 0:
        return [steps[0].before, *(step.after for step in steps)]
    pieces = np.split(values, [step.at for step in steps])
    return [statistics.median(piece.tolist()) for piece in pieces]


def _make_change(stretch: Stretch, step: Step, level: float, new_level: float) -> Change:
    trend = stretch.read()
    figures = trend.figures
    places = stretch.places.tolist()
    low, first, high = (places[place] for place in (step.low, step.at, step.high))
    # 1. The ratio of the levels, if both are finite.
    finite = math.isfinite(level) and math.isfinite(new_level)
    ratio, reason = None, ""
    if finite and level > 0 and new_level > 0:
        ratio = replace(step.ratio, level=1.0) if stretch.counted else step.ratio
    else:
        reason = "from or to zero: it has no ratio" if finite else _NOT_FINITE
    comparison = Comparison(
        case_of(trend),
        trend.series.workload,
        trend.series.metric,
        unit_of_series(trend.series),
        Direction.WORSE if step.after > step.before else Direction.BETTER,
        Evidence.HISTORY,
        level,
        new_level,
        ratio,
        None if stretch.counted or not finite else step.p_value,
        why=reason,
        since=figures[low].commit,
        until=figures[high].commit,
    )
    # 2. The commits where it may lie, and whether today's figures compare with it.
    inside = range(low + 1, high + 1)
    newest = next(place for place in reversed(range(len(figures))) if _comparable_value(figures[place]) is not None)
    return Change(
        trend,
        comparison,
        figures[first].commit,
        len(inside),
        len(set(inside) - set(places)),
        step.error,
        figures[first].version,
        current=newest in places,
    )


def case_of(trend: Trend) -> str:
    """Formats a cell like a case: 'gemm[shape=512]@box/bf16', with the machine in place of the device."""
    precision, *values = trend.cell
    inside = ",".join(f"{name}={value}" for name, value in zip(trend.series.param_names[1:], values, strict=True))
    return f"{trend.series.workload}[{inside}]@{trend.machine['machine']}/{precision}"


def _state(change: Change, earlier: Sequence[float], later: Sequence[float]) -> ChangeState:
    """Returns REVERTED if a later level is nearer to the one before the change, or an exact count returned to an
    earlier level."""
    if change.version != change.trend.series.version:
        return ChangeState.OLD_VERSION
    level, new_level = change.comparison.before, change.comparison.after
    assert level is not None and new_level is not None
    middle = math.sqrt(level * new_level) or (level + new_level) / 2
    reverted = any(number < middle if change.is_worse else number > middle for number in later)
    if change.is_counted and not change.is_worse and new_level in earlier:
        reverted = True
    return ChangeState.REVERTED if reverted else ChangeState.OPEN


def worst_first(change: Change) -> tuple[object, ...]:
    """Sorts alarms first, then by size; changes of about one size stay in the order of their series."""
    states = list(ChangeState)
    size = change.size if math.isinf(change.size) else round(change.size, 2)
    return states.index(change.state), not change.is_worse, -size


# A level may be this much further off than when it was acknowledged, or by this many standard errors.
_FURTHER = 0.02
_ERRORS = 3.0
# Stands for zero, which has no logarithm.
_LEAST = 1e-300


def apply_acks(found: Found, acks: Sequence[Ack]) -> Found:
    """Marks open changes that an acknowledgement covers; the newest such one counts."""
    changes = []
    for change in found.changes:
        ack = next((ack for ack in reversed(acks) if covers(ack, change)), None)
        is_acknowledged = ack is not None and change.state is ChangeState.OPEN
        changes.append(replace(change, state=ChangeState.ACKNOWLEDGED, ack=ack) if is_acknowledged else change)
    return replace(found, changes=tuple(sorted(changes, key=worst_first)))


def ack_of(change: Change, when: str, because: str) -> Ack:
    trend, comparison = change.trend, change.comparison
    assert comparison.before is not None and comparison.after is not None
    return Ack(
        secrets.token_hex(4),
        trend.series.name,
        trend.cell,
        str(trend.machine["machine"]),
        trend.python,
        change.version,
        comparison.direction,
        comparison.since,
        comparison.until,
        comparison.before,
        comparison.after,
        when,
        because,
    )


def covers(ack: Ack, change: Change) -> bool:
    """Whether an acknowledgement covers this change: same trend, overlapping ranges, and a level not further off."""
    trend, comparison = change.trend, change.comparison
    assert comparison.before is not None and comparison.after is not None
    # 1. The same trend and direction.
    identity = (
        trend.series.name,
        trend.cell,
        trend.machine["machine"],
        trend.python,
        change.version,
        comparison.direction,
    )
    if (ack.series, ack.cell, ack.machine, ack.python, ack.version, ack.direction) != identity:
        return False
    # 2. The new level is not further off, and the change does not begin where the acknowledged one ended.
    sign = 1 if change.is_worse else -1
    tolerance = 0 if change.is_counted else max(_FURTHER, _ERRORS * change.error)
    if sign * (_log(comparison.after) - _log(ack.after)) > tolerance:
        return False
    if sign * (_log(comparison.before) - (_log(ack.before) + _log(ack.after)) / 2) > 0:
        return False
    # 3. One commit may have made both; an end that the trend lacks is replaced by the change's.
    places = {figure.commit: place for place, figure in enumerate(trend.figures)}
    if ack.since not in places and ack.until not in places:
        return False
    low, high = places[comparison.since], places[comparison.until]
    return max(places.get(ack.since, low), low) < min(places.get(ack.until, high), high)


def _log(level: float) -> float:
    return math.log(max(level, _LEAST))
