"""Working trees of other revisions, made by git and gone afterwards; and what killed duels leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from fp8bench.errors import StoreError, UsageError
from fp8bench.features.duel import sides as scratches
from fp8bench.features.duel.sides import is_dirty, package_beside, repository_of, revision_of, scratch, sweep, worktree
from tests.commands import git

OPTION = "--against"
ROOT = Path(__file__).resolve().parents[3]
OWNER = """
import sys
from pathlib import Path
from fp8bench.features.duel.sides import scratch
from fp8bench.features.duel.sides import repository_of, worktree
repository = repository_of(Path.cwd(), "--against")
with scratch() as folder, worktree(repository, "HEAD", folder, "--against") as tree:
    print(tree, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of this test's own for everything temporary."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with two commits, the first one tagged v1."""
    folder = tmp_path / "a project"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    for text in ("one", "two"):
        (folder / "file").write_text(text)
        git(folder, "add", "file")
        git(folder, "commit", "-q", "-m", text)
    git(folder, "tag", "v1", "HEAD~1")
    return folder


def trees(project: Path) -> list[str]:
    """The working trees that git knows of beside the repository's own."""
    lines = git(project, "worktree", "list", "--porcelain").splitlines()
    return [line for line in lines if line.startswith("worktree ")][1:]


def test_a_tree_holds_the_revision_and_goes(project: Path, temporary: Path) -> None:
    """From anywhere in the repository; what is not committed stays out of it, and where it is."""
    (project / "below").mkdir()
    (project / "file").write_text("three")
    repository = repository_of(project / "below", OPTION)
    assert repository == project.resolve() and is_dirty(repository)
    commit = revision_of(repository, "v1", OPTION)
    with scratch() as folder, worktree(repository, commit, folder, OPTION) as tree:
        assert (tree / "file").read_text() == "one" and len(trees(project)) == 1
    assert trees(project) == [] and not list(temporary.iterdir())
    assert (project / "file").read_text() == "three"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_it_goes_however_the_body_ends(error: type[BaseException], project: Path, temporary: Path) -> None:
    """Files that somebody made in it go too."""
    repository = repository_of(project, OPTION)

    def body() -> None:
        with scratch() as folder, worktree(repository, "HEAD", folder, OPTION) as tree:
            (tree / "made").write_text("by a build")
            (tree / "file").write_text("changed")
            raise error

    with pytest.raises(error):
        body()
    assert trees(project) == [] and not list(temporary.iterdir())


def test_what_a_killed_duel_left_goes_with_the_next(project: Path, temporary: Path) -> None:
    """Its lock has gone with it. One that lives keeps what is its own."""

    def owner() -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", OWNER], cwd=project, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    (dead, lost), (living, kept) = owner(), owner()
    with dead, living:
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        assert lost.is_dir() and len(trees(project)) == 2
        repository = repository_of(project, OPTION)
        with scratch() as folder, worktree(repository, "HEAD", folder, OPTION):
            assert not lost.exists() and kept.is_dir()
            assert len(trees(project)) == 2  # that of the living one, and this one
        living.communicate("", timeout=60)
    assert trees(project) == [] and not list(temporary.iterdir())


def test_a_folder_that_is_just_being_made_stays(temporary: Path) -> None:
    """Its lock may not be there yet; an old one without a lock is nobody's. Other people's names are left alone."""
    young, old, other = (temporary / name for name in ("fp8bench-duel-young", "fp8bench-duel-old", "else"))
    for folder in (young, old, other):
        folder.mkdir()
    past = time.time() - 10 * scratches._YOUNG_SECONDS
    os.utime(old, (past, past))
    (temporary / "fp8bench-duel-link").symlink_to(other)
    sweep()
    assert young.is_dir() and other.is_dir() and not old.exists() and (temporary / "fp8bench-duel-link").is_symlink()


def test_hooks_do_not_run(project: Path) -> None:
    """A post-checkout hook may install something, or fail."""
    hook = project / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\ntouch ran\nexit 1\n")
    hook.chmod(0o755)
    repository = repository_of(project, OPTION)
    with scratch() as folder, worktree(repository, "HEAD", folder, OPTION) as tree:
        assert not (tree / "ran").exists()


def test_in_a_hook_the_folder_counts(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """git tells hooks where the repository is that they are of."""
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert repository_of(project, OPTION) == project.resolve()


@pytest.mark.parametrize("word", ["nope", "", "--help", "v1:file", "0" * 40])
def test_an_unknown_revision(word: str, project: Path) -> None:
    """It is named, and what else may be meant."""
    with pytest.raises(UsageError, match=r"is no commit of the repository .*Give a commit, a branch or a tag"):
        revision_of(repository_of(project, OPTION), word, OPTION)


def test_a_shallow_clone_says_how_to_get_more(project: Path, tmp_path: Path) -> None:
    """As CI makes them."""
    git(tmp_path, "clone", "-q", "--depth", "1", project.as_uri(), "shallow")
    with pytest.raises(UsageError, match=r"The clone is shallow .*`git fetch --unshallow`"):
        revision_of(repository_of(tmp_path / "shallow", OPTION), "HEAD~1", OPTION)


def test_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one without git, nor a bare one."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(UsageError, match=r"--against wants a git repository.*not a git repository"):
        repository_of(tmp_path, OPTION)
    git(tmp_path, "init", "-q", "--bare", "bare")
    with pytest.raises(UsageError, match=r"must be run in a work tree"):
        repository_of(tmp_path / "bare", OPTION)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"git cannot be run"):
        repository_of(tmp_path, OPTION)


def test_a_tree_that_cannot_be_made(project: Path, temporary: Path) -> None:
    """git's own words are in the sentence, and nothing is left."""
    repository = repository_of(project, OPTION)
    with scratch() as folder:
        (folder / "tree").mkdir()
        (folder / "tree" / "there").write_text("already")
        with pytest.raises(UsageError, match=r"no working tree of HEAD could be made: .*already exists"):
            worktree(repository, "HEAD", folder, OPTION).__enter__()
    assert trees(project) == [] and not list(temporary.iterdir())


def test_no_room_for_anything_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says which variable names another place."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(StoreError, match=r"set TMPDIR to a folder"):
        scratch().__enter__()


def test_a_package_comes_without_its_neighbours(tmp_path: Path) -> None:
    """What lies beside it would shadow what a partner has of that name."""
    site = tmp_path / "site-packages"
    for name in ("wanted", "torch"):
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text("")
    folder = package_beside(tmp_path / "package", site / "wanted")
    assert [path.name for path in folder.iterdir()] == ["wanted"]
    assert (folder / "wanted" / "__init__.py").is_file()
