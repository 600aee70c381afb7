"""Which precision gives the results of a kernel that does not give those of the promised one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from fp8bench.features.audit.promises import OTHER_READINGS, READINGS, TIES, Matrices
from fp8bench.formats.recipes import Recipe, ScaleRounding
from fp8bench.registry import precisions

if TYPE_CHECKING:
    from fp8bench.features.audit.auditor import Auditor

# Kinds of data that tell precisions apart.
_TELLING = ("normal", "rows of different sizes", "many octaves")
_SCALES = {
    ScaleRounding.EXACT: "the largest magnitude / the format's largest, not rounded",
    ScaleRounding.POWER_OF_TWO: "powers of two",
}


def describe_reading(auditor: Auditor, name: str) -> str:
    """Says what was promised, and which other precision gives the results of that name, if one does."""
    promised = auditor.subject.signature.precision
    said = f"Promised: {_with_scales(promised)}. Found: "
    readings = list(dict.fromkeys((promised, *READINGS, *OTHER_READINGS)))
    for data in (data for data in _TELLING if data in auditor.subject.data):
        try:
            matrices = auditor.matrices(auditor.first._replace(data=data))
            result = auditor.results(matrices)[name]
            readings = [each for each in readings if _is_kept(auditor, each, name, matrices, result)]
        except Exception:  # noqa: BLE001 - foreign code may raise anything
            readings = []
    if not readings:
        return f"{said}the results of no precision that is known here."
    if readings[0] == promised:
        return f"{said}the same on everyday data, but not on this input."
    return f"{said}{_with_scales(readings[0])}; give --precision {readings[0]} to promise that."


def _is_kept(auditor: Auditor, precision: str, name: str, matrices: Matrices, result: Tensor) -> bool:
    subject = type(auditor.subject)(auditor.subject.host, auditor.subject.signature, auditor.subject.facts)
    subject.signature = replace(subject.signature, precision=precision)
    verdict = subject.promises(matrices)[name].judge(result, search=False)
    return not verdict.failed and verdict.why in ("", TIES)


def _with_scales(precision: str) -> str:
    """Returns for example 'fp8-rowwise, whose scales are powers of two'."""
    recipe = getattr(precisions.get(precision), "recipe", None)
    scaling = recipe.input.scaling if isinstance(recipe, Recipe) else None
    words = "" if scaling is None else _SCALES.get(scaling.rounding, f"rounded by {scaling.rounding.value}")
    return f"{precision}, whose scales are {words}" if words else precision
