"""Gaps, noise, the order of layers, the suggested map and its sentences, all from given losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8bench.features.sensitivity.command import render_page
from fp8bench.features.sensitivity.study import (
    LossVerdict,
    LoweredLayersTrial,
    LoweredUnit,
    SensitivityStudy,
    averaged_steps,
    encode_study,
    format_map,
    make_precision_map,
    make_single_key_map,
    shorten_precision_map,
)
from fp8bench.protocols import Layer, find_map_key
from fp8bench.registry import workloads
from fp8bench.report.terminal.layout import render
from tests.counts import for_each

BASE = LoweredLayersTrial("reference", "", "bf16", losses=(9.0, 5.0, 4.0, 3.0, 2.0))
STUDY = SensitivityStudy(
    "transformer",
    (("size", "nano"),),
    "cpu",
    "fp8",
    "bf16",
    "emulated",
    LoweredUnit.LAYER,
    5,
    0.01,
    0,
    BASE,
    (replace(BASE, draw=1, losses=(2.1,)), replace(BASE, draw=2, losses=(1.94,))),
)


def probe(name: str, loss: float | None, error: float | None = 0.1, kind: str = "mlp") -> LoweredLayersTrial:
    failure = "" if loss is not None else "crash"
    return LoweredLayersTrial(
        name, kind, "bf16", ((name, "fp8"),), (name,), 0, () if loss is None else (loss,), error, failure
    )


@for_each(("steps", "last"), [(1, 1), (4, 1), (5, 1), (9, 1), (10, 2), (50, 10)])
def test_a_loss_is_the_mean_of_the_last_fifth(steps: int, last: int) -> None:
    assert averaged_steps(steps) == last
    assert LoweredLayersTrial("", "", "bf16", losses=(100.0,) * (steps - last) + (2.0,) * last).loss == 2.0


def test_gaps_are_relative_to_the_reference() -> None:
    assert STUDY.gap(probe("a", 2.5)) == pytest.approx(0.25)
    assert STUDY.gap(probe("a", 1.5)) == pytest.approx(-0.25)
    assert STUDY.gap(probe("a", None)) is None
    assert LoweredLayersTrial("a", "mlp", "bf16").loss is None
    assert replace(probe("a", 2.5), failure="the loss is nan in step 3").loss is None


@for_each(
    ("reference", "loss", "gap", "says"),
    [
        (0.0, 0.0, 0.0, "noise unknown"),
        (0.0, 0.5, math.inf, "noise unknown"),
        (-2.0, -1.0, 0.5, "worse"),
        (-2.0, -3.0, -0.5, "better"),
    ],
)
def test_a_loss_may_be_zero_or_below(reference: float, loss: float, gap: float, says: str) -> None:
    draws = (replace(BASE, draw=1, losses=(1.01 * reference,)),)
    study, trial = replace(STUDY, baseline=replace(BASE, losses=(reference,)), draws=draws), probe("a", loss)
    assert study.gap(trial) == gap and study.verdict(trial) == says


def test_the_noise_is_the_largest_gap_of_another_draw_and_judges_gaps() -> None:
    assert STUDY.noise == pytest.approx(0.05)
    assert replace(STUDY, draws=STUDY.draws[1:]).noise == pytest.approx(0.03)
    assert replace(STUDY, draws=()).noise is None
    assert replace(STUDY, draws=(probe("x", None),)).noise is None
    said = {loss: STUDY.verdict(probe("a", loss)) for loss in (2.0, 2.09, 1.91, 2.11, 1.89)}
    assert list(said.values()) == [LossVerdict.WITHIN_NOISE] * 3 + [LossVerdict.WORSE, LossVerdict.BETTER]
    assert STUDY.verdict(probe("a", None)) is LossVerdict.FAILED


def test_draws_that_are_the_same_say_nothing_of_noise() -> None:
    """For example if a maker sets a seed or loads weights: gaps have no verdict, and gradients rank."""
    same = tuple(replace(BASE, draw=draw) for draw in (1, 2))
    study = replace(STUDY, draws=same, probes=(probe("a", 2.4, 0.1), probe("b", 2.0, 0.2)))
    assert study.noise is None and encode_study(study)["noise"] is None
    assert {study.verdict(trial) for trial in study.probes} == {LossVerdict.NOISE_UNKNOWN}
    assert [trial.name for trial in study.ranking] == ["b", "a"]
    assert replace(STUDY, draws=()).verdict(probe("a", 2.01)) is LossVerdict.NOISE_UNKNOWN
    words = told(replace(study, candidates=(probe("all", 2.01),)))
    assert "noise is unknown" in words and "+0.00%" not in words.split("low layer")[0]


def test_layers_are_sorted_by_their_damage() -> None:
    probes = (
        probe("small", 2.0, 0.1),
        probe("better", 1.5, 0.2),
        probe("worse", 2.2, 0.01),
        probe("worst", 2.4, 0.001),
        probe("lost", None),
        probe("large", 2.05, 0.3),
        probe("strange", 2.0, math.nan),
        probe("unknown", 2.0, None),
    )
    ranking = [trial.name for trial in replace(STUDY, probes=probes).ranking]
    assert ranking == ["lost", "worst", "worse", "strange", "unknown", "large", "better", "small"]


def test_the_first_candidate_that_keeps_the_loss_is_suggested() -> None:
    candidates = (probe("all", 2.5), probe("fewer", None), probe("fewest", 2.01), probe("none", 2.0))
    study = replace(STUDY, candidates=candidates)
    assert [study.keeps_loss(trial) for trial in candidates] == [False, False, True, True]
    assert study.suggestion is candidates[2] and replace(study, candidates=candidates[:2]).suggestion is None
    assert study.keeps_loss(probe("better", 0.1)) and replace(study, tolerance=0.0).keeps_loss(probe("same", 2.0))


def told(study: SensitivityStudy) -> str:
    return " ".join(render(render_page(study)).split())


def test_a_study_without_results_gives_reasons() -> None:
    probes = probe("a", 2.5), replace(probe("b", 2.0), failure="the loss is nan in step 2", losses=(3.0, math.nan))
    lost = replace(STUDY, probes=probes, candidates=(probe("all", 2.5),), finished=True)
    assert "every map was tried" in told(lost) and "interrupted" in told(replace(lost, finished=False))
    assert "a gap up to" not in told(replace(STUDY, draws=())) and "suggested" not in told(STUDY)
    failed = replace(STUDY, baseline=replace(BASE, losses=(), failure="crash"), draws=())
    assert "the reference itself failed: crash" in told(failed)
    assert "the tolerance is below the noise" in told(replace(lost, candidates=(probe("all", 2.01),)))
    worst, document = encode_study(lost)["probes"][1], encode_study(lost)
    assert worst["losses"] == [3.0, "nan"] and worst["loss"] is None and document["ranking"] == ["b", "a"]
    assert document["noise"] == pytest.approx(0.05) and document["suggested"] is None


LAYERS = workloads.get("transformer").layers({"size": "nano"})
NAMES = [layer.name for layer in LAYERS]


@for_each(
    ("high_layers", "words"),
    [
        ((), "head=fp8"),
        (("head",), ""),
        (("blocks.0.mlp.up",), "head=fp8,blocks.0.mlp.up=bf16"),
        (("blocks.0.mlp", "blocks.1.mlp", "head"), "mlp=bf16"),
        (NAMES, "attn=bf16,mlp=bf16"),
    ],
)
def test_maps_are_as_short_as_one_would_write_them(high_layers: Sequence[str], words: str) -> None:
    high = tuple(f"{front}." for front in high_layers)
    low = [name for name in NAMES if not f"{name}.".startswith(high)]
    assert format_map(make_precision_map(LAYERS, low, ("fp8", "bf16"), "bf16")) == words


def test_another_reference_is_named_for_the_head_too() -> None:
    """Without a map the excluded layers run in fp8's carrier instead of the reference."""
    assert format_map(make_precision_map(LAYERS, NAMES[:-1], ("fp8", "fp32"), "bf16")) == "head=fp32"
    assert format_map(make_precision_map(LAYERS, NAMES, ("fp8", "fp32"), "bf16")) == "head=fp8"


