"""docs/health.md says of every rule what the class says: what it looks at, and where it alarms."""

from __future__ import annotations

from pathlib import Path

from fp8bench.features.train.health.health import RULES

PAGE = Path(__file__).resolve().parents[4] / "docs" / "health.md"


def table() -> list[str]:
    """The rows of the page's table, from the classes; `python -m tests.features.train.health.test_page` prints them."""
    cells = ((f"`{rule.name}`", rule.window, rule.threshold) for rule in RULES)
    return [f"| {' | '.join(row)} |" for row in cells]


def test_the_table_is_that_of_the_classes() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert rows == table()


if __name__ == "__main__":
    print("\n".join(table()))
