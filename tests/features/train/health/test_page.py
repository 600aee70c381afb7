"""docs/health.md names every rule."""

from __future__ import annotations

import re
from pathlib import Path

from fp8bench.features.train.health.health import RULES

PAGE = Path(__file__).resolve().parents[4] / "docs" / "health.md"


def test_every_rule_is_named_once_and_no_other() -> None:
    lines = "\n".join(re.findall(r"^- \*\*(?:.|\n  )*", PAGE.read_text(), re.MULTILINE))
    assert re.findall("`([^`]+)`", lines) == [rule.name for rule in RULES]
