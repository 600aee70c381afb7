"""`fp8bench compare` from words to text and exit codes, and which runs a word means."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from fp8bench.errors import RunNotFound
from fp8bench.store.commit_runs import runs_meant
from tests.commands import Say, git, unfolding
from tests.histories import commit, history, keep, records, run_at, tree


@pytest.fixture
def say(store: Path, fp8bench: Say) -> Say:
    """Run `compare`."""
    return unfolding(fp8bench, "compare")


def test_two_runs(store: Path, say: Say) -> None:
    """By id, stem, path and 'last'; nothing is written."""
    first, second = history(store, 1.0, 1.5)
    before = tree(store)
    one = first.stem.rpartition("-")[2]
    texts = [say(word, "last") for word in (one, first.stem, str(first))]
    assert {code for code, _, _ in texts} == {0} and tree(store) == before
    bodies = {out.partition("figures:")[2] for _, out, _ in texts}
    assert len(bodies) == 1 and "worse" in bodies.pop()
    assert str(second) not in texts[0][2]


def test_two_commits(store: Path, say: Say) -> None:
    """All clean runs of each; those with other files are none of its."""
    history(store, 1.0, 1.5)
    keep(store, run_at(0, 7.5, records=tuple(records(1.0))))
    keep(store, run_at(0, 8.5, records=tuple(records(9.0)), facts={"dirty": True}))
    code, out, err = say(commit(0)[:12], commit(1))
    assert (code, err) == (0, "") and "2 runs" in out and "+50" in out
    keep(store, run_at(3, facts={"dirty": True}))
    with pytest.raises(RunNotFound, match="differed from it"):
        runs_meant(commit(3), store)


def test_what_git_calls_a_commit(store: Path, say: Say) -> None:
    """HEAD, HEAD~1, a tag."""
    git(Path(), "init", "-q")
    found = []
    for number in range(2):
        git(Path(), "commit", "-q", "--allow-empty", "-m", "x")
        found.append(git(Path(), "rev-parse", "HEAD"))
        keep(store, run_at(number, facts={"commit": found[-1]}, records=tuple(records(1 + number))))
    git(Path(), "commit", "-q", "--allow-empty", "-m", "x")
    code, out, _ = say("HEAD~2", "HEAD~1")
    assert code == 0 and f"commit {found[0][:8]}" in out.splitlines()[1] and "+100.0%" in out
    code, out, err = say("HEAD~2", "HEAD")
    assert code == 2 and not out and "of which .fp8bench has no run" in err


def test_two_stores(store: Path, say: Say) -> None:
    """Each stands for the commit that was measured last in it; a run of no commit for itself."""
    history(Path("a"), 1.0, 1.0)
    keep(Path("b"), run_at(4, records=tuple(records(2.0)), facts={"commit": None, "dirty": None}))
    code, out, _ = say("a", "b")
    assert code == 0 and out.startswith("B against A\n  A: a: commit 00000001, 1 run") and "B: b: of no commit" in out


OTHER = {"machine": "other", "asv_machine": "other"}
# Machines that are not box, and what they are called beside it.
OTHERS: dict[str, tuple[dict[str, object], str, str]] = {
    "another host of the same kind": (OTHER, "box", "other"),
    "the same name on other hardware": ({"asv_cpu": "Xeon"}, "box (asv_cpu AMD EPYC)", "box (asv_cpu Xeon)"),
    "a container whose host's name asv has": ({"machine": "f00", "asv_machine": "f00"}, "box", "f00"),
    "no word of asv's": ({"machine": "other", "asv_machine": None}, "box", "other"),
}


@pytest.mark.parametrize(("facts", "here", "there"), OTHERS.values(), ids=OTHERS)
def test_machines_are_not_mixed(store: Path, say: Say, facts: dict[str, object], here: str, there: str) -> None:
    """Of a commit that two machines measured, the runs of one count: the newest run's that both sides have."""
    history(store, 1.0, 1.2)
    keep(store, run_at(0, 9.5, records=tuple(records(5.0)), facts=facts))
    code, out, err = say(commit(0), commit(1))
    assert code == 0 and f"1 run of other machines left out: the rest is of {here}, and they are of {there}. " in err
    assert "+20.0%" in out
    keep(store, run_at(1, 10.5, records=tuple(records(9.0)), facts={"machine": "third", "asv_machine": "third"}))
    code, out, err = say(commit(0), commit(1))
    assert code == 0 and "2 runs of other machines" in err and "third" in err and "+20.0%" in out


