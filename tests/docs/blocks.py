"""Outputs shown below commands in pages: read from a page, produced by running the command, compared, and rewritten.

Figures, verdict words, the name and units of the machine, and line breaks may differ from a page. A line of three dots
stands for omitted lines, as do both ends of an output. `python -m tests.docs.blocks [PAGE ...] [--quick]` runs the
commands (one minute with --quick, otherwise half an hour) and corrects wrong outputs in the pages: read the diff.
Correct outputs keep their figures, because sentences nearby quote them.
"""

from __future__ import annotations

import difflib
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8bench.model import Verdict
from tests.commands import PROGRAM, ROOT, environment, git

PAGES = ("README.md", "docs/tutorial.md", "docs/how-to.md", "docs/audit.md")
# Commands that take seconds and need no earlier command.
QUICK = ("doctor", "init")
# Commands whose outputs another command reads.
NEEDS = {"advise": ("profile", "train"), "gate": ("init",)}
_BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"^```python\n# (\S+\.py)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_DOTS = "..."
# A shorter line was not wrapped.
_FOLDED_FROM = 80

_NUMBER = re.compile(
    r"(?<![\w.])[+-]*\d[\d,.]*(?:e[+-]?\d+)?"
    r"(?:x|%| ?(?:[kKMGTmun]i?)?(?:B|s|FLOP/s|FLOP|J|W|Hz)\b| (?:min|h|k|M|G)\b)?"
)
_RUN = re.compile(r"\b(?=[a-f]*\d)[0-9a-f]{8}\b")
_MACHINE = re.compile(r"(AMD|Intel)[^(\n]*(\(R\)[^(\n]*)*")
_UNITS = re.compile(r"(?<=^  units) .*", re.MULTILINE)
_VERDICT = re.compile(
    rf"\b(perhaps )?({'|'.join(map(re.escape, Verdict))}|adopt|worse|better|negligible|small|moderate|large)\b"
)


@dataclass(frozen=True)
class Block:
    """A command of a page as typed, and the output lines shown below it."""

    page: str
    command: str
    shown: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        return shlex.split(self.command, comments=True)[1:]

    @property
    def is_quick(self) -> bool:
        return self.words[0] in QUICK

    @property
    def name(self) -> str:
        return f"{self.page}: {' '.join(self.words[:2])}"


def blocks_of(page: str) -> Iterator[Block]:
    """Yields the page's fp8bench commands that have an output."""
    for block in _BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
        command, shown = "", list[str]()
        for line in [*block.splitlines(), "$ "]:
            if not line.startswith("$ "):
                shown.append(line)
                continue
            if command.startswith("fp8bench ") and shown:
                yield Block(page, command, tuple(shown))
            command, shown = line.removeprefix("$ "), []


BLOCKS = tuple(block for page in PAGES for block in blocks_of(page))


