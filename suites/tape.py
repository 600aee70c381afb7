"""What a tape costs while it records, and whether the worker that records tapes changes any timed figure.

`python -m suites.tape` takes about two minutes: steps with and without the recorder in turn, by the fastest of each;
then slots of one worker, in rounds that alternate between another worker beside it that has recorded a tape and waits,
and none.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fp8bench.measure.handle import ProcessWorker
from fp8bench.model import DeviceFacts, PlannedCase, Request
from fp8bench.model.raw import Settings
from fp8bench.plan.corpus import prepare_corpus
from fp8bench.plan.make import make_plan

# The most that an operator may take while it is recorded.
MOST_SECONDS = 30e-6
_LIMIT = 300.0
_CASES = (("transformer", "fp32"), ("transformer", "fp8"), ("mlp", "bf16"))


def recording(planned: PlannedCase, facts: DeviceFacts, corpus: str, repeats: int) -> tuple[int, float, float]:
    """How many operators a step calls, views too; seconds that recording adds to each, and that counting takes."""
    import torch

    from fp8bench.numerics.operands import ProductWatch
    from fp8bench.protocols import SilentPhases
    from fp8bench.registry import precisions, workloads
    from fp8bench.tape.counting import counted
    from fp8bench.tape.recorder import OperatorTape
    from fp8bench.worker.bench import Bench

    bench = Bench(Settings(corpus=corpus))
    torch.set_num_threads(1)
    workload = workloads.get(planned.case.workload)
    with precisions.get(planned.case.precision).scope():
        state = workload.prepare(bench._setup(planned.case, facts))
        plain, taped, mode = [], [], OperatorTape()
        for _ in range(repeats):
            silent = SilentPhases()
            plain.append(_seconds(lambda silent=silent: workload.step(state, silent)))  # type: ignore[misc]
            mode = OperatorTape()
            with mode:
                taped.append(_seconds(lambda mode=mode: workload.step(state, mode.phases)))  # type: ignore[misc]
        with ProductWatch(lambda operands: None) as watch:
            workload.step(state, SilentPhases())
    return watch.operators, (min(taped) - min(plain)) / watch.operators, _seconds(lambda: counted(mode.calls))


def _seconds(run: Callable[[], object]) -> float:
    begun = time.thread_time()
    run()
    return time.thread_time() - begun


def beside(planned: PlannedCase, facts: DeviceFacts, corpus: str, rounds: int) -> list[float]:
    """Of each round, processor time of steps while a worker waits that has recorded a tape, over that without one."""
    settings, ratios = Settings(corpus=corpus), []
    with ProcessWorker(settings) as worker:
        worker.within(_LIMIT).prepare("case", planned.case, facts)

        def best() -> float:
            slots = (worker.within(_LIMIT).slot("case", 4, 0) for _ in range(5))
            return min(slot.cpu_seconds for slot in slots)

        for number in range(rounds):
            found: dict[bool, float] = {}
            for waits in (True, False) if number % 2 else (False, True):
                if waits:
                    with ProcessWorker(settings) as other:
                        other.within(_LIMIT).tape(planned.case, facts)
                        found[waits] = best()
                else:
                    found[waits] = best()
            ratios.append(found[True] / found[False])
    return ratios


def main() -> int:
    """Print both; 1 where recording takes longer than it may."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=8)
    asked = parser.parse_args()
    corpus = prepare_corpus(None, Path(".fp8bench/data"))
    with ProcessWorker(Settings()) as worker:
        facts = tuple(one for one in worker.probe() if one.key == "cpu")
    worst = 0.0
    for suite, dtype in _CASES:
        plan = make_plan(Request(suite, (dtype,), ("cpu",)), facts, corpus.identity)
        planned = next(one for group in plan for one in group.cases if one.runs)
        count, added, counting = recording(planned, facts[0], corpus.path, asked.repeats)
        worst = max(worst, added)
        sys.stdout.write(
            f"{suite} {dtype}: {count} operators, {added * 1e6:.1f} us each; counted in {counting * 1e3:.0f} ms\n"
        )
        ratios = beside(planned, facts[0], corpus.path, asked.rounds) if asked.rounds else []
        if ratios:
            middle, spread = statistics.median(ratios), statistics.quantiles(ratios, n=10)
            sys.stdout.write(
                f"  beside a worker of tapes {middle:.3f}x, 80% of rounds {spread[0]:.3f} to {spread[-1]:.3f}\n"
            )
    sys.stdout.write(f"at most {worst * 1e6:.1f} us an operator, {MOST_SECONDS * 1e6:.0f} us are allowed\n")
    return int(worst > MOST_SECONDS)


if __name__ == "__main__":
    raise SystemExit(main())
