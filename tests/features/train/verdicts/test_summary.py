"""Energy of a step, and verdicts on planted scores."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fp8bench.features.train import words
from fp8bench.features.train.request import TrainerSettings
from fp8bench.features.train.tasks import QUESTION_COUNT
from fp8bench.features.train.values import StepFigure, StreamLine, Validation
from fp8bench.features.train.verdicts.curves import LearningVerdict
from fp8bench.features.train.verdicts.summary import (
    ScoreVerdict,
    compare_scores_with_reference,
    summarise_energy,
)
from tests.counts import for_each
from tests.energies import use
from tests.learning_curves import judged, lines, training


def test_joules_of_a_step_are_the_median_window() -> None:
    assert words.format_joules(summarise_energy(use([0.99, 1.0, 1.01]))) == "1.00 J [990 mJ, 1.01 J]"
    assert summarise_energy(use([])) is None


def scored(name: str, reference: Sequence[float], own: Sequence[float]) -> Iterator[StreamLine]:
    for arm, values in (("bf16", reference), ("fp8", own)):
        yield from (StepFigure(arm, seed, 100, name, value) for seed, value in enumerate(values))


VERDICTS = judged(lines({"fp8": [0.0] * 5})).verdicts


def score_verdicts(lines_told: Iterable[StreamLine], **settings: Any) -> tuple[ScoreVerdict, ...]:
    of = training()
    of = replace(of, request=replace(of.request, settings=TrainerSettings(**settings)))
    return compare_scores_with_reference(judged(lines_told, of).stored, VERDICTS)


def answered(chance: random.Random, share: float) -> list[float]:
    return [sum(chance.random() < share for _ in range(QUESTION_COUNT)) / QUESTION_COUNT for _ in range(5)]


def test_the_verdict_finds_what_was_planted_and_seldom_what_was_not() -> None:
    """In 500 trainings it is wrong no more often than a level of 99% allows; ten points are nearly always found."""
    chance = random.Random(7)
    wrong = 0
    missed = 0
    for _ in range(500):
        (same,) = score_verdicts(scored("task:copy", answered(chance, 0.8), answered(chance, 0.8)))
        (lost,) = score_verdicts(scored("task:copy", [0.95] * 5, answered(chance, 0.85)))
        wrong += same.learned in (LearningVerdict.WORSE, LearningVerdict.BETTER)
        missed += lost.learned is not LearningVerdict.WORSE
    assert wrong <= 12 and missed <= 50


def test_scores_at_chance_give_no_verdict() -> None:
    chance = random.Random(3)
    (neither,) = score_verdicts(scored("task:retrieval@8", answered(chance, 0.1), answered(chance, 0.1)))
    assert neither.word.startswith("at chance") and neither.learned is None
    (better,) = score_verdicts(scored("task:retrieval@8", answered(chance, 0.1), answered(chance, 0.9)))
    (few,) = score_verdicts(scored("task:copy", [1.0] * 3, [1.0] * 3))
    assert better.learned is LearningVerdict.BETTER and few.word == "open: 3 seeds of the 5 that are needed"


def test_equal_answers_still_have_an_interval() -> None:
    """With 640 questions it reaches 0.7 points, which is -ln(0.01)/640."""
    (alike,) = score_verdicts(scored("task:cloze", [0.5] * 5, [0.5] * 5))
    assert alike.worse and alike.worse.decides and alike.learned is LearningVerdict.WITHIN_NOISE
    assert alike.worse.decides.high == pytest.approx(-math.log(0.01) / 640)


@for_each(
    ("metric", "name", "learned"),
    [
        ("pkg:f", "metric:pkg:f", LearningVerdict.WORSE),
        ("pkg:f=lower", "metric:pkg:f", LearningVerdict.BETTER),
        ("pkg:f=lower", "metric:pkg:f.bits", LearningVerdict.BETTER),
        ("pkg:f=lower", "metric:pkg:fine", LearningVerdict.WORSE),
    ],
)
def test_a_metric_says_which_way_is_better(metric: str, name: str, learned: LearningVerdict) -> None:
    (fallen,) = score_verdicts(scored(name, [2.0] * 5, [1.8, 1.81, 1.82, 1.8, 1.81]), metric=(metric,))
    (of_zero,) = score_verdicts(scored(name, [0.0] * 5, [1.0] * 5), metric=(metric,))
    assert fallen.learned is learned and "not above 0" in of_zero.word


def test_quantised_losses_are_compared_with_the_reference_and_its_own_with_bf16() -> None:
    """Without losses in bf16, arms are compared only with the reference."""
    looks = [
        Validation(arm, seed, 100, f"quantised:{mode}", loss * (1 + 1e-3 * (seed - 2)), 1000)
        for arm, of_nvfp4 in (("bf16", 2.1), ("fp8", 2.2))
        for seed in range(5)
        for mode, loss in (("bf16", 2.0), ("nvfp4", of_nvfp4))
    ]
    assert [(score.arm, score.figure, score.against, score.learned) for score in score_verdicts(looks)] == [
        ("fp8", "quantised:bf16", "bf16", LearningVerdict.WITHIN_NOISE),
        ("bf16", "quantised:nvfp4", "itself in bf16", LearningVerdict.WORSE),
        ("fp8", "quantised:nvfp4", "bf16", LearningVerdict.WORSE),
    ]
    shares = [score.worse.point for score in score_verdicts(looks) if score.worse]
    assert shares == pytest.approx([0.0, 0.05, 2.2 / 2.1 - 1])
    without = [look for look in looks if look.of != "quantised:bf16"]
    assert [score.against for score in score_verdicts(without)] == ["bf16"]
