"""A run in a notebook: short names of cases, and a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from fp8bench.model import Case, Finding
from fp8bench.report.elements import Code, Element, Facts, Field, Items, Page, Table, Text
from fp8bench.report.page.drawing.scale import escape
from fp8bench.report.panels import shared_params, show_params

_MOST_NAMED = 60


def short_names(cases: Sequence[Case]) -> dict[str, str]:
    """Ids by the shortest names that tell cases apart: the mode, and what else differs."""
    shared = {
        suite: shared_params([case.params for case in cases if case.workload == suite])
        for suite in dict.fromkeys(case.workload for case in cases)
    }
    several = len({case.device for case in cases}) > 1
    names = {}
    for case in cases:
        own = show_params(pair for pair in case.params if pair not in shared[case.workload])
        words = (case.mode, case.workload if len(shared) > 1 else "", own, case.device if several else "")
        names[" ".join(filter(None, words))] = case.id
    return names


class Findings(dict[str, Finding]):
    """Findings by short names ('bf16 shape=64'); a case's id works, too."""

    def __init__(self, findings: Mapping[str, Finding]) -> None:
        names = short_names([finding.case for finding in findings.values()])
        super().__init__({name: findings[case] for name, case in names.items()})
        self._by_id = findings

    def __missing__(self, name: str) -> Finding:
        if name in self._by_id:
            return self._by_id[name]
        raise KeyError(f"{name!r:.80} is no case. Give one of: {', '.join(list(self)[:_MOST_NAMED])}")


def as_html(page: Page, report: str = "") -> str:
    texts = [page.title, page.subtitle, *(f"{name}: {what}" for name, what in page.facts)]
    blocks = [f"<p>{escape(text)}</p>" for text in texts if text]
    for part in page.parts:
        blocks += [f"<h4>{escape(part.title)}</h4>"] if part.title else []
        blocks += [f"<p>{escape(part.lead)}</p>"] if part.lead else []
        blocks += map(_element_html, part.elements)
    if report:  # a relative address below the notebook's folder, which its server can show; else the file's
        address = Path(report).as_uri() if Path(report).is_absolute() else quote(report)
        blocks.append(f'<p><a href="{escape(address)}">{escape(report)}</a></p>')
    return "".join(blocks)


def _element_html(element: Element) -> str:
    match element:
        case Text():
            return f"<p>{escape(element.text)}</p>"
        case Items():
            return f"<ul>{''.join(f'<li>{escape(item.text)}</li>' for item in element.items)}</ul>"
        case Facts():
            return "".join(f"<p>{escape(name)}: {escape(what)}</p>" for name, what in element.pairs)
        case Code():
            return f"<pre>{escape(element.text)}</pre>"
        case Table():
            title = f"<p>{escape(element.caption)}</p>" if element.caption else ""
            return title + _grid([column.title for column in element.columns], element.rows)
    return ""  # charts are in the report


def _grid(titles: Sequence[str], rows: Iterable[Sequence[Field]]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(field.text)}</td>' for field in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{lines}</table>"
