"""What a store has of a fleet, read for a report: who is named in it, for what, and in which words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from statistics import median

from fp8bench.errors import RunNotFound, StoreError, UsageError
from fp8bench.features.fleet.machines import (
    Fields,
    FleetFigure,
    FleetReport,
    Machine,
    MachineAlarm,
    MachineKind,
    MachineRun,
    Oddity,
    differences,
    seen_of,
)
from fp8bench.features.fleet.odd import deviations, of_bits, of_clocks, seen_from, shortened
from fp8bench.files import is_locked
from fp8bench.model import Run
from fp8bench.model.run import CellStatus, FleetPlan
from fp8bench.report.panels import together
from fp8bench.store.fleet_plans import number_of, plans_of, read_plan, states_of
from fp8bench.store.runs.listing import REFUSED, REMEDY, listing
from fp8bench.store.runs.run_file import load_head, load_run
from fp8bench.store.verify import samples_of
from fp8bench.units import change

_OTHERS = "are of no cell of the plan"
_RUNNING = "are still being measured"


def fleet_report(source: Path, store: Path, expected: Collection[str] = ()) -> FleetReport:
    """Of a plan's runs in a store, or, where `source` is a store, of the plans beside its runs, else of all of them."""
    if source.is_dir():
        store, plans = source, plans_of(source)
    else:
        plans = (read_plan(source),)
    seen, left, doubts = _read(store, lambda run: not plans or any(number_of(plan, run) is not None for plan in plans))
    if not seen and not expected:
        what = f"run of the plan {plans[0].id}" if plans else "run"
        why = "; ".join(_counts(left) or doubts[:1])
        found = f"of {store} no run counts ({why.rstrip('.')})" if why else f"{store} has no {what}"
        raise UsageError(f"{found}. Give --store DIR, or a store that `fleet collect` made.")
    del left[REFUSED]  # each is named among the doubts
    return report_of(seen, plans, expected, (*_counts(left), *doubts, *_failed_cells(store, plans)))


def fleet_of(runs: Sequence[Run], store: Path) -> FleetReport | None:
    """Of all runs in a store that are cells of the same plans as some runs; None where these are cells of none."""
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
    """Those that are wanted by their headers, how many are left out and why, and what is wrong.

    One run after the other: all of them are more than memory may hold.
    """
    there = listing(store)
    doubts = there.notes(there.refused)
    left = there.left
    seen: list[tuple[MachineRun, Path, int | None]] = []
    for path in there.files:
        try:
            if not wanted(load_head(path)):
                left[_OTHERS] += 1
                continue
            running, written, run = is_locked(path), path.stat().st_mtime, load_run(path)
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
            seen.append((seen_of(run, written), path, samples_of(run)))
    counting, copies = _measured_once(seen)
    return counting, left, [*doubts, *copies]


def _measured_once(seen: Sequence[tuple[MachineRun, Path, int | None]]) -> tuple[list[MachineRun], list[str]]:
    """Runs without those of several machines that have the same times to the nanosecond; and what is wrong with these.

    Only one machine can have measured them, and nobody knows which.
    """
    alike = together((samples, (run.machine, str(path))) for run, path, samples in seen if samples is not None)
    copied = {samples: runs for samples, runs in alike.items() if len({machine for machine, _ in runs}) > 1}
    doubts = [
        f"{' and '.join(path for _, path in runs)} have the same times to the nanosecond under the machines "
        f"{' and '.join(sorted({machine for machine, _ in runs}))}, so that none of them counts. {REMEDY}"
        for runs in copied.values()
    ]
    return [run for run, _, samples in seen if samples not in copied], doubts


def _failed_cells(store: Path, plans: tuple[FleetPlan, ...]) -> list[str]:
    """Those whose process ended without a run, where the store is the one that they were measured into, and those of
    which files are damaged."""
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
    """What some runs come to. `expected` are machines of which something should have come."""
    members = _kinds(seen)
    figures: list[FleetFigure] = []
    kinds: list[MachineKind] = []
    for name, ((hardware, software), runs) in zip(_names(), members.items(), strict=False):
        times = _times(runs)
        odd = deviations(times)
        figures += [FleetFigure("", name, {}, odd[""])] if "" in odd else []
        figures += [FleetFigure(case, name, seconds, odd.get(case, {})) for case, seconds in times.items()]
        first = kinds[0] if kinds else MachineKind(name, (), hardware, software)
        differs = *differences(hardware, first.hardware), *differences(software, first.software)
        machines = tuple(sorted({run.machine for run in runs}))
        kinds.append(MachineKind(name, machines, hardware, software, differs, seen_from(times)))
    settings = dict.fromkeys(cell.setting for plan in plans for cell in plan.cells)
    settings |= dict.fromkeys(setting for run in seen for setting in (*run.whole, *run.cut))
    done = {setting for run in seen for setting in run.whole}
    wrong, doubts = of_clocks(seen, plans)
    alarms = (
        *_of_software(kinds), *_of_times(figures), *(alarm for runs in members.values() for alarm in of_bits(runs)),
        *of_coverage(seen, expected), *_of_failures(seen), *wrong,
    )  # fmt: skip
    bare = Counter(run.machine for run in seen if run.cell and not run.bits)
    without = (
        f"of {name} {count} runs have no bits: its devices could not compute them" for name, count in bare.items()
    )
    return FleetReport(
        tuple(_machines(seen, kinds, figures)), tuple(kinds), tuple(figures),
        tuple(sorted(alarms, key=lambda alarm: (alarm.machine, list(Oddity).index(alarm.what)))),
        len(settings), tuple(setting for setting in settings if setting not in done),
        (*excluded, *without, *doubts),
        {kind.name: why for kind in kinds[1:] if (why := "; ".join(differences(kind.software, kinds[0].software)))},
    )  # fmt: skip


