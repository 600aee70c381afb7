"""asv's view of the truth: what every commit has come to, in asv's own files beside the runs.

What a commit has come to is a function of its runs alone, whichever door they came in by, so that a suite run and an
asv run of one commit end in one line of one graph, and the view can be made again at any time. What the runs know
nothing of (asv's own measurements, those of lost runs) is left as it stands.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, TypeVar

from fp8bench.errors import AsvFileAbsent, AsvFileBroken, AsvFileError, Fp8benchError, StoreError
from fp8bench.history.asv_files import locked, set_aside, settled_read, sweep
from fp8bench.history.asv_lists import (
    Definition,
    load_benchmarks,
    load_machine,
    merge_benchmarks,
    merge_machine,
    save_benchmarks,
    save_machine,
)
from fp8bench.history.asv_results import ResultsFile, load_results, save_results
from fp8bench.history.asv_rows import NOT_MEASURED, Figures, Row, by_combination, cell
from fp8bench.history.environments import Renamings, load_renamings
from fp8bench.history.runs import load_run, run_files, store_of
from fp8bench.identity import Identity, from_facts, identify, same_interpreter
from fp8bench.model import Cell, Plan, Point, Run, Series, Status
from fp8bench.points import Followed, followed, merged

T = TypeVar("T")
LOCK_SECONDS = 60.0
_HASH = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
# The commit that a run file is named for; a file that somebody renamed may be of any.
_NAMED_FOR = re.compile(r".*-([0-9a-f]{8}|nocommit)-[^-]*")
# Of as many run files this process remembers what they tell.
_MOST_REMEMBERED = 1000


class Place(NamedTuple):
    """Runs of one place make one file of asv's."""

    commit: str
    machine: str
    python: str


@dataclass(frozen=True)
class Told:
    """A run, and what it tells the history. Of one that was read from its file for that, only the header is kept."""

    run: Run
    identity: Identity
    content: Followed

    @property
    def commit(self) -> str:
        return str(self.run.environment.get("commit"))

    @property
    def place(self) -> Place:
        return Place(self.commit, str(self.identity.machine["machine"]), self.identity.python)

    @property
    def order(self) -> tuple[float, str]:
        """When it began, in seconds since 1970, as the clock of its machine had it; the id, where two began at once."""
        return _seconds(self.run.started), self.run.id

    @property
    def started_at(self) -> int:
        """When it began, as rows of asv's say it: in ms since 1970."""
        return int(_seconds(self.run.started) * 1000)

    def is_of(self, place: Place) -> bool:
        """Whether it was measured there, by whatever name the interpreter was called."""
        if self.place[:2] != place[:2]:
            return False
        return self.place.python == place.python or same_interpreter(self.place.python, place.python)


def results_of(store: Path) -> Path:
    """Where asv looks for results; asv.conf.json says the same."""
    return store / "asv" / "results"


def update_view(run: Run, store: Path, patience: float = LOCK_SECONDS) -> str:
    """Bring the view of a run's commit up to date; one sentence on what happened to it.

    Another writer of the view is waited for as many seconds as `patience` says. Never raises for what is wrong with the
    store: the run itself is kept, and the view can be made again.
    """
    why = why_not(run)
    told = tell(run) if not why else None
    if told is None or not told.content.points:
        nameless = "it does not say on which machine, or by a name that is no folder's"
        why = why or (told.content.why if told is not None else nameless)
        why = why or "none of its cases is in a declared grid"
        return f"history: {why}; the run is kept, and asv's view stays as it is"
    try:
        aside = write_commit(store, told.place, run.id, patience)
    except Fp8benchError as error:
        return f"history: {error} The run is kept; `fp8bench history rebuild` makes the view again."
    except OSError as error:
        return (
            f"history: asv's view could not be written ({error}). The run is kept; `fp8bench history rebuild` makes it."
        )
    cells = len({(point.series.split(".")[0], point.cell) for point in told.content.points})
    words = [f"history: {cells} {'case' if cells == 1 else 'cases'} of commit {told.commit[:8]} in asv's view"]
    words += [
        f"{path.name.rpartition('.broken-')[0]} was broken and made anew, the old one is {path.name}" for path in aside
    ]
    words.append(load_renamings(store).trouble.rstrip("."))
    if told.content.others:
        stay = "stays" if told.content.others == 1 else "stay"
        words.append(f"{told.content.others} outside of the declared grids {stay} in the run alone")
    return "; ".join(filter(None, words))


