"""Changes in the trends of a history: where figures stepped up or down between commits, and stayed there.

Steps are searched among figures of whole measurements, of one version and under the same conditions. Other commits in
between count in a step's range. Exact counts are compared with the last count: each difference is a step, without
chance. So is each place where a figure stops being a finite number, as an error does whose tensor has a NaN.
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
BELOW_ZERO = "values below 0, between which no ratio says anything"
_NOT_FINITE = "from or to no finite number: no ratio says it"
# Zero counts as this share of the least other value.
_NOTHING = 0.5


# The metric by the fastest calls, for each one by all calls.
_OF_ALL_CALLS: Mapping[str, str] = {MEAN: TIME, RELATIVE_MEAN: RELATIVE}
Look = Callable[[Sequence[Floats]], list[tuple[Step, ...]]]


class ChangeState(StrEnum):
    """What became of a change. Only OPEN ones alarm, if they are worse, or of exact counts."""

    OPEN = "open"
    ACKNOWLEDGED = "acknowledged"
    # The mean over all calls stepped the other way between the same commits.
    CONTRADICTED = "contradicted"
    # A later step took it back, half of it at least; of what is counted also one that went back itself.
    REVERTED = "reverted"
    # The work or the method has changed since: what is measured now does not compare.
    OLD_VERSION = "old version"


@dataclass(frozen=True)
class Change:
    """A step of a trend as a comparison of the level after it with the one before it.

    It lies after the commit `comparison.since` and not after `comparison.until`; `first` is the commit that most likely
    has the new level first. `commits` counts the trend's commits in that range, `unmeasured` those of them without a
    comparable figure. `error` is the standard error of the ratio's logarithm. `current` is True where the newest figure
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
        """Whether it is of an exact count: then the step itself is another one, whether it has more or less."""
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
    """All changes, the worst first; how many trends were searched, and how many were not, by reason.

    `counted` trends of exact counts are beside these, because chance has no part in them.
    """

    changes: tuple[Change, ...]
    looked_at: int
    left: Counter[str]
    counted: int = 0


@dataclass(frozen=True)
class Stretch:
    """Figures of a trend that compare: their places in it, and their values, which may be infinite or NaN. `read`
    returns the trend; `counted` marks exact ones."""

    read: Callable[[], Trend]
    places: Counts
    values: Floats
    counted: bool = False

    def finite(self) -> Stretch:
        kept = np.isfinite(self.values)
        return self if kept.all() else replace(self, places=self.places[kept], values=self.values[kept])


def find_changes(trends: Iterable[Trend]) -> Found:
    """Searches all trends together. Nothing is acknowledged yet."""
    return changes_of((_stretches(trend) for trend in trends), steps_of_many)


def changes_of(stretches: Iterable[Sequence[Stretch]], look: Look) -> Found:
    """Returns the changes of trends by their stretches. `look` finds steps; only trends with steps are read."""
    left: Counter[str] = Counter()
    chosen: list[Stretch] = []
    lost: list[Change] = []
    looked_at = [0, 0]
    for of_trend in stretches:
        lost_here = [change for stretch in of_trend for change in _changes_of_finiteness(stretch)]
        lost += lost_here
        finite = [stretch.finite() for stretch in of_trend]
        compared = [stretch for stretch in finite if len(stretch.values) >= (2 if stretch.counted else LEAST_VALUES)]
        sound = [stretch for stretch in compared if stretch.values.min() >= 0]
        chosen += sound
        counted = any(stretch.counted for stretch in of_trend)
        looked_at[counted] += bool(sound or lost_here)
        if not sound and not lost_here:
            left[BELOW_ZERO if compared else TOO_FEW_COUNTS if counted else TOO_FEW] += 1
        elif sound and not counted and len(max(finite, key=_last_place).values) < LEAST_VALUES:
            left[TOO_FEW_SINCE] += 1
    timed, exact = ([stretch for stretch in chosen if stretch.counted is counted] for counted in (False, True))
    steps = (
        *look([_above_zero(stretch.values) for stretch in timed]),
        *(_exact_steps(_above_zero(stretch.values)) for stretch in exact),
    )
    changes = [
        change for stretch, some in zip((*timed, *exact), steps, strict=True) for change in _changes(stretch, some)
    ]
    every = (*lost, *_checked_against_means(changes))
    return Found(tuple(sorted(every, key=worst_first)), looked_at[0], left, looked_at[1])


