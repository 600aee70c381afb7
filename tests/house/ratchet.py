"""Weighs each room, and keeps limits that may fall but not rise: `python -m tests.house.ratchet` lowers them.

A syntax node is one node of Python's syntax tree: a name, a call, an operator. Lines can be packed, nodes cannot. The
limits are in ratchet.toml. To raise one, add a `[[raised]]` entry there with a reason that a reviewer can accept.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import re
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fp8bench.cli.main import build_parser, subparsers_by_name
from tests.house.sources import ROOT

LIMITS = Path(__file__).with_name("ratchet.toml")
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FIGURES = ("nodes", "nodes a statement", "nested comprehensions", "imported names", "fmt: skip")
HELP_OPTIONS = {"-h", "--help", "--help-all", "--version"}
# A smaller change neither breaks a limit by itself nor needs to be recorded.
NODE_STEP = 100
Weights = dict[str, float]
Table = dict[str, Weights]

HEADER = """\
# What each room weighs at most, and how many options each command has. A figure may fall and not rise.
# After a change that makes rooms lighter: python -m tests.house.ratchet
# To raise figures of a room, add an entry at the end with the reason, and leave the table alone:
#
#   [[raised]]
#   room = "fp8bench/report"   # or the name of a command, whose figure is options
#   nodes = 800
#   "imported names" = 12
#   reason = "The page shows why a precision does not pay, which is the first thing that readers ask."
"""


def tracked_modules() -> list[Path]:
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "fp8bench/*.py", "tests/*.py", "suites/*.py"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).exists()]


def name_room(path: Path) -> str:
    """The folder that a module counts for: fp8bench/ROOM, fp8bench/features/NAME, or all of tests/ and suites/."""
    folders = path.relative_to(ROOT).parts[:-1]
    if folders[0] != "fp8bench":
        return folders[0]
    depth = 3 if folders[1:2] == ("features",) else 2
    return "/".join(folders[:depth])


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def is_nested(node: ast.AST) -> bool:
    """Whether this comprehension has two loops or contains another comprehension."""
    inner = [part for part in ast.walk(node) if isinstance(part, COMPREHENSIONS)]
    return len(inner) > 1 or len(node.generators) > 1


def count_parts(text: str) -> Counter[str]:
    """Counts nodes, statements, nested comprehensions, imported names and `fmt: skip` of a module."""
    by_kind: dict[type[ast.AST], list[Any]] = defaultdict(list)
    for node in ast.walk(ast.parse(text)):
        by_kind[type(node)].append(node)
    statements = sum(len(nodes) for kind, nodes in by_kind.items() if issubclass(kind, ast.stmt))
    return Counter(
        nodes=sum(map(len, by_kind.values())),
        skips=len(re.findall(r"# fmt: (?:skip|off)", text)),
        statements=statements - sum(map(is_docstring, by_kind[ast.Expr])),
        nested=sum(is_nested(node) for kind in COMPREHENSIONS for node in by_kind[kind]),
        imported=sum(len(node.names) for kind in (ast.Import, ast.ImportFrom) for node in by_kind[kind]),
    )


def weigh_rooms(paths: Iterable[Path]) -> Table:
    counts: dict[str, Counter[str]] = {}
    for path in paths:
        counts.setdefault(name_room(path), Counter()).update(count_parts(path.read_text()))
    return {room: weigh(counts[room]) for room in sorted(counts)}


def weigh(counts: Counter[str]) -> Weights:
    """The figures of a room. Nodes are rounded up, so that a change of a few nodes breaks no limit."""
    nodes = math.ceil(counts["nodes"] / NODE_STEP) * NODE_STEP
    density = math.ceil(10 * counts["nodes"] / max(counts["statements"], 1)) / 10
    return dict(zip(FIGURES, (nodes, density, counts["nested"], counts["imported"], counts["skips"]), strict=True))


def count_options() -> Table:
    """Counts the options of each command with its subcommands, without `--help` and similar."""
    return {name: {"options": options_of(command)} for name, command in subparsers_by_name(build_parser()).items()}


def options_of(parser: argparse.ArgumentParser) -> int:
    own = sum(bool(action.option_strings) and not HELP_OPTIONS & {*action.option_strings} for action in parser._actions)
    return own + sum(options_of(command) for command in subparsers_by_name(parser).values())


def measure() -> Table:
    return weigh_rooms(tracked_modules()) | count_options()


def read_limits(path: Path = LIMITS) -> dict[str, Any]:
    return tomllib.loads(path.read_text())


def find_raise(limits: dict[str, Any], room: str, figure: str) -> float:
    entries = limits.get("raised", [])
    return sum(entry.get(figure, 0) for entry in entries if entry["room"] == room)


def table_of(limits: dict[str, Any], figures: tuple[str, ...]) -> Table:
    """The limits without raises."""
    rooms = {room: dict(zip(figures, columns, strict=True)) for room, *columns in limits["rooms"]}
    return rooms | {name: {"options": count} for name, count in limits.get("options", {}).items()}


def find_excess(limits: dict[str, Any], weights: Table, figures: tuple[str, ...] = FIGURES) -> list[str]:
    """A sentence for each figure above its limit; a room without a line has limit 0."""
    table = table_of(limits, figures)
    sentences = []
    for room, weighed in weights.items():
        for figure, weight in weighed.items():
            limit = round(table.get(room, {}).get(figure, 0) + find_raise(limits, room, figure), 1)
            if weight > limit:
                sentences.append(f"{room}: {figure} is {weight:,g}, at most {limit:,g} allowed")
    return sentences


def lower(limits: dict[str, Any], weights: Table, figures: tuple[str, ...] = FIGURES) -> Table:
    """The table with lower figures; raises stay on top of it."""
    table = table_of(limits, figures)
    for room in [room for room in table if room not in weights]:
        del table[room]
    for room, limited in table.items():
        for figure, limit in limited.items():
            limited[figure] = min(limit, round(weights[room][figure] - find_raise(limits, room, figure), 1))
    return table


def render(table: Table, entries: str = "", header: str = HEADER, figures: tuple[str, ...] = FIGURES) -> str:
    """The file of limits: the table, options if there are any, and the entries with reasons unchanged."""
    lines = [header, f"rooms = [\n    # room, {', '.join(figures)}"]
    for room, limits in table.items():
        if "options" not in limits:
            columns = ", ".join(f"{limits[name]:g}" for name in figures)
            lines.append(f"    [{json.dumps(room) + ',':34} {columns}],")
    lines.append("]")
    options = [f"{name} = {limits['options']:g}" for name, limits in table.items() if "options" in limits]
    if options:
        lines += ["\n[options]", *options]
    return "\n".join([*lines, ""]) + (f"\n{entries}" if entries else "")


def lower_limits(path: Path, header: str, figures: tuple[str, ...], weights: Table) -> None:
    """Rewrites a file of limits with the figures that fell; an empty table gets the figures of today."""
    _, mark, entries = path.read_text().partition("\n[[")
    limits = read_limits(path)
    table = lower(limits, weights, figures) if limits["rooms"] else weights
    path.write_text(render(table, mark.lstrip() + entries, header, figures))


def main() -> None:
    weights = measure()
    lower_limits(LIMITS, HEADER, FIGURES, weights)
    excess = find_excess(read_limits(), weights)
    totals = dict.fromkeys(("fp8bench", "tests", "suites", "options"), 0.0)
    for room, figures in weights.items():
        if "options" in figures:
            totals["options"] += figures["options"]
        else:
            totals[room.partition("/")[0]] += figures["nodes"]
    sys.stdout.write("".join(f"{name:12} {total:>9,g}\n" for name, total in totals.items()))
    sys.stdout.write("".join(f"above its limit: {sentence}\n" for sentence in excess))


if __name__ == "__main__":
    main()