def why_not(run: Run) -> str:
    """Why a run's numbers are no commit's; '' if they are."""
    commit = run.environment.get("commit")
    if not isinstance(commit, str) or not _HASH.fullmatch(commit):
        why = run.environment.get("commit_unknown")
        return f"git names no commit here ({why!s:.200})" if why else "this was not measured in a git repository"
    dirty = run.environment.get("dirty")
    if dirty is not False:
        differ = "differ" if dirty else "may differ (git does not say)"
        return f"the files {differ} from commit {commit[:8]}, so that these are not its numbers"
    try:
        _seconds(run.started)
    except (ValueError, OverflowError):
        return f"its start, {run.started!r:.40}, is no time"
    return ""


def tell(run: Run, renamings: Renamings | None = None) -> Told | None:
    """What a run tells the history; None where it does not say where it was made.

    The interpreter is the one that its path counts as in the run's store.
    """
    identity = from_facts(run.environment.facts)
    if identity is None:
        return None
    if renamings is None:
        store = store_of(Path(run.path)) if run.path else None
        renamings = load_renamings(store) if store is not None else Renamings()
    return Told(run, replace(identity, python=renamings.name(identity.python)), followed(run))


def told_of_commit(store: Path, commit: str) -> list[Told]:
    """What the runs of a commit tell, oldest first, each run once. Files that cannot be read are left out."""
    renamings = load_renamings(store)
    found: dict[str, Told] = {}
    for path in run_files(store):
        named = _NAMED_FOR.fullmatch(path.stem)
        if named is None or named[1] == commit[:8]:
            told = _told_by(path)
            if told is None or told.commit != commit or why_not(told.run):
                continue
            identity = replace(told.identity, python=renamings.name(told.identity.python))
            copy = found.get(told.run.id)
            if copy is None or len(copy.content.points) < len(told.content.points):
                found[told.run.id] = replace(told, identity=identity)
    return sorted(found.values(), key=lambda told: told.order)


_remembered: dict[Path, tuple[tuple[int, ...], Told]] = {}


def _told_by(path: Path) -> Told | None:
    """What the run in a file tells, by the interpreter's own name. A file that did not change is not read again.

    Samples are made points of at once, so that a commit's runs need not all fit into memory.
    """
    try:
        status = path.stat()
        stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        known = _remembered.get(path)
        if known is not None and known[0] == stamp:
            return known[1]
        told = tell(load_run(path), Renamings())
    except (StoreError, OSError):
        return None
    if told is None:
        return None
    told = replace(told, run=replace(told.run, records=(), plan=Plan(())))
    if not told.content.why:  # its suite may not be known, yet
        if len(_remembered) >= _MOST_REMEMBERED:
            _remembered.clear()
        _remembered[path] = (stamp, told)
    return told


def write_commit(store: Path, place: Place, run: str, patience: float = LOCK_SECONDS) -> list[Path]:
    """Write the file of one commit, machine and interpreter, and the lists beside it; returns what was set aside.

    Raises StoreError where the run of that id would not be in it.
    """
    with locked(store / "asv", patience):
        # Under the lock, too: a writer that knew fewer runs must not come after one that knew more.
        told = [one for one in told_of_commit(store, place.commit) if one.content.points and one.is_of(place)]
        if all(one.run.id != run for one in told):
            raise StoreError(f"the run {run} is not to be found in {store}, so that it is not in asv's view.")
        aside: list[Path] = []
        write_place(results_of(store), told, aside)
        return aside


def write_place(results: Path, told: Sequence[Told], aside: list[Path] | None = None) -> Path:
    """Write the file that runs of one place make, oldest first, and the lists beside it. For holders of the lock.

    The oldest run names machine and interpreter where there is no file yet, so that a view made again is the same.
    Files that were broken come into `aside`, under their new names.
    """
    aside = [] if aside is None else aside
    commit = told[0].commit
    identity = _settled(results, told[0].identity, aside)
    path = results / str(identity.machine["machine"]) / identity.file_name(commit)
    # Before the rows: what asv does not know of it does not show, and a kill may come in between.
    define(results, series_told(told), aside)
    file = _existing(load_results, path, aside) or ResultsFile(
        commit, identity.env_name, _date(told), identity.params, identity.python, {}, {}, {}
    )
    if not commit.startswith(file.commit_hash):
        raise AsvFileError(f"{path} holds the results of another commit, {file.commit_hash}. Move it away.")
    save_results(path, filled(replace(file, params=identity.params, date=file.date or _date(told)), told))
    for folder in (results, path.parent):
        sweep(folder)
    return path


