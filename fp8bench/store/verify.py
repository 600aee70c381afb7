"""Whether a store is sound: its files, and whether runs, view, repository and machines agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from fp8bench.model import Fault, Run
from fp8bench.store.asv.identity import Identity, from_facts, resolved
from fp8bench.store.asv.results import ResultsFile
from fp8bench.store.asv.rows import NOT_MEASURED, Row, by_combination, is_measured
from fp8bench.store.asv.view import filled, results_of
from fp8bench.store.commit_runs import TrackedRun, by_place, checked_run, files_by_commit
from fp8bench.store.find_runs import gone
from fp8bench.store.verify_files import check_results, check_run, check_surroundings

# What a machine that got another name keeps.
_HARDWARE = ("arch", "cpu", "num_cpu", "ram", "os")
_MOST_NAMED = 3


@dataclass(frozen=True)
class Verified:
    """What is wrong with a store, or worth knowing about it, and how many of how many files are sound, by kind."""

    faults: tuple[Fault, ...]
    sound: dict[str, tuple[int, int]]


@dataclass
class _Seen:
    """What the runs have given so far: faults, what is looked at across runs, and how many files were sound."""

    faults: list[Fault] = field(default_factory=list)
    lacking: list[Fault] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)
    paths: dict[str, str] = field(default_factory=dict)
    commits: Counter[str] = field(default_factory=Counter)
    machines: dict[str, tuple[Identity, str, str]] = field(default_factory=dict)
    gpus: dict[str, dict[str, None]] = field(default_factory=dict)
    sound: int = 0
    all: int = 0


def verify(store: Path, folder: Path, now: datetime) -> Verified:
    """Read every file of a store. `folder` may lie in the repository whose commits were measured."""
    results = results_of(store)
    files, of_view = check_results(results)
    by_commit: dict[tuple[str, str], list[ResultsFile]] = {}
    for path, file in files.items():
        by_commit.setdefault((path.parent.name, file.commit_hash), []).append(file)
    seen = _Seen()
    for paths in files_by_commit(store).values():
        tracked = _read(paths, now, seen)
        seen.lacking += [fault for members in by_place(tracked) for fault in _lacking(results, members, by_commit)]
    across = [*_unknown(store, seen), *_gone(store, seen, folder), *_renamed(store, seen), *_mixed(store, seen)]
    faults = (*seen.faults, *check_surroundings(store), *of_view, *_folded(results, seen.lacking), *across)
    broken = {fault.path for fault in of_view if fault.broken}
    listed = {path for path in (*results.glob("*/*.json"), results / "benchmarks.json") if path.is_file()}
    sound = sum(str(path) not in broken for path in listed)
    return Verified(faults, {"run files": (seen.sound, seen.all), "asv's files": (sound, len(listed))})


def _read(paths: Sequence[Path], now: datetime, seen: _Seen) -> list[TrackedRun]:
    """Read the runs of one commit; what they tell, oldest first."""
    kept: dict[str, TrackedRun] = {}
    for path in paths:
        run, found = check_run(path, now)
        if run is not None:
            found += _remember(run, path, seen)
            tracked, why = checked_run(run, path)
            seen.unknown.update([why] if "--import" in why else [])
            if tracked is not None:
                kept.setdefault(run.id, tracked)
        seen.all += 1
        seen.sound += not any(one.broken for one in found)
        seen.faults += found
    return sorted(kept.values(), key=lambda one: one.order)


def _unknown(store: Path, seen: _Seen) -> list[Fault]:
    """Suites that nobody told us of, so that nothing can be said about their figures."""
    return [
        Fault(str(store / "runs"), f"of {count} runs, {why}", "Their figures were not compared", broken=False)
        for why, count in seen.unknown.items()
    ]


def _remember(run: Run, path: Path, seen: _Seen) -> list[Fault]:
    """Keep what is looked at across runs; a run that is there twice would count twice."""
    commit = run.environment.get("commit")
    if isinstance(commit, str):
        seen.commits[commit] += 1
    identity = from_facts(run.environment.facts)
    if identity is not None:
        name = str(identity.machine["machine"])
        _, first, last = seen.machines.get(name, (identity, run.started, run.started))
        seen.machines[name] = (identity, min(first, run.started), max(last, run.started))
        gpu = next((one.name for one in run.devices if one.accelerated), None)
        seen.gpus.setdefault(name, {}).update({} if gpu is None else {gpu: None})
    other = seen.paths.setdefault(run.id, str(path))
    if other == str(path):
        return []
    return [Fault(str(path), f"it is the same run as {other}, which counts once", "Move one of them away")]


def _lacking(
    results: Path, tracked: Sequence[TrackedRun], files: Mapping[tuple[str, str], Sequence[ResultsFile]]
) -> list[Fault]:
    """Figures that the runs of one place have and asv's file has not, which is no harm, or has otherwise."""
    first = tracked[0]
    machine, commit, python = first.place.machine, first.commit, first.place.python
    nothing = ResultsFile(commit, first.identity.env_name, 0, first.identity.params, python, {}, {}, {})
    here = files.get((machine, commit), ())
    alike = [one for one in here if one.python == python or resolved(one.python) == first.identity.interpreter]
    file = alike[0] if alike else nothing
    expected = filled(file, tracked).rows
    path = results / machine / first.identity.file_name(commit)
    differing = [name for name, row in expected.items() if not _agrees(file.rows.get(name), row)]
    wrong = [name for name in differing if not _is_behind(file.rows[name], name, tracked)]
    lacking = [name for name, row in expected.items() if name not in wrong and _lacks(file.rows.get(name), row)]
    lacking += [name for name in differing if name not in (*wrong, *lacking)]
    faults = []
    if wrong:
        what = f"it says otherwise than the runs of commit {commit[:8]} of {_listed(wrong)}"
        faults.append(Fault(str(path), what, "`fp8bench history rebuild` makes it right"))
    if lacking:
        what = f"it lacks what the runs of commit {commit[:8]} say of {_listed(lacking)}"
        faults.append(Fault(str(path), what, "`fp8bench history rebuild` puts it there", broken=False))
    return faults