def _last_place(stretch: Stretch) -> int:
    return int(stretch.places[-1]) if len(stretch.places) else -1


def _exact_steps(values: Floats) -> tuple[Step, ...]:
    at = (np.flatnonzero(np.diff(values)) + 1).tolist()
    return tuple(
        Step(number, number - 1, number, float(values[number - 1]), float(values[number]), 0.0, 0.0) for number in at
    )


def _checked_against_means(changes: Sequence[Change]) -> Iterator[Change]:
    """Yields the changes, with what the mean over all calls says where it contradicts the fastest calls.

    Where both agree, the mean's change is dropped. Where they do not, the mean's step stands, because it sees every
    call.
    """
    restated = set[int]()
    beside: dict[int, Change] = {}
    means = [change for change in changes if change.trend.series.metric in _OF_ALL_CALLS]
    for mean, fast in itertools.product(means, changes):
        if not _of_one_step(mean, fast):
            continue
        if mean.is_worse is fast.is_worse and abs(mean.size - fast.size) <= math.log1p(UNEVEN):
            restated.add(id(mean))
        else:
            beside |= {id(mean): fast, id(fast): mean}
    for change in changes:
        if id(change) not in restated:
            yield _uneven(change, beside[id(change)]) if id(change) in beside else change


def _of_one_step(mean: Change, fast: Change) -> bool:
    """Whether the two are of one case, and may lie between the same commits."""
    if fast.trend.series.metric != _OF_ALL_CALLS[mean.trend.series.metric]:
        return False
    if fast.state is not mean.state or _place(mean) != _place(fast):
        return False
    places = {figure.commit: place for place, figure in enumerate(mean.trend.figures)}
    begins = [places.get(change.comparison.since, -1) for change in (mean, fast)]
    return max(begins) < min(places.get(change.comparison.until, -1) for change in (mean, fast))


def _place(change: Change) -> tuple[object, ...]:
    return change.trend.series.workload, change.trend.cell, change.trend.machine.get("machine"), change.trend.python


def _uneven(change: Change, other: Change) -> Change:
    is_mean = change.trend.series.metric in _OF_ALL_CALLS
    comparison = replace(
        change.comparison,
        labels=(*change.comparison.labels, Label.UNEVEN),
        why="the fastest calls and the mean over all calls did not step alike",
    )
    stands = is_mean or change.state is not ChangeState.OPEN or change.is_worse is other.is_worse
    return replace(change, comparison=comparison, state=change.state if stands else ChangeState.CONTRADICTED)


def _stretches(trend: Trend) -> list[Stretch]:
    alike: dict[tuple[str, Conditions], dict[int, float]] = {}
    for place, figure in enumerate(trend.figures):
        if (value := _counted(figure)) is not None:
            alike.setdefault((figure.version, figure.under), {})[place] = value
    counted = trend.series.metric in COUNTS
    return [
        Stretch(lambda: trend, np.array([*found]), np.array([*found.values()]), counted) for found in alike.values()
    ]


def _counted(figure: Figure) -> float | None:
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
        change = _change(stretch, step, levels[number], levels[number + 1])
        yield replace(change, state=_state(change, levels[:number], levels[number + 2 :]))


def _changes_of_finiteness(stretch: Stretch) -> Iterator[Change]:
    finite = np.isfinite(stretch.values)
    for at in (np.flatnonzero(np.diff(finite)) + 1).tolist():
        before, after = stretch.values[at - 1 : at + 1].tolist()
        # Whatever is not finite is further off than any number.
        order = (0.0, 1.0) if finite[at - 1] else (1.0, 0.0)
        change = _change(stretch, Step(at, at - 1, at, *order, 0.0, 0.0), before, after)
        state = _state(change, (), ())
        back = state is ChangeState.OPEN and bool((finite[at:] != finite[at]).any())
        yield replace(change, state=ChangeState.REVERTED if back else state)


def _levels(values: Floats, steps: Sequence[Step]) -> list[float]:
    """Returns the level before the first step, and that after each."""
    if values.min() > 0:
        return [steps[0].before, *(step.after for step in steps)]
    pieces = np.split(values, [step.at for step in steps])
    return [statistics.median(piece.tolist()) for piece in pieces]


