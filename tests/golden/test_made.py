"""Each document of what is made of runs by hand has its test (tests/told_before.py)."""

from __future__ import annotations

import re
from pathlib import Path

from tests.told_before import MADE


def test_no_document_is_left_over() -> None:
    sources = (path.read_text(encoding="utf-8") for path in Path(__file__).resolve().parents[1].rglob("test_*.py"))
    names = [name for text in sources for name in re.findall(r"^@as_before\ndef test_(\w+)", text, re.MULTILINE)]
    assert sorted(names) == sorted(path.stem for path in MADE.iterdir())
