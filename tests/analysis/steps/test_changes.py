"""Steps in trends as changes: which figures compare, which commits enclose them, how they ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8bench.analysis.steps.changes import (
    NEGATIVE_VALUES_REASON,
    TOO_FEW_COMMITS,
    TOO_FEW_COMMITS_SINCE_CHANGE,
    TOO_FEW_COUNTED_COMMITS,
    ChangeSearchResult,
    ChangeState,
    TrendChange,
    ack_covers_change,
    apply_acknowledgements,
    find_trend_changes,
    make_acknowledgement,
)
from fp8bench.features.gate.command import read_threshold_rules
from fp8bench.features.gate.judging import exceeds_threshold
from fp8bench.features.gate.thresholds import find_threshold
from fp8bench.model import Conditions, Direction, Evidence, Figure, Label, Series, Status, Trend
from fp8bench.report.comparisons import value
from tests.counts import for_each
from tests.histories import commit

SERIES = Series("gemm.Gemm.track_time", "gemm", "time", "seconds", ("dtype", "shape"), (("bf16",), ("512",)), "1.1")
OLD: Conditions = (("torch", "2.12.0"),)
NEW: Conditions = (("torch", "2.13.0"),)


def figure(number: int, value: float | None, version: str = "1.1", **changes: object) -> Figure:
    return replace(Figure(commit(number), number, version, 1, 24, value, under=NEW), **changes)  # type: ignore[arg-type]


def trend(*figures: Figure, series: Series = SERIES, machine: str = "box") -> Trend:
    return Trend(series, ("bf16", "512"), {"machine": machine}, "/bin/python3", figures)


def levels(*pieces: tuple[int, float]) -> Trend:
    """Values of each level for the given number of commits; neighbours differ by 0.1%."""
    values = [level for count, level in pieces for _ in range(count)]
    return trend(*(figure(number, value * (1 + 1e-3 * wobble(number))) for number, value in enumerate(values)))


def wobble(number: int) -> float:
    """A deterministic wobble between -1 and 1."""
    return ((number * 7919) % 101 - 50) / 50


def only(found: ChangeSearchResult) -> TrendChange:
    (change,) = found.changes
    return change


def test_a_slower_level_is_a_regression() -> None:
    found = find_trend_changes([levels((20, 1.0), (5, 1.1))])
    change = only(found)
    one = change.comparison
    assert (one.since, one.until, change.first_commit) == (commit(19), commit(20), commit(20))
    assert (change.commit_count, change.unmeasured_count, change.state) == (1, 0, ChangeState.OPEN)
    assert one.direction is Direction.WORSE and one.evidence is Evidence.HISTORY and change.alarms
    assert (one.case, one.suite, one.metric, one.unit) == ("gemm[shape=512]@box/bf16", "gemm", "time", "s")
    assert one.before == pytest.approx(1.0, rel=1e-3) and one.after == pytest.approx(1.1, rel=1e-3)
    assert one.ratio.low < 1.1 < one.ratio.high
    assert one.p_value is not None and one.p_value < 1e-9
    assert (found.searched_trend_count, not found.skip_count_by_reason) == (1, True)


def test_a_step_of_energy_is_shown_and_judged_in_joules(tmp_path: Path) -> None:
    series = replace(SERIES, name="gemm.Gemm.track_energy", metric="energy", unit="joules")
    change = only(find_trend_changes([replace(levels((20, 0.0191), (5, 0.0221)), series=series)]))
    one = change.comparison
    assert one.unit == "J" and (value(one, one.before), value(one, one.after)) == ("19.1 mJ", "22.1 mJ")
    file = tmp_path / "thresholds.yaml"
    for words, joules in (("1 mJ", 1e-3), ("20 uJ", 2e-5), ("0.5 J", 0.5)):
        file.write_text(f"gemm:\n  energy: {{smallest: {words}}}\n")
        assert find_threshold(one, read_threshold_rules(file)).smallest == pytest.approx(joules)


@for_each(("metric", "found"), [("relative_loss", 1), ("output_error", 0)])
def test_a_small_change_of_a_relative_loss_counts(metric: str, found: int) -> None:
    """A third of a percent of a time is noise of code layout; of a loss the gate passes no more."""
    series = replace(SERIES, name=f"gemm.Gemm.track_{metric}", metric=metric, unit="x")
    flat = [trend(*(figure(n, 1.0002 if n < 8 else 1.0035) for n in range(11)), series=series)]
    changes = find_trend_changes(flat).changes
    assert len(changes) == found
    for change in changes:
        assert change.alarms and exceeds_threshold(change.comparison, find_threshold(change.comparison))
    slight = [trend(*(figure(n, 1.0002 if n < 8 else 1.0009) for n in range(11)), series=series)]
    assert not find_trend_changes(slight).changes


def by_both(fast: float, mean: float, before: float = 1.0) -> list[TrendChange]:
    """The fastest calls and the mean over all calls step at the same commit."""
    of_all = replace(SERIES, name="gemm.Gemm.track_mean_time", metric="mean_time")
    return list(
        find_trend_changes(
            [
                levels((20, before), (5, fast)),
                replace(levels((20, before), (5, mean)), series=of_all),
            ]
        ).changes
    )


def test_a_mean_that_agrees_is_dropped() -> None:
    (change,) = by_both(1.2, 1.21)
    assert change.trend.series.metric == "time" and Label.UNEVEN not in change.comparison.labels
    changes = by_both(1.05, 1.32)
    assert [change.alarms for change in changes] == [True, True]
    assert all(Label.UNEVEN in change.comparison.labels for change in changes)


def test_a_slow_down_of_some_calls_alarms_by_the_mean() -> None:
    """The fastest calls got slightly faster: that step is dropped. If they are flat, they do not count."""
    found = {change.trend.series.metric: change for change in by_both(0.979, 1.32)}
    assert found["time"].state is ChangeState.CONTRADICTED and not found["time"].alarms
    assert found["mean_time"].alarms and found["mean_time"].state is ChangeState.OPEN
    for change in found.values():
        assert change.comparison.labels == (Label.UNEVEN,)
        assert change.comparison.why == "the fastest calls and the mean over all calls did not step in the same way"
    (alone,) = by_both(1.0, 1.32)
    assert alone.trend.series.metric == "mean_time" and alone.alarms


def test_unmeasured_commits_are_in_the_range_of_a_step() -> None:
    figures = list(levels((20, 1.0), (6, 1.1)).figures)
    figures[20] = figure(20, None, status=Status.FAILED)
    figures[21] = replace(figures[21], hasty=True)
    change = only(find_trend_changes([trend(*figures)]))
    assert (change.comparison.since, change.comparison.until) == (commit(19), commit(22))
    assert (change.commit_count, change.unmeasured_count) == (3, 2)


@for_each("changed", [{"version": "1.2"}, {"under": OLD}, {"hasty": True}])
def test_figures_that_are_not_comparable_have_no_step(changed: dict[str, Any]) -> None:
    figures = list(levels((20, 1.0), (20, 2.0)).figures)
    figures[20:] = [replace(one, **changed) for one in figures[20:]]
    found = find_trend_changes([trend(*figures)])
    assert not found.changes and found.searched_trend_count == 1


def test_improvements_and_old_versions_raise_no_alarm() -> None:
    for flat in (levels((20, 1.0), (20, 1.008)), trend(*(figure(number, 0.0) for number in range(20)))):
        found = find_trend_changes([flat])
        assert not found.changes and found.searched_trend_count == 1
    change = only(find_trend_changes([levels((20, 1.0), (5, 0.9))]))
    assert change.comparison.direction is Direction.BETTER and change.state is ChangeState.OPEN and not change.alarms
    figures = [replace(one, version="1.0") for one in levels((20, 1.0), (5, 1.1)).figures]
    assert only(find_trend_changes([trend(*figures)])).state is ChangeState.OLD_VERSION


def test_figures_under_other_conditions_hide_no_step() -> None:
    figures = list(levels((12, 1.0), (6, 3.0), (6, 1.2)).figures)
    figures[12:18] = [replace(one, under=OLD) for one in figures[12:18]]
    change = only(find_trend_changes([trend(*figures)]))
    assert (change.comparison.since, change.comparison.until) == (commit(11), commit(18))
    assert (change.commit_count, change.unmeasured_count, change.current) == (7, 6, True)
    figures = [replace(one, under=OLD) for one in levels((20, 1.0), (5, 1.1)).figures]
    change = only(find_trend_changes([trend(*figures, *(figure(25 + number, 1.0) for number in range(3)))]))
    assert change.alarms and not change.current


def test_too_few_figures_since_a_change_are_reported() -> None:
    past = [replace(one, under=OLD) for one in levels((20, 1.0)).figures]
    for count, left in ((10, {TOO_FEW_COMMITS_SINCE_CHANGE: 1}), (11, {})):
        found = find_trend_changes([trend(*past, *(figure(20 + number, 1.5) for number in range(count)))])
        assert (found.searched_trend_count, found.skip_count_by_reason, found.changes) == (1, left, ())


def test_a_reverted_change_is_no_longer_open() -> None:
    worse, better = sorted(
        find_trend_changes([levels((20, 1.0), (20, 1.1), (20, 1.0))]).changes, key=lambda one: one.first_commit
    )
    assert (worse.is_worse, worse.state) == (True, ChangeState.REVERTED)
    assert (better.is_worse, better.state) == (False, ChangeState.OPEN)
    in_part = find_trend_changes([levels((20, 1.0), (20, 1.3), (20, 1.2))])  # less than half of it
    assert states(in_part) == [ChangeState.OPEN, ChangeState.OPEN]
    values = [0.0] * 20 + [0.03] * 10 + [0.0] * 10
    from_nothing = find_trend_changes([trend(*(figure(number, value) for number, value in enumerate(values)))])
    assert states(from_nothing) == [ChangeState.REVERTED, ChangeState.OPEN]


def test_the_worst_change_comes_first_and_skipped_trends_are_counted() -> None:
    trends = [levels((20, 1.0), (9, size)) for size in (0.5, 1.1, 1.4, 0.9, 1.2)]
    sizes = [
        round(change.comparison.ratio.point, 1)
        for change in find_trend_changes(trends).changes
        if change.comparison.ratio
    ]
    assert sizes == [1.4, 1.2, 1.1, 0.5, 0.9]
    below = trend(*(figure(number, -1.0) for number in range(20)))
    failed = trend(*(figure(number, None, status=Status.FAILED) for number in range(20)))
    found = find_trend_changes([levels((1, 1.0)), failed, below, levels((20, 1.0))])
    assert found.searched_trend_count == 1 and found.skip_count_by_reason == {
        TOO_FEW_COMMITS: 2,
        NEGATIVE_VALUES_REASON: 1,
    }
    assert find_trend_changes([]) == ChangeSearchResult((), 0, found.skip_count_by_reason.__class__())


def states(found: ChangeSearchResult) -> list[ChangeState]:
    return [one.state for one in sorted(found.changes, key=lambda one: one.first_commit)]


def accepted(seen: Trend, now: Sequence[Trend]) -> list[ChangeState]:
    ack = make_acknowledgement(only(find_trend_changes([seen])), "2026-01-05T12:00:00+00:00", "")
    return states(apply_acknowledgements(find_trend_changes(now), [ack]))


def test_an_acknowledged_change_stays_so_until_it_worsens() -> None:
    seen = levels((20, 1.0), (3, 1.1))
    for more in (3, 4, 8, 30):
        assert accepted(seen, [levels((20, 1.0), (more, 1.1))]) == [ChangeState.ACKNOWLEDGED]
    seen = levels((20, 1.0), (3, 1.1))
    assert accepted(seen, [levels((20, 1.0), (10, 1.1), (5, 1.2))]) == [ChangeState.ACKNOWLEDGED, ChangeState.OPEN]
    assert accepted(seen, [levels((20, 1.0), (10, 1.2))]) == [ChangeState.OPEN]
    change = only(find_trend_changes([levels((20, 1.0), (5, 1.1))]))
    ack = make_acknowledgement(change, "2026-01-05T12:00:00+00:00", "")
    assert ack_covers_change(ack, change) and ack_covers_change(replace(ack, since="f" * 40), change)
    assert not ack_covers_change(replace(ack, since="f" * 40, until="e" * 40), change)


def test_an_ack_covers_one_trend_and_direction() -> None:
    seen = levels((20, 1.0), (5, 1.1))
    for other in (
        replace(seen, machine={"machine": "other"}),
        replace(seen, python="/elsewhere/python3"),
        replace(seen, series=replace(SERIES, name="gemm.Gemm.track_time_gemm")),
        replace(seen, cell=("fp32", "512")),
        replace(
            seen,
            series=replace(SERIES, version="1.2"),
            figures=tuple(replace(one, version="1.2") for one in seen.figures),
        ),
        levels((20, 1.0), (5, 0.9)),
    ):
        assert accepted(seen, [other]) == [ChangeState.OPEN]


@for_each(("before", "after", "direction"), [(0.0, 0.03, Direction.WORSE), (0.03, 0.0, Direction.BETTER)])
def test_a_change_from_or_to_zero_has_no_ratio(before: float, after: float, direction: Direction) -> None:
    values = [before] * 20 + [after] * 4
    values[10] = 0.01
    seen = trend(*(figure(number, value) for number, value in enumerate(values)))
    found = find_trend_changes([levels((20, 1.0), (4, 3.0 if after > before else 0.3)), seen])
    change, other = found.changes
    one = change.comparison
    assert (one.before, one.after, one.direction, one.ratio) == (before, after, direction, None)
    assert one.why and (one.since, one.until) == (commit(19), commit(20))
    assert other.comparison.ratio is not None and found.searched_trend_count == 2
    ack = make_acknowledgement(change, "2026-01-05T12:00:00+00:00", "")
    assert change in apply_acknowledgements(find_trend_changes([seen]), []).changes
    assert states(apply_acknowledgements(find_trend_changes([seen]), [ack])) == [ChangeState.ACKNOWLEDGED]


@for_each("broken", [float("nan"), float("inf")])
def test_an_error_that_becomes_nan_alarms_at_once(broken: float) -> None:
    found = find_trend_changes([trend(figure(0, 0.02), figure(1, broken), figure(2, broken))])
    one = only(found).comparison
    assert (
        only(found).alarms
        and not found.skip_count_by_reason
        and (one.direction, one.ratio, one.p_value) == (Direction.WORSE, None, None)
    )
    assert (one.since, one.until, one.before, repr(one.after)) == (commit(0), commit(1), 0.02, repr(broken))
    assert exceeds_threshold(one, find_threshold(one))
    ack = make_acknowledgement(only(found), "2026-01-05T12:00:00+00:00", "")
    assert states(apply_acknowledgements(found, [ack])) == [ChangeState.ACKNOWLEDGED]
    back = find_trend_changes([trend(figure(0, 0.02), figure(1, broken), figure(2, 0.02))])
    assert states(back) == [ChangeState.REVERTED, ChangeState.OPEN]
    assert not any(change.alarms for change in back.changes)
    assert not find_trend_changes([trend(figure(0, broken), figure(1, broken))]).changes
    values = [*levels((20, 1.0), (5, 1.1)).figures, figure(25, broken)]
    assert [change.is_worse for change in find_trend_changes([trend(*values)]).changes] == [True, True]


LAUNCHES = replace(SERIES, name="gemm.Gemm.track_launches", metric="launches", unit="count")


def counts(*values: float) -> ChangeSearchResult:
    """The changes of launch counts, one count per commit."""
    return find_trend_changes([trend(*(figure(number, value) for number, value in enumerate(values)), series=LAUNCHES)])


def test_any_difference_of_a_count_is_a_certain_step() -> None:
    found = counts(1_000_000, 1_000_001)
    change, one = only(found), only(found).comparison
    assert change.alarms and change.is_worse and (one.before, one.after) == (1_000_000, 1_000_001)
    assert (one.since, one.until, change.first_commit) == (commit(0), commit(1), commit(1))
    assert one.p_value is None and one.ratio.low == one.ratio.high and one.ratio.level == 1
    assert (found.searched_trend_count, found.exact_count_trends) == (0, 1) and exceeds_threshold(
        one, find_threshold(one)
    )
    assert value(one, one.after) == "1,000,001"
    known = make_acknowledgement(change, "2026-01-05", "")
    assert (
        ack_covers_change(known, change)
        and only(apply_acknowledgements(found, [known])).state is ChangeState.ACKNOWLEDGED
    )
    assert not ack_covers_change(known, only(counts(1_000_000, 1_000_002)))
    assert counts(7).skip_count_by_reason == {TOO_FEW_COUNTED_COMMITS: 1} and not counts(7, 7, 7).changes


@for_each(
    ("values", "states"),
    [
        ((9, 6, 6), [(False, ChangeState.OPEN)]),  # fewer launches are a separate step
        ((0, 6), [(True, ChangeState.OPEN)]),
        ((6, 9, 6), [(True, ChangeState.REVERTED), (False, ChangeState.REVERTED)]),
        ((0, 9, 6), [(True, ChangeState.OPEN), (False, ChangeState.OPEN)]),
        # Launches are fused, then split again.
        ((9, 6, 9), [(True, ChangeState.OPEN), (False, ChangeState.REVERTED)]),
        ((9, 6, 9, 6), [(True, ChangeState.REVERTED), (False, ChangeState.REVERTED), (False, ChangeState.REVERTED)]),
    ],
)
def test_counts_alarm_until_they_return_to_an_earlier_count(
    values: tuple[float, ...], states: list[tuple[bool, ChangeState]]
) -> None:
    found = counts(*values)
    assert sorted((change.is_worse, change.state.value) for change in found.changes) == sorted(
        (worse, state.value) for worse, state in states
    )
    assert all(change.alarms is (change.state is ChangeState.OPEN) for change in found.changes)
