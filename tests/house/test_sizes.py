"""Nothing in fp8bench grows past what one can read at once."""

from __future__ import annotations

import ast

from tests.house.sources import FILES, ROOT, descendants, tree_of

LONGEST_MODULE = 500
LONGEST_FUNCTION = 85


def test_modules() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    offenders = {name: length for name, length in lines.items() if length > LONGEST_MODULE}
    assert not offenders, f"modules over {LONGEST_MODULE} lines: {offenders}"


def test_functions() -> None:
    offenders = {}
    for path in FILES:
        for node in descendants(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                length = (node.end_lineno or node.lineno) - first + 1
                if length > LONGEST_FUNCTION:
                    offenders[f"{path.relative_to(ROOT)}:{first} {node.name}"] = length
    assert not offenders, f"functions over {LONGEST_FUNCTION} lines: {offenders}"
