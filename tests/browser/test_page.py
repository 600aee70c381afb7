"""The page as a person has it before them: in a real browser, by pointer and by keyboard."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest

from tests.browser.chromium import Tab
from tests.browser.conftest import Open

ROWS = "[...document.querySelectorAll('#table tbody tr')].filter((row) => !row.hidden)"


def place_of(tab: Tab, title: str) -> int:
    titles: list[str] = tab.run("[...document.querySelectorAll('#table thead th')].map((one) => one.textContent)")
    return titles.index(title)


def column(tab: Tab, title: str, what: str = "textContent.trim()") -> list[Any]:
    """The displayed cells of a column of the main table, from top to bottom."""
    return list(tab.run(f"{ROWS}.map((row) => row.cells[{place_of(tab, title)}].{what})"))


def head(tab: Tab, title: str) -> str:
    """Selector of the button in a column header."""
    return f"#table thead th:nth-child({place_of(tab, title) + 1}) button"


def sorts(tab: Tab) -> list[str]:
    return list(
        tab.run("[...document.querySelectorAll('#table [aria-sort]')].map((o) => o.textContent + ' ' + o.ariaSort)")
    )


def count(tab: Tab) -> str:
    return str(tab.run("document.querySelector('#table output').textContent"))


def find(tab: Tab, text: str) -> None:
    tab.run("(() => { const find = document.querySelector('#table input'); find.focus(); find.select(); })()")
    tab.write(text)


def tip(tab: Tab) -> str | None:
    shown: str | None = tab.run(
        "document.querySelector('#tip').hidden ? null : document.querySelector('#tip').textContent"
    )
    return shown


def test_numbers_sort_by_value(show: Open) -> None:
    tab = show()
    before = column(tab, "best")
    for direction in ("ascending", "descending"):
        tab.click(head(tab, "best"))
        values = column(tab, "best", "dataset.value ?? null")
        known = [float(value) for value in values[:52]]
        assert known == sorted(known, reverse=direction == "descending") and values[52:] == [None] * 8
        assert sorts(tab) == [f"best {direction}"]
    tab.click(head(tab, "best"))
    assert column(tab, "best") == before and sorts(tab) == []


def test_filtering(show: Open) -> None:
    tab = show()
    assert count(tab) == "60 rows"
    find(tab, "GEMM  fp8")
    assert count(tab) == "10 of 60 rows" and set(column(tab, "suite")) == {"gemm"}
    assert set(column(tab, "dtype")) == {"fp8", "mxfp8"}
    find(tab, "nothing like it")
    assert count(tab) == "0 of 60 rows"
    find(tab, " ")
    assert count(tab) == "60 rows"
    assert tab.run("document.querySelector('#table output').getAttribute('aria-live')") == "polite"


def test_tooltips_by_keyboard(show: Open) -> None:
    tab = show()
    tab.run("document.querySelector('#speed-up h3 .anchor').focus()")
    tab.press("Tab")
    if not tab.run("document.activeElement.matches('.mark')"):
        tab.press("Tab")
    assert tab.run("document.activeElement.getAttribute('role')") == "img"
    assert (tip(tab) or "").startswith("fp8")
    assert tab.run("document.querySelector('#tip').getAttribute('role')") == "tooltip"
    tab.press("Escape")
    assert tip(tab) is None
    tab.run(f"document.querySelector('{head(tab, 'how')}').focus()")
    assert tip(tab) == "native, or emulated in software"


def saved(tab: Tab) -> list[list[str]]:
    """The file that a click on a button downloaded, read as CSV."""
    ended = tab.browser.wait(
        "Browser.downloadProgress", lambda params: params["state"] == "completed" and params["guid"] in _guids(tab)
    )
    name = next(one["suggestedFilename"] for one in _begun(tab) if one["guid"] == ended["guid"])
    text = (tab.downloads / name).read_text()
    return [[name], *csv.reader(io.StringIO(text), strict=True)]


def _begun(tab: Tab) -> list[dict[str, Any]]:
    frames = {event["frame"]["id"] for event in tab.heard("Page.frameNavigated")}
    events = [event["params"] for event in tab.browser.events if event["method"] == "Browser.downloadWillBegin"]
    return [event for event in events if event["frameId"] in frames]


def _guids(tab: Tab) -> set[str]:
    return {download["guid"] for download in _begun(tab)}


def test_tables_as_csv(show: Open) -> None:
    tab = show()
    find(tab, "transformer")
    tab.click(head(tab, "best"))
    tab.click("#table [data-do=save]")
    name, titles, *rows = saved(tab)
    assert name == ["table.csv"] and titles[:6] == ["suite", "case", "dtype", "how", "best (s)", "median (s)"]
    values = column(tab, "best", "dataset.value ?? '-'")
    assert [row[4] for row in rows] == values and len(rows) == 20
    assert [row[1] for row in rows] == column(tab, "case")
    assert "contended, few-samples" in {row[13] for row in rows}
    tab = show()
    tab.click("#history summary")
    tab.click("#history [data-do=save]")
    assert saved(tab) == [
        ["history.csv"],
        ["at", "series", "time of a step (s)", "low (s)", "high (s)"],
        ["a1b2c3d4", "fp8", "0.012", "0.011", "0.013"],
        ["b2c3d4e5", "bf16", "0.024", "-", "-"],
    ]
    tab = show("hostile")
    tab.run("document.querySelectorAll('figure.main [data-do=save]')[3].click()")
    _, titles, *rows = saved(tab)
    assert titles[0] == "\U0001f680 & 'quoted' \"twice\" `code` a|b" == rows[0][0] and len(rows) == 2


def test_the_policy_holds(show: Open) -> None:
    """Injected markup cannot run a handler or script or load an image."""
    tab = show()
    tab.run(
        "document.querySelector('main').insertAdjacentHTML('beforeend',"
        ' \'<p id=x onclick="window.ran = 1"></p><img src="https://example.org/x.png">\')'
    )
    tab.run("document.querySelector('#x').click()")
    tab.run(
        "(() => { const added = document.createElement('script'); added.textContent = 'window.ran = 2';"
        " document.body.append(added); })()"
    )
    assert tab.run("window.ran ?? null") is None
    tab.browser.wait("Log.entryAdded", lambda params: "example.org" in params["entry"]["text"])


@pytest.mark.parametrize("name", ["whole", "hostile", "many"])
def test_a_page_stands_alone_and_fits(show: Open, name: str) -> None:
    tab = show(name)
    tab.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    for width in (1280, 390):
        tab.resize(width)
        seen, whole = tab.run("[document.documentElement.clientWidth, document.documentElement.scrollWidth]")
        assert whole <= seen
    tab.run("document.querySelector('figure.main [data-do=save]').click()")
    saved(tab)
    requests = [event["request"]["url"].partition("#")[0] for event in tab.heard("Network.requestWillBeSent")]
    page = tab.run("location.href.split('#')[0]")
    assert [address for address in requests if not address.startswith(("data:", "blob:"))] == [page]
    for event in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
        assert not tab.heard(event)


def test_nothing_of_a_chart_is_cut_off_and_cases_fit(show: Open) -> None:
    tab = show("sample")
    tab.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    cut = tab.run(
        """[...document.querySelectorAll(".drawing text")].filter((text) => text.getClientRects().length)
            .filter((text) => {
                const box = text.getBoundingClientRect(), sheet = text.closest(".drawing").getBoundingClientRect();
                return box.left < sheet.left - 1 || box.right > sheet.right + 1;
            }).map((text) => text.textContent)"""
    )
    assert cut == []
    sizes = "['clientWidth', 'scrollWidth'].map((size) => document.querySelector('#results-table .scroll')[size])"
    box, content = tab.run(sizes)
    assert content <= box


def color(tab: Tab, selector: str, what: str) -> int:
    text = tab.run(f"getComputedStyle(document.querySelector('{selector}')).{what}")
    return sum(int(part) for part in text.removeprefix("rgb(").removesuffix(")").split(",")) // 3


def test_print(show: Open) -> None:
    tab = show(scheme="dark")
    tab.media("print", "dark")
    assert color(tab, "body", "backgroundColor") == 255 and color(tab, "body", "color") < 60
    gone = tab.run(
        "['nav', '.skip', '.anchor', '#tip', '.tools button', '.tools label', 'details']"
        ".filter((one) => document.querySelector(one).getClientRects().length)"
    )
    assert gone == []
    cut = tab.run(
        "[...document.querySelectorAll('.scroll')].filter((one) => one.getClientRects().length)"
        ".filter((one) => one.scrollWidth > one.clientWidth + 1 || one.scrollHeight > one.clientHeight + 1)"
        ".map((one) => one.parentElement.id)"
    )
    assert cut == []
    assert len(tab.send("Page.printToPDF", printBackground=False)["data"]) > 20_000


# WCAG contrast between each text of a chart and the colour below it.
CONTRASTS = """(() => {
    const light = (colour) => {
        const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
        const [r, g, b] = parts.map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const texts = [...document.querySelectorAll(".drawing text")].filter((text) => text.getClientRects().length);
    return texts.map((text) => {
        text.scrollIntoView({ block: "center", behavior: "instant" });
        const box = text.getBoundingClientRect(), style = getComputedStyle(text);
        const below = document.elementFromPoint(box.left + box.width / 2, box.top + box.height / 2);
        const ground = text.matches(".inside") ? getComputedStyle(below).fill
            : getComputedStyle(text.closest("figure")).backgroundColor;
        const [dark, bright] = [light(style.fill), light(ground)].sort((a, b) => a - b);
        return [text.textContent, Math.round(100 * (bright + 0.05) / (dark + 0.05)) / 100];
    });
})()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["whole", "sample"])
def test_every_text_of_a_chart_is_readable(show: Open, name: str, scheme: str) -> None:
    tab = show(name, scheme=scheme)
    tab.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    contrasts = tab.run(CONTRASTS)
    assert len(contrasts) > 30 and not [pair for pair in contrasts if pair[1] < 4.45]


def test_a_timeline_is_zoomed_by_keyboard(show: Open) -> None:
    tab = show("sample")
    chart, second = "#timeline-transformer", "document.querySelectorAll('#timeline-transformer .tick')[1].textContent"
    view = f"document.querySelector('{chart} svg svg')"
    assert tab.run(second) == "100 ms"
    tab.run(f"document.querySelector('{chart} .zoom input').focus()")
    for key in ["ArrowRight"] * 4:
        tab.press(key)
    assert tab.run(second) == "25 ms"
    assert tab.run(f"{view}.viewBox.baseVal.width / {view}.getAttribute('width')") == pytest.approx(0.25)
    tab.press("Tab")
    tab.press("ArrowRight")
    assert float(tab.run(second).removesuffix(" ms")) == pytest.approx(25 + 0.01 * 0.75 * 660, rel=0.01)
    assert not tab.heard("Runtime.exceptionThrown")
