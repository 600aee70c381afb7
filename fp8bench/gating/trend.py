"""What the second side came to, for github-action-benchmark: its `customSmallerIsBetter`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from fp8bench.gating.judging import Judged
from fp8bench.gating.words import sentence


def render(judged: Sequence[Judged]) -> str:
    """A list of names, values and units; figures without a number on the second side are not in it."""
    rows = [_row(one) for one in judged if _finite(one.comparison.after)]
    return json.dumps(rows, indent=1, allow_nan=False) + "\n"


def _finite(number: float | None) -> bool:
    return number is not None and math.isfinite(number)


def _row(one: Judged) -> dict[str, Any]:
    found = one.comparison
    row: dict[str, Any] = {"name": f"{found.case} {found.metric}", "unit": found.unit or "ratio", "value": found.after}
    ratio = found.ratio
    if ratio is not None and ratio.low < ratio.high and math.isfinite(ratio.half_width):
        row["range"] = f"\u00b1{100 * ratio.half_width:.2g}%"
    return {**row, "extra": sentence(one)}
