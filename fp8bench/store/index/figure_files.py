"""What figures were made of (run files with their stamps, suites with their grids), and a memory of found steps.

Steps that were found in series of values are kept in `<store>/figures/steps.json`, under a digest of the values and of
the code that finds them, so that no entry can be out of date. The file is a cache: if broken it is made anew, and it is
not written over where it is a newer fp8bench's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cache
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from fp8bench.analysis.steps import change_points
from fp8bench.analysis.steps.change_points import Step, Values, steps_of_many
from fp8bench.files import compact, sealed, unsealed, write_whole
from fp8bench.model import Fault
from fp8bench.store.commit_runs import CommitRuns, TrackedRun, by_place, read_runs
from fp8bench.store.runs.listing import id_in, id_of
from fp8bench.store.series import fingerprint

P = TypeVar("P")
_DIGITS = 32  # of a digest
UNKNOWN = ""  # instead of the digest of a suite that is not imported
AGAIN = "Delete it: the next command makes it again from the runs"


class Stamp(NamedTuple):
    """A run file as it was: path within the store, bytes, last change, a digest of its content, the id of its run."""

    name: str
    size: int
    changed_ns: int
    digest: str
    id: str


class Fingerprints(dict[str, str]):
    """For each suite a digest of what decides which cases are tracked; computed once."""

    def __missing__(self, name: str) -> str:
        words = fingerprint(name)
        self[name] = hashlib.blake2b(words.encode()).hexdigest()[:_DIGITS] if words else UNKNOWN
        return self[name]


def are_known(suites: Mapping[str, str], known: Fingerprints, richer: bool = False) -> bool:
    """Whether suites are the same here; with `richer` they may also be unknown here."""
    return all(known[name] in (before, *([UNKNOWN] if richer else [])) for name, before in suites.items())


class CommitFigures(NamedTuple, Generic[P]):
    """The figures of the runs of one commit: run files, the suites of their cases, how many runs are tracked, why
    others are not, and a table for each place, or where it is kept."""

    sources: tuple[Stamp, ...]
    suites: dict[str, str]
    runs: int
    left: tuple[str, ...]
    places: tuple[P, ...]


def figures_of_runs(
    read: CommitRuns, sources: Iterable[Stamp], known: Fingerprints, made: Callable[[Sequence[TrackedRun]], P]
) -> CommitFigures[P]:
    """`made` makes the table of a place from its runs."""
    suites = {name: known[name] for name in sorted(read.suites)}
    return CommitFigures(tuple(sources), suites, len(read.runs), read.left, tuple(map(made, by_place(read.runs))))


def read_stamped(store: Path, paths: Sequence[Path]) -> tuple[CommitRuns, list[Stamp] | None]:
    """Returns the runs of a commit and the stamps of their files, or None for these if one changed meanwhile."""
    before: list[Stamp] = []

    def content_of(path: Path) -> bytes:
        stamp, content = stamped(store, path)
        before.append(stamp)
        return content

    read = read_runs(paths, content_of=content_of)
    with contextlib.suppress(OSError):
        if as_they_are(store, paths, before) == before:
            return read, before
    return read, None


def stamped(store: Path, path: Path) -> tuple[Stamp, bytes]:
    """Returns the stamp of a run file, and its content. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        status, content = os.fstat(file.fileno()), file.readall()
    (name,), digest = names_of(store, [path]), hashlib.blake2b(content).hexdigest()[:_DIGITS]
    return Stamp(name, status.st_size, status.st_mtime_ns, digest, id_in(content) or id_of(path)), content


