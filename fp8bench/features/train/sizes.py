"""Compares trainings of several models that have the same arms. Shows each arm's gap by model size, and how the gap
changes with size.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from statistics import linear_regression
from typing import Any, NamedTuple

from fp8bench import units
from fp8bench.features.train import words
from fp8bench.features.train.values import ModelSweep
from fp8bench.features.train.verdicts.curves import MIN_PAIRS, LossGap, average_gaps, find_deciding_interval
from fp8bench.features.train.verdicts.summary import ArmSummary, JudgedTraining, list_figures, list_gap_figures
from fp8bench.features.train.verdicts.verdicts import ArmVerdict
from fp8bench.model.codec import encode
from fp8bench.report.columns import Col, table
from fp8bench.report.data.plain import PlainRows
from fp8bench.report.elements import Page, Part, Text, TextList
from fp8bench.report.words.naming import join_words


class SizedArm(NamedTuple):
    """An arm in the training of one model, with its verdict."""

    training: JudgedTraining
    summary: ArmSummary
    verdict: ArmVerdict


class ModelSizeComparison(ModelSweep):
    """Trainings of several models, the smallest model first. `trends` has, by arm, how much the arm's gap grows for ten
    times the parameters. This is computed in each seed, and the interval is Student's t over the seeds.
    """

    @cached_property
    def trainings(self) -> list[JudgedTraining]:
        return sorted(map(JudgedTraining, self.kept), key=lambda judged: judged.training.parameters)

    @cached_property
    def arms(self) -> dict[str, list[SizedArm]]:
        """Returns the arms that every training has, each with its verdicts by model size."""
        sized_arms_by_name: dict[str, list[SizedArm]] = defaultdict(list)
        for judged in self.trainings:
            for summary in judged.summaries:
                if summary.verdict is not None:
                    sized_arms_by_name[summary.arm.name].append(SizedArm(judged, summary, summary.verdict))
        return {name: sizes for name, sizes in sized_arms_by_name.items() if len(sizes) == len(self.kept)}

    @cached_property
    def trends(self) -> dict[str, LossGap | None]:
        return {name: measure_trend(sizes) for name, sizes in self.arms.items()}


def measure_trend(sizes: Sequence[SizedArm]) -> LossGap | None:
    # Use base 10, so that a slope is the change for ten times the parameters.
    log_parameters = [math.log10(sized_arm.training.training.parameters) for sized_arm in sizes]
    gaps_by_seed: dict[int, list[float]] = defaultdict(list)
    for sized_arm in sizes:
        for pair in sized_arm.verdict.pairs:
            gaps_by_seed[pair.seed].append(pair.gap)
    # Compute a slope only for seeds that have a valid gap at every model size.
    gaps_of_complete_seeds = [
        gaps_by_seed[seed] for seed in sorted(gaps_by_seed) if len(gaps_by_seed[seed]) == len(sizes)
    ]
    return average_gaps([linear_regression(log_parameters, values).slope for values in gaps_of_complete_seeds])


def describe_trend(name: str, trend: LossGap | None) -> str:
    """Returns a sentence such as 'fp8: the gap changes with size: +0.2 points [+0.1, +0.3] (95%) for ten times the
    parameters'."""
    interval = find_deciding_interval(trend)
    if trend is None or trend.shown is None or interval is None:
        trend_pair_count = trend.pairs if trend else 0
        return f"{name}: trend unknown: {trend_pair_count} seeds count in every model, fewer than {MIN_PAIRS}"
    # The conclusion uses the 99% interval, as verdicts do.
    conclusion = "no trend is visible" if interval.low <= 0 <= interval.high else "the gap changes with size"
    low = 100 * trend.shown.low
    high = 100 * trend.shown.high
    points = f"{100 * trend.point:+.3g} points [{low:+.3g}, {high:+.3g}] (95%)"
    return f"{name}: {conclusion}: {points} for ten times the parameters"


def render_page(sizes: ModelSizeComparison) -> Page:
    arms = [*chain.from_iterable(sizes.arms.values())]
    columns: list[Col[SizedArm]] = [
        Col("arm", "summary.arm.name", shared=True),
        Col("model", "training.request.settings.model"),
        Col("parameters", "training.training.parameters", show=units.count),
        Col("gap", lambda size: _format_loss_gap(size.verdict.judged.gap), number=True),
        Col("verdict", lambda size: words.describe_verdict(size.verdict, size.training.verdicts)),
    ]
    trend_items = TextList(tuple(Text(describe_trend(name, trend)) for name, trend in sizes.trends.items()))
    largest = units.count(sizes.trainings[-1].training.parameters)
    limit_note = f"a trend among these sizes does not extend to models beyond {largest} parameters"
    question = "Does the gap change with the model's size?"
    arm_table = table("sizes", "", columns, arms, main=True)
    models = join_words(judged.request.settings.model for judged in sizes.trainings)
    title = f"trainings of {models}: {join_words(sizes.arms)} against {sizes.trainings[0].verdicts.reference}"
    return Page(title, "", (Part("trend", question, (trend_items, arm_table, Text(limit_note))),))


def _format_loss_gap(gap: LossGap | None) -> str:
    if gap is None:
        return units.NONE
    interval = f" [{100 * gap.shown.low:+.2g}%, {100 * gap.shown.high:+.2g}%]" if gap.shown else ""
    return f"{100 * gap.point:+.2g}%{interval}"


def list_csv_rows(sizes: ModelSizeComparison) -> PlainRows:
    rows = list(_yield_csv_rows(sizes))
    return tuple(rows[0]) if rows else ("arm", "model"), rows


def _yield_csv_rows(sizes: ModelSizeComparison) -> Iterator[dict[str, Any]]:
    """Yields the figures of every arm in every model, then how the arm's gap changes with the number of parameters."""
    for name, by_size in sizes.arms.items():
        for sized_arm in by_size:
            training = sized_arm.training
            facts = {"arm": name, "model": training.request.settings.model, "parameters": training.training.parameters}
            yield {**facts, **list_figures(sized_arm.summary, training.verdicts)}
        yield {"arm": name, "model": "ten times the parameters", **list_gap_figures("gap", sizes.trends[name])}


def sizes_to_json(sizes: ModelSizeComparison) -> dict[str, Any]:
    return {"trainings": [judged.training.id for judged in sizes.trainings], "sizes": encode(list_csv_rows(sizes)[1])}
