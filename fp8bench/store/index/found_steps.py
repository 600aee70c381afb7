"""What was found out about series of values, remembered in `<store>/index.sqlite`: steps, under a digest of the values.

It is a cache: a file that is broken is begun anew, one that is in use, may not be written, or is a newer fp8bench's is
done without. A digest names the values and the code that looks at them, so that nothing in it can be out of date.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from fp8bench.analysis.steps import change_points, levels
from fp8bench.analysis.steps.change_points import Step, Values, steps_of_many

VERSION = 1
# Another process has it for milliseconds, or for a reason that is not waited for.
_WAIT_SECONDS = 1.0
# What nobody has asked for goes when it is more than this beside what is asked for.
_MOST_OTHERS = 5000
# So many series take long enough to be sorry that what was found could not be kept.
_WORTH_KEEPING = 100
_TABLE = "CREATE TABLE IF NOT EXISTS steps (digest BLOB PRIMARY KEY, found TEXT NOT NULL) WITHOUT ROWID"


_BROKEN = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_ERROR)


class _Newer(Exception):
    """A newer fp8bench's file."""


@dataclass
class Memory:
    """The steps of series that were looked at before. `troubles` are sentences on what did not serve."""

    store: Path
    troubles: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.store / "index.sqlite"

    def steps_of_many(self, series: Sequence[Values]) -> list[tuple[Step, ...]]:
        """The steps of each series, of which only those are looked at that were not before."""
        code = _digest_of_code()
        values = [np.ascontiguousarray(one, dtype="<f8") for one in series]
        digests = [hashlib.blake2b(code + one.tobytes(), digest_size=16).digest() for one in values]
        known = self._recall(digests)
        missing = list(dict.fromkeys(place for place, digest in enumerate(digests) if digest not in known))
        found = dict(zip(missing, steps_of_many([values[place] for place in missing]), strict=True))
        if found:
            self._learn({digests[place]: _text(steps) for place, steps in found.items()}, set(digests))
        return [found[place] if place in found else known[digest] for place, digest in enumerate(digests)]

    def _recall(self, digests: Sequence[bytes]) -> dict[bytes, tuple[Step, ...]]:
        """What is remembered of them; nothing where that cannot be had, and why is a trouble."""
        if not self.path.exists():
            return {}
        try:
            with self._opened("ro") as database:
                if _version(database) < VERSION:
                    return {}
                rows = dict(database.execute("SELECT digest, found FROM steps"))
            return {digest: _steps(rows[digest]) for digest in digests if digest in rows}
        except _Newer:
            self.troubles.append(f"{self.path} is a newer fp8bench's and was left alone")
        except (sqlite3.Error, TypeError, ValueError) as error:
            if _is_broken(error):
                self.troubles.append(f"{self.path} had become unreadable and was begun anew")
                for path in (self.path, self.path.with_name(f"{self.path.name}-journal")):
                    with contextlib.suppress(OSError):
                        path.unlink()
            else:
                self.troubles.append(f"{self.path} could not be read ({error})")
        return {}

    def _learn(self, found: Mapping[bytes, str], asked: set[bytes]) -> None:
        """Remember what was found; others go where they are many."""
        if self.troubles and self.path.exists():
            return  # it was said already, and what lies there is somebody's
        try:
            with self._opened("rwc") as database:
                database.execute("BEGIN IMMEDIATE")
                if _version(database) < VERSION:
                    database.execute("DROP TABLE IF EXISTS steps")
                    database.execute(_TABLE)
                    database.execute(f"PRAGMA user_version = {VERSION}")
                database.executemany("INSERT OR REPLACE INTO steps VALUES (?, ?)", found.items())
                others = [key for (key,) in database.execute("SELECT digest FROM steps") if key not in asked]
                if len(others) > _MOST_OTHERS:
                    database.executemany("DELETE FROM steps WHERE digest = ?", [(key,) for key in others])
                database.execute("COMMIT")
        except (sqlite3.Error, _Newer) as error:
            if len(found) > _WORTH_KEEPING:
                self.troubles.append(
                    f"what was found in {len(found)} series could not be kept in {self.path} ({error}): the next "
                    "command looks again"
                )

    @contextlib.contextmanager
    def _opened(self, mode: str) -> Iterator[sqlite3.Connection]:
        address = f"{self.path.resolve().as_uri()}?mode={mode}"
        database = sqlite3.connect(address, timeout=_WAIT_SECONDS, isolation_level=None, uri=True)
        with contextlib.closing(database):
            database.execute("PRAGMA synchronous = OFF")  # lost power loses nothing that cannot be found again
            yield database


def _version(database: sqlite3.Connection) -> int:
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise _Newer(f"it is of version {version}")
    return int(version)


def _is_broken(error: Exception) -> bool:
    """Whether it will not be better the next time; a lock will."""
    return not isinstance(error, sqlite3.Error) or getattr(error, "sqlite_errorcode", None) in _BROKEN


@cache
def _digest_of_code() -> bytes:
    """What would have to be the same for the same steps to be found."""
    files = [Path(str(module.__file__)) for module in (change_points, levels)]
    return hashlib.blake2b(b"".join([np.__version__.encode(), *(path.read_bytes() for path in files)])).digest()


def _text(steps: Iterable[Step]) -> str:
    return json.dumps([astuple(step) for step in steps], default=lambda number: number.item())


def _steps(text: str) -> tuple[Step, ...]:
    return tuple(Step(*one) for one in json.loads(text))
