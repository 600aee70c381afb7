"""Figures of a commit's runs, and the commit that a word on the command line means."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fp8bench.store import commit_runs
from fp8bench.store.commit_runs import find_commit, read_runs
from tests.histories import keep, run_at
from tests.measure.test_environment import git


def test_a_run_that_lost_all_its_lines_is_damaged_and_not_of_other_cases(tmp_path: Path) -> None:
    path = keep(tmp_path, run_at(0))
    path.write_text(path.read_text().replace("calls_ns", "calls"))
    assert read_runs([path]).skipped_run_reasons == (commit_runs.DAMAGED_LINES,)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_word_means_a_commit(tmp_path: Path) -> None:
    assert find_commit("HEAD", tmp_path) is None and find_commit("HEAD", tmp_path / "nosuch") is None
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    git(tmp_path, "tag", "-a", "one", "-m", "one")
    for word in ("HEAD", "main", "one", commit, commit[:8]):
        assert find_commit(word, tmp_path) == commit
    for word in ("HEAD~1", "nosuch", "f" * 40, "HEAD^{tree}", "--all", "", "\0"):
        assert find_commit(word, tmp_path) is None
