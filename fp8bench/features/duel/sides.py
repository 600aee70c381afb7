"""The difference between the sides of a duel: an interpreter, or a working tree of a different revision.

The tree is in a temporary folder. When the duel ends, even by SIGKILL, its warden process removes the folder; after a
killed warden the next duel does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fp8bench.errors import StoreError, UsageError
from fp8bench.features.duel.partners import Start
from fp8bench.features.duel.values import AFTER, BEFORE
from fp8bench.files import PARTIAL, is_locked, lock
from fp8bench.measure.interrupts import ignore_interrupts
from fp8bench.store.commit_runs import find_commit

PREFIX = "fp8bench-duel-"
_LOCK = "owner.lock"
# A younger folder without a lock may still be under construction by a process that waits for a core.
_YOUNG_SECONDS = 600.0
# A shell script that waits for the end of this process, makes git forget the tree, and removes the folder, into which a
# terminating worker may still write.
_WARDEN = """cat; git -C "$1/tree" worktree remove --force "$1/tree"
for again in 1 2 3 4 5; do rm -rf "$1" && exit; sleep 1; done"""


@contextmanager
def scratch() -> Iterator[Path]:
    """Yields a temporary folder; a lock in it, held while this process lives, keeps other duels from removing it."""
    sweep()
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
        owner = (folder / PARTIAL).open("w")
        lock(owner, 0)
        (folder / PARTIAL).rename(folder / _LOCK)  # nobody can find it unlocked
    except OSError as error:
        raise StoreError(
            f"no temporary folder can be made ({error.strerror}). Make room, or set TMPDIR to a folder that has some."
        ) from None
    warden = subprocess.Popen(
        ["sh", "-c", _WARDEN, "sh", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=_environment(),
        start_new_session=True,
    )
    try:
        with owner:
            yield folder
    finally:
        with ignore_interrupts():
            shutil.rmtree(folder, ignore_errors=True)
            warden.communicate()


def sweep() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.getuid() and not folder.is_symlink():
                try:
                    is_abandoned = not is_locked(folder / _LOCK)
                except FileNotFoundError:
                    is_abandoned = time.time() - folder.stat().st_mtime > _YOUNG_SECONDS
                if is_abandoned:
                    shutil.rmtree(folder, ignore_errors=True)


def package_beside(folder: Path, package: Path) -> Path:
    """Creates a folder that only has a link to one package, and returns it. The package may be in a folder of installed
    packages, which must not be importable."""
    folder.mkdir()
    (folder / package.name).symlink_to(package, target_is_directory=True)
    return folder


_GIT_SECONDS = 600.0
# In a git hook these name the hook's repository, and would override the folder.
_WHERE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR")


def repository_of(folder: Path, option: str) -> Path:
    done = _git(folder, "rev-parse", "--show-toplevel")
    if done.returncode:
        raise UsageError(
            f"{option} wants a git repository, and {folder} is in none: {_words(done)}. Run it in a working tree."
        )
    return Path(done.stdout.rstrip("\n")).resolve()


def is_dirty(repository: Path) -> bool:
    return bool(_git(repository, "status", "--porcelain", "--untracked-files=no").stdout.strip())


def revision_of(repository: Path, word: str, option: str) -> str:
    commit = find_commit(word, repository)
    if commit is not None:
        return commit
    hint = "Give a commit, a branch or a tag; `git fetch` gets those of others."
    if _git(repository, "rev-parse", "--is-shallow-repository").stdout.strip() == "true":
        hint = "The clone is shallow and lacks what is older: `git fetch --unshallow` gets it."
    raise UsageError(f"{option} {word!r:.200} is not a commit of the repository {repository}. {hint}")


@contextmanager
def worktree(repository: Path, commit: str, folder: Path, option: str) -> Iterator[Path]:
    """Checks out the commit below a scratch folder, and always removes it afterwards. Hooks do not run: one that
    installs something would also change this tree."""
    # Make git forget the trees of killed duels, whose folders have been removed.
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
        with ignore_interrupts():
            _git(repository, "worktree", "remove", "--force", str(tree))


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _WHERE} | {"LC_ALL": "C"}


def _git(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["git", *words]
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env=_environment(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", f"git cannot be run ({error.strerror})")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"git gave no answer for {_GIT_SECONDS:g} s")


def _words(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    fatal = next((line for line in lines if line.startswith(("fatal:", "error:"))), lines[-1] if lines else "no reason")
    return fatal.removeprefix("fatal: ").removeprefix("error: ").rstrip(".")[:300]


def interpreter(word: str, option: str) -> str:
    """Returns the interpreter for a program's name or path, or the folder of a virtual environment. Links are not
    followed: a virtual environment's Python is a link, and its location determines its packages."""
    folder, option_text = Path(word) / "bin" / "python", f"{option} {word!r:.200}"
    program = str(folder) if Path(word).is_dir() and folder.exists() else shutil.which(word)
    if program is None:
        raise UsageError(
            f"{option_text} is not a program. Give a Python's name or path, or a virtual environment's folder."
        )
    return str(Path(program).absolute())


PACKAGE = Path(__file__).resolve().parents[2]
# The prefix of a side's title if the side is a revision of fp8bench.
OWN = "fp8bench at "
SAME = "both sides are the same: what they differ by is noise"
_INSTALLED = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True)
class DuelQuestion:
    """The difference between the sides, as given on the command line; None means what runs here."""

    python_a: str | None = None
    python_b: str | None = None
    against: str | None = None
    against_self: str | None = None
    sessions: int | None = None


Opened = tuple[Start, Start, tuple[str, ...]]


