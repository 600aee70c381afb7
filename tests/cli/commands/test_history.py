"""`fp8bench history`: from words to text and exit codes, over stores made by hand."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench.model import Record, Request, Status
from fp8bench.registry import workloads
from fp8bench.store.asv.view import asv_results_folder
from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.run_file import lock_run
from tests.cli.commands.conftest import Anew
from tests.commands import Say, session, unfolding
from tests.histories import history, keep, records, run_at, tree
from tests.told_before import Told, as_before

QUICK = Request("gemm", quick=True)


@pytest.fixture
def say(store: Path, fp8bench: Say) -> Say:
    return unfolding(fp8bench, "history")


def of_suite(name: str) -> tuple[Record, ...]:
    return tuple(replace(record, case=replace(record.case, workload=name)) for record in records())


@as_before
def test_history_list(fp8bench: Say, anew: Anew) -> Told:
    store = anew()
    yield (
        "where there is no store there is nothing to read",
        session(fp8bench, "history list", "history show x", "history verify", "history rebuild"),
    )
    store.mkdir()
    yield "a folder that is no store is none", session(fp8bench, "history list")
    (store / "runs").mkdir()
    yield (
        "an empty one has no runs yet",
        session(fp8bench, "history list", "history verify", "history rebuild", "history show x"),
    )
    store = anew()
    path = history(store, 1.0, 1.1)[0]
    yield (
        "a line a series and cell, with what became of it since the commit before",
        session(fp8bench, "history list TRACK_TIME", "history list zzz", "history list zzz --runs"),
    )
    keep(store, run_at(2, facts={"dirty": True}))
    keep(store, run_at(3, facts={"commit": None, "dirty": None}))
    keep(store, run_at(4, request=Request("gemm", threads=2)))
    keep(store, run_at(5, facts={"asv_machine": None}))
    keep(store, run_at(6, records=of_suite("my_suite")))
    path.with_name("20260101T000000Z-00000009-ffffffff.jsonl").write_text("?")
    yield "what is not in it is said", session(fp8bench, "history list bf16")
    paths = history(anew(), 1.0, 1.1)
    keep(store, run_at(2, origin="asv", finished=False))
    paths[0].with_name("20250101T000000Z-nocommit-ffffffff.jsonl").write_text("?")
    with paths[0].open("ab") as file:
        lock_run(file, paths[0])
        yield (
            "runs, newest first; a word looks at all of a line",
            session(fp8bench, "history list --runs", "history list --runs asv"),
        )
    elsewhere = Path("the other")
    anew()
    history(elsewhere, 1.0)
    keep(elsewhere, run_at(2, finished=False))
    yield (
        "commands that are named find the same store and suites",
        session(
            fp8bench,
            f"history list track_time( --store '{elsewhere}' --import json",
            f"history list --runs --store '{elsewhere}'",
        ),
    )
    history(store, 1.0)
    yield "the usual store has no need to be named", session(fp8bench, "history list track_time( --store ./.fp8bench/")


@as_before
def test_history_show(fp8bench: Say, anew: Anew) -> Told:
    store, bf16 = anew(), "history show track_time(bf16"
    for number, hours in ((3, 10), (1, 20), (2, 15)):
        keep(store, run_at(number, hours))
    yield "commits are in the order of their dates, not in that of their measuring", session(fp8bench, bf16)
    store = anew()
    keep(store, run_at(1, 1.5))
    keep(store, run_at(1, 2.5))
    keep(store, run_at(1, 3.5, request=QUICK, records=tuple(records(9.0, rounds=5))))
    keep(store, run_at(2, 4.5, request=QUICK, records=tuple(records(2.0, rounds=5))))
    yield "runs of one commit are one point; a hasty one counts where there is nothing better", session(fp8bench, bf16)
    store = anew()
    history(store, 1.0)
    keep(store, run_at(0, 5, facts={"asv_machine": "other"}))
    keep(store, run_at(0, 6, facts={"asv_python": "/another/python"}))
    yield "machines and interpreters have sections", session(fp8bench, bf16, "history list track_time(bf16")
    store = anew()
    history(store, 1.0)
    keep(store, run_at(1, records=tuple(records(status=Status.FAILED))))
    yield "a failure is told", session(fp8bench, bf16, "history list track_time(bf16")
    yield (
        "a part of a name will do; several are listed, sorted; none gives the nearest",
        session(
            fp8bench,
            "history show 'GEMM.gemm.track_time(bf16, 512)'",
            "history show bf16",
            "history show 'gemm.Gemm.track_tme(bf16, 512)'",
            "history show 'tme(bf16, 512)'",
            "history show zzz",
        ),
    )
    store = anew()
    keep(store, run_at(1, records=of_suite("my_suite")))
    mine = "history show my_suite.MySuite.track_time(bf16"
    yield "a series of a suite that nobody told of is not called missing", session(fp8bench, mine)
    history(store, 1.0)
    yield "beside others, too", session(fp8bench, "history show my_suite")


@as_before
def test_history_merge(fp8bench: Say, anew: Anew) -> Told:
    history(anew(), 1.0)
    for number in (0, 1):
        other = {"machine": "other", "asv_machine": "other"}
        keep(Path("other/.fp8bench"), run_at(number, number + 7, facts=other))
    yield (
        "another machine's runs, and its view; again it is nothing new",
        session(fp8bench, "history merge other", "history merge other"),
    )
    yield (
        "its own store and a folder that is not there are refused",
        session(fp8bench, "history merge .", "history merge nowhere"),
    )
    store = anew()
    history(store, 1.0)
    history(Path("other"), 1.0)
    (store / "asv").write_text("")
    yield "what cannot be written is said", session(fp8bench, "history rebuild", "history merge other")


def test_a_folder_that_may_not_be_read_is_said(store: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message names the left-out runs; the store does not look empty."""
    history(store, 1.0)
    monkeypatch.setattr(os, "access", lambda path, how: Path(path).name != "box")
    words = "fp8bench: .fp8bench/runs/box cannot be read, so its runs are left out\n"
    code, out, err = say("list")
    assert code == 0 and out.startswith(".fp8bench: 12 series") and err == words
    next(run_files(store)).unlink()
    assert say("list") == (0, ".fp8bench: no runs that may be read\n", words)


