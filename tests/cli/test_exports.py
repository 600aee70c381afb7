"""--trace and --log on the command line: refusals, files, messages and stored runs."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fp8bench
from fp8bench.cli.main import main
from fp8bench.errors import UsageError
from fp8bench.jobs import after_run
from fp8bench.jobs.report_files import ReportDestinations
from fp8bench.model import Run, Status
from fp8bench.protocols import SilentObserver
from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.run_file import load_run
from tests.commands import Say, session, unfolded
from tests.told_before import Told, as_before

GEMM = ("suite", "gemm", "--set", "shape=16", "--dtypes", "fp32,fp8", "--rounds", "1", "--no-isolation", "--no-report")


def the_run(store: Path) -> Run:
    (file,) = run_files(store)
    return load_run(file)


@as_before
def test_refused_exports(store: Path, monkeypatch: pytest.MonkeyPatch, fp8bench: Say) -> Told:
    monkeypatch.setitem(sys.modules, "wandb", None)
    Path("file").touch()
    for claim, options in {
        "a folder for traces below a file": "--trace file/below",
        "a folder for figures that is a file": "--log tensorboard:file",
        "figures for another program": "--log mlflow",
        "an empty folder for traces": "--trace ''",
        "traces of nothing": "--trace t --dry-run",
        "figures of nothing": "--log wandb --dry-run",
        "no package to send with": "--log wandb:mine",
        "traces of a run that is resumed": "--resume last --trace t",
    }.items():
        yield f"{claim} is refused before anything is measured", session(fp8bench, f"{shlex.join(GEMM)} {options}")
        assert {path.name for path in Path().iterdir()} <= {"file", ".fp8bench"} and not list(run_files(store))


def test_traces_of_every_case(store: Path) -> None:
    assert main([*GEMM, "--trace", "traces/new"]) == 0
    run = the_run(store)
    assert run.request.trace == "traces/new"
    for record in run.records:
        assert Path("traces/new", record.trace).is_file() and record.trace.endswith(".pt.trace.json.gz")
    assert len(list(Path("traces/new").iterdir())) == 2


def test_a_profiler_is_started_around_the_same_command(
    store: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """--dry-run prints the profiler's command, which records only marked slots and uses a separate store."""
    words = [*GEMM, "--trace", "ncu"]
    monkeypatch.setattr(sys, "argv", ["a program that calls main"])
    assert main([*words, "--dry-run"]) == 0
    command = shlex.split(capfd.readouterr().out)
    options = "--profile-from-start off --target-processes all --nvtx --set full --export fp8bench-%p"
    started = ["ncu", *options.split()]
    assert command == [*started, sys.executable, "-m", "fp8bench", *words, "--trace", "nvtx", "--store", "fp8bench-ncu"]
    monkeypatch.setenv("PATH", str(store))
    assert main(words) == 2 and "ncu is not installed here" in capfd.readouterr().err
    store.mkdir(exist_ok=True)
    (store / "ncu").write_text('#!/bin/sh\necho "$@"\nexit 7\n')
    (store / "ncu").chmod(0o755)
    assert main(words) == 7
    printed = capfd.readouterr()
    assert printed.out.split() == command[1:] and "the run is stored in fp8bench-ncu; its times" in printed.err
    assert not list(run_files(store))
    # A store that was asked for is the one.
    assert main([*words, "--store", "mine", "--dry-run"]) == 0
    assert shlex.split(capfd.readouterr().out)[-4:] == ["--store", "mine", "--trace", "nvtx"]


def test_a_device_without_ranges_says_so_and_costs_no_case(store: Path) -> None:
    assert main([*GEMM, "--trace", "nvtx"]) == 0
    for record in the_run(store).records:
        assert record.detail == "no trace: cpu devices have no NVTX ranges" and not record.trace
    with pytest.raises(UsageError, match="start your script or command under nsys"):
        fp8bench.run("gemm", set={"shape": [8]}, trace="nsys", quick=True, store=store)


