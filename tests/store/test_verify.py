"""Every fault that a file of a store can have, planted one at a time, is named, and nothing else is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8bench.model import Fault
from fp8bench.store.asv.files import load_results
from fp8bench.store.asv.view import asv_results_folder
from fp8bench.store.figures.cache import get_figure_cache_path
from fp8bench.store.figures.history import open_store_history
from fp8bench.store.merge_stores import rebuild_asv_view
from fp8bench.store.runs.run_file import lock_run
from fp8bench.store.verify import verify_store
from tests.counts import for_each
from tests.histories import commit, history, keep, run_at, tree


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    folder = tmp_path / "store"
    history(folder, 1.0, 1.1)
    rebuild_asv_view(folder)
    return folder


def faults_of(store: Path) -> list[Fault]:
    before = tree(store)
    faults = verify_store(store).faults
    assert tree(store) == before
    return list(faults)


def only(store: Path, path: Path, broken: bool, *words: str) -> Fault:
    """The only fault, asserted to have this path, kind and words."""
    faults = faults_of(store)
    assert [(fault.path, fault.broken) for fault in faults] == [(str(path), broken)], faults
    text = f"{faults[0].what}. {faults[0].remedy}."
    assert all(word in text for word in words), text
    return faults[0]


def a_run(store: Path) -> Path:
    return min((store / "runs" / "box").glob("*.jsonl"))


def a_file(store: Path) -> Path:
    return min((asv_results_folder(store) / "box").glob("0*.json"))


def test_a_sound_store(store: Path, tmp_path: Path) -> None:
    found = verify_store(store)
    assert not found.faults and (found.run_files_without_fault, found.files) == (2, 2)
    dirty = tmp_path / "dirty"
    keep(dirty, run_at(1, facts={"dirty": True}))
    assert not faults_of(dirty)


def test_files_that_can_be_rebuilt_are_no_fault(store: Path) -> None:
    open_store_history(store, lambda done, runs: None)
    shutil.rmtree(asv_results_folder(store))
    get_figure_cache_path(store).write_bytes(b"no cache")
    assert not faults_of(store)
    made = rebuild_asv_view(store, [commit(1)[:8]])  # the requested commits and no others
    assert [load_results(path).commit_hash for path in made.files] == [commit(1)] and made.runs == 1


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_broken_lines_are_named(store: Path) -> None:
    path = a_run(store)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:-1], '{"rec', lines[-1]]) + "\n")
    only(store, path, False, "line 4 is broken", "Nothing is missing")
    path = a_run(store)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1], lines[2][:99], "{", "[]", '{"what":1}']) + "\n")
    faults = [fault for fault in faults_of(store) if fault.path == str(path)]
    assert len(faults) == 1 and faults[0].broken
    assert "line 3 is broken" in faults[0].what and "line 4" in faults[0].what and "and 1 more" in faults[0].what
    assert "--resume 00000064" in faults[0].remedy


def test_a_run_that_is_being_written_is_not_broken(store: Path) -> None:
    run = run_at(5, finished=False)
    path = keep(store, run)
    rebuild_asv_view(store)
    append(path, '{"rec')
    with path.open("a") as file:
        lock_run(file, path)
        assert not faults_of(store)
    assert [fault.broken for fault in faults_of(store)] == [True]


STRAY = "box/20260101T000000Z-00000009-ffffffff.jsonl"


@for_each(
    ("content", "words"),
    [
        (lambda whole: "", "it is empty"),
        (lambda whole: "words\n", "it is not a run file"),
        (lambda whole: '{"schema":99,"header":{}}\n', "was written by a newer fp8bench"),
        (lambda whole: whole.partition("\n")[2], "the header is missing"),
    ],
)
def test_files_that_are_not_runs_are_named(store: Path, content: Callable[[str], str], words: str) -> None:
    path = a_run(store)
    whole = path.read_text()
    path.write_text(content(whole))
    faults = [fault for fault in faults_of(store) if fault.path == str(path)]
    path.write_text(whole)
    assert len(faults) == 1 and faults[0].broken and words in faults[0].what, faults


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("box/x.partial", "killed"),
        ("notes.txt", "is not a run file and is ignored"),
        ("stray.jsonl", "is not a run file and is ignored"),
        ("box/deep/er.jsonl", "is not a run file and is ignored"),
        (STRAY, "is not a run file and is ignored"),
    ],
)
def test_foreign_files_among_the_runs_are_named(store: Path, name: str, words: str) -> None:
    path = store / "runs" / name
    path.parent.mkdir(exist_ok=True)
    path.mkdir() if name == STRAY else path.write_text("{}")
    only(store, path, False, words)


def test_copies_and_wrong_names_are_named(store: Path) -> None:
    path = a_run(store)
    copy = store / "runs" / "copied" / path.name
    copy.parent.mkdir()
    shutil.copy(path, copy)
    faults = faults_of(store)
    assert len(faults) == 1 and faults[0].broken and "is the same run as" in faults[0].what
    copy.unlink()
    moved = path.rename(path.with_name(path.name.replace("00000000", "0000000f")))
    only(store, moved, True, f"Rename it to {path.name}")


def test_unreadable_folders_are_named(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure is planted, because root may read every folder."""
    monkeypatch.setattr(os, "access", lambda path, how: Path(path).name != "box")
    only(store, store / "runs" / "box", True, "it is not readable, so its runs are unknown", "chmod")


def test_the_first_run_names_the_machine_again(store: Path) -> None:
    """A later kernel, or second name of an interpreter, starts no new line, even after a rebuild."""
    keep(store, run_at(1, 9, facts={"asv_os": "Linux 7"}))
    rebuild_asv_view(store)
    before = tree(asv_results_folder(store))
    shutil.rmtree(asv_results_folder(store))
    rebuild_asv_view(store)
    assert tree(asv_results_folder(store)) == before
    assert load_results(a_file(store)).params["os"] == "Linux 6.1"
