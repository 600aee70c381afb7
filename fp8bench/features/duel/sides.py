"""Prepares the two sides of a duel: their interpreters, and the working tree of a different revision.

The working tree is in a temporary folder. A cleanup process removes the folder when the duel ends, even after
SIGKILL. If the cleanup process is killed as well, the next duel removes the folder.
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
from fp8bench.features.duel.partners import WorkerStart
from fp8bench.features.duel.values import AFTER, BEFORE
from fp8bench.files import PARTIAL_FILE_SUFFIX, is_locked, lock
from fp8bench.measure.interrupts import ignore_interrupts
from fp8bench.store.commit_runs import find_commit

FOLDER_PREFIX = "fp8bench-duel-"
_LOCK_FILE = "owner.lock"
# A folder without a lock file is removed only if it is older than this. A younger one may still be under construction
# by a process that waits for a core.
_MIN_ABANDONED_SECONDS = 600.0
# A shell script that waits until this process ends (which ends the input of `cat`), makes git forget the working tree,
# and removes the folder. It retries, because a terminating worker may still write into the folder.
_CLEANUP_SCRIPT = """cat; git -C "$1/tree" worktree remove --force "$1/tree"
for again in 1 2 3 4 5; do rm -rf "$1" && exit; sleep 1; done"""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yields a temporary folder. This process holds a lock in the folder while it lives, so that other duels do not
    remove it.
    """
    remove_stale_folders()
    try:
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX)).resolve()
        lock_file = (folder / PARTIAL_FILE_SUFFIX).open("w")
        lock(lock_file, 0)
        # The lock file gets its name when it is already locked.
        (folder / PARTIAL_FILE_SUFFIX).rename(folder / _LOCK_FILE)
    except OSError as error:
        raise StoreError(
            f"no temporary folder can be created ({error.strerror}). Free disk space, or set TMPDIR to "
            "a different folder."
        ) from None
    folder_cleanup_process = subprocess.Popen(
        ["sh", "-c", _CLEANUP_SCRIPT, "sh", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=_environment(),
        # In a separate session, Ctrl-C does not reach the cleanup.
        start_new_session=True,
    )
    try:
        with lock_file:
            yield folder
    finally:
        with ignore_interrupts():
            shutil.rmtree(folder, ignore_errors=True)
            folder_cleanup_process.communicate()


def remove_stale_folders() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):
            # Leave the folders of other users alone, and do not follow links.
            if folder.lstat().st_uid == os.getuid() and not folder.is_symlink():
                try:
                    is_abandoned = not is_locked(folder / _LOCK_FILE)
                except FileNotFoundError:
                    is_abandoned = time.time() - folder.stat().st_mtime > _MIN_ABANDONED_SECONDS
                if is_abandoned:
                    shutil.rmtree(folder, ignore_errors=True)


def link_package(folder: Path, package: Path) -> Path:
    """Creates a folder with a link to a single package, and returns it. No other package may become importable."""
    folder.mkdir()
    (folder / package.name).symlink_to(package, target_is_directory=True)
    return folder


_GIT_LIMIT_SECONDS = 600.0
# A git hook sets these variables to its own repository, so git would ignore the current folder.
_GIT_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR")


def find_repository(folder: Path, option: str) -> Path:
    result = _run_git(folder, "rev-parse", "--show-toplevel")
    if result.returncode:
        raise UsageError(
            f"{option} needs a git repository, but {folder} is not in one: {_read_git_stderr(result)}. "
            "Run it in a working tree."
        )
    return Path(result.stdout.rstrip("\n")).resolve()


def has_uncommitted_changes(repository: Path) -> bool:
    return bool(_run_git(repository, "status", "--porcelain", "--untracked-files=no").stdout.strip())


def find_revision(repository: Path, revision: str, option: str) -> str:
    commit = find_commit(revision, repository)
    if commit is not None:
        return commit
    hint = "Give a commit, a branch or a tag; `git fetch` gets those of the remote."
    if _run_git(repository, "rev-parse", "--is-shallow-repository").stdout.strip() == "true":
        hint = "The clone is shallow and lacks older commits: `git fetch --unshallow` gets them."
    raise UsageError(f"{option} {revision!r:.200} is not a commit of the repository {repository}. {hint}")


