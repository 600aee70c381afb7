"""What a repository says of its commits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fp8bench.store.find_runs import commit_named
from tests.measure.test_environment import git

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def test_a_word_means_a_commit(tmp_path: Path) -> None:
    """A name, a beginning, a tag. What means none, or is no commit, is none; nothing is taken for an option."""
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    git(tmp_path, "tag", "-a", "one", "-m", "one")
    for word in ("HEAD", "main", "one", commit, commit[:8]):
        assert commit_named(word, tmp_path) == commit
    for word in ("HEAD~1", "nosuch", "f" * 40, "HEAD^{tree}", "--all", "", "\0"):
        assert commit_named(word, tmp_path) is None


def test_outside_of_a_repository_there_is_none(tmp_path: Path) -> None:
    assert commit_named("HEAD", tmp_path) is None
    assert commit_named("HEAD", tmp_path / "nosuch") is None
