"""What a commit's runs tell: read once, and again when a file is another; and which commit a word means."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fp8bench.store import commit_runs
from fp8bench.store.asv.view import update_view
from fp8bench.store.commit_runs import commit_named, files_by_commit, read_runs
from fp8bench.store.figures.history import keep_figures
from fp8bench.store.runs.run_file import load_run, load_sheet
from tests.histories import keep, run_at
from tests.measure.test_environment import git
from tests.older import as_older


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []

    def counted(path: Path) -> object:
        names.append(path.name)
        return load_sheet(path)

    monkeypatch.setattr(commit_runs, "load_sheet", counted)
    monkeypatch.setattr(commit_runs, "_remembered", {})
    return names


def test_a_run_that_was_just_read_is_not_parsed_again(tmp_path: Path, parsed: list[str]) -> None:
    """For asv's view and the commit's figures; nor is the run before it of the same commit."""
    for hour in (1, 2):
        run = load_run(keep(tmp_path, run_at(0, hour)))
        assert "in asv's view" in update_view(run, tmp_path)
        keep_figures(tmp_path, Path(run.path))
    assert parsed == []
    (paths,) = files_by_commit(tmp_path).values()
    told = read_runs(paths)
    assert parsed == []
    commit_runs._remembered.clear()
    assert read_runs(paths) == told and parsed == [path.name for path in paths]


def test_a_file_that_has_changed_is_parsed_again(tmp_path: Path, parsed: list[str]) -> None:
    run = load_run(keep(tmp_path, run_at(0)))
    update_view(run, tmp_path)
    with as_older(Path(run.path)).open("a") as file:
        file.write('{"note":"more"}\n')
    (heard,) = (read_runs(paths) for paths in files_by_commit(tmp_path).values())
    assert parsed == [Path(run.path).name] and heard.runs[0].run.notes == ("more",)
    read_runs([Path(run.path)])
    assert len(parsed) == 2


def test_a_run_that_lost_all_its_lines_is_damaged_and_not_of_other_cases(tmp_path: Path) -> None:
    path = keep(tmp_path, run_at(0))
    path.write_text(path.read_text().replace("calls_ns", "calls"))
    assert read_runs([path]).left == (commit_runs.DAMAGED,)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_word_means_a_commit(tmp_path: Path) -> None:
    assert commit_named("HEAD", tmp_path) is None and commit_named("HEAD", tmp_path / "nosuch") is None
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    git(tmp_path, "tag", "-a", "one", "-m", "one")
    for word in ("HEAD", "main", "one", commit, commit[:8]):
        assert commit_named(word, tmp_path) == commit
    for word in ("HEAD~1", "nosuch", "f" * 40, "HEAD^{tree}", "--all", "", "\0"):
        assert commit_named(word, tmp_path) is None
