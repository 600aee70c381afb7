"""Recipes as values: what they refuse, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fp8bench.errors import RecipeRefused
from fp8bench.formats.grids import E2M1, E3M2, E4M3, E5M2, E8M0
from fp8bench.formats.recipes import (
    BLOCK,
    MX,
    NVFP4,
    NVFP4_SQUARE,
    ROW,
    SQUARE,
    TENSOR,
    Recipe,
    Scaling,
    Treatment,
)
from tests.counts import for_each


def alike(treatment: Treatment, **others: object) -> Recipe:
    return Recipe(treatment, treatment, treatment, **others)  # type: ignore[arg-type]


# The recipe and part of the message.
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: Treatment(E5M2, NVFP4), "not for e5m2"),
    (lambda: alike(Treatment(E2M1, MX), hadamard=True, high_weight_gradient=True), "hadamard=off"),
    (lambda: Scaling(1, 32, E8M0), "not rounded by exact"),
]


@for_each(("make", "word"), REFUSED)
def test_what_cannot_be_is_refused_with_a_sentence(make: Callable[[], object], word: str) -> None:
    with pytest.raises(RecipeRefused) as caught:
        make()
    assert word in str(caught.value) and str(caught.value).endswith(".") and "\n" not in str(caught.value)


@for_each(
    ("recipe", "per_tensor", "keeps_source"),
    [
        (alike(Treatment(E4M3, TENSOR)), True, False),
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
    assert recipe.has_tensor_scales_only is per_tensor and recipe.keeps_source is keeps_source
