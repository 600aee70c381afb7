"""The table of the house is true: its totals are those of other programs, and of a module that is counted by hand."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.house.sources import ROOT
from tests.house.weigh import main, makeup

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


def whole(figure: str) -> list[int]:
    """The whole numbers of a figure."""
    return [int(word.strip(";").replace(",", "")) for word in figure.split() if word != "in"]


def of_shell(command: str) -> int:
    """What a pipe prints that begins with the files that git tracks."""
    pipe = f"git -c safe.directory='*' ls-files -z {command}"
    return int(subprocess.run(pipe, shell=True, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="needs git and a checkout")
def test_totals_are_those_of_other_programs(capsys: pytest.CaptureFixture[str]) -> None:
    """And rooms add up to the whole, as do shares."""
    main([])
    rows = [(line[:48].rstrip(), line[48:63].strip()) for line in capsys.readouterr().out.splitlines()[1:]]
    table = dict(rows)
    (lines,), (modules,) = whole(table["lines of fp8bench/"]), whole(table["modules of fp8bench/"])
    assert lines == of_shell("'fp8bench/*.py' | xargs -0 cat | wc -l")
    assert modules == of_shell("'fp8bench/*.py' | tr '\\0' '\\n' | wc -l")
    rooms = [whole(figure) for name, figure in rows if name.startswith("  fp8bench/")]
    assert [sum(column) for column in zip(*rooms, strict=True)] == [lines, modules]
    assert whole(table["lines of tests/"]) == [of_shell("'tests/*.py' | xargs -0 cat | wc -l")]
    assert whole(table["words of docs/"]) == [of_shell("'docs/*.md' | xargs -0 cat | wc -w")]
    count, inside = whole(table["`one`; of that in bodies of functions"])
    assert count == of_shell("'fp8bench/*.py' | xargs -0 grep -ow one | wc -l") > inside > 0
    shares = [float(figure.rstrip("%")) for name, figure in rows if name.startswith("share of ")]
    assert sum(shares) == pytest.approx(100, abs=0.3)


def test_a_module_is_counted_as_by_hand(tmp_path: Path) -> None:
    """Two of its statements begin on the line of another; `...` does not count."""
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