def _change(stretch: Stretch, step: Step, before: float, after: float) -> Change:
    trend = stretch.read()
    places = stretch.places.tolist()
    low, first, high = (places[place] for place in (step.low, step.at, step.high))
    inside = range(low + 1, high + 1)
    figures = trend.figures
    direction = Direction.WORSE if step.after > step.before else Direction.BETTER
    has_ratio = 0 < before < math.inf and 0 < after < math.inf
    exact = stretch.counted or not (math.isfinite(before) and math.isfinite(after))
    why = "from or to nothing: no ratio says it" if math.isfinite(before) and math.isfinite(after) else _NOT_FINITE
    ratio = step.ratio if has_ratio else None
    comparison = Comparison(
        case_of(trend),
        trend.series.workload,
        trend.series.metric,
        unit_of_series(trend.series),
        direction,
        Evidence.HISTORY,
        before,
        after,
        replace(ratio, level=1.0) if ratio is not None and stretch.counted else ratio,
        None if exact else step.p_value,
        why="" if has_ratio else why,
        since=figures[low].commit,
        until=figures[high].commit,
    )
    unmeasured = len(set(inside) - set(places))
    version = figures[first].version
    newest = next(place for place in reversed(range(len(figures))) if _counted(figures[place]) is not None)
    return Change(
        trend,
        comparison,
        figures[first].commit,
        len(inside),
        unmeasured,
        step.error,
        version,
        current=newest in places,
    )


def case_of(trend: Trend) -> str:
    """Writes a cell as cases are written: 'gemm[shape=512]@box/bf16', with the machine in the device's place."""
    precision, *values = trend.cell
    inside = ",".join(f"{name}={value}" for name, value in zip(trend.series.param_names[1:], values, strict=True))
    return f"{trend.series.workload}[{inside}]@{trend.machine['machine']}/{precision}"


def _state(change: Change, earlier: Sequence[float], later: Sequence[float]) -> ChangeState:
    """Whether a change still holds: not where a later level lies nearer to the one before it, nor where an exact
    count is back at an earlier level."""
    if change.version != change.trend.series.version:
        return ChangeState.OLD_VERSION
    before, after = change.comparison.before, change.comparison.after
    assert before is not None and after is not None
    middle = math.sqrt(before * after) or (before + after) / 2
    back = any(level < middle if change.is_worse else level > middle for level in later)
    back = back or (change.is_counted and not change.is_worse and after in earlier)
    return ChangeState.REVERTED if back else ChangeState.OPEN


def worst_first(change: Change) -> tuple[object, ...]:
    """Sorts alarms first, then by size; changes of about one size stay in the order of their series."""
    states = list(ChangeState)
    size = change.size if math.isinf(change.size) else round(change.size, 2)
    return states.index(change.state), not change.is_worse, -size


# A level may be off by this much more than when it was acknowledged, or by so many standard errors.
_FURTHER = 0.02
_ERRORS = 3.0
# Stands for zero, which has no logarithm.
_LEAST = 1e-300


def acknowledged(found: Found, acks: Sequence[Ack]) -> Found:
    changes = []
    for change in found.changes:
        ack = (
            next((known for known in reversed(acks) if covers(known, change)), None)
            if change.state is ChangeState.OPEN
            else None
        )
        changes.append(change if ack is None else replace(change, state=ChangeState.ACKNOWLEDGED, ack=ack))
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
    """Whether an ack is of this change: the same trend, ranges that overlap, and a level that is not further off."""
    trend, comparison = change.trend, change.comparison
    assert comparison.before is not None and comparison.after is not None
    here = (
        trend.series.name,
        trend.cell,
        trend.machine["machine"],
        trend.python,
        change.version,
        comparison.direction,
    )
    if (ack.series, ack.cell, ack.machine, ack.python, ack.version, ack.direction) != here:
        return False
    sign = 1 if change.is_worse else -1
    if sign * (_log(comparison.after) - _log(ack.after)) > (
        0 if change.is_counted else max(_FURTHER, _ERRORS * change.error)
    ):
        return False
    if sign * (_log(comparison.before) - (_log(ack.before) + _log(ack.after)) / 2) > 0:
        return False  # it begins where the other one ended
    places = {figure.commit: place for place, figure in enumerate(trend.figures)}
    ends = [places.get(commit) for commit in (ack.since, ack.until)]
    low, high = places[comparison.since], places[comparison.until]
    since, until = (end if end is not None else other for end, other in zip(ends, (low, high), strict=True))
    return ends != [None, None] and max(since, low) < min(until, high)


def _log(level: float) -> float:
    return math.log(max(level, _LEAST))
