"""Arithmetic over named facts: limits of formats, and peaks of devices from their datasheets."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fp8bench.analysis.roofline import Datasheet, datasheets
from fp8bench.errors import UnknownName, UsageError
from fp8bench.formats.grids import FORMATS, Format

_OPERATORS: Mapping[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: math.pow,
}
_FUNCTIONS: Mapping[str, Callable[[float], float]] = {"log2": math.log2, "sqrt": math.sqrt}
# A reader could not check a longer expression.
_LONGEST = 200
_SHORT_NAMES = {"e4m3": "e4m3fn"}


@dataclass(frozen=True)
class Computed:
    """The value of an expression, and the citations of the datasheets that it uses, with the device of each."""

    value: float
    citations: Mapping[str, str]

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(self.citations)


def evaluate(text: str) -> Computed:
    """Computes an expression such as `h200_sxm.tf32 / 1e12`. Raises UsageError for anything that is not arithmetic."""
    if len(text) > _LONGEST:
        raise UsageError(f"{text[:40]!r}...: an expression has at most {_LONGEST} characters. Shorten it.")
    citations: dict[str, str] = {}
    try:
        value = _value_of(ast.parse(text, mode="eval").body, citations)
    except (SyntaxError, RecursionError, MemoryError):
        raise UsageError(
            f"{text!r} is not arithmetic. Write numbers, facts such as e4m3.largest, and + - * / **."
        ) from None
    except (ArithmeticError, ValueError):
        raise UsageError(
            f"{text!r} has no value: a division by 0, or a number too large. Correct the expression."
        ) from None
    if not math.isfinite(value):
        raise UsageError(f"{text!r} is not finite. Correct the expression.")
    return Computed(value, citations)


def _value_of(node: ast.expr, citations: dict[str, str]) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return float(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value_of(node.left, citations), _value_of(node.right, citations))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value_of(node.operand, citations)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 1:
        if node.func.id in _FUNCTIONS and not node.keywords:
            return _FUNCTIONS[node.func.id](_value_of(node.args[0], citations))
        raise UnknownName("function", node.func.id, _FUNCTIONS)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return _fact(node.value.id, node.attr, citations)
    words = ast.unparse(node)[:40]
    raise UsageError(f"{words!r} is not arithmetic. Write numbers, facts such as e4m3.largest, and + - * / **.")


def _fact(owner: str, name: str, citations: dict[str, str]) -> float:
    owner = _SHORT_NAMES.get(owner, owner)
    if owner in FORMATS:
        return _lookup(owner, name, facts_of_format(FORMATS[owner]))
    sheets = {slug_of(sheet): sheet for sheet in datasheets()}
    if owner not in sheets:
        raise UnknownName("format or device", owner, (*FORMATS, *sheets))
    sheet = sheets[owner]
    value = _lookup(owner, name, facts_of_device(sheet))
    field = "dense" if name in sheet.dense else name
    citations[f"{sheet.name}: {sheet.cite(field)}, {sheet.date}, {sheet.source}"] = sheet.name
    return value


def _lookup(owner: str, name: str, facts: Mapping[str, float]) -> float:
    if name not in facts:
        raise UnknownName(f"fact of {owner}", name, facts)
    return facts[name]


def slug_of(sheet: Datasheet) -> str:
    """Returns the name of a device in expressions: `h200_sxm` for 'H200 SXM'."""
    return re.sub(r"[^a-z0-9]+", "_", sheet.name.lower()).strip("_")


def facts_of_format(grid: Format) -> dict[str, float]:
    names = ("largest", "smallest_normal", "smallest_subnormal", "bits", "exponent_bits", "mantissa_bits")
    return {name: float(getattr(grid, name)) for name in names}


def facts_of_device(sheet: Datasheet) -> dict[str, float]:
    """Returns peaks in FLOP/s, with and without sparsity, and the other figures of a datasheet in base units."""
    figures = {name: getattr(sheet, name) for name in ("bandwidth", "capacity", "link", "watts")}
    sparse = {f"sparse_{kind}": peak for kind, peak in sheet.sparse.items()}
    return {**sheet.dense, **sparse, **{name: value for name, value in figures.items() if value is not None}}