@contextmanager
def open_sides(question: DuelQuestion, imports: tuple[str, ...]) -> Iterator[Opened]:
    # 1. Allow only one change at a time.
    if question.against is not None and question.against_self is not None:
        raise UsageError(
            "--against and --against-self would change two things at once, and the cause would stay unknown. "
            "Leave one out."
        )
    # 2. Interpreters before folders: reject a wrong one before anything is copied.
    pythons = [
        sys.executable if word is None else interpreter(word, option)
        for option, word in (("--python-a", question.python_a), ("--python-b", question.python_b))
    ]
    # 3. Both sides import from folders that only contain fp8bench, so that no other installed packages are visible.
    with scratch() as folder:
        if question.against is not None or question.against_self is not None:
            with _against(question, pythons, imports, folder) as sides:
                yield sides
            return
        paths = (str(package_beside(folder / "package", PACKAGE)), *_own_paths(imports))
        side_a, side_b = (
            Start(name, python, paths, "this Python" if python == sys.executable else "another Python", imports)
            for name, python in zip((BEFORE, AFTER), pythons, strict=True)
        )
        yield side_a, side_b, () if any((question.python_a, question.python_b)) else (SAME,)


@contextmanager
def _against(
    question: DuelQuestion, pythons: Sequence[str], imports: tuple[str, ...], folder: Path
) -> Iterator[Opened]:
    # 1. Choose the repository: of fp8bench, or of the measured code.
    is_fp8bench = question.against is None
    option, word = ("--against-self", question.against_self) if is_fp8bench else ("--against", question.against)
    assert word is not None
    repository = repository_of(PACKAGE if is_fp8bench else Path.cwd(), option)
    if not is_fp8bench and PACKAGE.parent == repository:
        raise UsageError("this repository is fp8bench's own, which --against does not exchange. Use --against-self.")
    if is_fp8bench and PACKAGE.parent != repository:
        raise UsageError(
            f"{option} wants fp8bench to run from a checkout of its repository, and it runs from {PACKAGE}. Install it "
            "from one with `pip install -e`."
        )
    # 2. Titles name the compared commits, and whether this tree has uncommitted changes.
    commit, checked_out = revision_of(repository, word, option), find_commit("HEAD", repository) or ""
    changed = " with uncommitted changes" if is_dirty(repository) else ""
    title = commit[:8] if commit.startswith(word) else f"{word} ({commit[:8]})"
    this_tree = f"this tree ({checked_out[:8]}{changed})"
    same = commit == checked_out and not changed and pythons[0] == pythons[1]
    notes = (SAME,) if same else ()
    paths = _own_paths(imports)
    # 3. Check out the old commit in a separate tree; the current checkout is unchanged.
    with worktree(repository, commit, folder, option) as tree:
        if not is_fp8bench:
            # The same fp8bench measures both: only the user's paths move into the old tree.
            package = str(package_beside(folder / "package", PACKAGE))
            resolved = {path: Path(path).resolve() for path in (*_paths_in(repository), *paths)}
            paths, tree_paths = (
                list(resolved),
                list(
                    dict.fromkeys(
                        str(tree / real.relative_to(repository)) if real.is_relative_to(repository) else path
                        for path, real in resolved.items()
                    )
                ),
            )
            moved, moving = _moved_imports(imports, repository, tree, word)
            yield (
                Start(BEFORE, pythons[0], (package, *tree_paths), title, moved, commit, tree),
                Start(AFTER, pythons[1], (package, *paths), this_tree, imports, checked_out, repository),
                (*moving, *notes),
            )
            return
        if not (tree / PACKAGE.name / "__init__.py").is_file():
            raise UsageError(
                f"{option} {word!r:.200} ({commit[:8]}) has no package {PACKAGE.name}. Choose a newer one."
            )
        # fp8bench itself differs here, and the user's paths are the same.
        old = (str(package_beside(folder / "before", tree / PACKAGE.name)), *paths)
        new = (str(package_beside(folder / "after", PACKAGE)), *paths)
        yield (
            Start(BEFORE, pythons[0], old, f"{OWN}{title}", imports, commit),
            Start(AFTER, pythons[1], new, f"fp8bench: {this_tree}", imports, checked_out),
            notes,
        )


def _own_paths(imports: tuple[str, ...]) -> list[str]:
    """Returns folders with the user's code for both sides: the working directory if there are imports, and PYTHONPATH.
    Folders of installed packages belong to this interpreter, and are left out."""
    folder = [str(Path.cwd())] if imports else []
    folders = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return list(dict.fromkeys((*folder, *(path for path in folders if not _INSTALLED & {*Path(path).parts}))))


def _paths_in(top: Path) -> list[str]:
    environment, folders = Path(sys.prefix).resolve(), [Path.cwd()]
    for path in map(Path, sys.path):
        inside = path.resolve().is_relative_to(top) and path.is_dir() and not _INSTALLED & {*path.parts}
        if inside and not (environment != top and path.resolve().is_relative_to(environment)):
            folders.append(path.resolve())
    return list(dict.fromkeys(map(str, folders)))


def _moved_imports(imports: tuple[str, ...], top: Path, tree: Path, word: str) -> tuple[tuple[str, ...], list[str]]:
    moved, notes = [], []
    for name in imports:
        path = Path(name).resolve()
        moved_path = tree / path.relative_to(top) if name.endswith(".py") and path.is_relative_to(top) else None
        if moved_path is not None and not moved_path.is_file():
            notes.append(f"{name} is not in {word}: both sides run it as this tree has it, with their own library")
            moved_path = None
        moved.append(name if moved_path is None else str(moved_path))
    return tuple(moved), notes