def test_hosts_that_share_no_machine_are_refused(store: Path, say: Say) -> None:
    """Both are named, and how to choose; a machine each is told apart, and has no verdict about time."""
    for number, name in enumerate(("a", "b", "c")):
        facts = {"machine": name, "asv_machine": name}
        keep(store, run_at(number // 2, 4.0 + number, records=tuple(records(1.0 + number)), facts=facts))
    code, out, err = say(commit(0), commit(1))
    assert code == 2 and not out and "was measured on a and b, and" in err and "on c: runs of several machines" in err
    assert "Give the runs of one by their ids" in err
    code, out, err = say("00000190", commit(1))
    assert code == 0 and "asv_machine: a -> c (times do not compare for it)" in out
    assert "measured on different machines (asv_machine was a and is c)" in " ".join(out.split())
    assert "unsure" in out and "worse" not in out.partition("verdict:")[0]


def test_containers_that_a_person_called_one_machine_are_one(store: Path, say: Say) -> None:
    """The entry in ~/.asv-machine.json counts, as for the history; another host's name is told."""
    history(store, 1.0, 1.2)
    keep(store, run_at(0, 9.5, facts={"machine": "f00"}))
    code, out, err = say(commit(0), commit(1))
    assert (code, err) == (0, "") and "2 runs" in out and "machine: box and f00 -> box" in out


def test_json_csv_and_markdown(store: Path, say: Say) -> None:
    """On stdout or in files, the same comparisons."""
    history(store, 1.0, 1.5)
    words = [commit(0), commit(1)]
    document = json.loads(say(*words, "--json")[1])
    rows = list(csv.DictReader(say(*words, "--csv", "-")[1].splitlines()))
    assert [row["metric"] for row in rows] == [one["metric"] for one in document["comparisons"]] != []
    code, out, _ = say(*words, "--csv", "rows.csv", "--md", "page.md")
    assert code == 0 and "worse" in out and "worse" in Path("page.md").read_text()
    assert list(csv.DictReader(Path("rows.csv").read_text().splitlines())) == rows


REFUSED = {
    "the same run": (["last", "last"], "have the run"),
    "no such run": (["nosuch", "last"], "no run 'nosuch'"),
    "an empty word": (["last,", "last"], "an empty word means no run"),
    "a folder that is no store": ([".", "last"], "is no store"),
    "two outputs on stdout": (["00000064", "last", "--json", "--csv", "-"], "would both print"),
    "a file that cannot be": (["00000064", "last", "--md", "no/such/file"], "there is no directory"),
    "one side": (["last"], "the following arguments are required: B"),
    "no text at all": (["", "last"], "an empty word"),
    "a zero byte": (["a\0b", "last"], "a"),
}


@pytest.mark.parametrize(("words", "expected"), REFUSED.values(), ids=REFUSED)
def test_refused(store: Path, say: Say, words: list[str], expected: str) -> None:
    """One sentence on stderr, and exit code 2."""
    history(store, 1.0, 1.5)
    code, out, err = say(*words)
    assert code == 2 and not out and expected in err and err.count("\n") == 1


def test_a_broken_run_among_several_is_left_out(store: Path, say: Say) -> None:
    """And said so; alone it is an error."""
    first, _ = history(store, 1.0, 1.5)
    broken = keep(store, run_at(0, 9.5))
    broken.write_bytes(b"\xff{")
    code, _, err = say(f"{first.stem},{broken.stem}", commit(1))
    assert code == 0 and "left out" in err
    assert say(broken.stem, commit(1))[0] == 2


def test_an_empty_store(store: Path, say: Say) -> None:
    """Says so."""
    code, _, err = say("last", "HEAD")
    assert code == 2 and "no runs yet" in err
