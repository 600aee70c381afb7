"""The page of all reports: made of what each report says of itself, whatever stands there."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from fp8bench.jobs.report_files import INDEX, PAGE, Pages, _written
from fp8bench.report.elements import Column, Field, Page, Part, Table, Text, Verdicts
from fp8bench.report.page.html import CardAnswer, ListedReport, card_of, index_page, read_card, render

HOSTILE = '"><script>alert(1)</script> & <b>\u202e'
PAGE_OF_RUN = Page(
    f"gemm {HOSTILE}", "2026-11-26 06:38 UTC, commit 08bd5754, box",
    (Part("verdict", "Verdict", (
        Verdicts(("speed", "error"), (("bf16", (Field("slower", 0.5), Field("small"))), ("fp8", (Field("emulated"),)))),
    )),),
    command="fp8bench suite gemm",
)  # fmt: skip


def reported(reports: Path, name: str, page: Page) -> str:
    _written(page, ((), ()), reports / name, Pages())
    return (reports / INDEX).read_text()


def trends(index: str) -> list[int]:
    return [len(points.split()) for points in re.findall(r'<polyline [^>]*points="([^"]*)"', index)]


def test_a_page_gives_back_the_card_it_was_made_with() -> None:
    card = read_card(render(PAGE_OF_RUN))
    assert card == card_of(PAGE_OF_RUN)
    assert card is not None
    assert card.answers == (CardAnswer("bf16", "slower", 0.5), CardAnswer("fp8", "emulated"))
    said = replace(PAGE_OF_RUN, parts=(Part("a", "A", (Text("fp8 learns as bf16 does."),)),))
    assert card_of(said).answers == (CardAnswer("", "fp8 learns as bf16 does."),)
    columns = (Column("setting"), Column("case"), Column("verdict"))
    told = Table("a", "", columns, ((Field("m=64"), Field("fp32"), Field("unsure")),))
    assert card_of(replace(said, parts=(Part("a", "", (told,)),))).answers == (CardAnswer("fp32", "unsure"),)


def test_reports_are_listed_newest_first_and_link_to_their_pages(tmp_path: Path) -> None:
    reported(tmp_path, "20261125T060000.000Z-08bd5754-aaaaaaaa", replace(PAGE_OF_RUN, title="older"))
    index = reported(tmp_path, "20261126T060000.000Z-08bd5754-bbbbbbbb", replace(PAGE_OF_RUN, title="newer"))
    assert index.index("newer") < index.index("older")
    for link in re.findall(r'<a href="(2026[^"]*)"', index):
        assert (tmp_path / link).is_file()
    assert "2026-11-26 06:00" in index
    assert "bf16 slower, fp8 emulated" in index


def test_speed_ups_of_another_command_are_not_drawn_behind_one(tmp_path: Path) -> None:
    other = replace(PAGE_OF_RUN, command="fp8bench suite gemm --set m=64")
    for number, page in enumerate((PAGE_OF_RUN, other, PAGE_OF_RUN, PAGE_OF_RUN)):
        index = reported(tmp_path, f"2026112{number}T060000.000Z-08bd5754-aaaaaaa{number}", page)
    assert trends(index) == [3, 2]  # nothing is drawn of one


def test_what_is_no_report_is_counted_and_nobodys_words_are_obeyed(tmp_path: Path) -> None:
    for name, text in (
        ("old", "<title>an older version's</title>"),
        ("cut", ""),
        ("odd", '<meta name="fp8bench" content="['),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / PAGE).write_text(text)
    for number, content in enumerate(("[]", "{&#34;kind&#34;:1}", "[" * 9000)):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / PAGE).write_text(f'<meta name="fp8bench" content="{content}">')
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    index = reported(tmp_path, 'a b"#%', PAGE_OF_RUN)
    assert "<script>alert" not in index
    assert 'href="a%20b%22%23%25/report.html"' in index
    assert "6 older reports in the same folder: not listed" in index


def test_numbers_that_are_none_draw_nothing() -> None:
    card = replace(card_of(PAGE_OF_RUN), answers=(CardAnswer("bf16", "slower", float("nan")),))
    assert "<svg" not in render(index_page([ListedReport(card, "a", "")]))


def strip(interval: tuple[float, float] | None) -> str:
    field = Field("slower", 0.5, hint="0.500x [0.480, 0.520]", interval=interval)
    return render(Page("a", "", (Part("verdict", "Verdict", (Verdicts(("speed",), (("bf16", (field,)),)),)),)))


def test_a_ratio_alone_is_drawn_with_its_interval_beside_1() -> None:
    found = re.search(r"M([\d.]+) 0V.*?M([\d.]+) 7H([\d.]+)M", strip((0.48, 0.52)))
    assert found is not None
    one, low, high = map(float, found.groups())
    assert low < high < one
    for odd in (None, (0.0, 0.5), (0.6, 0.5), (0.5, float("inf"))):
        assert "<path" not in strip(odd)
