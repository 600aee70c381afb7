"""A working tree of another revision, in a temporary folder that goes when its duel ends, and or at the next duel."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fp8bench.errors import StoreError, UsageError
from fp8bench.files import is_locked, lock
from fp8bench.measure.interrupts import ignored
from fp8bench.store.find_runs import commit_named

PREFIX = "fp8bench-duel-"
_LOCK = "owner.lock"
# A folder without its lock may be one that is just being made.
_YOUNG_SECONDS = 60.0


@contextmanager
def scratch() -> Iterator[Path]:
    """The folder; its lock is held as long as this process lives, and so says that it does."""
    sweep()
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
        owner = (folder / _LOCK).open("w")
    except OSError as error:
        raise StoreError(
            f"no temporary folder can be made ({error.strerror}). Make room, or set TMPDIR to a folder that has some."
        ) from None
    try:
        with owner:
            lock(owner, 0)
            yield folder
    finally:
        with ignored():
            shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Remove what duels of this user that were killed have left."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.getuid() and not folder.is_symlink() and _left(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _left(folder: Path) -> bool:
    """Whether nobody holds its lock."""
    try:
        return not is_locked(folder / _LOCK)
    except FileNotFoundError:
        return time.time() - folder.stat().st_mtime > _YOUNG_SECONDS


def package_beside(folder: Path, package: Path) -> Path:
    """A folder that holds a link to one package and nothing else: what else lies beside it shall not come along.

    `folder` is the one to make. The package may lie in a folder of installed packages.
    """
    folder.mkdir()
    (folder / package.name).symlink_to(package, target_is_directory=True)
    return folder


_SECONDS = 600.0
# In a hook they name the repository that the hook is of, and would win over the folder.
_WHERE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR")


def repository_of(folder: Path, option: str) -> Path:
    """The top of the working tree that a folder lies in; raises UsageError where there is none."""
    done = _git(folder, "rev-parse", "--show-toplevel")
    if done.returncode:
        raise UsageError(
            f"{option} wants a git repository, and {folder} is in none: {_words(done)}. Run it in a working tree."
        )
    return Path(done.stdout.rstrip("\n")).resolve()


def is_dirty(repository: Path) -> bool:
    """Whether files that git knows differ from what is checked out."""
    return bool(_git(repository, "status", "--porcelain", "--untracked-files=no").stdout.strip())


def revision_of(repository: Path, word: str, option: str) -> str:
    """The commit a word means; raises UsageError where it means none."""
    commit = commit_named(word, repository)
    if commit is not None:
        return commit
    shallow = _git(repository, "rev-parse", "--is-shallow-repository").stdout.strip() == "true"
    hint = (
        "The clone is shallow and lacks what is older: `git fetch --unshallow` gets it."
        if shallow
        else "Give a commit, a branch or a tag; `git fetch` gets those of others."
    )
    raise UsageError(f"{option} {word!r:.200} is no commit of the repository {repository}. {hint}")


@contextmanager
def worktree(repository: Path, commit: str, folder: Path, option: str) -> Iterator[Path]:
    """That commit checked out below a scratch folder, and gone afterwards, whatever happens.

    Hooks do not run: one that installs something would change this tree too.
    """
    # git forgets the trees of duels that were killed; their folders have been swept away.
    for line in _git(repository, "worktree", "list", "--porcelain").stdout.splitlines():
        path = Path(line.removeprefix("worktree "))
        if line.startswith("worktree ") and path.parent.name.startswith(PREFIX) and not path.exists():
            _git(repository, "worktree", "remove", "--force", str(path))
    tree = folder / "tree"
    try:
        done = _git(repository, "-c", f"core.hooksPath={os.devnull}", "worktree", "add", "--detach", str(tree), commit)
        if done.returncode:
            raise UsageError(
                f"{option}: no working tree of {commit[:8]} could be made: {_words(done)}. Make room, or see "
                "`git worktree list`."
            )
        yield tree
    finally:
        with ignored():
            _git(repository, "worktree", "remove", "--force", str(tree))


def _git(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["git", *words]
    environment = {name: value for name, value in os.environ.items() if name not in _WHERE} | {"LC_ALL": "C"}
    try:
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace", timeout=_SECONDS,
            check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", f"git cannot be run ({error.strerror})")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"git gave no answer for {_SECONDS:g} s")


def _words(done: subprocess.CompletedProcess[str]) -> str:
    """What git says of a failure, in one line."""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    fatal = next((line for line in lines if line.startswith(("fatal:", "error:"))), lines[-1] if lines else "no reason")
    return fatal.removeprefix("fatal: ").removeprefix("error: ").rstrip(".")[:300]
