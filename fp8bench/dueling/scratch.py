"""A temporary folder that goes when its duel ends, and at the next duel if this one was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fp8bench.errors import StoreError
from fp8bench.interrupts import ignored

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
        lock = (folder / _LOCK).open("w")
    except OSError as error:
        raise StoreError(
            f"no temporary folder can be made ({error.strerror}). Make room, or set TMPDIR to a folder that has some."
        ) from None
    try:
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
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
        with (folder / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return time.time() - folder.stat().st_mtime > _YOUNG_SECONDS
    except BlockingIOError:
        return False
    return True


def package_beside(folder: Path, package: Path) -> Path:
    """A folder that holds a link to one package and nothing else: what else lies beside it shall not come along.

    `folder` is the one to make. The package may lie in a folder of installed packages.
    """
    folder.mkdir()
    (folder / package.name).symlink_to(package, target_is_directory=True)
    return folder
