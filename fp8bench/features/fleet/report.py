"""Reads the runs of a fleet from a store, and finds the machines that deviate from the others, with the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import median

from fp8bench.errors import RunNotFound, StoreError, UsageError
from fp8bench.features.fleet.machines import (
    OUTLIER_DEVIATIONS,
    Fields,
    FleetFigure,
    FleetReport,
    Machine,
    MachineAlarm,
    MachineKind,
    MachineRun,
    Oddity,
    describe_differences,
    find_deviations,
    summarize_run,
)
from fp8bench.files import is_locked
from fp8bench.model import Run
from fp8bench.model.run import CellStatus, FleetPlan
from fp8bench.report.panels import together
from fp8bench.report.words.naming import join_words
from fp8bench.store.fleet_plans import compute_cell_states, find_cell_number, load_plans, read_plan
from fp8bench.store.runs.listing import REFUSAL_REMEDY, REFUSED_REASON, listing
from fp8bench.store.runs.run_file import load_header, load_run
from fp8bench.units import ratio

_UNPLANNED = "do not belong to a cell of the plan"
_STILL_RUNNING = "are still being measured"


@dataclass
class _Reading:
    """The content of a store that the report needs: the runs, the number of skipped runs by reason, and sentences about
    problems.
    """

    runs: list[MachineRun] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    doubts: list[str] = field(default_factory=list)

    @property
    def skipped_reasons(self) -> list[str]:
        return [f"{count} run{'s' * (count != 1)}: {reason}" for reason, count in (+self.skipped).items()]


def make_fleet_report(source: Path, store: Path, expected: Collection[str] = ()) -> FleetReport:
    """Reports on the runs of a plan, or of a store. `source` is the file of the plan, or the store. For a store, the
    report covers its plans. If it has no plan, the report covers all its runs. Raises UsageError if no run counts and
    no machines are expected.
    """
    if source.is_dir():
        store, plans = source, load_plans(source)
    else:
        plans = (read_plan(source),)

    def is_planned(run: Run) -> bool:
        return not plans or any(find_cell_number(plan, run.cell) is not None for plan in plans)

    reading = _read_runs(store, is_planned)
    if not reading.runs and not expected:
        reasons = reading.skipped_reasons or reading.doubts[:1]
        missing = f"run of the plan {plans[0].id}" if plans else "run"
        problem = f"{store} has no {missing}"
        if reasons:
            problem = f"of {store} no run counts ({'; '.join(reasons).rstrip('.')})"
        raise UsageError(f"{problem}. Give --store DIR, or a store that `fleet collect` made.")
    del reading.skipped[REFUSED_REASON]  # `doubts` already has a sentence about each of these runs
    excluded = (*reading.skipped_reasons, *reading.doubts, *_describe_failed_cells(store, plans))
    return build_report(reading.runs, plans, expected, excluded)


def _read_runs(store: Path, is_planned: Callable[[Run], bool]) -> _Reading:
    """Reads the runs whose header `is_planned` accepts. It reads one run at a time, because memory may not hold all
    of them.
    """
    files = listing(store)
    reading = _Reading(skipped=files.left_out_reasons, doubts=files.notes(files.refused))
    finished: list[tuple[MachineRun, Path, int | None]] = []
    for path in files.files:
        try:
            # Read the header first, because a store may have thousands of unrelated runs.
            if not is_planned(load_header(path)):
                reading.skipped[_UNPLANNED] += 1
                continue
            is_running, run = is_locked(path), load_run(path)
        except (StoreError, RunNotFound) as error:
            reading.doubts.append(str(error))
            continue
        except OSError as error:
            reading.doubts.append(f"{path} could not be read ({error.strerror})")
            continue
        reading.doubts += [f"{path}: {trouble}" for trouble in run.troubles]
        # A run that is still being written would look incomplete.
        if is_running:
            reading.skipped[_STILL_RUNNING] += 1
        else:
            finished.append((summarize_run(run), path, _digest_times(run)))
    _drop_copies(finished, reading)
    return reading


def _digest_times(run: Run) -> int | None:
    """Returns a hash of all times of a run; None if the run has no times. The hash is valid in this process only."""
    times = tuple((record.case.id, record.timing.slots) for record in run.records if record.timing is not None)
    return hash(times) if times else None


def _drop_copies(finished: Sequence[tuple[MachineRun, Path, int | None]], reading: _Reading) -> None:
    """Adds the finished runs to the reading, except copies. Runs of different machines are copies if their times are
    equal to the nanosecond. Only one machine can have measured such times, and it is unknown which. So none of them
    counts.
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
                f"of them counts. {REFUSAL_REMEDY}"
            )
    reading.runs += [run for run, _, digest in finished if digest not in copied]


