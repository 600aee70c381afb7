"""Counts how often verdicts are right: slow-downs of known size in real steps, judged by the real estimator.

Each trial interleaves in the same rounds of a real worker: the reference, its control, an identical candidate (any
verdict of a difference is a false alarm), and candidates with about 1, 2.5, 5 and 10% of extra work. A comparison may
use a fixed time for its three arms, as if nothing else were measured. States are recreated every few trials, to vary
the memory layout.
"""

from __future__ import annotations

import itertools
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
from fp8bench.analysis.verdicts import best_phases, conclude, is_decided
from fp8bench.errors import UnknownName
from fp8bench.features.selftest.checks import GPU_SIDE, NATIVE, SIDE, product
from fp8bench.files import keeping, write_whole
from fp8bench.jobs.observer import JobObserver, Tell
from fp8bench.measure.arm import MeasuredArm
from fp8bench.measure.environment import gather
from fp8bench.measure.handle import ProcessWorker, Worker
from fp8bench.measure.rounds import RoundSession
from fp8bench.model import Case, DeviceFacts, Params, PlannedCase, Timing, Verdict, Work
from fp8bench.model.raw import Settings
from fp8bench.model.stopping import StoppingRule
from fp8bench.plan.corpus import prepare_corpus
from fp8bench.plan.make import device_named
from fp8bench.units import percent, seconds

OPERATIONS = ("small", "medium", "step")
EFFECTS = (0.0, 0.01, 0.025, 0.05, 0.10)
TRIALS_PER_STATE = 5
_TINY_PROBE = 200
_TINY_SECONDS = 5e-8
_SIZING_ROUNDS = 20
# Facts of the environment that are written with the figures.
_KEPT = ("machine", "system", "python", "torch", "cpu_count", "threads", "commit", "dirty")


@dataclass(frozen=True)
class Operation:
    """The operation to slow down, its name on the command line (`key`), and the seconds per comparison."""

    key: str
    name: str
    precision: str
    params: Params
    seconds: float


def operations(corpus: str, facts: DeviceFacts) -> tuple[Operation, ...]:
    """Returns two products and a transformer's step; on a core of 2023 the products take 0.3 and 2 ms."""
    if facts.accelerated:
        return (
            Operation("small", f"product of {GPU_SIDE}", "fp32", product(GPU_SIDE), 2.0),
            Operation("medium", f"product of {2 * GPU_SIDE}", "fp32", product(2 * GPU_SIDE), 2.0),
            Operation("step", "gpt2-124m step", "bf16", _transformer("gpt2-124m", 8, 1024, corpus), 10.0),
        )
    return (
        Operation("small", "product of 0.3 ms", "fp32", product(SIDE), 2.0),
        Operation("medium", "product of 2 ms", "fp32", product(480), 2.0),
        Operation("step", "nano transformer step", "bf16", _transformer("nano", 2, 96, corpus), 10.0),
    )


def _transformer(size: str, batch: int, sequence: int, corpus: str) -> Params:
    return (
        ("base", "transformer"),
        ("base.size", size),
        ("base.batch", batch),
        ("base.sequence", sequence),
        ("base.micro_batches", 2),
        ("base.checkpointing", "no"),
        ("base.compile", "no"),
        ("base.attention", "auto"),
        ("base.weights", "cached"),
        ("base.data", corpus),
    )


@dataclass(frozen=True)
class PowerOutcome:
    """One comparison: its verdict, the seconds of its three arms, and the ratio found."""

    verdict: str
    seconds: float
    rounds: int
    ratio: float
    low: float
    high: float


@dataclass
class Arms:
    """All comparisons of one operation, by planted slow-down as a share."""

    operation: str
    step_seconds: float = 0.0
    tiny_seconds: float = 0.0
    outcomes: dict[float, list[PowerOutcome]] = field(default_factory=dict)
    loads: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def extra(self, effect: float) -> int:
        """Returns the number of tiny calls that slow a call down by `effect`."""
        return round(effect * self.step_seconds / self.tiny_seconds)


@dataclass(frozen=True)
class PowerRow:
    """Figures of one operation and effect."""

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
class Power:
    """The experiment's result; `loads` are load averages, sorted."""

    rows: tuple[PowerRow, ...]
    loads: tuple[float, ...]