@contextmanager
def worktree(repository: Path, commit: str, folder: Path, option: str) -> Iterator[Path]:
    """Checks out the commit in a scratch folder, and removes it after the `with` block. Git hooks do not run, because
    they might change files outside this folder."""
    # 1. Make git forget the working trees of killed duels, whose folders were removed.
    for line in _run_git(repository, "worktree", "list", "--porcelain").stdout.splitlines():
        path = Path(line.removeprefix("worktree "))
        if line.startswith("worktree ") and path.parent.name.startswith(FOLDER_PREFIX) and not path.exists():
            _run_git(repository, "worktree", "remove", "--force", str(path))
    # 2. Check out the commit. Without a folder of hooks, git runs none.
    worktree_folder = folder / "tree"
    try:
        result = _run_git(
            repository,
            "-c",
            f"core.hooksPath={os.devnull}",
            "worktree",
            "add",
            "--detach",
            str(worktree_folder),
            commit,
        )
        if result.returncode:
            raise UsageError(
                f"{option}: no working tree of {commit[:8]} could be created: "
                f"{_read_git_stderr(result)}. Free disk space, or see "
                "`git worktree list`."
            )
        yield worktree_folder
    finally:
        with ignore_interrupts():
            _run_git(repository, "worktree", "remove", "--force", str(worktree_folder))


def _environment() -> dict[str, str]:
    # LC_ALL=C gives English messages, in which `_read_git_stderr` looks for "fatal:" and "error:".
    return {name: value for name, value in os.environ.items() if name not in _GIT_VARIABLES} | {"LC_ALL": "C"}


