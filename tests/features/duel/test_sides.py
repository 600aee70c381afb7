"""What each side is started with: which folders, which revision, which files."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from fp8bench.errors import UsageError
from fp8bench.features.duel import sides as opening
from fp8bench.features.duel.sides import PACKAGE, Question, opened
from tests.commands import git


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing of a duel outside of the test's folder; no path but Python's own."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return folder


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clean repository with a suite and sources, which are on this Python's path; it is the working directory."""
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    (folder / ".venv" / "lib" / "site-packages").mkdir(parents=True)
    (folder / "suite.py").write_text("")
    (folder / "src" / "mylib.py").write_text("")
    for words in (["init", "-q", "-b", "main"], ["add", "suite.py", "src"], ["commit", "-q", "-m", "one"]):
        git(folder, *words)
    installed = str(folder / ".venv" / "lib" / "site-packages")
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder / "src"), installed])
    monkeypatch.chdir(folder)
    return folder.resolve()


def test_the_same_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with fp8bench alone, the working directory where something is imported, PYTHONPATH without packages."""
    installed = tmp_path / "lib" / "site-packages"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/mine", "", str(installed)]))
    for imports, here in (((), []), (("module",), [str(tmp_path)])):
        with opened(Question(), imports) as (before, after, notes):
            package, *others = before.paths
            assert others == [*here, "/mine"] and after.paths == before.paths
            assert [path.resolve() for path in Path(package).iterdir()] == [PACKAGE]
            assert before.python == after.python == sys.executable
            assert notes == ("both sides are the same: what they differ by is noise",)


def test_a_revision_has_folders_of_its_own(project: Path, tmp_path: Path) -> None:
    """Those of the repository, wherever they stand on the path; a virtual environment in there is none of them."""
    (project / "src" / "mylib.py").write_text("changed")
    with opened(Question(against="HEAD"), ("suite.py", "some.module")) as (before, after, notes):
        tree = before.tree
        assert tree is not None and after.tree == project
        assert after.paths[1:] == (str(project), str(project / "src"))
        assert before.paths[1:] == (str(tree), str(tree / "src"))
        assert before.imports == (str(tree / "suite.py"), "some.module")
        assert after.imports == ("suite.py", "some.module")
        assert (tree / "src" / "mylib.py").read_text() == "" and notes == ()
        assert before.title == f"HEAD ({before.commit[:8]})"
        assert after.title == f"this tree ({after.commit[:8]} with uncommitted changes)"
    assert not tree.exists()


def test_a_file_that_a_revision_has_not(project: Path) -> None:
    """Both sides run this tree's, and a note says so. Nothing else has changed, which is said too."""
    (project / "new.py").write_text("")
    with opened(Question(against="main"), ("new.py", "/elsewhere/other.py")) as (before, _, notes):
        assert before.imports == ("new.py", "/elsewhere/other.py")
        assert [note.partition(":")[0] for note in notes] == ["new.py is not in main", "both sides are the same"]


def test_two_changes_at_once_are_refused(project: Path) -> None:
    """Two interpreters and a revision are none: each side says what it is."""
    with pytest.raises(UsageError, match="would change two things at once"):
        opened(Question(against="HEAD", against_self="HEAD"), ()).__enter__()
    with opened(Question(sys.executable, sys.executable, "HEAD"), ()) as (before, _, _):
        assert before.python == sys.executable


def test_fp8bench_out_of_a_package_folder_has_no_revisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was installed, not checked out."""
    package = tmp_path / "site-packages" / "fp8bench"
    package.mkdir(parents=True)
    monkeypatch.setattr(opening, "PACKAGE", package)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(UsageError, match="--against-self wants a git repository"):
        opened(Question(against_self="HEAD"), ()).__enter__()
    git(tmp_path, "init", "-q")
    with pytest.raises(UsageError, match="wants fp8bench to run from a checkout of its repository, and it runs from"):
        opened(Question(against_self="HEAD"), ()).__enter__()
