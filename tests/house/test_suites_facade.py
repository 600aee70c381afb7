"""`fp8bench.suites` is imported by users' files: each of its names and signatures is in a list.

For a change that CHANGELOG.md names, `python -m tests.house.test_suites_facade` rewrites the list.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from fp8bench import suites
from fp8bench.registry import Registry
from tests.house.sources import ROOT

LIST = Path(__file__).with_name("suites_facade.txt")
IMPORTED = re.compile(r"from (fp8bench[\w.]*) import ")


def surface() -> str:
    lines: list[str] = []
    for name in suites.__all__:
        lines.extend(lines_of(name, getattr(suites, name)))
    return "".join(f"{line}\n" for line in lines)


def lines_of(name: str, value: object) -> Iterator[str]:
    if isinstance(value, enum.EnumType):
        yield f"{name}: {', '.join(f'{one.name}={one.value}' for one in value)}"  # type: ignore[attr-defined]
    elif inspect.isclass(value):
        made = dataclasses.is_dataclass(value) or name == "Precision"
        yield f"{name}{inspect.signature(value) if made else getattr(value, '_fields', '')}"
        ours = [one for one in reversed(value.__mro__) if one.__module__.startswith("fp8bench")]
        members: dict[str, object] = {}
        for one in ours:
            members |= {**inspect.get_annotations(one), **vars(one)}
        fields = {one.name for one in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
        for member in sorted(set(members) - fields):
            if not member.startswith("_"):
                yield f"    {member}{told(members[member])}"
    elif inspect.isfunction(value):
        yield f"{name}{inspect.signature(value)}"
    else:
        yield name
        if isinstance(value, Registry):
            yield f"    register{told(type(value).register)}"


def told(member: object) -> str:
    return str(inspect.signature(member)) if inspect.isfunction(member) else ""


def test_the_facade_is_what_the_list_says() -> None:
    assert surface() == LIST.read_text()


def test_the_facade_brings_no_torch() -> None:
    program = "import sys, fp8bench.suites; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_pages_use_nothing_else() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    used = set(IMPORTED.findall("\n".join(page.read_text() for page in pages)))
    assert used <= {"fp8bench", "fp8bench.suites"}
    page = (ROOT / "docs" / "user-suites.md").read_text()
    assert [name for name in suites.__all__ if f"`{name}`" not in page] == []


if __name__ == "__main__":
    LIST.write_text(surface())
