"""What a commit's runs come to, kept beside them in a file: `<store>/figures/<commit8>.figures`.

The runs hold every sample, and reading them all takes minutes where there are hundreds of large ones. A file of
figures is a function of its commit's runs and of the suites they were asked about; it says which those were, and counts
only while they are the same. It can be deleted at any time.

What was found out about series of values is remembered beside them in `steps.json`: steps, under a digest. It is a
cache: a file that is broken is begun anew, one that may not be written, or is a newer fp8bench's, is done without. A
digest names the values and the code that looks at them, so that nothing in it can be out of date.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from fp8bench import files
from fp8bench.analysis.steps import change_points, levels
from fp8bench.analysis.steps.change_points import Step, Values, steps_of_many
from fp8bench.files import compact, sealed, unsealed, write_whole
from fp8bench.model import Fault
from fp8bench.model.codec import SCHEMA
from fp8bench.store.commit_runs import CommitRuns, TrackedRun, by_place, read_runs
from fp8bench.store.index.tables import ROW, FigureTable, table_of
from fp8bench.store.series import fingerprint

P = TypeVar("P")
# Raised when the same runs would come to other figures, or be written down in another way.
VERSION = 9
_SUFFIX = ".figures"
_SAFE = re.compile(r"[0-9A-Za-z]{1,64}")
_MAGIC = b"fp8bench figures"
_DIGITS = 32  # of a digest
# In the place of the digest of a suite that is not known here.
UNKNOWN = ""
_HEXADECIMAL = frozenset(b"0123456789abcdef")
_AGAIN = "Delete it: the next command makes it again from the runs"


class Stamp(NamedTuple):
    """A run file as it was: path within the store, bytes, last change, and a digest of its content."""

    name: str
    size: int
    changed_ns: int
    digest: str


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


class Unfit(Enum):
    """Why a file of figures does not serve."""

    STALE = "the runs or the suites are others"
    TORN = "it is not what was written"
    NEWER = "a newer fp8bench wrote it"
    RICHER = "it is of suites that are not known here, and whoever imports them will want it"
    ABSENT = "it cannot be read"


def figures_file(store: Path, commit: str) -> Path:
    """Where the figures of a commit lie, which goes by the beginning that its run files are named for.

    What a foreign file gives for a commit leads nowhere else.
    """
    name = (
        commit if _SAFE.fullmatch(commit) else hashlib.blake2b(commit.encode("utf-8", "replace")).hexdigest()[:_DIGITS]
    )
    return store / "figures" / f"{name}{_SUFFIX}"


def figures_of_runs(
    read: CommitRuns, sources: Iterable[Stamp], known: Fingerprints, made: Callable[[Sequence[TrackedRun]], P]
) -> CommitFigures[P]:
    """With what is `made` of the runs of each place."""
    suites = {name: known[name] for name in sorted(read.suites)}
    return CommitFigures(tuple(sources), suites, len(read.runs), read.left, tuple(map(made, by_place(read.runs))))


def read_stamped(store: Path, paths: Sequence[Path]) -> tuple[CommitRuns, list[Stamp] | None]:
    """Read the runs of a commit, and say which files those were; None where one changed meanwhile."""
    before: list[Stamp] = []
    with contextlib.suppress(OSError):
        before = stamps(store, paths)
    read = read_runs(paths)
    with contextlib.suppress(OSError):
        if as_they_are(store, paths, before) == before:
            return read, before
    return read, None


def stamps(store: Path, paths: Sequence[Path]) -> list[Stamp]:
    """The run files as they are. Raises OSError."""
    current = []
    for path, name in zip(paths, names_of(store, paths), strict=True):
        status = path.stat()
        current.append(Stamp(name, status.st_size, status.st_mtime_ns, digest_of(path)))
    return current


def digest_of(path: Path) -> str:
    """A digest of a file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, hashlib.blake2b).hexdigest()[:_DIGITS]


def names_of(store: Path, paths: Iterable[Path]) -> list[str]:
    """What files are called within a store."""
    begin = len(str(store / "-")) - 1
    return [str(path)[begin:] for path in paths]


def save_figures(path: Path, figures: CommitFigures[FigureTable]) -> None:
    """Write a file in one step. Raises OSError."""
    head = {
        "schema": SCHEMA, "sources": figures.sources, "suites": figures.suites, "runs": figures.runs,
        "left": figures.left,
        "tables": [{**table.said, "layout": len(table.layout), "rows": len(table.rows)} for table in figures.places],
    }  # fmt: skip
    _write(path, head, b"".join(part for table in figures.places for part in (table.layout, table.rows.tobytes())))


def _write(path: Path, head: Mapping[str, Any], tables: bytes | memoryview) -> None:
    body = b"".join((json.dumps(head, separators=(",", ":")).encode(), b"\n", tables))
    write_whole(path, b"%s %d %08x\n%s" % (_MAGIC, VERSION, zlib.crc32(body), body), sync=False)


