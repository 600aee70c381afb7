"""How each side starts: folders, a Python, a working tree of another revision."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import pytest

from fp8bench.errors import StoreError, UsageError
from fp8bench.features.duel import sides as module
from fp8bench.features.duel.sides import (
    PACKAGE_FOLDER,
    DuelQuestion,
    find_interpreter,
    find_repository,
    find_revision,
    has_uncommitted_changes,
    open_duel_sides,
    remove_stale_folders,
    scratch_folder,
    worktree,
)
from fp8bench.files import lock
from tests.commands import git
from tests.counts import for_each


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return folder


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clean repository with a suite and sources on this Python's path; it is the working directory."""
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


def test_both_sides_start_equally_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "lib" / "site-packages"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/mine", "", str(installed)]))
    for imports, here in (((), []), (("module",), [str(tmp_path)])):
        with open_duel_sides(DuelQuestion(), imports) as (before, after, notes):
            package, *others = before.paths
            assert others == [*here, "/mine"] and after.paths == before.paths
            assert [path.resolve() for path in Path(package).iterdir()] == [PACKAGE_FOLDER]
            assert before.python == after.python == sys.executable
            assert notes == ("both sides are equal, so any difference is noise",)


def test_a_revision_has_folders_of_its_own(project: Path, tmp_path: Path) -> None:
    (project / "src" / "mylib.py").write_text("changed")
    with pytest.raises(UsageError, match="would change two things at once"):
        open_duel_sides(DuelQuestion(against="HEAD", against_self="HEAD"), ()).__enter__()
    with open_duel_sides(DuelQuestion(against="HEAD"), ("suite.py", "some.module")) as (before, after, notes):
        tree = before.working_tree
        assert tree is not None and after.working_tree == project
        assert after.paths[1:] == (str(project), str(project / "src"))
        assert before.paths[1:] == (str(tree), str(tree / "src"))
        assert before.imports == (str(tree / "suite.py"), "some.module")
        assert after.imports == ("suite.py", "some.module")
        assert (tree / "src" / "mylib.py").read_text() == "" and notes == ()
        assert before.title == f"HEAD ({before.commit[:8]})"
        assert after.title == f"this tree ({after.commit[:8]} with uncommitted changes)"
    assert not tree.exists()


def test_a_file_missing_from_a_revision_comes_from_the_tree(project: Path) -> None:
    (project / "new.py").write_text("")
    with open_duel_sides(DuelQuestion(against="main"), ("new.py", "/elsewhere/other.py")) as (before, _, notes):
        assert before.imports == ("new.py", "/elsewhere/other.py")
        assert [note.partition(":")[0].partition(",")[0] for note in notes] == [
            "new.py is not in main",
            "both sides are equal",
        ]


def test_fp8bench_out_of_a_package_folder_has_no_revisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "fp8bench"
    package.mkdir(parents=True)
    monkeypatch.setattr(module, "PACKAGE_FOLDER", package)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(UsageError, match="--against-self needs a git repository"):
        open_duel_sides(DuelQuestion(against_self="HEAD"), ()).__enter__()
    git(tmp_path, "init", "-q")
    with pytest.raises(UsageError, match="needs fp8bench to run from a checkout of its repository, but it runs from"):
        open_duel_sides(DuelQuestion(against_self="HEAD"), ()).__enter__()


def test_a_python_is_given_by_path_name_or_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links are not resolved: a virtual environment's Python is a link."""
    (tmp_path / "env" / "bin").mkdir(parents=True)
    link = tmp_path / "env" / "bin" / "python"
    link.symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    for word in (str(link), "env/bin/python", "env", str(tmp_path / "env")):
        assert find_interpreter(word, "--python-a") == str(link)
    for word in ("", "no-such-python", "/nowhere/python", "."):
        with pytest.raises(UsageError, match=r"--python-a .*is not a program"):
            find_interpreter(word, "--python-a")
    monkeypatch.setenv("PATH", str(link.parent))
    assert find_interpreter("python", "--python-a") == str(link)


