"""Trainings of several models with the same arms: the gap of each by model size, and its trend."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from statistics import fmean
from typing import Any, NamedTuple

from fp8bench import units
from fp8bench.features.train import words
from fp8bench.features.train.values import ModelSweep
from fp8bench.features.train.verdicts.curves import LEAST_PAIRS, Gap, gap_of
from fp8bench.features.train.verdicts.summary import ArmSummary, JudgedTraining, figures_of, gap_figures
from fp8bench.features.train.verdicts.verdicts import ArmVerdict
from fp8bench.model.codec import encode
from fp8bench.report.columns import Col, table
from fp8bench.report.data.plain import Rows
from fp8bench.report.elements import Items, Page, Part, Text
from fp8bench.report.words.naming import join_words

MODEL = "model"


class SizedArm(NamedTuple):
    """An arm with its verdict in the training of one model."""

    training: JudgedTraining
    summary: ArmSummary
    verdict: ArmVerdict


class Sizes(ModelSweep):
    """Trainings of several models, the smallest first. `trends` has by how much the gap of an arm changes with
    ten times the parameters, as a share of the loss: Student's t over the slopes of single seeds."""

    @cached_property
    def trainings(self) -> list[JudgedTraining]:
        return sorted(map(JudgedTraining, self.kept), key=lambda judged: judged.training.parameters)

    @cached_property
    def arms(self) -> dict[str, list[SizedArm]]:
        """The arms that every training has, with their verdicts by size."""
        every: dict[str, list[SizedArm]] = {}
        for judged in self.trainings:
            for summary in judged.summaries:
                if summary.verdict is not None:
                    sized = SizedArm(judged, summary, summary.verdict)
                    every.setdefault(summary.arm.name, []).append(sized)
        return {name: sizes for name, sizes in every.items() if len(sizes) == len(self.kept)}

    @cached_property
    def trends(self) -> dict[str, Gap | None]:
        return {name: trend_of(sizes) for name, sizes in self.arms.items()}


def trend_of(sizes: Sequence[SizedArm]) -> Gap | None:
    logs = [math.log10(size.training.training.parameters) for size in sizes]
    gaps: dict[int, list[float]] = {}
    for size in sizes:
        for pair in size.verdict.pairs:
            gaps.setdefault(pair.seed, []).append(pair.gap)
    # Only seeds that count in every model have a slope.
    return gap_of([_slope(logs, gaps[seed]) for seed in sorted(gaps) if len(gaps[seed]) == len(sizes)])


def _slope(places: Sequence[float], values: Sequence[float]) -> float:
    middle, mean = fmean(places), fmean(values)
    squares = math.fsum((place - middle) ** 2 for place in places)
    products = ((place - middle) * (value - mean) for place, value in zip(places, values, strict=True))
    return math.fsum(products) / squares


def describe_trend(name: str, trend: Gap | None) -> str:
    """'fp8: the gap grows by +0.2 points [+0.1, +0.3] (95%) with ten times the parameters'."""
    if trend is None or trend.shown is None or trend.decides is None or trend.pairs < LEAST_PAIRS:
        pairs = trend.pairs if trend else 0
        return f"{name}: trend unknown: {pairs} seeds count in every model, fewer than {LEAST_PAIRS}"
    # The interval of 99% decides, as in verdicts.
    word = "no trend is visible" if trend.decides.low <= 0 <= trend.decides.high else "the gap changes with size"
    low, high = 100 * trend.shown.low, 100 * trend.shown.high
    return (
        f"{name}: {word}: {100 * trend.point:+.3g} points [{low:+.3g}, {high:+.3g}] (95%) for ten times the parameters"
    )


def page_of(sizes: Sizes) -> Page:
    arms = [size for by_size in sizes.arms.values() for size in by_size]
    cols: list[Col[SizedArm]] = [
        Col("arm", lambda size: size.summary.arm.name, shared=True),
        Col(MODEL, lambda size: size.training.request.settings.model),
        Col("parameters", lambda size: size.training.training.parameters, number=True, show=units.count),
        Col("gap", lambda size: _show_gap(size.verdict.judged.gap), number=True),
        Col("verdict", lambda size: words.verdict(size.verdict, size.training.verdicts)),
    ]
    answers = Items(tuple(Text(describe_trend(name, trend)) for name, trend in sizes.trends.items()))
    largest = units.count(sizes.trainings[-1].training.parameters)
    bound = f"a trend among these sizes does not extend to models beyond {largest} parameters"
    question, by_arm = "Does the gap change with the model's size?", table("sizes", "", cols, arms, main=True)
    models = join_words(judged.request.settings.model for judged in sizes.trainings)
    title = f"trainings of {models}: {join_words(sizes.arms)} against {sizes.trainings[0].verdicts.reference}"
    return Page(title, "", (Part("trend", question, (answers, by_arm, Text(bound))),))


def _show_gap(gap: Gap | None) -> str:
    if gap is None:
        return units.NONE
    ends = f" [{100 * gap.shown.low:+.2g}%, {100 * gap.shown.high:+.2g}%]" if gap.shown else ""
    return f"{100 * gap.point:+.2g}%{ends}"


def rows_of(sizes: Sizes) -> Rows:
    rows = list(_rows(sizes))
    return tuple(rows[0]) if rows else ("arm", MODEL), rows


def _rows(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Yields the figures of every arm in every model, then the arm's trend as a gap."""
    for name, by_size in sizes.arms.items():
        for size in by_size:
            training = size.training
            facts = {"arm": name, "model": training.request.settings.model, "parameters": training.training.parameters}
            yield {**facts, **figures_of(size.summary, training.verdicts)}
        yield {"arm": name, "model": "ten times the parameters", **gap_figures("gap", sizes.trends[name])}


def value_of(sizes: Sizes) -> dict[str, Any]:
    return {"trainings": [judged.training.id for judged in sizes.trainings], "sizes": encode(rows_of(sizes)[1])}
