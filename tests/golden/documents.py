"""Many documents in one file, each section and line once, so that a change of words shows in one place.

In a file documents follow each other, each below its name. "%% section 4 of gemm.txt" stands for an equal section of
an earlier document, "%% 12 lines" for the next lines of the document's base (a page's base is its Markdown), and
"%% 12 lines, 3 on" for lines behind 3 that the document lacks. Nothing is lost: `load` returns what `save` was given.
"""

from __future__ import annotations

import difflib
import html
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

_NAME, _SAME = "######## ", "%% "
_SECTION_OF = re.compile(r"%% section (\d+) of (.+)")
_LINES_OF_BASE = re.compile(r"%% (\d+) lines?(?:, (-?\d+) on)?")
# Minimum characters of a section and of a line that are stored as references.
_SHORT_SECTION, _SHORT_LINE = 100, 20


def save(path: Path, documents: dict[str, str]) -> None:
    path.write_text("".join(f"{line}\n" for line in _encode(documents)), encoding="utf-8")


def load(path: Path) -> dict[str, str]:
    documents: dict[str, str] = {}
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for part in f"\n{text}".removesuffix("\n").split(f"\n{_NAME}")[1:]:
        name, *lines = part.split("\n")
        documents[name] = "\n".join(_decode(lines, _base_of(name, documents), documents))
    return documents


def changes(before: dict[str, str], now: dict[str, str]) -> str:
    """Each change once, below the names of the documents that contain it."""
    holders = defaultdict(list)
    for name in now:
        lines = difflib.unified_diff(before.get(name, "").split("\n"), now.get(name, "").split("\n"), n=0, lineterm="")
        for change in re.split(r"^@@.*\n", "\n".join([*lines][2:]), flags=re.MULTILINE)[1:]:
            holders[change.rstrip("\n")].append(name)
    return "\n".join(f"in {', '.join(names)}:\n{change}\n" for change, names in holders.items())


def _encode(documents: dict[str, str]) -> Iterator[str]:
    holders: dict[str, str] = {}
    for name, text in documents.items():
        if re.search(f"^({_NAME}|{_SAME})", text, re.MULTILINE):
            raise ValueError(f"{name} has a line that begins as a name or a reference does: choose other signs")
        yield _NAME + name
        folding = _Folding(_base_of(name, documents))
        for number, section in enumerate(_sections(text)):
            holder = holders.setdefault("\n".join(section), f"{_SAME}section {number} of {name}")
            if len("\n".join(section)) >= _SHORT_SECTION and not holder.endswith(f" of {name}"):
                yield from folding.end()
                yield holder
            else:
                yield from folding.fold(section)
        yield from folding.end()


def _decode(lines: list[str], base: list[str], documents: dict[str, str]) -> Iterator[str]:
    position = 0
    for line in lines:
        if match := _SECTION_OF.fullmatch(line):
            yield from _sections(documents[match[2]])[int(match[1])]
        elif match := _LINES_OF_BASE.fullmatch(line):
            first = position + int(match[2] or 0)
            position = first + int(match[1])
            yield from base[first:position]
        else:
            yield line


class _Folding:
    """Replaces lines that a document shares with its base in the same order."""

    def __init__(self, base: list[str]) -> None:
        self._base = base
        self._places = defaultdict(list)
        for place, line in enumerate(base):
            self._places[line].append(place)
        self._position, self._jump, self._count = 0, 0, 0

    def fold(self, lines: list[str]) -> Iterator[str]:
        for line in lines:
            place = self._place_of(line)
            if place != self._position:
                yield from self.end()
            if place is None:
                yield line
                continue
            if not self._count:
                self._jump = place - self._position
            self._count += 1
            self._position = place + 1

    def end(self) -> Iterator[str]:
        if self._count:
            jump = f", {self._jump} on" if self._jump else ""
            yield f"{_SAME}{self._count} line{'s' * (self._count > 1)}{jump}"
        self._count = 0

    def _place_of(self, line: str) -> int | None:
        if self._position < len(self._base) and self._base[self._position] == line and (self._count or line):
            return self._position
        if len(line) < _SHORT_LINE or line not in self._places:
            return None
        later = [place for place in self._places[line] if place >= self._position]
        return (later or self._places[line])[0]


def _base_of(name: str, documents: dict[str, str]) -> list[str]:
    """The lines that a document may share with another one of its run."""
    if name.endswith(".html"):
        lines = documents.get(f"{name.removesuffix('.html')}.md", "").split("\n")
        return [_unmarked(line) for line in lines if line and not line.startswith("| --- ")]
    return documents.get(name.replace("-all.", "."), "").split("\n") if "-all." in name else []


def _unmarked(line: str) -> str:
    """A line of Markdown as a page shows it."""
    line = re.sub(r"^(#+|-|\|) | \|$|\\(?=[\W_])", "", line).replace("\u25bc ", "").replace("\u25b2 ", "")
    return " ".join(html.unescape(line.replace(" | ", " ").replace("\u25cb ", "")).split())


def _sections(text: str) -> list[list[str]]:
    """Paragraphs; for Markdown and pages the parts below headings."""
    headed = text.startswith(("# ", "style and script"))
    sections: list[list[str]] = [[]]
    for line in text.split("\n"):
        if line.startswith(("## ", "== ")):
            sections.append([])
        sections[-1].append(line)
        if not line and not headed:
            sections.append([])
    return sections
