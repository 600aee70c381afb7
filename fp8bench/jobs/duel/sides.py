"""The sides of a duel made ready: interpreters, working trees, and the folders that each side's code comes from."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fp8bench.errors import UsageError
from fp8bench.jobs.duel.worktree import is_dirty, package_beside, repository_of, revision_of, scratch, worktree
from fp8bench.measure.other_interpreter import Start
from fp8bench.model.duel import AFTER, BEFORE
from fp8bench.store.find_runs import commit_named

OLDEST = (3, 11)
_SECONDS = 60.0
_ASK = "import sys; print('python %d.%d.%d' % sys.version_info[:3])"


def interpreter(word: str, option: str) -> str:
    """The interpreter a word means: a program's name or path, or the folder of a virtual environment.

    Links are not followed: a virtual environment's Python is one, and its packages hang on it.
    """
    folder = Path(word) / "bin" / "python"
    found = str(folder) if Path(word).is_dir() and folder.exists() else shutil.which(word)
    if found is None:
        raise UsageError(
            f"{option} {word!r:.200} is no program. Give a Python's name or path, or a virtual environment's folder."
        )
    path = str(Path(found).absolute())
    version = _version(path, f"{option} {word!r:.200}")
    if version[:2] < OLDEST:
        raise UsageError(
            f"{option} {word!r:.200} is Python {'.'.join(map(str, version))}, and fp8bench needs "
            f"{'.'.join(map(str, OLDEST))} or newer there too. Give a newer one."
        )
    return path


def _version(path: str, given: str) -> tuple[int, ...]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
    try:
        done = subprocess.run(
            [path, "-I", "-c", _ASK], capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False,
            stdin=subprocess.DEVNULL, env=environment,
        )  # fmt: skip
    except OSError as error:
        raise UsageError(f"{given} cannot be run ({error.strerror}). Give a Python.") from None
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"{given} did not say within {_SECONDS:g} s which Python it is, and was ended. Give a Python."
        ) from None
    said = re.fullmatch(r"python (\d+)\.(\d+)\.(\d+)", done.stdout.strip())
    if done.returncode or said is None:
        words = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1][:200]
        raise UsageError(
            f"{given} is no Python that runs: asked for its version, it ended with status {done.returncode} and said "
            f"{words!r}. Give a Python."
        )
    return tuple(map(int, said.groups()))


PACKAGE = Path(__file__).resolve().parents[2]
# How the title of a side begins that is a revision of fp8bench's own.
OWN = "fp8bench at "
SAME = "both sides are the same: what they differ by is noise"
_INSTALLED = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True)
class Question:
    """What makes the sides differ, as given; None is what runs here. `sessions` is how many, if given."""

    python_a: str | None = None
    python_b: str | None = None
    against: str | None = None
    against_self: str | None = None
    sessions: int | None = None

    @property
    def nothing(self) -> bool:
        """Whether the sides are the same, so that a duel measures nothing but noise."""
        return not any((self.python_a, self.python_b, self.against, self.against_self))


@dataclass(frozen=True)
class Ready:
    """One side, ready to be started. `tree` is the working tree that its code must come from, if it matters."""

    start: Start
    title: str
    imports: tuple[str, ...]
    commit: str = ""
    tree: Path | None = None


@dataclass(frozen=True)
class Sides:
    """Both sides, and what there is to know about them."""

    before: Ready
    after: Ready
    notes: tuple[str, ...] = ()


@contextmanager
def opened(question: Question, imports: tuple[str, ...]) -> Iterator[Sides]:
    """Both sides, for as long as the body runs. Raises UsageError for what cannot be."""
    if question.against is not None and question.against_self is not None:
        raise UsageError(
            "--against and --against-self would change two things at once, and nobody could say which one did it. "
            "Leave one out."
        )
    pythons = [
        sys.executable if word is None else interpreter(word, option)
        for option, word in (("--python-a", question.python_a), ("--python-b", question.python_b))
    ]
    with scratch() as folder:
        if question.against is not None or question.against_self is not None:
            with _against(question, pythons, imports, folder) as sides:
                yield sides
        else:
            paths = (str(package_beside(folder / "package", PACKAGE)), *_own_paths(imports))
            notes = (SAME,) if question.nothing else ()
            before, after = (
                Ready(
                    Start(name, python, paths), "this Python" if python == sys.executable else "another Python", imports
                )
                for name, python in zip((BEFORE, AFTER), pythons, strict=True)
            )
            yield Sides(before, after, notes)


@contextmanager
def _against(question: Question, pythons: Sequence[str], imports: tuple[str, ...], folder: Path) -> Iterator[Sides]:
    """A revision against this tree: of the user's repository, or of fp8bench's own, whose workers then differ."""
    own = question.against is None
    option, word = ("--against-self", question.against_self) if own else ("--against", question.against)
    assert word is not None
    repository = repository_of(PACKAGE if own else Path.cwd(), option)
    if not own and PACKAGE.parent == repository:
        raise UsageError("this repository is fp8bench's own, whose code --against leaves as it is. Use --against-self.")
    if own and PACKAGE.parent != repository:
        raise UsageError(
            f"{option} wants fp8bench to run from a checkout of its repository, and it runs from {PACKAGE}. Install it "
            "from one with `pip install -e`."
        )
    commit, checked_out = revision_of(repository, word, option), commit_named("HEAD", repository) or ""
    changed = " with uncommitted changes" if is_dirty(repository) else ""
    title = commit[:8] if commit.startswith(word) else f"{word} ({commit[:8]})"
    here = f"this tree ({checked_out[:8]}{changed})"
    same = commit == checked_out and not changed and pythons[0] == pythons[1]
    notes = (SAME,) if same else ()
    paths = _own_paths(imports)
    with worktree(repository, commit, folder, option) as tree:
        if not own:
            package = str(package_beside(folder / "package", PACKAGE))
            paths = [*_paths_in(repository), *paths]
            there = [_moved(path, repository, tree) for path in paths]
            moved, moving = _moved_imports(imports, repository, tree, word)
            yield Sides(
                Ready(_start(BEFORE, pythons[0], package, there), title, moved, commit, tree),
                Ready(_start(AFTER, pythons[1], package, paths), here, imports, checked_out, repository),
                (*moving, *notes),
            )
            return
        if not (tree / PACKAGE.name / "__init__.py").is_file():
            raise UsageError(
                f"{option} {word!r:.200} ({commit[:8]}) has no package {PACKAGE.name}. Choose a newer one."
            )
        before = _start(BEFORE, pythons[0], str(package_beside(folder / "before", tree / PACKAGE.name)), paths)
        after = _start(AFTER, pythons[1], str(package_beside(folder / "after", PACKAGE)), paths)
        yield Sides(
            Ready(before, f"{OWN}{title}", imports, commit),
            Ready(after, f"fp8bench: {here}", imports, checked_out),
            notes,
        )


def _start(name: str, python: str, package: str, paths: Sequence[str]) -> Start:
    return Start(name, python, tuple(dict.fromkeys((package, *paths))))


def _own_paths(imports: tuple[str, ...]) -> list[str]:
    """Folders with the user's own code on both sides: the working directory if there is some, and PYTHONPATH.

    Folders of installed packages stay behind: they are this interpreter's.
    """
    here = [str(Path.cwd())] if imports else []
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return [*here, *(path for path in given if not _installed(Path(path)))]


def _paths_in(top: Path) -> list[str]:
    """Folders of a repository that this Python looks into, however they came there (an editable install, say)."""
    own = Path(sys.prefix).resolve()
    found = [Path.cwd()]
    for path in map(Path, sys.path):
        inside = path.resolve().is_relative_to(top) and path.is_dir()
        if inside and not _installed(path) and not (own != top and path.resolve().is_relative_to(own)):
            found.append(path.resolve())
    return list(dict.fromkeys(map(str, found)))


def _installed(path: Path) -> bool:
    return bool(_INSTALLED & set(path.parts))


def _moved(path: str, top: Path, tree: Path) -> str:
    """A path below the repository, below the other tree of it; any other as it is."""
    resolved = Path(path).resolve()
    return str(tree / resolved.relative_to(top)) if resolved.is_relative_to(top) else path


def _moved_imports(imports: tuple[str, ...], top: Path, tree: Path, word: str) -> tuple[tuple[str, ...], list[str]]:
    """The user's files as the other tree has them; this tree's, with a note, where it does not."""
    moved, notes = [], []
    for name in imports:
        path = Path(name).resolve()
        other = tree / path.relative_to(top) if name.endswith(".py") and path.is_relative_to(top) else None
        if other is not None and not other.is_file():
            notes.append(f"{name} is not in {word}: both sides run it as this tree has it, with their own library")
            other = None
        moved.append(name if other is None else str(other))
    return tuple(moved), notes