class Project:
    """A folder in which commands of pages run, with the files that pages show, and what each command has printed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._printed: dict[str, str] = {}
        self._runs: dict[str, str] = {}
        for page in PAGES:
            for name, code in _CODE.findall((ROOT / page).read_text(encoding="utf-8")):
                (folder / name).write_text(code, encoding="utf-8")

    def printed(self, block: Block) -> str:
        """Returns the stdout of a command after running its prerequisites, each only once."""
        if block.command in self._printed:
            return self._printed[block.command]
        command = block.words[0]
        for needed in NEEDS.get(command, ()):
            self.printed(next(other for other in BLOCKS if other.words[0] == needed))
        if command == "gate":
            self._commit_twice()
        words = [self._runs.get("profile", word) if _RUN.fullmatch(word) else word for word in block.words]
        plain = environment(COLUMNS="100", NO_COLOR="1", GIT_CEILING_DIRECTORIES=str(self.folder.parent))
        for name in [name for name in plain if name.startswith("FP8BENCH_")]:  # options of the tests
            del plain[name]
        done = subprocess.run(
            [*PROGRAM, *words], cwd=self.folder, env=plain, capture_output=True, text=True, check=False
        )
        assert done.returncode in (0, 1, 4), f"{shlex.join(words)} ended with {done.returncode}: {done.stderr[-2000:]}"
        if kept := re.search(r"-([0-9a-f]{8})/report\.html", done.stdout + done.stderr):
            self._runs[command] = kept[1]
        self._printed[block.command] = done.stdout
        return done.stdout

    def _commit_twice(self) -> None:
        git(self.folder, "init", "-q")
        for message in ("base", "head"):
            (self.folder / "notes.txt").write_text(message)
            git(self.folder, "add", ".")
            git(self.folder, "commit", "-q", "-m", message)


def shape_of(text: str) -> str:
    """Returns the words of a text, with placeholders for figures, runs, machines, their units and verdicts."""
    text = _RUN.sub("RUN", _MACHINE.sub("MACHINE ", _UNITS.sub(" UNITS", text)))
    return " ".join(_VERDICT.sub("VERDICT", _NUMBER.sub("N", text)).split())


def heads_of(lines: Sequence[str]) -> list[str]:
    """Returns the first word of each line that is not a continuation."""
    heads, before = [], ""
    for line in lines:
        goes_on = len(before) > _FOLDED_FROM and _indent(line) > _indent(before)
        if line.strip() and not goes_on:
            heads.append(shape_of(line).split(" ")[0])
        before = line
    return heads


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def missing_head(printed: str, shown: Sequence[str]) -> str:
    """Returns the first shown line's first word that no later output line starts with, or ''.

    Only first words are compared, as measured values also change other words of a line.
    """
    # A row below a long line may look like its continuation, so every printed line is a candidate.
    rest = iter([shape_of(line).split(" ")[0] for line in printed.splitlines() if line.strip()])
    heads = (head for piece in pieces_of(shown) for head in heads_of(piece))
    return next((head for head in heads if head not in rest), "")


def pieces_of(shown: Sequence[str]) -> list[list[str]]:
    """Splits shown lines at lines of dots."""
    pieces: list[list[str]] = [[]]
    for line in shown:
        if line.strip() == _DOTS:
            pieces.append([])
        else:
            pieces[-1].append(line)
    return [piece for piece in pieces if piece]


def missing_from(printed: str, shown: Sequence[str]) -> str:
    """Returns the shape of the first piece that is not in the output after the previous pieces; '' if all are."""
    rest = shape_of(printed)
    for piece in pieces_of(shown):
        words = shape_of("\n".join(piece))
        place = f" {rest} ".find(f" {words} ")
        if place < 0:
            return words
        rest = rest[place + len(words) :]
    return ""


def renewed(printed: str, shown: Sequence[str]) -> list[str]:
    """Returns the corrected lines: dots stay, and each piece is replaced by the output lines most similar to it.

    A line that differs only in figures is unchanged.
    """
    shapes = [shape_of(line) for line in shown]
    old = {shape: line for shape, line in zip(shapes, shown, strict=True) if shapes.count(shape) == 1}
    lines, begin = [old.get(shape_of(line), line) for line in printed.rstrip("\n").splitlines()], 0
    new: list[str] = []
    piece: list[str] = []
    for line in [*shown, _DOTS]:
        if line.strip() != _DOTS:
            piece.append(line)
            continue
        if piece:
            first = begin + _most_like(piece[0], lines[begin:])
            last = first + _most_like(piece[-1], lines[first:])
            new += lines[first : last + 1]
            begin, piece = last + 1, []
        new.append(line)
    return new[:-1]


def _most_like(line: str, lines: Sequence[str]) -> int:
    shape = shape_of(line)
    likeness = [difflib.SequenceMatcher(None, shape, shape_of(other)).ratio() for other in lines]
    return max(range(len(lines)), key=likeness.__getitem__)


def write_again(pages: Sequence[str], quick: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        project = Project(Path(folder))
        for block in BLOCKS:
            if block.page in pages and (block.is_quick or not quick):
                printed, path = project.printed(block), ROOT / block.page
                wrong = missing_from(printed, block.shown)
                sys.stdout.write(f"{block.name}: {'written again' if wrong else 'right'}\n")
                if wrong:
                    old, new = ("\n".join(lines) for lines in (block.shown, renewed(printed, block.shown)))
                    text = path.read_text(encoding="utf-8")
                    text = text.replace(f"$ {block.command}\n{old}\n", f"$ {block.command}\n{new}\n")
                    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    given = sys.argv[1:]
    write_again([word for word in given if word != "--quick"] or PAGES, "--quick" in given)
