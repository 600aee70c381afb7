"""Reads the runs of a fleet from a store, and names the machines that stand out, with the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from fp8bench.errors import RunNotFound, StoreError, UsageError
from fp8bench.features.fleet.machines import (
    LIMIT,
    Fields,
    FleetFigure,
    FleetReport,
    Machine,
    MachineAlarm,
    MachineKind,
    MachineRun,
    Oddity,
    find_deviations,
    find_differences,
    summarize_run,
)
from fp8bench.files import is_locked
from fp8bench.model import Run
from fp8bench.model.run import CellStatus, FleetPlan
from fp8bench.report.panels import together
from fp8bench.report.words.naming import join_words
from fp8bench.store.fleet_plans import number_of, plans_of, read_plan, states_of
from fp8bench.store.runs.listing import REFUSED, REMEDY, listing
from fp8bench.store.runs.run_file import load_head, load_run
from fp8bench.units import ratio

_NO_CELL = "belong to no cell of the plan"
_RUNNING = "are still being measured"


@dataclass
class _Reading:
    """The accepted runs of a store, the number of skipped runs by reason, and sentences on problems."""

    runs: list[MachineRun] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    doubts: list[str] = field(default_factory=list)

    @property
    def skipped_words(self) -> list[str]:
        return [f"{count} run{'s' * (count != 1)}: {reason}" for reason, count in (+self.skipped).items()]


def fleet_report(source: Path, store: Path, expected: Collection[str] = ()) -> FleetReport:
    """Reports on a plan's runs in a store. If `source` is a store, reports on the plans in it, or else on all its runs.

    Raises UsageError if no run counts.
    """
    if source.is_dir():
        store, plans = source, plans_of(source)
    else:
        plans = (read_plan(source),)

    def belongs(run: Run) -> bool:
        return not plans or any(number_of(plan, run.cell) is not None for plan in plans)

    reading = _read(store, belongs)
    if not reading.runs and not expected:
        reasons = reading.skipped_words or reading.doubts[:1]
        missing = f"run of the plan {plans[0].id}" if plans else "run"
        problem = f"{store} has no {missing}"
        if reasons:
            problem = f"of {store} no run counts ({'; '.join(reasons).rstrip('.')})"
        raise UsageError(f"{problem}. Give --store DIR, or a store that `fleet collect` made.")
    del reading.skipped[REFUSED]  # each of these is among the doubts
    excluded = (*reading.skipped_words, *reading.doubts, *_describe_failed_cells(store, plans))
    return build_report(reading.runs, plans, expected, excluded)


def _read(store: Path, belongs: Callable[[Run], bool]) -> _Reading:
    """Reads the runs whose headers belong. Runs are loaded one after the other: memory may not hold all of them."""
    files = listing(store)
    reading = _Reading(skipped=files.left, doubts=files.notes(files.refused))
    finished: list[tuple[MachineRun, Path, int | None]] = []
    for path in files.files:
        try:
            # Headers are read first: a store may have thousands of unrelated runs.
            if not belongs(load_head(path)):
                reading.skipped[_NO_CELL] += 1
                continue
            is_running, run = is_locked(path), load_run(path)
        except (StoreError, RunNotFound) as error:
            reading.doubts.append(str(error))
            continue
        except OSError as error:
            reading.doubts.append(f"{path} could not be read ({error.strerror})")
            continue
        reading.doubts += [f"{path}: {trouble}" for trouble in run.troubles]
        # A run that is still being written would be incomplete.
        if is_running:
            reading.skipped[_RUNNING] += 1
        else:
            finished.append((summarize_run(run), path, _digest_times(run)))
    _drop_copies(finished, reading)
    return reading


def _digest_times(run: Run) -> int | None:
    """Returns a digest of all times of a run, valid in this process only; None if the run has no times."""
    times = tuple((record.case.id, record.timing.slots) for record in run.records if record.timing is not None)
    return hash(times) if times else None


def _drop_copies(finished: Sequence[tuple[MachineRun, Path, int | None]], reading: _Reading) -> None:
    """Adds the finished runs to the reading, except runs of several machines with times equal to the nanosecond.

    Only one machine can have measured such times, and it is unknown which one.
    """
    by_times = together((digest, (run.machine, path)) for run, path, digest in finished if digest is not None)
    copied: set[int | None] = set()
    for digest, owners in by_times.items():
        machines = sorted({machine for machine, _ in owners})
        if len(machines) > 1:
            copied.add(digest)
            paths = " and ".join(str(path) for _, path in owners)
            reading.doubts.append(
                f"{paths} have the same times to the nanosecond under the machines {' and '.join(machines)}, so none "
                f"of them counts. {REMEDY}"
            )
    reading.runs += [run for run, _, digest in finished if digest not in copied]


def _describe_failed_cells(store: Path, plans: Sequence[FleetPlan]) -> Iterator[str]:
    """Yields a sentence for each cell of this store that ended without a run, and for each damaged file of a cell."""
    for plan in plans:
        for state in states_of(plan, store):
            cell = f"cell {state.number} of plan {plan.id}"
            if state.status is CellStatus.FAILED:
                where = f" on {state.attempts[-1].host}" if state.attempts else ""
                yield f"{cell} failed{where}: {state.why}"
            for sentence in state.damage:
                yield f"{cell} is damaged: {sentence}"


def build_report(
    runs: Sequence[MachineRun],
    plans: Sequence[FleetPlan] = (),
    expected: Collection[str] = (),
    excluded: Sequence[str] = (),
) -> FleetReport:
    """Builds the report of some runs. `expected` are machines that should have sent something."""
    # 1. Compare machines within each kind; other kinds are described by their differences from the first one.
    kinds: list[MachineKind] = []
    figures: list[FleetFigure] = []
    for (hardware, software), members in _group_by_kind(runs).items():
        name = _kind_name(len(kinds))
        times = _median_times(members)
        figures += [FleetFigure(case, name, seconds) for case, seconds in times.items()]
        machines = tuple(sorted({run.machine for run in members}))
        differs: tuple[str, ...] = ()
        if kinds:
            differs = (*find_differences(hardware, kinds[0].hardware), *find_differences(software, kinds[0].software))
        kinds.append(MachineKind(name, machines, hardware, software, differs, find_deviations(times)))

    # 2. Find the settings that no machine has measured completely.
    settings: dict[str, None] = {}
    for plan in plans:
        settings |= dict.fromkeys(cell.setting for cell in plan.cells)
    complete: set[str] = set()
    for run in runs:
        settings |= dict.fromkeys((*run.whole, *run.cut))
        complete |= set(run.whole)

    # 3. Name the machines that stand out.
    alarms = [*_find_other_software(kinds), *_find_outliers(kinds), *find_gaps(runs, expected), *_find_failures(runs)]
    order = list(Oddity)
    alarms.sort(key=lambda alarm: (alarm.machine, order.index(alarm.what)))
    why_not = {kind.name: "; ".join(find_differences(kind.software, kinds[0].software)) for kind in kinds[1:]}
    return FleetReport(
        machines=tuple(_summarize_machines(runs, kinds)),
        kinds=tuple(kinds),
        figures=tuple(figures),
        alarms=tuple(alarms),
        settings=len(settings),
        lacking=tuple(setting for setting in settings if setting not in complete),
        excluded=tuple(excluded),
        why_not={name: words for name, words in why_not.items() if words},
    )


def _kind_name(number: int) -> str:
    """Returns A, B, ..., Z, A1, B1, ..."""
    return chr(ord("A") + number % 26) + (str(number // 26) if number >= 26 else "")


def _group_by_kind(runs: Sequence[MachineRun]) -> dict[tuple[Fields, Fields], list[MachineRun]]:
    """Returns the runs by hardware and software, the kind with the most machines first."""
    kinds = together(((run.hardware, run.software), run) for run in runs)
    return dict(sorted(kinds.items(), key=lambda pair: (-len({run.machine for run in pair[1]}), pair[0])))


def _median_times(runs: Sequence[MachineRun]) -> dict[str, dict[str, float]]:
    """Returns each machine's median seconds, by case and machine."""
    samples: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        for case, seconds in run.times.items():
            samples.setdefault((case, run.machine), []).append(seconds)
    medians: dict[str, dict[str, float]] = {}
    for (case, machine), values in samples.items():
        medians.setdefault(case, {})[machine] = median(values)
    return medians


