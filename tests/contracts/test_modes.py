"""Every mode in every workload: options of precisions are run, and not only read."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from _pytest.mark import ParameterSet

from fp8bench.devices.cpu import HostStamper
from fp8bench.model import CELL_PHASES, Case, Level, Request
from fp8bench.plan.corpus import Corpus
from fp8bench.plan.make import make_plan
from fp8bench.registry import precisions, workloads
from fp8bench.worker.bench import Bench
from fp8bench.worker.clock import PhaseStampClock
from fp8bench.worker.finite import InitialFiniteElements
from fp8bench.workloads import optimizer
from tests.counts import for_each, paired
from tests.facts import CPU

# Sizes that fill neither blocks nor rotation matrices.
SMALL = {
    "accumulate": {"width": "40", "tensors": "3", "micro_batches": "3"},
    "attention": {"part": "layer", "sequence": "20", "heads": "2", "head_width": "12", "scores": "low"},
    "cast": {"shape": "37x75", "direction": "to", "scaling": "on", "role": "gradient"},
    "conv": {"batch": "2", "channels": "24", "image": "5"},
    "data": {"kind": "transfer", "batch": "3", "record": "700"},
    "gemm": {"shape": "24x17x75", "product": "weight-gradient"},
    "mlp": {"tokens": "21", "width": "36", "hidden": "70", "gated": "yes"},
    "optimizer": {"width": "24", "tensors": "2", "fused": "yes", "second_moment": "same"},
    "transformer": {"size": "nano", "batch": "1", "sequence": "20", "checkpointing": "blocks"},
}
MODES = (
    *(name for name in precisions.names() if "recipe" in vars(precisions.get(name))),
    "fp8:formats=e5m2:weight-gradient=bf16", "fp8:accumulator=short", "fp8-delayed:history=2",
    "fp8-delayed:algorithm=most_recent:margin=2:interval=2:accumulator=promoted", "fp8-rowwise:formats=hybrid:gw=bf16",
    "fp8-block:accumulator=promoted", "fp8-block:accumulator=short:scale=exact:gw=bf16", "mxfp8:scale=floor",
    "mxfp6:formats=hybrid", "mxfp4:stochastic=on:hadamard=on", "nvfp4:weights=1d:scale=up",
    "nvfp4:hadamard=off:stochastic=off:gw=bf16", "custom:format=e3m2:scaling=row",
    "custom:scaling=none:format=e5m2fnuz",
)  # fmt: skip


def case_of(workload: str, mode: str, corpus: Corpus) -> Case:
    axes = tuple((name, (value,)) for name, value in SMALL[workload].items())
    (group,) = make_plan(Request(workload, (mode,), ("cpu",), axes=axes), (CPU,), corpus.identity).groups
    (planned,) = group.cases
    assert planned.runs and planned.support.level is Level.EMULATED, planned.skip
    return planned.case


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains a few steps; the optimizer's error needs a thousand."""
    monkeypatch.setattr(optimizer, "ERROR_STEPS", 20)


def pairs() -> Iterator[ParameterSet]:
    """Every mode in some suite, and each option of both in some pair; combinations without constants are left out."""
    for row in paired([*SMALL], MODES, *(("mlp", mode) for mode in MODES)):
        workload, mode = map(str, row.values)
        if workloads.get(workload).unit_scales or not precisions.get(mode).unit_scaled:
            yield row


@pytest.mark.parametrize(("workload", "mode"), [*pairs()])
def test_a_mode_runs_and_its_error_is_that_of_few_bits(workload: str, mode: str, corpus: Corpus, bench: Bench) -> None:
    case = case_of(workload, mode, corpus)
    one, clock = workloads.get(workload), PhaseStampClock(HostStamper())
    with precisions.get(mode).scope():
        state = one.prepare(bench._make_case_setup(case, CPU))
        known = InitialFiniteElements(state)
        for _ in range(2):
            clock.begin()
            one.step(state, clock)
            phases = {CELL_PHASES[code] for code in clock.end()[0]}
            assert "cast" in phases
        assert not known.find_lost_numbers(state).nonfinite_count
        errors = one.error(bench._make_case_setup(case, CPU))
    assert errors and all(math.isfinite(value) for value in errors.values())
    for name in ("output_error", "gradient_error", "product_error", "cast_error", "accumulate_error", "batch_error"):
        assert name not in errors or 1e-3 < errors[name] < 1.2, errors


@for_each("mode", MODES)
def test_a_mode_has_one_canonical_name(mode: str) -> None:
    precision = precisions.get(mode)
    pairs = [(option, precision.chosen[option.name]) for option in precision.options]
    for turn in range(2):
        words = [f"{(option.name, *option.aliases)[-turn]}={value}" for option, value in reversed(pairs)]
        assert precisions.find_canonical_name(":".join([precision.name, *words])) == precision.mode
    assert precisions.get(precision.mode).recipe == precision.recipe  # type: ignore[attr-defined]
