"""A page as one HTML file: sound, escaped, alone, the same each time, light and dark; and the page of all reports."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import fp8bench.report
from fp8bench.jobs.report_files import INDEX_FILE_NAME, PAGE_NAME, ReportDestinations, _write_page
from fp8bench.report.elements import Code, Column, Field, NameValuePairs, Page, Part, Table, Text, TextList, Tone
from fp8bench.report.page.html import CardVerdictLine, make_page_card, read_page_card, render
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
    """Raises if a tag is not closed or closed twice, or an attribute or id repeats; keeps what it read."""

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
        attributes = {name: value or "" for name, value in attrs}
        if own := attributes.get("id"):
            assert own not in self.ids, f"two elements are {own}"
            self.ids.add(own)
        self.tags.append((tag, attributes))
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
        return [attributes[name] for _, attributes in self.tags if name in attributes]


@for_each("name", PAGES)
def test_a_page_is_sound_alone_and_the_same_again(name: str) -> None:
    """Tags nest, ids are unique and references resolve; the policy names the hash of the only script."""
    page = render(PAGES[name])
    read, kinds = Strict(page), [tag for tag, _ in Strict(page).tags]
    assert page == render(PAGES[name]) and page.startswith("<!doctype html>\n<html lang=")
    targets = [link.removeprefix("#") for link in read.values("href") if link.startswith("#")]
    named = " ".join(read.values("aria-labelledby") + read.values("aria-describedby")).split()
    assert set(targets) | set(named) <= read.ids and kinds.count("h1") == kinds.count("script") == 1
    assert "alert(1)</script>" not in page
    assert not [name for _, attributes in read.tags for name in attributes if name.startswith("on")]
    body = page.partition("</style>")[2].partition("<script>")[0]
    assert not re.search(r"<[^>]*=(?!\"\")", re.sub(r'"[^"<>]*"', '""', body)), "an attribute without quotes"
    assert not [
        attributes
        for tag, attributes in read.tags
        if "src" in attributes or tag in ("iframe", "object", "embed", "base")
    ]
    assert {link for link in read.values("href") if not link.startswith("#")} == {"data:,"}
    script = read.text_of("script")
    assert not re.search(r"url\(|@import|@font-face", read.text_of("style")) and "\r" not in script
    assert not re.search(r"fetch\(|XMLHttpRequest|WebSocket|import\(|sendBeacon|https?://", script)
    assert not re.search(r"https?://", page.replace("http://www.w3.org/", ""))
    policy = next(
        attributes["content"]
        for tag, attributes in read.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def test_names_are_whole() -> None:
    read = Strict(render(hostile_page()))
    fields = [text for where, text in read.texts if where in ("td", "th")]
    for name in NUISANCES:
        assert name in fields and name in read.values("title") and name in read.text_of("code")
    assert read.text_of("h1") == SCRIPT + LONG


def test_what_no_file_can_hold_is_replaced() -> None:
    """Half a surrogate pair or a control character in a name does not stop a report."""
    broken = render(Page("a\ud800b\x00c\x1b[31m", "", (Part("p", "P", (Text("x\uffffy"),)),)))
    assert "a\ufffdb\ufffdc\ufffd[31m" in broken and "x\ufffdy" in broken
    broken.encode()


def _table(*rows: tuple[Field, ...], main: bool = True) -> str:
    columns = (Column("name"), Column("time", number=True, hint="best", unit="s"), Column("verdict"))
    return render(Page("t", "", (Part("p", "P", (Table("t", "T", columns, rows, main),)),)))


def test_fields() -> None:
    shown = _table(
        (Field("a"), Field("1.2 ms", 0.0012), Field("faster", tone=Tone.GOOD)),
        (Field("b"), Field("inf", float("inf")), Field("unsure", tone=Tone.DOUBT)),
        (Field("c"), Field("nan", float("nan")), Field("-")),
        (Field("d"), Field("2.5", 2.5, tone=Tone.BAD), Field("")),
    )
    for expected in (
        '<th scope="row">a</th><td class="n" data-value="0.0012">1.2 ms</td><td class="good">faster</td></tr>',
        '<td class="n" data-value="Infinity">inf</td><td class="doubt">unsure</td></tr>',
        '<td class="n">nan</td><td>-</td></tr>',
        '<td class="n bad">2.5</td><td></td></tr>',
        '<th scope="col" class="n" data-sort="number" data-unit="s" title="best">time</th>',
    ):
        assert expected in shown


def test_ids_are_words_of_their_own() -> None:
    two = Part("Speed of <all>", "S", (*charts()[:1], *charts()[:1], Code("x"), NameValuePairs((("a", "b"),))))
    read = Strict(render(Page("t", "", (two, two))))
    expected = {"speed-of-all", "speed-of-all-2", *(f"speed-up{end}" for end in ("", "-2", "-3", "-4"))}
    assert expected <= read.ids


HOSTILE = '"><script>alert(1)</script> & <b>\u202e'
COLUMNS = (Column("setting"), Column("case"), Column("verdict"))
TOLD = Table(
    "a", "", COLUMNS, ((Field("m=64"), Field("bf16"), Field("slower")), (Field(""), Field("fp8"), Field("unsure")))
)
PAGE_OF_RUN = Page(
    f"gemm {HOSTILE}",
    "2026-11-26 06:38 UTC, commit 08bd5754, box",
    (Part("verdict", "Verdict", (TOLD,)),),
)


def reported(reports: Path, name: str, page: Page) -> str:
    _write_page(page, ((), ()), reports / name, ReportDestinations())
    return (reports / INDEX_FILE_NAME).read_text()


def test_a_page_gives_back_the_card_it_was_made_with() -> None:
    card = read_page_card(render(PAGE_OF_RUN))
    assert card == make_page_card(PAGE_OF_RUN)
    assert card is not None
    assert card.answers == (CardVerdictLine("bf16", "slower"), CardVerdictLine("fp8", "unsure"))
    said = replace(PAGE_OF_RUN, parts=(Part("a", "A", (Text("fp8 learns as bf16 does."),)),))
    assert make_page_card(said).answers == (CardVerdictLine("", "fp8 learns as bf16 does."),)


def test_reports_are_listed_newest_first_and_link_to_their_pages(tmp_path: Path) -> None:
    reported(tmp_path, "20261125T060000.000Z-08bd5754-aaaaaaaa", replace(PAGE_OF_RUN, title="older"))
    index = reported(tmp_path, "20261126T060000.000Z-08bd5754-bbbbbbbb", replace(PAGE_OF_RUN, title="newer"))
    assert index.index("newer") < index.index("older")
    for link in re.findall(r'<a href="(2026[^"]*)"', index):
        assert (tmp_path / link).is_file()
    assert "2026-11-26 06:00" in index
    assert "bf16 slower; fp8 unsure" in index


def test_the_index_has_every_answer_and_a_date(tmp_path: Path) -> None:
    """The folder of a stream has no time, so the index has the time when its page was written."""
    answers = TextList((Text("bf16: cannot tell, 0.99x; memory +1.1%;\nwhy"), Text("fp8: speed unknown; memory +2.2%")))
    run = Page("gemm", "", (Part("verdict", "", (Text("cuda:0", Tone.STRONG), answers)),), remark="noisy")
    index = reported(tmp_path, "watched-train-1", run)
    assert "<td>bf16: cannot tell, 0.99x; fp8: speed unknown (noisy)</td>" in index
    assert re.search(r'<th scope="row">20\d\d-\d\d-\d\d \d\d:\d\d</th>', index)


def test_what_is_no_report_is_counted_and_nobodys_words_are_obeyed(tmp_path: Path) -> None:
    for name, text in (
        ("old", "<title>an older version's</title>"),
        ("cut", ""),
        ("odd", '<meta name="fp8bench" content="['),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / PAGE_NAME).write_text(text)
    for number, content in enumerate(("[]", "{&#34;kind&#34;:1}", "[" * 9000)):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / PAGE_NAME).write_text(f'<meta name="fp8bench" content="{content}">')
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    index = reported(tmp_path, 'a b"#%', PAGE_OF_RUN)
    assert "<script>alert" not in index
    assert 'href="a%20b%22%23%25/report.html"' in index
    assert "Not listed: 6 older reports in the same folder" in index
