"""Plants bugs in the core, one at a time, and counts how many the nearest tests find: `python -m tests.house.mutants`.

A bug is drawn by the seed: a comparison, an operator or a number that is off by one, a guard that never applies, a call
that is left out. It is planted in a copy of the tree. A bug that no test finds is printed with its place; some of these
change nothing that anybody could see, so a person reads them.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.house.sources import FILES, PACKAGE, ROOT

# Rooms of the core and the folders with their nearest tests.
NEAREST = {
    "analysis": ("analysis", "report", "golden"),
    "formats": ("formats", "precisions"),
    "measure": ("measure",),
    "model": ("model", "measure", "store"),
    "numerics": ("numerics",),
    "plan": ("plan",),
    "protocols": ("workloads", "precisions", "nn/test_tensor_scales.py"),
    "store": ("store", "faults"),
    "tape": ("tape",),
    "user_code": ("user_code", "worker"),
    "worker": ("worker", "measure"),
}
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
# Calls whose absence only a power failure shows.
INVISIBLE = re.compile("PRAGMA synchronous|fsync")
# Seconds after which a bug counts as found, because tests hang.
HANGS = 900
# pytest's exit code if no test was selected, as in files of slow tests.
NO_TESTS = 5


@dataclass(frozen=True)
class Bug:
    """A bug and its place; `plant` changes the tree in place."""

    path: Path
    tree: ast.Module
    line: int
    words: str
    plant: Callable[[], None]

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.words}"


def find_bugs(path: Path) -> Iterator[Bug]:
    tree = ast.parse(path.read_text())
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for node in function.body:
                yield from bugs_in(path, tree, node)


def bugs_in(path: Path, tree: ast.Module, statement: ast.stmt) -> Iterator[Bug]:
    for node in ast.walk(statement):
        line = getattr(node, "lineno", statement.lineno)
        for words, plant in changes_of(node):
            yield Bug(path, tree, line, words, plant)


def changes_of(node: ast.AST) -> Iterator[tuple[str, Callable[[], None]]]:
    """The possible bugs at one node, as a description and a function that plants it."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        ops = [SWAPPED[type(node.ops[0])](), *node.ops[1:]]
        yield f"swap the comparison in `{ast.unparse(node)}`", lambda: setattr(node, "ops", ops)
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPPED:
        operator = SWAPPED[type(node.op)]()
        yield f"swap the operator in `{ast.unparse(node)}`", lambda: setattr(node, "op", operator)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        number = node.value + 1
        yield f"{node.value} becomes {number}", lambda: setattr(node, "value", number)
    elif isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise | ast.Return | ast.Continue):
        yield f"never `if {ast.unparse(node.test)}`", lambda: setattr(node, "test", ast.Constant(False))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield f"leave out `{ast.unparse(node)}`", lambda: setattr(node, "value", ast.Constant(None))


def draw_bugs(seed: int, count: int) -> list[Bug]:
    """Draws `count` bugs by seed, each in another module."""
    drawn = random.Random(seed)
    modules = [path for path in FILES if path.relative_to(PACKAGE).parts[0] in NEAREST and any(find_bugs(path))]
    return [draw_bug(drawn, path) for path in drawn.sample(modules, count)]


def draw_bug(drawn: random.Random, path: Path) -> Bug:
    """Draws a bug of a module; draws again if no test could notice it."""
    bugs = list(find_bugs(path))
    first = drawn.randrange(len(bugs))
    return next(bug for bug in bugs[first:] + bugs[:first] if not INVISIBLE.search(bug.words))


def is_found(bug: Bug, copy: Path) -> bool:
    """Whether the nearest tests fail or hang with the bug in the copied tree.

    Files that import the module run first: they find most bugs in seconds.
    """
    planted = copy / bug.path.relative_to(ROOT)
    original = planted.read_text()
    bug.plant()
    planted.write_text(ast.unparse(ast.fix_missing_locations(bug.tree)))
    folders = [f"tests/{folder}" for folder in NEAREST[bug.path.relative_to(PACKAGE).parts[0]]]
    importers = find_importers(bug.path, folders)
    try:
        return (bool(importers) and do_fail([*importers, "-n", "0"], copy)) or do_fail(folders, copy)
    finally:
        planted.write_text(original)


def find_importers(module: Path, folders: list[str]) -> list[str]:
    """Test files in the folders that import the module."""
    path = module.parent if module.stem == "__init__" else module.with_suffix("")
    package, name = ".".join(path.relative_to(ROOT).parent.parts), path.name
    spelled = re.compile(rf"^from {package}(\.{name} import | import (.*\W)?{name}\b)", re.MULTILINE)
    importers = []
    for folder in folders:
        paths = sorted((ROOT / folder).rglob("test_*.py"))
        importers += [str(path.relative_to(ROOT)) for path in paths if spelled.search(path.read_text())]
    return importers


def do_fail(tests: list[str], copy: Path) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy)}
    try:
        done = subprocess.run(command, check=False, cwd=copy, env=environment, capture_output=True, timeout=HANGS)
    except subprocess.TimeoutExpired:
        return True
    return done.returncode not in (0, NO_TESTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=21)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("build", "__pycache__", ".fp8bench"))
        shared = ROOT.parent / "shared"
        if shared.exists():
            (Path(folder) / "shared").symlink_to(shared)
        found = 0
        for bug in draw_bugs(options.seed, options.count):
            dies = is_found(bug, copy)
            found += dies
            sys.stdout.write(f"{'found' if dies else 'ALIVE'}  {bug}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{found} of {options.count} found\n")


if __name__ == "__main__":
    main()