def _describe_failed_cells(store: Path, plans: Sequence[FleetPlan]) -> Iterator[str]:
    """Yields a sentence for each cell of this store that ended without a run, and one for each damaged file of a
    cell.
    """
    for plan in plans:
        for state in compute_cell_states(plan, store):
            cell = f"cell {state.number} of plan {plan.id}"
            if state.status is CellStatus.FAILED:
                host_text = f" on {state.attempts[-1].host}" if state.attempts else ""
                yield f"{cell} failed{host_text}: {state.why}"
            for sentence in state.damage:
                yield f"{cell} is damaged: {sentence}"


def build_report(
    runs: Sequence[MachineRun],
    plans: Sequence[FleetPlan] = (),
    expected: Collection[str] = (),
    excluded: Sequence[str] = (),
) -> FleetReport:
    """Builds the report from runs. `expected` are names of machines that should have sent runs."""
    # 1. Compare the machines of each kind. For each further kind, list its differences from the first kind.
    kinds: list[MachineKind] = []
    figures: list[FleetFigure] = []
    for (hardware, software), members in _group_by_kind(runs).items():
        name = _kind_name(len(kinds))
        times = _median_times(members)
        figures += [FleetFigure(case, name, seconds) for case, seconds in times.items()]
        machines = tuple(sorted({run.machine for run in members}))
        differences: tuple[str, ...] = ()
        if kinds:
            differences = (
                *describe_differences(hardware, kinds[0].hardware),
                *describe_differences(software, kinds[0].software),
            )
        kinds.append(MachineKind(name, machines, hardware, software, differences, find_deviations(times)))

    # 2. Find the settings that no machine has measured completely.
    settings: dict[str, None] = {}
    for plan in plans:
        settings |= dict.fromkeys(cell.setting for cell in plan.cells)
    for run in runs:
        settings |= dict.fromkeys((*run.whole, *run.incomplete))
    complete = _complete_settings(runs)

    # 3. Find the machines that deviate from the others.
    alarms = [
        *_find_software_deviations(kinds),
        *_find_outliers(kinds),
        *find_missing_measurements(runs, expected),
        *_find_failed_cases(runs),
    ]
    oddity_order = list(Oddity)
    alarms.sort(key=lambda alarm: (alarm.machine, oddity_order.index(alarm.what)))
    why_not = {}
    for kind in kinds[1:]:
        if kind.software != kinds[0].software:
            why_not[kind.name] = "; ".join(describe_differences(kind.software, kinds[0].software))
    return FleetReport(
        machines=tuple(_summarize_machines(runs, kinds)),
        kinds=tuple(kinds),
        figures=tuple(figures),
        alarms=tuple(alarms),
        settings=len(settings),
        lacking=tuple(setting for setting in settings if setting not in complete),
        excluded=tuple(excluded),
        why_not=why_not,
    )