def _folded(results: Path, faults: Sequence[Fault]) -> list[Fault]:
    """Many files that only lack something in one sentence: a view that was deleted lacks everything."""
    lacking = [fault for fault in faults if not fault.broken]
    if len(lacking) <= _MOST_NAMED:
        return list(faults)
    named = _listed([str(Path(fault.path).relative_to(results)) for fault in lacking])
    what = f"{len(lacking)} files of it lack what the runs of their commits say: {named}"
    whole = Fault(str(results), what, lacking[0].remedy, broken=False)
    return [*(fault for fault in faults if fault.broken), whole]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def _agrees(row: Row | None, expected: Row) -> bool:
    """Whether a row says nothing else. A failure may stand where a number was: `asv run` keeps the last word."""
    numbers = _numbers(expected)
    if row is None or not numbers:
        return True
    known = by_combination(row)
    here = {texts: known.get(texts, NOT_MEASURED) for texts in numbers}
    same = all(one[0] in (None, numbers[texts]) or not is_measured(one) for texts, one in here.items())
    return row.version == expected.version and same


def _is_behind(row: Row, name: str, tracked: Sequence[TrackedRun]) -> bool:
    """Whether a row says what the runs said that had begun when it was written.

    A later `asv run` that was interrupted, saved nothing, or had a --bench that leaves the row out, is only missing.
    """
    earlier = [one for one in tracked if row.started_at is not None and one.started_at <= row.started_at]
    if not earlier:
        return False
    place = earlier[0].identity
    empty = ResultsFile(earlier[0].commit, place.env_name, 0, place.params, place.python, {}, {}, {})
    then = filled(empty, earlier).rows.get(name)
    return then is not None and bool(_numbers(then)) and _agrees(row, then)


def _lacks(row: Row | None, expected: Row) -> bool:
    """Whether there are numbers that a row does not have: `asv run --bench` writes only what it was asked for."""
    known = by_combination(row) if row is not None else {}
    return any(not is_measured(known.get(texts, NOT_MEASURED)) for texts in _numbers(expected))


def _numbers(row: Row) -> dict[tuple[str, ...], float]:
    values = {texts: one[0] for texts, one in by_combination(row).items() if is_measured(one)}
    return {texts: number for texts, number in values.items() if number is not None}


def _gone(store: Path, seen: _Seen, folder: Path) -> list[Fault]:
    """Commits that the repository has lost. Their runs are as good as ever, and asv publishes them no more."""
    lost = gone(seen.commits, folder)
    if not lost:
        return []
    if len(lost) == len(seen.commits):
        what = f"none of its {len(lost)} commits is in the repository of this directory"
        return [Fault(str(store / "runs"), what, "Verify from within the one that was measured", broken=False)]
    remedy = "Their runs stay as they are; `asv publish` leaves them out"
    named = ", ".join(sorted(one[:8] for one in lost)[: 2 * _MOST_NAMED])
    more = ", ..." if len(lost) > 2 * _MOST_NAMED else ""
    what = f"{len(lost)} of {len(seen.commits)} commits are not in the repository of this directory ({named}{more})"
    return [Fault(str(store / "runs"), what, remedy, broken=False)]


def _mixed(store: Path, seen: _Seen) -> list[Fault]:
    """Several models that were the first GPU of one machine: asv draws them as one line."""
    remedy = "Where both are in use, give each a store of its own, or a machine's name in ~/.asv-machine.json"
    return [
        Fault(
            str(store / "runs"), f"the first GPU of machine {machine} was {' and '.join(map(repr, names))}: asv draws "
            "both as one line, in which a change may be the GPU's", remedy, broken=False,
        )
        for machine, names in seen.gpus.items() if len(names) > 1
    ]  # fmt: skip


def _renamed(store: Path, seen: _Seen) -> list[Fault]:
    """Two names for what looks like one machine, the one used up to a day, the other from then on."""
    found = []
    by_start = sorted(seen.machines.items(), key=lambda pair: pair[1][1])
    for place, (old, (identity, _, last)) in enumerate(by_start):
        for new, (other, first, _) in by_start[place + 1 :]:
            facts = [identity.machine.get(key) for key in _HARDWARE]
            if last < first and all(facts) and facts == [other.machine.get(key) for key in _HARDWARE]:
                what = f"machine {new} looks like {old} under another name, which asv draws as two lines"
                remedy = (
                    f'If it is one machine, put an entry for it with "machine": "{old}" into its '
                    "~/.asv-machine.json, and new runs go on in the old line; `merge` joins interpreters, not machines"
                )
                found.append(Fault(str(store / "runs"), what, remedy, broken=False))
    return found
