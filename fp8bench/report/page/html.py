"""A page as one HTML file that loads nothing: style, script and drawings are in it.

Whatever comes from outside is escaped by the template (autoescape). The page forbids itself everything but its own
style and the one script whose hash it names, so that even markup that slipped through could neither run nor load.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import count

from fp8bench import units
from fp8bench.report.elements import Chart, Element, Field, Page, Part, Table, Tone
from fp8bench.report.page.charts import numbers_table

# A column with so many different texts at most can be filtered by choosing one of them.
_MOST_CHOICES = 12
# What has no place in HTML, however it is written: control characters, halves of surrogate pairs, non-characters.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True)
class _Column:
    """A column as the page shows it; `classes` by the tone of a field. `heads`: its fields name their rows."""

    place: int
    title: str
    hint: str
    unit: str
    number: bool
    by_value: bool
    heads: bool
    classes: Mapping[Tone, str]
    choices: tuple[str, ...]


@dataclass(frozen=True)
class _Sheet:
    """A table as the page shows it."""

    id: str
    columns: tuple[_Column, ...]
    rows: tuple[tuple[Field, ...], ...]
    main: bool


@dataclass(frozen=True)
class _Block:
    """An element with its id; a table has a sheet, a chart its drawing and the sheet of its numbers."""

    kind: str
    id: str
    element: Element
    sheet: _Sheet | None = None
    drawing: str = ""


@dataclass(frozen=True)
class _Section:
    """A part with its id."""

    id: str
    title: str
    lead: str
    blocks: tuple[_Block, ...]


def render(page: Page) -> str:
    """The file's text: the same page gives the same bytes."""
    import jinja2

    from fp8bench.report.page.drawing.draw import draw

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["sort_value"] = _sort_value
    ids = _Ids()
    script = _asset("script.js")
    text = environment.from_string(_asset("page.html.j2")).render(
        page=page,
        parts=[_section(part, ids, draw) for part in page.parts],
        style=_asset("style.css") + _asset("drawing", "charts.css"),
        script=script,
        policy=_policy(script),
    )
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text).lstrip()


def _policy(script: str) -> str:
    """What the page may do: be itself, and run this script."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


@cache
def _asset(*names: str) -> str:
    return files("fp8bench.report.page").joinpath(*names).read_text(encoding="utf-8")


class _Ids:
    """Ids of one page: words for links, each given once."""

    def __init__(self) -> None:
        self._taken = {"content", "contents", "tip"}

    def give(self, name: str) -> str:
        """The name as a word without blanks; with a number where another has it already."""
        word = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "part"
        candidates = (word if number == 1 else f"{word}-{number}" for number in count(1))
        chosen = next(one for one in candidates if one not in self._taken)
        self._taken.add(chosen)
        return chosen


def _section(part: Part, ids: _Ids, draw: Callable[[Chart], str]) -> _Section:
    own = ids.give(part.name)
    return _Section(own, part.title, part.lead, tuple(_blocks(part, ids, draw)))


def _blocks(part: Part, ids: _Ids, draw: Callable[[Chart], str]) -> Iterator[_Block]:
    for element in part.elements:
        kind = type(element).__name__
        if isinstance(element, Table):
            own = ids.give(element.name)
            yield _Block(kind, own, element, _sheet(element, own))
        elif isinstance(element, Chart):
            own = ids.give(element.name)
            numbers = _sheet(numbers_table(element), ids.give(f"{own}-numbers"))
            # Under the id, which no other chart has: what is inside a drawing is named after it.
            yield _Block(kind, own, element, numbers, draw(replace(element, name=own)))
        else:
            yield _Block(kind, "", element)


def _sheet(table: Table, own: str) -> _Sheet:
    columns = tuple(_column(table, place) for place in range(len(table.columns)))
    return _Sheet(own, columns, table.rows, table.main)


def _column(table: Table, place: int) -> _Column:
    column = table.columns[place]
    fields = [row[place] for row in table.rows]
    texts = tuple(dict.fromkeys(field.text for field in fields if field.text not in ("", units.NONE)))
    chosen_from = table.main and not column.number and 2 <= len(texts) <= _MOST_CHOICES and len(texts) < len(fields)
    words = {tone: "" if tone is Tone.PLAIN else tone.value for tone in Tone}
    return _Column(
        place=place,
        title=column.title,
        hint=column.hint,
        unit=column.unit,
        number=column.number,
        by_value=column.number or any(field.value is not None for field in fields),
        heads=place == 0 and not column.number,
        classes={tone: " ".join(filter(None, ("n" if column.number else "", word))) for tone, word in words.items()},
        choices=texts if chosen_from else (),
    )


def _sort_value(field: Field) -> str:
    """What the script sorts by, as JavaScript reads it; '' where the text says it or nothing does."""
    if field.value is None or math.isnan(field.value):
        return ""
    if math.isinf(field.value):
        return "Infinity" if field.value > 0 else "-Infinity"
    exact = repr(float(field.value)).removesuffix(".0")
    return "" if exact == field.text else exact
