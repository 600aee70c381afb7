"""The report's files, and the command that writes them."""

from __future__ import annotations

import re
import shutil
import webbrowser
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from fp8bench.cli.main import main
from fp8bench.jobs.report_files import report_folder, write_report
from fp8bench.model import Run
from fp8bench.store.runs.run_file import start_run
from tests.runs import measured


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory; returns its default store."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / ".fp8bench"


def kept(store: Path, number: int = 1) -> Run:
    run, _ = measured()
    run = replace(run, id=f"{number:08x}", started=f"2026-01-0{number}T00:00:00.000+00:00")
    writer = start_run(run, store)
    writer.append(run.records)
    writer.finish("finished")
    return replace(run, path=str(writer.path))


def test_a_run_has_page_and_table_in_the_store(store: Path) -> None:
    run = kept(store)
    page = write_report([run], store)
    assert page == store / "reports" / Path(run.path).stem / "report.html"
    text = page.read_text()
    assert text.startswith("<!doctype html>") and "default-src 'none'" in unescape(text)
    assert not re.search(r"(?:src|href)=[\"']?https?:", text)
    assert (page.parent / "results.csv").read_text().count("\n") > 50
    assert write_report([run], store).read_text() == text
    assert sorted(path.name for path in page.parent.iterdir()) == ["report.html", "results.csv"]


def test_a_run_shown_again_says_where_its_report_is(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = kept(store)
    page = f"Page: .fp8bench/reports/{Path(run.path).stem}/report.html"
    for written in (False, True):
        main(["show", run.id])
        assert (page in capsys.readouterr().out) is written
        write_report([run], store)


@pytest.mark.parametrize("there", [True, False])
def test_a_page_is_shown_in_the_browser(
    there: bool, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    addresses: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: addresses.append(address) or there)
    monkeypatch.setenv("COLUMNS", "300")
    run = kept(store)
    assert main(["report", run.id, "--open"]) == 0
    out, err = capsys.readouterr()
    assert addresses == [Path(out.strip()).resolve().as_uri()]
    assert err == ("" if there else f"fp8bench: no browser could be opened. The report is at {addresses[0]}\n")


def test_many_runs_have_a_folder_of_bounded_length(store: Path) -> None:
    run = kept(store)
    runs = [replace(run, id=f"{number:08x}") for number in range(40)]
    assert len(report_folder(runs, store).name) < 150 and report_folder(runs, store).name.endswith("-40-runs")


def test_the_command_prints_where_the_page_is(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = kept(store, 1)
    second = kept(store, 2)
    assert main(["report", first.id]) == 0
    page = Path(capsys.readouterr().out.strip())
    assert page.read_text() == write_report([first], store).read_text()
    assert main(["report", first.id, "last", "--md", "both.md"]) == 0
    both, copy = map(Path, capsys.readouterr().out.split())
    assert both.parent.name == f"{first.id}+{second.id}" and copy == Path("both.md") and copy.is_file()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["report"], "the following arguments are required: RUN"),
        (["report", "nosuch"], "no run 'nosuch' in .fp8bench"),
        (["report", "last", "last"], "was given twice"),
        (["report", "last", "--html", "no/such/folder/a.html"], "there is no directory no/such/folder"),
        (["report", "last", "--md", "."], "it is a directory"),
        (["suite", "gemm", "--no-report", "--html", "a.html"], "--no-report and --html contradict each other"),
        (["suite", "gemm", "--dry-run", "--open"], "--dry-run measures nothing, so --open would have no data"),
    ],
)
def test_what_cannot_be_is_said_at_once(
    words: list[str], sentence: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(store)
    assert main(words) == 2
    assert sentence in capsys.readouterr().err


def test_a_suite_ends_with_its_report(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["suite", "gemm", "--set", "shape=64", "--dtypes", "fp32", "--rounds", "1", "--no-isolation"]
    assert main(words) == 0
    page = re.search(r"report: (\S+report\.html)", capsys.readouterr().err)
    assert page is not None and Path(page[1]).is_file()
    assert main([*words, "--no-report"]) == 0
    assert "report:" not in capsys.readouterr().err
    shutil.rmtree(store / "reports")
    (store / "reports").write_text("in the way")
    assert main(words) == 0
    assert "The run is kept; `fp8bench report" in capsys.readouterr().err
