"""`fp8bench compare` from words to text and exit codes, and which runs a word means."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8bench.errors import RunNotFound
from fp8bench.store.commit_runs import find_runs
from tests.cli.commands.conftest import Anew
from tests.commands import Say, git, session, unfolding
from tests.histories import commit, history, keep, records, run_at
from tests.told_before import Told, as_before

A, B = commit(0), commit(1)


def machine(name: str) -> dict[str, object]:
    return {"machine": name, "asv_machine": name}


@pytest.fixture
def say(store: Path, fp8bench: Say) -> Say:
    return unfolding(fp8bench, "compare")


@as_before
def test_compare(fp8bench: Say, anew: Anew) -> Told:
    store = anew()
    history(store, 1.0, 1.5)
    keep(store, run_at(0, 7.5, records=tuple(records(1.0))))
    keep(store, run_at(0, 8.5, records=tuple(records(9.0)), facts={"dirty": True}))
    yield (
        "of two commits all clean runs; those with other files are none of its",
        session(fp8bench, f"compare {A[:12]} {B}"),
    )
    anew()
    history(Path("a"), 1.0, 1.0)
    keep(Path("b"), run_at(4, records=tuple(records(2.0)), facts={"commit": None, "dirty": None}))
    yield (
        "a store is the commit that was measured last in it; a run of no commit is itself",
        session(fp8bench, "compare a b"),
    )
    for claim, facts in {
        "another host of the same kind": machine("other"),
        "the same name on other hardware": {"asv_cpu": "Xeon"},
        "a container whose host's name asv has": machine("f00"),
        "no word of asv's": {"machine": "other", "asv_machine": None},
    }.items():
        store = anew()
        history(store, 1.0, 1.2)
        keep(store, run_at(0, 9.5, records=tuple(records(5.0)), facts=facts))
        yield f"machines are not mixed: {claim}", session(fp8bench, f"compare {A} {B}")
    keep(store, run_at(1, 10.5, records=tuple(records(9.0)), facts=machine("third")))
    yield "the newest run's machine that both sides have counts", session(fp8bench, f"compare {A} {B}")
    store = anew()
    for number, name in enumerate("abc"):
        keep(store, run_at(number // 2, 4.0 + number, records=tuple(records(1.0 + number)), facts=machine(name)))
    yield (
        "hosts that share no machine are refused; a machine each has no verdict about time",
        session(fp8bench, f"compare {A} {B}", f"compare 00000190 {B}"),
    )
    store = anew()
    history(store, 1.0, 1.2)
    keep(store, run_at(0, 9.5, facts={"machine": "f00"}))
    yield "containers that a person called one machine are one", session(fp8bench, f"compare {A} {B}")
    first, _ = history(anew(), 1.0, 1.5)
    yield (
        "what cannot be compared is refused",
        session(
            fp8bench,
            "compare last last",
            "compare nosuch last",
            "compare last, last",
            "compare . last",
            "compare 00000064 last --json --csv -",
            "compare 00000064 last --md no/such/file",
            "compare last",
            "compare '' last",
            "compare 'a\0b' last",
        ),
    )
    broken = keep(store, run_at(0, 9.5))
    broken.write_bytes(b"\xff{")
    yield (
        "a broken run among several is left out, and alone an error",
        session(fp8bench, f"compare {first.stem},{broken.stem} {B}", f"compare {broken.stem} {B}"),
    )
    anew()
    yield "an empty store says so", session(fp8bench, "compare last HEAD")


def test_a_commit_whose_runs_all_had_other_files_has_none(store: Path) -> None:
    keep(store, run_at(3, facts={"dirty": True}))
    with pytest.raises(RunNotFound, match="differed from it"):
        find_runs(commit(3), store)


def test_digits_that_begin_several_commits_are_none_of_them(store: Path) -> None:
    history(store, 1.0, 1.0)
    with pytest.raises(RunNotFound, match=f"2 commits start with 0000: {commit(0)}, {commit(1)}"):
        find_runs("0000", store)


def test_what_git_calls_a_commit(store: Path, say: Say) -> None:
    git(Path(), "init", "-q")
    titles = []
    for number in range(2):
        git(Path(), "commit", "-q", "--allow-empty", "-m", "x")
        titles.append(git(Path(), "rev-parse", "HEAD"))
        keep(store, run_at(number, facts={"commit": titles[-1]}, records=tuple(records(1 + number))))
    git(Path(), "commit", "-q", "--allow-empty", "-m", "x")
    code, out, _ = say("HEAD~2", "HEAD~1")
    assert code == 0 and f"commit {titles[0][:8]}" in out.splitlines()[1] and "+100.0%" in out
    code, out, err = say("HEAD~2", "HEAD")
    assert code == 2 and not out and "has no run" in err