def run_power(
    words: Sequence[str] | None, trials: int, path: Path | None, observer: JobObserver, device: str = "cpu"
) -> Power:
    """Runs the experiment on the named operations, or all; writes figures to `path` after every trial."""
    # 1. Reject wrong words before a worker starts.
    for word in words or ():
        if word not in OPERATIONS:
            raise UnknownName("operation", word, OPERATIONS)
    with tempfile.TemporaryDirectory() as folder:
        corpus = prepare_corpus(None, Path(folder))
        with ProcessWorker(Settings(corpus=corpus.path)) as worker:
            facts = device_named(device, worker.probe())
            # 2. Write the conditions of the figures with them.
            environment = gather(worker.software(), __version__, 1)
            recorded_facts = {**{name: environment.get(name) for name in _KEPT}, "device": facts.name}
            results: list[Arms] = []
            selected = words or OPERATIONS
            chosen = [operation for operation in operations(corpus.identity, facts) if operation.key in selected]
            # 3. Measure one operation after the other; an interrupt only loses the running trial.
            for operation in chosen:
                done = tuple(results)
                with observer.counting() as tell:  # each operation has its own time left

                    def after(result: Arms, done: tuple[Arms, ...] = done, tell: Tell = tell) -> None:
                        tell(len(result.loads), trials, "trials", result.operation)
                        if path is not None:
                            _write(path, (*done, result), recorded_facts)

                    results.append(measure_power(worker, facts, operation, trials, len(results), after))
    loads = itertools.chain.from_iterable(result.loads for result in results)
    return Power(tuple(summarise(results)), tuple(sorted(loads)))


def measure_power(
    worker: Worker,
    facts: DeviceFacts,
    operation: Operation,
    trials: int,
    seed: int,
    after_trial: Callable[[Arms], None] = lambda result: None,
) -> Arms:
    start = time.monotonic()
    result = Arms(operation.name)
    # Time a tiny call: compare the step without any, and with about half as much extra work.
    result.step_seconds = bare = _best_seconds(worker, operation, facts, 0)
    probe = max(_TINY_PROBE, round(0.5 * bare / _TINY_SECONDS))
    result.tiny_seconds = max((_best_seconds(worker, operation, facts, probe) - bare) / probe, 1e-9)
    for trial in range(trials):
        # New states vary the memory layout.
        if trial % TRIALS_PER_STATE == 0:
            session = _session(operation, facts, result, trial)
            session.prepare(worker)
        _trial(worker, session, operation, result, seed + trial)
        if (trial + 1) % TRIALS_PER_STATE == 0 or trial + 1 == trials:
            session.release(worker)
        result.seconds = time.monotonic() - start
        after_trial(result)
    return result


def _arm(operation: Operation, facts: DeviceFacts, key: str, extra: int) -> MeasuredArm:
    case = Case("_planted", (*operation.params, ("extra", extra)), operation.precision, facts.key)
    return MeasuredArm(key, PlannedCase(case, NATIVE, Work()), facts)


def _best_seconds(worker: Worker, operation: Operation, facts: DeviceFacts, extra: int) -> float:
    arm = _arm(operation, facts, f"sizing-{extra}", extra)
    arm.prepare(worker)
    for number in range(_SIZING_ROUNDS):
        arm.run(worker, number)
    worker.release(arm.key)
    return sum(seconds for _, seconds in best_phases(arm.timing()))


def _session(operation: Operation, facts: DeviceFacts, result: Arms, trial: int) -> RoundSession:
    def arm(name: str, effect: float = 0.0) -> MeasuredArm:
        return _arm(operation, facts, f"{name}-{trial}", result.extra(effect))

    # Keys contain the trial, so that states of the previous one are not reused.
    return RoundSession(arm("reference"), arm("control"), [arm(f"candidate-{effect}", effect) for effect in EFFECTS])


def _trial(worker: Worker, session: RoundSession, operation: Operation, result: Arms, seed: int) -> None:
    for arm in session.arms:
        arm.slots.clear()

    # A trial takes as long as a verdict, or ends without one when its time is up.
    def judge(case: Timing, reference: Timing, control: Timing | None) -> bool:
        return is_decided(case, reference, control) or _cost(case, reference, control) >= operation.seconds

    session.run(worker, StoppingRule(budget=1e9, ceiling=1e9), judge, seed, lambda arm, share: None)
    assert session.reference is not None and session.control is not None
    reference, control = session.reference.timing(), session.control.timing()
    # All planted effects share the rounds of one reference.
    for effect, arm in zip(EFFECTS, session.candidates, strict=True):
        timing = arm.timing()
        concluded = conclude(timing, reference, control)
        assert concluded is not None
        verdict, interval = concluded.verdict, concluded.ratio
        result.outcomes.setdefault(effect, []).append(
            PowerOutcome(
                verdict.value,
                _cost(timing, reference, control),
                timing.num_rounds,
                interval.point,
                interval.low,
                interval.high,
            )
        )
    result.loads.append(os.getloadavg()[0])


