"""A page as one HTML file that loads nothing: style, script and drawings are in it.

Whatever comes from outside is escaped by the template (autoescape). The page forbids itself everything but its own
style and the one script whose hash it names, so that even markup that slipped through could neither run nor load.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from importlib.resources import files
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from fp8bench import units
from fp8bench.model.codec import encode
from fp8bench.report.data.plain import json_line
from fp8bench.report.elements import AnyChart, Chart, Column, Element, Field, Lines, Page, Part, Scatter, Table
from fp8bench.report.page.charts import numbers_table
from fp8bench.report.page.drawing.draw import draw
from fp8bench.report.page.drawing.scale import FORBIDDEN, interval_bar, sparkline
from fp8bench.report.page.index import card_of

if TYPE_CHECKING:
    import jinja2

# A column with so many different texts at most can be filtered by choosing one of them.
_MOST_CHOICES = 12


class _Column(NamedTuple):
    column: Column
    by_value: bool
    choices: tuple[str, ...]


class _Sheet(NamedTuple):
    id: str
    table: Table
    columns: tuple[_Column, ...]


class _Block(NamedTuple):
    element: Element
    id: str = ""
    sheet: _Sheet | None = None
    drawing: str = ""


def render(page: Page) -> str:
    ids, order = _Ids(), _order(page)
    script = _asset("script.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = _template().render(
        page=page,
        card=json_line(encode(card_of(page))).strip(),
        parts=[(ids.give(part.name), part, tuple(_blocks(part, ids, draw, order))) for part in page.parts],
        style=_asset("style.css") + _asset("drawing", "charts.css"),
        script=script,
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'",
    )
    return FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text).lstrip()


@cache
def _template() -> jinja2.Template:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "sort_value": _sort_value, "kind": lambda element: type(element).__name__, "sparkline": sparkline,
        "marked": _marked, "interval_bar": lambda field: interval_bar(field.value, field.interval),
    }  # fmt: skip
    return environment.from_string(_asset("page.html.j2"))


@cache
def _asset(*names: str) -> str:
    return files("fp8bench.report.page").joinpath(*names).read_text(encoding="utf-8")


def charts_of(page: Page) -> dict[str, AnyChart]:
    """By the ids that they have on the page."""
    ids, order = _Ids(), _order(page)
    found: dict[str, AnyChart] = {}
    for part in page.parts:
        ids.give(part.name)
        blocks = _blocks(part, ids, lambda chart: "", order)
        found.update((block.id, block.element) for block in blocks if isinstance(block.element, Chart))
    return found


class _Ids:
    """Ids of one page: words for links, each given once."""

    def __init__(self) -> None:
        self._taken = {"content", "contents", "tip"}

    def give(self, name: str) -> str:
        word = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "part"
        candidates = (word if number == 1 else f"{word}-{number}" for number in count(1))
        chosen = next(candidate for candidate in candidates if candidate not in self._taken)
        self._taken.add(chosen)
        return chosen


def _order(page: Page) -> tuple[str, ...]:
    """Series of more than one chart."""
    charts = (element for part in page.parts for element in part.elements)
    found: Counter[str] = Counter()
    for chart in charts:
        if isinstance(chart, Lines):
            found.update(list(dict.fromkeys(name for name, _ in chart.series)))
        elif isinstance(chart, Scatter):
            found.update(list(dict.fromkeys(point.series for point in chart.points)))
    return tuple(name for name, count in found.items() if count > 1)


def _blocks(part: Part, ids: _Ids, draw: Callable[[AnyChart], str], order: tuple[str, ...]) -> Iterator[_Block]:
    for element in part.elements:
        if isinstance(element, Table):
            own = ids.give(element.name)
            yield _Block(element, own, _sheet(element, own))
        elif isinstance(element, Chart):
            own = ids.give(element.name)
            numbers = _sheet(numbers_table(element), ids.give(f"{own}-numbers"))
            # Under the id, which no other chart has: what is inside a drawing is named after it.
            ordered = replace(element, order=order)
            yield _Block(ordered, own, numbers, draw(replace(ordered, name=own)))
        else:
            yield _Block(element)


def _sheet(table: Table, own: str) -> _Sheet:
    columns = []
    for place, column in enumerate(table.columns):
        fields = [row[place] for row in table.rows]
        texts = tuple(dict.fromkeys(field.text for field in fields if field.text not in ("", units.NONE)))
        chosen_from = table.main and not column.number and 2 <= len(texts) <= _MOST_CHOICES and len(texts) < len(fields)
        by_value = column.number or any(field.value is not None for field in fields)
        columns.append(_Column(column, by_value, texts if chosen_from else ()))
    return _Sheet(own, table, tuple(columns))


def _marked(text: str) -> str:
    """A sentence with what is to be typed, `between such signs`, set as that."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))


def _sort_value(field: Field) -> str:
    """What the script sorts by, as JavaScript reads it; '' where the text says it or nothing does."""
    if field.value is None or math.isnan(field.value):
        return ""
    if math.isinf(field.value):
        return "Infinity" if field.value > 0 else "-Infinity"
    exact = repr(float(field.value)).removesuffix(".0")
    return "" if exact == field.text else exact
