"""What a precision's recipe does to a tensor of some role, as numbers: its grid, its factors, its scale's course."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fp8bench.formats.grids import FORMATS, Format
from fp8bench.formats.recipes import Delayed, Recipe
from fp8bench.nn.delayed import DelayedScale
from fp8bench.numerics.factors import Factors, factors_of
from fp8bench.numerics.scale_course import ScaleCourse, scale_course
from fp8bench.protocols import Precision, Role


@dataclass(frozen=True)
class RecipeView:
    """The elements' format and factors of one tensor, None where nobody knows; the course of a delayed scale."""

    fmt: Format | None = None
    factors: Factors | None = None
    course: ScaleCourse | None = None


def view_of(precision: Precision, role: Role, x: Tensor, before: Sequence[Tensor] = ()) -> RecipeView:
    """Of `x` after the tensors of earlier steps, the nearest first. Precisions without a recipe are their format."""
    recipe = getattr(precision, "recipe", None)
    if not isinstance(recipe, Recipe):
        return RecipeView(FORMATS.get(precision.name))
    treatment = dict(zip((Role.INPUT, Role.WEIGHT, Role.GRADIENT), recipe.treatments, strict=True))[role]
    if recipe.delayed is None:
        return RecipeView(treatment.fmt, factors_of(x, treatment.fmt, treatment.scaling))
    scales, course = _delayed(recipe.delayed, treatment.fmt, [*reversed(before), x])
    return RecipeView(treatment.fmt, factors_of(x, treatment.fmt, treatment.scaling, scales[-1]), course)


def _delayed(delayed: Delayed, fmt: Format, steps: Sequence[Tensor]) -> tuple[list[Tensor], ScaleCourse]:
    """The scale of every step, and how it followed; the first has none to come from, and is no part of the course."""
    memory = DelayedScale(delayed, fmt)
    scales = [memory.next(step) for step in steps]
    amaxes = [float(step.abs().max()) for step in steps]
    told = slice(1, None) if len(steps) > 1 else slice(None)
    return scales, scale_course([float(one) for one in scales[told]], amaxes[told], fmt)
