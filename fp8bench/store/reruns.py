"""How far runs of the same case lie apart on one machine, learned from runs and kept in `<store>/reruns`.

Rounds of one run share its processes, its memory and its minutes, so that their noise says nothing of the next run's.
On a machine with neighbours a 99% interval of rounds held the long run in 58% of 96 runs. What earlier runs differed by
is therefore in the interval: it is never narrower than they lie apart, nor than the rounds say. Every run that ends
adds to a file for each device with its software and settings, and the next one reads it: a few numbers a case.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from fp8bench.analysis.labels import AHEAD, disturbed_slots
from fp8bench.analysis.verdicts import best_log
from fp8bench.errors import StoreError
from fp8bench.files import locked, sealed_line, unsealed_line, write_whole
from fp8bench.model import Level, Record, Reruns, Run, Timing
from fp8bench.store.ceilings import machine_file

# Of fewer comparisons nobody knows a spread.
LEAST_FREEDOM = 4
# A case that was run a few times is taken for one like the others, with the weight of so many comparisons: few, since
# the spreads of cases lie far apart, and a run in ten falls into a mode of its process that the others were not in.
_PRIOR = 2
# Of the comparisons, in the order of their cases' variances: where a case stands that others are taken for.
_USUAL = 2 / 3
# Of the slots: where others held up more of them, a run says nothing of what quiet ones differ by.
_BUSY = 0.2
# Raised when the same runs would say something else.
_VERSION = 1
# Other code is another case.
_CODE = ("commit", "fp8bench")
# Of a reference's control over the reference.
_AA = ", A/A"


@dataclass(frozen=True)
class Seen:
    """The runs of one case: how many, the mean of the logarithms of their ratios, and the sum of squares about it."""

    runs: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def freedom(self) -> int:
        return max(0, self.runs - 1)

    def also(self, log: float) -> Seen:
        apart, runs = log - self.mean, self.runs + 1
        mean = self.mean + apart / runs
        return Seen(runs, mean, self.squares + apart * (log - mean))


def is_busy(*timings: Timing) -> bool:
    """Whether others took the processor while these were measured: such runs lie further apart."""
    slots = sum(len(timing.slots) for timing in timings)
    return sum(disturbed_slots(timing, AHEAD) for timing in timings) > _BUSY * slots


def learned(case: str, seen: Mapping[str, Seen]) -> Reruns | None:
    """What is known of a case by its own runs and by those of the others; None where that is too little."""
    own = seen.get(case, Seen())
    others = [runs for name, runs in seen.items() if name != case and runs.freedom]
    freedom = sum(other.freedom for other in others)
    if own.freedom + freedom < LEAST_FREEDOM:
        return None
    prior = min(_PRIOR, freedom)
    known = own.freedom + prior
    runs = own.runs + sum(other.runs for other in others)
    return Reruns(math.sqrt((own.squares + prior * _usual(others)) / known), known, runs)


def _usual(seen: Sequence[Seen]) -> float:
    """The variance of a case that varies more than most, where a case counts as often as it was compared.

    The mean would be that of the worst case, and no other one would have a verdict beside it; with that of the middle
    one, 89% of 73 long runs of ten cases were held on a machine with neighbours, with this one 94.5%.
    """
    variances = sorted((runs.squares / runs.freedom, runs.freedom) for runs in seen)
    reached = accumulate(freedom for _, freedom in variances)
    most = _USUAL * sum(freedom for _, freedom in variances)
    return next((variance for (variance, _), so_far in zip(variances, reached, strict=True) if so_far >= most), 0.0)


def with_reruns(records: Sequence[Record], run: Run, store: Path) -> tuple[Record, ...]:
    """The records of a group with what runs of each case differed by so far, on a machine as busy or as quiet.

    Until that is known, with what they differed by in any state: less than in a busy one, and more than nothing.
    """
    seen = _read(_path(records, run, store))

    def known(name: str) -> Reruns | None:
        alike = {other: runs for other, runs in seen.items() if other.endswith(_AA) == name.endswith(_AA)}
        state = name.rpartition("|")[2]
        same_state = {other: runs for other, runs in alike.items() if other.rpartition("|")[2] == state}
        return learned(name, same_state) or learned(name, alike)

    return tuple(
        replace(record, reruns=known(_name(record, records, run))) if record.timing is not None else record
        for record in records
    )


def add_reruns(records: Sequence[Record], run: Run, store: Path) -> None:
    """What a group came to is one run more of each case, unless rounds were too few."""
    logs = {_name(record, records, run): log for record in records if (log := _log(record, records)) is not None}
    path = _path(records, run, store)
    with contextlib.suppress(OSError, StoreError):
        if logs:
            with locked(path.parent):
                seen = _read(path)
                seen |= {name: seen.get(name, Seen()).also(log) for name, log in logs.items()}
                cases = {name: [runs.runs, runs.mean, runs.squares] for name, runs in seen.items()}
                write_whole(path, f"{sealed_line({'version': _VERSION, 'cases': cases})}\n")


def _log(record: Record, records: Sequence[Record]) -> float | None:
    """Of the ratio that a verdict would be on, of a reference that of its control; None where there is none."""
    lead = next((other for other in records if other.is_reference), None)
    if lead is None or not record.paired or Level.EMULATED in (record.support.level, lead.support.level):
        return None
    arms = [record.timing, record.paired_with or lead.timing, record.control if record.paired_with else lead.control]
    if record is lead:
        arms = [lead.control, lead.timing, None]
    if record.fresh is not None:
        arms = [record.fresh.timing, record.fresh.reference, record.fresh.control]
    own, reference, control = arms
    return best_log(own, reference, control) if own is not None and reference is not None else None


def _name(record: Record, records: Sequence[Record], run: Run) -> str:
    """What runs have in common that should say the same: case, reference, code, and whether others took the CPU.

    Two sides of the same code in the same rounds lie nearer to each other than two modes do: they are known apart.
    """
    reference = next((other for other in records if other.is_reference), record)
    timings = [other.timing for other in (record, reference) if other.timing is not None]
    state = "busy" if record.case.device.startswith("cpu") and is_busy(*timings) else "quiet"
    state += _AA * record.is_reference
    code = (str(run.environment.get(fact) or "") for fact in _CODE)
    return "|".join([record.case.id, reference.case.mode, *code, state])


def _path(records: Sequence[Record], run: Run, store: Path) -> Path:
    device = next(device_facts for device_facts in run.devices if device_facts.key == records[0].case.device)
    return store / "reruns" / machine_file(run.environment, device)


def _read(path: Path) -> dict[str, Seen]:
    try:
        content, _ = unsealed_line(path.read_bytes().strip())
        if content["version"] != _VERSION:
            return {}
        rows = content["cases"].items()
        return {str(name): Seen(int(runs), float(mean), float(squares)) for name, (runs, mean, squares) in rows}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
