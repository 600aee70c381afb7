"""How much runs of the same case differ on one machine, learned from earlier runs: `<store>/reruns`.

Rounds of one run share its processes, its memory and its minutes, so their noise does not include how much the next run
will differ. On a machine with neighbours a 99% interval of rounds held the long run's value in 58% of 96 runs. So an
interval is never narrower than earlier runs differ, nor than the rounds say. Each run that ends adds a few numbers a
case to a file for its device, software and settings; the next run reads them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fp8bench.analysis.labels import AHEAD, disturbed_slots
from fp8bench.analysis.verdicts import best_log
from fp8bench.errors import StoreError
from fp8bench.files import lock_folder, read_file, sealed_line, unsealed_line, write_whole
from fp8bench.model import Level, Record, Reruns, Run, Timing
from fp8bench.store.ceilings import machine_file

# The fewest comparisons of runs from which a spread is computed.
LEAST_FREEDOM = 4
# The spread of other cases weighs as much as this many comparisons of the case itself: few, because cases differ much
# in spread, and because a run in ten falls into a mode of its process that the others were not in.
_PRIOR = 2
# The quantile of the cases' variances, by comparisons, that stands for the other cases.
_USUAL = 2 / 3
# A run counts as busy if other programs disturbed more than this share of its slots.
_BUSY = 0.2
# Raised when the same runs would give other numbers.
_VERSION = 1
# Runs of different code are not reruns.
_CODE = ("commit", "fp8bench")
# Key suffix of the A/A ratio (control over reference).
_AA = ", A/A"


@dataclass(frozen=True)
class CaseRuns:
    """The runs of a case: their number, the mean of the logarithms of their ratios, and the sum of squares about it."""

    runs: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def freedom(self) -> int:
        return max(0, self.runs - 1)

    def add(self, log: float) -> CaseRuns:
        difference, runs = log - self.mean, self.runs + 1
        mean = self.mean + difference / runs
        return CaseRuns(runs, mean, self.squares + difference * (log - mean))


def is_busy(*timings: Timing) -> bool:
    """Whether other programs took the processor while these were measured; such runs differ by more."""
    slots = sum(len(timing.slots) for timing in timings)
    return sum(disturbed_slots(timing, AHEAD) for timing in timings) > _BUSY * slots


def learn_spread(case: str, runs_by_case: Mapping[str, CaseRuns]) -> Reruns | None:
    """Returns the spread of a case, from its own runs and those of other cases; None if those are too few."""
    case_runs = runs_by_case.get(case, CaseRuns())
    similar = [runs for name, runs in runs_by_case.items() if name != case and runs.freedom]
    freedom = sum(runs.freedom for runs in similar)
    if case_runs.freedom + freedom < LEAST_FREEDOM:
        return None
    prior = min(_PRIOR, freedom)
    weight = case_runs.freedom + prior
    count = case_runs.runs + sum(runs.runs for runs in similar)
    return Reruns(math.sqrt((case_runs.squares + prior * _usual_variance(similar)) / weight), weight, count)


def _usual_variance(cases: Sequence[CaseRuns]) -> float:
    """Returns the variance of a case that varies more than most; a case weighs as much as it has comparisons.

    The mean would be the worst case's, and no other case would get a verdict. With the median, 89% of 73 long runs of
    ten cases were in the interval on a machine with neighbours; with this variance 94.5% were.
    """
    most = _USUAL * sum(runs.freedom for runs in cases)
    freedom = 0
    for variance, of_case in sorted((runs.squares / runs.freedom, runs.freedom) for runs in cases):
        freedom += of_case
        if freedom >= most:
            return variance
    return 0.0


def with_reruns(records: Sequence[Record], run: Run, store: Path) -> tuple[Record, ...]:
    """Returns the records with the spread of each case between runs, on a machine that is as busy or as quiet.

    Until that is known it is the spread in either state: less than that of busy runs, but not zero.
    """
    runs_by_case = _read(_path(records, run, store))
    result = []
    for record in records:
        if record.timing is None:
            result.append(record)
            continue
        name = _name(record, records, run)
        is_aa, state = name.endswith(_AA), name.rpartition("|")[2]
        same_kind = {case: runs for case, runs in runs_by_case.items() if case.endswith(_AA) == is_aa}
        same_state = {case: runs for case, runs in same_kind.items() if case.rpartition("|")[2] == state}
        result.append(replace(record, reruns=learn_spread(name, same_state) or learn_spread(name, same_kind)))
    return tuple(result)


def add_reruns(records: Sequence[Record], run: Run, store: Path) -> None:
    """Adds the ratios of a group to its file, if it had enough rounds."""
    logs = {}
    for record in records:
        if (log := _ratio_log(record, records)) is not None:
            logs[_name(record, records, run)] = log
    if not logs:
        return
    path = _path(records, run, store)
    with contextlib.suppress(OSError, StoreError), lock_folder(path.parent):
        runs_by_case = _read(path)
        for name, log in logs.items():
            runs_by_case[name] = runs_by_case.get(name, CaseRuns()).add(log)
        cases = {name: [runs.runs, runs.mean, runs.squares] for name, runs in runs_by_case.items()}
        write_whole(path, f"{sealed_line({'version': _VERSION, 'cases': cases})}\n")


def _ratio_log(record: Record, records: Sequence[Record]) -> float | None:
    """Returns the logarithm of the ratio that a verdict rests on, for a reference that of its control; None without
    one."""
    reference = _reference_of(records)
    if reference is None or not record.paired or Level.EMULATED in (record.support.level, reference.support.level):
        return None
    if record.fresh is not None:
        return best_log(record.fresh.timing, record.fresh.reference, record.fresh.control)
    case, base, control = record.timing, record.paired_with, record.control
    if record is reference:
        case, base, control = reference.control, reference.timing, None
    elif base is None:
        base, control = reference.timing, reference.control
    return best_log(case, base, control) if case is not None and base is not None else None


def _reference_of(records: Sequence[Record]) -> Record | None:
    return next((record for record in records if record.is_reference), None)


def _name(record: Record, records: Sequence[Record], run: Run) -> str:
    """Returns the key of comparable runs: case, reference, code, and whether the CPU was busy.

    The two entries of a reference differ less than two runs of different code do, so they have a separate key.
    """
    reference = _reference_of(records) or record
    timings = [timing for timing in (record.timing, reference.timing) if timing is not None]
    state = "busy" if record.case.device.startswith("cpu") and is_busy(*timings) else "quiet"
    state += _AA * record.is_reference
    code = (str(run.environment.get(fact) or "") for fact in _CODE)
    return "|".join([record.case.id, reference.case.mode, *code, state])


def _path(records: Sequence[Record], run: Run, store: Path) -> Path:
    device = next(device_facts for device_facts in run.devices if device_facts.key == records[0].case.device)
    return store / "reruns" / machine_file(run.environment, device)


def _read(path: Path) -> dict[str, CaseRuns]:
    try:
        content, _ = unsealed_line(read_file(path).strip())
        if content["version"] != _VERSION:
            return {}
        rows = content["cases"].items()
        return {str(name): CaseRuns(int(runs), float(mean), float(squares)) for name, (runs, mean, squares) in rows}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