def _kind_name(number: int) -> str:
    """Returns the name of the kind with this number: A, B, ..., Z, A1, B1, ..."""
    return chr(ord("A") + number % 26) + (str(number // 26) if number >= 26 else "")


def _group_by_kind(runs: Sequence[MachineRun]) -> dict[tuple[Fields, Fields], list[MachineRun]]:
    """Groups runs by hardware and software. The kind with the most machines comes first."""
    kinds = together(((run.hardware, run.software), run) for run in runs)
    return dict(sorted(kinds.items(), key=lambda pair: (-len({run.machine for run in pair[1]}), pair[0])))


def _median_times(runs: Sequence[MachineRun]) -> dict[str, dict[str, float]]:
    """Returns for each case the median seconds of each machine."""
    samples: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        for case, seconds in run.times.items():
            samples.setdefault((case, run.machine), []).append(seconds)
    medians: dict[str, dict[str, float]] = {}
    for (case, machine), values in samples.items():
        medians.setdefault(case, {})[machine] = median(values)
    return medians


def _complete_settings(runs: Iterable[MachineRun]) -> dict[str, None]:
    """Returns the completely measured settings as keys, always in the same order."""
    return dict.fromkeys(chain.from_iterable(run.whole for run in runs))


def _summarize_machines(runs: Sequence[MachineRun], kinds: Sequence[MachineKind]) -> Iterator[Machine]:
    for name, members in sorted(_group_by_machine(runs).items()):
        kinds_of_machine = [kind for kind in kinds if name in kind.machines]
        deviations = [kind.deviations[name] for kind in kinds_of_machine if name in kind.deviations]
        yield Machine(
            name=name,
            kinds=tuple(kind.name for kind in kinds_of_machine),
            runs=len(members),
            whole=len(_complete_settings(members)),
            failed=len(set().union(*(run.failed for run in members))),
            ratio=deviations[-1].ratio if deviations else None,
            score=deviations[-1].score if deviations else None,
        )


def _group_by_machine(runs: Sequence[MachineRun]) -> dict[str, list[MachineRun]]:
    return together((run.machine, run) for run in runs)


def _find_software_deviations(kinds: Sequence[MachineKind]) -> Iterator[MachineAlarm]:
    """Yields machines whose software or settings are unusual. A larger group of machines with the same hardware has
    different ones.
    """
    for number, kind in enumerate(kinds):
        larger_kind = next((larger for larger in kinds[:number] if larger.hardware == kind.hardware), None)
        if larger_kind is not None and len(larger_kind.machines) > len(kind.machines):
            differences = "; ".join(describe_differences(kind.software, larger_kind.software))
            explanation = (
                f"{differences}, which {len(larger_kind.machines)} others of its hardware have: times are not compared"
            )
            yield from (MachineAlarm(machine, Oddity.SOFTWARE, explanation) for machine in kind.machines)


def _find_outliers(kinds: Sequence[MachineKind]) -> Iterator[MachineAlarm]:
    for kind in kinds:
        for machine, deviation in kind.deviations.items():
            if deviation.odd:
                oddity = Oddity.SLOW if deviation.score > 0 else Oddity.FAST
                times = f"{ratio(deviation.ratio)} the time of the median of its kind, in its median case"
                distance = (
                    f"{abs(deviation.score):.0f} median absolute deviations away, the limit is {OUTLIER_DEVIATIONS:.0f}"
                )
                yield MachineAlarm(machine, oddity, f"{times} ({distance})")


def find_missing_measurements(runs: Sequence[MachineRun], expected: Collection[str]) -> Iterator[MachineAlarm]:
    """Yields machines whose measurements are missing or incomplete: machines with interrupted runs, and expected
    machines that sent nothing. A machine is also yielded if it lacks a setting which at least half of the other
    machines have.
    """
    by_machine = _group_by_machine(runs)
    complete = {machine: _complete_settings(members) for machine, members in by_machine.items()}
    for machine, members in by_machine.items():
        interrupted: dict[str, str] = {}
        for run in members:
            interrupted |= {setting: run.run for setting in run.incomplete if setting not in complete[machine]}
        if interrupted:
            names = join_words([f"{setting} (run {run})" for setting, run in interrupted.items()])
            explanation = f"{len(interrupted)} of its cells were cut off and not resumed: {names}"
            yield MachineAlarm(machine, Oddity.CUT_OFF, explanation)
        counts = Counter(chain.from_iterable(complete[name] for name in complete if name != machine))
        common_settings = [setting for setting, count in counts.items() if count > 1 and 2 * count >= len(complete) - 1]
        missing = [setting for setting in common_settings if setting not in complete[machine] | interrupted]
        if missing:
            explanation = (
                f"{len(missing)} of {len(common_settings)} cells that other machines measured are missing: "
                f"{join_words(missing)}"
            )
            yield MachineAlarm(machine, Oddity.MISSING, explanation)
    for machine in sorted(set(expected) - by_machine.keys()):
        yield MachineAlarm(machine, Oddity.MISSING, "it sent nothing")


def _find_failed_cases(runs: Sequence[MachineRun]) -> Iterator[MachineAlarm]:
    measured = set().union(*(run.times for run in runs))
    for machine, members in _group_by_machine(runs).items():
        failed: dict[str, str] = {}
        for run in members:
            failed |= {case: reason for case, reason in run.failed.items() if case in measured}
        if failed:
            case, reason = next(iter(failed.items()))
            explanation = f"{len(failed)} of the cases that other machines measured failed: {case} ({reason})"
            yield MachineAlarm(machine, Oddity.FAILED, explanation)
