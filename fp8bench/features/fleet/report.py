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
    EnvironmentFields,
    FleetFigure,
    FleetReport,
    Machine,
    MachineAlarm,
    MachineKind,
    MachineOddity,
    MachineRun,
    describe_field_differences,
    find_machine_deviations,
    summarize_run,
)
from fp8bench.files import is_locked
from fp8bench.model import Run
from fp8bench.model.run import CellStatus, FleetPlan
from fp8bench.report.panels import together
from fp8bench.report.words.naming import join_words
from fp8bench.store.fleet_plans import compute_cell_states, find_cell_number, load_plans, read_fleet_plan
from fp8bench.store.runs.listing import REFUSAL_REMEDY, REFUSED_REASON, listing
from fp8bench.store.runs.run_file import load_header, load_run
from fp8bench.units import ratio

_UNPLANNED_REASON = "do not belong to a cell of the plan"
_STILL_RUNNING_TEXT = "are still being measured"


@dataclass
class _StoreContents:
    """The content of a store that the report needs: the runs, the number of skipped runs by reason, and sentences about
    problems.
    """

    runs: list[MachineRun] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    doubts: list[str] = field(default_factory=list)

    @property
    def skipped_reasons(self) -> list[str]:
        return [f"{count} run{'s' * (count != 1)}: {reason}" for reason, count in (+self.skipped).items()]


def make_fleet_report(source: Path, store: Path, expected_machines: Collection[str] = ()) -> FleetReport:
    """Reports on the runs of a plan or of a store. `source` is the file of a plan, or a store. For a store, the report
    covers the runs of its plans, or all of its runs if it has no plan. Raises UsageError if no run can be used and no
    machines are expected.
    """
    if source.is_dir():
        store, source_plans = source, load_plans(source)
    else:
        source_plans = (read_fleet_plan(source),)

    def is_planned(run: Run) -> bool:
        return not source_plans or any(
            find_cell_number(fleet_plan, run.cell) is not None for fleet_plan in source_plans
        )

    store_contents = _read_runs(store, is_planned)
    if not store_contents.runs and not expected_machines:
        reasons = store_contents.skipped_reasons or store_contents.doubts[:1]
        missing_run_text = f"run of the plan {source_plans[0].id}" if source_plans else "run"
        problem = f"{store} has no {missing_run_text}"
        if reasons:
            problem = f"{store}: no run counts ({'; '.join(reasons).rstrip('.')})"
        raise UsageError(f"{problem}. Give --store DIR, or a store that `fleet collect` made.")
    del store_contents.skipped[REFUSED_REASON]  # `doubts` already names the refused runs
    run_exclusion_reasons = (
        *store_contents.skipped_reasons,
        *store_contents.doubts,
        *_describe_failed_cells(store, source_plans),
    )
    return build_report(store_contents.runs, source_plans, expected_machines, run_exclusion_reasons)


def _read_runs(store: Path, is_planned: Callable[[Run], bool]) -> _StoreContents:
    """Reads the runs whose header `is_planned` accepts. It reads one run at a time, because memory may not hold all
    of them.
    """
    run_listing = listing(store)
    store_contents = _StoreContents(
        skipped=run_listing.skipped_run_reasons, doubts=run_listing.notes(run_listing.refused)
    )
    finished: list[tuple[MachineRun, Path, int | None]] = []
    for path in run_listing.files:
        try:
            # Read the header first, because a store may have thousands of unrelated runs.
            if not is_planned(load_header(path)):
                store_contents.skipped[_UNPLANNED_REASON] += 1
                continue
            is_running, run = is_locked(path), load_run(path)
        except (StoreError, RunNotFound) as error:
            store_contents.doubts.append(str(error))
            continue
        except OSError as error:
            store_contents.doubts.append(f"{path} could not be read ({error.strerror})")
            continue
        store_contents.doubts += [f"{path}: {trouble}" for trouble in run.troubles]
        # A run that is still being written would look incomplete.
        if is_running:
            store_contents.skipped[_STILL_RUNNING_TEXT] += 1
        else:
            finished.append((summarize_run(run), path, _hash_run_times(run)))
    _add_runs_without_copies(finished, store_contents)
    return store_contents


def _hash_run_times(run: Run) -> int | None:
    """Returns a hash of all times of a run; None if the run has no times. The hash is valid in this process only."""
    case_slots = tuple((record.case.id, record.timing.slots) for record in run.records if record.timing is not None)
    return hash(case_slots) if case_slots else None


def _add_runs_without_copies(
    finished_runs: Sequence[tuple[MachineRun, Path, int | None]], store_reading: _StoreContents
) -> None:
    """Adds the finished runs to `store_reading`, except copies. Runs of different machines are copies if their times
    are equal to the nanosecond. Only one machine can have measured these times, and it is unknown which one. So none of
    these runs counts.
    """
    runs_by_digest = together(
        (digest, (run.machine, path)) for run, path, digest in finished_runs if digest is not None
    )
    copied_time_digests: set[int | None] = set()
    for digest, machines_and_paths in runs_by_digest.items():
        machines = sorted({machine for machine, _ in machines_and_paths})
        if len(machines) > 1:
            copied_time_digests.add(digest)
            paths = " and ".join(str(path) for _, path in machines_and_paths)
            store_reading.doubts.append(
                f"{paths} have the same times to the nanosecond under the machines {' and '.join(machines)}, so none "
                f"of them counts. {REFUSAL_REMEDY}"
            )
    store_reading.runs += [run for run, _, digest in finished_runs if digest not in copied_time_digests]


