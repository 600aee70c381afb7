"""Measures what watching operators costs: `python -m suites.looking`, about a minute.

Steps with and without a watcher take turns, and the fastest of each count: with the recorder of tapes, and with the
timer of operators for shares.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from fp8bench.model import Case, DeviceFacts, Request
from fp8bench.model.raw import Settings
from fp8bench.numerics.operands import ProductWatch
from fp8bench.plan.corpus import prepare_corpus
from fp8bench.plan.make import make_plan
from fp8bench.protocols import SilentPhases
from fp8bench.registry import precisions, workloads
from fp8bench.tape.counting import counted
from fp8bench.tape.recorder import OperatorTape
from fp8bench.tape.timed_calls import OperatorTimes
from fp8bench.worker.bench import Bench
from suites.trials import least_seconds, options, say, seconds

# The most that watching may add to an operator.
MOST_SECONDS = 30e-6
_CASES = (("transformer", "fp32"), ("transformer", "fp8"), ("mlp", "bf16"))
_STEPS = 9


def recording(bench: Bench, case: Case, facts: DeviceFacts, repeats: int) -> tuple[int, float, float]:
    """Returns how many operators a step calls, the seconds that recording adds to each, and those of counting."""
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


def tapes(repeats: int) -> Iterator[float]:
    """Yields the seconds that recording adds to an operator."""
    corpus = prepare_corpus(None, Path(".fp8bench/data"))
    bench = Bench(Settings(corpus=corpus.path))
    facts = tuple(device for device in bench.probe() if device.key == "cpu")
    for suite, dtype in _CASES:
        plan = make_plan(Request(suite, (dtype,), ("cpu",)), facts, corpus.identity)
        case = next(planned.case for group in plan for planned in group.cases if planned.runs)
        count, added, counting = recording(bench, case, facts[0], repeats)
        say(f"{suite} {dtype}: {count} operators, {added * 1e6:.1f} us each; counted in {counting * 1e3:.0f} ms")
        yield added


def _blocks() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(4, 128, 256)


def _convolutions() -> tuple[nn.Module, torch.Tensor]:
    parts = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(6)]
    return nn.Sequential(nn.Conv2d(3, 16, 1), *parts), torch.randn(8, 3, 32, 32)


def looking(made: Callable[[], tuple[nn.Module, torch.Tensor]]) -> tuple[float, int]:
    """Returns the seconds that timing operators for shares adds to each, and their count."""
    torch.manual_seed(0)
    model, batch = made()
    optimizer = torch.optim.AdamW(model.parameters())
    mode = OperatorTimes([model], time.thread_time_ns)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def look() -> None:
        with mode.watching():
            step()

    plain, watched = least_seconds(1 + _STEPS, step, look)
    return (watched - plain) / len(mode.calls), len(mode.calls)


def main() -> int:
    """Ends with 1 if watching takes too long."""
    asked = options(__doc__, repeats=(30, "steps of each kind with the recorder of tapes"))
    torch.set_num_threads(1)
    costs = list(tapes(asked.repeats))
    for name, made in (("blocks", _blocks), ("convolutions", _convolutions)):
        cost, operators = looking(made)
        costs.append(cost)
        say(f"shares of {name}: {operators} operators, {cost * 1e6:.1f} us each for looking")
    say(f"at most {max(costs) * 1e6:.1f} us an operator, {MOST_SECONDS * 1e6:.0f} us are allowed")
    return int(max(costs) > MOST_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