def _summarize_machines(runs: Sequence[MachineRun], kinds: Sequence[MachineKind]) -> Iterator[Machine]:
    for name, members in sorted(_group_by_machine(runs).items()):
        own_kinds = [kind for kind in kinds if name in kind.machines]
        deviations = [kind.deviations[name] for kind in own_kinds if name in kind.deviations]
        complete, failed = set[str](), set[str]()
        for run in members:
            complete |= set(run.whole)
            failed |= run.failed.keys()
        yield Machine(
            name=name,
            kinds=tuple(kind.name for kind in own_kinds),
            runs=len(members),
            whole=len(complete),
            failed=len(failed),
            ratio=deviations[-1].ratio if deviations else None,
            score=deviations[-1].score if deviations else None,
        )


def _group_by_machine(runs: Sequence[MachineRun]) -> dict[str, list[MachineRun]]:
    return together((run.machine, run) for run in runs)


def _find_other_software(kinds: Sequence[MachineKind]) -> Iterator[MachineAlarm]:
    """Names machines whose software or settings differ from those of more machines with the same hardware."""
    for number, kind in enumerate(kinds):
        larger = next((larger_kind for larger_kind in kinds[:number] if larger_kind.hardware == kind.hardware), None)
        if larger is not None and len(larger.machines) > len(kind.machines):
            differences = "; ".join(find_differences(kind.software, larger.software))
            words = f"{differences}, as {len(larger.machines)} others of its hardware have it: not compared"
            yield from (MachineAlarm(machine, Oddity.SOFTWARE, words) for machine in kind.machines)


