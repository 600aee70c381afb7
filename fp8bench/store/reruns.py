"""How much runs of the same case differ on one machine, learned from earlier runs: `<store>/reruns`.

Rounds of one run share its processes, its memory and its minutes, so their noise does not show how much the next run
will differ. On a machine with neighbours a 99% interval of rounds held the long run's value in 58% of 96 runs. So an
interval is never narrower than earlier runs differ, nor than the rounds say. Each run that ends adds a few numbers a
case to a file for its device, software and settings; the next run reads them.
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
from fp8bench.files import locked, read_file, sealed_line, unsealed_line, write_whole
from fp8bench.model import Level, Record, Reruns, Run, Timing
from fp8bench.store.ceilings import machine_file

# The fewest comparisons of runs from which a spread is computed.
LEAST_FREEDOM = 4
# The spread of the other cases weighs as much as so many comparisons of a case's own: few, because cases differ much in
# spread, and because a run in ten falls into a mode of its process that the others were not in.
_PRIOR = 2
# The quantile of the cases' variances, by comparisons, that stands for the other cases.
_USUAL = 2 / 3
# A run counts as busy if other programs disturbed more than this share of its slots.
_BUSY = 0.2
# Raised when the same runs would give other numbers.
_VERSION = 1
# Other code is another case.
_CODE = ("commit", "fp8bench")
# Marks the name of a reference's control over the reference.
_AA = ", A/A"


@dataclass(frozen=True)
class Seen:
    """The runs of a case: their number, the mean of the logarithms of their ratios, and the sum of squares about it."""

    runs: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def freedom(self) -> int:
        return max(0, self.runs - 1)

    def also(self, log: float) -> Seen:
        difference, runs = log - self.mean, self.runs + 1
        mean = self.mean + difference / runs
        return Seen(runs, mean, self.squares + difference * (log - mean))


def is_busy(*timings: Timing) -> bool:
    """Whether other programs took the processor while these were measured; such runs differ by more."""
    slots = sum(len(timing.slots) for timing in timings)
    return sum(disturbed_slots(timing, AHEAD) for timing in timings) > _BUSY * slots


def learned(case: str, seen: Mapping[str, Seen]) -> Reruns | None:
    """Returns the spread of a case, from its own runs and those of the others; None where those are too few."""
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
    """Returns the variance of a case that varies more than most; a case weighs as much as it has comparisons.

    The mean would be the worst case's, and no other case would get a verdict. With the median, 89% of 73 long runs of
    ten cases were in the interval on a machine with neighbours; with this variance 94.5% were.
    """
    variances = sorted((runs.squares / runs.freedom, runs.freedom) for runs in seen)
    reached = accumulate(freedom for _, freedom in variances)
    most = _USUAL * sum(freedom for _, freedom in variances)
    return next((variance for (variance, _), so_far in zip(variances, reached, strict=True) if so_far >= most), 0.0)


def with_reruns(records: Sequence[Record], run: Run, store: Path) -> tuple[Record, ...]:
    """Returns the records with the spread of each case between runs, on a machine that is as busy or as quiet.

    Until that is known it is the spread in either state: less than that of busy runs, but not zero.
    """
    seen = _read(_path(records, run, store))

    def known(name: str) -> Reruns | None:
        same_kind = {other: runs for other, runs in seen.items() if other.endswith(_AA) == name.endswith(_AA)}
        state = name.rpartition("|")[2]
        same_state = {other: runs for other, runs in same_kind.items() if other.rpartition("|")[2] == state}
        return learned(name, same_state) or learned(name, same_kind)

    return tuple(
        replace(record, reruns=known(_name(record, records, run))) if record.timing is not None else record
        for record in records
    )


def add_reruns(records: Sequence[Record], run: Run, store: Path) -> None:
    """Adds the ratios of a group to its file, where it had enough rounds."""
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
    """Returns the logarithm of the ratio that a verdict would be on, for a reference that of its control; None without
    one."""
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
    """Returns the name under which runs are put together: case, reference, code, and whether the CPU was busy.

    The two entries of a reference differ less than two runs of different code do, so they have a name of their own.
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
        content, _ = unsealed_line(read_file(path).strip())
        if content["version"] != _VERSION:
            return {}
        rows = content["cases"].items()
        return {str(name): Seen(int(runs), float(mean), float(squares)) for name, (runs, mean, squares) in rows}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
