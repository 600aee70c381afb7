"""Learns from earlier runs how much runs of the same case differ on one machine. `<store>/reruns` has what was
learned.

The rounds of one run share processes, memory layout and time, so their noise does not show how much the next run will
differ. On a machine with other users, a 99% interval computed from rounds contained the value of a long run in only
58% of 96 runs. So an interval is made at least as wide as the differences between earlier runs, and at least as wide
as the noise of the rounds. The interval also contains the ratios of all earlier runs of the case, because a case may
have two speeds, one of them rare. Each run adds a few numbers per case to a file for its device, software and
settings, and the next run reads the file.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from fp8bench.analysis.labels import MIN_DISTURBED_RATIO, count_disturbed_slots
from fp8bench.analysis.verdicts import log_of_best_ratio
from fp8bench.errors import StoreError
from fp8bench.files import format_checksummed_line, lock_folder, parse_checksummed_line, read_file, write_whole
from fp8bench.model import Level, Record, Reruns, Run, Timing
from fp8bench.model.run import BENCH
from fp8bench.store.ceilings import ceilings_file_name

# At least this many comparisons between runs are needed to estimate how much runs differ.
MIN_RERUN_COMPARISONS = 4
# The variance of a case is averaged with the typical variance of the other cases, which counts as this many comparisons
# of runs. The weight is small because cases differ in variance, and because in one of ten runs the process is in a
# different mode than in earlier runs.
_OTHER_CASES_WEIGHT = 2
# The typical variance is this quantile of the variances of all other cases, each weighted by its number of runs minus
# one.
_VARIANCE_QUANTILE = 2 / 3
# Neither end of an interval is farther from the estimate than this multiple of the largest difference between two runs
# of one case. In the runs of reports/coverage_zen4_202611, 99.5% of the intervals then contain the ratio of the long
# run.
_MAX_INTERVAL_REACH_RATIO = 2.0
# The machine counts as busy if other programs disturbed more than this share of the timing slots.
_BUSY_SLOTS_SHARE = 0.2
# Increase this version when the same runs give different numbers.
_RERUNS_VERSION = 2
# If two runs differ in one of these facts, the second one measured different code and is not a rerun.
_CODE_VERSION_KEYS = ("commit", "imports_sha256", "fp8bench")
# The suffix of the keys of A/A ratios: the time of the control over the time of the reference.
_AA_KEY_SUFFIX = ", A/A"


@dataclass(frozen=True)
class CaseRuns:
    """Statistics of the runs of one case: their number, and four statistics of the logarithms of their ratios. These
    are the mean, the sum of the squared distances from the mean, the minimum and the maximum.
    """

    runs: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    @property
    def freedom(self) -> int:
        return max(0, self.runs - 1)

    def add(self, log_ratio: float) -> CaseRuns:
        # Welford's algorithm updates the mean and the sum of squares without the earlier ratios.
        difference, runs = log_ratio - self.mean, self.runs + 1
        mean = self.mean + difference / runs
        sum_of_squares = self.squares + difference * (log_ratio - mean)
        return CaseRuns(runs, mean, sum_of_squares, min(self.low, log_ratio), max(self.high, log_ratio))


def was_machine_busy(*timings: Timing) -> bool:
    """Returns whether other programs disturbed too large a share of the timed slots. Runs on a busy machine differ more
    from each other.
    """
    slots = sum(len(timing.slots) for timing in timings)
    return sum(count_disturbed_slots(timing, MIN_DISTURBED_RATIO) for timing in timings) > _BUSY_SLOTS_SHARE * slots


def learn_run_spread(case: str, runs_by_case: Mapping[str, CaseRuns]) -> Reruns | None:
    """Returns how much runs of a case differ, learned from earlier runs of this and of other cases. Returns None if
    there are too few earlier runs.
    """
    case_runs = runs_by_case.get(case, CaseRuns())
    other_case_summaries = [summary for name, summary in runs_by_case.items() if name != case and summary.freedom]
    other_case_degrees_of_freedom = sum(summary.freedom for summary in other_case_summaries)
    if case_runs.freedom + other_case_degrees_of_freedom < MIN_RERUN_COMPARISONS:
        return None
    typical_variance_weight = min(_OTHER_CASES_WEIGHT, other_case_degrees_of_freedom)
    weight = case_runs.freedom + typical_variance_weight
    count = case_runs.runs + sum(summary.runs for summary in other_case_summaries)
    # Average this case's variance with the typical variance, which counts as `typical_variance_weight` comparisons.
    weighted_square_sum = case_runs.squares + typical_variance_weight * _find_typical_variance(other_case_summaries)
    spread = math.sqrt(weighted_square_sum / weight)
    # With few runs, Student's t would let an interval reach much farther than any two runs were apart.
    widest_log_ratio_range = max(
        summary.high - summary.low for summary in (case_runs, *other_case_summaries) if summary.runs
    )
    return Reruns(spread, weight, count, max_reach=_MAX_INTERVAL_REACH_RATIO * widest_log_ratio_range)


def _find_typical_variance(cases: Sequence[CaseRuns]) -> float:
    """Returns the 2/3 quantile of the variances between runs of the same case. The weight of a case is its number of
    runs minus one.
    """
    # The mean would be dominated by the noisiest case, and no other case would get a verdict. On a shared machine, the
    # intervals contained the ratios of 94.5% of 73 long runs with this quantile, and of 89% with the median.
    quantile_freedom = _VARIANCE_QUANTILE * sum(runs.freedom for runs in cases)
    summed_degrees_of_freedom = 0
    for variance, case_freedom in sorted((runs.squares / runs.freedom, runs.freedom) for runs in cases):
        summed_degrees_of_freedom += case_freedom
        if summed_degrees_of_freedom >= quantile_freedom:
            return variance
    return 0.0


def add_rerun_spreads(records: Sequence[Record], run: Run, store: Path) -> tuple[Record, ...]:
    """Returns the records with the spread between earlier runs of the same case. The spread is learned from the earlier
    runs in which the machine was as busy as in this run, or from all earlier runs if these are too few.
    """
    runs_by_case = _read_case_runs(_get_reruns_path(records, run, store))
    records_with_spread = []
    for record in records:
        if record.timing is None:
            records_with_spread.append(record)
            continue
        # The key ends with the machine's load ('busy' or 'quiet'), followed by the A/A suffix for the reference.
        key = _make_rerun_key(record, records, run)
        is_aa, machine_load_suffix = key.endswith(_AA_KEY_SUFFIX), key.rpartition("|")[2]
        runs_of_comparison_kind = {
            case: runs for case, runs in runs_by_case.items() if case.endswith(_AA_KEY_SUFFIX) == is_aa
        }
        if record.case.workload != BENCH:
            # A user's callable may be anything, so the spread of its runs does not apply to fp8bench's suites.
            runs_of_comparison_kind = {
                case: runs for case, runs in runs_of_comparison_kind.items() if not case.startswith(f"{BENCH}[")
            }
        runs_at_same_load = {
            case: runs
            for case, runs in runs_of_comparison_kind.items()
            if case.rpartition("|")[2] == machine_load_suffix
        }
        reruns = learn_run_spread(key, runs_at_same_load) or learn_run_spread(key, runs_of_comparison_kind)
        if reruns is not None:
            # `low` and `high` cover all runs of this case, on a busy and on a quiet machine.
            runs_of_case = [
                runs
                for case, runs in runs_of_comparison_kind.items()
                if case.rpartition("|")[0] == key.rpartition("|")[0]
            ]
            reruns = replace(
                reruns,
                own_runs=sum(runs.runs for runs in runs_of_case),
                low=min((runs.low for runs in runs_of_case), default=math.inf),
                high=max((runs.high for runs in runs_of_case), default=-math.inf),
            )
        records_with_spread.append(replace(record, reruns=reruns))
    return tuple(records_with_spread)


def store_ratios(records: Sequence[Record], run: Run, store: Path) -> None:
    """Adds the ratios of a group's cases to the device's file in `<store>/reruns`, from which later runs learn how much
    runs differ. A case without a ratio, such as an emulated one, is left out.
    """
    log_ratio_by_key = {}
    for record in records:
        if (log_ratio := _compute_log_ratio(record, records)) is not None:
            log_ratio_by_key[_make_rerun_key(record, records, run)] = log_ratio
    if not log_ratio_by_key:
        return
    path = _get_reruns_path(records, run, store)
    # A run is valid even if its ratios cannot be stored.
    with contextlib.suppress(OSError, StoreError), lock_folder(path.parent):
        runs_by_case = _read_case_runs(path)
        for name, log_ratio in log_ratio_by_key.items():
            runs_by_case[name] = runs_by_case.get(name, CaseRuns()).add(log_ratio)
        cases = {name: astuple(runs) for name, runs in runs_by_case.items()}
        write_whole(path, f"{format_checksummed_line({'version': _RERUNS_VERSION, 'cases': cases})}\n")


def _compute_log_ratio(record: Record, records: Sequence[Record]) -> float | None:
    """Returns the logarithm of the time ratio from which the verdict of a case is computed. For the reference, this is
    the A/A ratio: the time of its control (identical code) divided by its time. Returns None if the case has no such
    ratio.
    """
    reference = _find_reference(records)
    if reference is None or not record.paired or Level.EMULATED in (record.support.level, reference.support.level):
        return None
    # The verdict on a case that was chosen as the fastest comes only from rounds after the choice (`fresh`).
    if record.fresh is not None:
        return log_of_best_ratio(record.fresh.timing, record.fresh.reference, record.fresh.control)
    timing, reference_timing, control = record.timing, reference.timing, reference.control
    if record is reference:
        timing, control = reference.control, None
    elif record.paired_with is not None:
        # The case was timed later, in rounds with other samples of the reference, so use these samples.
        reference_timing, control = record.paired_with, record.control
    return (
        log_of_best_ratio(timing, reference_timing, control)
        if timing is not None and reference_timing is not None
        else None
    )


def _find_reference(records: Sequence[Record]) -> Record | None:
    return next((record for record in records if record.is_reference), None)


def _make_rerun_key(record: Record, records: Sequence[Record], run: Run) -> str:
    """Returns a key under which comparable runs of a case are stored: case, reference, version of the code, and CPU
    load ('busy' or 'quiet').

    The A/A ratio of the reference has a separate key. It varies less than other ratios, because control and reference
    run the same code.
    """
    reference = _find_reference(records) or record
    timings = [timing for timing in (record.timing, reference.timing) if timing is not None]
    # Busy means that other programs took the CPU, so only cases on a CPU can be busy.
    machine_load_suffix = "busy" if record.case.device.startswith("cpu") and was_machine_busy(*timings) else "quiet"
    machine_load_suffix += _AA_KEY_SUFFIX * record.is_reference
    code_versions = (str(run.environment.get(key) or "") for key in _CODE_VERSION_KEYS)
    return "|".join([record.case.id, reference.case.mode, *code_versions, machine_load_suffix])


def _get_reruns_path(records: Sequence[Record], run: Run, store: Path) -> Path:
    device = next(device_facts for device_facts in run.devices if device_facts.key == records[0].case.device)
    return store / "reruns" / ceilings_file_name(run.environment, device)


def _read_case_runs(path: Path) -> dict[str, CaseRuns]:
    try:
        content, _ = parse_checksummed_line(read_file(path).strip())
        if content["version"] != _RERUNS_VERSION:
            return {}
        rows = content["cases"].items()
        return {str(name): CaseRuns(int(runs), *map(float, numbers)) for name, (runs, *numbers) in rows}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