def test_a_trace_that_cannot_be_written_costs_no_case(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fp8bench.worker.tracing.write_whole", full)
    assert main([*GEMM, "--trace", "traces"]) == 0
    for record in the_run(store).records:
        assert record.status is Status.OK and record.timing is not None and not record.trace
        assert record.detail == "no trace: OSError: [Errno 28] No space left on device"


def test_the_traces_of_a_run_that_is_resumed_go_where_it_was_asked(store: Path) -> None:
    class Stopping(SilentObserver):
        def finished(self, record: object) -> None:
            raise KeyboardInterrupt

    asked: dict[str, Any] = {"dtypes": ["fp32"], "rounds": 1, "isolation": False}
    half = fp8bench.run("gemm", set={"shape": [8, 16]}, trace="traces", observer=Stopping(), **asked)
    assert not half.finished and len(half.records) == 1
    assert main(["suite", "--resume", "last", "--no-report"]) == 0
    whole = the_run(store)
    assert whole.finished and len(whole.records) == 2 and len(list(Path("traces").iterdir())) == 2
    stamps = {Path(record.trace).name for record in whole.records}
    assert len(stamps) == 1 and all(Path("traces", record.trace).is_file() for record in whole.records)


def test_a_finished_run_is_told_again_with_all_that_is_asked_for(store: Path, fp8bench: Say) -> None:
    """With its exit code, and without a page unless requested."""
    assert main([*GEMM]) == 0
    assert fp8bench("suite", "--resume", "last")[0] == 0 and not (store / "reports").exists()
    assert fp8bench("suite", "--resume", "last", "--html", "page.html", "--md", "page.md", "--csv", "rows.csv")[0] == 0
    page = next((store / "reports").glob("*/report.html")).read_bytes()
    assert Path("page.html").read_bytes() == page and Path("page.md").is_file() and Path("rows.csv").is_file()


def test_a_run_that_was_cut_off_says_that_there_is_no_page(store: Path) -> None:
    run = fp8bench.run("gemm", set={"shape": 8}, dtypes=["fp32"], rounds=1, isolation=False)
    wanted, notes = after_run.RequestedOutputs(ReportDestinations(html=Path("page.html"))), list[str]()
    assert after_run.after_run(replace(run, finished=False), store, wanted, notes.append)
    assert notes == [f"report: not written, because the run was interrupted; `fp8bench report {run.id}` writes it"]


def test_figures_for_tensorboard(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    assert main([*GEMM, "--log", "tensorboard:board"]) == 0
    assert "logged to tensorboard:board" in capsys.readouterr().err
    assert main(["show", "last", "--log", "tensorboard:again"]) == 0
    written = {file.relative_to("board"): file.read_bytes() for file in Path("board").rglob("*") if file.is_file()}
    assert {file.parent.name for file in written} == {"fp32", "fp8"}
    assert {
        file.relative_to("again"): file.read_bytes() for file in Path("again").rglob("*") if file.is_file()
    } == written


def test_what_fails_after_the_measuring_fails_no_run(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_network(**options: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=no_network))
    assert main([*GEMM, "--log", "wandb"]) == 0
    told, run = unfolded(capsys.readouterr().err), the_run(store)
    assert "not logged to wandb:fp8bench (ConnectionError: no network); the run is kept" in told
    assert f"`fp8bench show {run.id}` also takes --log" in told


@pytest.mark.parametrize("interrupted", ["jobs.after_run.ScalarLogger.log", "pipeline._measure_group"])
def test_an_interrupt_leaves_what_there_is(
    interrupted: str, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Interrupted while logging, the message names the remaining work.

    Interrupted while measuring, nothing is logged.
    """

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: SimpleNamespace(define_metric=print)))
    monkeypatch.setattr(f"fp8bench.{interrupted}", interrupt)
    assert main([*GEMM, "--log", "wandb"]) == 130
    err, measured = unfolded(capsys.readouterr().err), interrupted != "pipeline._measure_group"
    assert ("also takes --log" in err) == the_run(store).finished == measured
