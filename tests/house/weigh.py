"""How large the house is, and at most should be: `python -m tests.house.weigh`; with --items, test items, too (20 s).

Counts are of the files that git tracks, lines as `wc -l` counts them. Shares are of all lines of fp8bench/.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from fp8bench.cli.main import COMMANDS
from tests.house.sources import PACKAGE, ROOT, descendants, tree_of
from tests.house.test_sizes import LONGEST_FUNCTION, LONGEST_MODULE

KINDS = ("code", "docstrings", "imports", "blank", "comments")
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
# Of what, how much, and how much at most: after the frame of the smaller house, then after all of the plan.
Row = tuple[str, str, str]


def tracked(*patterns: str) -> list[Path]:
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", *patterns]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).exists()]


def count_lines(paths: Iterable[Path]) -> int:
    return sum(path.read_bytes().count(b"\n") for path in paths)


def count_words(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().split()) for path in paths)


def rooms(modules: Iterable[Path]) -> dict[str, list[Path]]:
    """The modules of each folder right below fp8bench/ or features/; those in none under ''."""
    by_room: dict[str, list[Path]] = {}
    for path in modules:
        folders = path.relative_to(PACKAGE).parts[:-1]
        by_room.setdefault("/".join(folders[: 2 if folders[:1] == ("features",) else 1]), []).append(path)
    return dict(sorted(by_room.items()))


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


@cache
def statements(path: Path) -> list[ast.stmt]:
    return [node for node in descendants(tree_of(path)) if isinstance(node, ast.stmt)]


def spans(nodes: Iterable[ast.stmt]) -> set[int]:
    return {line for node in nodes for line in range(node.lineno, (node.end_lineno or 0) + 1)}


def is_constant(node: ast.stmt, kind: type) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, kind)


def kinds_of_lines(path: Path) -> Counter[str]:
    """How many lines of a module are of which of KINDS. A text that stands alone is taken for a docstring."""
    nodes = statements(path)
    docstrings = spans(node for node in nodes if is_constant(node, str))
    imports = spans(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)) - docstrings
    others = [
        "blank" if not line.strip() else "comments" if line.lstrip().startswith("#") else "code"
        for number, line in enumerate(lines_of(path), 1)
        if number not in docstrings | imports
    ]
    return Counter(others) + Counter(docstrings=len(docstrings), imports=len(imports))


def sizes(modules: Sequence[Path], tests: Sequence[Path]) -> Iterator[Row]:
    docs, lines = tracked("docs/*.md"), count_lines(modules)
    longest = max(modules, key=lambda path: count_lines([path]))
    yield "lines of fp8bench/", f"{lines:,}", "84,000, then 70,000"
    yield "modules of fp8bench/", f"{len(modules):,}", "600, then 460"
    for room, paths in rooms(modules).items():
        own = "2,500 in 10" if room.startswith("features/") else ""
        yield f"  fp8bench/{room}", f"{count_lines(paths):,} in {len(paths)}", own
    yield "commands", f"{len(COMMANDS)}", ""
    yield "lines a command", f"{lines // len(COMMANDS):,}", ""
    yield f"longest module, {longest.relative_to(PACKAGE)}", f"{count_lines([longest])}", f"{LONGEST_MODULE}"
    yield "lines of tests/", f"{count_lines(tests):,}", "60,000"
    found = [re.findall(r"^ *(?:async )?def test_", path.read_text(), re.MULTILINE) for path in tests]
    yield "test functions", f"{sum(map(len, found)):,}", ""
    yield "words of docs/", f"{count_words(docs):,}", "40,000"
    yield "pages of docs/", f"{len(docs)}", "24"
    yield "pages of docs/ over 900 words", f"{sum(count_words([page]) > 900 for page in docs)}", "1"
    yield "words of docs/method.md", f"{count_words(tracked('docs/method.md')):,}", "4,000"
    yield "words of CHANGELOG.md", f"{count_words(tracked('CHANGELOG.md')):,}", "1,200"


def makeup(modules: Sequence[Path]) -> Iterator[Row]:
    kinds = sum(map(kinds_of_lines, modules), Counter[str]())
    yield from ((f"share of {kind}", f"{kinds[kind] / kinds.total():.1%}", "") for kind in KINDS)
    nodes = {path: statements(path) for path in modules}
    functions = [node for own in nodes.values() for node in own if isinstance(node, _FUNCTION)]
    classes = sum(isinstance(node, ast.ClassDef) for own in nodes.values() for node in own)
    lengths = [(node.end_lineno or 0) - node.lineno + 1 for node in functions]
    yield "functions a thousand lines", f"{1000 * len(functions) / kinds.total():.0f}", ""
    yield "classes a thousand lines", f"{1000 * classes / kinds.total():.1f}", ""
    yield "median function, lines", f"{statistics.median(lengths):g}", ""
    yield "longest function, lines", f"{max(lengths)}", f"{LONGEST_FUNCTION}"
    widths = [len(line) for path in modules for line in lines_of(path)]
    yield "lines over 120 characters; longest", f"{sum(width > 120 for width in widths)}; {max(widths)}", "0; 120"
    # A body of `...` stands beside its head.
    begun = [(path, node.lineno) for path, own in nodes.items() for node in own if not is_constant(node, type(...))]
    yield "statements that begin on the line of another", f"{len(begun) - len(set(begun))}", "0"
    words, inside = Counter[str](), Counter[str]()
    for path, own in nodes.items():
        bodies = spans(part for node in own if isinstance(node, _FUNCTION) for part in node.body)
        for number, line in enumerate(lines_of(path), 1):
            found = re.findall(r"\w+", line)
            words.update(found)
            inside.update(found if number in bodies else ())
    for word in ("one", "found"):
        yield f"`{word}`; of that in bodies of functions", f"{words[word]:,}; {inside[word]:,}", ""


def items() -> Iterator[Row]:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--collect-only", "-m", "slow or not slow"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (count,) = re.findall(r"^(\d+) tests collected", done.stdout, re.MULTILINE)
    yield "test items", f"{int(count):,}", ""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", action="store_true", help="collect all tests, too")
    modules = tracked("fp8bench/*.py")
    rows = [("", "now", "target"), *sizes(modules, tracked("tests/*.py")), *makeup(modules)]
    rows += items() if parser.parse_args(argv).items else ()
    for name, figure, target in rows:
        sys.stdout.write(f"{name:<48} {figure:>14}  {target}".rstrip() + "\n")


if __name__ == "__main__":
    main()