def _names() -> Iterator[str]:
    """A, B, ..., Z, A1, ..."""
    number = 0
    while True:
        yield from (chr(ord("A") + letter) + (str(number) if number else "") for letter in range(26))
        number += 1


def _kinds(seen: Sequence[MachineRun]) -> dict[tuple[Fields, Fields], list[MachineRun]]:
    found = together(((run.hardware, run.software), run) for run in seen)
    return dict(sorted(found.items(), key=lambda pair: (-len({run.machine for run in pair[1]}), pair[0])))


def _times(runs: Sequence[MachineRun]) -> dict[str, dict[str, float]]:
    by_case = together((case, (run.machine, seconds)) for run in runs for case, seconds in run.times.items())
    return {case: {name: median(values) for name, values in together(pairs).items()} for case, pairs in by_case.items()}


def _machines(
    seen: Sequence[MachineRun], kinds: Sequence[MachineKind], figures: Sequence[FleetFigure]
) -> Iterator[Machine]:
    overall = {name: odd.change for figure in figures if not figure.case for name, odd in figure.deviations.items()}
    for name, runs in sorted(_by_machine(seen).items()):
        yield Machine(
            name, tuple(kind.name for kind in kinds if name in kind.machines), len(runs),
            len({setting for run in runs for setting in run.whole}),
            len({case for run in runs for case in run.failed}), overall.get(name),
        )  # fmt: skip


def _by_machine(seen: Sequence[MachineRun]) -> dict[str, list[MachineRun]]:
    return together((run.machine, run) for run in seen)


def _of_software(kinds: Sequence[MachineKind]) -> Iterator[MachineAlarm]:
    """Of machines that have other software or settings than more machines of the same hardware."""
    for place, kind in enumerate(kinds):
        larger = next((other for other in kinds[:place] if other.hardware == kind.hardware), None)
        if larger is not None and len(larger.machines) > len(kind.machines):
            why = "; ".join(differences(kind.software, larger.software))
            words = f"{why}, as {len(larger.machines)} others of its hardware have it: not compared"
            yield from (MachineAlarm(machine, Oddity.SOFTWARE, words) for machine in kind.machines)


def _of_times(figures: Sequence[FleetFigure]) -> Iterator[MachineAlarm]:
    """Of machines that are odd over all cases, and else of each case in which one is."""
    overall = {(figure.kind, name) for figure in figures if not figure.case
               for name, own in figure.deviations.items() if own.odd}  # fmt: skip
    for figure in figures:
        for machine, own in figure.deviations.items():
            if not own.odd or (figure.case and (figure.kind, machine) in overall):
                continue
            what = Oddity.SLOW if own.change > 0 else Oddity.FAST
            far = f"{abs(own.score):.0f} spreads" if math.isfinite(own.score) else "while all others are alike"
            where = f"in {figure.case}" if figure.case else "in its median case"
            beside = f"beside {len(figure.deviations) - 1} others of its kind"
            yield MachineAlarm(machine, what, f"{change(1 + own.change)} time {where}, {beside} ({far})")


def of_coverage(seen: Sequence[MachineRun], expected: Collection[str]) -> Iterator[MachineAlarm]:
    """Of machines whose runs were cut off, or that have not what at least half of the others have."""
    own = _by_machine(seen)
    # Mappings, not sets: the same runs give the same words.
    whole = {machine: dict.fromkeys(setting for run in runs for setting in run.whole) for machine, runs in own.items()}
    for machine, runs in own.items():
        cut = {setting: run.run for run in runs for setting in run.cut if setting not in whole[machine]}
        if cut:
            which = shortened([f"{setting} (run {run})" for setting, run in cut.items()])
            words = f"{len(cut)} of its cells were cut off and not resumed: {which}"
            yield MachineAlarm(machine, Oddity.CUT_OFF, words)
        others = [have for name, have in whole.items() if name != machine]
        common = Counter(setting for have in others for setting in have)
        wanted = [setting for setting, count in common.items() if count > 1 and 2 * count >= len(others)]
        lacking = [setting for setting in wanted if setting not in whole[machine] and setting not in cut]
        if lacking:
            count = f"{len(lacking)} of {len(wanted)} cells"
            words = f"{count} that other machines measured are missing: {shortened(lacking)}"
            yield MachineAlarm(machine, Oddity.MISSING, words)
    for machine in sorted(set(expected) - own.keys()):
        yield MachineAlarm(machine, Oddity.MISSING, "nothing came of it")


def _of_failures(seen: Sequence[MachineRun]) -> Iterator[MachineAlarm]:
    good = {case for run in seen for case in run.times}
    for machine, runs in _by_machine(seen).items():
        failed = {case: why for run in runs for case, why in run.failed.items() if case in good}
        if failed:
            case, why = next(iter(failed.items()))
            words = f"{len(failed)} of the cases that others measured failed: {case} ({why})"
            yield MachineAlarm(machine, Oddity.FAILED, words)