def _describe_failed_cells(store: Path, plans: Sequence[FleetPlan]) -> Iterator[str]:
    """Yields a sentence for each cell of this store that ended without a run, and one for each damaged file of a
    cell.
    """
    for fleet_plan in plans:
        for state in compute_cell_states(fleet_plan, store):
            cell_text = f"cell {state.number} of plan {fleet_plan.id}"
            if state.status is CellStatus.FAILED:
                last_attempt_host_text = f" on {state.attempts[-1].host}" if state.attempts else ""
                yield f"{cell_text} failed{last_attempt_host_text}: {state.why}"
            for sentence in state.damage:
                yield f"{cell_text} is damaged: {sentence}"


def build_report(
    runs: Sequence[MachineRun],
    plans: Sequence[FleetPlan] = (),
    expected_machines: Collection[str] = (),
    exclusion_reasons: Sequence[str] = (),
) -> FleetReport:
    """Builds the report from runs. `expected_machines` are names of machines that should have sent runs."""
    # 1. Compare the machines of each kind. For each further kind, list its differences from the first kind.
    kinds: list[MachineKind] = []
    figures: list[FleetFigure] = []
    for (hardware, software), members in _group_by_kind(runs).items():
        name = _name_machine_kind(len(kinds))
        median_times = _median_times(members)
        figures += [FleetFigure(case, name, seconds) for case, seconds in median_times.items()]
        machines = tuple(sorted({run.machine for run in members}))
        differences: tuple[str, ...] = ()
        if kinds:
            differences = (
                *describe_field_differences(hardware, kinds[0].hardware),
                *describe_field_differences(software, kinds[0].software),
            )
        kinds.append(
            MachineKind(name, machines, hardware, software, differences, find_machine_deviations(median_times))
        )

    # 2. Find the settings that no machine has measured completely.
    settings: dict[str, None] = {}
    for fleet_plan in plans:
        settings |= dict.fromkeys(cell.setting for cell in fleet_plan.cells)
    for run in runs:
        settings |= dict.fromkeys((*run.complete_group_settings, *run.incomplete_settings))
    complete_group_settings = _collect_complete_settings(runs)

    # 3. Find the machines that deviate from the others.
    alarms = [
        *_find_software_deviations(kinds),
        *_find_outliers(kinds),
        *find_missing_measurements(runs, expected_machines),
        *_find_failed_cases(runs),
    ]
    oddity_kinds = list(MachineOddity)
    alarms.sort(key=lambda alarm: (alarm.machine, oddity_kinds.index(alarm.what)))
    differences_by_kind = {}
    for kind in kinds[1:]:
        if kind.software != kinds[0].software:
            differences_by_kind[kind.name] = "; ".join(describe_field_differences(kind.software, kinds[0].software))
    return FleetReport(
        machines=tuple(_summarize_machines(runs, kinds)),
        kinds=tuple(kinds),
        figures=tuple(figures),
        alarms=tuple(alarms),
        settings=len(settings),
        lacking=tuple(setting for setting in settings if setting not in complete_group_settings),
        excluded=tuple(exclusion_reasons),
        why_not=differences_by_kind,
    )


