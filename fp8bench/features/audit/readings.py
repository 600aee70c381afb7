"""Finds the precision that a kernel's results match if they do not match the promised one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fp8bench.features.audit.promises import OTHER_READINGS, READINGS
from fp8bench.formats.recipes import Recipe, ScaleRounding
from fp8bench.registry import precisions

# Kinds of data that distinguish precisions.
TELLING = ("normal", "rows of different sizes", "many octaves")
_SCALES = {
    ScaleRounding.EXACT: "the largest magnitude / the format's largest, not rounded",
    ScaleRounding.POWER_OF_TWO: "powers of two",
}


def describe_reading(promised: str, data: Sequence[str], is_kept: Callable[[str, str], bool]) -> str:
    """Describes what was promised, and which other precision the results match, if any.

    `is_kept` tests whether they match a precision on some data; it runs foreign code.
    """
    prefix = f"Promised: {_with_scales(promised)}. Found: "
    readings = list(dict.fromkeys((promised, *READINGS, *OTHER_READINGS)))
    try:
        for kind in data:
            readings = [precision for precision in readings if is_kept(precision, kind)]
    except Exception:  # noqa: BLE001 - foreign code may raise anything
        readings = []
    if not readings:
        return f"{prefix}the results of no precision that is known here."
    if readings[0] == promised:
        return f"{prefix}the same on everyday data, but not on this input."
    return f"{prefix}{_with_scales(readings[0])}; give --precision {readings[0]} to promise that."


def _with_scales(precision: str) -> str:
    """Returns for example 'fp8-rowwise, whose scales are powers of two'."""
    recipe = getattr(precisions.get(precision), "recipe", None)
    scaling = recipe.input.scaling if isinstance(recipe, Recipe) else None
    words = "" if scaling is None else _SCALES.get(scaling.rounding, f"rounded by {scaling.rounding.value}")
    return f"{precision}, whose scales are {words}" if words else precision
