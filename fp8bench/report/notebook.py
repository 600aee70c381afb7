"""A run in a notebook: short names of cases, and a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from fp8bench.model import Case, Finding
from fp8bench.report.elements import Code, Element, Facts, Items, Page, Table, Text
from fp8bench.report.page.drawing.scale import escape
from fp8bench.report.panels import FindingsById, join_parts, shared_params, show_params, together

# More names would fill the notebook's cell.
_MOST_NAMED = 60


def short_names(cases: Sequence[Case]) -> dict[str, str]:
    """Returns ids by the shortest names that distinguish cases: the mode, and what else differs."""
    params_by_suite = together((case.workload, case.params) for case in cases)
    # Parameters that all cases of a suite share do not distinguish them.
    shared = {suite: shared_params(params) for suite, params in params_by_suite.items()}
    has_devices = len({case.device for case in cases}) > 1
    names = {}
    for case in cases:
        params = show_params(pair for pair in case.params if pair not in shared[case.workload])
        suite = case.workload if len(shared) > 1 else ""
        name = join_parts(case.mode, suite, params, case.device if has_devices else "", by=" ")
        names[name] = case.id
    return names


class Findings(dict[str, Finding]):
    """Findings by short names, as 'bf16 shape=64', or by the id of a case."""

    def __init__(self, findings: FindingsById) -> None:
        names = short_names([finding.case for finding in findings.values()])
        super().__init__({name: findings[case] for name, case in names.items()})
        self._by_id = findings

    def __missing__(self, name: str) -> Finding:
        # Older scripts use ids.
        if name in self._by_id:
            return self._by_id[name]
        raise KeyError(f"{name!r:.80} is not a case. Give one of: {', '.join(list(self)[:_MOST_NAMED])}")


def as_html(page: Page, report: str = "") -> str:
    texts = [page.title, page.subtitle, *(f"{name}: {fact}" for name, fact in page.facts)]
    blocks = [f"<p>{escape(text)}</p>" for text in texts if text]
    for part in page.parts:
        if part.title:
            blocks.append(f"<h4>{escape(part.title)}</h4>")
        if part.lead:
            blocks.append(f"<p>{escape(part.lead)}</p>")
        blocks += map(_element_html, part.elements)
    if report:  # a relative address below the notebook's folder, which its server can show; otherwise the file's
        address = Path(report).as_uri() if Path(report).is_absolute() else quote(report)
        blocks.append(f'<p><a href="{escape(address)}">{escape(report)}</a></p>')
    return "".join(blocks)


def _element_html(element: Element) -> str:
    match element:
        case Text():
            return f"<p>{escape(element.text)}</p>"
        case Items():
            items = "".join(f"<li>{escape(item.text)}</li>" for item in element.items)
            return f"<ul>{items}</ul>"
        case Facts():
            return "".join(f"<p>{escape(name)}: {escape(fact)}</p>" for name, fact in element.pairs)
        case Code():
            return f"<pre>{escape(element.text)}</pre>"
        case Table():
            title = f"<p>{escape(element.caption)}</p>" if element.caption else ""
            head = _row_html("th", [column.title for column in element.columns])
            rows = "".join(_row_html("td", [field.text for field in row]) for row in element.rows)
            return f"{title}<table>{head}{rows}</table>"
    return ""  # charts are in the report


def _row_html(tag: str, texts: Sequence[str]) -> str:
    cells = "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)
    return f"<tr>{cells}</tr>"