def _cost(case: Timing, reference: Timing, control: Timing | None) -> float:
    """Returns the seconds that a comparison's three arms took in the candidate's rounds."""
    # The reference also ran in rounds of other candidates, which do not count here.
    rounds = {slot.round for slot in case.slots}
    slots = [*case.slots, *reference.slots, *(control.slots if control is not None else ())]
    return sum(slot.wall_seconds for slot in slots if slot.round in rounds)


def summarise(results: Sequence[Arms]) -> list[PowerRow]:
    rows: list[PowerRow] = []
    for result in results:
        rows += [_row(result.operation, effect, outcomes) for effect, outcomes in result.outcomes.items()]
    return rows


def _row(operation: str, effect: float, outcomes: Sequence[PowerOutcome]) -> PowerRow:
    count = [outcome.verdict for outcome in outcomes].count
    seconds = [outcome.seconds for outcome in outcomes]
    return PowerRow(
        operation,
        effect,
        statistics.median(outcome.ratio for outcome in outcomes) - 1,
        len(outcomes),
        count(Verdict.SLOWER),
        count(Verdict.FASTER),
        count(Verdict.SAME),
        count(Verdict.UNSURE),
        statistics.median(seconds),
        max(seconds),
    )


def power_table(power: Power) -> str:
    rows, loads = power.rows, power.loads
    load = f"load {loads[0]:.1f} to {loads[-1]:.1f}, median {loads[len(loads) // 2]:.1f}, on {os.cpu_count()} cores"
    heading = f"{'operation':<22}{'planted':>9}{'found':>8}{'trials':>8}{'slower':>8}{'faster':>8}{'same':>7}"
    lines = [
        "Injected slow-downs judged by the real estimator. `found` is the median ratio over trials; a verdict",
        "'slower' is a detection, and on 0% injected any 'faster' or 'slower' is a false alarm.",
        f"One thread; {load}.",
        "",
        heading + f"{'cannot tell':>13}{'time a verdict':>24}",
    ]
    for row in rows:
        typical, longest = seconds(row.seconds_median, 2), seconds(row.seconds_longest, 2)
        lines.append(
            f"{row.operation:<22}{percent(row.planted):>9}{percent(row.found):>8}{row.trials:>8}"
            f"{percent(row.slower / row.trials, 0):>8}{percent(row.faster / row.trials, 0):>8}"
            f"{percent(row.same / row.trials, 0):>7}{percent(row.unsure / row.trials, 0):>13}"
            f"{f'{typical} (at most {longest})':>24}"
        )
    lines.append("")
    # Without a slow-down every verdict of a difference is false; with one, 'faster' is.
    alarms = [row for row in rows if row.planted == 0]
    compared = sum(row.trials for row in rows)
    lines.append(
        f"false alarms: {sum(row.slower + row.faster for row in alarms)} of {sum(row.trials for row in alarms)} "
        f"identical pairs; wrong signs: {sum(row.wrong_signs for row in rows)} of {compared} comparisons"
    )
    return "\n".join(lines)


def _operation_value(result: Arms) -> dict[str, Any]:
    comparisons = {str(effect): list(map(_outcome_value, outcomes)) for effect, outcomes in result.outcomes.items()}
    return {
        "operation": result.operation,
        "step_seconds": result.step_seconds,
        "seconds": result.seconds,
        "tiny_calls": {str(effect): result.extra(effect) for effect in result.outcomes},
        "loads": [round(load, 2) for load in result.loads],
        "comparisons": comparisons,
    }


def _outcome_value(outcome: PowerOutcome) -> list[str | float]:
    ratios = [round(ratio, 5) for ratio in (outcome.ratio, outcome.low, outcome.high)]
    return [outcome.verdict, round(outcome.seconds, 3), outcome.rounds, *ratios]


def _write(path: Path, results: Sequence[Arms], environment: dict[str, Any]) -> None:
    """Rewrites all figures and comparisons."""
    content = {
        "environment": environment,
        "rows": [asdict(row) for row in summarise(results)],
        "operations": list(map(_operation_value, results)),
    }
    with keeping(f"--json {path}", "Name a file in a folder you may write."):
        write_whole(path, json.dumps(content, separators=(",", ":")) + "\n")
