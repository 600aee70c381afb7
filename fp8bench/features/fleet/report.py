"""Reads the runs of a fleet from a store, and says which machines stand out and why."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
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
    deviations,
    differences,
    seen_from,
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
from fp8bench.units import change

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
            seen.append((seen_of(run, written), path, _digest_of_times(run)))
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
    wrong, doubts = _of_clocks(seen, plans)
    alarms = (
        *_of_software(kinds), *_of_times(figures), *(alarm for runs in members.values() for alarm in _of_bits(runs)),
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


def _kinds(seen: Sequence[MachineRun]) -> dict[tuple[Fields, Fields], list[MachineRun]]:
    members = together(((run.hardware, run.software), run) for run in seen)
    return dict(sorted(members.items(), key=lambda pair: (-len({run.machine for run in pair[1]}), pair[0])))


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
    """Names machines whose software or settings differ from those of more machines with the same hardware."""
    for place, kind in enumerate(kinds):
        larger = next((other for other in kinds[:place] if other.hardware == kind.hardware), None)
        if larger is not None and len(larger.machines) > len(kind.machines):
            why = "; ".join(differences(kind.software, larger.software))
            words = f"{why}, as {len(larger.machines)} others of its hardware have it: not compared"
            yield from (MachineAlarm(machine, Oddity.SOFTWARE, words) for machine in kind.machines)


def _of_times(figures: Sequence[FleetFigure]) -> Iterator[MachineAlarm]:
    """Names machines that are odd over all cases; others for each case in which they are."""
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
    """Names machines whose runs were cut off, that lack what at least half of the others have, or that sent nothing."""
    own = _by_machine(seen)
    # Mappings keep an order: the same runs give the same words.
    whole = {machine: dict.fromkeys(setting for run in runs for setting in run.whole) for machine, runs in own.items()}
    for machine, runs in own.items():
        cut = {setting: run.run for run in runs for setting in run.cut if setting not in whole[machine]}
        if cut:
            which = listed([f"{setting} (run {run})" for setting, run in cut.items()])
            words = f"{len(cut)} of its cells were cut off and not resumed: {which}"
            yield MachineAlarm(machine, Oddity.CUT_OFF, words)
        others = [have for name, have in whole.items() if name != machine]
        common = Counter(setting for have in others for setting in have)
        wanted = [setting for setting, count in common.items() if count > 1 and 2 * count >= len(others)]
        lacking = [setting for setting in wanted if setting not in whole[machine] and setting not in cut]
        if lacking:
            count = f"{len(lacking)} of {len(wanted)} cells"
            words = f"{count} that other machines measured are missing: {listed(lacking)}"
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


# A clock is wrong if it gives impossible times, or differs from a shared file system's. It is compared with the clock
# of whoever made the plan, wrote the file, or keeps the store. If most machines differ from one of these, that one is
# wrong, and no machine is named.

# Machines that are set by a time server differ by less.
CLOCK_SECONDS = 60.0
# With fewer machines there is no majority.
_LEAST_VOTERS = 3
# By how many seconds a run's clock is off, and the alarm if that is too much.
_Hit = tuple[float, MachineAlarm]


def _of_clocks(
    seen: Sequence[MachineRun], plans: Sequence[FleetPlan]
) -> tuple[tuple[MachineAlarm, ...], tuple[str, ...]]:
    """Returns each machine's worst alarm, and sentences on clocks that most machines differ from."""
    machines = {run.machine for run in seen}
    against = {
        "that of whoever made the plan": list(_before_plan(seen, plans)),
        "that of whoever wrote the files": [_began(run, run.ahead, "after its file was written") for run in seen],
    }
    doubts = [f"most machines' clocks differ from {who}: that one may be wrong"
              for who, hits in against.items() if _are_most(hits, machines)]  # fmt: skip
    hits = [hit for some in against.values() if not _are_most(some, machines) for hit in some]
    hits += _set_back(seen)
    common, of_stores = _against_stores(seen)
    if abs(common) > CLOCK_SECONDS:
        doubts.append(f"the clock of the stores' file system is {_long(common)} {_side(-common)} that of most machines")
    worst: dict[str, MachineAlarm] = {}
    for seconds, alarm in sorted((*hits, *of_stores), key=lambda hit: -hit[0]):
        if seconds > CLOCK_SECONDS:
            worst.setdefault(alarm.machine, alarm)
    return tuple(worst.values()), tuple(doubts)


def _before_plan(seen: Sequence[MachineRun], plans: Sequence[FleetPlan]) -> Iterator[_Hit]:
    made = {plan.id: datetime.fromisoformat(plan.created) for plan in plans}
    for run in seen:
        begun = made.get(run.cell.rpartition("/")[0])
        early = (begun - run.started[0]).total_seconds() if begun is not None and run.started else 0.0
        yield _began(run, early, "before its plan was made")


