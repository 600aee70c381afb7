"""Finds the precision that a kernel seems to use when its results do not have the values of the promised precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fp8bench.formats.recipes import Recipe, ScaleRounding
from fp8bench.registry import precisions

# Precisions that results are compared with to find the one that was computed. The usual ones come first.
USUAL_PRECISIONS = (
    "fp8",
    "fp8:scale=pow2",
    "fp8-rowwise",
    "fp8-rowwise:scale=exact",
    "fp8-block",
    "fp8-block:scale=exact",
    "mxfp8",
    "mxfp8:scale=floor",
    "mxfp6",
    "mxfp4",
    "mxfp4:scale=floor",
    "nvfp4",
    "nvfp4:weights=1d",
    "fp8-e5m2",
    "fp8-unit",
)
RARE_PRECISIONS = (
    "fp8-e4m3",
    "mxfp8:scale=even",
    "mxfp8:scale=ceil",
    "mxfp4:scale=even",
    "mxfp4:scale=ceil",
    "mxfp6:formats=e2m3",
    "nvfp4:scale=up",
    "custom:format=e4m3fnuz",
    "custom:format=e4m3fnuz:scaling=row",
    "bf16",
    "fp16",
    "fp32",
)
# Kinds of data on which different precisions give different results.
INFORMATIVE_DATA = ("normal", "rows of different sizes", "many octaves")
_SCALE_DESCRIPTIONS = {
    ScaleRounding.EXACT: "the largest magnitude divided by the format's largest value, not rounded",
    ScaleRounding.POWER_OF_TWO: "powers of two",
}


def describe_found_precision(promised: str, data: Sequence[str], matches: Callable[[str, str], bool]) -> str:
    """Returns a sentence on the promised precision and on the one that the results match, if any. `matches` calls the
    kernel on one kind of data, and returns whether the results match a precision.
    """
    prefix = f"Promised: {_describe_scales(promised)}. Found: "
    candidates = list(dict.fromkeys((promised, *USUAL_PRECISIONS, *RARE_PRECISIONS)))
    try:
        for kind in data:
            candidates = [precision for precision in candidates if matches(precision, kind)]
    except Exception:  # noqa: BLE001 - foreign code may raise anything
        candidates = []
    if not candidates:
        return f"{prefix}the results match no supported precision."
    if candidates[0] == promised:
        return f"{prefix}this precision on ordinary data, but not on this input."
    return f"{prefix}{_describe_scales(candidates[0])}; give --precision {candidates[0]} to promise that."


def _describe_scales(precision: str) -> str:
    """Returns a precision with the rounding of its scales, such as 'fp8-rowwise, whose scales are powers of two'."""
    recipe = getattr(precisions.get(precision), "recipe", None)
    scaling = recipe.input.scaling if isinstance(recipe, Recipe) else None
    description = (
        "" if scaling is None else _SCALE_DESCRIPTIONS.get(scaling.rounding, f"rounded by {scaling.rounding.value}")
    )
    return f"{precision}, whose scales are {description}" if description else precision
