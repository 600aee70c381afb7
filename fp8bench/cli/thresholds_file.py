"""A file of thresholds: suites or patterns of cases, under each patterns of figures, and what is worse enough.

gemm:
  time: {relative: 3%, smallest: 20 us}
  "*_error": ignore
"transformer*fp8*":
  peak_memory: {relative: 1%, smallest: 4 MiB}
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import yaml

from fp8bench import units
from fp8bench.analysis.gate.thresholds import Rule
from fp8bench.cli.yaml_file import Kind, items, place, read_mapping, scalar, shown
from fp8bench.errors import UsageError

_FORM = "Expected lines of the form PATTERN: {FIGURE: {relative: 5%, smallest: 10 us}}, or FIGURE: ignore."
_KIND = Kind("--thresholds", "thresholds", _FORM)
_NUMBER = re.compile(r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*([^\s0-9.]\S*)?")
_UNITS = units.written()
_LARGEST = 100.0


def read_rules(file: Path) -> tuple[Rule, ...]:
    """The rules of a file, in its order. Raises UsageError with file and line."""
    rules: list[Rule] = []
    for case, key, node in items(file, read_mapping(file, _KIND), _KIND):
        if not case:
            raise UsageError(f"{place(file, key)}: an empty pattern fits nothing. Give a suite, or '*' for all cases.")
        figures = _mapping(place(file, node), case, "a mapping of figures", node)
        rules += [_rule(file, case, metric, name, one) for metric, name, one in items(file, figures, _KIND)]
    return tuple(rules)


def _mapping(where: str, name: str, expected: str, node: yaml.Node) -> yaml.MappingNode:
    """A node that has to be a mapping with something in it."""
    if isinstance(node, yaml.MappingNode) and node.value:
        return node
    got = "none" if isinstance(node, yaml.MappingNode) else shown(node)
    raise UsageError(f"{where}: {name}: expected {expected}, got {got}. {_FORM}")


def _rule(file: Path, case: str, metric: str, key: yaml.Node, node: yaml.Node) -> Rule:
    where = place(file, key)
    if not metric:
        raise UsageError(f"{where}: an empty pattern fits nothing. Name a figure, or '*' for all.")
    if isinstance(node, yaml.ScalarNode) and scalar(file, node) == "ignore":
        return Rule(case, metric, ignored=True, place=where)
    relative: float | None = None
    smallest: float | None = None
    unit = ""
    bounds = _mapping(where, metric, "relative and smallest, or ignore", node)
    for name, named, value in items(file, bounds, _KIND):
        if name == "relative":
            relative = _share(file, value)
        elif name == "smallest":
            smallest, unit = _amount(file, value)
        else:
            raise UsageError(f"{place(file, named)}: unknown key {name!r}. Known: relative, smallest.")
    return Rule(case, metric, relative, smallest, unit, place=where)


def _share(file: Path, node: yaml.Node) -> float:
    """'5%' or '0.05'; a bare 5 is most likely meant as percent, and is refused."""
    number, unit = _parsed(file, node, "a share, like 5% or 0.05")
    value = number / 100 if unit == "%" else number
    if unit not in ("", "%") or not 0 <= value <= _LARGEST or (not unit and value >= 1):
        percent = f" {number:g} without a sign would be {100 * number:g}%; write {number:g}%." if not unit else ""
        raise UsageError(
            f"{place(file, node)}: relative: expected a share from 0, like 5% or 0.05, got {shown(node)}.{percent}"
        )
    return value


def _amount(file: Path, node: yaml.Node) -> tuple[float, str]:
    number, unit = _parsed(file, node, "a number, with a unit or in the figure's own")
    if unit not in _UNITS:
        known = ", ".join(name for name in _UNITS if name)
        raise UsageError(f"{place(file, node)}: smallest: unknown unit {unit!r:.40}. Known: {known}, or none.")
    factor, base = _UNITS[unit]
    return number * factor, base


def _parsed(file: Path, node: yaml.Node, expected: str) -> tuple[float, str]:
    text = scalar(file, node) if isinstance(node, yaml.ScalarNode) else ""
    found = _NUMBER.fullmatch(text.strip())
    if found is None or not math.isfinite(float(found[1])):
        raise UsageError(f"{place(file, node)}: expected {expected}, got {shown(node)}.")
    return float(found[1]), found[2] or ""
