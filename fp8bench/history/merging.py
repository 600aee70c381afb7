"""The runs of another store taken in: new ones are copied, longer ones appended, and nothing is ever rewritten."""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from fp8bench.errors import StoreError
from fp8bench.history.runs import load_run, run_files
from fp8bench.history.writing import is_being_written, lock_run


@dataclass
class Merged:
    """What became of the other store's runs; `failed` and `notes` are sentences, `same` counts what was here before."""

    copied: list[Path] = field(default_factory=list)
    extended: list[Path] = field(default_factory=list)
    same: int = 0
    failed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def changed(self) -> list[Path]:
        """The run files of ours that say something new."""
        return [*self.copied, *self.extended]


def find_store(folder: Path, ours: Path) -> Path:
    """The store that a folder is, or that lies in it. Raises StoreError where there is none, or it is our own."""
    try:
        places = (folder, folder / ours.name, folder / ".fp8bench")
        found = next((one for one in places if (one / "runs").is_dir()), None)
        if found is None:
            what = "has neither runs nor .fp8bench/runs in it" if folder.is_dir() else "is no directory"
            raise StoreError(f"{folder} is no store: it {what}. Give another machine's .fp8bench, or what it lies in.")
        own, other = ours.resolve(), found.resolve()
    except OSError as error:
        raise StoreError(f"{folder} cannot be read ({error.strerror}).") from None
    if other == own or own in other.parents:
        raise StoreError(f"{folder} is this store, or lies in it. Give the store of another machine.")
    return found


def merge_runs(ours: Path, theirs: Path) -> Merged:
    """Take in the runs of another store, which is only read."""
    merged = Merged()
    known = {path.name: path for path in run_files(ours)}
    for path in reversed(list(run_files(theirs))):
        try:
            _take(path, known.get(path.name), ours, merged)
        except StoreError as error:
            merged.failed.append(str(error))
        except OSError as error:
            merged.failed.append(f"{path} was not taken ({error.strerror}).")
    return merged


def _take(path: Path, here: Path | None, ours: Path, merged: Merged) -> None:
    """One run of theirs; `here` is our file of its name."""
    content = _whole(path, merged)
    load_run(path)  # what is no run file raises
    if here is None:
        merged.copied.append(_copy(content, ours / "runs" / path.parent.name / path.name))
        return
    own = here.read_bytes()
    if own.startswith(content):
        merged.same += 1
    elif content.startswith(own):
        _extend(here, content)
        merged.extended.append(here)
    else:
        merged.failed.append(
            f"run {path.stem} is not the same in both stores: each was gone on with alone. Ours stays as it is, theirs "
            f"is {path}."
        )


def _whole(path: Path, merged: Merged) -> bytes:
    """What is in a file of theirs; its whole lines where it is still being written."""
    if not is_being_written(path):
        return path.read_bytes()
    merged.notes.append(f"run {path.stem} is still being measured there: merge again when it has ended")
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1]


def _copy(content: bytes, target: Path) -> Path:
    """Write a file that was not there, in one step."""
    partial = target.with_name(f".merge-{secrets.token_hex(8)}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(target)
    except OSError as error:
        raise StoreError(f"{target} cannot be written ({error.strerror}). Make room, and merge again.") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    return target


def _extend(here: Path, content: bytes) -> None:
    """Append what ours lacks, under its writer's lock; a kill leaves a beginning of theirs, which merges again."""
    with here.open("ab") as file:
        lock_run(file, here)
        own = here.read_bytes()
        if not content.startswith(own):
            raise StoreError(f"the run {here.stem} has just been gone on with. Merge again.")
        file.write(content[len(own) :])
        file.flush()
        os.fsync(file.fileno())
