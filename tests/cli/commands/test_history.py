"""`fp8bench history`: from words to text and exit codes, over stores made by hand."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench.model import Record, Request, Status
from fp8bench.registry import workloads
from fp8bench.store.asv.files import load_results
from fp8bench.store.asv.view import results_of
from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.run_file import lock_run
from tests.commands import Say, git, unfolding
from tests.histories import commit, history, keep, records, run_at, tree


@pytest.fixture
def say(store: Path, fp8bench: Say) -> Say:
    """Run a command of history's."""
    return unfolding(fp8bench, "history")


def test_history_alone_prints_its_help(say: Say) -> None:
    """Like the bare command."""
    code, out, err = say()
    assert code == 0 and "rebuild" in out and "merge" in out and not err


def test_list(store: Path, say: Say) -> None:
    """A line a series and cell, with what became of it since the commit before; nothing is written."""
    history(store, 1.0, 1.1)
    before = tree(store)
    code, out, err = say("list", "TRACK_TIME")
    assert (code, err) == (0, "") and tree(store) == before
    assert out == (
        """\
.fp8bench: 6 series, 2 runs of 2 commits

on box (AMD EPYC, 2 CPUs), /venv/bin/python3
  series                                points  last        value  change
  gemm.Gemm.track_time(fp32, 512)            2  00000001  2.48 ms  +10.0%
  gemm.Gemm.track_time(bf16, 512)            2  00000001  1.24 ms  +10.0%
  gemm.Gemm.track_time_cast(fp32, 512)       2  00000001   275 us  +10.0%
  gemm.Gemm.track_time_cast(bf16, 512)       2  00000001   138 us  +10.0%
  gemm.Gemm.track_time_gemm(fp32, 512)       2  00000001  2.20 ms  +10.0%
  gemm.Gemm.track_time_gemm(bf16, 512)       2  00000001  1.10 ms  +10.0%

--explain says how to read this

one of them, commit by commit
  fp8bench history show 'gemm.Gemm.track_time(fp32, 512)'
"""
    )


def test_list_says_what_is_not_in_it(store: Path, say: Say) -> None:
    """Dirty trees, other places, suites that nobody told of, files that cannot be read."""
    path = history(store, 1.0)[0]
    keep(store, run_at(2, facts={"dirty": True}))
    keep(store, run_at(3, facts={"commit": None, "dirty": None}))
    keep(store, run_at(4, request=Request("gemm", threads=2)))
    keep(store, run_at(5, facts={"asv_machine": None}))
    foreign = records()
    keep(store, run_at(6, records=tuple(_of_suite(foreign, "my_suite"))))
    path.with_name("20260101T000000Z-00000009-ffffffff.jsonl").write_text("?")
    out = say("list")[1]
    left = out[out.index("not in it") :].partition("\n\n")[0].splitlines()[1:]
    assert len(left) == 6 and all(line.startswith("  1 run: ") for line in left)
    for words in ("differed from", "git repository", "--threads 2", "which machine", "my_suite is not known", "verify"):
        assert words in out


def _of_suite(made: list[Record], name: str) -> list[Record]:
    return [replace(one, case=replace(one.case, workload=name)) for one in made]


