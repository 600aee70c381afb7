"""Many documents in one file, with each long section once, so that a change of words shows in one place.

In a file documents follow each other, each below its name. "%% section 4 of gemm.txt" stands for an equal section of
an earlier document. `load` returns what `save` was given.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

_NAME, _SAME = "######## ", "%% "
_SECTION_OF = re.compile(r"%% section (\d+) of (.+)")
# A section with fewer characters is written again.
_MIN_CHARACTERS = 100


def save(path: Path, documents: dict[str, str]) -> None:
    path.write_text("".join(f"{line}\n" for line in _encode(documents)), encoding="utf-8")


def load(path: Path) -> dict[str, str]:
    documents: dict[str, str] = {}
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for part in f"\n{text}".removesuffix("\n").split(f"\n{_NAME}")[1:]:
        name, *stored_lines = part.split("\n")
        lines: list[str] = []
        for line in stored_lines:
            match = _SECTION_OF.fullmatch(line)
            lines += _sections(documents[match[2]])[int(match[1])] if match else [line]
        documents[name] = "\n".join(lines)
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
    first_places: dict[str, str] = {}
    for name, text in documents.items():
        if re.search(f"^({_NAME}|{_SAME})", text, re.MULTILINE):
            raise ValueError(f"{name} has a line that begins as a name or a reference does: choose other signs")
        yield _NAME + name
        for number, lines in enumerate(_sections(text)):
            section = "\n".join(lines)
            place = first_places.setdefault(section, f"{_SAME}section {number} of {name}")
            is_repeated = len(section) >= _MIN_CHARACTERS and not place.endswith(f" of {name}")
            yield from [place] if is_repeated else lines


def _sections(text: str) -> list[list[str]]:
    """Paragraphs; for Markdown the parts below headings."""
    sections: list[list[str]] = [[]]
    for line in text.split("\n"):
        if line.startswith(("## ", "== ")):
            sections.append([])
        sections[-1].append(line)
        if not line and not text.startswith("# "):
            sections.append([])
    return sections
