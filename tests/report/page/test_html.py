"""A page as one HTML file: sound, escaped, alone, the same each time, and readable in light and dark."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import fp8bench.report
from fp8bench.report.elements import Code, Column, Facts, Field, Page, Part, Table, Text, Tone
from fp8bench.report.page.html import render
from tests.counts import for_each
from tests.pages import LONG, NUISANCES, SCRIPT, charts, hostile_page, whole_page

FOLDER = Path(fp8bench.report.__file__).parent
VOID = {"br", "col", "hr", "img", "input", "link", "meta"}
PAGES = {
    "whole": whole_page(),
    "hostile": hostile_page(),
    "empty": Page("Nothing", "", ()),
    "no rows": Page("None", "", (Part("a", "A", (Table("t", "T", (Column("x"),), (), main=True),)),)),
}


class Strict(HTMLParser):
    """Raises where a tag is not closed, is closed twice, or an attribute or an id stands twice; keeps what it read."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[str, str]] = []
        self.ids: set[str] = set()
        self.feed(page)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), f"{tag} at {self.getpos()} has an attribute twice: {names}"
        found = {name: value or "" for name, value in attrs}
        if own := found.get("id"):
            assert own not in self.ids, f"two elements are {own}"
            self.ids.add(own)
        self.tags.append((tag, found))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> at {self.getpos()} closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def text_of(self, tag: str) -> str:
        return "".join(text for where, text in self.texts if where == tag)

    def values(self, name: str) -> list[str]:
        return [found[name] for _, found in self.tags if name in found]


@for_each("name", PAGES)
def test_a_page_is_sound_alone_and_the_same_again(name: str) -> None:
    """Every tag is closed in its turn, every id is one, and whatever refers to an id finds it.

    Whatever a name is made of, there is one script, whose hash the policy names, no handler, no style and no address.
    """
    page = render(PAGES[name])
    read, kinds = Strict(page), [tag for tag, _ in Strict(page).tags]
    assert page == render(PAGES[name]) and page.startswith("<!doctype html>\n<html lang=")
    targets = [link.removeprefix("#") for link in read.values("href") if link.startswith("#")]
    named = " ".join(read.values("aria-labelledby") + read.values("aria-describedby")).split()
    assert set(targets) | set(named) <= read.ids and kinds.count("h1") == kinds.count("script") == 1
    assert "alert(1)</script>" not in page
    assert not [name for _, found in read.tags for name in found if name.startswith("on")]
    body = page.partition("</style>")[2].partition("<script>")[0]
    assert not re.search(r"<[^>]*=(?!\"\")", re.sub(r'"[^"<>]*"', '""', body)), "an attribute without quotes"
    assert not [found for tag, found in read.tags if "src" in found or tag in ("iframe", "object", "embed", "base")]
    assert {link for link in read.values("href") if not link.startswith("#")} == {"data:,"}
    script = read.text_of("script")
    assert not re.search(r"url\(|@import|@font-face", read.text_of("style")) and "\r" not in script
    assert not re.search(r"fetch\(|XMLHttpRequest|WebSocket|import\(|sendBeacon|https?://", script)
    assert not re.search(r"https?://", page.replace("http://www.w3.org/", ""))
    policy = next(found["content"] for tag, found in read.tags if found.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def test_names_are_whole() -> None:
    """They come out as they went in, in texts and in hints, and nothing is cut."""
    read = Strict(render(hostile_page()))
    fields = [text for where, text in read.texts if where in ("td", "th")]
    for name in NUISANCES:
        assert name in fields and name in read.values("title") and name in read.text_of("code")
    assert read.text_of("h1") == SCRIPT + LONG


def test_what_no_file_can_hold_is_replaced() -> None:
    """Half a surrogate pair or a control character in a name does not stop a report from being written."""
    broken = render(Page("a\ud800b\x00c\x1b[31m", "", (Part("p", "P", (Text("x\uffffy"),)),)))
    assert "a\ufffdb\ufffdc\ufffd[31m" in broken and "x\ufffdy" in broken
    broken.encode()


def test_emptiness_is_said() -> None:
    assert "There is nothing to report." in render(PAGES["empty"])
    shown = render(PAGES["no rows"])
    assert "No rows." in shown and "<table" not in shown and 'class="tools"' not in shown


def _table(*rows: tuple[Field, ...], main: bool = True) -> str:
    columns = (Column("name"), Column("time", number=True, hint="best", unit="s"), Column("verdict"))
    return render(Page("t", "", (Part("p", "P", (Table("t", "T", columns, rows, main),)),)))


def test_fields() -> None:
    """A number has the value it sorts by where its text is not it; tones are classes, hints titles."""
    shown = _table(
        (Field("a"), Field("1.2 ms", 0.0012), Field("faster", tone=Tone.GOOD, hint='"so"')),
        (Field("b"), Field("inf", float("inf")), Field("unsure", tone=Tone.DOUBT)),
        (Field("c"), Field("nan", float("nan")), Field("-")),
        (Field("d"), Field("2.5", 2.5, tone=Tone.BAD), Field("")),
    )
    for expected in (
        '<th scope="row">a</th><td class="n" data-value="0.0012">1.2 ms</td><td class="good" title="&#34;so&#34;">',
        '<td class="n" data-value="Infinity">inf</td><td class="doubt">unsure</td></tr>',
        '<td class="n">nan</td><td>-</td></tr>',
        '<td class="n bad">2.5</td><td></td></tr>',
        '<th scope="col" class="n" data-sort="number" data-unit="s" title="best">time</th>',
    ):
        assert expected in shown


def test_choices() -> None:
    """A column of few different texts can be chosen from, in the order they are met; one of names cannot."""
    rows = [(Field(f"case {index}"), Field("1"), Field(word)) for index, word in enumerate("bbaab-")]
    read = Strict(_table(*rows))
    assert [found["data-column"] for tag, found in read.tags if tag == "select"] == ["2"]
    assert read.text_of("option") == "allba"
    assert "select" not in [tag for tag, _ in Strict(_table(*rows, main=False)).tags]


def test_ids_are_words_of_their_own() -> None:
    """Two tables of one name have two anchors; so have their drawings."""
    two = Part("Speed of <all>", "S", (*charts()[:1], *charts()[:1], Code("x"), Facts((("a", "b"),))))
    read = Strict(render(Page("t", "", (two, two))))
    expected = {"speed-of-all", "speed-of-all-2", *(f"speed-up{end}" for end in ("", "-2", "-3", "-4"))}
    assert expected <= read.ids


def test_pages_are_light() -> None:
    """2,000 rows of 14 columns stay under 2.5 MB, 60 under 0.3 MB; style and script are paid by every report."""
    assert len(render(whole_page(2000)).encode()) < 2_500_000
    assert len(render(whole_page(60)).encode()) < 300_000
    sizes = {name: len((FOLDER / "page" / name).read_bytes()) for name in ("style.css", "script.js")}
    assert sizes["style.css"] < 12_500 and sizes["script.js"] < 10_000, sizes