def _run_git(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["git", *words]
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env=_environment(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_LIMIT_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", f"git cannot be run ({error.strerror})")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"git did not answer within {_GIT_LIMIT_SECONDS:g} s")


def _read_git_stderr(result: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    error_line = next(
        (line for line in lines if line.startswith(("fatal:", "error:"))), lines[-1] if lines else "no reason"
    )
    return error_line.removeprefix("fatal: ").removeprefix("error: ").rstrip(".")[:300]


def find_interpreter(python: str, option: str) -> str:
    """Returns the path of a Python, given its name, its path, or the folder of a virtual environment. A link is
    returned unchanged. The Python of a virtual environment is a link, and the location of the link determines its
    packages.
    """
    environment_python = Path(python) / "bin" / "python"
    option_text = f"{option} {python!r:.200}"
    program = str(environment_python) if Path(python).is_dir() and environment_python.exists() else shutil.which(python)
    if program is None:
        raise UsageError(
            f"{option_text} is not a program. Give a Python's name or path, or a virtual environment's folder."
        )
    return str(Path(program).absolute())


PACKAGE_FOLDER = Path(__file__).resolve().parents[2]
# The title of a side starts with this if the side is a revision of fp8bench.
FP8BENCH_TITLE = "fp8bench at "
EQUAL_SIDES_NOTE = "both sides are equal, so any difference is noise"
_PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True)
class DuelQuestion:
    """How the two sides differ, as given on the command line. None stands for the Python or code that runs now."""

    python_a: str | None = None
    python_b: str | None = None
    against: str | None = None
    against_self: str | None = None
    sessions: int | None = None


DuelSideStarts = tuple[WorkerStart, WorkerStart, tuple[str, ...]]


@contextmanager
def open_duel_sides(question: DuelQuestion, imports: tuple[str, ...]) -> Iterator[DuelSideStarts]:
    # 1. Allow only one difference between the sides.
    if question.against is not None and question.against_self is not None:
        raise UsageError(
            "--against and --against-self would change two things at once, so the cause would stay unknown. Omit one."
        )
    # 2. Find the interpreters first, so that a wrong one is rejected before anything is copied.
    python_paths = [
        sys.executable if word is None else find_interpreter(word, option)
        for option, word in (("--python-a", question.python_a), ("--python-b", question.python_b))
    ]
    # 3. Let both sides import from folders that only contain fp8bench, so that other installed packages are invisible.
    with scratch_folder() as folder:
        if question.against is not None or question.against_self is not None:
            with _open_revision_sides(question, python_paths, imports, folder) as sides:
                yield sides
            return
        paths = (str(link_package(folder / "package", PACKAGE_FOLDER)), *_find_user_code_folders(imports))
        side_a, side_b = (
            WorkerStart(name, python, paths, "this Python" if python == sys.executable else "another Python", imports)
            for name, python in zip((BEFORE, AFTER), python_paths, strict=True)
        )
        yield side_a, side_b, () if any((question.python_a, question.python_b)) else (EQUAL_SIDES_NOTE,)


@contextmanager
def _open_revision_sides(
    question: DuelQuestion, python_paths: Sequence[str], imports: tuple[str, ...], folder: Path
) -> Iterator[DuelSideStarts]:
    # 1. Choose the repository: of fp8bench, or of the measured code.
    is_fp8bench = question.against is None
    option, revision = ("--against-self", question.against_self) if is_fp8bench else ("--against", question.against)
    assert revision is not None
    repository = find_repository(PACKAGE_FOLDER if is_fp8bench else Path.cwd(), option)
    if not is_fp8bench and PACKAGE_FOLDER.parent == repository:
        raise UsageError("this is the repository of fp8bench, which --against does not replace. Use --against-self.")
    if is_fp8bench and PACKAGE_FOLDER.parent != repository:
        raise UsageError(
            f"{option} needs fp8bench to run from a checkout of its repository, but it runs from {PACKAGE_FOLDER}. "
            "Install it from a checkout with `pip install -e`."
        )
    # 2. Name the compared commits in the titles, and whether this tree has uncommitted changes.
    commit = find_revision(repository, revision, option)
    current_commit = find_commit("HEAD", repository) or ""
    change_note = " with uncommitted changes" if has_uncommitted_changes(repository) else ""
    title = commit[:8] if commit.startswith(revision) else f"{revision} ({commit[:8]})"
    current_tree_title = f"this tree ({current_commit[:8]}{change_note})"
    is_same_code = commit == current_commit and not change_note and python_paths[0] == python_paths[1]
    notes = (EQUAL_SIDES_NOTE,) if is_same_code else ()
    paths = _find_user_code_folders(imports)
    # 3. Check out the old commit in a separate tree. The current checkout stays unchanged.
    with worktree(repository, commit, folder, option) as working_tree:
        if not is_fp8bench:
            # The same fp8bench measures both sides: only the user's paths move into the old tree.
            package = str(link_package(folder / "package", PACKAGE_FOLDER))
            resolved_path_by_path = {path: Path(path).resolve() for path in (*_find_paths_below(repository), *paths)}
            paths = list(resolved_path_by_path)
            paths_in_old_tree = list(
                dict.fromkeys(
                    str(working_tree / real.relative_to(repository)) if real.is_relative_to(repository) else path
                    for path, real in resolved_path_by_path.items()
                )
            )
            imports_of_old_side, move_notes = _move_imports(imports, repository, working_tree, revision)
            yield (
                WorkerStart(
                    BEFORE,
                    python_paths[0],
                    (package, *paths_in_old_tree),
                    title,
                    imports_of_old_side,
                    commit,
                    working_tree,
                ),
                WorkerStart(
                    AFTER, python_paths[1], (package, *paths), current_tree_title, imports, current_commit, repository
                ),
                (*move_notes, *notes),
            )
            return
        if not (working_tree / PACKAGE_FOLDER.name / "__init__.py").is_file():
            raise UsageError(
                f"{option} {revision!r:.200} ({commit[:8]}) has no package {PACKAGE_FOLDER.name}. "
                "Choose a newer commit."
            )
        # Both sides import the user's code from the same paths, but fp8bench from different ones.
        old_paths = (str(link_package(folder / "before", working_tree / PACKAGE_FOLDER.name)), *paths)
        new_paths = (str(link_package(folder / "after", PACKAGE_FOLDER)), *paths)
        yield (
            WorkerStart(BEFORE, python_paths[0], old_paths, f"{FP8BENCH_TITLE}{title}", imports, commit),
            WorkerStart(AFTER, python_paths[1], new_paths, f"fp8bench: {current_tree_title}", imports, current_commit),
            notes,
        )


def _find_user_code_folders(imports: tuple[str, ...]) -> list[str]:
    """Returns the folders with the user's code, for both sides: PYTHONPATH, and the working directory if there are
    imports. Folders of installed packages are left out, because they belong to this interpreter.
    """
    working_folders = [str(Path.cwd())] if imports else []
    folders = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return list(
        dict.fromkeys((*working_folders, *(path for path in folders if not _PACKAGE_FOLDERS & {*Path(path).parts})))
    )


def _find_paths_below(top: Path) -> list[str]:
    environment = Path(sys.prefix).resolve()
    folders = [Path.cwd()]
    for path in map(Path, sys.path):
        is_importable_subfolder = (
            path.resolve().is_relative_to(top) and path.is_dir() and not _PACKAGE_FOLDERS & {*path.parts}
        )
        if is_importable_subfolder and not (environment != top and path.resolve().is_relative_to(environment)):
            folders.append(path.resolve())
    return list(dict.fromkeys(map(str, folders)))


def _move_imports(
    imports: tuple[str, ...], top: Path, working_tree: Path, revision: str
) -> tuple[tuple[str, ...], list[str]]:
    imports_of_old_side = []
    notes = []
    for name in imports:
        path = Path(name).resolve()
        moved_import_path = (
            working_tree / path.relative_to(top) if name.endswith(".py") and path.is_relative_to(top) else None
        )
        if moved_import_path is not None and not moved_import_path.is_file():
            notes.append(
                f"{name} is not in {revision}: both sides run this tree's file, each with its revision of other modules"
            )
            moved_import_path = None
        imports_of_old_side.append(name if moved_import_path is None else str(moved_import_path))
    return tuple(imports_of_old_side), notes
