"""What figures are made of: run files with their stamps, suites with their grids; and steps that were found in them.

What was found out about series of values is remembered in `<store>/figures/steps.json`: steps, under a digest. It is a
cache: a file that is broken is begun anew, one that may not be written, or is a newer fp8bench's, is done without. A
digest names the values and the code that looks at them, so that nothing in it can be out of date.
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
# In the place of the digest of a suite that is not known here.
UNKNOWN = ""
AGAIN = "Delete it: the next command makes it again from the runs"


class Stamp(NamedTuple):
    """A run file as it was: path within the store, bytes, last change, a digest of its content, the id of its run."""

    name: str
    size: int
    changed_ns: int
    digest: str
    id: str


class Fingerprints(dict[str, str]):
    """What decides what is followed of each suite, as a digest; found out once for all commits."""

    def __missing__(self, name: str) -> str:
        words = fingerprint(name)
        self[name] = hashlib.blake2b(words.encode()).hexdigest()[:_DIGITS] if words else UNKNOWN
        return self[name]


def are_known(suites: Mapping[str, str], known: Fingerprints, richer: bool = False) -> bool:
    """Whether suites are those that are known here; with `richer` they may also not be known here at all."""
    return all(known[name] in (before, *([UNKNOWN] if richer else [])) for name, before in suites.items())


class CommitFigures(NamedTuple, Generic[P]):
    """What the runs of one commit come to: the files they were read from, the suites they were asked about, how many
    tell something, why others do not, and for each place a table, or where one is kept."""

    sources: tuple[Stamp, ...]
    suites: dict[str, str]
    runs: int
    left: tuple[str, ...]
    places: tuple[P, ...]


def figures_of_runs(
    read: CommitRuns, sources: Iterable[Stamp], known: Fingerprints, made: Callable[[Sequence[TrackedRun]], P]
) -> CommitFigures[P]:
    """With what is `made` of the runs of each place."""
    suites = {name: known[name] for name in sorted(read.suites)}
    return CommitFigures(tuple(sources), suites, len(read.runs), read.left, tuple(map(made, by_place(read.runs))))


def read_stamped(store: Path, paths: Sequence[Path]) -> tuple[CommitRuns, list[Stamp] | None]:
    """Read the runs of a commit, and say which files those were; None where one changed meanwhile."""
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
    """A run file as it is, and its content. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        status, content = os.fstat(file.fileno()), file.readall()
    (name,), digest = names_of(store, [path]), hashlib.blake2b(content).hexdigest()[:_DIGITS]
    return Stamp(name, status.st_size, status.st_mtime_ns, digest, id_in(content) or id_of(path)), content


def digest_of(path: Path) -> str:
    """A digest of a file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, hashlib.blake2b).hexdigest()[:_DIGITS]


def names_of(store: Path, paths: Iterable[Path]) -> list[str]:
    begin = len(str(store / "-")) - 1
    return [str(path)[begin:] for path in paths]


def as_they_are(store: Path, runs: Sequence[Path], before: Sequence[Stamp]) -> list[Stamp] | None:
    """The stamps with the dates of today, if the runs are the same; None if they are not.

    A copy, or what git checked out again, has the content and another date.
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
# What nobody has asked for goes when it is more than this beside what is asked for.
_MOST_OTHERS = 5000
# So many series take long enough to be sorry that what was found could not be kept.
_WORTH_KEEPING = 100


@dataclass
class StepMemory:
    """The steps of series that were looked at before. `troubles` are sentences on what did not serve."""

    store: Path
    troubles: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.store / "figures" / "steps.json"

    def steps_of_many(self, series: Sequence[Values]) -> list[tuple[Step, ...]]:
        """The steps of each series, of which only those are looked at that were not before."""
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
        """What is remembered; nothing where that cannot be had, and why is a trouble."""
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
        """Write down all of it, of which so many are new."""
        if self.troubles and self.path.exists():
            return  # it was said already, and what lies there is somebody's
        content = {
            "version": STEPS_VERSION,
            "steps": {key: [astuple(step) for step in steps] for key, steps in known.items()},
        }
        try:
            plain = json.loads(json.dumps(content, default=lambda number: number.item()))
            # Lost power loses nothing that cannot be found again.
            write_whole(self.path, compact(sealed(plain)), sync=False)
        except OSError as error:
            if count > _WORTH_KEEPING:
                self.troubles.append(
                    f"what was found in {count} series could not be kept in {self.path} ({error.strerror}): the next "
                    "command looks again"
                )


@cache
def _digest_of_code() -> bytes:
    """What would have to be the same for the same steps to be found."""
    return hashlib.blake2b(np.__version__.encode() + Path(str(change_points.__file__)).read_bytes()).digest()


def check_steps(store: Path) -> Iterator[Fault]:
    path = StepMemory(store).path
    try:
        unsealed(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, RecursionError) as error:
        yield Fault(str(path), f"it is not what was written ({str(error)[:80]})", AGAIN)