def test_what_only_reads_writes_nothing(store: Path, say: Say) -> None:
    history(store, 1.0, 1.1)
    say("rebuild")
    torn = store / "asv" / "results" / "box" / "00000000-x.json"
    torn.write_text("{")
    os.utime(torn, (1, 1))  # a recently changed file may still be being written
    (store / "runs" / "box" / "a.jsonl").write_text("?")
    before = tree(store)
    for words in (["list"], ["list", "--runs"], ["show", "track_time(bf16"], ["verify"]):
        assert say(*words)[0] in (0, 3)
    assert tree(store) == before


def test_many_runs_are_announced(store: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8bench.jobs.history._MANY_RUNS", 1)
    history(store, 1.0, 1.1)
    assert say("list")[2] == "fp8bench: reading 2 runs\n"


def test_rebuild(store: Path, say: Say) -> None:
    """After the folder was deleted, the same files are written.

    A run with uncommitted changes is named and left out.
    """
    history(store, 1.0, 1.1)
    keep(store, run_at(5, facts={"dirty": True}))
    code, out, err = say("rebuild")
    assert (code, err) == (0, "")
    assert out == (
        ".fp8bench: wrote 2 asv files with 14 benchmarks from 2 runs\n"
        "\nnot in it\n  1 run: the files differed from their commit\n"
    )
    before = tree(asv_results_folder(store))
    for path in sorted(asv_results_folder(store).rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    assert say("rebuild")[0] == 0 and tree(asv_results_folder(store)) == before and len(before) == 4


def test_a_suite_of_ones_own_is_imported(store: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(store, run_at(1, records=of_suite("mine")))
    Path("mine.py").write_text(
        "from fp8bench.suites import workloads\n"
        "from fp8bench.workloads.gemm import Gemm\n\n\n"
        "@workloads.register('mine')\n"
        "class Mine(Gemm):\n    name = 'mine'\n"
    )
    assert "--import its module" in say("list")[1]
    workloads.names()  # all are present before the next is added
    monkeypatch.setattr(workloads, "_leaves", dict(workloads._leaves))
    code, out, _ = say("list", "mine.Mine", "--import", "./mine.py")
    assert code == 0 and "mine.Mine.track_time(bf16, 512)" in out
