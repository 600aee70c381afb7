"""Paces predicted from one measured training have the band of machines that were held out; others have none."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median

import pytest

from fp8bench import units
from fp8bench.features.plan_parallel import formulas
from fp8bench.features.plan_parallel.formulas import ParallelLayout, StepLoad, Topology
from fp8bench.features.plan_parallel.ranking import (
    FP8_RATE_RATIOS,
    HELD_OUT_ERRORS,
    HELD_OUT_TEXT,
    PUBLISHED_MODELS,
    UNCALIBRATED_TEXT,
    MeasuredTraining,
    calibrate_topology,
    layout_kind,
    pace_band,
    predict_training_pace,
)
from tests.counts import for_each
from tests.features.plan_parallel.published import bands, held_out, recipes_of, trainings, uncalibrated, within

H100 = Topology(8, 80 * 2**30, 450e9, 50e9, 794e12, 1402e12)
MODEL, FSDP, LOAD = PUBLISHED_MODELS["llama3-8b"], ParallelLayout(shards=8), StepLoad(8192, 2)


@pytest.mark.slow
def test_bands_are_the_errors_of_machines_that_were_held_out() -> None:
    assert {kinds: math.ceil(100 * error) / 100 for kinds, error in bands(held_out()).items()} == HELD_OUT_ERRORS


@pytest.mark.slow
def test_what_is_said_of_errors_is_what_they_are() -> None:
    pairs, rough = held_out(), uncalibrated()
    told, inside = within(pairs)
    middle = units.percent(median(abs(pair.error) for pair in pairs))
    assert len({pair.machine for pair in pairs}) == 8
    for words in (
        f"{len(pairs)} paces",
        f"off by {middle}",
        f"of {told} with kinds that other machines have, {inside} were within",
    ):
        assert words in HELD_OUT_TEXT
    judged, good = within(pairs, ("titan-h100",))
    assert f"({inside - good} of {told - judged} on seven machines, {good} of {judged} on the one with" in HELD_OUT_TEXT
    long = {pair.machine for pair in pairs if pair.row.load.sequence > 8192}
    assert long == {"titan-h100"}
    least, middling, most = (units.percent(error, 0) for error in (min(rough), median(rough), max(rough)))
    sentence = f"{least} to {most} too fast in {len(rough)} published trainings (median {middling})"
    assert sentence == UNCALIBRATED_TEXT


def test_recipes_are_the_middle_of_published_machines() -> None:
    assert {recipe: round(ratio, 2) for recipe, ratio in recipes_of(trainings()).items()} == FP8_RATE_RATIOS


def test_a_wrong_formula_grows_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    row = next(row for row in trainings() if row.name == "8B, 32k, FP8")
    by = next(row for row in trainings() if row.name == "8B, FSDP 8, FP8")
    errors = []
    for share in (0.55, 1e6):
        monkeypatch.setattr(formulas, "_ATTENTION_RATE_SHARE", share)
        topology = calibrate_topology(by.topology, MeasuredTraining(by.model, by.layout, by.load, by.figures["pace"]))
        told = predict_training_pace(topology, MeasuredTraining(row.model, row.layout, row.load, 0.0))
        errors.append(abs(told / row.figures["pace"] - 1))
    assert errors[0] < 0.1 < HELD_OUT_ERRORS[(*[layout_kind(MODEL, FSDP)] * 2, True)] < errors[1]


@for_each("recipe", list(FP8_RATE_RATIOS))
@for_each("precision", ["bf16", "fp8"])
def test_calibration_recovers_planted_rates(recipe: str, precision: str) -> None:
    training = MeasuredTraining(MODEL, FSDP, replace(LOAD, precision=precision), 5000.0)
    found = calibrate_topology(H100, training, recipe)
    assert predict_training_pace(found, training) == pytest.approx(5000.0, rel=1e-6)
    assert found.fp8 / found.bf16 == pytest.approx(FP8_RATE_RATIOS[recipe])
    assert calibrate_topology(replace(H100, bf16=1.0, fp8=2.0), training, recipe) == found


def test_a_fit_without_held_out_machines_has_no_band() -> None:
    by = MeasuredTraining(MODEL, FSDP, LOAD, 5000.0)
    narrow = replace(LOAD, precision="fp8")
    assert pace_band(None, MODEL, FSDP, LOAD, "tensorwise") is None
    assert pace_band(by, MODEL, FSDP, LOAD, "tensorwise") == 0.24
    assert pace_band(by, MODEL, FSDP, narrow, "rowwise") == 0.28
    assert pace_band(by, MODEL, FSDP, narrow, "mxfp8") is None
    assert pace_band(by, MODEL, ParallelLayout(tensor=8), LOAD, "tensorwise") is None
    assert pace_band(by, PUBLISHED_MODELS["llama3-70b"], ParallelLayout(tensor=8), narrow, "tensorwise") is None
