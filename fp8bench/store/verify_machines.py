"""Whether the machines of a store are who their names say: copies under other names, changing GPUs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fp8bench.model import Fault, Run
from fp8bench.store.asv.identity import from_facts
from fp8bench.store.runs.listing import REMEDY


@dataclass(frozen=True)
class Known:
    """What is kept of a run; `samples` as `samples_of` has it."""

    id: str
    path: str
    machine: str
    samples: int | None
    gpu: str | None


def known_of(run: Run) -> Known | None:
    """None of a run that names no machine."""
    identity = from_facts(run.environment.facts)
    if identity is None:
        return None
    gpu = next((one.name for one in run.devices if one.accelerated), None)
    return Known(run.id, run.path, str(identity.machine["machine"]), samples_of(run), gpu)


def samples_of(run: Run) -> int | None:
    """A digest of all times of a run, in this process; None where it has none."""
    times = tuple((one.case.id, one.timing.slots) for one in run.records if one.timing is not None)
    return hash(times) if times else None


def check_machines(store: Path, runs: Collection[Known]) -> Iterator[Fault]:
    """Of runs that each count once."""
    yield from _copies(runs)
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