def _settled(results: Path, identity: Identity, aside: list[Path]) -> Identity:
    """The identity under which the machine's results lie here already; its machine.json is brought up to date.

    bin/python and bin/python3 are one interpreter, and a new kernel makes no new machine: asv would draw a second
    line. What the user told asv about this machine counts most.
    """
    folder = results / str(identity.machine["machine"])
    known = _existing(load_machine, folder / "machine.json", aside) or {}
    if known and known["machine"] != folder.name:
        raise AsvFileError(
            f"{folder / 'machine.json'} is of machine {known['machine']!r:.80}, and its folder of {folder.name!r:.80}: "
            "asv shows nothing of that folder. Correct the one or the other."
        )
    here = identify(known or identity.machine)
    is_here = here.machine["machine"] == identity.machine["machine"]
    machine = here.machine if is_here else known or identity.machine
    brought_up = merge_machine(known, machine)
    if brought_up != known:
        save_machine(folder / "machine.json", brought_up)
    # In one order, so that a view made again is the same; what else somebody wrote down is no parameter of a series.
    found = sorted((machine if is_here else brought_up).items())
    plain = {key: value for key, value in found if value is None or isinstance(value, int | float | str)}
    return Identity(plain, _settled_python(folder, identity.python))


def _settled_python(folder: Path, python: str) -> str:
    """The name of an interpreter that the latest of the machine's results go by."""
    latest = sorted(folder.glob("*-existing-py*.json"), key=_changed, reverse=True)
    # All files of one environment say the same, and there is one for every commit.
    for path in {path.name.partition("-")[2]: path for path in reversed(latest)}.values():
        with contextlib.suppress(StoreError):
            named = load_results(path).python
            if named == python or same_interpreter(named, python):
                return named
    return python


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # it has just gone
        return 0.0


def _existing(load: Callable[[Path], T], path: Path, aside: list[Path]) -> T | None:
    """What stands in a file of asv's. One that is broken for good is set aside and counts as absent."""
    try:
        return settled_read(load, path)
    except AsvFileAbsent:
        return None
    except AsvFileBroken:
        aside.append(set_aside(path))
        return None


def define(results: Path, series: Iterable[Series], aside: list[Path] | None = None) -> None:
    """Make the series known to asv, beside what it knows. For holders of the lock."""
    path = results / "benchmarks.json"
    known = _existing(load_benchmarks, path, [] if aside is None else aside) or {}
    new = merge_benchmarks(known, map(_definition, series))
    if new != known:
        save_benchmarks(path, new)


def _definition(series: Series) -> Definition:
    return Definition(
        series.name, series.unit, _texts(series), series.param_names, series.version, code="", timeout=60.0
    )  # fmt: skip


def _texts(series: Series) -> tuple[tuple[str, ...], ...]:
    """Parameters as asv writes them."""
    return tuple(tuple(map(repr, values)) for values in series.params)


def _date(told: Sequence[Told]) -> int:
    """The author's date of the commit, in ms since 1970, as asv has it."""
    known = [one.run.environment.get("commit_date") for one in told]
    return next((value for value in reversed(known) if type(value) is int), 0)


def series_told(told: Sequence[Told]) -> list[Series]:
    """The series of all runs, each once, the newest definition of it."""
    return list({one.name: one for each in told for one in each.content.series}.values())


def filled(file: ResultsFile, told: Sequence[Told]) -> ResultsFile:
    """The file with a row for every series; other rows stay."""
    points = merged([point for one in told for point in one.content.points], series_told(told))
    rows = dict(file.rows)
    for series in series_told(told):
        own = {cell: point for (name, cell), point in points.items() if name == series.name}
        if own:
            rows[series.name] = _row(series, own, told[-1].started_at, rows.get(series.name))
    return replace(file, rows=rows)


def _row(series: Series, points: Mapping[Cell, Point], started: int, before: Row | None) -> Row:
    """One row: a point where there is one, what stood there before where there is none, else not measured.

    Samples stand in the file only where asv was asked to record them: the runs have them all.
    """
    version = next(iter(points.values())).version
    if before is not None and before.version != version:
        before = None
    recorded = before is not None and any(before.samples)
    known = by_combination(before) if before is not None else {}
    cells = [
        _figures(points[cell], recorded) if cell in points else known.get(texts, NOT_MEASURED)
        for cell, texts in zip(itertools.product(*series.params), itertools.product(*_texts(series)), strict=True)
    ]
    values, stats, samples = zip(*cells, strict=True)
    duration = before.duration if before is not None else None
    return Row(_texts(series), version, values, stats, samples, started, duration)


def _figures(point: Point, recorded: bool) -> Figures:
    """Value, statistics and samples of a point, as asv has them."""
    if point.samples:
        value, stats = cell(point.samples)
        return value, stats, point.samples if recorded else None
    return (None, None, None) if point.status is Status.FAILED else NOT_MEASURED


def _seconds(moment: str) -> float:
    """Seconds since 1970; what names no zone is in UTC. Raises ValueError for what is no time."""
    found = datetime.fromisoformat(moment)
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
