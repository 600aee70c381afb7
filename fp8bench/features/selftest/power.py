"""Measures how often verdicts are right: real steps are slowed down by a known amount, and the usual estimator judges
them.

Each trial interleaves several arms in the rounds of one worker: the reference, its control, an identical candidate, and
candidates with about 1, 2.5, 5 and 10% of extra work. A difference found for the identical candidate is a false alarm.
A comparison has three arms (the reference, the control and one candidate), whose seconds count towards its time limit.
States are created again every few trials, to vary the memory layout.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fp8bench import __version__
from fp8bench.analysis.verdicts import compute_best_phase_seconds, conclude_comparison, is_case_decided
from fp8bench.errors import UnknownName
from fp8bench.features.selftest.checks import CPU_SIDE, GPU_SIDE, NATIVE_SUPPORT, make_base_params, make_product_params
from fp8bench.files import convert_write_errors, write_whole
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.arm import MeasuredArm
from fp8bench.measure.environment import gather
from fp8bench.measure.handle import ProcessWorker, Worker
from fp8bench.measure.rounds import RoundSession
from fp8bench.model import Case, DeviceFacts, Params, PlannedCase, Timing, Verdict, Work
from fp8bench.model.raw import Settings
from fp8bench.model.stopping import StoppingRule
from fp8bench.plan.corpus import prepare_corpus
from fp8bench.plan.make import find_device
from fp8bench.units import percent, seconds

OPERATION_NAMES = ("small", "medium", "step")
SLOWDOWNS = (0.0, 0.01, 0.025, 0.05, 0.10)
TRIALS_PER_PREPARED_STATE = 5
_MIN_PROBE_CALLS = 200
_TINY_OPERATION_SECONDS = 5e-8
_WORK_SIZING_ROUNDS = 20
# Properties of the environment that are stored with the results.
_RECORDED_ENVIRONMENT_FACTS = ("machine", "system", "python", "torch", "cpu_count", "threads", "commit", "dirty")


@dataclass(frozen=True)
class Operation:
    """An operation that is slowed down to test verdicts. `key` is its name on the command line. `seconds` is the time
    limit of one comparison.
    """

    key: str
    name: str
    precision: str
    params: Params
    seconds: float


def list_operations(corpus: str, facts: DeviceFacts) -> tuple[Operation, ...]:
    """Returns the operations to slow down: two matrix products and a transformer's training step. On a CPU core of
    2023, the products take 0.3 and 2 ms."""
    if facts.accelerated:
        return (
            Operation("small", f"product of {GPU_SIDE}", "fp32", make_product_params(GPU_SIDE), 2.0),
            Operation("medium", f"product of {2 * GPU_SIDE}", "fp32", make_product_params(2 * GPU_SIDE), 2.0),
            Operation("step", "gpt2-124m step", "bf16", _make_transformer_params("gpt2-124m", 8, 1024, corpus), 10.0),
        )
    return (
        Operation("small", "product of 0.3 ms", "fp32", make_product_params(CPU_SIDE), 2.0),
        Operation("medium", "product of 2 ms", "fp32", make_product_params(480), 2.0),
        Operation("step", "nano transformer step", "bf16", _make_transformer_params("nano", 2, 96, corpus), 10.0),
    )


def _make_transformer_params(size: str, batch: int, sequence: int, corpus: str) -> Params:
    return make_base_params(
        "transformer",
        size=size,
        batch=batch,
        sequence=sequence,
        micro_batches=2,
        checkpointing="no",
        compile="no",
        attention="auto",
        weights="cached",
        data=corpus,
    )


@dataclass(frozen=True)
class PowerOutcome:
    """The result of one comparison: its verdict, the seconds of its three arms, and the measured ratio with its
    interval."""

    verdict: str
    seconds: float
    rounds: int
    ratio: float
    low: float
    high: float


@dataclass
class OperationResult:
    """All comparisons of one operation. `outcomes` has them by slow-down: the share by which a trial made the operation
    slower on purpose, with extra work.
    """

    operation: str
    step_seconds: float = 0.0
    tiny_call_seconds: float = 0.0
    outcomes: dict[float, list[PowerOutcome]] = field(default_factory=dict)
    loads: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def count_tiny_calls(self, effect: float) -> int:
        """Returns how many tiny calls of extra work make a step slower by the share `effect`."""
        return round(effect * self.step_seconds / self.tiny_call_seconds)


@dataclass(frozen=True)
class PowerRow:
    """The counts of verdicts for one operation and one slow-down."""

    operation: str
    planted: float
    found: float
    trials: int
    slower: int
    faster: int
    same: int
    unsure: int
    seconds_median: float
    seconds_longest: float

    @property
    def wrong_signs(self) -> int:
        return self.faster if self.planted > 0 else 0


@dataclass(frozen=True)
class PowerResult:
    """How often verdicts on injected slow-downs were right. `loads` are the load averages of the machine during the
    measurement, sorted."""

    rows: tuple[PowerRow, ...]
    loads: tuple[float, ...]


def run_power(
    names: Sequence[str] | None, trials: int, path: Path | None, observer: JobObserver, device: str = "cpu"
) -> PowerResult:
    """Measures how often verdicts are right on the named operations, or on all. Writes the figures to `path` after
    every trial.
    """
    # 1. Reject unknown operations before a worker starts.
    for word in names or ():
        if word not in OPERATION_NAMES:
            raise UnknownName("operation", word, OPERATION_NAMES)
    with tempfile.TemporaryDirectory() as folder:
        corpus = prepare_corpus(None, Path(folder))
        with ProcessWorker(Settings(corpus=corpus.path)) as worker:
            facts = find_device(device, worker.probe())
            # 2. Record the conditions under which the figures are measured.
            environment = gather(worker.software(), __version__, 1)
            recorded_facts = {
                **{name: environment.get(name) for name in _RECORDED_ENVIRONMENT_FACTS},
                "device": facts.name,
            }
            results: list[OperationResult] = []

            def measure_operation(operation: Operation) -> OperationResult:
                def report_trial(result: OperationResult) -> None:
                    tell(len(result.loads), trials, "trials", result.operation)
                    if path is not None:
                        _write_results(path, [*results, result], recorded_facts)

                with observer.counting() as tell:  # each operation shows its own remaining time
                    return measure_power(worker, facts, operation, trials, len(results), report_trial)

            # 3. Measure the operations one by one. Every trial is written to `path`, so an interrupt only loses the
            # current trial.
            for operation in list_operations(corpus.identity, facts):
                if operation.key in (names or OPERATION_NAMES):
                    results += [measure_operation(operation)]
    operation_loads: list[float] = []
    for result in results:
        operation_loads += result.loads
    return PowerResult(tuple(summarize_rows(results)), tuple(sorted(operation_loads)))


def measure_power(
    worker: Worker,
    facts: DeviceFacts,
    operation: Operation,
    trials: int,
    seed: int,
    after_trial: Callable[[OperationResult], None] = lambda result: None,
) -> OperationResult:
    """Runs `trials` trials of one operation to measure how often verdicts are right. Creates new states of the
    operation every few trials.
    """
    start_seconds = time.monotonic()
    result = OperationResult(operation.name)
    # A tiny call is too short to time alone, so compare the step with and without enough of them for about 50% extra
    # work.
    result.step_seconds = unplanted_step_seconds = _measure_best_seconds(worker, operation, facts, 0)
    added_call_count = max(_MIN_PROBE_CALLS, round(0.5 * unplanted_step_seconds / _TINY_OPERATION_SECONDS))
    probe_call_seconds = _measure_best_seconds(worker, operation, facts, added_call_count) - unplanted_step_seconds
    # Noise may make the difference 0 or negative, but `count_tiny_calls` divides by this time.
    result.tiny_call_seconds = max(probe_call_seconds / added_call_count, 1e-9)
    for trial_number in range(trials):
        # Prepare the arms again: a new memory layout may change timings.
        if trial_number % TRIALS_PER_PREPARED_STATE == 0:
            session = _make_trial_session(operation, facts, result, trial_number)
            session.prepare(worker)
        _run_power_trial(worker, session, operation, result, seed + trial_number)
        if (trial_number + 1) % TRIALS_PER_PREPARED_STATE == 0 or trial_number + 1 == trials:
            session.release_states(worker)
        result.seconds = time.monotonic() - start_seconds
        after_trial(result)
    return result


def _make_arm(operation: Operation, facts: DeviceFacts, key: str, extra: int) -> MeasuredArm:
    case = Case("_planted", (*operation.params, ("extra", extra)), operation.precision, facts.key)
    return MeasuredArm(key, PlannedCase(case, NATIVE_SUPPORT, Work()), facts)


def _measure_best_seconds(worker: Worker, operation: Operation, facts: DeviceFacts, extra: int) -> float:
    arm = _make_arm(operation, facts, f"sizing-{extra}", extra)
    arm.prepare(worker)
    for number in range(_WORK_SIZING_ROUNDS):
        arm.run(worker, number)
    worker.release(arm.key)
    return sum(seconds for _, seconds in compute_best_phase_seconds(arm.timing()))


def _make_trial_session(operation: Operation, facts: DeviceFacts, result: OperationResult, trial: int) -> RoundSession:
    def make_arm(name: str, effect: float = 0.0) -> MeasuredArm:
        return _make_arm(operation, facts, f"{name}-{trial}", result.count_tiny_calls(effect))

    # The arms' keys contain the number of the session's first trial, so that sessions do not share states.
    return RoundSession(
        make_arm("reference"), make_arm("control"), [make_arm(f"candidate-{effect}", effect) for effect in SLOWDOWNS]
    )


def _run_power_trial(
    worker: Worker, session: RoundSession, operation: Operation, result: OperationResult, seed: int
) -> None:
    # Several trials share prepared arms, but not their timings.
    for arm in session.arms:
        arm.slots.clear()

    # A trial of a candidate ends with a verdict, or without one when its time is up.
    def should_stop(case: Timing, reference: Timing, control: Timing | None) -> bool:
        return is_case_decided(case, reference, control) or _sum_seconds(case, reference, control) >= operation.seconds

    # `should_stop` sets the time limit of each candidate, so the session's time limit must never apply.
    session.run(worker, StoppingRule(budget=1e9, ceiling=1e9), should_stop, seed, lambda arm, share: None)
    assert session.reference is not None and session.control is not None
    reference, control = session.reference.timing(), session.control.timing()
    # All candidates are compared with the same reference timings.
    for effect, arm in zip(SLOWDOWNS, session.candidates, strict=True):
        timing = arm.timing()
        conclusion = conclude_comparison(timing, reference, control)
        assert conclusion is not None
        verdict, interval = conclusion.verdict, conclusion.ratio
        seconds, point_and_bounds = (
            _sum_seconds(timing, reference, control),
            (interval.point, interval.low, interval.high),
        )
        outcome = PowerOutcome(verdict.value, seconds, timing.num_rounds, *point_and_bounds)
        result.outcomes.setdefault(effect, []).append(outcome)
    # The load average shows whether other programs disturbed the trial.
    result.loads.append(os.getloadavg()[0])


def _sum_seconds(case: Timing, reference: Timing, control: Timing | None) -> float:
    """Returns the seconds of all three arms of a comparison, in the rounds in which the candidate was measured."""
    # The reference also ran in rounds without this candidate. Leave out those rounds.
    rounds = {slot.round for slot in case.slots}
    slots = [*case.slots, *reference.slots, *(control.slots if control is not None else ())]
    return sum(slot.wall_seconds for slot in slots if slot.round in rounds)


def summarize_rows(results: Sequence[OperationResult]) -> list[PowerRow]:
    rows: list[PowerRow] = []
    for result in results:
        rows += [
            _summarize_trials_of_effect(result.operation, effect, outcomes)
            for effect, outcomes in result.outcomes.items()
        ]
    return rows


def _summarize_trials_of_effect(operation: str, effect: float, outcomes: Sequence[PowerOutcome]) -> PowerRow:
    count_verdict = [outcome.verdict for outcome in outcomes].count
    seconds = [outcome.seconds for outcome in outcomes]
    return PowerRow(
        operation,
        effect,
        statistics.median(outcome.ratio for outcome in outcomes) - 1,
        len(outcomes),
        count_verdict(Verdict.SLOWER),
        count_verdict(Verdict.FASTER),
        count_verdict(Verdict.SAME),
        count_verdict(Verdict.UNSURE),
        statistics.median(seconds),
        max(seconds),
    )


# Names and widths of the columns to the right of the operation's column.
_COLUMN_WIDTHS = {"planted": 9, "found": 8, "trials": 8, "slower": 8, "faster": 8, "same": 7}
_COLUMN_WIDTHS |= {"cannot tell": 13, "time a verdict": 24}


def _format_row(operation: str, *cells: str) -> str:
    return operation.ljust(22) + "".join(map(str.rjust, cells, _COLUMN_WIDTHS.values()))


def format_power_table(power: PowerResult) -> str:
    rows, load_averages = power.rows, power.loads
    load_text = (
        f"{load_averages[0]:.1f} to {load_averages[-1]:.1f}, median {load_averages[len(load_averages) // 2]:.1f}"
    )
    lines = [
        "Injected slow-downs, judged by the usual estimator. `found` is the median ratio over trials. A verdict",
        "'slower' is a detection; if 0% is injected, 'faster' or 'slower' is a false alarm.",
        f"One thread; load {load_text}, on {os.cpu_count()} cores.",
        "",
        _format_row("operation", *_COLUMN_WIDTHS),
    ]
    for row in rows:
        counts = (row.slower, row.faster, row.same, row.unsure)
        shares = (percent(count / row.trials, 0) for count in counts)
        seconds_text = f"{seconds(row.seconds_median, 2)} (at most {seconds(row.seconds_longest, 2)})"
        cell_texts = percent(row.planted), percent(row.found), str(row.trials), *shares, seconds_text
        lines.append(_format_row(row.operation, *cell_texts))
    # A difference between identical arms is a false alarm. A slowed arm that is called "faster" has a wrong sign.
    rows_of_identical_arms = [row for row in rows if row.planted == 0]
    alarms = sum(row.slower + row.faster for row in rows_of_identical_arms)
    identical_pair_count, comparisons = (
        sum(row.trials for row in rows_of_identical_arms),
        sum(row.trials for row in rows),
    )
    wrong_sign_count = sum(row.wrong_signs for row in rows)
    false_alarms_text = f"false alarms: {alarms} of {identical_pair_count} identical pairs"
    lines += ["", f"{false_alarms_text}; wrong signs: {wrong_sign_count} of {comparisons} comparisons"]
    return "\n".join(lines)


def _encode_operation_result(result: OperationResult) -> dict[str, Any]:
    comparisons = {
        str(effect): list(map(_encode_power_outcome, outcomes)) for effect, outcomes in result.outcomes.items()
    }
    return {
        "operation": result.operation,
        "step_seconds": result.step_seconds,
        "seconds": result.seconds,
        "tiny_calls": {str(effect): result.count_tiny_calls(effect) for effect in result.outcomes},
        "loads": [round(load, 2) for load in result.loads],
        "comparisons": comparisons,
    }


def _encode_power_outcome(outcome: PowerOutcome) -> list[str | float]:
    ratio_and_bounds = [round(ratio, 5) for ratio in (outcome.ratio, outcome.low, outcome.high)]
    return [outcome.verdict, round(outcome.seconds, 3), outcome.rounds, *ratio_and_bounds]


def _write_results(path: Path, results: Sequence[OperationResult], environment: dict[str, Any]) -> None:
    """Writes all figures and comparisons until now to the file of results, and replaces what was there."""
    content = {
        "environment": environment,
        "rows": [asdict(row) for row in summarize_rows(results)],
        "operations": list(map(_encode_operation_result, results)),
    }
    with convert_write_errors(f"--json {path}", "Name a file in a folder that you may write to."):
        write_whole(path, json.dumps(content, separators=(",", ":")) + "\n")