def _find_outliers(kinds: Sequence[MachineKind]) -> Iterator[MachineAlarm]:
    for kind in kinds:
        for machine, deviation in kind.deviations.items():
            if deviation.odd:
                oddity = Oddity.SLOW if deviation.score > 0 else Oddity.FAST
                times = f"{ratio(deviation.ratio)} the time of the median of its kind, in its median case"
                distance = f"{abs(deviation.score):.0f} median absolute deviations away, the limit is {LIMIT:.0f}"
                yield MachineAlarm(machine, oddity, f"{times} ({distance})")


def find_gaps(runs: Sequence[MachineRun], expected: Collection[str]) -> Iterator[MachineAlarm]:
    """Names machines whose runs were cut off, that lack what at least half of the others have, or that sent nothing."""
    by_machine = _group_by_machine(runs)
    # Dictionaries instead of sets, so that the same runs give the same text.
    complete: dict[str, dict[str, None]] = {}
    for machine, members in by_machine.items():
        complete[machine] = {}
        for run in members:
            complete[machine] |= dict.fromkeys(run.whole)
    for machine, members in by_machine.items():
        cut: dict[str, str] = {}
        for run in members:
            cut |= {setting: run.run for setting in run.cut if setting not in complete[machine]}
        if cut:
            names = join_words([f"{setting} (run {run})" for setting, run in cut.items()])
            words = f"{len(cut)} of its cells were cut off and not resumed: {names}"
            yield MachineAlarm(machine, Oddity.CUT_OFF, words)
        counts: Counter[str] = Counter()
        for name, settings in complete.items():
            if name != machine:
                counts.update(settings.keys())
        common = [setting for setting, count in counts.items() if count > 1 and 2 * count >= len(complete) - 1]
        lacking = [setting for setting in common if setting not in complete[machine] and setting not in cut]
        if lacking:
            words = (
                f"{len(lacking)} of {len(common)} cells that other machines measured are missing: {join_words(lacking)}"
            )
            yield MachineAlarm(machine, Oddity.MISSING, words)
    for machine in sorted(set(expected) - by_machine.keys()):
        yield MachineAlarm(machine, Oddity.MISSING, "it sent nothing")


def _find_failures(runs: Sequence[MachineRun]) -> Iterator[MachineAlarm]:
    measured: set[str] = set()
    for run in runs:
        measured |= run.times.keys()
    for machine, members in _group_by_machine(runs).items():
        failed: dict[str, str] = {}
        for run in members:
            failed |= {case: reason for case, reason in run.failed.items() if case in measured}
        if failed:
            case, reason = next(iter(failed.items()))
            words = f"{len(failed)} of the cases that others measured failed: {case} ({reason})"
            yield MachineAlarm(machine, Oddity.FAILED, words)
