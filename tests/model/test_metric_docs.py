"""The tables of figures in the docs are those of the specs.

`python -m tests.model.test_metric_docs` writes them anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from fp8bench import units
from fp8bench.model import CELL_PHASES
from fp8bench.model.specs import METRICS, Better, MetricSpec, Rank
from fp8bench.report.panels import together
from fp8bench.store.series import UNITS

DOCS = Path(__file__).resolve().parents[2] / "docs"
_DEFAULT = MetricSpec("anything else").threshold


def of_outputs() -> Iterator[tuple[str, ...]]:
    """What rows a run has, and what they are of."""
    yield "metric", "unit", ""
    told = [spec for spec in METRICS.values() if spec.rank is not Rank.RESTATED]
    for words, alike in together(((one.unit, one.description + _more(one)), one) for one in told).items():
        yield _names(alike), words[0] or "none", words[1]


def of_history() -> Iterator[tuple[str, ...]]:
    """What is tracked; lower is better."""
    yield "metric", "unit", "what it is"
    rows = {}
    for one in METRICS.values():
        phase = one.kept_where if one.kept_where in CELL_PHASES else "\0"
        words = one.history or one.description * (one.of_workload and one.better is Better.LOWER)
        rows[one.replace(phase, "<phase>")] = one, words.replace(f"the {phase}", "that")
    for name, (one, words) in rows.items():
        if words:
            sure = "; exact, so that any change alarms" if one.counted else ""
            unit = units.RATIO if one.unit == "x" else UNITS.get(one.unit, one.unit)
            yield f"`track_{_shown(name)}`", unit, words + sure + _more(one)


def of_gate() -> Iterator[tuple[str, ...]]:
    """From which change on a figure is worse."""
    yield "figure", "relative", "smallest"
    known = together((one.threshold, one) for one in METRICS.values() if one.threshold != _DEFAULT)
    for (relative, smallest), alike in known.items():
        phases = [one.kept_where if one.kept_where in CELL_PHASES else "\0" for one in alike]
        names = dict.fromkeys(one.replace(phase, "<phase>") for one, phase in zip(alike, phases, strict=True))
        sure = ": counted, so that one more fails, without a second check" if alike[0].counted else ""
        yield _names(names), f"{100 * relative:g}%", (units.shown(smallest, alike[0].unit) if smallest else "0") + sure
    yield "anything else", f"{100 * _DEFAULT[0]:g}%", "0"


PAGES = {"outputs.md": of_outputs, "history.md": of_history, "gate.md": of_gate}


def _names(alike: Iterable[str]) -> str:
    return ", ".join(f"`{_shown(one)}`" for one in alike)


def _shown(name: str) -> str:
    """'..._error', 'share_above_...'."""
    return name.replace("*", "..." if name.startswith("*") else "FORMAT")


def _more(one: MetricSpec) -> str:
    page = one.page.partition("#")[0]
    return f" ([{page}]({one.page}))" if page and page != "outputs.md" else ""


def page_of(name: str) -> str:
    """The page with the tables of the specs as they are."""
    heading, *rows = PAGES[name]()
    lines = [heading, ("---",) * len(heading), *rows]
    table = "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines)
    text = (DOCS / name).read_text(encoding="utf-8")
    return re.sub(r"(?s)(<!-- metrics -->\n).*?(<!-- end -->)", lambda found: f"{found[1]}{table}\n{found[2]}", text)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_the_tables_of_the_specs(name: str) -> None:
    """As `python -m tests.model.test_metric_docs` writes them."""
    assert (DOCS / name).read_text(encoding="utf-8") == page_of(name)


if __name__ == "__main__":
    for page in PAGES:
        (DOCS / page).write_text(page_of(page), encoding="utf-8")