def sweep(store: Path, commits: Collection[str]) -> None:
    """Remove the files of commits that have no runs any more, and what writers that were killed have left half done."""
    known = {figures_file(store, commit).name for commit in commits}
    folder = figures_file(store, "").parent
    files.sweep(folder)
    with contextlib.suppress(OSError):
        for path in folder.glob(f"*{_SUFFIX}"):
            if path.name not in known:
                path.unlink()


def load_figures(
    store: Path, commit: str, runs: Sequence[Path], known: Fingerprints
) -> CommitFigures[FigureTable] | Unfit:
    """What the file of a commit says, if it still counts for these run files."""
    path = figures_file(store, commit)
    try:
        content = _read(path)
        if isinstance(content, Unfit):
            return content
        head, body = content
        before = [Stamp(*stamp) for stamp in head["sources"]]
        sources = as_they_are(store, runs, before)
        if sources is None or head["schema"] != SCHEMA:
            return Unfit.STALE
        if not are_known(head["suites"], known):
            return Unfit.RICHER if are_known(head["suites"], known, richer=True) else Unfit.STALE
        if sources != before:
            with contextlib.suppress(OSError):
                _write(path, {**head, "sources": sources}, body)
        tables = tuple(_tables(head["tables"], body))
        return CommitFigures(tuple(sources), head["suites"], head["runs"], tuple(head["left"]), tables)
    except OSError:
        return Unfit.ABSENT
    except (KeyError, TypeError, ValueError, IndexError):
        return Unfit.TORN


def _read(path: Path) -> tuple[dict[str, Any], memoryview] | Unfit:
    content = path.read_bytes()
    first = content[: content.find(b"\n") + 1]
    body = memoryview(content)[len(first) :]  # no copy: it is long
    words = first.removeprefix(_MAGIC).split()
    if not first.startswith(_MAGIC) or len(words) != 2 or not all(set(word) <= _HEXADECIMAL for word in words):
        return Unfit.TORN
    if int(words[0]) != VERSION:
        return Unfit.NEWER if int(words[0]) > VERSION else Unfit.STALE
    if zlib.crc32(body) != int(words[1], 16):
        return Unfit.TORN
    end = content.index(b"\n", len(first))
    return json.loads(content[len(first) : end]), memoryview(content)[end + 1 :]


def sources_of(store: Path, commit: str) -> list[Stamp]:
    """The run files that the figures of a commit were made of, as they were; none where nobody knows."""
    try:
        content = _read(figures_file(store, commit))
        return [] if isinstance(content, Unfit) else [Stamp(*stamp) for stamp in content[0]["sources"]]
    except (OSError, KeyError, TypeError, ValueError):
        return []


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


def _tables(heads: Iterable[dict[str, Any]], body: memoryview) -> Iterator[FigureTable]:
    place = 0
    for said in heads:
        end = place + said["layout"]
        layout = bytes(body[place:end])
        place = end + said["rows"] * ROW.itemsize
        yield FigureTable(said, layout, np.frombuffer(body[end:place], dtype=ROW))


def check_figures(store: Path, commit: str, paths: Sequence[Path], runs: Sequence[TrackedRun]) -> Iterator[Fault]:
    """The figures of a commit: they are what its runs come to, or are made again before they are used."""
    path = figures_file(store, commit)
    if not path.is_file():
        return
    found = load_figures(store, commit, paths, Fingerprints())
    if found is Unfit.TORN:
        yield Fault(str(path), "it is not what was written", _AGAIN)
    elif isinstance(found, CommitFigures):
        made = map(table_of, by_place(sorted(runs, key=lambda run: run.order)))
        if _said(made) != _said(found.places):
            yield Fault(str(path), "it says otherwise than the runs that it was made of", _AGAIN)


def _said(tables: Iterable[FigureTable]) -> list[tuple[bytes, bytes]]:
    return sorted((table.layout, table.rows.tobytes()) for table in tables)


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
        values = [np.ascontiguousarray(one, dtype="<f8") for one in series]
        digests = [hashlib.blake2b(code + value.tobytes(), digest_size=16).hexdigest() for value in values]
        known = self._recall()
        missing = list({digest: place for place, digest in enumerate(digests) if digest not in known}.values())
        if missing:
            found = steps_of_many([values[place] for place in missing])
            new = {digests[place]: steps for place, steps in zip(missing, found, strict=True)}
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

    def _learn(self, found: Mapping[str, Sequence[Step]], count: int) -> None:
        """Write down all of it, of which so many are new."""
        if self.troubles and self.path.exists():
            return  # it was said already, and what lies there is somebody's
        content = {
            "version": STEPS_VERSION,
            "steps": {key: [astuple(step) for step in one] for key, one in found.items()},
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
    files = [Path(str(module.__file__)) for module in (change_points, levels)]
    return hashlib.blake2b(b"".join([np.__version__.encode(), *(path.read_bytes() for path in files)])).digest()


def check_steps(store: Path) -> Iterator[Fault]:
    path = StepMemory(store).path
    try:
        unsealed(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, RecursionError) as error:
        yield Fault(str(path), f"it is not what was written ({str(error)[:80]})", _AGAIN)
