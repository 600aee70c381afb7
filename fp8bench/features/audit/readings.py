"""Finds the precision that a kernel seems to use when its results do not have the values of the promised precision, and
describes where results are wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from fp8bench.formats.recipes import Recipe, ScaleRounding
from fp8bench.registry import precisions

# Precisions that may explain a kernel's results. The usual ones come first.
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


def describe_found_precision(promised_precision: str, data: Sequence[str], matches: Callable[[str, str], bool]) -> str:
    """Returns a sentence on the promised precision and on the one that the results match, if any. `matches` calls the
    kernel on one kind of data, and returns whether the results match a precision.
    """
    prefix = f"Promised: {_describe_scales(promised_precision)}. Found: "
    candidates = list(dict.fromkeys((promised_precision, *USUAL_PRECISIONS, *RARE_PRECISIONS)))
    try:
        for kind in data:
            candidates = [precision for precision in candidates if matches(precision, kind)]
    except Exception:  # noqa: BLE001 - foreign code may raise anything
        candidates = []
    if not candidates:
        return f"{prefix}the results match no supported precision."
    if candidates[0] == promised_precision:
        return f"{prefix}this precision on other inputs."
    return f"{prefix}{_describe_scales(candidates[0])}; give --precision {candidates[0]} to promise that."


def _describe_scales(precision: str) -> str:
    """Describes a precision and how its scales are rounded, such as 'fp8-rowwise, whose scales are powers of two'."""
    recipe = getattr(precisions.get(precision), "recipe", None)
    scaling = recipe.input.scaling if isinstance(recipe, Recipe) else None
    description = (
        "" if scaling is None else _SCALE_DESCRIPTIONS.get(scaling.rounding, f"rounded by {scaling.rounding.value}")
    )
    return f"{precision}, whose scales are {description}" if description else precision


# Wrong results have a factor in common if they differ from the exact ones times this factor by less than this share of
# their norm.
_MAX_SHARE_BEYOND_FACTOR = 0.01


def describe_outliers(outliers: Tensor, result: Tensor, exact: Tensor, rows: Tensor, columns: Tensor) -> str:
    """Returns how many results are wrong, where they are, and their factor if they have one in common. `rows` and
    `columns` are the indices of the judged results in the complete result.
    """
    wrong_rows_text = _describe_wrong_lines("row", rows, outliers.any(1))
    wrong_columns = _describe_wrong_lines("column", columns, outliers.any(0))
    wrong_values = result[outliers]
    exact_values = exact[outliers]
    expected_result_factor = (wrong_values @ exact_values) / (exact_values @ exact_values)
    has_common_factor = (
        wrong_values - expected_result_factor * exact_values
    ).norm() < _MAX_SHARE_BEYOND_FACTOR * wrong_values.norm()
    outlier_factor_text = (
        f", where results are {expected_result_factor:.3g} times the expected ones" if has_common_factor else ""
    )
    return (
        f"{len(wrong_values)} of {outliers.numel()} results differ by more than any rounding of the operands explains, "
        f"all in {wrong_rows_text} and {wrong_columns}{outlier_factor_text}"
    )


def _describe_wrong_lines(word: str, lines: Tensor, is_wrong: Tensor) -> str:
    first_wrong_line, last_wrong_line = lines[is_wrong][[0, -1]].tolist()
    text = (
        f"{word} {last_wrong_line}"
        if first_wrong_line == last_wrong_line
        else f"{word}s {first_wrong_line} to {last_wrong_line}"
    )
    return f"{text} (the last)" if first_wrong_line > 0 and last_wrong_line == lines[-1] else text
