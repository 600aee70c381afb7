"""One browser for all tests; each page has a separate context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fp8bench.report.elements import Page
from fp8bench.report.page.html import render
from tests.browser.chromium import Browser, Tab, executable
from tests.pages import hostile_page, whole_page

Open = Callable[..., Tab]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker("slow")  # starting a browser takes a second


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    command = executable()
    if command is None:
        pytest.skip("needs Chromium (Debian: apt-get install chromium), and this machine has none")
    # The browser ends with this module: Chromium starts processes at any time, which later tests could mistake for a
    # step's.
    browser = Browser(command, tmp_path_factory.mktemp("browser"))
    try:
        yield browser
    finally:
        browser.close()


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    pages: dict[str, Page] = {"whole": whole_page(), "hostile": hostile_page(), "many": whole_page(2000)}
    for name, page in pages.items():
        (folder / f"{name}.html").write_text(render(page))
    sample = Path(__file__).resolve().parents[2] / "reports" / "sample" / "report.html"
    return {**{name: folder / f"{name}.html" for name in pages}, "sample": sample}


@pytest.fixture
def show(browser: Browser, files: dict[str, Path], tmp_path: Path) -> Iterator[Open]:
    """Opens a page in a colour scheme; closes it after the test."""
    tabs = []

    def opened(name: str = "whole", scheme: str = "light") -> Tab:
        tab = Tab.open(browser, tmp_path)
        tabs.append(tab)
        tab.resize(1280)
        tab.media("screen", scheme)
        tab.go(files[name].as_uri())
        return tab

    yield opened
    for tab in tabs:
        tab.close()
