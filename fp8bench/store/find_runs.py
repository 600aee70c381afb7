"""Which runs a word means: an id, a file, a commit, a whole store; and which commits git knows."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from fp8bench.errors import RunNotFound, StoreError
from fp8bench.model import Run
from fp8bench.store.commit_runs import commit_of
from fp8bench.store.runs.listing import Listing, each_once, find_run, index_of, listing, without_runs
from fp8bench.store.runs.read import load_head


def commit_named(word: str, folder: Path) -> str | None:
    """The commit that a word means in the repository of a folder ('HEAD', a beginning); None where it means none."""
    command = ["git", "rev-parse", "--verify", "--quiet", "--end-of-options", f"{word}^{{commit}}"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def gone(commits: Iterable[str], folder: Path) -> frozenset[str]:
    """Those that the repository of a folder does not have; none outside of a repository, or where git is not there."""
    asked = list(dict.fromkeys(commits))
    if not asked:
        return frozenset()
    command = ["git", "cat-file", "--batch-check"]
    try:
        done = subprocess.run(
            command, cwd=folder, input="\n".join(asked) + "\n", capture_output=True, text=True, errors="replace",
            timeout=60, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return frozenset(line.removesuffix(" missing") for line in lines if line.endswith(" missing"))


_COMMIT = re.compile(r"[0-9a-f]{4,40}")


class Meant(NamedTuple):
    """Run files, a run each, and sentences on files that were meant and do not count."""

    files: Sequence[Path]
    notes: Sequence[str] = ()


def runs_meant(words: str, store: Path) -> Meant:
    """The runs that are meant, each once: by one word, or by several with commas between.

    A word is a run (id, file's stem, path, 'last'), a commit (its beginning, or what git calls it), or another store,
    which stands for the newest commit in it. Raises RunNotFound where it means nothing, StoreError where nobody knows
    which of several files is the run.
    """
    found = [_of_word(word.strip(), store) for word in words.split(",")]
    named = {path.resolve(): path for one in found for path in one.files}
    once = each_once(named.values()).none_refused()
    return Meant(once.files, [*(note for one in found for note in one.notes), *once.notes(once.copies)])


def _of_word(word: str, store: Path) -> Meant:
    if not word:
        raise RunNotFound("an empty word means no run. Give an id, a file, a commit, a store, or 'last'.")
    try:
        if Path(word).is_dir():
            return _newest_of(Path(word))
        single = word == "last" or Path(word).is_file()
        there = Listing(()) if single else listing(store)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise RunNotFound(f"looking for {word!r:.80} in {str(store)!r:.80} failed ({why}).") from None
    if single or any(word in (path.stem, path.stem.rpartition("-")[2]) for path in there.everything):
        return Meant([find_run(word, store)])
    if _COMMIT.fullmatch(word):
        kept = _of_commit(word, there)
        if kept.files:
            return kept
    commit = commit_named(word, Path())
    if commit is None:
        try:
            return Meant([find_run(word, store)])
        except RunNotFound as error:
            why = str(error).rstrip(".")
            raise RunNotFound(f"{why}, or a commit that was measured, or a store's folder.") from None
    kept = _of_commit(commit, there)
    if not kept.files:
        raise RunNotFound(
            f"{word!r:.80} is the commit {commit[:12]}, of which {store} has no run. Measure it, or name another."
        )
    return kept


def _of_commit(commit: str, there: Listing) -> Meant:
    """The runs of a commit, oldest first; those whose files differed from it are of none."""
    named = [path for path in reversed(there.everything) if commit_of(path).startswith(commit[:8])]
    heads = [(path, head) for path in named if there.counts(path) and (head := _head(path)) is not None]
    alike = [(path, head) for path, head in heads if str(head.environment.get("commit")).startswith(commit)]
    clean = [path for path, head in alike if head.environment.get("dirty") is False]
    if alike and not clean:
        raise RunNotFound(
            f"all runs of {commit[:12]} were made with files that differed from it, so that they are not its runs. "
            "Name them by their ids to compare them all the same."
        )
    notes = there.notes(named)
    if named and not clean and notes:
        raise StoreError(f"no run of {commit[:12]} is left: {'; '.join(notes)}.")
    return Meant(clean, notes)


def _head(path: Path) -> Run | None:
    try:
        return load_head(path)
    except StoreError:
        return None


def _newest_of(store: Path) -> Meant:
    """The runs of the commit that was measured last in a store; the newest alone if it is of no commit."""
    try:
        there = listing(store)
    except OSError as error:
        raise RunNotFound(f"the store {store} cannot be read ({error.strerror}).") from None
    if there.newest is None:
        known = (store / "runs").is_dir() or index_of(store).exists()
        raise RunNotFound(f"{store} {without_runs(store) if known else 'is no store: it has no runs'}.")
    newest = there.that_counts(there.newest)
    head = _head(newest)
    commit = head.environment.get("commit") if head is not None and head.environment.get("dirty") is False else None
    return _of_commit(str(commit), there) if commit is not None else Meant([newest])