OPTION = "--against"
ROOT = Path(__file__).resolve().parents[3]
OWNER = """
import sys
from pathlib import Path
from fp8bench.features.duel import sides
from fp8bench.features.duel.sides import find_repository, scratch_folder, worktree
sides._CLEANUP_SCRIPT = sys.argv[1] or sides._CLEANUP_SCRIPT
repository = find_repository(Path.cwd(), "--against")
with scratch_folder() as folder, worktree(repository, "HEAD", folder, "--against") as tree:
    print(tree, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def commits(tmp_path: Path) -> Path:
    folder = tmp_path / "a project"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    for text in ("one", "two"):
        (folder / "file").write_text(text)
        git(folder, "add", "file")
        git(folder, "commit", "-q", "-m", text)
    git(folder, "tag", "v1", "HEAD~1")
    return folder


def trees(commits: Path) -> list[str]:
    lines = git(commits, "worktree", "list", "--porcelain").splitlines()
    return [line for line in lines if line.startswith("worktree ")][1:]


def test_a_working_tree_holds_the_revision_and_is_removed(
    commits: Path, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (commits / "below").mkdir()
    (commits / "file").write_text("three")
    hook = commits / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\ntouch ran\nexit 1\n")
    hook.chmod(0o755)
    git(tmp_path, "init", "-q", "other")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    repository = find_repository(commits / "below", OPTION)
    assert repository == commits.resolve() and has_uncommitted_changes(repository)
    monkeypatch.delenv("GIT_DIR")
    commit = find_revision(repository, "v1", OPTION)
    with scratch_folder() as folder, worktree(repository, commit, folder, OPTION) as tree:
        assert (tree / "file").read_text() == "one" and len(trees(commits)) == 1 and not (tree / "ran").exists()
    assert trees(commits) == [] and not list(temporary.iterdir())
    assert (commits / "file").read_text() == "three"


@for_each("error", [KeyboardInterrupt, RuntimeError])
def test_a_working_tree_is_removed_however_the_body_ends(
    error: type[BaseException], commits: Path, temporary: Path
) -> None:
    repository = find_repository(commits, OPTION)
    with contextlib.suppress(error), scratch_folder() as folder, worktree(repository, "HEAD", folder, OPTION) as tree:
        (tree / "made").write_text("by a build")
        (tree / "file").write_text("changed")
        raise error
    assert trees(commits) == [] and not list(temporary.iterdir())


def test_a_killed_duel_leaves_nothing(commits: Path, temporary: Path) -> None:
    """Its warden removes its folder.

    If the warden was killed too, the next duel does, since the lock ends with its owner. A running duel keeps its
    folder.
    """

    def owner(warden: str = "") -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", OWNER, warden],
            cwd=commits,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    (first, gone), (dead, lost), (living, kept) = owner(), owner("exit"), owner()
    with first, dead, living:
        first.send_signal(signal.SIGKILL)
        end = time.monotonic() + 60
        while (gone.parent.exists() or len(trees(commits)) > 2) and time.monotonic() < end:
            time.sleep(0.02)
        assert not gone.parent.exists()
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        assert lost.is_dir() and len(trees(commits)) == 2
        repository = find_repository(commits, OPTION)
        with scratch_folder() as folder, worktree(repository, "HEAD", folder, OPTION):
            assert not lost.exists() and kept.is_dir()
            assert len(trees(commits)) == 2  # the running duel's folder and this one
        living.communicate("", timeout=240)
    assert trees(commits) == [] and not list(temporary.iterdir())


def test_a_folder_that_is_just_being_made_stays(temporary: Path) -> None:
    """Its lock may not exist yet. Old folders without a lock are removed, other users' folders stay."""
    young, old, other = (temporary / name for name in ("fp8bench-duel-young", "fp8bench-duel-old", "else"))
    for folder in (young, old, other):
        folder.mkdir()
    past = time.time() - 10 * module._MIN_ABANDONED_SECONDS
    os.utime(old, (past, past))
    (temporary / "fp8bench-duel-link").symlink_to(other)
    remove_stale_folders()
    assert young.is_dir() and other.is_dir() and not old.exists() and (temporary / "fp8bench-duel-link").is_symlink()


def test_a_duel_that_begins_meanwhile_leaves_it_alone(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may look at the moment between creating the folder and its lock."""

    def sweeps_and_locks(file: IO[Any], seconds: float) -> bool:
        remove_stale_folders()
        return lock(file, seconds)

    monkeypatch.setattr(module, "lock", sweeps_and_locks)
    with scratch_folder() as folder:
        remove_stale_folders()
        assert folder.is_dir()
    assert not list(temporary.iterdir())


def test_an_unknown_revision_is_refused(commits: Path, tmp_path: Path) -> None:
    """For a shallow clone, as in CI, the message names the command that fetches more."""
    for word in ("nope", "", "--help", "v1:file", "0" * 40):
        with pytest.raises(UsageError, match=r"is not a commit of the repository .*Give a commit"):
            find_revision(find_repository(commits, OPTION), word, OPTION)
    git(tmp_path, "clone", "-q", "--depth", "1", commits.as_uri(), "shallow")
    with pytest.raises(UsageError, match=r"`git fetch --unshallow`"):
        find_revision(find_repository(tmp_path / "shallow", OPTION), "HEAD~1", OPTION)


def test_a_revision_outside_a_repository_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(UsageError, match=r"--against needs a git repository.*not a git repository"):
        find_repository(tmp_path, OPTION)
    git(tmp_path, "init", "-q", "--bare", "bare")
    with pytest.raises(UsageError, match=r"must be run in a work tree"):
        find_repository(tmp_path / "bare", OPTION)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"git cannot be run"):
        find_repository(tmp_path, OPTION)


def test_a_working_tree_that_git_refuses_gives_its_message(commits: Path, temporary: Path) -> None:
    repository = find_repository(commits, OPTION)
    with scratch_folder() as folder:
        (folder / "tree").mkdir()
        (folder / "tree" / "there").write_text("already")
        with pytest.raises(UsageError, match=r"no working tree of HEAD could be created: .*already exists"):
            worktree(repository, "HEAD", folder, OPTION).__enter__()
    assert trees(commits) == [] and not list(temporary.iterdir())


def test_a_full_temporary_folder_gives_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(StoreError, match=r"set TMPDIR to a different folder"):
        scratch_folder().__enter__()
