"""Recipes as values: what they refuse, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError

import pytest

from fp8bench.errors import RecipeRefused
from fp8bench.formats.grids import E2M1, E3M2, E4M3, E5M2, E8M0
from fp8bench.formats.recipes import (
    BLOCK,
    FORMATS_BY_ROLE,
    MX,
    NVFP4,
    NVFP4_SQUARE,
    ROW,
    SQUARE,
    TENSOR,
    TENSOR_POWER_OF_TWO,
    Accumulator,
    Amax,
    Delayed,
    Recipe,
    ScaleRounding,
    Scaling,
    Treatment,
)
from tests.counts import for_each


def alike(treatment: Treatment, **others: object) -> Recipe:
    return Recipe(treatment, treatment, treatment, **others)  # type: ignore[arg-type]


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no history": (lambda: Delayed(history=0), "history is a whole number from 1 to 65536, not 0."),
    "a long history": (lambda: Delayed(history=65537), "history is a whole number from 1 to 65536, not 65537."),
    "half a history": (lambda: Delayed(history=1.5), "history is a whole number from 1 to 65536, not 1.5."),  # type: ignore[arg-type]
    "a history that is a word": (lambda: Delayed(history=True), "history is a whole number from 1 to 65536, not True."),
    "a margin below zero": (lambda: Delayed(margin=-1), "margin is a whole number from 0 to 32, not -1."),
    "no interval": (lambda: Delayed(interval=0), "interval is a whole number from 1 to 65536, not 0."),
    "E5M2 under NVFP4": (lambda: Treatment(E5M2, NVFP4), "NVFP4's scales are for e2m1 elements, not for e5m2."),
    "scales as elements": (lambda: Treatment(E8M0, TENSOR), "e8m0 is a format of scales, without sign or zero"),
    "delayed rows": (
        lambda: alike(Treatment(E4M3, ROW), delayed=Delayed()),
        "give every role the scaling of a tensor.",
    ),
    "delayed blocks": (lambda: alike(Treatment(E4M3, MX), delayed=Delayed()), "keeps one scale a tensor"),
    "delayed without scales": (lambda: alike(Treatment(E4M3), delayed=Delayed()), "keeps one scale a tensor"),
    "nothing to rotate": (
        lambda: alike(Treatment(E2M1, MX), hadamard=True, high_weight_gradient=True),
        "leave one out (hadamard=off, or weight-gradient=low).",
    ),
    "a block of nothing": (lambda: Scaling(0, 128), "does not fit a matrix."),
    "a block below zero": (lambda: Scaling(-1, 128), "does not fit a matrix."),
    "a square of MX": (
        lambda: Scaling(32, 32, E8M0, ScaleRounding.RCEIL),
        "MX blocks are 1 x 32 elements, not 32 x 32.",
    ),
    "an MX scale that is exact": (lambda: Scaling(1, 32, E8M0), "scales in e8m0 are not rounded by exact. Give floor,"),
    "scales in E5M2": (lambda: Scaling(1, 16, E5M2), "scales are kept in float32, e8m0 or e4m3fn, not in e5m2."),
}


@for_each("name", REFUSED)
def test_what_cannot_be_is_refused_with_a_sentence(name: str) -> None:
    """By the value itself, whoever makes it."""
    make, sentence = REFUSED[name]
    with pytest.raises(RecipeRefused) as caught:
        make()
    assert sentence in str(caught.value) and str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_recipes_are_frozen_and_equal_by_what_they_say() -> None:
    """So that one may be shared by all layers."""
    recipe = alike(Treatment(E4M3, TENSOR), delayed=Delayed(16, Amax.MOST_RECENT, 1, 2))
    assert recipe == alike(Treatment(E4M3, TENSOR), delayed=Delayed(16, Amax.MOST_RECENT, 1, 2))
    assert hash(recipe) != hash(alike(Treatment(E4M3, TENSOR))) and recipe.accumulator is Accumulator.FP32
    with pytest.raises(FrozenInstanceError):
        recipe.hadamard = True  # type: ignore[misc]


@for_each(
    ("recipe", "per_tensor", "keeps_source"),
    [
        (alike(Treatment(E4M3, TENSOR)), True, False),
        (alike(Treatment(E4M3, TENSOR_POWER_OF_TWO)), True, False),
        (alike(Treatment(E4M3)), False, False),
        (alike(Treatment(E4M3, ROW)), False, True),
        (alike(Treatment(E4M3, SQUARE)), False, False),
        (Recipe(Treatment(E4M3, BLOCK), Treatment(E4M3, SQUARE), Treatment(E4M3, BLOCK)), False, True),
        (alike(Treatment(E3M2, MX)), False, True),
        (alike(Treatment(E2M1, NVFP4_SQUARE)), False, False),
        (alike(Treatment(E2M1, NVFP4_SQUARE, stochastic=True)), False, True),
        (alike(Treatment(E4M3, TENSOR), high_weight_gradient=True), True, True),
        (alike(Treatment(E4M3, TENSOR), hadamard=True), True, True),
    ],
)
def test_when_codes_must_be_made_twice(recipe: Recipe, per_tensor: bool, keeps_source: bool) -> None:
    """Where blocks run along the contraction, rounding is random, or the weight gradient is done otherwise."""
    assert recipe.per_tensor is per_tensor and recipe.keeps_source is keeps_source


def test_formats_by_role_are_those_of_training() -> None:
    """Inputs, weights, gradients."""
    assert FORMATS_BY_ROLE == {"hybrid": (E4M3, E4M3, E5M2), "e4m3": (E4M3,) * 3, "e5m2": (E5M2,) * 3}