def _began(run: MachineRun, off: float, words: str) -> _Hit:
    words = f"run {run.run} says that it began {_long(off)} {words}: its clock is wrong, or that of the other"
    return off, MachineAlarm(run.machine, Oddity.CLOCK, words)


def _set_back(seen: Sequence[MachineRun]) -> Iterator[_Hit]:
    for run in seen:
        for before, after in pairwise(run.started):
            back = (before - after).total_seconds()
            words = f"run {run.run} says that it was gone on with {_long(back)} before it began: its clock was set"
            yield back, MachineAlarm(run.machine, Oddity.CLOCK, words)


def _against_stores(seen: Sequence[MachineRun]) -> tuple[float, list[_Hit]]:
    """Returns by how much most clocks are ahead of their stores' file systems, and how far each is from that. On a
    disk of its own a machine stamps files itself, and is not ahead."""
    known = [(run, run.clock_ahead) for run in seen if run.clock_ahead is not None]
    common = _common(together((run.machine, ahead) for run, ahead in known))
    alike = abs(common) > CLOCK_SECONDS
    hits = []
    for run, ahead in known:
        off, where = ahead - common, "that most other machines have" if alike else "of its store's file system"
        words = f"its clock was {_long(off)} {_side(off)} that {where} when run {run.run} began"
        hits.append((abs(off), MachineAlarm(run.machine, Oddity.CLOCK, words if alike else f"{words}: one is wrong")))
    return common, hits


def _common(own: Mapping[str, Sequence[float]]) -> float:
    """Returns 0 unless most machines are ahead by the same."""
    middles = [median(values) for values in own.values()]
    middle = median(middles) if len(middles) >= _LEAST_VOTERS else 0.0
    return middle if 2 * sum(abs(value - middle) <= CLOCK_SECONDS for value in middles) > len(middles) else 0.0


def _are_most(hits: Sequence[_Hit], machines: Collection[str]) -> bool:
    named = {alarm.machine for seconds, alarm in hits if seconds > CLOCK_SECONDS}
    return len(machines) >= _LEAST_VOTERS and 2 * len(named) > len(machines)


def _side(seconds: float) -> str:
    return "ahead of" if seconds > 0 else "behind"


def _long(seconds: float) -> str:
    size = abs(seconds)
    if size < 2 * CLOCK_SECONDS:
        return f"{size:.0f} seconds"
    return f"{size / 3600:.1f} hours" if size >= 3600 else f"{size / 60:.0f} minutes"


# The alarm for a machine whose bits differ: from its own, from those of most machines of its kind, or from those of
# some, with no majority.
_DISSENTS = {
    "own": (Oddity.UNSTABLE, "does not repeat its own bits for the same numbers"),
    "most": (Oddity.BITS, "gives other bits than most of its kind for the same numbers"),
    "some": (
        Oddity.BITS,
        "its bits and those of others of its kind differ, none with most on its side, so that either may be wrong",
    ),
}


def _of_bits(kind: Sequence[MachineRun]) -> Iterator[MachineAlarm]:
    """Names machines of one kind by the bits of operations and errors in all of their runs."""
    differing: dict[tuple[str, str], list[str]] = {}
    for what, by_machine in sorted(_answers(kind).items()):
        steady = {machine: next(iter(values)) for machine, values in by_machine.items() if len(values) == 1}
        for machine in by_machine.keys() - steady.keys():
            differing.setdefault((machine, "own"), []).append(what)
        votes = Counter(steady.values())
        most, count = votes.most_common(1)[0] if votes else ("", 0)
        for machine, value in steady.items():
            if len(votes) > 1 and (2 * count <= len(steady) or value != most):
                differing.setdefault((machine, "some" if 2 * count <= len(steady) else "most"), []).append(what)
    for machine in sorted({machine for machine, _ in differing}):
        for which, (oddity, words) in _DISSENTS.items():
            if whats := differing.get((machine, which)):
                yield MachineAlarm(machine, oddity, f"{words}: {listed(whats)}")


def _answers(kind: Sequence[MachineRun]) -> dict[str, dict[str, set[str]]]:
    by_machine: dict[str, dict[str, set[str]]] = {}
    for run in kind:
        answers = [
            (f"{bits.dtype} {bits.operation} on {bits.device}", bits.digests) for bits in run.bits if bits.digests
        ]
        for what, values in (*answers, *((name, (value,)) for name, value in run.errors.items())):
            by_machine.setdefault(what, {}).setdefault(run.machine, set()).update(values)
    return by_machine
