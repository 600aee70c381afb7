"""A page as Markdown: markup characters in names are escaped."""

from __future__ import annotations

import re
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from fp8bench.report.elements import (
    Code,
    Column,
    Element,
    Field,
    NameValuePairs,
    Page,
    Part,
    Table,
    Text,
    TextList,
    Tone,
)
from fp8bench.report.page.markdown import render
from tests.counts import for_each
from tests.pages import NUISANCES, bars, hostile_page, whole_page

# A reader of the relevant part of GitHub's dialect.
REST = "<details><summary>The rest of the report</summary>"
MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])


def one(*elements: Element) -> str:
    """The Markdown of elements, without title and heading, unfolded."""
    text = render(Page("T", "", (Part("p", "P", elements),))).partition("## P\n\n")[2]
    return text.partition(f"{REST}\n\n")[2].removesuffix("\n\n</details>\n") + "\n" if REST in text else text


def read_back(text: str) -> list[str]:
    """The visible texts, block by block."""
    return [
        "".join(child.content for child in token.children or [])
        for token in MARKDOWN.parse(text)
        if token.type == "inline"
    ]


def test_elements() -> None:
    assert one(Text("plain"), Text("fast", Tone.GOOD), Text("slow", Tone.BAD), Text("?", Tone.DOUBT)) == (
        "plain\n\n\u25b2 fast\n\n\u25bc slow\n\n\u25cb ?\n"
    )
    assert one(Text("so", Tone.STRONG), TextList((Text("a"), Text("b", Tone.GOOD)))) == "**so**\n\n- a\n- \u25b2 b\n"
    assert one(NameValuePairs((("a", "b"), ("c", "d")))) == "| what | is |\n| --- | --- |\n| a | b |\n| c | d |\n"
    assert one(Code("fp8bench list\n")) == "```\nfp8bench list\n```\n"
    assert one(Code("a ``` b")) == "````\na ``` b\n````\n"
    columns = (Column("name"), Column("time", number=True))
    table = Table("t", "Times", columns, ((Field("a"), Field("1 ms", 0.001, Tone.STRONG)), (Field(""), Field("-"))))
    assert one(table) == "### Times\n\n| name | time |\n| --- | ---: |\n| a | **1 ms** |\n|  | - |\n"
    assert one(replace(table, rows=())) == "### Times\n\nNo rows.\n"
    assert render(Page("T", "", ())) == "# T\n\nThere is nothing to report.\n"


@for_each("rows", [1, 5, 60, 2000])
def test_a_pull_request_sees_few_lines(rows: int) -> None:
    """At most 25 before the fold, and no heading without its content."""
    text = render(whole_page(rows))
    seen, rest = text.split(REST)
    assert len(seen.splitlines()) + 1 <= 25 and rest.endswith("\n</details>\n")
    assert "One case was skipped" in seen and rest.startswith("\n\n## All cases")
    items = TextList(tuple(Text(f"number {n}") for n in range(40)))
    long = render(Page("T", "", (Part("p", "P", (items,)),)))
    seen, rest = long.split(REST)
    assert 20 <= len(seen.splitlines()) + 1 <= 25 and "- number 0\n" in seen
    assert seen.count("- number") + rest.count("- number") == 40, "a line is not repeated"


def test_charts_are_their_numbers() -> None:
    text = one(bars())
    assert text.startswith(
        "### Speed-up over bf16\n\nfp8 is the fastest everywhere, by 1.9x at width 1024.\n\n| group |"
    )
    assert text.count("\n|") == 2 + 6
    many = replace(bars(), groups=(("", bars().groups[0][1] * 9),))
    text = render(Page("T", "", (Part("p", "P", (many,)),)))
    assert text.count("|\n") == 2 + 25 + 2, "the header is repeated below the fold"
    assert text.endswith("\n\n2 more rows are left out here.\n\n</details>\n")


@for_each("name", NUISANCES)
def test_names_read_as_they_are(name: str) -> None:
    expected = re.sub(r"\s+", " ", name)
    table = Table("t", name, (Column(name), Column("b")), ((Field(name), Field("c")),))
    assert read_back(one(Text(name), TextList((Text(name),)), table)) == [expected] * 4 + ["b", expected, "c"]


def test_a_hostile_page_has_no_markup_of_its_own() -> None:
    tokens = MARKDOWN.parse(render(hostile_page()).replace(REST, "").replace("</details>", ""))
    marks = {kind.type for token in tokens for kind in (token, *(token.children or []))}
    assert not marks & {"html_block", "html_inline", "link_open", "image", "em_open", "code_inline", "s_open"}


@given(st.text("#+-=1.)(*_`~<>&[]|\\!: ab\n\r\t\u00e9$"))
def test_any_text_reads_as_it_is(text: str) -> None:
    """For any characters: one paragraph, one cell, one heading, with words in order."""
    expected = " ".join(text.split())
    assert read_back(one(Text(text))) == ([expected] if expected else [])
    table = Table("t", text, (Column("a"), Column("b")), ((Field(text), Field(text)),))
    assert read_back(one(table)) == [*([expected] if text else []), "a", "b", expected, expected]


def test_what_no_file_can_hold_is_left_out() -> None:
    text = one(Text("a\ud800b\x00c"), Code("x\x1by\tz"))
    assert text == "a b c\n\n```\nx y\tz\n```\n"
    text.encode()