def said(layer: Layer, keys: dict[str, str], usual: dict[str, str]) -> str:
    key = find_map_key(layer, keys)
    return usual[layer.name] if key is None else keys[key]


PARTS = st.lists(st.sampled_from(["a", "b", "ab", "0", "1"]), min_size=1, max_size=3).map(".".join)
WILD = st.lists(st.tuples(PARTS, st.sampled_from(["a", "k", "0"]), st.booleans()), min_size=1, max_size=8).map(
    lambda rows: list({row[0]: Layer(*row) for row in rows}.values())
)


@given(WILD, st.data())
def test_any_names_and_kinds_of_layers_are_mapped(layers: list[Layer], data: st.DataObject) -> None:
    modes = st.sampled_from(["x", "y", "z"])
    expected = {layer.name: data.draw(modes) for layer in layers}
    usual = {layer.name: data.draw(modes) for layer in layers}
    keys = dict(shorten_precision_map(layers, expected, usual))
    assert {layer.name: said(layer, keys, usual) for layer in layers} == expected


def test_a_layer_called_like_a_kind_is_low_alone() -> None:
    names = {"linear": "", "other": "", "attn": "attn", "self_attention": "attn", "p": "", "p.low": ""}
    layers = [Layer(name, "linear", group=group) for name, group in names.items()]
    for low in layers:
        keys = dict(make_single_key_map(layers, low.name, (low.name,), ("fp8", "bf16")))
        modes = {layer.name: keys.get(find_map_key(layer, keys) or "", "bf16") for layer in layers}
        assert [name for name, mode in modes.items() if mode == "fp8"] == [low.name]
    assert make_single_key_map(layers, "other", ("other",), ("fp8", "bf16")) == (("other", "fp8"),)