def digest_of(path: Path) -> str:
    """Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, hashlib.blake2b).hexdigest()[:_DIGITS]


def names_of(store: Path, paths: Iterable[Path]) -> list[str]:
    begin = len(str(store / "-")) - 1
    return [str(path)[begin:] for path in paths]


def as_they_are(store: Path, runs: Sequence[Path], before: Sequence[Stamp]) -> list[Stamp] | None:
    """Returns the stamps with today's dates if the files are the same, else None.

    A copy, or a file that git checked out again, has the same content and another date.
    """
    if sorted(stamp.name for stamp in before) != sorted(names_of(store, runs)):
        return None
    current = []
    for stamp in before:
        path = store / stamp.name
        status = path.stat()
        if status.st_size != stamp.size or (status.st_mtime_ns != stamp.changed_ns and digest_of(path) != stamp.digest):
            return None
        current.append(stamp._replace(changed_ns=status.st_mtime_ns))
    return current


STEPS_VERSION = 1
# All entries beside those of the present series are dropped when they are more than this.
_MOST_OTHERS = 5000
# From so many series on it takes long to search them again, so that a failure to keep their steps is reported.
_WORTH_KEEPING = 100


@dataclass
class StepMemory:
    """The steps of series that were searched before. `troubles` are sentences on a file that could not be used."""

    store: Path
    troubles: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.store / "figures" / "steps.json"

    def steps_of_many(self, series: Sequence[Values]) -> list[tuple[Step, ...]]:
        """Returns the steps of each series; only new series are searched."""
        code = _digest_of_code()
        values = [np.ascontiguousarray(own, dtype="<f8") for own in series]
        digests = [hashlib.blake2b(code + value.tobytes(), digest_size=16).hexdigest() for value in values]
        known = self._recall()
        missing = list({digest: place for place, digest in enumerate(digests) if digest not in known}.values())
        if missing:
            looked_at = steps_of_many([values[place] for place in missing])
            new = {digests[place]: steps for place, steps in zip(missing, looked_at, strict=True)}
            others = {digest: known[digest] for digest in known.keys() - set(digests)}
            known = {digest: new[digest] if digest in new else known[digest] for digest in digests}
            self._learn({**(others if len(others) <= _MOST_OTHERS else {}), **known}, len(new))
        return [known[digest] for digest in digests]

    def _recall(self) -> dict[str, tuple[Step, ...]]:
        """Returns what is remembered; nothing, and a trouble, where the file cannot be used."""
        try:
            content = json.loads(self.path.read_bytes())
            if content["version"] > STEPS_VERSION:
                self.troubles.append(f"{self.path} is a newer fp8bench's and was left alone")
            elif content["version"] == STEPS_VERSION:
                known = unsealed(content)["steps"]
                return {digest: tuple(Step(*step) for step in steps) for digest, steps in known.items()}
        except FileNotFoundError:
            pass
        except OSError as error:
            self.troubles.append(f"{self.path} could not be read ({error.strerror})")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self.troubles.append(f"{self.path} had become unreadable and was begun anew")
            with contextlib.suppress(OSError):
                self.path.unlink()
        return {}

    def _learn(self, known: Mapping[str, Sequence[Step]], count: int) -> None:
        """Writes all of it; `count` are new."""
        if self.troubles and self.path.exists():
            return  # a trouble was reported, and the file is not ours
        content = {
            "version": STEPS_VERSION,
            "steps": {key: [astuple(step) for step in steps] for key, steps in known.items()},
        }
        try:
            plain = json.loads(json.dumps(content, default=lambda number: number.item()))
            # Not synced: after a loss of power it is made again.
            write_whole(self.path, compact(sealed(plain)), sync=False)
        except OSError as error:
            if count > _WORTH_KEEPING:
                self.troubles.append(
                    f"what was found in {count} series could not be kept in {self.path} ({error.strerror}): the next "
                    "command looks again"
                )


@cache
def _digest_of_code() -> bytes:
    return hashlib.blake2b(np.__version__.encode() + Path(str(change_points.__file__)).read_bytes()).digest()


def check_steps(store: Path) -> Iterator[Fault]:
    path = StepMemory(store).path
    try:
        unsealed(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, RecursionError) as error:
        yield Fault(str(path), f"it is not what was written ({str(error)[:80]})", AGAIN)
