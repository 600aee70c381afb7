"""Evaluates arithmetic over named facts: limits of number formats, and peaks of devices from their datasheets."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fp8bench.analysis.roofline import Datasheet, load_datasheets
from fp8bench.errors import UnknownName, UsageError
from fp8bench.formats.grids import FORMATS, Format

_ARITHMETIC_OPERATORS: Mapping[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    # Unlike **, math.pow raises an error instead of returning a complex number.
    ast.Pow: math.pow,
}
_MATH_FUNCTIONS: Mapping[str, Callable[[float], float]] = {"log2": math.log2, "sqrt": math.sqrt}
# The longest allowed expression, so that a reader can check it.
_LONGEST_EXPRESSION = 200
_FORMAT_BY_SHORT_NAME = {"e4m3": "e4m3fn"}


@dataclass(frozen=True)
class ComputedFigure:
    """The value of an expression. `citations` maps the citation of each datasheet figure in the expression to the name
    of the device."""

    value: float
    citations: Mapping[str, str]


def evaluate_expression(text: str) -> ComputedFigure:
    """Returns the value of an expression such as `h200_sxm.tf32 / 1e12`. Raises UsageError for text that is not
    arithmetic."""
    if len(text) > _LONGEST_EXPRESSION:
        raise UsageError(f"{text[:40]!r}...: an expression has at most {_LONGEST_EXPRESSION} characters. Shorten it.")
    citations: dict[str, str] = {}
    try:
        value = _evaluate_node(ast.parse(text, mode="eval").body, citations)
    # Deeply nested text makes the parser raise RecursionError or MemoryError.
    except (SyntaxError, RecursionError, MemoryError):
        raise UsageError(
            f"{text!r} is not arithmetic. Write numbers, facts such as e4m3.largest, and + - * / **."
        ) from None
    except (ArithmeticError, ValueError):
        raise UsageError(
            f"{text!r} has no value: a division by 0, or a number too large. Correct the expression."
        ) from None
    if not math.isfinite(value):
        raise UsageError(f"{text!r} gives infinity or NaN. Correct the expression.")
    return ComputedFigure(value, citations)


def _evaluate_node(node: ast.expr, citations: dict[str, str]) -> float:
    # In Python, True and False are also of type int.
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return float(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC_OPERATORS:
        return _ARITHMETIC_OPERATORS[type(node.op)](
            _evaluate_node(node.left, citations), _evaluate_node(node.right, citations)
        )
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate_node(node.operand, citations)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 1:
        if node.func.id in _MATH_FUNCTIONS and not node.keywords:
            return _MATH_FUNCTIONS[node.func.id](_evaluate_node(node.args[0], citations))
        raise UnknownName("function", node.func.id, _MATH_FUNCTIONS)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return _find_fact_value(node.value.id, node.attr, citations)
    node_text = ast.unparse(node)[:40]
    raise UsageError(f"{node_text!r} is not arithmetic. Write numbers, facts such as e4m3.largest, and + - * / **.")


def _find_fact_value(owner_name: str, name: str, citations: dict[str, str]) -> float:
    owner_name = _FORMAT_BY_SHORT_NAME.get(owner_name, owner_name)
    if owner_name in FORMATS:
        return _get_named_fact(owner_name, name, list_format_facts(FORMATS[owner_name]))
    datasheet_by_name = {make_device_name(datasheet): datasheet for datasheet in load_datasheets()}
    if owner_name not in datasheet_by_name:
        raise UnknownName("format or device", owner_name, (*FORMATS, *datasheet_by_name))
    datasheet = datasheet_by_name[owner_name]
    value = _get_named_fact(owner_name, name, list_device_facts(datasheet))
    field = "dense" if name in datasheet.dense else name
    citations[f"{datasheet.name}: {datasheet.cite_figures(field)}, {datasheet.date}, {datasheet.source}"] = (
        datasheet.name
    )
    return value


def _get_named_fact(owner_name: str, name: str, facts: Mapping[str, float]) -> float:
    if name not in facts:
        raise UnknownName(f"fact of {owner_name}", name, facts)
    return facts[name]


def make_device_name(sheet: Datasheet) -> str:
    """Returns the name of a device in expressions, such as `h200_sxm` for 'H200 SXM'."""
    return re.sub(r"[^a-z0-9]+", "_", sheet.name.lower()).strip("_")


def list_format_facts(number_format: Format) -> dict[str, float]:
    names = ("largest", "smallest_normal", "smallest_subnormal", "bits", "exponent_bits", "mantissa_bits")
    return {name: float(getattr(number_format, name)) for name in names}


def list_device_facts(sheet: Datasheet) -> dict[str, float]:
    """Returns the figures of a datasheet by name, in base units. For example, peaks are in FLOP/s, once with and once
    without sparsity.
    """
    figures = {name: getattr(sheet, name) for name in ("bandwidth", "capacity", "link", "watts")}
    sparse_peak_rates = {f"sparse_{kind}": peak for kind, peak in sheet.sparse.items()}
    return {**sheet.dense, **sparse_peak_rates, **{name: value for name, value in figures.items() if value is not None}}
