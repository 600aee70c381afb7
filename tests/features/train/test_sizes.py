"""The gap by model size: trainings of several models, one table, and the trend."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fp8bench.errors import UsageError
from fp8bench.features.train.arms import make_arms, split_request_by_model
from fp8bench.features.train.kind import MODEL_SIZES_KIND, start_training
from fp8bench.features.train.request import TrainerSettings, TrainingRequest
from fp8bench.features.train.sizes import ModelSizeComparison, describe_trend, list_csv_rows, render_page
from fp8bench.features.train.values import StoredTraining
from fp8bench.report.terminal.layout import render
from tests.counts import for_each
from tests.facts import CPU
from tests.learning_curves import lines, training

MODELS = {"nano": 1_000_000, "micro": 3_300_000, "gpt2-124m": 124_000_000}


def sized(model: str, gaps: list[float]) -> StoredTraining:
    begun = training(seeds=len(gaps))
    request = replace(begun.request, settings=TrainerSettings(model=model))
    begun = replace(begun, id=f"t-{model}", request=request, parameters=MODELS[model])
    return StoredTraining(begun, lines({"fp8": gaps}), True, f"store/trainings/{model}/steps.jsonl")


def sizes_of(slope: float, noise: float = 1e-4) -> tuple[ModelSizeComparison, dict[str, list[float]]]:
    """Trainings whose gap grows by `slope` per tenfold parameters, with chance in every seed."""
    chance = random.Random(0)
    gaps = {}
    for model, parameters in MODELS.items():
        gaps[model] = [0.01 + slope * (np.log10(parameters) - 6) + chance.gauss(0, noise) for _ in range(6)]
    return ModelSizeComparison(tuple(sized(model, gaps[model]) for model in reversed(MODELS)), "sizes"), gaps


def test_a_planted_trend_is_found_as_least_squares_finds_it() -> None:
    sizes, gaps = sizes_of(0.002)
    trend = sizes.trends["fp8"]
    assert trend is not None and trend.shown is not None
    by_seed = np.polyfit(np.log10(list(MODELS.values())), np.array(list(gaps.values())), 1)[0]
    assert trend.point == pytest.approx(float(by_seed.mean()), abs=1e-9)
    assert trend.shown.low < 0.002 < trend.shown.high and trend.pairs == 6
    assert describe_trend("fp8", trend).startswith("fp8: the gap changes with size: +0.2")
    none = sizes_of(0.0, 1e-3)[0].trends["fp8"]
    assert describe_trend("fp8", none).startswith("fp8: no trend is visible")
    few = ModelSizeComparison(tuple(sized(model, [0.01, 0.02]) for model in ("nano", "micro")), "sizes")
    assert "trend unknown: 2 seeds count" in describe_trend("fp8", few.trends["fp8"])


def test_sizes_are_a_table_a_page_and_rows() -> None:
    """From the smallest model to the largest, each with its verdict, and the limits of the trend."""
    sizes, _ = sizes_of(0.002)
    text = " ".join(render(render_page(sizes)).split())
    assert text.index("nano") < text.index("micro") < text.index("gpt2-124m 124")
    assert "does not extend to models beyond 124 M parameters" in text and "worse by" in text
    assert [row["model"] for row in list_csv_rows(sizes)[1]] == [*MODELS, "ten times the parameters"]
    assert list_csv_rows(ModelSizeComparison((), "none")) == (("arm", "model"), [])


def test_stored_trainings_of_several_models_are_joined(store: Path) -> None:
    models = (("nano", 1e-3), ("micro", 1e-3), ("nano", 1e-3), ("micro", 2e-3))
    for number, (model, rate) in enumerate(models):
        request = replace(training().request, settings=TrainerSettings(model=model, rate=rate))
        begun = replace(training(), id=f"{number}{model}", started=f"2026-01-0{number + 1}T12:00:00Z", request=request)
        start_training(begun, store).finish("finished")
    joined = MODEL_SIZES_KIND.join(["0nano", "1micro"], store)
    assert joined is not None and [kept.training.id for kept in joined.kept] == ["0nano", "1micro"]
    assert MODEL_SIZES_KIND.join(["0nano", "2nano"], store) is None  # of one model
    # With another rate the gap would not be that of the size.
    assert MODEL_SIZES_KIND.join(["0nano", "3micro"], store) is None
    assert MODEL_SIZES_KIND.join(["0nano"], store) is None and MODEL_SIZES_KIND.join(["0nano", "none"], store) is None


def test_each_model_is_a_request_of_its_own() -> None:
    rates = ("rate", ("1e-3", "2e-3"))
    asked = TrainingRequest(sweep=(("model", ("nano", "micro")), rates))
    requests = split_request_by_model(asked)
    assert [(request.settings.model, request.sweep) for request in requests] == [
        ("nano", (rates,)),
        ("micro", (rates,)),
    ]
    assert split_request_by_model(TrainingRequest()) == [TrainingRequest()]
    with pytest.raises(UsageError, match="one model after the other"):
        make_arms(asked, CPU)


@for_each(
    ("request_", "words"),
    [
        (TrainingRequest(sweep=(("model", ("nano", "nano")),)), "at most once, got 'nano'"),
        (TrainingRequest(sweep=(("model", ("nanno",)),)), "got 'nanno'"),
        (TrainingRequest(settings=TrainerSettings(make="a:b"), sweep=(("model", ("nano",)),)), "not a:b"),
    ],
)
def test_models_that_cannot_be_swept_are_refused(request_: TrainingRequest, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        split_request_by_model(request_)
