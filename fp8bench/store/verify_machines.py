"""Whether the machines of a store are who their names say: renamed ones, copies under other names, changing GPUs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from fp8bench.model import Fault, Run
from fp8bench.store.asv.identity import Entry, from_facts
from fp8bench.store.runs.listing import REMEDY, is_collected

# What a machine that got another name keeps.
_HARDWARE = ("arch", "cpu", "num_cpu", "ram", "os")


@dataclass(frozen=True)
class Known:
    """What is kept of a run: `samples` is a digest of all its times, None where it has none."""

    id: str
    path: str
    machine: str
    entry: Entry
    started: str
    plan: str
    samples: int | None
    gpu: str | None


def known_of(run: Run) -> Known | None:
    """None of a run that names no machine."""
    identity = from_facts(run.environment.facts)
    if identity is None:
        return None
    times = tuple((one.case.id, one.timing.slots) for one in run.records if one.timing is not None)
    return Known(
        run.id, run.path, str(identity.machine["machine"]), identity.machine, run.started,
        run.fleet_plan, hash(times) if times else None,
        next((one.name for one in run.devices if one.accelerated), None),
    )  # fmt: skip


def check_machines(store: Path, runs: Collection[Known]) -> Iterator[Fault]:
    """Of runs that each count once."""
    yield from _copies(runs)
    by_hardware: dict[tuple[object, ...], list[Known]] = {}
    for run in runs:
        by_hardware.setdefault(tuple(run.entry.get(key) for key in _HARDWARE), []).append(run)
    for hardware, alike in by_hardware.items():
        if all(hardware):
            yield from _renamed(store, alike)
    yield from _gpus(store, runs)


def _copies(runs: Iterable[Known]) -> Iterator[Fault]:
    """Runs of two machines with the same times to the last nanosecond: one was never measured."""
    first: dict[int, Known] = {}
    for run in runs:
        other = first.setdefault(run.samples, run) if run.samples is not None else run
        if other.machine != run.machine:
            what = (
                f"every time in it, to the nanosecond, is that of run {other.id} of machine {other.machine} "
                f"({other.path}): one is a copy of the other under another name"
            )
            yield Fault(run.path, what, REMEDY)


def _renamed(store: Path, alike: Collection[Known]) -> Iterator[Fault]:
    """Two names for what looks like one machine: the one was used up to a day, the other from then on.

    Three machines of the same hardware are a fleet; so are two with cells of one plan, or in a collected store.
    """
    names = {run.machine for run in alike}
    plans = [{run.plan for run in alike if run.machine == name} - {""} for name in names]
    if len(names) != 2 or set.intersection(*plans) or any(is_collected(Path(run.path)) for run in alike):
        return
    in_order = [name for name, _ in groupby(sorted(alike, key=lambda run: run.started), lambda run: run.machine)]
    starts = [{run.started for run in alike if run.machine == name} for name in names]
    if len(in_order) == 2 and not set.intersection(*starts):
        old, new = in_order
        what = f"machine {new} looks like {old} under another name, which asv draws as two lines"
        remedy = (
            f'If it is one machine, put an entry for it with "machine": "{old}" into its '
            "~/.asv-machine.json, and new runs go on in the old line; `merge` joins interpreters, not machines"
        )
        yield Fault(str(store / "runs"), what, remedy, broken=False)


def _gpus(store: Path, runs: Iterable[Known]) -> Iterator[Fault]:
    """Several GPUs under one name."""
    models: dict[str, dict[str, None]] = {}
    for run in runs:
        models.setdefault(run.machine, {}).update({run.gpu: None} if run.gpu else {})
    for machine, names in models.items():
        if len(names) > 1:
            yield Fault(
                str(store / "runs"), f"the first GPU of machine {machine} was {' and '.join(map(repr, names))}: asv "
                "draws both as one line, in which a change may be the GPU's", "Where both are in use, give each a "
                "store of its own, or a machine's name in ~/.asv-machine.json", broken=False,
            )  # fmt: skip
