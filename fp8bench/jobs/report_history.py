"""What a store knows of the cases of some runs from before: the history that a report shows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from fp8bench import units
from fp8bench.analysis.metric import unit_of_series
from fp8bench.errors import Fp8benchError
from fp8bench.model import Figure, Level, Run, Trend, trend_name
from fp8bench.report.material import PastFigure, PastSeries
from fp8bench.store.commit_runs import TrackedRun, tracked_run, why_not
from fp8bench.store.index.history import open_history
from fp8bench.store.index.tables import figure_of

MOST_COMMITS = 100


def past_of(runs: Sequence[Run], store: Path) -> tuple[PastSeries, ...]:
    """The series of the cases that the runs have, on the machines and under the interpreters they ran with.

    A run whose numbers are no commit's (its files differed) stands at the end of its series all the same. A series has
    its newest commits only; `fp8bench history show` has them all.
    """
    tracked: list[TrackedRun] = []
    for run in runs:
        with contextlib.suppress(Fp8benchError):  # of a suite that cannot be asked
            tracked += filter(None, [tracked_run(run)])
    wanted = {(point.series, point.cell) for one in tracked for point in one.content.points}
    if not wanted:
        return ()
    names = {trend_name(*one) for one in wanted}
    history = open_history(store, lambda _: None)
    trends = history.trends(names.__contains__).trends
    series = [_series(trend, [one for one in tracked if history.is_of(trend, one.identity)]) for trend in trends]
    return tuple(one for one in series if one is not None and one.figures)


def _series(trend: Trend, tracked: Sequence[TrackedRun]) -> PastSeries | None:
    """A trend of its newest version and source, with what is in no trend; None where no run was made."""
    if not tracked:
        return None
    version = trend.series.version
    measured = trend.measured[-MOST_COMMITS:]
    kept = [figure for figure in measured if figure.version == version]
    kept = [figure for figure in kept if figure.source == kept[-1].source]
    unkept = (figure for one in tracked for figure in _unkept(one, trend, kept[-1] if kept else None))
    figures = [*_figures(kept), *unkept]
    precision, *values = trend.cell
    pairs = zip(trend.series.param_names[1:], values, strict=True)
    unit = unit_of_series(trend.series)
    return PastSeries(
        trend.name, "" if unit == units.RATIO else unit, tuple(figures),
        trend.series.workload, trend.series.metric, str(precision),
        " ".join(f"{name}={value}" for name, value in pairs), str(trend.machine.get("machine")),
        _emulated(trend, tracked), len(measured) - len(kept),
    )  # fmt: skip


def _figures(kept: Sequence[Figure]) -> Iterator[PastFigure]:
    """In order; one without a date stands with the one before it."""
    order = 0.0
    for figure in kept:
        order = float(figure.date) if figure.date is not None else order
        yield _past(figure, units.moment(figure.date), order)


def _past(figure: Figure, when: str, order: float, unkept: bool = False) -> PastFigure:
    assert figure.value is not None
    return PastFigure(
        when, figure.commit, figure.value, figure.low, figure.high, figure.samples, figure.hasty, unkept, order
    )


def _unkept(one: TrackedRun, trend: Trend, last: Figure | None) -> Iterator[PastFigure]:
    """What a run came to whose commit's numbers these are not, as far as it compares with the last ones that are."""
    if not why_not(one.run) or not isinstance(one.run.environment.get("commit"), str):
        return
    own = trend.series.name, trend.cell, trend.series.version
    for point in one.content.points:
        if (point.series, point.cell, point.version) != own or not point.samples:
            continue
        figure = figure_of(one, point)
        if last is None or figure.source == last.source:
            when = f"{one.run.started[:16].replace('T', ' ')}, with uncommitted changes"
            yield _past(figure, when, one.order[0] * 1000, unkept=True)


def _emulated(trend: Trend, tracked: Sequence[TrackedRun]) -> bool:
    """Whether the runs at hand emulate the precision there: the history itself does not say."""
    wanted = trend.series.workload, trend.cell[0]
    return any(
        record.support.level is Level.EMULATED and (record.case.workload, record.case.precision) == wanted
        for one in tracked
        for record in one.run.records
    )
