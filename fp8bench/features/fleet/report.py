"""Reads the runs of a fleet from a store, and says which machines stand out and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
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
    deviations,
    differences,
    seen_of,
)
from fp8bench.files import is_locked
from fp8bench.model import Run
from fp8bench.model.run import CellStatus, FleetPlan
from fp8bench.report.panels import together
from fp8bench.report.words.naming import listed
from fp8bench.store.fleet_plans import number_of, plans_of, read_plan, states_of
from fp8bench.store.runs.listing import REFUSED, REMEDY, listing
from fp8bench.store.runs.run_file import load_head, load_run
from fp8bench.units import ratio

_OTHERS = "are of no cell of the plan"
_RUNNING = "are still being measured"


def fleet_report(source: Path, store: Path, expected: Collection[str] = ()) -> FleetReport:
    """Reports on a plan's runs in a store; or, if `source` is a store, on the plans beside its runs, else on all its
    runs."""
    if source.is_dir():
        store, plans = source, plans_of(source)
    else:
        plans = (read_plan(source),)
    seen, left, doubts = _read(
        store, lambda run: not plans or any(number_of(plan, run.cell) is not None for plan in plans)
    )
    if not seen and not expected:
        what = f"run of the plan {plans[0].id}" if plans else "run"
        why = "; ".join(_counts(left) or doubts[:1])
        what_there_is = f"of {store} no run counts ({why.rstrip('.')})" if why else f"{store} has no {what}"
        raise UsageError(f"{what_there_is}. Give --store DIR, or a store that `fleet collect` made.")
    del left[REFUSED]  # each is named among the doubts
    return report_of(seen, plans, expected, (*_counts(left), *doubts, *_failed_cells(store, plans)))


def fleet_of(runs: Sequence[Run], store: Path) -> FleetReport | None:
    """Reports on all runs of the store that are cells of the same plans as `runs`; None if these are of no plan."""
    wanted = {run.fleet_plan for run in runs} - {""}
    if not wanted:
        return None
    try:
        plans = tuple(plan for plan in plans_of(store) if plan.id in wanted)
        troubles: tuple[str, ...] = ()
    except UsageError as error:
        plans, troubles = (), (str(error),)
    seen, _, doubts = _read(store, lambda run: run.fleet_plan in wanted)
    return report_of(seen, plans, (), (*troubles, *doubts, *_failed_cells(store, plans)))


def _counts(left: Counter[str]) -> list[str]:
    return [f"{count} run{'s' * (count != 1)}: {why}" for why, count in (+left).items()]


def _read(store: Path, wanted: Callable[[Run], bool]) -> tuple[list[MachineRun], Counter[str], list[str]]:
    """Returns runs that are wanted by their headers, how many were left out and why, and what is wrong. Runs are
    loaded one after the other: memory may not hold all."""
    there = listing(store)
    doubts = there.notes(there.refused)
    left = there.left
    seen: list[tuple[MachineRun, Path, int | None]] = []
    for path in there.files:
        try:
            if not wanted(load_head(path)):
                left[_OTHERS] += 1
                continue
            running, run = is_locked(path), load_run(path)
        except (StoreError, RunNotFound) as error:
            doubts.append(str(error))
            continue
        except OSError as error:
            doubts.append(f"{path} could not be read ({error.strerror})")
            continue
        doubts += [f"{path}: {trouble}" for trouble in run.troubles]
        if running:
            left[_RUNNING] += 1
        else:
            seen.append((seen_of(run), path, _digest_of_times(run)))
    counting, copies = _measured_once(seen)
    return counting, left, [*doubts, *copies]


def _digest_of_times(run: Run) -> int | None:
    """Returns a digest of all times of a run, valid in this process; None where it has none."""
    times = tuple((record.case.id, record.timing.slots) for record in run.records if record.timing is not None)
    return hash(times) if times else None


def _measured_once(seen: Sequence[tuple[MachineRun, Path, int | None]]) -> tuple[list[MachineRun], list[str]]:
    """Drops runs of several machines with the same times to the nanosecond, and says so. Only one machine can have
    measured them, and nobody knows which."""
    alike = together((samples, (run.machine, str(path))) for run, path, samples in seen if samples is not None)
    copied = {samples: runs for samples, runs in alike.items() if len({machine for machine, _ in runs}) > 1}
    doubts = [
        f"{' and '.join(path for _, path in runs)} have the same times to the nanosecond under the machines "
        f"{' and '.join(sorted({machine for machine, _ in runs}))}, so that none of them counts. {REMEDY}"
        for runs in copied.values()
    ]
    return [run for run, _, samples in seen if samples not in copied], doubts


def _failed_cells(store: Path, plans: tuple[FleetPlan, ...]) -> list[str]:
    """Describes cells whose process ended without a run, if the store is the one they were measured into, and cells
    with damaged files."""
    return [
        f"cell {state.number} of plan {plan.id} {words}"
        for plan in plans for state in states_of(plan, store)
        for where in [f" on {state.attempts[-1].host}" if state.attempts else ""]
        for words in (*[f"failed{where}: {state.why}"][: state.status is CellStatus.FAILED],
                      *(f"is damaged: {sentence}" for sentence in state.damage))
    ]  # fmt: skip


def report_of(
    seen: Sequence[MachineRun],
    plans: Sequence[FleetPlan] = (),
    expected: Collection[str] = (),
    excluded: Sequence[str] = (),
) -> FleetReport:
    """Makes the report of some runs. `expected` are machines that should have sent something."""
    members = _kinds(seen)
    figures: list[FleetFigure] = []
    kinds: list[MachineKind] = []
    for place, ((hardware, software), runs) in enumerate(members.items()):
        name = chr(ord("A") + place % 26) + (str(place // 26) if place >= 26 else "")  # A, B, ..., Z, A1, ...
        times = _times(runs)
        figures += [FleetFigure(case, name, seconds) for case, seconds in times.items()]
        first = kinds[0] if kinds else MachineKind(name, (), hardware, software)
        differs = *differences(hardware, first.hardware), *differences(software, first.software)
        machines = tuple(sorted({run.machine for run in runs}))
        kinds.append(MachineKind(name, machines, hardware, software, differs, deviations(times)))
    settings = dict.fromkeys(cell.setting for plan in plans for cell in plan.cells)
    settings |= dict.fromkeys(setting for run in seen for setting in (*run.whole, *run.cut))
    done = {setting for run in seen for setting in run.whole}
    alarms = (*_of_software(kinds), *_of_times(kinds), *of_coverage(seen, expected), *_of_failures(seen))
    return FleetReport(
        tuple(_machines(seen, kinds)), tuple(kinds), tuple(figures),
        tuple(sorted(alarms, key=lambda alarm: (alarm.machine, list(Oddity).index(alarm.what)))),
        len(settings), tuple(setting for setting in settings if setting not in done),
        tuple(excluded),
        {kind.name: why for kind in kinds[1:] if (why := "; ".join(differences(kind.software, kinds[0].software)))},
    )  # fmt: skip


def _kinds(seen: Sequence[MachineRun]) -> dict[tuple[Fields, Fields], list[MachineRun]]:
    members = together(((run.hardware, run.software), run) for run in seen)
    return dict(sorted(members.items(), key=lambda pair: (-len({run.machine for run in pair[1]}), pair[0])))


def _times(runs: Sequence[MachineRun]) -> dict[str, dict[str, float]]:
    by_case = together((case, (run.machine, seconds)) for run in runs for case, seconds in run.times.items())
    return {case: {name: median(values) for name, values in together(pairs).items()} for case, pairs in by_case.items()}


def _machines(seen: Sequence[MachineRun], kinds: Sequence[MachineKind]) -> Iterator[Machine]:
    last = {name: deviation for kind in kinds for name, deviation in kind.deviations.items()}
    for name, runs in sorted(_by_machine(seen).items()):
        deviation = last.get(name)
        yield Machine(
            name, tuple(kind.name for kind in kinds if name in kind.machines), len(runs),
            len({setting for run in runs for setting in run.whole}),
            len({case for run in runs for case in run.failed}),
            deviation.ratio if deviation else None, deviation.score if deviation else None,
        )  # fmt: skip


def _by_machine(seen: Sequence[MachineRun]) -> dict[str, list[MachineRun]]:
    return together((run.machine, run) for run in seen)


def _of_software(kinds: Sequence[MachineKind]) -> Iterator[MachineAlarm]:
    """Names machines whose software or settings differ from those of more machines with the same hardware."""
    for place, kind in enumerate(kinds):
        larger = next((other for other in kinds[:place] if other.hardware == kind.hardware), None)
        if larger is not None and len(larger.machines) > len(kind.machines):
            why = "; ".join(differences(kind.software, larger.software))
            words = f"{why}, as {len(larger.machines)} others of its hardware have it: not compared"
            yield from (MachineAlarm(machine, Oddity.SOFTWARE, words) for machine in kind.machines)


def _of_times(kinds: Sequence[MachineKind]) -> Iterator[MachineAlarm]:
    for kind in kinds:
        for machine, deviation in kind.deviations.items():
            if deviation.odd:
                what = Oddity.SLOW if deviation.score > 0 else Oddity.FAST
                times = f"{ratio(deviation.ratio)} the time of the median of its kind, in its median case"
                far = f"{abs(deviation.score):.0f} median absolute deviations away, the limit is {LIMIT:.0f}"
                yield MachineAlarm(machine, what, f"{times} ({far})")


def of_coverage(seen: Sequence[MachineRun], expected: Collection[str]) -> Iterator[MachineAlarm]:
    """Names machines whose runs were cut off, that lack what at least half of the others have, or that sent nothing."""
    own = _by_machine(seen)
    # Mappings keep an order: the same runs give the same words.
    whole = {machine: dict.fromkeys(setting for run in runs for setting in run.whole) for machine, runs in own.items()}
    for machine, runs in own.items():
        cut = {setting: run.run for run in runs for setting in run.cut if setting not in whole[machine]}
        if cut:
            which = listed([f"{setting} (run {run})" for setting, run in cut.items()])
            yield MachineAlarm(
                machine, Oddity.CUT_OFF, f"{len(cut)} of its cells were cut off and not resumed: {which}"
            )
        others = [have for name, have in whole.items() if name != machine]
        common = Counter(setting for have in others for setting in have)
        wanted = [setting for setting, count in common.items() if count > 1 and 2 * count >= len(others)]
        lacking = [setting for setting in wanted if setting not in whole[machine] and setting not in cut]
        if lacking:
            count = f"{len(lacking)} of {len(wanted)} cells"
            yield MachineAlarm(
                machine, Oddity.MISSING, f"{count} that other machines measured are missing: {listed(lacking)}"
            )
    for machine in sorted(set(expected) - own.keys()):
        yield MachineAlarm(machine, Oddity.MISSING, "nothing came of it")


def _of_failures(seen: Sequence[MachineRun]) -> Iterator[MachineAlarm]:
    good = {case for run in seen for case in run.times}
    for machine, runs in _by_machine(seen).items():
        failed = {case: why for run in runs for case, why in run.failed.items() if case in good}
        if failed:
            case, why = next(iter(failed.items()))
            yield MachineAlarm(
                machine, Oddity.FAILED, f"{len(failed)} of the cases that others measured failed: {case} ({why})"
            )
