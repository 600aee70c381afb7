"""Shows a run in a notebook: short names of cases, and its page as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from fp8bench.model import Case, Finding
from fp8bench.report.elements import Code, Element, NameValuePairs, Page, Table, Text, TextList
from fp8bench.report.page.drawing.scale import escape
from fp8bench.report.panels import FindingsById, format_case_params, join_parts, shared_params, together

# An error message lists at most this many case names, because more would fill the notebook's cell.
_MAX_NAMED_CASES = 60


def short_names(cases: Sequence[Case]) -> dict[str, str]:
    """Returns the ids of cases by short names. A short name is the mode, followed by the suite, parameters and device
    that differ between cases.
    """
    params_by_suite = together((case.workload, case.params) for case in cases)
    # Parameters that all cases of a suite share do not distinguish its cases.
    shared_params_by_suite = {suite: shared_params(params) for suite, params in params_by_suite.items()}
    has_devices = len({case.device for case in cases}) > 1
    id_by_name = {}
    for case in cases:
        params = format_case_params(pair for pair in case.params if pair not in shared_params_by_suite[case.workload])
        suite = case.workload if len(shared_params_by_suite) > 1 else ""
        short_name = join_parts(case.mode, suite, params, case.device if has_devices else "", separator=" ")
        id_by_name[short_name] = case.id
    return id_by_name


class Findings(dict[str, Finding]):
    """The findings (verdict and figures) of cases by short names, as 'bf16 shape=64'. The full id of a case works as
    well.
    """

    def __init__(self, findings: FindingsById) -> None:
        names = short_names([finding.case for finding in findings.values()])
        super().__init__({name: findings[case] for name, case in names.items()})
        self._by_id = findings

    def __missing__(self, name: str) -> Finding:
        # Scripts for older versions look up findings by the id of the case.
        if name in self._by_id:
            return self._by_id[name]
        raise KeyError(f"{name!r:.80} is not a case. Give one of: {', '.join(list(self)[:_MAX_NAMED_CASES])}")


def page_as_html(page: Page, report_path: str = "") -> str:
    header_texts = [page.title, page.subtitle, *(f"{name}: {fact}" for name, fact in page.facts)]
    blocks = [f"<p>{escape(text)}</p>" for text in header_texts if text]
    for part in page.parts:
        if part.title:
            blocks.append(f"<h4>{escape(part.title)}</h4>")
        if part.lead:
            blocks.append(f"<p>{escape(part.lead)}</p>")
        blocks += map(_element_html, part.elements)
    if report_path:  # a notebook server can open a relative address, but an absolute path needs file://
        address = Path(report_path).as_uri() if Path(report_path).is_absolute() else quote(report_path)
        blocks.append(f'<p><a href="{escape(address)}">{escape(report_path)}</a></p>')
    return "".join(blocks)


def _element_html(element: Element) -> str:
    match element:
        case Text():
            return f"<p>{escape(element.text)}</p>"
        case TextList():
            items = "".join(f"<li>{escape(item.text)}</li>" for item in element.items)
            return f"<ul>{items}</ul>"
        case NameValuePairs():
            return "".join(f"<p>{escape(name)}: {escape(fact)}</p>" for name, fact in element.pairs)
        case Code():
            return f"<pre>{escape(element.text)}</pre>"
        case Table():
            title = f"<p>{escape(element.caption)}</p>" if element.caption else ""
            header_row = _row_html("th", [column.title for column in element.columns])
            rows = ""
            for row in element.rows:
                rows += _row_html("td", [field.text for field in row])
            return f"{title}<table>{header_row}{rows}</table>"
    return ""  # a notebook shows no charts, only the report does


def _row_html(tag: str, texts: Sequence[str]) -> str:
    cells_html = "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)
    return f"<tr>{cells_html}</tr>"