def test_a_folder_that_may_not_be_read_is_said(store: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runs are left out, which is another matter than having none."""
    history(store, 1.0)
    monkeypatch.setattr(os, "access", lambda path, how: Path(path).name != "box")
    words = "fp8bench: .fp8bench/runs/box may not be read, so that its runs are left out\n"
    code, out, err = say("list")
    assert code == 0 and out.startswith(".fp8bench: 12 series") and err == words
    next(run_files(store)).unlink()
    assert say("list") == (0, ".fp8bench: no runs that may be read\n", words)


def test_runs_of_one_commit_are_one_point(store: Path, say: Say) -> None:
    """Their samples are put together; a hasty one counts only where there is nothing better."""
    keep(store, run_at(1, 1.5))
    keep(store, run_at(1, 2.5))
    keep(store, run_at(1, 3.5, request=Request("gemm", quick=True), records=tuple(records(9.0, rounds=5))))
    keep(store, run_at(2, 4.5, request=Request("gemm", quick=True), records=tuple(records(2.0, rounds=5))))
    out = say("show", "track_time(bf16")[1]
    lines = [line.split() for line in out.splitlines() if "00000001" in line or "00000002" in line]
    assert lines[0][2:5] == ["00000001", "2", "48"] and lines[1][2:5] == ["00000002", "1", "5"]
    assert lines[1][5] == "~2.252" and lines[1][-1] == "~+99.8%"


def test_commits_are_in_the_order_of_their_dates(store: Path, say: Say) -> None:
    """Not in that of their measuring: old commits are measured late."""
    for number, hours in ((3, 10), (1, 20), (2, 15)):
        keep(store, run_at(number, hours))
    out = say("show", "track_time(bf16")[1]
    assert [line.split()[2] for line in out.splitlines() if " 0000000" in line] == [commit(n)[:8] for n in (1, 2, 3)]


def test_two_machines_have_two_sections(store: Path, say: Say) -> None:
    """And two interpreters."""
    history(store, 1.0)
    keep(store, run_at(0, 5, facts={"asv_machine": "other"}))
    keep(store, run_at(0, 6, facts={"asv_python": "/another/python"}))
    out = say("show", "track_time(bf16")[1]
    assert [line.partition(" (")[0] for line in out.splitlines() if line.startswith("on ")] == [
        "on box", "on box", "on other",
    ]  # fmt: skip
    assert say("list", "track_time(bf16")[1].count("gemm.Gemm.track_time(bf16, 512) ") == 3


def test_a_failure_is_told(store: Path, say: Say) -> None:
    """In the list, and with its reason in the series."""
    history(store, 1.0)
    keep(store, run_at(1, records=tuple(records(status=Status.FAILED))))
    assert "FAILED" in say("list", "track_time(bf16")[1]
    assert "FAILED: out of memory, even alone" in say("show", "track_time(bf16")[1]


def test_the_series_of_a_part_of_a_name(store: Path, say: Say) -> None:
    """One will do; several are listed, sorted; none gives the nearest."""
    history(store, 1.0)
    assert say("show", "GEMM.gemm.track_time(bf16, 512)")[0] == 0
    code, out, err = say("show", "bf16")
    assert code == 2 and not out and "'bf16' fits 7 series" in err
    listed = [line.strip() for line in err.splitlines()[1:]]
    assert listed == sorted(listed) and "gemm.Gemm.track_time(bf16, 512)" in listed and len(listed) == 7
    assert "Did you mean 'gemm.Gemm.track_time(bf16, 512)'?" in say("show", "gemm.Gemm.track_tme(bf16, 512)")[2]
    assert "Did you mean 'gemm.Gemm.track_time(bf16, 512)'?" in say("show", "tme(bf16, 512)")[2]
    assert "names them all" in say("show", "zzz")[2]


def test_a_series_of_a_suite_that_nobody_told_of_is_not_called_missing(store: Path, say: Say) -> None:
    """The store has it; only --import lacks."""
    keep(store, run_at(1, records=tuple(_of_suite(records(), "my_suite"))))
    unknown = "Not in it: the suite my_suite is not known here; --import its module.\n"
    err = say("show", "my_suite.MySuite.track_time(bf16")[2]
    assert err.endswith(f"The store .fp8bench has no series yet. {unknown}") and "Begin with" not in err
    history(store, 1.0)
    assert say("show", "my_suite")[2] == f"fp8bench: no series has 'my_suite' in its name. {unknown}"


def test_commands_that_are_named_find_the_same_store_and_suites(store: Path, say: Say) -> None:
    """Elsewhere than in .fp8bench they need --store, and --import for suites of one's own."""
    elsewhere = Path("the other")
    history(elsewhere, 1.0)
    keep(elsewhere, run_at(2, finished=False))
    options = f" --store '{elsewhere}'"
    out = say("list", "--store", str(elsewhere), "--import", "json")[1]
    assert out.endswith(f"history show 'gemm.Gemm.track_time(fp32, 512)'{options} --import json\n")
    out = say("list", "--runs", "--store", str(elsewhere))[1]
    assert f"--resume 0000012c{options}\n" in out and out.endswith(f"fp8bench show 0000012c{options}\n")
    history(store, 1.0)
    assert "--store" not in say("list", "--store", "./.fp8bench/")[1]


def test_at_most_twenty_are_listed(store: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are counted."""
    monkeypatch.setattr("fp8bench.jobs.history._MOST_NAMED", 2)
    history(store, 1.0)
    err = say("show", "bf16")[2]
    assert len(err.splitlines()) == 4 and err.endswith("and 5 more\n")


def test_a_word_that_is_nowhere(store: Path, say: Say) -> None:
    """Is a sentence and not an empty table."""
    history(store, 1.0)
    assert say("list", "zzz")[::2] == (
        2, "fp8bench: no series has 'zzz' in its name. `fp8bench history list` names them all.\n",
    )  # fmt: skip
    assert say("list", "zzz", "--runs")[0] == 2


def test_runs(store: Path, say: Say) -> None:
    """Newest first; the word looks at all of a line; files that cannot be read are counted."""
    paths = history(store, 1.0, 1.1)
    keep(store, run_at(2, origin="asv", finished=False))
    paths[0].with_name("20250101T000000Z-nocommit-ffffffff.jsonl").write_text("?")
    with paths[0].open("ab") as file:
        lock_run(file, paths[0])
        code, out, _ = say("list", "--runs")
    rows = [line.split() for line in out.splitlines() if line.startswith("  0")]
    assert code == 0 and [row[3] for row in rows] == [commit(n)[:8] for n in (2, 1, 0)]
    assert "unfinished: fp8bench suite --resume" in out and "1 run: they cannot be read" in out
    assert [line.split()[4] for line in say("list", "--runs", "asv")[1].splitlines() if line.startswith("  0")] == [
        "asv"
    ]


def test_a_commit_that_left_the_repository_is_marked(store: Path, say: Say) -> None:
    """One that is there is not; where none is there, it is another repository."""
    git(Path(), "init", "-q")
    git(Path(), "commit", "-q", "--allow-empty", "-m", "one")
    keep(store, run_at(1))
    assert "none of these commits is in the repository" in say("show", "track_time(bf16")[2]
    keep(store, run_at(2, facts={"commit": git(Path(), "rev-parse", "HEAD")}))
    code, out, err = say("show", "track_time(bf16")
    assert (code, err) == (0, "") and out.count("not in this repository") == 1
    lines = out.splitlines()
    assert "00000001" in lines[lines.index(next(line for line in lines if "not in this" in line)) - 1]
    assert "1 of 2 commits are not in the repository of this directory (00000001)" in say("verify")[1]


def test_stores_that_are_not_there_or_empty(store: Path, say: Say) -> None:
    """A sentence with what to do."""
    for words in (["list"], ["show", "x"], ["verify"], ["rebuild"]):
        code, out, err = say(*words)
        assert code == 2 and not out and "the store .fp8bench is not there. Give --store DIR" in err
    store.mkdir()
    assert "is no store: it has neither runs nor asv" in say("list")[2]
    (store / "runs").mkdir()
    assert say("list") == (0, ".fp8bench: no runs yet. Begin with: fp8bench suite gemm --grid\n", "")
    assert say("verify")[0] == 0 and say("rebuild")[0] == 0
    code, _, err = say("show", "x")
    assert code == 2 and "has no series yet" in err


def test_what_only_reads_writes_nothing(store: Path, say: Say) -> None:
    """So that a store that may not be written will do."""
    history(store, 1.0, 1.1)
    say("rebuild")
    torn = store / "asv" / "results" / "box" / "00000000-x.json"
    torn.write_text("{")
    os.utime(torn, (1, 1))  # what was changed lately may be in the middle of being written
    (store / "runs" / "box" / "a.jsonl").write_text("?")
    before = tree(store)
    for words in (["list"], ["list", "--runs"], ["show", "track_time(bf16"], ["verify"]):
        assert say(*words)[0] in (0, 3)
    assert tree(store) == before


def test_what_writes_says_that_it_cannot(store: Path, say: Say) -> None:
    """Here a file lies where the view should be."""
    history(store, 1.0)
    history(Path("other"), 1.0)
    (store / "asv").write_text("")
    for words in (["rebuild"], ["merge", "other"]):
        code, _, err = say(*words)
        assert code == 2 and "Choose another --store DIR" in err


def test_many_runs_are_announced(store: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before they are read."""
    monkeypatch.setattr("fp8bench.jobs.history._MANY_RUNS", 1)
    history(store, 1.0, 1.1)
    assert say("list")[2] == "fp8bench: reading 2 runs\nfp8bench: read 2 of 2 runs\n"


def test_rebuild(store: Path, say: Say) -> None:
    """After the folder is gone, the same files come again; a dirty run is named, and in none."""
    history(store, 1.0, 1.1)
    keep(store, run_at(5, facts={"dirty": True}))
    code, out, err = say("rebuild")
    assert (code, err) == (0, "")
    assert out == (
        ".fp8bench: made 2 files of asv's, 15 benchmarks, from 2 runs\n"
        "\nnot in it\n  1 run: the files differed from their commit\n"
    )
    before = tree(results_of(store))
    for path in sorted(results_of(store).rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    assert say("rebuild")[0] == 0 and tree(results_of(store)) == before and len(before) == 4


def test_rebuild_mends_and_names_what_was_broken(store: Path, say: Say) -> None:
    """It is set aside, and what could not be made is code 3."""
    history(store, 1.0, 1.1)
    say("rebuild")
    broken = next((results_of(store) / "box").glob("00000001-*.json"))
    broken.write_text("{")
    os.utime(broken, (1, 1))  # what was changed lately may be in the middle of being written
    code, _, err = say("rebuild")
    assert code == 0 and f"{broken.name}.broken-1 was broken, and was set aside" in err
    assert len(load_results(broken).rows) == 15
    broken.write_text('{"version": 99}')
    code, out, err = say("rebuild")
    assert code == 3 and "made 1 file" in out and str(broken) in err


def test_a_suite_of_ones_own_is_imported(store: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the run is left out, with the reason."""
    keep(store, run_at(1, records=tuple(_of_suite(records(), "mine"))))
    Path("mine.py").write_text(
        "from fp8bench.suites import workloads\n"
        "from fp8bench.workloads.gemm import Gemm\n\n\n"
        "@workloads.register('mine')\n"
        "class Mine(Gemm):\n    name = 'mine'\n"
    )
    assert "--import its module" in say("list")[1] and "--import its module" in say("verify")[1]
    workloads.names()  # all of them are there before one is added
    monkeypatch.setattr(workloads, "_leaves", dict(workloads._leaves))
    code, out, _ = say("list", "mine.Mine", "--import", "./mine.py")
    assert code == 0 and "mine.Mine.track_time(bf16, 512)" in out


def test_merge(store: Path, say: Say, tmp_path: Path) -> None:
    """Another machine's runs, and its view; said in counts. Again it is nothing new."""
    other = tmp_path / "other"
    history(store, 1.0)
    facts = {"machine": "other", "asv_machine": "other"}
    for number in (0, 1):
        keep(other / ".fp8bench", run_at(number, number + 7, facts=facts))
    before = tree(other)
    code, out, err = say("merge", str(other))
    assert (code, err) == (0, "") and tree(other) == before
    assert out == (
        f".fp8bench: took in {other}/.fp8bench\n"
        "  runs that are new here: 2\n"
        "  runs that had gone on there: 0\n"
        "  runs that were here already: 0\n"
        "  asv's files that are new or have more in them: 0\n"
        "  asv's files made again from the runs: 3\n"
    )
    assert len(list(run_files(store))) == 3
    assert sorted(path.parent.name for path in results_of(store).glob("*/0*.json")) == ["box", "other", "other"]
    after = tree(store)
    code, out, _ = say("merge", str(other))
    assert code == 0 and "here already: 2" in out and tree(store) == after


def test_merge_says_what_was_not_taken(store: Path, say: Say, tmp_path: Path) -> None:
    """With code 3; the rest is taken."""
    history(tmp_path / "other", 1.0, 1.1)
    path = next((tmp_path / "other" / "runs" / "box").glob("*00000001*"))
    say("merge", str(tmp_path / "other"))
    for one in (path, store / "runs" / "box" / path.name):
        one.write_bytes(one.read_bytes() + json.dumps({"note": str(one)}).encode() + b"\n")
    code, out, err = say("merge", str(tmp_path / "other"))
    assert code == 3 and "here already: 1" in out and "each was resumed alone" in err


def test_merge_needs_a_store_that_is_anothers(store: Path, say: Say) -> None:
    """Its own, and a folder that is not there, are refused."""
    history(store, 1.0)
    assert "is this store, or lies in it" in say("merge", ".")[2]
    assert "is no directory" in say("merge", "nowhere")[2]


def test_a_torn_file_of_figures_is_said_once(store: Path, say: Say) -> None:
    """And changes nothing of what is shown; nor do remembered steps that are none."""
    history(store, 1.0, 1.1)
    whole = say("list")
    (store / "points" / "points.figures").write_bytes(b"fp8bench figures 1")
    (store / "figures").mkdir(exist_ok=True)
    (store / "figures" / "steps.json").write_text("no JSON")
    code, out, err = say("list")
    assert (code, out) == whole[:2] and err.count("\n") == 1 and "made anew from the runs" in err
    assert say("list") == whole
    first, second = say("regressions"), say("regressions")
    assert first[:2] == second[:2] and not second[2]
    assert first[2] == "fp8bench: .fp8bench/figures/steps.json had become unreadable and was begun anew\n"