def _name_machine_kind(number: int) -> str:
    """Returns the name of the kind with this number: A, B, ..., Z, A1, B1, ..."""
    return chr(ord("A") + number % 26) + (str(number // 26) if number >= 26 else "")


def _group_by_kind(runs: Sequence[MachineRun]) -> dict[tuple[EnvironmentFields, EnvironmentFields], list[MachineRun]]:
    """Groups runs by hardware and software. The kind with the most machines comes first."""
    kinds = together(((run.hardware, run.software), run) for run in runs)
    return dict(sorted(kinds.items(), key=lambda pair: (-len({run.machine for run in pair[1]}), pair[0])))


def _median_times(runs: Sequence[MachineRun]) -> dict[str, dict[str, float]]:
    """Returns the median seconds of each case on each machine."""
    samples: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        for case, seconds in run.times.items():
            samples.setdefault((case, run.machine), []).append(seconds)
    medians: dict[str, dict[str, float]] = {}
    for (case, machine), values in samples.items():
        medians.setdefault(case, {})[machine] = median(values)
    return medians


def _collect_complete_settings(runs: Iterable[MachineRun]) -> dict[str, None]:
    """Returns the completely measured settings as the keys of a dictionary, in the order of the runs."""
    return dict.fromkeys(chain.from_iterable(run.complete_group_settings for run in runs))


def _summarize_machines(runs: Sequence[MachineRun], kinds: Sequence[MachineKind]) -> Iterator[Machine]:
    for name, members in sorted(_group_by_machine(runs).items()):
        kinds_of_machine = [kind for kind in kinds if name in kind.machines]
        machine_deviations = [kind.deviations[name] for kind in kinds_of_machine if name in kind.deviations]
        yield Machine(
            name=name,
            kinds=tuple(kind.name for kind in kinds_of_machine),
            runs=len(members),
            whole=len(_collect_complete_settings(members)),
            failed=len(set().union(*(run.failure_reasons for run in members))),
            ratio=machine_deviations[-1].ratio if machine_deviations else None,
            score=machine_deviations[-1].score if machine_deviations else None,
        )


def _group_by_machine(runs: Sequence[MachineRun]) -> dict[str, list[MachineRun]]:
    return together((run.machine, run) for run in runs)


def _find_software_deviations(kinds: Sequence[MachineKind]) -> Iterator[MachineAlarm]:
    """Yields machines whose software or settings differ from those of a larger group of machines with the same
    hardware.
    """
    for number, kind in enumerate(kinds):
        larger_kind = next((larger for larger in kinds[:number] if larger.hardware == kind.hardware), None)
        if larger_kind is not None and len(larger_kind.machines) > len(kind.machines):
            differences = "; ".join(describe_field_differences(kind.software, larger_kind.software))
            explanation = (
                f"{differences}, which {len(larger_kind.machines)} others of its hardware have: times are not compared"
            )
            yield from (MachineAlarm(machine, MachineOddity.OTHER_SOFTWARE, explanation) for machine in kind.machines)


def _find_outliers(kinds: Sequence[MachineKind]) -> Iterator[MachineAlarm]:
    for kind in kinds:
        for machine, deviation in kind.deviations.items():
            if deviation.odd:
                machine_oddity = MachineOddity.TOO_SLOW if deviation.score > 0 else MachineOddity.TOO_FAST
                time_ratio_text = f"{ratio(deviation.ratio)} the median time of its kind, in its median case"
                distance = (
                    f"{abs(deviation.score):.0f} median absolute deviations away, the limit is {OUTLIER_DEVIATIONS:.0f}"
                )
                yield MachineAlarm(machine, machine_oddity, f"{time_ratio_text} ({distance})")


def find_missing_measurements(runs: Sequence[MachineRun], expected_machines: Collection[str]) -> Iterator[MachineAlarm]:
    """Yields an alarm for each machine that has interrupted runs, for each expected machine that sent nothing, and for
    each machine that lacks settings that at least half of the other machines measured.
    """
    runs_by_machine = _group_by_machine(runs)
    settings_by_machine = {machine: _collect_complete_settings(members) for machine, members in runs_by_machine.items()}
    for machine, members in runs_by_machine.items():
        # 1. Find settings whose run was interrupted, and which no other run of the machine completed.
        interrupted_runs: dict[str, str] = {}
        for run in members:
            interrupted_runs |= {
                setting: run.run for setting in run.incomplete_settings if setting not in settings_by_machine[machine]
            }
        if interrupted_runs:
            names = join_words([f"{setting} (run {run})" for setting, run in interrupted_runs.items()])
            explanation = f"{len(interrupted_runs)} of its cells were cut off and not resumed: {names}"
            yield MachineAlarm(machine, MachineOddity.CUT_OFF, explanation)
        # 2. Find settings that at least two and at least half of the other machines completed.
        counts = Counter(
            chain.from_iterable(settings_by_machine[name] for name in settings_by_machine if name != machine)
        )
        common_settings = [
            setting for setting, count in counts.items() if count > 1 and 2 * count >= len(settings_by_machine) - 1
        ]
        missing_settings = [
            setting for setting in common_settings if setting not in settings_by_machine[machine] | interrupted_runs
        ]
        if missing_settings:
            explanation = (
                f"{len(missing_settings)} of {len(common_settings)} cells that other machines measured are missing: "
                f"{join_words(missing_settings)}"
            )
            yield MachineAlarm(machine, MachineOddity.CELLS_MISSING, explanation)
    # 3. Find expected machines without any run.
    for machine in sorted(set(expected_machines) - runs_by_machine.keys()):
        yield MachineAlarm(machine, MachineOddity.CELLS_MISSING, "it sent nothing")


def _find_failed_cases(runs: Sequence[MachineRun]) -> Iterator[MachineAlarm]:
    # A case that failed on every machine does not set any machine apart.
    measured_cases = set().union(*(run.times for run in runs))
    for machine, members in _group_by_machine(runs).items():
        failure_reasons: dict[str, str] = {}
        for run in members:
            failure_reasons |= {case: reason for case, reason in run.failure_reasons.items() if case in measured_cases}
        if failure_reasons:
            case, reason = next(iter(failure_reasons.items()))
            explanation = f"{len(failure_reasons)} of the cases that other machines measured failed: {case} ({reason})"
            yield MachineAlarm(machine, MachineOddity.FAILED, explanation)
