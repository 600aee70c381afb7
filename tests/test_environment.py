"""What a run was made under."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fp8bench import environment
from fp8bench.codec import decode, encode
from fp8bench.environment import command_line, gather
from fp8bench.model import Environment

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(folder: Path, *words: str) -> str:
    settings = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false", "-c", "safe.directory=*")
    return subprocess.run(["git", *settings, *words], cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, and the working directory in it."""
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "first")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@needs_git
def test_a_clean_checkout_gives_its_commit(repository: Path) -> None:
    """Files git does not know make no difference."""
    (repository / "untracked").write_text("x")
    facts = gather({}, "0", 1)
    assert facts.get("commit") == git(repository, "rev-parse", "HEAD").strip()
    assert facts.get("dirty") is False


@needs_git
def test_a_changed_file_makes_it_dirty(repository: Path) -> None:
    """The commit alone does not say what ran."""
    (repository / "file").write_text("two")
    assert gather({}, "0", 1).get("dirty") is True


@needs_git
def test_outside_a_repository_both_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None, not an error and not a guess."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    facts = gather({}, "0", 1)
    assert facts.get("commit") is None and facts.get("dirty") is None
    assert "commit" in facts.facts


def test_without_git_both_are_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """git is not a dependency."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gather({}, "0", 1).get("commit") is None


def test_everything_is_plain_and_can_be_stored() -> None:
    """The header of a run file is made of it."""
    facts = gather({"torch": "2.13.0", "cudnn": None}, "0.1.0", 3)
    assert decode(Environment, encode(facts)) == facts
    assert (facts.get("fp8bench"), facts.get("torch"), facts.get("threads")) == ("0.1.0", "2.13.0", 3)
    assert facts.get("python") == ".".join(str(part) for part in sys.version_info[:3])
    assert facts.get("cpu_count") == os.cpu_count()
    assert facts.get("machine")
    assert facts.get("no such fact") is None


def test_variables_that_change_speed_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are set, and only those of the list."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setenv("A_SECRET", "x")
    facts = gather({}, "0", 1).facts
    assert facts["env_OMP_NUM_THREADS"] == "3"
    assert "env_MKL_NUM_THREADS" not in facts and "x" not in facts.values()


def test_a_file_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    """Virtual machines show no governor."""
    assert environment._read(str(tmp_path / "nowhere")) is None
    (tmp_path / "there").write_text("powersave\n")
    assert environment._read(str(tmp_path / "there")) == "powersave"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["/a/fp8bench/__main__.py", "suite", "gemm"], "python -m fp8bench suite gemm"),
        (["/usr/bin/fp8bench", "suite", "gemm", "--data", "a b"], "fp8bench suite gemm --data 'a b'"),
        (["", "x"], "python x"),
        ([], ""),
    ],
)
def test_the_command_line_is_what_a_person_would_type(
    words: list[str], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a run can be repeated by copying it."""
    monkeypatch.setattr(sys, "argv", words)
    assert command_line() == shown
