"""The table of the house is true of a module that is counted by hand."""

from __future__ import annotations

from pathlib import Path

from tests.house.weigh import makeup

MADE = '''"""Two lines
of a docstring."""

import os
from ast import (
    parse,
)

# A comment.
one = 1; other = one


class Protocol:
    def nothing(self) -> int: ...

    def found(self) -> object:
        """One line."""
        if one: return None
        return os, parse, other
'''


def test_a_module_is_counted_as_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "made.py"
    path.write_text(MADE)
    table = {name: figure for name, figure, _ in makeup([path])}
    kinds = {"code": 6, "docstrings": 3, "imports": 4, "blank": 5, "comments": 1}
    assert {kind: table[f"share of {kind}"] for kind in kinds} == {
        kind: f"{count / 19:.1%}" for kind, count in kinds.items()
    }
    assert table["statements that begin on the line of another"] == "2"
    assert (table["median function, lines"], table["longest function, lines"]) == ("2.5", "4")
    assert table["`one`; of that in bodies of functions"] == "3; 1"
    assert table["`found`; of that in bodies of functions"] == "1; 0"
