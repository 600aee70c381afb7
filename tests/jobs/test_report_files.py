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
from fp8bench.jobs import report_files
from fp8bench.jobs.report_files import folder_of, past_of, write_report
from fp8bench.model import Environment, Request, Run
from fp8bench.report.page.section import PastSeries
from fp8bench.store.runs.run_file import load_run, start_run
from fp8bench.units import moment
from tests.energies import use
from tests.histories import commit, history, keep, records, run_at
from tests.runs import EMULATED, measured, transformer


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory; returns the store that is the default there."""
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
    assert len(folder_of(runs, store).name) < 150 and folder_of(runs, store).name.endswith("-40-runs")


def test_the_command_prints_where_the_page_is(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = kept(store, 1), kept(store, 2)
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
        (["report", "last", "last"], "was named twice"),
        (["report", "last", "--html", "no/such/folder/a.html"], "there is no directory no/such/folder"),
        (["report", "last", "--md", "."], "it is a directory"),
        (["suite", "gemm", "--no-report", "--html", "a.html"], "--no-report writes none, and --html wants one"),
        (["suite", "gemm", "--dry-run", "--open"], "--dry-run measures nothing, so that there is nothing for --open"),
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


def series(runs: list[Run], store: Path, metric: str = "time", precision: str = "bf16") -> PastSeries:
    (only_series,) = [
        series
        for series in past_of(runs, store)
        if (series.trend.series.metric, series.precision) == (metric, precision)
    ]
    return only_series


def test_the_series_of_the_cases_at_hand(tmp_path: Path) -> None:
    last = load_run(history(tmp_path, 2.0, 1.0)[-1])
    past = series([last], tmp_path)
    assert (past.precision, past.place, past.machine) == ("bf16", "shape=512", "box")
    assert not past.emulated and past.incomparable == 0 and not past.unkept
    assert [figure.commit for figure in past.figures] == [commit(0), commit(1)]
    # A round takes an eighth more for its cast, 100 ns besides, and 2 us in the middle.
    assert [figure.value for figure in past.figures] == pytest.approx([2.2521e-3, 1.1271e-3], rel=1e-9)
    assert all((figure.low or 9) <= (figure.value or 0) <= (figure.high or 0) for figure in past.figures)
    assert [figure.samples for figure in past.figures] == [24, 24]


def test_other_machines_interpreters_and_cases_are_left_out(tmp_path: Path) -> None:
    history(tmp_path, 1.0)
    elsewhere = {"machine": "far", "asv_machine": "far"}
    keep(tmp_path, run_at(1, records=tuple(records(9.0)), facts=elsewhere))
    other = {"asv_python": "/other/bin/python"}
    keep(tmp_path, run_at(2, records=tuple(records(9.0)), facts=other))
    last = load_run(keep(tmp_path, run_at(3, records=tuple(records(1.0))[:1])))
    past = past_of([last], tmp_path)
    assert {own.precision for own in past} == {"fp32"}
    assert [figure.commit for figure in series([last], tmp_path, precision="fp32").figures] == [commit(0), commit(3)]


def test_a_run_with_changes_stands_at_the_end_of_its_series(tmp_path: Path) -> None:
    """Its numbers are no commit's, but they are what one wants to know."""
    history(tmp_path, 1.0)
    dirty = load_run(keep(tmp_path, run_at(0, hours=5, records=tuple(records(3.0)), facts={"dirty": True})))
    past = series([dirty], tmp_path)
    assert [figure.commit for figure in past.figures] == [commit(0)] * 2
    (unkept,) = past.unkept
    assert unkept.value == pytest.approx(3.3771e-3, rel=1e-9) and moment(unkept.date) == "2026-01-05 17:00"


def test_a_quick_run_is_hasty(tmp_path: Path) -> None:
    (path,) = history(tmp_path, 1.0, request=Request("gemm", quick=True))
    assert [figure.hasty for figure in series([load_run(path)], tmp_path).figures] == [True]


def test_emulations_are_named(tmp_path: Path) -> None:
    made = [replace(record, support=EMULATED) if not record.is_reference else record for record in records(1.0)]
    last = load_run(keep(tmp_path, run_at(0, records=tuple(made))))
    assert series([last], tmp_path).emulated and not series([last], tmp_path, precision="fp32").emulated


def test_older_versions_are_counted(tmp_path: Path) -> None:
    history(tmp_path, 1.0)
    newer = tuple(replace(record, case=replace(record.case, version="99")) for record in records(1.0))
    last = load_run(keep(tmp_path, run_at(1, records=newer)))
    past = past_of([last], tmp_path)
    assert {(len(own.figures), own.incomparable) for own in past} == {(1, 1)}


def test_joules_of_another_source_are_left_out_and_counted(tmp_path: Path) -> None:
    """The newest figure's source counts, also that of a run with uncommitted changes."""
    for number, source in enumerate(("counter", "instant", "instant")):
        made = tuple(replace(record, energy=use((1.0 + number,) * 3, source=source)) for record in records(1.0))
        last = load_run(keep(tmp_path, run_at(number, records=made)))
    past = series([last], tmp_path, metric="energy")
    assert ([figure.value for figure in past.figures], past.incomparable) == ([2.0, 3.0], 1)
    assert len(series([last], tmp_path).figures) == 3
    for source, count in (("counter", 2), ("instant", 3)):
        made = tuple(replace(record, energy=use((9.0,) * 3, source=source)) for record in records(1.0))
        dirty = run_at(2, hours=5, records=made, facts={"dirty": True})
        assert len(series([dirty], tmp_path, metric="energy").figures) == count


def test_runs_that_tell_nothing_have_no_past(tmp_path: Path) -> None:
    history(tmp_path, 1.0)
    foreign, _ = transformer()
    nameless = replace(run_at(1), environment=Environment({}))
    assert past_of([], tmp_path) == past_of([foreign, nameless], tmp_path) == ()


def test_a_store_that_is_not_there_knows_nothing(tmp_path: Path) -> None:
    assert past_of([run_at(0)], tmp_path / "none") == ()


def test_a_series_has_its_newest_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_files, "MOST_COMMITS", 2)
    paths = history(tmp_path, 1.0, 2.0, 3.0)
    series = next(series for series in past_of([load_run(paths[-1])], tmp_path) if series.trend.series.metric == "time")
    assert [figure.commit for figure in series.figures] == [commit(1), commit(2)]
