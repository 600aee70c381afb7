"""What a tape costs while it records: `python -m suites.tape`.

Steps with and without the recorder in turn, by the fastest of each.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from fp8bench.model import Case, DeviceFacts, Request
from fp8bench.model.raw import Settings
from fp8bench.numerics.operands import ProductWatch
from fp8bench.plan.corpus import prepare_corpus
from fp8bench.plan.make import make_plan
from fp8bench.protocols import SilentPhases
from fp8bench.registry import precisions, workloads
from fp8bench.tape.counting import counted
from fp8bench.tape.recorder import OperatorTape
from fp8bench.worker.bench import Bench
from suites.trials import least_seconds, options, say, seconds

# The most that an operator may take while it is recorded.
MOST_SECONDS = 30e-6
_CASES = (("transformer", "fp32"), ("transformer", "fp8"), ("mlp", "bf16"))


def recording(bench: Bench, case: Case, facts: DeviceFacts, repeats: int) -> tuple[int, float, float]:
    """How many operators a step calls, views too; seconds that recording adds to each, and that counting takes."""
    with precisions.get(case.precision).scope():
        workload = workloads.get(case.workload)
        state = workload.prepare(bench._setup(case, facts))

        def taped() -> OperatorTape:
            with OperatorTape() as tape:
                workload.step(state, tape.phases)
            return tape

        plain, watched = least_seconds(repeats, lambda: workload.step(state, SilentPhases()), taped)
        calls = taped().calls
        with ProductWatch(lambda operands: None) as watch:
            workload.step(state, SilentPhases())
    return watch.operators, (watched - plain) / watch.operators, seconds(lambda: counted(calls))


def main() -> int:
    """1 where recording takes longer than it may."""
    repeats = options(__doc__, repeats=(30, "steps of each kind")).repeats
    torch.set_num_threads(1)
    corpus = prepare_corpus(None, Path(".fp8bench/data"))
    bench, worst = Bench(Settings(corpus=corpus.path)), 0.0
    facts = tuple(device for device in bench.probe() if device.key == "cpu")
    for suite, dtype in _CASES:
        plan = make_plan(Request(suite, (dtype,), ("cpu",)), facts, corpus.identity)
        case = next(planned.case for group in plan for planned in group.cases if planned.runs)
        count, added, counting = recording(bench, case, facts[0], repeats)
        worst = max(worst, added)
        say(f"{suite} {dtype}: {count} operators, {added * 1e6:.1f} us each; counted in {counting * 1e3:.0f} ms")
    say(f"at most {worst * 1e6:.1f} us an operator, {MOST_SECONDS * 1e6:.0f} us are allowed")
    return int(worst > MOST_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
